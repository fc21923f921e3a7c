//! One run: two workers, critical tasks at a steady rate, and a deferred task behind two long ones.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::{FieldTable, ShortString};
use lapin::{BasicProperties, Connection, ConnectionProperties};
use tierline::task::PublishRequest;
use tierline::{Tierline, Topology};
use tierline_testbed::Vhost;
use tokio::process::Child;
use tokio::sync::oneshot;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{interval, sleep, timeout};

use crate::TIERS;
use crate::log::{Entry, Log};
use crate::worker::{self, now};

/// Two tiers take turns, so each gets 20 tasks per second.
const PUBLISH_EVERY: Duration = Duration::from_millis(25);
/// At 20 per second a tier fills two of its eight slots, four of which die with a worker.
const CRITICAL_TASK: Duration = Duration::from_millis(100);
const WORKERS: usize = 2;
const LAST: &str = "last";
/// How long something may take that is due at once.
const SOON: Duration = Duration::from_secs(30);
/// How long a run goes on before it counts: connections, caches and allocators have settled by then.
const WARM_UP: Duration = Duration::from_secs(3);

/// Each worker holds two deferred messages and runs one, so the last one is received at once and waits for a slot.
const MAP: &str = r#"
    app = "bench"
    [tiers.critical]
    queue = "classic"
    [tiers.critical_quorum]
    queue = "quorum"
    [tiers.low]
    queue = "quorum"
    [groups.urgent]
    tiers = ["critical"]
    concurrency = 4
    [groups.urgent_quorum]
    tiers = ["critical_quorum"]
    concurrency = 4
    [groups.deferred]
    tiers = ["low"]
    concurrency = 1
    prefetch = 2
    [tasks]
    critical = "critical"
    critical_quorum = "critical_quorum"
    long = "low"
    kill = "low"
"#;

/// The deferred task that waits behind the long ones.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Last {
    /// One like those before it.
    Harmless,
    /// One with crash count 2, which kills its worker at its end.
    Suspect,
}

#[derive(Clone, Copy)]
pub(crate) struct Lengths {
    /// How long a deferred task runs.
    deferred: Duration,
    /// How long the run goes on after the last deferred task.
    after: Duration,
}

impl Lengths {
    pub(crate) fn seconds(deferred: u64, after: u64) -> Self {
        Self {
            deferred: Duration::from_secs(deferred),
            after: Duration::from_secs(after),
        }
    }
}

/// What a run found.
pub(crate) struct Run {
    /// The critical tasks that ran, of those that were published after the warm-up.
    pub(crate) waits: Vec<Wait>,
    /// How many were published after the warm-up.
    pub(crate) published: usize,
    pub(crate) last: LastTask,
}

/// The wait of a critical task.
pub(crate) struct Wait {
    pub(crate) tier: &'static str,
    pub(crate) phase: Phase,
    /// From the publish to the start; to the last start if the killed worker held it.
    pub(crate) waited: Duration,
    pub(crate) was_held_by_killed: bool,
    pub(crate) starts: usize,
}

/// What the last deferred task does when a critical task is published.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Waits,
    Runs,
    Ended,
}

/// What became of the last deferred task.
pub(crate) struct LastTask {
    pub(crate) waited: Duration,
    /// How long it waited after the first of the long tasks had ended.
    pub(crate) waited_with_free_slot: Duration,
    pub(crate) ran: Duration,
    /// How long after its end it was a dead letter, if it became one.
    pub(crate) dead_after: Option<Duration>,
}

struct Published {
    tier: &'static str,
    id: String,
    at: Duration,
}

pub(crate) async fn run(last: Last, lengths: Lengths) -> Result<Run> {
    let vhost = tierline_testbed::vhost().await;
    let topology = Topology::parse(MAP)?;
    let app = Tierline::builder(topology)
        .amqp(vhost.amqp_url())
        .connect()
        .await?;
    let log = Log::new();
    let workers = start_workers(&vhost, &log).await?;
    let (stop, load) = start_load(&app);
    sleep(WARM_UP).await;
    for number in 0..WORKERS {
        let id = format!("long-{number}");
        app.publisher()
            .publish(request("long", &id, lengths.deferred))
            .await?;
        log.until("started", &id, 1, SOON).await?;
    }
    let published = publish_last(&app, &vhost, last, lengths.deferred).await?;
    let limit = lengths.deferred + SOON;
    let started = log.until("started", LAST, 1, limit).await?;
    let end = match last {
        Last::Harmless => "done",
        Last::Suspect => "killed",
    };
    let ended = log.until(end, LAST, 1, limit).await?;
    sleep(lengths.after).await;
    let _ = stop.send(());
    let critical = load.await??;
    log.until_critical_done(critical.len(), SOON).await;

    let others = log.others();
    let killed = (last == Last::Suspect).then_some(ended.worker);
    stop_workers(workers, killed).await?;
    let phase_of = |at| match at {
        _ if at < started.at => Phase::Waits,
        _ if at < ended.at => Phase::Runs,
        _ => Phase::Ended,
    };
    let counted: Vec<_> = critical.iter().filter(|it| it.at >= published).collect();
    Ok(Run {
        waits: waits(&counted, &log.critical(), killed, phase_of),
        published: counted.len(),
        last: last_task(&others, published, &started, &ended)?,
    })
}

async fn start_workers(vhost: &Vhost, log: &Log) -> Result<Vec<Child>> {
    let mut workers = Vec::new();
    for number in 0..WORKERS {
        let mut process = worker::spawn(MAP, vhost.amqp_url())?;
        log.follow(number, &mut process)?;
        workers.push(process);
    }
    for tier in ["critical", "critical_quorum", "low"] {
        log.until("consuming", tier, WORKERS, SOON).await?;
    }
    Ok(workers)
}

