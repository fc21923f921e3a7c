//! Publishing beside plain lapin; critical publishes beside a flood; how punctual delays are; how much memory a long
//! stream and idle connections take.
//!
//! `cargo xtask bench publish [--quick] [one-by-one] [throughput] [bare] [flood] [lone] [delays] [memory] [connections]`

mod connections;
mod delays;
mod flood;
mod lone;
mod map;
mod memory;
mod throughput;

use anyhow::Result;
use tierline_benchmarks::{Report, is_quick, is_wanted};
use tierline_testbed::vhost;

use throughput::Scene;

#[tokio::main]
async fn main() -> Result<()> {
    if let Some(url) = memory::child_url() {
        return memory::publish(&url).await;
    }
    if connections::is_child() {
        return connections::run_child().await;
    }
    if flood::is_child() {
        return flood::run_child().await;
    }
    let is_quick = is_quick();
    let mut report = Report::new("publish");
    for tier in map::TIERS {
        let vhost = vhost().await;
        let scene = Scene::set(vhost.amqp_url(), tier).await?;
        if is_wanted("one-by-one") {
            scene.one_by_one(&mut report, is_quick).await?;
        }
        if is_wanted("throughput") {
            scene.pipelined(&mut report, is_quick).await?;
        }
        if is_wanted("bare") {
            scene.beside_bare(&mut report, is_quick).await?;
        }
    }
    if is_wanted("flood") {
        flood::measure(&mut report, is_quick).await?;
    }
    if is_wanted("lone") {
        lone::measure(&mut report, is_quick).await?;
    }
    if is_wanted("delays") {
        delays::measure(&mut report, is_quick).await?;
    }
    if is_wanted("memory") {
        memory::measure(&mut report, is_quick).await?;
    }
    if is_wanted("connections") {
        connections::measure(&mut report, is_quick).await?;
    }
    report.finish()
}
