//! Messages a second, confirmed, beside plain lapin programs.
//!
//! The plain programs send the same messages: to parse and store an identifier and a type costs a classic
//! queue some of its speed, whoever sends them. `publish_many` is also beside a program that sends bare
//! messages, which have a delivery mode alone. All run in tasks, as an app does: each message awaited in `main`, outside the
//! runtime's threads, takes half as many changes of thread again.

use std::future::ready;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use futures_util::stream::{self, FuturesUnordered, StreamExt};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Channel, Confirmation, Connection};
use tierline::Tierline;
use tierline::task::{Publish, PublishRequest, TaskId};
use tierline_benchmarks::{Comparison, Report};
use tokio::task::JoinSet;

use crate::map::{self, Payload};

const WINDOW: usize = 1_000;
const TASKS: usize = 1_000;

const PLAIN_WINDOW: &str = "lapin, window 1,000, awaiting each send";
const PLAIN_BEST: &str = "lapin, window 1,000, sends overlapped";
const PLAIN_BARE: &str = "lapin, sends overlapped, bare messages";
const MANY: &str = "tierline, publish_many";
const CONCURRENT: &str = "tierline, 1,000 tasks of single publishes";

/// What is published to, with a connection for each way to do it.
pub(crate) struct Scene {
    app: Tierline,
    plain: Sender,
    control: Channel,
    _connections: [Connection; 2],
    tier: &'static str,
}

impl Scene {
    pub(crate) async fn set(url: &str, tier: &'static str) -> Result<Self> {
        let app = map::connect(url).await?;
        let (connection, channel) = map::channel(url).await?;
        channel
            .confirm_select(ConfirmSelectOptions::default())
            .await?;
        let (other, control) = map::channel(url).await?;
        Ok(Self {
            app,
            plain: Sender {
                channel,
                tier,
                properties: task_properties,
            },
            control,
            _connections: [connection, other],
            tier,
        })
    }

    /// Each message awaited before the next. Turns are short, so that both meet the same
    /// disturbances: what so few messages need is little beside them.
    pub(crate) async fn one_by_one(&self, report: &mut Report, is_quick: bool) -> Result<()> {
        let (rounds, count) = if is_quick { (5, 300) } else { (21, 500) };
        let Self {
            app, plain, tier, ..
        } = self;
        let title = format!("Publishing 256 bytes to a {tier} queue, one by one");
        let measured = Comparison::new(title, "msg/s")
            .contender("lapin", async move || {
                let run = plain_one_by_one(plain.clone(), count);
                self.timed(count, run).await
            })
            .contender("tierline", async move || {
                let run = one_by_one(app.clone(), tier, count);
                self.timed(count, run).await
            })
            .at_least(0.9, "lapin")
            .run(rounds)
            .await?;
        report.add(measured);
        Ok(())
    }

    /// Many messages under way at once.
    pub(crate) async fn pipelined(&self, report: &mut Report, is_quick: bool) -> Result<()> {
        let (rounds, count) = if is_quick { (3, 5_000) } else { (7, 30_000) };
        let Self {
            app, plain, tier, ..
        } = self;
        let title = format!("Publishing 256 bytes to a {tier} queue");
        let measured = Comparison::new(title, "msg/s")
            .contender(PLAIN_BEST, async move || {
                let run = plain_overlapped(plain.clone(), count);
                self.timed(count, run).await
            })
            .contender(PLAIN_WINDOW, async move || {
                let run = plain_awaiting_sends(plain.clone(), count);
                self.timed(count, run).await
            })
            .contender(MANY, async move || {
                let run = publish_many(app.clone(), tier, count);
                self.timed(count, run).await
            })
            .at_least(0.9, PLAIN_BEST)
            .contender(CONCURRENT, async move || {
                let run = concurrent(app.clone(), tier, count);
                self.timed(count, run).await
            })
            .at_least(0.8, PLAIN_BEST)
            .run(rounds)
            .await?;
        report.add(measured);
        Ok(())
    }

