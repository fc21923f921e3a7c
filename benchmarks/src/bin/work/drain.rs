//! What the properties of a message cost a drain: beside plain lapin on messages that have a delivery mode alone.
//!
//! The queue is classic and has no priorities, which is where properties cost most.

use anyhow::{Result, ensure};
use futures_util::{StreamExt, stream};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Confirmation, Connection, ConnectionProperties};
use tierline::task::PublishRequest;
use tierline_benchmarks::{Comparison, Report};

use crate::scene::Scene;
use crate::throughput::{plain, tierline};

/// A name as long as many tasks have: 25 bytes.
const TASK: &str = "hotel.send_a_note.classic";
const TRACEPARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
/// What all slots hold together.
const WINDOW: u16 = 128 * 8;
/// How many messages are under way at once when a queue is filled.
const UNCONFIRMED: usize = 1_000;

const BARE: &str = "lapin, acks for many, bare messages";

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    let (rounds, count) = if is_quick { (3, 10_000) } else { (5, 40_000) };
    let scene = &Scene::unobserved(MAP).await?;
    let title = "No-op tasks of 256 bytes, classic without priorities, 8 slots, prefetch 128";
    let measured = Comparison::new(title, "tasks/s")
        .contender(BARE, async move || {
            fill_bare(scene, count).await?;
            plain(scene, WINDOW, count, true).await
        })
        .contender("lapin, acks for many, tasks", async move || {
            fill(scene, count, None).await?;
            plain(scene, WINDOW, count, true).await
        })
        .contender("tierline", async move || {
            fill(scene, count, None).await?;
            tierline(scene, count).await
        })
        .at_least(0.7, BARE)
        .in_each_round()
        .contender("tierline, with a trace context", async move || {
            fill(scene, count, Some(TRACEPARENT)).await?;
            tierline(scene, count).await
        })
        .run(rounds)
        .await?;
    report.add(measured);
    Ok(())
}

/// Publishes tasks as an app does: the publish draws their ids.
async fn fill(scene: &Scene, count: usize, traceparent: Option<&str>) -> Result<()> {
    let requests = (0..count).map(|_| {
        let mut request = PublishRequest::named(TASK, payload());
        request.traceparent = traceparent.map(str::to_owned);
        request
    });
    let mut outcomes = std::pin::pin!(scene.app.publish_many(stream::iter(requests)));
    while let Some(outcome) = outcomes.next().await {
        outcome?;
    }
    Ok(())
}

async fn fill_bare(scene: &Scene, count: usize) -> Result<()> {
    let url = scene.vhost.amqp_url();
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    channel
        .confirm_select(ConfirmSelectOptions::default())
        .await?;
    let payload = &payload();
    let channel = &channel;
    let sends = stream::iter(0..count).map(|_| async move {
        let properties = BasicProperties::default().with_delivery_mode(2);
        let (exchange, options) = ("".into(), BasicPublishOptions::default());
        let sent = channel.basic_publish(exchange, QUEUE.into(), options, payload, properties);
        sent.await?.await
    });
    let mut sends = sends.buffer_unordered(UNCONFIRMED);
    while let Some(confirmation) = sends.next().await {
        let is_confirmed = matches!(confirmation?, Confirmation::Ack(None));
        ensure!(is_confirmed, "not confirmed");
    }
    connection.close(200, "done".into()).await?;
    Ok(())
}

/// 256 bytes of JSON for a task that does nothing.
fn payload() -> Vec<u8> {
    let (before, after) = (r#"{"milliseconds":0,"text":""#, r#""}"#);
    let text = "x".repeat(256 - before.len() - after.len());
    format!("{before}{text}{after}").into_bytes()
}

const QUEUE: &str = "bench.bulk";
const MAP: &str = r#"
    app = "bench"
    [tiers.bulk]
    queue = "classic"
    max_priority = 0
    [groups.all]
    tiers = ["bulk"]
    concurrency = 8
    prefetch = 128
    [broker]
    ack_timeout = "365d"
    [tasks]
    "hotel.send_a_note.classic" = "bulk"
"#;
