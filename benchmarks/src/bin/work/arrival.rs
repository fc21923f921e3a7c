//! Urgent work that arrives while all slots are busy: how soon it starts, and who starts before it.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tierline_benchmarks::{Distribution, Distributions, Report};

use crate::scene::{Scene, request};

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    let arrivals = if is_quick { 60 } else { 300 };
    let one = strict(report, ONE_GROUP, arrivals, "one group of 8 slots", true).await?;
    let own = strict(
        report,
        OWN_GROUPS,
        arrivals,
        "groups of 2 and 6 slots",
        false,
    )
    .await?;
    let (p50, p99) = (one.quantile(0.5), one.quantile(0.99));
    report.add(
        Distributions::new("From the publish of a critical task to its start, high saturated")
            .row("one group of 8 slots, strict", one)
            .row("groups of their own, 2 and 6 slots", own.clone()),
    );
    let found = format!("p50 {p50:.1?}, p99 {p99:.1?}");
    let holds = p50 <= Duration::from_micros(3_500) && p99 <= Duration::from_millis(14);
    report.check(
        "strict: p50 at most 3.5 ms, p99 at most 14 ms",
        found,
        holds,
    );
    let p50 = own.quantile(0.5);
    let holds = p50 <= Duration::from_micros(1_500);
    report.check(
        "own groups: p50 at most 1.5 ms",
        format!("{p50:.2?}"),
        holds,
    );
    in_queue(report, if is_quick { 10 } else { 30 }).await
}

/// Arrivals in a map; how many high tasks overtook an arrived critical one is checked where they
/// share slots.
async fn strict(
    report: &mut Report,
    map: &str,
    arrivals: usize,
    name: &str,
    is_shared: bool,
) -> Result<Distribution> {
    let Arrivals { waits, overtaken } = arrive(map, arrivals).await?;
    if is_shared {
        let most = overtaken.iter().max().copied().unwrap_or_default();
        let average = overtaken.iter().sum::<usize>() as f64 / arrivals as f64;
        let found = format!("at most {most}, {average:.3} on average");
        println!("  {name}: high starts between a critical's confirm and its start: {found}");
        let what = "strict: high starts before an arrived critical at most 1, 0.1 on average";
        report.check(what, found, most <= 1 && average <= 0.1);
    }
    Ok(Distribution::of(waits))
}

/// What became of critical tasks that arrived one by one.
struct Arrivals {
    /// From publish to start.
    waits: Vec<Duration>,
    /// How many high tasks started between the confirm of each and its start.
    overtaken: Vec<usize>,
}

/// Publishes a critical task every 50 ms or so, while high ones wait.
async fn arrive(map: &str, arrivals: usize) -> Result<Arrivals> {
    let scene = Scene::set(map).await?;
    let mut random = Random(7);
    let high = 5_000.max(arrivals * 30);
    let naps: Vec<_> = (0..high).map(|_| 10 + random.below(21)).collect();
    scene.publish("high", naps.into_iter()).await?;
    let working = scene.work();
    scene.record.until(100).await?;
    let publisher = scene.app.publisher();
    let mut published = Vec::new();
    for number in 0..arrivals {
        tokio::time::sleep(Duration::from_millis(40 + random.below(21))).await;
        let sent = Instant::now();
        publisher
            .publish(request("critical", &format!("critical-{number}"), 0))
            .await?;
        published.push((format!("critical-{number}"), sent, Instant::now()));
    }
    let is_over = async {
        loop {
            let starts = scene.record.starts();
            if starts.iter().filter(|it| it.tier == "critical").count() >= arrivals {
                return starts;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let starts = tokio::time::timeout(Duration::from_secs(60), is_over).await?;
    working.end().await?;
    let mut waits = Vec::new();
    let mut overtaken = Vec::new();
    for (id, sent, confirmed) in published {
        let start = starts.iter().find(|it| it.id == id);
        let start = start.context("every critical task has started")?.at;
        waits.push(start.saturating_duration_since(sent));
        let between = starts
            .iter()
            .filter(|it| it.tier == "high" && it.at > confirmed && it.at < start);
        overtaken.push(between.count());
    }
    Ok(Arrivals { waits, overtaken })
}

/// A message of a high priority behind many of a low one, in the same queue.
async fn in_queue(report: &mut Report, times: usize) -> Result<()> {
    let mut overtaken = Vec::new();
    let scene = Scene::set(CALLS).await?;
    let mut random = Random(11);
    let naps: Vec<_> = (0..500 + times * 40)
        .map(|_| 10 + random.below(21))
        .collect();
    scene.publish("calls", naps.into_iter()).await?;
    let working = scene.work();
    scene.record.until(20).await?;
    let publisher = scene.app.publisher();
    for number in 0..times {
        tokio::time::sleep(Duration::from_millis(60 + random.below(40))).await;
        let id = format!("urgent-{number}");
        let mut urgent = request("calls", &id, 0);
        urgent.priority = Some(9);
        publisher.publish(urgent).await?;
        let confirmed = Instant::now();
        let started = loop {
            let starts = scene.record.starts();
            if let Some(start) = starts.iter().find(|it| it.id == id) {
                let before = starts
                    .iter()
                    .filter(|it| it.at > confirmed && it.at < start.at);
                break before.count();
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        overtaken.push(started);
    }
    working.end().await?;
    let most = overtaken.iter().max().copied().unwrap_or_default();
    let average = overtaken.iter().sum::<usize>() as f64 / times as f64;
    let found = format!("at most {most}, {average:.2} on average");
    println!("  in-queue priority, 4 slots: lower starts before an arrived higher one: {found}");
    let what = "in-queue priority: lower starts at most 1, 0.3 on average";
    report.check(what, found, most <= 1 && average <= 0.3);
    Ok(())
}

/// The same numbers in every run.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

const ONE_GROUP: &str = r#"
    app = "bench"
    [tiers.critical]
    queue = "classic"
    [tiers.high]
    queue = "classic"
    [groups.urgent]
    tiers = ["critical", "high"]
    order = "strict"
    concurrency = 8
    prefetch = 1
    [tasks]
    critical = "critical"
    high = "high"
"#;

const OWN_GROUPS: &str = r#"
    app = "bench"
    [tiers.critical]
    queue = "classic"
    [tiers.high]
    queue = "classic"
    [groups.urgent]
    tiers = ["critical"]
    concurrency = 2
    [groups.other]
    tiers = ["high"]
    concurrency = 6
    [tasks]
    critical = "critical"
    high = "high"
"#;

const CALLS: &str = r#"
    app = "bench"
    [tiers.calls]
    queue = "classic"
    [groups.calls]
    tiers = ["calls"]
    concurrency = 4
    [tasks]
    calls = { tier = "calls", priority = 1 }
"#;
