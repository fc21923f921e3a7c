//! Publishing beside plain lapin; how punctual delays are; how much memory a long stream takes.
//!
//! `cargo xtask bench publish [--quick]`

mod delays;
mod map;
mod memory;
mod throughput;

use anyhow::Result;
use tierline_benchmarks::{Report, is_quick};
use tierline_testbed::vhost;

#[tokio::main]
async fn main() -> Result<()> {
    if let Some(url) = memory::child_url() {
        return memory::publish(&url).await;
    }
    let is_quick = is_quick();
    let mut report = Report::new("publish");
    for tier in map::TIERS {
        // A broker slows down with what it has stored: each part begins anew.
        let vhost = vhost().await;
        throughput::measure(&mut report, vhost.amqp_url(), tier, is_quick).await?;
    }
    delays::measure(&mut report, is_quick).await?;
    memory::measure(&mut report, is_quick).await?;
    report.finish()
}
