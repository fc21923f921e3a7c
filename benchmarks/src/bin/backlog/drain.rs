//! No-op tasks a second, beside a plain sqlx loop.

use anyhow::Result;
use sqlx::Executor;
use tierline_benchmarks::{Comparison, Report};

use crate::plain;
use crate::scene::Scene;

const PLAIN: &str = "sqlx, 4 connections, 32 at a time";

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    let (rounds, count) = if is_quick { (3, 40_000) } else { (5, 120_000) };
    let scene = &Scene::set(8, 16).await?;
    let tidy = async || {
        // Vacuum of the last round's rows must not run in this one.
        let tables = "VACUUM tierline.ready, tierline.running; CHECKPOINT";
        for statement in tables.split("; ") {
            scene.pool.execute(statement).await?;
        }
        anyhow::Ok(())
    };
    let measured = Comparison::new("No-op tasks in Postgres, 8 slots, prefetch 16", "tasks/s")
        .contender(PLAIN, async || {
            plain::fill(&scene.pool, count).await?;
            scene.pool.execute("VACUUM ANALYZE plain_ready").await?;
            tidy().await?;
            plain::drain(scene.database.url(), 4, 32, count).await
        })
        .contender("tierline", async || {
            scene.fill(count).await?;
            tidy().await?;
            let took = scene.work(count).await?;
            Ok(count as f64 / took.as_secs_f64())
        })
        .at_least(0.75, PLAIN)
        .run(rounds)
        .await?;
    report.add(measured);
    Ok(())
}
