//! Schedules: leaders that are killed, and what a tick costs where there are many schedules.
//!
//! `cargo xtask bench schedule [--quick]`

mod cost;
mod takeover;

use anyhow::Result;
use tierline_benchmarks::{Report, is_quick};

#[tokio::main]
async fn main() -> Result<()> {
    if let Some(servers) = takeover::child_servers() {
        return takeover::schedule(servers).await;
    }
    let is_quick = is_quick();
    let mut report = Report::new("schedule");
    takeover::measure(&mut report, is_quick).await?;
    cost::measure(&mut report, is_quick).await?;
    report.finish()
}

/// A map with these schedules.
fn map(schedules: &str) -> String {
    format!(
        r#"
        app = "bench"
        [tiers.main]
        queue = "classic"
        [groups.all]
        tiers = ["main"]
        concurrency = 4
        [tasks]
        tick = "main"
        {schedules}"#
    )
}
