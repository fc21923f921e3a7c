//! Escalations while workers drain, and how soon an escalated task starts behind many others.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result};
use futures_util::{StreamExt, stream};
use serde::{Deserialize, Serialize};
use tierline::error::BacklogError;
use tierline::task::PublishRequest;
use tierline::{Error, Registry, Task, TaskId, Tierline, Topology};
use tierline_benchmarks::{Distribution, Distributions, Report};
use tierline_testbed::database;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};

use crate::scene::{Noop, Scene};

const LIMIT: Duration = Duration::from_secs(300);
/// How many escalations are under way at once while workers drain.
const AT_ONCE: usize = 8;

fn map(low: u16) -> Result<Topology> {
    let map = format!(
        r#"
        app = "bench"
        [tiers.critical]
        queue = "postgres"
        [tiers.low]
        queue = "postgres"
        [groups.all]
        tiers = ["critical"]
        concurrency = 8
        [groups.rest]
        tiers = ["low"]
        concurrency = {low}
        [tasks]
        noop = "low"
        urgent = "critical"
        "#
    );
    Ok(Topology::parse(map)?)
}

/// A task that is published straight to the higher tier.
#[derive(Serialize, Deserialize)]
struct Urgent {
    text: String,
}

impl Task for Urgent {
    const NAME: &'static str = "urgent";
}

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    drain(report, is_quick).await?;
    waits(report, is_quick).await
}

/// Tasks are escalated while 8 workers drain both tiers.
async fn drain(report: &mut Report, is_quick: bool) -> Result<()> {
    let (tasks, wanted) = if is_quick {
        (4_000, 200)
    } else {
        (20_000, 1_000)
    };
    let scene = Scene::set_on(database().await, map(1)?).await?;
    let publisher = scene.app(Registry::new()).await?;
    let ids = fill(&publisher, tasks).await?;
    let runs: Arc<Mutex<HashMap<String, Vec<String>>>> = Arc::default();
    let mut apps = Vec::new();
    let mut workers = Vec::new();
    for _ in 0..8 {
        let mut registry = Registry::new();
        let noted = runs.clone();
        registry.register::<Noop, _>(move |_: Noop, cx: tierline::Context| {
            if let Ok(mut runs) = noted.lock() {
                let of = runs.entry(cx.id().to_string()).or_default();
                of.push(cx.tier().to_owned());
            }
            sleep(Duration::from_millis(2))
        })?;
        let app = scene.app(registry).await?;
        workers.push(tokio::spawn(
            app.work(["all", "rest"])
                .without_collector()
                .until(std::future::pending()),
        ));
        apps.push(app);
    }
    let backlog = publisher.backlog()?.by("bench");
    // Those at the end, which wait for longest.
    let escalating = ids.iter().rev().take(wanted).map(|id| {
        let (backlog, id) = (backlog.clone(), id.clone());
        async move { (id.clone(), backlog.escalate(&id, "critical").await) }
    });
    let escalated: Vec<_> = stream::iter(escalating)
        .buffer_unordered(AT_ONCE)
        .collect()
        .await;
    let begin = Instant::now();
    let count = || runs.lock().map_or(0, |runs| runs.len());
    while count() < tasks {
        anyhow::ensure!(begin.elapsed() < LIMIT, "{} of {tasks} have run", count());
        sleep(Duration::from_millis(50)).await;
    }
    // Long enough for a second run to begin.
    sleep(Duration::from_secs(2)).await;
    for worker in workers {
        worker.abort();
    }
    let runs = runs
        .lock()
        .map_err(|_| anyhow::anyhow!("a handler panicked"))?
        .clone();
    let (mut moved, mut refused, mut wrong) = (0, 0, 0);
    for (id, result) in &escalated {
        let tier = match result {
            Ok(_) => {
                moved += 1;
                "critical"
            }
            Err(Error::Backlog(BacklogError::Refused { .. } | BacklogError::NotFound { .. })) => {
                refused += 1;
                "low"
            }
            Err(error) => anyhow::bail!("{error}"),
        };
        let is_right = runs
            .get(id.as_str())
            .is_some_and(|runs| runs.as_slice() == [tier]);
        wrong += usize::from(!is_right);
    }
    let twice = runs.values().filter(|runs| runs.len() > 1).count();
    report.check(
        format!("{wanted} escalations while 8 workers drain: each runs once, in one tier"),
        format!("{moved} moved, {refused} ran before; {wrong} wrong, {twice} of {tasks} ran twice"),
        wrong == 0 && twice == 0 && moved > wanted / 2,
    );
    Ok(())
}

