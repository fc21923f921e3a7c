//! Strict order with a backlog: how many lower tasks start while higher ones wait.

use anyhow::Result;
use tierline_benchmarks::Report;

use crate::scene::{Scene, Start};

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    let count = if is_quick { 500 } else { 2_000 };
    println!("\nStrict order, {count} critical and {count} high waiting, 8 slots, prefetch 1:");
    println!("starts of high while critical had a backlog");
    for queue in ["classic", "quorum"] {
        for processes in [1, 2] {
            for milliseconds in [1, 5, 20] {
                let share = share(queue, processes, milliseconds, count).await?;
                let what = format!(
                    "{queue}, {processes} process(es), handlers of {milliseconds} ms: at most 0.5 %"
                );
                println!("  {what}: {:.2} %", share * 100.0);
                report.check(what, format!("{:.2} %", share * 100.0), share <= 0.005);
            }
        }
    }
    Ok(())
}

async fn share(queue: &str, processes: usize, milliseconds: u64, count: usize) -> Result<f64> {
    let scene = Scene::set(&map(queue)).await?;
    let naps = || std::iter::repeat_n(milliseconds, count);
    scene.publish("high", naps()).await?;
    scene.publish("critical", naps()).await?;
    let mut rivals = Vec::new();
    for _ in 1..processes {
        rivals.push(scene.rival().await?);
    }
    let working = scene.work();
    scene.record.until(2 * count).await?;
    working.end().await?;
    drop(rivals);
    Ok(out_of_order(&scene.record.starts(), 8 * processes))
}

/// The share of high among the starts until the last but `slots` critical: what is then left may all
/// be running, which is no backlog.
fn out_of_order(starts: &[Start], slots: usize) -> f64 {
    let critical = starts.iter().filter(|it| it.tier == "critical").count();
    let mut seen = 0;
    let mut high = 0;
    for start in starts {
        if seen + slots >= critical {
            break;
        }
        match start.tier.as_str() {
            "critical" => seen += 1,
            _ => high += 1,
        }
    }
    high as f64 / (seen + high).max(1) as f64
}

fn map(queue: &str) -> String {
    format!(
        r#"
        app = "bench"
        [tiers.critical]
        queue = "{queue}"
        [tiers.high]
        queue = "{queue}"
        [groups.urgent]
        tiers = ["critical", "high"]
        order = "strict"
        concurrency = 8
        prefetch = 1
        [tasks]
        critical = "critical"
        high = "high"
        "#
    )
}
