//! The database is away for a minute: what is known stays in force, and all else goes on.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Result;
use tierline_benchmarks::{Figures, Report};
use tierline_testbed::{Network, Proxy};
use tokio::time::sleep;

use crate::child::{Work, end_all};
use crate::log::{Line, What, most_in_a_second, now};
use crate::scene::{Scene, Servers, homes, print_load, starts, within};

const PROCESSES: usize = 2;
const SLOTS: usize = 8;
const RATE: usize = 40;
const RUNNING: usize = 2;
/// How long after its last round a process still starts what needs a place, and a little more.
const PLACES: Duration = Duration::from_secs(25);
const LIMIT: Duration = Duration::from_secs(120);
const MILLISECONDS: u64 = 20;
const TASKS: [&str; 5] = ["paused", "limited", "running", "other", "row"];

struct Amounts {
    before: Duration,
    away: Duration,
    after: Duration,
}

/// How the database is away.
#[derive(Debug, Clone, Copy)]
enum Away {
    /// It refuses connections.
    Stopped,
    /// It answers nothing, and closes nothing.
    Silent,
}

pub(crate) async fn measure(report: &mut Report, servers: &Servers, is_quick: bool) -> Result<()> {
    print_load("outage");
    let seconds = Duration::from_secs;
    let amounts = match is_quick {
        true => Amounts {
            before: seconds(6),
            away: seconds(35),
            after: seconds(6),
        },
        false => Amounts {
            before: seconds(15),
            away: seconds(60),
            after: seconds(15),
        },
    };
    let columns = ["limited", "running", "other", "row", "paused"];
    for home in ["quorum", "classic"] {
        if !homes().contains(&home) {
            continue;
        }
        for away in [Away::Stopped, Away::Silent] {
            let rows = one(report, servers, home, away, &amounts).await?;
            let title = format!(
                "Starts a second beside a database that is {away:?} for {:?}, {home}",
                amounts.away
            );
            let mut figures = Figures::new(title, &columns);
            for (name, row) in rows {
                figures = figures.row(name, &row);
            }
            report.add(figures);
        }
    }
    Ok(())
}

/// Each kind of work has a tier and a group of its own, so that none has the slots of another.
fn map(home: &str) -> String {
    let tier = |name: &str, more: &str| {
        format!(
            "[tiers.{name}]\nqueue = \"{home}\"\n{more}\n[groups.{name}]\ntiers = [\"{name}\"]\n\
             concurrency = {SLOTS}\nprefetch = 4\n"
        )
    };
    let tiers = [
        tier("paused", ""),
        tier(
            "limited",
            &format!("limit = {{ rate = \"{RATE}/s\", burst = 8 }}"),
        ),
        tier("running", &format!("limit = {{ running = {RUNNING} }}")),
        tier("other", ""),
        tier("row", "").replace(&format!("\"{home}\""), "\"postgres\""),
    ];
    let tasks: String = TASKS.map(|it| format!("{it} = \"{it}\"\n")).concat();
    format!("app = \"outage\"\n{}[tasks]\n{tasks}", tiers.concat())
}

