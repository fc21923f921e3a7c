//! Messages a second, confirmed, beside plain lapin programs.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use futures_util::stream::{self, FuturesUnordered, StreamExt};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Channel, Confirmation};
use tierline::Tierline;
use tierline::task::{Publish, PublishRequest};
use tierline_benchmarks::{Comparison, Report};
use tokio::task::JoinSet;

use crate::map::{self, Payload};

const WINDOW: usize = 1_000;
const TASKS: usize = 1_000;

const PLAIN_SINGLE: &str = "lapin, one by one";
const PLAIN_WINDOW: &str = "lapin, window 1,000, awaiting each send";
const PLAIN_BEST: &str = "lapin, window 1,000, sends overlapped";
const SINGLE: &str = "tierline, one by one";
const MANY: &str = "tierline, publish_many";
const CONCURRENT: &str = "tierline, 1,000 tasks of single publishes";

pub(crate) async fn measure(
    report: &mut Report,
    url: &str,
    tier: &'static str,
    is_quick: bool,
) -> Result<()> {
    let (rounds, few, many) = match is_quick {
        true => (3, 500, 5_000),
        false => (7, 2_000, 30_000),
    };
    let app = map::connect(url).await?;
    let (_connection, plain) = map::channel(url).await?;
    plain
        .confirm_select(ConfirmSelectOptions::default())
        .await?;
    let (_other, control) = map::channel(url).await?;
    let (app, plain, control) = (&app, &plain, &control);

    let measured = Comparison::new(format!("Publishing 256 bytes to a {tier} queue"), "msg/s")
        .contender(PLAIN_SINGLE, async move || {
            let run = plain_one_by_one(plain, tier, few);
            timed(control, tier, few, run).await
        })
        .contender(SINGLE, async move || {
            timed(control, tier, few, one_by_one(app, tier, few)).await
        })
        .at_least(0.9, PLAIN_SINGLE)
        .contender(PLAIN_WINDOW, async move || {
            let run = plain_awaiting_sends(plain, tier, many);
            timed(control, tier, many, run).await
        })
        .contender(PLAIN_BEST, async move || {
            let run = plain_overlapped(plain, tier, many);
            timed(control, tier, many, run).await
        })
        .contender(MANY, async move || {
            timed(control, tier, many, publish_many(app, tier, many)).await
        })
        .at_least(0.9, PLAIN_BEST)
        .contender(CONCURRENT, async move || {
            timed(control, tier, many, concurrent(app, tier, many)).await
        })
        .at_least(0.8, PLAIN_BEST)
        .run(rounds)
        .await?;
    report.add(measured);
    Ok(())
}

/// Runs on an empty queue, and looks whether all of it has arrived.
async fn timed(
    control: &Channel,
    tier: &str,
    count: usize,
    run: impl Future<Output = Result<()>>,
) -> Result<f64> {
    map::purge(control, tier).await?;
    let begin = Instant::now();
    run.await?;
    let speed = count as f64 / begin.elapsed().as_secs_f64();
    let stored = map::purge(control, tier).await?;
    ensure!(stored as usize == count, "{stored} of {count} are there");
    Ok(speed)
}

async fn send(channel: &Channel, tier: &str) -> lapin::Result<lapin::PublisherConfirm> {
    let payload = Payload::new().to_json().unwrap_or_default();
    let options = BasicPublishOptions {
        mandatory: true,
        immediate: false,
    };
    let properties = BasicProperties::default()
        .with_content_type("application/json".into())
        .with_delivery_mode(2)
        .with_priority(5);
    channel
        .basic_publish(
            "bench.tasks".into(),
            tier.into(),
            options,
            &payload,
            properties,
        )
        .await
}

fn check(confirmation: lapin::Result<Confirmation>) -> Result<()> {
    ensure!(
        matches!(confirmation?, Confirmation::Ack(None)),
        "not confirmed"
    );
    Ok(())
}

async fn plain_one_by_one(channel: &Channel, tier: &str, count: usize) -> Result<()> {
    for _ in 0..count {
        check(send(channel, tier).await?.await)?;
    }
    Ok(())
}

async fn plain_awaiting_sends(channel: &Channel, tier: &str, count: usize) -> Result<()> {
    let mut confirms = FuturesUnordered::new();
    for _ in 0..count {
        if confirms.len() == WINDOW
            && let Some(confirmation) = confirms.next().await
        {
            check(confirmation)?;
        }
        confirms.push(send(channel, tier).await?);
    }
    while let Some(confirmation) = confirms.next().await {
        check(confirmation)?;
    }
    Ok(())
}

async fn plain_overlapped(channel: &Channel, tier: &str, count: usize) -> Result<()> {
    let mut sends = stream::iter(0..count)
        .map(async |_| send(channel, tier).await?.await)
        .buffer_unordered(WINDOW);
    while let Some(confirmation) = sends.next().await {
        check(confirmation)?;
    }
    Ok(())
}

fn request(tier: &str) -> Result<PublishRequest> {
    Ok(PublishRequest::named(tier, Payload::new().to_json()?))
}

async fn one_by_one(app: &Tierline, tier: &str, count: usize) -> Result<()> {
    let publisher = app.publisher();
    for _ in 0..count {
        publisher.publish(request(tier)?).await?;
    }
    Ok(())
}

async fn publish_many(app: &Tierline, tier: &str, count: usize) -> Result<()> {
    let requests = stream::iter(0..count).filter_map(async |_| request(tier).ok());
    let mut outcomes = std::pin::pin!(app.publish_many(requests));
    while let Some(outcome) = outcomes.next().await {
        outcome?;
    }
    Ok(())
}

async fn concurrent(app: &Tierline, tier: &'static str, count: usize) -> Result<()> {
    let mut tasks = JoinSet::new();
    let publisher: Arc<dyn Publish> = app.publisher();
    for _ in 0..TASKS {
        let publisher = Arc::clone(&publisher);
        tasks.spawn(async move {
            for _ in 0..count / TASKS {
                publisher.publish(request(tier)?).await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended.context("a task panicked")??;
    }
    Ok(())
}
