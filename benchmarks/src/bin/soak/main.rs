//! A mixed load for many minutes: nothing grows, nothing is lost.
//!
//! `cargo xtask bench soak [--quick] [--minutes N]`
//!
//! Three tiers, priorities, delays, retries and dead letters, with publisher and worker in one
//! process. First its limit is measured; then it runs at 70 % of it, as a system does that is busy
//! and well.

mod load;
mod samples;

use std::time::Duration;

use anyhow::{Context, Result, bail};
use tierline_benchmarks::{Report, is_quick};
use tierline_testbed::{Vhost, vhost};
use tokio::sync::oneshot;
use tokio::time::sleep;

use load::Load;
use samples::Sample;

const SHARE_OF_THE_LIMIT: f64 = 0.7;
/// Until buffers and pools are as large as this load needs them.
const WARM_UP: Duration = Duration::from_secs(30);

#[tokio::main]
async fn main() -> Result<()> {
    let minutes = minutes()?;
    let vhost = vhost().await;
    let load = Load::connect(vhost.amqp_url()).await?;
    let (stop, stopped) = oneshot::channel::<()>();
    let worker = load.app.work(["all"]).grace(Duration::from_secs(5));
    let mut working = tokio::spawn(worker.until(async {
        let _ = stopped.await;
    }));
    let samples = tokio::select! {
        samples = soak(&load, &vhost, minutes) => samples?,
        // Else all would wait for it.
        ended = &mut working => {
            ended??;
            bail!("the worker ended before it was told to");
        }
    };
    let _ = stop.send(());
    working.await??;

    let mut report = Report::new("soak");
    samples::report(&mut report, &samples);
    let (found, holds) = load.outcome();
    let what = "soak: all that was published is confirmed, and done or dead, once";
    report.check(what, found, holds);
    report.finish()
}

async fn soak(load: &Load, vhost: &Vhost, minutes: usize) -> Result<Vec<Sample>> {
    let limit = measure_limit(load).await?;
    let rate = limit * SHARE_OF_THE_LIMIT;
    println!(
        "at most {limit:.0} tasks/s; now {minutes} min of {rate:.0} tasks/s after {WARM_UP:?}"
    );
    let lasts = WARM_UP + Duration::from_secs(60 * minutes as u64);
    // In a task, as an app publishes: what is awaited in main takes more changes of thread.
    let publishing = tokio::spawn(load.clone().publish_paced(rate, lasts));
    sleep(WARM_UP).await;
    let samples = samples::watch(load, vhost, minutes).await?;
    publishing.await?;
    load.until_settled().await?;
    Ok(samples)
}

/// Tasks a second, once all has warmed up.
async fn measure_limit(load: &Load) -> Result<f64> {
    let (warm_up, measured) = match is_quick() {
        true => (Duration::from_secs(3), Duration::from_secs(7)),
        false => (Duration::from_secs(5), Duration::from_secs(15)),
    };
    let publishing = tokio::spawn(load.clone().publish_at_the_limit(warm_up + measured));
    sleep(warm_up).await;
    let before = load.settled();
    sleep(measured).await;
    let settled = load.settled() - before;
    publishing.await?;
    load.until_settled().await?;
    Ok(settled as f64 / measured.as_secs_f64())
}

fn minutes() -> Result<usize> {
    let given = std::env::args().find_map(|it| it.strip_prefix("--minutes=").map(str::to_owned));
    match given {
        Some(minutes) => minutes.parse().context("--minutes=N, a whole number"),
        None if is_quick() => Ok(1),
        None => Ok(10),
    }
}
