//! Overrides are set and end while eight processes publish.

use std::collections::BTreeMap;
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context, Result};
use tierline_benchmarks::{Figures, Report};
use tokio::time::sleep;

use crate::child::{Stream, end_all};
use crate::log::{Line, What, now};
use crate::scene::{Scene, Servers, homes, print_load};

const PUBLISHERS: usize = 8;
const WORKERS: usize = 2;
/// How many of either task each publisher publishes in a second.
const EACH_SECOND: u32 = 20;
/// What is overridden, and what is not.
const MOVED: &str = "calendar.sync";
const STAYING: &str = "other";
const KNOWN: Duration = Duration::from_secs(2);
const LIMIT: Duration = Duration::from_secs(120);
/// Each process has numbers of its own.
const NUMBERS: usize = 1_000_000;

/// How an override ends.
#[derive(Debug, Clone, Copy, PartialEq)]
enum End {
    /// After the time that it was given.
    ByItself,
    ByAnOperator,
}

pub(crate) async fn measure(report: &mut Report, servers: &Servers, is_quick: bool) -> Result<()> {
    print_load("override");
    let length = Duration::from_secs(if is_quick { 6 } else { 15 });
    let columns = [
        "publishes",
        "known after, ms",
        "ended after, ms",
        "new process, ms",
    ];
    let title = format!("An override of {length:?} while {PUBLISHERS} processes publish");
    let mut figures = Figures::new(title, &columns);
    for home in homes() {
        for end in [End::ByItself, End::ByAnOperator] {
            let row = one(report, servers, home, end, length).await?;
            figures = figures.row(format!("from {home}, ended {end:?}"), &row);
        }
    }
    report.add(figures);
    Ok(())
}

fn map(home: &str) -> String {
    let other_home = if home == "postgres" {
        "quorum"
    } else {
        "postgres"
    };
    format!(
        r#"
        app = "override"
        [tiers.low]
        queue = "{home}"
        [tiers.high]
        queue = "{other_home}"
        [groups.all]
        tiers = ["high", "low"]
        concurrency = 8
        prefetch = 4
        [tasks]
        "calendar.sync" = "low"
        other = "low"
        "#
    )
}