    /// Messages with all that a task needs, beside messages with nothing.
    pub(crate) async fn beside_bare(&self, report: &mut Report, is_quick: bool) -> Result<()> {
        let (rounds, count) = if is_quick { (3, 5_000) } else { (7, 30_000) };
        let Self { app, tier, .. } = self;
        let bare = &Sender {
            properties: bare_properties,
            ..self.plain.clone()
        };
        let title = format!("Publishing 256 bytes to a {tier} queue, beside bare messages");
        let measured = Comparison::new(title, "msg/s")
            .contender(PLAIN_BARE, async move || {
                let run = plain_overlapped(bare.clone(), count);
                self.timed(count, run).await
            })
            .contender(MANY, async move || {
                let run = publish_many(app.clone(), tier, count);
                self.timed(count, run).await
            })
            .at_least(0.9, PLAIN_BARE)
            .run(rounds)
            .await?;
        report.add(measured);
        Ok(())
    }

    /// Runs on an empty queue, and looks whether all of it has arrived.
    async fn timed(
        &self,
        count: usize,
        run: impl Future<Output = Result<()>> + Send + 'static,
    ) -> Result<f64> {
        map::purge(&self.control, self.tier).await?;
        let begin = Instant::now();
        tokio::spawn(run).await??;
        let speed = count as f64 / begin.elapsed().as_secs_f64();
        let stored = map::purge(&self.control, self.tier).await?;
        ensure!(stored as usize == count, "{stored} of {count} are there");
        Ok(speed)
    }
}

/// A plain lapin program.
#[derive(Clone)]
struct Sender {
    channel: Channel,
    tier: &'static str,
    properties: fn(&str) -> BasicProperties,
}

impl Sender {
    async fn send(&self) -> lapin::Result<lapin::PublisherConfirm> {
        let payload = Payload::new().to_json().unwrap_or_default();
        let options = BasicPublishOptions {
            mandatory: true,
            immediate: false,
        };
        let (exchange, tier) = ("bench.tasks".into(), self.tier);
        let properties = (self.properties)(tier);
        let channel = &self.channel;
        channel
            .basic_publish(exchange, tier.into(), options, &payload, properties)
            .await
    }
}

fn bare_properties(_tier: &str) -> BasicProperties {
    BasicProperties::default().with_delivery_mode(2)
}

/// What a first attempt has on the wire.
fn task_properties(tier: &str) -> BasicProperties {
    bare_properties(tier)
        .with_priority(5)
        .with_message_id(TaskId::random().as_str().into())
        .with_type(map::task(tier).into())
}

fn check(confirmation: lapin::Result<Confirmation>) -> Result<()> {
    ensure!(
        matches!(confirmation?, Confirmation::Ack(None)),
        "not confirmed"
    );
    Ok(())
}

async fn plain_one_by_one(plain: Sender, count: usize) -> Result<()> {
    for _ in 0..count {
        check(plain.send().await?.await)?;
    }
    Ok(())
}

async fn plain_awaiting_sends(plain: Sender, count: usize) -> Result<()> {
    let mut confirms = FuturesUnordered::new();
    for _ in 0..count {
        if confirms.len() == WINDOW
            && let Some(confirmation) = confirms.next().await
        {
            check(confirmation)?;
        }
        confirms.push(plain.send().await?);
    }
    while let Some(confirmation) = confirms.next().await {
        check(confirmation)?;
    }
    Ok(())
}

async fn plain_overlapped(plain: Sender, count: usize) -> Result<()> {
    let mut sends = stream::iter(0..count)
        .map(|_| async { plain.send().await?.await })
        .buffer_unordered(WINDOW);
    while let Some(confirmation) = sends.next().await {
        check(confirmation)?;
    }
    Ok(())
}

fn request(tier: &str) -> Result<PublishRequest> {
    Ok(PublishRequest::named(
        map::task(tier),
        Payload::new().to_json()?,
    ))
}

async fn one_by_one(app: Tierline, tier: &'static str, count: usize) -> Result<()> {
    let publisher = app.publisher();
    for _ in 0..count {
        publisher.publish(request(tier)?).await?;
    }
    Ok(())
}

async fn publish_many(app: Tierline, tier: &'static str, count: usize) -> Result<()> {
    let requests = stream::iter(0..count).filter_map(move |_| ready(request(tier).ok()));
    let mut outcomes = std::pin::pin!(app.publish_many(requests));
    while let Some(outcome) = outcomes.next().await {
        outcome?;
    }
    Ok(())
}

async fn concurrent(app: Tierline, tier: &'static str, count: usize) -> Result<()> {
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
