//! From the publish of a task to its start, on an idle system.

use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use tierline_benchmarks::{Distribution, Distributions, Report};
use tokio::time::sleep;

use crate::scene::{Noop, Scene};

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    let count = if is_quick { 200 } else { 2_000 };
    let scene = Scene::set(8, 16).await?;
    let (commits, waits) = waits(&scene, count).await?;
    let waits = Distribution::of(waits);
    let (p50, p99) = (waits.quantile(0.5), waits.quantile(0.99));
    let table = Distributions::new("A task in Postgres, on an idle system")
        .row("from its publish to its commit", Distribution::of(commits))
        .row("from its publish to its start", waits);
    report.add(table);
    report.check(
        "publish to start: p50 at most 2 ms, p99 at most 10 ms",
        format!("{p50:.2?}, {p99:.2?}"),
        p50 <= Duration::from_millis(2) && p99 <= Duration::from_millis(10),
    );
    Ok(())
}

/// How long each of so many tasks took from its publish to its commit, and to its start.
pub(crate) async fn waits(scene: &Scene, count: u64) -> Result<(Vec<Duration>, Vec<Duration>)> {
    let (working, mut starts) = scene.starts().await?;
    let (mut waits, mut commits) = (Vec::new(), Vec::new());
    for number in 0..count {
        let begin = SystemTime::now();
        working.app.publish(Noop::new()).await?;
        commits.push(begin.elapsed()?);
        let start = starts.recv().await.context("the worker ended")?;
        if number > 0 {
            let waited = start.duration_since(begin);
            waits.push(
                waited.with_context(|| format!("task {number} started before it was published"))?,
            );
        }
        // Not in step with anything that happens every so often.
        sleep(Duration::from_micros(10_000 + (number * 7_919) % 10_000)).await;
    }
    working.end().await?;
    Ok((commits, waits))
}