/// Ends the workers that live; the killed one must be dead.
async fn stop_workers(workers: Vec<Child>, killed: Option<usize>) -> Result<()> {
    for (number, mut process) in workers.into_iter().enumerate() {
        drop(process.stdin.take());
        let status = timeout(SOON, process.wait()).await;
        let status = status.with_context(|| format!("worker {number} does not end"))??;
        ensure!(
            status.success() != (killed == Some(number)),
            "worker {number} ended with {status}, and the killed one is {killed:?}"
        );
    }
    Ok(())
}

type Load = JoinHandle<Result<Vec<Published>>>;

/// Publishes critical tasks until it is told to stop. No publish waits for the confirm of an earlier one.
fn start_load(app: &Tierline) -> (oneshot::Sender<()>, Load) {
    let app = app.clone();
    let (stop, mut stopped) = oneshot::channel();
    let load = tokio::spawn(async move {
        let mut ticks = interval(PUBLISH_EVERY);
        let mut publishing = JoinSet::new();
        for (number, (tier, _)) in TIERS.into_iter().cycle().enumerate() {
            tokio::select! {
                _ = ticks.tick() => {}
                _ = &mut stopped => break,
            }
            let app = app.clone();
            publishing.spawn(async move {
                let id = format!("critical-{number}");
                let request = request(tier, &id, CRITICAL_TASK);
                let at = now();
                app.publisher().publish(request).await?;
                anyhow::Ok(Published { tier, id, at })
            });
        }
        let mut published = Vec::new();
        while let Some(outcome) = publishing.join_next().await {
            published.push(outcome??);
        }
        Ok(published)
    });
    (stop, load)
}

fn request(task: &str, id: &str, length: Duration) -> PublishRequest {
    let mut request = PublishRequest::named(task, payload(length));
    request.id = Some(id.into());
    request
}

fn payload(length: Duration) -> Vec<u8> {
    format!(r#"{{"milliseconds":{}}}"#, length.as_millis()).into_bytes()
}

/// Publishes the last deferred task. When that was.
async fn publish_last(
    app: &Tierline,
    vhost: &Vhost,
    last: Last,
    length: Duration,
) -> Result<Duration> {
    if last == Last::Harmless {
        let at = now();
        let request = request("long", LAST, length);
        app.publisher().publish(request).await?;
        return Ok(at);
    }
    let properties = ConnectionProperties::default();
    let connection = Connection::connect(vhost.amqp_url(), properties).await?;
    let channel = connection.create_channel().await?;
    let options = ConfirmSelectOptions::default();
    channel.confirm_select(options).await?;
    let mut headers = FieldTable::default();
    headers.insert("tierline-crashes".into(), 2_i64.into());
    let properties = BasicProperties::default()
        .with_type("kill".into())
        .with_message_id(ShortString::from(LAST))
        .with_delivery_mode(2)
        .with_headers(headers);
    let options = BasicPublishOptions {
        mandatory: true,
        ..BasicPublishOptions::default()
    };
    let at = now();
    let confirm = channel
        .basic_publish(
            "bench.tasks".into(),
            "low".into(),
            options,
            &payload(length),
            properties,
        )
        .await?
        .await?;
    ensure!(confirm.is_ack(), "the broker refused the suspect");
    connection.close(200, "published".into()).await?;
    Ok(at)
}

/// The waits of the tasks that have started.
fn waits(
    published: &[&Published],
    log: &[Entry],
    killed: Option<usize>,
    phase_of: impl Fn(Duration) -> Phase,
) -> Vec<Wait> {
    let held = held_by(killed, log);
    let mut starts: HashMap<&str, Vec<Duration>> = HashMap::new();
    for entry in log.iter().filter(|it| it.what == "started") {
        starts.entry(&entry.about).or_default().push(entry.at);
    }
    let waits = published.iter().filter_map(|task| {
        let starts = starts.get(task.id.as_str())?;
        let was_held_by_killed = held.contains(task.id.as_str());
        let start = match was_held_by_killed {
            true => starts.iter().max(),
            false => starts.iter().min(),
        };
        Some(Wait {
            tier: task.tier,
            phase: phase_of(task.at),
            waited: start?.saturating_sub(task.at),
            was_held_by_killed,
            starts: starts.len(),
        })
    });
    waits.collect()
}

/// The tasks that the killed worker held: those that it had begun, and those that were delivered to it, which the
/// broker redelivered to the other worker.
fn held_by(killed: Option<usize>, log: &[Entry]) -> HashSet<&str> {
    let Some(killed) = killed else {
        return HashSet::new();
    };
    let of_killed = |what: &'static str| {
        let lines = log.iter().filter(move |it| it.worker == killed);
        lines
            .filter(move |it| it.what == what)
            .map(|it| it.about.as_str())
    };
    let done: HashSet<_> = of_killed("done").collect();
    let begun = of_killed("started").filter(|id| !done.contains(id));
    let redelivered = log.iter().filter(|it| it.what == "suspected");
    begun
        .chain(redelivered.map(|it| it.about.as_str()))
        .collect()
}

fn last_task(
    log: &[Entry],
    published: Duration,
    started: &Entry,
    ended: &Entry,
) -> Result<LastTask> {
    let freed = log
        .iter()
        .filter(|it| it.what == "done" && it.about.starts_with("long-"))
        .map(|it| it.at)
        .min();
    let freed = freed.context("a long task was done before the last one began")?;
    let dead = log.iter().find(|it| it.what == "dead" && it.about == LAST);
    Ok(LastTask {
        waited: started.at.saturating_sub(published),
        waited_with_free_slot: started.at.saturating_sub(freed),
        ran: ended.at.saturating_sub(started.at),
        dead_after: dead.map(|it| it.at.saturating_sub(ended.at)),
    })
}
