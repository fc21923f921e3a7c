//! A worker with nothing to do: what it costs.

use std::time::Duration;

use anyhow::{Context, Result};
use tierline_benchmarks::{Report, status};

use crate::scene::{Scene, spawn_rival};

/// Long enough for heartbeats and everything else that happens now and then.
const WATCHED: Duration = Duration::from_secs(30);

pub(crate) async fn measure(report: &mut Report) -> Result<()> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../topology/hotel.toml");
    let map = std::fs::read_to_string(path)?;
    // Declares everything, so that the worker has nothing to do but wait.
    let scene = Scene::set(&map).await?;
    let worker = spawn_rival(&map, scene.vhost.amqp_url())?;
    let pid = worker.id().context("the worker runs")?;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let before = cpu(pid)?;
    tokio::time::sleep(WATCHED).await;
    let share = (cpu(pid)? - before).as_secs_f64() / WATCHED.as_secs_f64();
    let resident = status(pid, "VmRSS")? as f64 / 1024.0;
    let found = format!("{resident:.1} MiB");
    report.check(
        "idle on the hotel: resident under 20 MiB",
        found,
        resident < 20.0,
    );
    let found = format!("{:.2} %", share * 100.0);
    report.check("idle on the hotel: CPU under 0.5 %", found, share < 0.005);
    Ok(())
}

/// The time that a process has used, in user and in kernel mode, in ticks of 10 ms.
fn cpu(pid: u32) -> Result<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, fields) = stat.rsplit_once(')').context("a process has a name")?;
    let ticks: u64 = fields
        .split_whitespace()
        .skip(11)
        .take(2)
        .map(str::parse::<u64>)
        .sum::<Result<u64, _>>()?;
    Ok(Duration::from_millis(ticks * 10))
}
