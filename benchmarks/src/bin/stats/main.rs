//! How long statistics take where much waits: `app.stats()` of a process that runs, and `tierline stats` from its start to its
//! end, before and after a million messages and a million rows.
//!
//! `cargo xtask bench stats [--quick] [NUMBER]`

mod scene;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tierline_benchmarks::{Distribution, Distributions, Report, folder, is_quick};
use tokio::process::Command;

use scene::Scene;

/// What was promised for `tierline stats`, its start included.
const PROMISED: Duration = Duration::from_millis(200);
/// What the broker has just said is used again for so long.
const FRESH_FOR: Duration = Duration::from_millis(250);

#[tokio::main]
async fn main() -> Result<()> {
    let number = number();
    let rounds = if is_quick() { 10 } else { 40 };
    let scene = Scene::set().await?;
    let mut report = Report::new("stats");
    let mut times = Distributions::new(format!("Statistics, {rounds} times each"));
    for (name, how) in CASES {
        let taken = measure(&scene, how, rounds).await?;
        times = times.row(format!("{name}, nothing waits"), taken);
    }
    scene.fill(number).await?;
    let what = format!("{number} rows and {number} messages");
    for (name, how) in CASES {
        let taken = measure(&scene, how, rounds).await?;
        let found = taken.quantile(0.95);
        times = times.row(format!("{name}, {what}"), taken);
        report.check(
            format!("95 of 100 times {name} takes less than {PROMISED:?} with {what}"),
            format!("{} ms", found.as_millis()),
            found < PROMISED,
        );
    }
    report.add(times);
    report.finish()
}

const CASES: [(&str, How); 3] = [
    ("app.stats()", How::Call),
    ("tierline stats", How::Process),
    ("tierline stats --management", How::Managed),
];

#[derive(Debug, Clone, Copy)]
enum How {
    Call,
    Process,
    Managed,
}

async fn measure(scene: &Scene, how: How, rounds: usize) -> Result<Distribution> {
    let mut times = Vec::new();
    for _ in 0..rounds {
        tokio::time::sleep(FRESH_FOR).await;
        let begin = Instant::now();
        match how {
            How::Call => {
                let stats = scene.app.stats().await?;
                ensure!(stats.problems.is_empty(), "{:?}", stats.problems);
            }
            How::Process => run(scene, None).await?,
            How::Managed => run(scene, Some(scene.management_url())).await?,
        }
        times.push(begin.elapsed());
    }
    Ok(Distribution::of(times))
}

/// Runs the command, which succeeds only if every question was answered.
async fn run(scene: &Scene, management: Option<String>) -> Result<()> {
    let program = program()?;
    let mut command = Command::new(&program);
    command
        .arg("stats")
        .arg(&scene.map)
        .arg("--json")
        .env("AMQP_URL", scene.amqp_url())
        .env("DATABASE_URL", scene.database_url())
        .env_remove("MANAGEMENT_URL");
    if let Some(url) = management {
        command.env("MANAGEMENT_URL", url);
    }
    let ended = command.output().await;
    let ended = ended.with_context(|| format!("cannot start {}", program.display()))?;
    let said = String::from_utf8_lossy(&ended.stdout);
    ensure!(ended.status.success(), "tierline stats failed: {said}");
    Ok(())
}

/// The command, beside this program: `cargo xtask bench stats` has built both.
fn program() -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let folder = own.parent().map_or_else(folder, PathBuf::from);
    Ok(folder.join("tierline"))
}

/// How many messages, and as many rows.
fn number() -> u64 {
    let given = std::env::args().find_map(|it| it.parse().ok());
    let usual = if is_quick() { 50_000 } else { 1_000_000 };
    given.unwrap_or(usual)
}
