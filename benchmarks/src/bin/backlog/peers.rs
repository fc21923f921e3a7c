//! No-op tasks a second beside graphile-worker, PgQueuer, procrastinate and apalis-postgres, each with the batch size that
//! serves it best here.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tierline_benchmarks::{Comparison, Report};
use tierline_testbed::{DATABASE_URL, Python, database};
use tokio::process::Command;
use tokio::time::timeout;

use crate::scene::Scene;

const OWN: &str = "tierline";
const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/peers/postgres");
const BUILD_LIMIT: Duration = Duration::from_secs(900);
const LIMIT: Duration = Duration::from_secs(300);

/// A program with the command `drain COUNT BATCH`.
struct Peer {
    name: &'static str,
    words: Vec<PathBuf>,
    /// The sizes of its batches to try.
    batches: &'static [usize],
    /// How much less it drains than tierline in a round, so that a round ends in time.
    share: usize,
}

impl Peer {
    /// Tasks a second, from the first to the last, on a database of its own.
    async fn drain(&self, count: usize, batch: usize) -> Result<f64> {
        let database = database().await;
        let [program, arguments @ ..] = &self.words[..] else {
            anyhow::bail!("{} has no program", self.name);
        };
        let mut command = Command::new(program);
        command
            .args(arguments)
            .args(["drain", &count.to_string(), &batch.to_string()])
            .env(DATABASE_URL, database.url())
            .stdin(Stdio::null())
            .kill_on_drop(true);
        let what = format!("{} with batches of {batch}", self.name);
        let ended = timeout(LIMIT, command.output()).await;
        let output = ended.with_context(|| format!("{what} took too long"))??;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{what}: {said}");
        let printed = String::from_utf8(output.stdout)?;
        let seconds: f64 = printed.trim().parse().context(printed)?;
        Ok(count as f64 / seconds)
    }

    /// The batch size with which it drains fastest.
    async fn best(&self, count: usize) -> Result<usize> {
        let mut best = (0.0, 0);
        for batch in self.batches {
            let rate = self.drain(count, *batch).await?;
            println!("{}, batches of {batch}: {rate:.0} tasks/s", self.name);
            if rate > best.0 {
                best = (rate, *batch);
            }
        }
        Ok(best.1)
    }
}

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    let (rounds, count) = if is_quick { (1, 20_000) } else { (3, 100_000) };
    let python = Python::with(&Path::new(FOLDER).join("requirements.txt")).await?;
    let peers = [
        Peer {
            name: "graphile-worker",
            words: vec!["node".into(), install_node().await?],
            batches: &[0, 50, 200, 500],
            share: 2,
        },
        Peer {
            name: "PgQueuer",
            words: vec![python.program(), Path::new(FOLDER).join("pgqueuer_peer.py")],
            batches: &[10, 100, 500],
            share: 4,
        },
        Peer {
            name: "procrastinate",
            words: vec![
                python.program(),
                Path::new(FOLDER).join("procrastinate_peer.py"),
            ],
            batches: &[1, 8, 30],
            share: 100,
        },
        Peer {
            name: "apalis-postgres",
            words: vec![build_apalis().await?],
            batches: &[10, 100, 500],
            share: 10,
        },
    ];
    let scene = &Scene::set(8, 16).await?;
    let mut comparison = Comparison::new("No-op tasks in Postgres, 8 at once", "tasks/s")
        .contender(OWN, async || {
            scene.fill(count).await?;
            let took = scene.work(count).await?;
            Ok(count as f64 / took.as_secs_f64())
        });
    let mut names = Vec::new();
    for peer in &peers {
        let count = count / peer.share;
        let batch = peer.best((count / 4).max(500)).await?;
        names.push(format!("{}, batches of {batch}", peer.name));
        let name = names.last().cloned().unwrap_or_default();
        comparison = comparison.contender(name, async move || peer.drain(count, batch).await);
    }
    let measured = comparison.run(rounds).await?;
    for name in names {
        let ratio = measured.least_ratio(OWN, &name).unwrap_or_default();
        let what = format!("{OWN} drains faster than {name} in each round");
        report.check(what, format!("{ratio:.2} times at least"), ratio > 1.0);
    }
    report.add(measured);
    Ok(())
}

/// Installs the packages of graphile-worker into a folder of the build, and returns its program there.
async fn install_node() -> Result<PathBuf> {
    let folder = target("node-peers");
    std::fs::create_dir_all(&folder)?;
    for file in ["package.json", "graphile.mjs"] {
        std::fs::copy(Path::new(FOLDER).join(file), folder.join(file))?;
    }
    let mut install = Command::new("npm");
    install
        .args(["install", "--silent", "--no-audit", "--no-fund"])
        .current_dir(&folder);
    build("graphile-worker", install).await?;
    Ok(folder.join("graphile.mjs"))
}

async fn build_apalis() -> Result<PathBuf> {
    let target = target("apalis-postgres");
    let mut cargo = Command::new("cargo");
    cargo
        .args(["build", "--release", "--quiet", "--manifest-path"])
        .arg(Path::new(FOLDER).join("apalis/Cargo.toml"))
        .arg("--target-dir")
        .arg(&target)
        // Its queries are checked against what it was released with, not against the database of this run.
        .env("SQLX_OFFLINE", "true")
        .env_remove(DATABASE_URL);
    build("apalis-postgres", cargo).await?;
    Ok(target.join("release/apalis-postgres-peer"))
}

fn target(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../target")
        .join(folder)
}

async fn build(peer: &str, mut command: Command) -> Result<()> {
    let built = timeout(BUILD_LIMIT, command.kill_on_drop(true).status()).await;
    let built = built.with_context(|| format!("{peer} took too long to build"))?;
    let built = built.with_context(|| format!("cannot start the build of {peer}"))?;
    ensure!(built.success(), "{peer} cannot be built");
    Ok(())
}
