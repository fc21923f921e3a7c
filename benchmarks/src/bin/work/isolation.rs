//! A saturated group beside an urgent one: what the urgent one feels of it.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tierline_benchmarks::{Distribution, Distributions, Report};

use crate::arrival::Random;
use crate::scene::{Scene, request};

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    let (bulk, arrivals) = if is_quick {
        (4_000, 100)
    } else {
        (20_000, 500)
    };
    let scene = Scene::set(MAP).await?;
    let working = scene.work();
    let idle = waits(&scene, "idle", arrivals).await?;
    scene.publish("bulk", std::iter::repeat_n(50, bulk)).await?;
    let busy = waits(&scene, "busy", arrivals).await?;
    working.end().await?;
    // Most have started before their confirm is there, so the time from the publish says more.
    compare(report, "confirm", idle.from_confirm, busy.from_confirm);
    compare(report, "publish", idle.from_publish, busy.from_publish);
    Ok(())
}

fn compare(report: &mut Report, from: &str, idle: Distribution, busy: Distribution) {
    let (before, during) = (idle.quantile(0.99), busy.quantile(0.99));
    report.add(
        Distributions::new(format!("From a critical task's {from} to its start"))
            .row("idle system", idle)
            .row("bulk saturated with tasks of 50 ms", busy),
    );
    let limit = before.mul_f64(1.5).max(before + Duration::from_millis(2));
    report.check(
        format!("isolation, from {from}: p99 at most 1.5 times idle, or idle + 2 ms"),
        format!("p99 {during:.2?}, idle {before:.2?}"),
        during <= limit,
    );
}

/// How long critical tasks waited for their start.
struct Waits {
    from_publish: Distribution,
    from_confirm: Distribution,
}

async fn waits(scene: &Scene, name: &str, arrivals: usize) -> Result<Waits> {
    let publisher = scene.app.publisher();
    let mut random = Random(5);
    let mut sent = Vec::new();
    for number in 0..arrivals {
        tokio::time::sleep(Duration::from_millis(5 + random.below(10))).await;
        let id = format!("{name}-{number}");
        let published = Instant::now();
        publisher.publish(request("critical", &id, 0)).await?;
        sent.push((id, published, Instant::now()));
    }
    let (mut from_publish, mut from_confirm) = (Vec::new(), Vec::new());
    for (id, published, confirmed) in sent {
        let found = async {
            loop {
                let starts = scene.record.starts();
                if let Some(start) = starts.iter().rev().find(|it| it.id == id) {
                    return start.at;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let start = tokio::time::timeout(Duration::from_secs(30), found).await;
        let start = start.context("every critical task starts")?;
        from_publish.push(start.saturating_duration_since(published));
        from_confirm.push(start.saturating_duration_since(confirmed));
    }
    Ok(Waits {
        from_publish: Distribution::of(from_publish),
        from_confirm: Distribution::of(from_confirm),
    })
}

const MAP: &str = r#"
    app = "bench"
    [tiers.critical]
    queue = "classic"
    [tiers.bulk]
    queue = "quorum"
    [groups.urgent]
    tiers = ["critical"]
    concurrency = 8
    [groups.deferred]
    tiers = ["bulk"]
    concurrency = 4
    prefetch = 4
    [tasks]
    critical = "critical"
    bulk = "bulk"
"#;
