//! 100,000 publishes from 50 tasks while the broker is killed three times, closes connections and
//! raises an alarm: what was confirmed is there, the rest has a typed error, and nobody waits past
//! the deadline.
//!
//! `cargo xtask bench publish-faults [--quick]`

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures_util::stream::StreamExt;
use lapin::options::{BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;
use lapin::{Connection, ConnectionProperties};
use tierline::error::PublishError;
use tierline::task::PublishRequest;
use tierline::{Error, Tierline, Topology};
use tierline_benchmarks::{Distribution, Distributions, Report, is_quick};
use tierline_testbed::{Broker, Vhost};
use tokio::task::JoinSet;

const PUBLISHERS: usize = 50;
const DEADLINE: Duration = Duration::from_secs(2);
/// By how much a publish may outlive its deadline.
const OVERRUN: Duration = Duration::from_millis(100);
const TIERS: [&str; 2] = ["classic", "quorum"];

const MAP: &str = r#"
    app = "faults"
    [tiers.classic]
    queue = "classic"
    [tiers.quorum]
    queue = "quorum"
    [groups.all]
    tiers = ["classic", "quorum"]
    concurrency = 4
    [tasks]
    classic = "classic"
    quorum = "quorum"
"#;

#[tokio::main]
async fn main() -> Result<()> {
    let total = if is_quick() { 10_000 } else { 100_000 };
    let broker = Broker::start_new().await?;
    let vhost = broker.vhost().await?;
    let topology = Topology::parse(MAP)?;
    let app = Tierline::builder(topology)
        .amqp(vhost.amqp_url())
        .connect()
        .await?;
    // A quorum queue that was declared a moment ago does not survive a kill.
    broker.flush_declarations().await?;

    let done = Arc::new(AtomicUsize::new(0));
    let mut publishers = JoinSet::new();
    for publisher in 0..PUBLISHERS {
        let (app, done) = (app.clone(), Arc::clone(&done));
        publishers.spawn(async move { publish(&app, publisher, total / PUBLISHERS, &done).await });
    }
    // Each fault comes when its share of the publishes is done, and all are over before the last.
    let until = async |share: f64| {
        while (done.load(Ordering::Relaxed) as f64) < share * total as f64 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    for (kill, share) in [0.1, 0.3, 0.5].into_iter().enumerate() {
        until(share).await;
        eprintln!("kill {} at {:.0} %", kill + 1, share * 100.0);
        broker.kill().await?;
        broker.start().await?;
    }
    until(0.65).await;
    eprintln!("closing all connections");
    broker.close_all_connections().await?;
    until(0.8).await;
    eprintln!("raising an alarm");
    broker.raise_memory_alarm().await?;
    tokio::time::sleep(2 * DEADLINE).await;
    broker.clear_memory_alarm().await?;

    let mut outcomes = Vec::new();
    while let Some(ended) = publishers.join_next().await {
        outcomes.extend(ended.context("a publisher panicked")?);
    }
    report(&vhost, outcomes).await
}

struct Outcome {
    tier: &'static str,
    id: String,
    result: Result<(), Error>,
    took: Duration,
}

async fn publish(
    app: &Tierline,
    publisher: usize,
    count: usize,
    done: &AtomicUsize,
) -> Vec<Outcome> {
    let publish = app.publisher();
    let mut outcomes = Vec::new();
    for number in 0..count {
        let tier = TIERS[number % TIERS.len()];
        let id = format!("{publisher}-{number}");
        let mut request = PublishRequest::named(tier, format!("{number}").into_bytes());
        request.id = Some(id.as_str().into());
        request.deadline = Some(DEADLINE);
        let begin = Instant::now();
        let result = publish.publish(request).await.map(drop);
        outcomes.push(Outcome {
            tier,
            id,
            result,
            took: begin.elapsed(),
        });
        done.fetch_add(1, Ordering::Relaxed);
    }
    outcomes
}

async fn report(vhost: &Vhost, outcomes: Vec<Outcome>) -> Result<()> {
    let mut report = Report::new("publish-faults");
    for tier in TIERS {
        let (stored, copies) = take_all(vhost, tier).await?;
        let confirmed: Vec<_> = outcomes
            .iter()
            .filter(|outcome| outcome.tier == tier && outcome.result.is_ok())
            .collect();
        let lost = confirmed
            .iter()
            .filter(|outcome| !stored.contains(&outcome.id))
            .count();
        report.check(
            format!("every Ok is in the {tier} queue"),
            format!(
                "{} Ok, {lost} lost, {} duplicates",
                confirmed.len(),
                copies - stored.len()
            ),
            lost == 0,
        );
    }

    let mut kinds = BTreeMap::new();
    for outcome in &outcomes {
        let kind = match &outcome.result {
            Ok(()) => "Ok",
            Err(Error::Publish(PublishError::Unconfirmed { .. })) => "Unconfirmed",
            Err(Error::Publish(PublishError::NotConnected { .. })) => "NotConnected",
            Err(Error::Publish(PublishError::Blocked { .. })) => "Blocked",
            Err(Error::Publish(PublishError::Refused { .. })) => "Refused",
            Err(error) => {
                eprintln!("unexpected: {error}");
                "another error"
            }
        };
        *kinds.entry(kind).or_insert(0) += 1;
    }
    report.check(
        "every other publish has a typed error that says what to do",
        format!("{kinds:?}"),
        !kinds.contains_key("another error"),
    );

    let overrun = |outcome: &Outcome| outcome.took.saturating_sub(DEADLINE);
    let longest = outcomes.iter().map(overrun).max().unwrap_or_default();
    report.check(
        "no publish outlives its deadline by more than 100 ms",
        format!("{:.1} ms at most", longest.as_secs_f64() * 1_000.0),
        longest <= OVERRUN,
    );
    let times = |is_ok: bool| {
        let chosen = outcomes
            .iter()
            .filter(move |outcome| outcome.result.is_ok() == is_ok);
        Distribution::of(chosen.map(|outcome| outcome.took))
    };
    report.add(
        Distributions::new(format!("Time of {} publishes", outcomes.len()))
            .row("confirmed", times(true))
            .row("with an error", times(false)),
    );
    report.finish()
}

/// The identifiers of all that is in a queue, and how many messages that were.
async fn take_all(vhost: &Vhost, tier: &str) -> Result<(HashSet<String>, usize)> {
    let queue = format!("faults.{tier}");
    let depth = vhost.depth(&queue).await? as usize;
    let properties = ConnectionProperties::default();
    let connection = Connection::connect(vhost.amqp_url(), properties).await?;
    let channel = connection.create_channel().await?;
    channel.basic_qos(0, BasicQosOptions::default()).await?;
    let options = BasicConsumeOptions {
        no_ack: true,
        ..BasicConsumeOptions::default()
    };
    let mut consumer = channel
        .basic_consume(queue.into(), "".into(), options, FieldTable::default())
        .await?;
    let mut ids = HashSet::new();
    for _ in 0..depth {
        let delivery = consumer
            .next()
            .await
            .context("the consumer was cancelled")??;
        let id = delivery.properties.message_id().as_ref();
        ids.extend(id.map(ToString::to_string));
    }
    Ok((ids, depth))
}