type Rows = Vec<(&'static str, [f64; 5])>;

async fn one(
    report: &mut Report,
    servers: &Servers,
    home: &str,
    away: Away,
    amounts: &Amounts,
) -> Result<Rows> {
    let name = format!("database {away:?} for {:?}, {home}", amounts.away).to_lowercase();
    let proxy = Proxy::start(servers.postgres.port()).await?;
    let mut scene = Scene::set_behind(servers, &map(home), Some(&proxy)).await?;
    fill(&scene, amounts).await?;
    let control = scene.app.control()?.by("ada");
    control.pause_tier("paused").because("a benchmark").await?;
    let mut workers = scene
        .workers_of(PROCESSES, &["limited", "running", "other", "row"])
        .await?;
    scene.started("limited", RATE, LIMIT).await?;
    sleep(amounts.before).await;
    let gone = now();
    match away {
        Away::Stopped => servers.postgres.stop().await?,
        Away::Silent => proxy.set(Network::Silent),
    }
    sleep(amounts.away).await;
    let back = now();
    match away {
        Away::Stopped => servers.postgres.start().await?,
        Away::Silent => proxy.set(Network::Good),
    }
    // Connections are tried again after a pause of up to some seconds.
    let again = now();
    let recovers = async |scene: &mut Scene| {
        let lines = scene.log.read()?;
        let count = |task| starts(lines, task).iter().filter(|it| **it > again).count();
        Ok(count("running") > 10 && count("row") > 10)
    };
    let recovery = scene.until("all starts again", LIMIT, recovers).await;
    let recovered = now();
    sleep(amounts.after).await;
    let over = now();
    let has_ended = workers.iter_mut().any(|it| it.has_ended());
    let lines = scene.log.read()?;

    let all: BTreeMap<&str, Vec<Duration>> = TASKS
        .iter()
        .map(|task| (*task, starts(lines, task)))
        .collect();
    let settling = Duration::from_secs(3);
    let windows = [
        ("before", gone - amounts.before, amounts.before),
        ("away", gone + settling, back - gone - settling),
        ("after", recovered, over - recovered),
    ];
    let rates = |from: Duration, length: Duration| {
        ["limited", "running", "other", "row", "paused"]
            .map(|task| within(&all[task], from, length) as f64 / length.as_secs_f64())
    };
    let rows: Rows = windows
        .iter()
        .map(|(name, from, length)| (*name, rates(*from, *length)))
        .collect();
    let [(_, before), (_, meanwhile), (_, after)] = rows[..] else {
        anyhow::bail!("three windows");
    };
    report.check(
        format!("{name}: what is paused stays so"),
        format!("{} started", all["paused"].len()),
        all["paused"].is_empty(),
    );
    let mut limited = all["limited"].clone();
    let most = most_in_a_second(&mut limited);
    let each: Vec<f64> = workers
        .iter()
        .map(|worker| {
            let of_it = lines.iter().filter(|it| it.process == worker.id);
            let of_it: Vec<Line> = of_it.cloned().collect();
            let (_, from, length) = windows[1];
            within(&starts(&of_it, "limited"), from, length) as f64 / length.as_secs_f64()
        })
        .collect();
    report.check(
        format!("{name}: limited work keeps its rate in all, and never above"),
        format!(
            "{:.1}/s of {RATE}/s, by process {each:.1?}, at most {most} in 1 s",
            meanwhile[0]
        ),
        meanwhile[0] >= 0.9 * RATE as f64 && most <= RATE + 8,
    );
    let late = within(
        &all["running"],
        gone + PLACES,
        back.saturating_sub(gone + PLACES),
    );
    report.check(
        format!("{name}: work with a limit of those that run waits after {PLACES:?}"),
        format!("{late} started later"),
        late == 0,
    );
    let ratio = meanwhile[2] / before[2];
    report.check(
        format!("{name}: other work goes on as before, at least 0.95"),
        format!("{ratio:.2}"),
        ratio >= 0.95,
    );
    let recovery = match recovery {
        Ok(()) => format!("after {:.1} s", (recovered - again).as_secs_f64()),
        Err(error) => format!("{error:#}"),
    };
    let is_as_before = (0..4).all(|index| after[index] >= 0.85 * before[index]);
    report.check(
        format!("{name}: all goes on as before without a restart, at least 0.85"),
        format!("{recovery}, {after:.0?} a second, {before:.0?} before"),
        is_as_before && !has_ended,
    );
    let warnings = warnings(lines);
    for (warning, count) in &warnings {
        println!("  {count} × {warning}");
    }
    let most_often = warnings.values().max().copied().unwrap_or(0);
    report.check(
        format!("{name}: each process warns once of each subject"),
        format!("{} subjects, at most {most_often} times", warnings.len()),
        most_often == 1,
    );
    end_all(workers).await?;
    Ok(rows)
}

/// How often each process has warned of each subject.
fn warnings(lines: &[Line]) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for line in lines.iter().filter(|it| it.what == What::Warning) {
        let warning = format!("process {}: {}", line.process, line.about);
        *counts.entry(warning).or_default() += 1;
    }
    counts
}

async fn fill(scene: &Scene, amounts: &Amounts) -> Result<()> {
    let length = amounts.before + amounts.away + amounts.after + 2 * PLACES;
    let seconds = length.as_secs() as usize;
    let of_slots = |slots: usize| seconds * slots * 1_000 / MILLISECONDS as usize;
    for (task, count) in [
        ("paused", 100),
        ("limited", seconds * RATE),
        ("running", of_slots(RUNNING)),
        ("other", of_slots(PROCESSES * SLOTS / 4)),
        ("row", of_slots(PROCESSES * SLOTS / 4)),
    ] {
        // Fewer slots would do for these; they are to be busy all the time.
        let milliseconds = match task {
            "other" | "row" => 4 * MILLISECONDS,
            _ => MILLISECONDS,
        };
        let requests = (0..count).map(|number| {
            let work = Work {
                number,
                milliseconds,
                customer: String::new(),
            };
            work.request(task)
        });
        scene.publish(requests).await?;
    }
    Ok(())
}