/// The waits of escalated tasks behind many others, beside tasks that are published to the higher tier.
async fn waits(report: &mut Report, is_quick: bool) -> Result<()> {
    let (behind, count) = if is_quick {
        (10_000, 50)
    } else {
        (50_000, 500)
    };
    let scene = Scene::set_on(database().await, map(1)?).await?;
    let publisher = scene.app(Registry::new()).await?;
    let ids = fill(&publisher, behind).await?;
    let (sender, mut starts) = mpsc::unbounded_channel();
    let mut registry = Registry::new();
    let noted = sender.clone();
    registry.register::<Noop, _>(move |_: Noop, cx: tierline::Context| {
        if cx.tier() == "critical" {
            let _ = noted.send(Instant::now());
        }
        async {}
    })?;
    registry.register::<Urgent, _>(move |_: Urgent| {
        let _ = sender.send(Instant::now());
        async {}
    })?;
    // The workers of the lower tier are away: all others wait.
    let working = scene.begin(registry).await?;
    let backlog = publisher.backlog()?.by("bench");
    let (mut straight, mut calls, mut escalated) = (Vec::new(), Vec::new(), Vec::new());
    let mut seen = HashSet::new();
    for number in 0..count {
        let begin = Instant::now();
        let text = "x".repeat(240);
        publisher.publish(Urgent { text }).await?;
        straight.push(next(&mut starts).await?.saturating_duration_since(begin));
        sleep(Duration::from_micros(10_000 + (number * 7_919) % 10_000)).await;

        // Anywhere in the backlog.
        let id = &ids[(number as usize * 7_919) % ids.len()];
        anyhow::ensure!(seen.insert(id), "{id} twice");
        let begin = Instant::now();
        backlog.escalate(id, "critical").await?;
        calls.push(begin.elapsed());
        escalated.push(next(&mut starts).await?.saturating_duration_since(begin));
        sleep(Duration::from_micros(10_000 + (number * 6_113) % 10_000)).await;
    }
    working.end().await?;
    let (straight, escalated) = (Distribution::of(straight), Distribution::of(escalated));
    let quantiles = |of: &Distribution| (of.quantile(0.5), of.quantile(0.99));
    let ((p50, p99), (of_p50, of_p99)) = (quantiles(&escalated), quantiles(&straight));
    let table = Distributions::new(format!(
        "The wait for the higher tier, {behind} tasks wait in the lower one"
    ))
    .row("from a publish to the higher tier to its start", straight)
    .row(
        "from a call of escalate to its answer",
        Distribution::of(calls),
    )
    .row("from a call of escalate to the task's start", escalated);
    report.add(table);
    report.check(
        format!("an escalated task behind {behind} others starts within 20 ms (p50) and 100 ms (p99) more than one published there"),
        format!("{p50:.2?}, {p99:.2?} beside {of_p50:.2?}, {of_p99:.2?}"),
        p50 <= of_p50 + Duration::from_millis(20) && p99 <= of_p99 + Duration::from_millis(100),
    );
    Ok(())
}

async fn next(starts: &mut mpsc::UnboundedReceiver<Instant>) -> Result<Instant> {
    let start = timeout(LIMIT, starts.recv())
        .await
        .context("no task started")?;
    start.context("the worker ended")
}

async fn fill(app: &Tierline, count: usize) -> Result<Vec<TaskId>> {
    let requests = (0..count).map(|_| PublishRequest::new(&Noop::new()));
    let requests: Result<Vec<_>, _> = requests.collect();
    let mut published = std::pin::pin!(app.publish_many(stream::iter(requests?)));
    let mut ids = Vec::with_capacity(count);
    while let Some(outcome) = published.next().await {
        ids.push(outcome?.id);
    }
    Ok(ids)
}
