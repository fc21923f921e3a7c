//! How punctual a lone delayed task and a lone first retry are: nothing else waits, and the broker is idle.

use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result};
use futures_util::stream::StreamExt;
use serde::{Deserialize, Serialize};
use tierline::{Context, Registry, Task, TaskError, TaskOptions, Tierline, Topology};
use tierline_benchmarks::{Distribution, Distributions, Report};
use tierline_testbed::vhost;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::oneshot;

use crate::delays::{read, request};
use crate::map;

/// Delays, and through how many delay queues each leads.
const DELAYS: [(Duration, u32); 5] = [
    (Duration::from_millis(100), 1),
    (Duration::from_millis(200), 1),
    (Duration::from_millis(300), 2),
    (Duration::from_millis(700), 3),
    (Duration::from_millis(1_500), 4),
];
const LIMIT: Duration = Duration::from_secs(60);
const MEDIAN_GOAL: Duration = Duration::from_millis(60);
const P99_GOAL: Duration = Duration::from_millis(150);

#[derive(Serialize, Deserialize)]
struct Retry {
    delay: Duration,
}

impl Task for Retry {
    const NAME: &'static str = "retry";
}

const MAP: &str = r#"
    app = "bench"
    [tiers.classic]
    queue = "classic"
    [groups.all]
    tiers = ["classic"]
    concurrency = 4
    [tasks]
    retry = "classic"
"#;

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    let rounds = if is_quick { 5 } else { 25 };
    let mut table = Distributions::new("Lateness of a lone delayed message");
    for (kind, late) in [
        ("delayed task", delayed(rounds).await?),
        ("first retry", retried(rounds).await?),
    ] {
        for ((delay, hops), late) in DELAYS.iter().zip(&late) {
            let name = format!("{kind} of {delay:?}, {hops} delay queues");
            table = table.row(name, Distribution::of(late.iter().copied()));
        }
        let all = Distribution::of(late.into_iter().flatten());
        let (median, p99) = (all.quantile(0.5), all.quantile(0.99));
        report.check(
            format!("a lone {kind}: late by less than 60 ms (p50) and 150 ms (p99)"),
            format!("{median:.1?}, {p99:.1?}"),
            median < MEDIAN_GOAL && p99 < P99_GOAL,
        );
        table = table.row(format!("{kind}, all"), all);
    }
    report.add(table);
    Ok(())
}

/// By how much tasks with each delay were late, from the publish to the receipt by plain lapin.
async fn delayed(rounds: usize) -> Result<Vec<Vec<Duration>>> {
    let vhost = vhost().await;
    let app = map::connect(vhost.amqp_url()).await?;
    let (_connection, channel) = map::channel(vhost.amqp_url()).await?;
    let publisher = app.publisher();
    let mut arrivals = map::consume(&channel, "classic").await?;
    let mut late = vec![Vec::new(); DELAYS.len()];
    for _ in 0..rounds {
        for ((delay, _), late) in DELAYS.iter().zip(&mut late) {
            publisher.publish(request("classic", *delay)?).await?;
            let arrived = tokio::time::timeout(LIMIT, arrivals.next()).await?;
            let arrived = arrived.context("the consumer ended")??;
            let lateness = read(arrived, "classic")?;
            late.push(lateness.map_err(|early| anyhow::anyhow!("early by {early:?}"))?);
        }
    }
    Ok(late)
}

/// By how much first retries were late: from the first attempt, which fails at once, to the second.
async fn retried(rounds: usize) -> Result<Vec<Vec<Duration>>> {
    let vhost = vhost().await;
    let (starts, mut started) = unbounded_channel();
    let mut registry = Registry::new();
    let handler = move |task: Retry, cx: Context| {
        let _ = starts.send(SystemTime::now());
        async move {
            match cx.attempt() {
                1 => Err(TaskError::retry_after(task.delay, "not yet")),
                _ => Ok(()),
            }
        }
    };
    let options = TaskOptions::new().retries(1);
    registry.register_with::<Retry, _>(handler, options)?;
    let app = Tierline::builder(Topology::parse(MAP)?)
        .amqp(vhost.amqp_url())
        .registry(registry)
        .connect()
        .await?;
    let (stop, stopped) = oneshot::channel::<()>();
    let worker = tokio::spawn(app.work(["all"]).until(async {
        let _ = stopped.await;
    }));
    let mut late = vec![Vec::new(); DELAYS.len()];
    for _ in 0..rounds {
        for ((delay, _), late) in DELAYS.iter().zip(&mut late) {
            app.publish(Retry { delay: *delay }).await?;
            let first = next(&mut started).await?;
            let second = next(&mut started).await?;
            let waited = second.duration_since(first)?;
            late.push(waited.checked_sub(*delay).context("a retry was early")?);
        }
    }
    let _ = stop.send(());
    worker.await??;
    Ok(late)
}

async fn next(started: &mut UnboundedReceiver<SystemTime>) -> Result<SystemTime> {
    let start = tokio::time::timeout(LIMIT, started.recv()).await?;
    start.context("the worker ended")
}
