//! What PgBouncer in transaction mode costs, beside a direct connection.

use anyhow::Result;
use sqlx::Executor;
use tierline_benchmarks::{Comparison, Distribution, Distributions, Report};
use tierline_testbed::PgBouncer;

use crate::latency;
use crate::scene::Scene;

const DIRECT: &str = "direct";
const BEHIND: &str = "behind PgBouncer";
/// As PgBouncer's default.
const SERVER_CONNECTIONS: u32 = 20;

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    if let Err(error) = PgBouncer::provide().await {
        println!("\nskipped what PgBouncer costs: {error:#}");
        return Ok(());
    }
    let direct = &Scene::set(8, 16).await?;
    let behind = Scene::set(8, 16).await?;
    let behind = &behind.behind_pooler(SERVER_CONNECTIONS).await?;
    drain(report, direct, behind, is_quick).await?;
    start(report, direct, behind, is_quick).await
}

async fn drain(report: &mut Report, direct: &Scene, behind: &Scene, is_quick: bool) -> Result<()> {
    let (rounds, count) = if is_quick { (3, 20_000) } else { (5, 60_000) };
    let drained = async |scene: &Scene| {
        scene.fill(count).await?;
        let tables = "VACUUM tierline.ready, tierline.running; CHECKPOINT";
        for statement in tables.split("; ") {
            scene.pool.execute(statement).await?;
        }
        let took = scene.work(count).await?;
        anyhow::Ok(count as f64 / took.as_secs_f64())
    };
    let measured = Comparison::new(
        "No-op tasks behind PgBouncer, 8 slots, prefetch 16",
        "tasks/s",
    )
    .contender(DIRECT, async || drained(direct).await)
    .contender(BEHIND, async || drained(behind).await)
    .run(rounds)
    .await?;
    if let Some(ratio) = measured.ratio(BEHIND, DIRECT) {
        println!("\nbehind PgBouncer a drain reaches {ratio:.2} of a direct one");
    }
    report.add(measured);
    Ok(())
}

/// Workers behind a pooler hear no notification: they look every second.
async fn start(report: &mut Report, direct: &Scene, behind: &Scene, is_quick: bool) -> Result<()> {
    let count = if is_quick { 40 } else { 200 };
    let mut table = Distributions::new("A task on an idle system, direct and behind PgBouncer");
    for (name, scene) in [(DIRECT, direct), (BEHIND, behind)] {
        let (commits, waits) = latency::waits(scene, count).await?;
        table = table
            .row(format!("{name}: to its commit"), Distribution::of(commits))
            .row(format!("{name}: to its start"), Distribution::of(waits));
    }
    report.add(table);
    Ok(())
}
