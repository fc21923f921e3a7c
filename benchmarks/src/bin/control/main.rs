//! What operators change while an app runs, and what limits keep, over several processes and on servers of its own.
//!
//! Every worker and every publisher is a process of its own. All of them write what they do into one file, and the promises are
//! checked against that file.
//!
//! `cargo xtask bench control [--quick] [pause] [rate] [keys] [override] [outage] [cost]
//! [rollups] [metrics] [--home=quorum|classic|postgres]`

mod child;
mod cost;
mod keys;
mod log;
mod outage;
mod overrides;
mod pause;
mod rate;
mod scene;
mod warnings;

use anyhow::Result;
use tierline_benchmarks::{Report, is_quick, is_wanted};

use scene::Servers;

#[tokio::main]
async fn main() -> Result<()> {
    if child::is_child() {
        return child::run_order().await;
    }
    let servers = Servers::start().await?;
    let mut report = Report::new("control");
    if is_wanted("pause") {
        pause::measure(&mut report, &servers, is_quick()).await?;
    }
    if is_wanted("rate") {
        rate::measure(&mut report, &servers, is_quick()).await?;
    }
    if is_wanted("keys") {
        keys::measure(&mut report, &servers, is_quick()).await?;
    }
    if is_wanted("override") {
        overrides::measure(&mut report, &servers, is_quick()).await?;
    }
    if is_wanted("outage") {
        outage::measure(&mut report, &servers, is_quick()).await?;
    }
    if is_wanted("cost") {
        cost::measure(&mut report, &servers, is_quick()).await?;
    }
    if is_wanted("rollups") {
        cost::rollups(&mut report, &servers, is_quick()).await?;
    }
    if is_wanted("metrics") {
        cost::metrics(&mut report, &servers, is_quick()).await?;
    }
    report.finish()
}
