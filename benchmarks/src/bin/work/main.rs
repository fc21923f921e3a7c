//! Working: whose turn it is, how soon urgent work starts, and how fast slots are filled.

mod arrival;
mod drain;
mod faults;
mod idle;
mod isolation;
mod scene;
mod strict;
mod throughput;
mod weighted;

use anyhow::Result;
use tierline_benchmarks::{Report, is_quick};

#[tokio::main]
async fn main() -> Result<()> {
    if scene::is_rival() {
        return scene::rival().await;
    }
    let only = std::env::args().skip(1).find(|it| !it.starts_with("--"));
    let wanted = |name: &str| only.as_deref().is_none_or(|only| only == name);
    let mut report = Report::new("work");
    if wanted("strict") {
        strict::measure(&mut report, is_quick()).await?;
    }
    if wanted("arrival") {
        arrival::measure(&mut report, is_quick()).await?;
    }
    if wanted("weighted") {
        weighted::measure(&mut report, is_quick()).await?;
    }
    if wanted("throughput") {
        for queue in ["classic", "quorum"] {
            throughput::measure(&mut report, queue, is_quick()).await?;
        }
    }
    if wanted("drain") {
        drain::measure(&mut report, is_quick()).await?;
    }
    if wanted("isolation") {
        isolation::measure(&mut report, is_quick()).await?;
    }
    if wanted("idle") {
        idle::measure(&mut report).await?;
    }
    if wanted("faults") {
        faults::measure(&mut report, is_quick()).await?;
    }
    report.finish()
}
