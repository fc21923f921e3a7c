//! Urgent work that arrives while all slots are busy, beside Dramatiq on the same load.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use tierline_benchmarks::{Distribution, Distributions, Report};
use tierline_testbed::{Python, vhost};

use crate::arrival::{ONE_GROUP, OWN_GROUPS, arrive};

const PEERS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/peers");

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    let (rounds, arrivals) = if is_quick { (1, 50) } else { (3, 150) };
    let python = Python::with(&Path::new(PEERS).join("requirements.txt")).await?;
    for (layout, map, name) in [
        ("one", ONE_GROUP, "8 slots for both tiers"),
        ("own", OWN_GROUPS, "2 and 6 slots"),
    ] {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            ours.extend(arrive(map, arrivals).await?.waits);
            theirs.extend(dramatiq(&python, layout, arrivals).await?);
        }
        let (ours, theirs) = (Distribution::of(ours), Distribution::of(theirs));
        for share in [0.5, 0.99] {
            let (our, their) = (ours.quantile(share), theirs.quantile(share));
            let what = format!("{name}: p{} ahead of Dramatiq", share * 100.0);
            let found = format!("{our:.1?} against {their:.1?}");
            report.check(what, found, our < their);
        }
        report.add(
            Distributions::new(format!(
                "From the publish of a critical task to its start, {name}"
            ))
            .row("tierline", ours)
            .row("Dramatiq", theirs),
        );
    }
    Ok(())
}

async fn dramatiq(python: &Python, layout: &str, arrivals: usize) -> Result<Vec<Duration>> {
    let vhost = vhost().await;
    let script = Path::new(PEERS).join("dramatiq_peer.py");
    let arrivals = arrivals.to_string();
    let printed = python
        .run(&script, &[vhost.amqp_url(), &arrivals, layout])
        .await?;
    let waits: Vec<f64> = serde_json::from_str(&printed)?;
    Ok(waits.into_iter().map(Duration::from_secs_f64).collect())
}
