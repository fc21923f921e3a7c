//! What idle connections for publishing cost: each worker group has its own.

use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use tierline::observe::{Event, Purpose};
use tierline::task::PublishRequest;
use tierline::{Tierline, Topology};
use tierline_benchmarks::{Figures, Report, median, status};
use tierline_testbed::{connection_memory, vhost};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;
use tokio::sync::watch;
use tokio::time::timeout;

const URL: &str = "TIERLINE_CONNECTIONS_URL";
const OPENED: &str = "TIERLINE_CONNECTIONS_OPENED";

/// The groups of the map. `connect` opens the connections of the first one, the first publish those of another.
const GROUPS: usize = 17;
/// The connections of a group by default, and the channels of a connection.
const CONNECTIONS: usize = 2;
const CHANNELS: usize = 2;
const SOON: Duration = Duration::from_secs(60);

/// In KiB.
struct Memory {
    process: f64,
    broker: f64,
}

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    let rounds = if is_quick { 1 } else { 5 };
    let (mut processes, mut brokers) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let one = memory(1).await?;
        let all = memory(GROUPS).await?;
        let connections = ((GROUPS - 1) * CONNECTIONS) as f64;
        processes.push((all.process - one.process) / connections);
        brokers.push((all.broker - one.broker) / connections);
    }
    report.add(
        Figures::new(
            "An idle connection for publishing, with two channels",
            &["KiB"],
        )
        .row("resident memory of the app", &[median(&processes)])
        .row("memory of the broker's processes", &[median(&brokers)]),
    );
    Ok(())
}

/// The memory of a process that has opened the connections of so many groups, and of all the broker's connections.
async fn memory(opened: usize) -> Result<Memory> {
    let vhost = vhost().await;
    let mut child = Command::new(std::env::current_exe()?)
        .env(URL, vhost.amqp_url())
        .env(OPENED, opened.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let output = child.stdout.take().context("a process has an output")?;
    let mut lines = BufReader::new(output).lines();
    let first = timeout(SOON, lines.next_line()).await;
    let process = first.context("a process did not get ready")??;
    let process = process.context("a process failed")?.parse()?;
    let broker = connection_memory().await? as f64 / 1024.0;
    child.kill().await?;
    Ok(Memory { process, broker })
}

/// Whether this process was started to be idle.
pub(crate) fn is_child() -> bool {
    std::env::var_os(OPENED).is_some()
}

/// Opens the connections of some groups, prints its resident memory, and is idle until its input ends.
pub(crate) async fn run_child() -> Result<()> {
    let opened: usize = std::env::var(OPENED)?.parse()?;
    let (count, mut connected) = watch::channel(0);
    let count = Arc::new(count);
    let app = Tierline::builder(Topology::parse(map())?)
        .amqp(std::env::var(URL)?)
        .observe(move |event| {
            if let Event::Connected {
                purpose: Purpose::Publish,
                ..
            } = event
            {
                count.send_modify(|count| *count += 1);
            }
        })
        .connect()
        .await?;
    publish(&app, opened).await?;
    let are_open = connected.wait_for(|count| *count >= opened * CONNECTIONS);
    let are_open = timeout(SOON, are_open).await;
    are_open.context("not all connections are open")??;
    for _ in 0..CONNECTIONS * CHANNELS * 2 {
        publish(&app, opened).await?;
    }
    println!("{}", status("self", "VmRSS")?);
    let mut input = BufReader::new(tokio::io::stdin()).lines();
    while input.next_line().await?.is_some() {}
    Ok(())
}

async fn publish(app: &Tierline, groups: usize) -> Result<()> {
    for group in 0..groups {
        let request = PublishRequest::named(format!("task{group}"), b"{}".to_vec());
        app.publisher().publish(request).await?;
    }
    Ok(())
}

fn map() -> String {
    let groups = (0..GROUPS).map(|number| {
        format!(
            r#"
            [tiers.tier{number}]
            queue = "classic"
            max_priority = 0
            [groups.group{number}]
            tiers = ["tier{number}"]
            concurrency = 1
            "#
        )
    });
    let tasks = (0..GROUPS).map(|number| format!("task{number} = \"tier{number}\"\n"));
    let (groups, tasks): (String, String) = (groups.collect(), tasks.collect());
    format!("app = \"bench\"\n{groups}\n[tasks]\n{tasks}")
}
