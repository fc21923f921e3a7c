//! What an idle worker asks of the database.

use std::time::Duration;

use anyhow::Result;
use tierline_benchmarks::{Report, processor_time};
use tokio::time::sleep;

use crate::scene::Scene;

const SECONDS: u64 = 20;

pub(crate) async fn measure(report: &mut Report) -> Result<()> {
    let scene = Scene::set(8, 16).await?;
    let (working, _starts) = scene.starts().await?;
    sleep(Duration::from_secs(15)).await;
    let transactions = async || {
        let count: i64 = sqlx::query_scalar(
            "SELECT (xact_commit + xact_rollback)::bigint FROM pg_stat_database WHERE datname = current_database()",
        )
        .fetch_one(&scene.pool)
        .await?;
        anyhow::Ok(count)
    };
    let used = || anyhow::Ok(processor_time("self")?.as_secs_f64());
    let (before, used_before) = (transactions().await?, used()?);
    sleep(Duration::from_secs(SECONDS)).await;
    // Sessions report what they did with a delay of a second; two of these questions are our own.
    let (after, used_after) = (transactions().await?, used()?);
    working.end().await?;
    let queries = (after - before - 1).max(0) as f64 / SECONDS as f64;
    let share = (used_after - used_before) / SECONDS as f64;
    report.check(
        "an idle worker: at most 2 transactions a second, less than 1 % of a core",
        format!("{queries:.2} a second, {:.2} %", share * 100.0),
        queries <= 2.0 && share < 0.01,
    );
    Ok(())
}
