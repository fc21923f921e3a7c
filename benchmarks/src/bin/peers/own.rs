//! tierline, as one of the programs that are measured.

use std::fs::OpenOptions;
use std::io::Write;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Result, bail};
use futures_util::{StreamExt, stream};
use serde::{Deserialize, Serialize};
use tierline::task::PublishRequest;
use tierline::{Registry, Task, Tierline, Topology};

use crate::program::{NOTES, NOTES_EVERY};

#[derive(Serialize, Deserialize)]
struct Noop {
    number: usize,
}

#[derive(Serialize, Deserialize)]
struct High {
    number: usize,
}

#[derive(Serialize, Deserialize)]
struct Critical {
    sent: f64,
}

impl Task for Noop {
    const NAME: &'static str = "noop";
}

impl Task for High {
    const NAME: &'static str = "high";
}

impl Task for Critical {
    const NAME: &'static str = "critical";
}

/// The queue of the tasks that do nothing: of the same kind as those of the others, or replicated.
pub(crate) const PLAIN: &str = "queue = \"classic\"\nmax_priority = 0";
pub(crate) const QUORUM: &str = "queue = \"quorum\"";

/// A command of `peers/peer.py`, and `many` for what the others do not have.
pub(crate) async fn run(bulk: &str, command: &[&str]) -> Result<()> {
    match *command {
        ["fill", task, count] => fill(connect(bulk, "one").await?, task, count.parse()?).await,
        ["many", task, count] => many(connect(bulk, "one").await?, task, count.parse()?).await,
        ["arrive", count] => arrive(connect(bulk, "one").await?, count.parse()?).await,
        ["work", layout] => work(connect(bulk, layout).await?).await,
        _ => bail!("not a command: {command:?}"),
    }
}

async fn connect(bulk: &str, layout: &str) -> Result<Tierline> {
    let mut registry = Registry::new();
    registry.register::<Noop, _>(noop)?;
    registry.register::<High, _>(high)?;
    registry.register::<Critical, _>(critical)?;
    let topology = Topology::parse(map(bulk, layout))?;
    let url = std::env::var(tierline_testbed::AMQP_URL)?;
    let app = Tierline::builder(topology).amqp(url).registry(registry);
    Ok(app.connect().await?)
}

async fn fill(app: Tierline, task: &str, count: usize) -> Result<()> {
    let publisher = app.publisher();
    let requests: Result<Vec<_>> = (0..count).map(|number| request(task, number)).collect();
    let requests = requests?;
    publish_before(&app, task).await?;
    // As an app does it: in a task of the runtime.
    let run = tokio::spawn(async move {
        let begin = Instant::now();
        for request in requests {
            publisher.publish(request).await?;
        }
        anyhow::Ok(begin.elapsed())
    });
    println!("{}", run.await??.as_secs_f64());
    Ok(())
}

/// The first task opens the connections of its group. The others publish one before the time is taken, too.
async fn publish_before(app: &Tierline, task: &str) -> Result<()> {
    // Its handler notes nothing.
    let request = request(task, NOTES_EVERY + 1)?;
    app.publisher().publish(request).await?;
    Ok(())
}

async fn many(app: Tierline, task: &str, count: usize) -> Result<()> {
    publish_before(&app, task).await?;
    let begin = Instant::now();
    let requests = stream::iter(0..count).filter_map(async |number| request(task, number).ok());
    let mut outcomes = std::pin::pin!(app.publish_many(requests));
    while let Some(outcome) = outcomes.next().await {
        outcome?;
    }
    println!("{}", begin.elapsed().as_secs_f64());
    Ok(())
}

fn request(task: &str, number: usize) -> Result<PublishRequest> {
    Ok(match task {
        "noop" => PublishRequest::new(&Noop { number })?,
        "high" => PublishRequest::new(&High { number })?,
        _ => bail!("not a task: {task}"),
    })
}

async fn arrive(app: Tierline, count: u64) -> Result<()> {
    for number in 0..count {
        tokio::time::sleep(Duration::from_millis(40 + number * 7 % 21)).await;
        app.publish(Critical { sent: now() }).await?;
    }
    Ok(())
}

async fn work(app: Tierline) -> Result<()> {
    let groups = app.topology().groups().iter();
    let groups: Vec<_> = groups.map(|group| group.name.clone()).collect();
    app.work(groups).until(std::future::pending::<()>()).await?;
    Ok(())
}

async fn noop(it: Noop) {
    if it.number.is_multiple_of(NOTES_EVERY) {
        note(&format!("noop {}", now()));
    }
}

async fn high(it: High) {
    if it.number == 100 {
        note("high");
    }
    tokio::time::sleep(Duration::from_millis(10 + it.number as u64 * 7 % 21)).await;
}

async fn critical(it: Critical) {
    note(&format!("critical {}", now() - it.sent));
}

/// What is not written is missed by who waits for it.
pub(crate) fn note(line: &str) {
    let path = std::env::var_os(NOTES).unwrap_or_default();
    if let Ok(mut notes) = OpenOptions::new().append(true).open(path) {
        let _ = notes.write_all(format!("{line}\n").as_bytes());
    }
}

pub(crate) fn now() -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default().as_secs_f64()
}

fn map(bulk: &str, layout: &str) -> String {
    let groups = match layout {
        "own" => {
            r#"
            [groups.urgent]
            tiers = ["critical"]
            concurrency = 2
            [groups.other]
            tiers = ["high"]
            concurrency = 6
            [groups.bulk]
            tiers = ["bulk"]
            concurrency = 1
            "#
        }
        _ => {
            r#"
            [groups.urgent]
            tiers = ["critical", "high"]
            order = "strict"
            concurrency = 8
            prefetch = 1
            [groups.bulk]
            tiers = ["bulk"]
            concurrency = 8
            prefetch = 128
            "#
        }
    };
    format!(
        r#"
        app = "bench"
        [tiers.critical]
        queue = "classic"
        [tiers.high]
        queue = "classic"
        [tiers.bulk]
        {bulk}
        {groups}
        [broker]
        ack_timeout = "365d"
        [tasks]
        critical = "critical"
        high = "high"
        noop = "bulk"
        "#
    )
}
