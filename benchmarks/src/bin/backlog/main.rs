//! Tiers in Postgres: how fast they drain beside a plain sqlx loop, how soon a task starts, what a claim costs.
//!
//! They stay as fast with a million rows and beside a held snapshot, lose nothing when servers and workers fail, and
//! keep their order beside tiers on the broker.
//!
//! `cargo xtask bench backlog [--quick] [drain] [latency] [idle] [flat] [snapshot] [mixed] [faults] [once]
//! [peers] [pooler] [aging] [escalate] [relay] [unique] [outbox]`

mod aging;
mod drain;
mod escalate;
mod fault_worker;
mod faults;
mod flat;
mod idle;
mod latency;
mod mixed;
mod once;
mod outbox;
mod peers;
mod plain;
mod pooler;
mod relay;
mod scene;
mod snapshot;
mod stats;
mod unique;

use anyhow::Result;
use tierline_benchmarks::{Report, is_quick, is_wanted};

#[tokio::main]
async fn main() -> Result<()> {
    if fault_worker::is_worker() {
        return fault_worker::work().await;
    }
    let mut report = Report::new("backlog");
    if is_wanted("drain") {
        drain::measure(&mut report, is_quick()).await?;
    }
    if is_wanted("latency") {
        latency::measure(&mut report, is_quick()).await?;
    }
    if is_wanted("idle") {
        idle::measure(&mut report).await?;
    }
    if is_wanted("peers") {
        peers::measure(&mut report, is_quick()).await?;
    }
    if is_wanted("pooler") {
        pooler::measure(&mut report, is_quick()).await?;
    }
    if is_wanted("relay") {
        relay::measure(&mut report, is_quick()).await?;
    }
    if is_wanted("flat") {
        flat::measure(&mut report, is_quick()).await?;
    }
    if is_wanted("snapshot") {
        snapshot::measure(&mut report, is_quick()).await?;
    }
    if is_wanted("aging") {
        aging::measure(&mut report, is_quick()).await?;
    }
    if is_wanted("escalate") {
        escalate::measure(&mut report, is_quick()).await?;
    }
    if is_wanted("mixed") {
        mixed::measure(&mut report, is_quick()).await?;
    }
    if is_wanted("faults") {
        faults::measure(&mut report, is_quick()).await?;
    }
    if is_wanted("once") {
        once::measure(&mut report, is_quick()).await?;
    }
    if is_wanted("unique") {
        unique::measure(&mut report, is_quick()).await?;
    }
    if is_wanted("outbox") {
        outbox::measure(&mut report, is_quick()).await?;
    }
    report.finish()
}
