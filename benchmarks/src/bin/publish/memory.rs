//! The memory of a process that publishes a long stream.

use std::process::Stdio;

use anyhow::{Result, ensure};
use futures_util::stream::{self, StreamExt};
use tierline::task::PublishRequest;
use tierline_benchmarks::{Report, is_quick, status};
use tierline_testbed::vhost;

use crate::map::{self, Payload};

const CHILD: &str = "--publish-to=";
const TIER: &str = "quorum";
const LIMIT_KIB: u64 = 64 << 10;

fn count(is_quick: bool) -> usize {
    if is_quick { 50_000 } else { 1_000_000 }
}

/// Where this process is to publish, if it is the one that is measured.
pub(crate) fn child_url() -> Option<String> {
    std::env::args().find_map(|argument| argument.strip_prefix(CHILD).map(str::to_owned))
}

/// The process that is measured: publishes, and prints the most memory that it had.
pub(crate) async fn publish(url: &str) -> Result<()> {
    let app = map::connect(url).await?;
    let count = count(is_quick());
    let requests = stream::iter(0..count).filter_map(async |_| {
        let payload = Payload::new().to_json().ok()?;
        Some(PublishRequest::named(TIER, payload))
    });
    let mut outcomes = std::pin::pin!(app.publish_many(requests));
    let mut confirmed = 0;
    while let Some(outcome) = outcomes.next().await {
        outcome?;
        confirmed += 1;
    }
    ensure!(confirmed == count, "{confirmed} of {count} are confirmed");
    println!("{}", status("self", "VmHWM")?);
    Ok(())
}

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    let vhost = vhost().await;
    let url = vhost.amqp_url();
    map::connect(url).await?;
    let (_connection, channel) = map::channel(url).await?;
    // Taken out as they come, so that it is not the broker whose memory is tested.
    let mut drain = map::consume(&channel, TIER).await?;
    let draining = tokio::spawn(async move { while drain.next().await.is_some() {} });

    let mut command = std::process::Command::new(std::env::current_exe()?);
    command.arg(format!("{CHILD}{url}"));
    command.args(is_quick.then_some("--quick"));
    command.stdout(Stdio::piped());
    let child = command.spawn()?;
    let output = tokio::task::spawn_blocking(move || child.wait_with_output()).await??;
    draining.abort();
    ensure!(output.status.success(), "the publishing process failed");
    let peak: u64 = String::from_utf8(output.stdout)?.trim().parse()?;
    report.check(
        format!(
            "a process that publishes {} from a stream stays under 64 MiB",
            count(is_quick)
        ),
        format!("{:.1} MiB", peak as f64 / 1024.0),
        peak < LIMIT_KIB,
    );
    Ok(())
}