async fn one(
    report: &mut Report,
    servers: &Servers,
    home: &str,
    end: End,
    length: Duration,
) -> Result<[f64; 4]> {
    let name = match end {
        End::ByItself => format!("override of a prefix from {home}, until its time is over"),
        End::ByAnOperator => format!("override of a task from {home}, until it is ended"),
    };
    let mut scene = Scene::set(servers, &map(home)).await?;
    let workers = scene.workers(WORKERS).await?;
    let stream = |number: usize| Stream {
        tasks: vec![MOVED.into(), STAYING.into()],
        first: number * NUMBERS,
        each_second: EACH_SECOND,
        milliseconds: 1,
    };
    let publishers = (0..PUBLISHERS).map(|number| scene.publisher(stream(number)));
    let mut publishers: Vec<_> = publishers.collect::<Result<_>>()?;
    for publisher in &publishers {
        let id = publisher.id;
        let publishes = async |scene: &mut Scene| {
            let mut lines = scene.log.read()?.iter();
            Ok(lines.any(|it| it.what == What::Sent && it.process == id))
        };
        scene
            .until("a publisher publishes", LIMIT, publishes)
            .await?;
    }
    sleep(Duration::from_secs(1)).await;

    let control = scene.app.control()?.by("ada");
    let overriding = match end {
        End::ByItself => control.override_prefix("calendar.").lasting(length),
        End::ByAnOperator => control.override_task(MOVED),
    };
    let asked = now();
    let overridden = overriding.tier("high").because("a benchmark").await?;
    let answered = now();
    sleep(length / 3).await;
    let late = scene.publisher(stream(PUBLISHERS))?;
    let late_id = late.id;
    publishers.push(late);
    let late_publishes = async |scene: &mut Scene| {
        let mut lines = scene.log.read()?.iter();
        Ok(lines.any(|it| it.what == What::Sent && it.process == late_id))
    };
    let what = "a process that began meanwhile publishes";
    scene.until(what, LIMIT, late_publishes).await?;
    let (ending, ended) = match end {
        End::ByItself => {
            let until = overridden.after.first().and_then(|it| it.until);
            let until = until.context("an override without an end")?;
            let until = until.duration_since(UNIX_EPOCH)?;
            let left = until.saturating_sub(now());
            sleep(left).await;
            (until, until)
        }
        End::ByAnOperator => {
            sleep((answered + length).saturating_sub(now())).await;
            let ending = now();
            control.end_override_task(MOVED).await?;
            (ending, now())
        }
    };
    sleep(KNOWN + length / 3).await;
    end_all(publishers).await?;
    let sent = scene.log.count(What::Sent, MOVED)? + scene.log.count(What::Sent, STAYING)?;
    let are_settled = async |scene: &mut Scene| {
        let settled = scene.log.count(What::Done, MOVED)? + scene.log.count(What::Done, STAYING)?;
        Ok(settled >= sent)
    };
    if let Err(error) = scene.until("all are settled", LIMIT, are_settled).await {
        println!("{name}: {error:#}");
    }
    end_all(workers).await?;

    let lines = scene.log.read()?;
    let publishes = |task: &'static str| {
        lines
            .iter()
            .filter(move |it| it.what == What::Sent && it.task == task)
    };
    // The time of a publish is when it began.
    let wrong = |from: Duration, to: Duration, tier: &str| {
        let within = publishes(MOVED).filter(|it| it.at >= from && it.at < to);
        within.filter(|it| it.tier != tier).count()
    };
    let not_moved = wrong(answered + KNOWN, ending, "high");
    let not_back = wrong(ended + KNOWN, Duration::MAX, "low");
    let too_early = wrong(Duration::ZERO, asked, "low");
    let strayed = publishes(STAYING).filter(|it| it.tier != "low").count();
    let lag = |from: Duration, to: Duration, tier: &str| {
        let old = publishes(MOVED).filter(|it| it.at >= from && it.at < to && it.tier == tier);
        let last = old.map(|it| it.at).max();
        last.map_or(0.0, |last| (last - from).as_secs_f64() * 1_000.0)
    };
    let (known, back) = (
        lag(answered, ending, "low"),
        lag(ended, Duration::MAX, "high"),
    );
    let first_of_late = publishes(MOVED).find(|it| it.process == late_id);
    let first_of_late = first_of_late.context("the late process has published")?;
    let late_is_known = first_of_late.tier == "high";
    // Rows that waited when the override was made may have moved: only what was published later must run where it was put.
    let ran = ran_in(lines);
    let elsewhere = publishes(MOVED).filter(|it| it.at >= answered + KNOWN);
    let elsewhere = elsewhere.filter(|it| ran.get(&it.number).is_none_or(|tier| *tier != it.tier));
    let elsewhere = elsewhere.count();
    let not_sent = lines.iter().filter(|it| it.what == What::NotSent).count();

    report.check(
        format!("{name}: every publish goes to the new tier 2 s after the answer"),
        format!("{not_moved} do not, the last after {known:.0} ms"),
        not_moved == 0 && too_early == 0,
    );
    report.check(
        format!("{name}: every publish goes to the tier of the map 2 s after the end"),
        format!("{not_back} do not, the last after {back:.0} ms"),
        not_back == 0,
    );
    report.check(
        format!("{name}: a process that begins meanwhile knows it at its first publish"),
        format!("it went to {}", first_of_late.tier),
        late_is_known,
    );
    report.check(
        format!("{name}: each runs in the tier that its receipt names, and other tasks stay"),
        format!("{elsewhere} did not, {strayed} strayed, {not_sent} not published, of {sent}"),
        elsewhere == 0 && strayed == 0 && not_sent == 0,
    );
    let late_at = (first_of_late.at - answered).as_secs_f64() * 1_000.0;
    Ok([sent as f64, known, back, late_at])
}

/// The tiers in which the overridden task ran, by its numbers.
fn ran_in(lines: &[Line]) -> BTreeMap<usize, &str> {
    let starts = lines.iter();
    let starts = starts.filter(|it| it.what == What::Start && it.task == MOVED);
    starts.map(|it| (it.number, it.tier.as_str())).collect()
}
