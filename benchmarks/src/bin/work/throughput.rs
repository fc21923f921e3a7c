//! No-op tasks a second, beside plain lapin programs that hold as many messages.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures_util::{FutureExt, StreamExt};
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;
use lapin::{Connection, ConnectionProperties};
use tierline_benchmarks::{Comparison, Report};

use crate::scene::Scene;

pub(crate) async fn measure(report: &mut Report, queue: &str, is_quick: bool) -> Result<()> {
    let (rounds, few, many) = match is_quick {
        true => (3, 2_000, 10_000),
        false => (7, 8_000, 40_000),
    };
    for (prefetch, count, ratio, reference) in [
        (1, few, 0.95, OVERLAPPED),
        (16, many, 1.1, OVERLAPPED),
        (128, many, 0.7, MULTIPLE),
    ] {
        let scene = Scene::unobserved(&map(queue, prefetch)).await?;
        let window = prefetch * 8;
        let scene = &scene;
        let title =
            format!("No-op tasks, {queue}, 8 slots, prefetch {prefetch} ({window} in hand)");
        let measured = Comparison::new(title, "tasks/s")
            .contender(OVERLAPPED, async move || {
                fill(scene, count).await?;
                plain(scene, window, count, false).await
            })
            .contender(MULTIPLE, async move || {
                fill(scene, count).await?;
                plain(scene, window, count, true).await
            })
            .contender("tierline", async move || {
                fill(scene, count).await?;
                tierline(scene, count).await
            })
            .at_least(ratio, reference)
            .run(rounds)
            .await?;
        report.add(measured);
    }
    Ok(())
}

const OVERLAPPED: &str = "lapin, acks overlapped";
const MULTIPLE: &str = "lapin, acks for many";

async fn fill(scene: &Scene, count: usize) -> Result<()> {
    scene.publish("bulk", std::iter::repeat_n(0, count)).await
}

/// The best plain loop: acknowledgements are queued and not waited for; with `is_multiple` one is
/// sent for all that has arrived.
pub(crate) async fn plain(
    scene: &Scene,
    window: u16,
    count: usize,
    is_multiple: bool,
) -> Result<f64> {
    let url = scene.vhost.amqp_url();
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    channel
        .basic_qos(window, BasicQosOptions::default())
        .await?;
    let mut consumer = channel
        .basic_consume(
            "bench.bulk".into(),
            "".into(),
            BasicConsumeOptions::default(),
            FieldTable::default(),
        )
        .await?;
    let mut seen = 0;
    let mut begin = None;
    while seen < count {
        let delivery = consumer.next().await.context("the consumer ended")??;
        // As for tierline, what counts is the time from the first task on.
        begin.get_or_insert_with(Instant::now);
        seen += 1;
        let mut last = delivery.delivery_tag;
        if is_multiple {
            while seen < count
                && let Some(Some(more)) = consumer.next().now_or_never()
            {
                last = more?.delivery_tag;
                seen += 1;
            }
        }
        let options = BasicAckOptions {
            multiple: is_multiple,
        };
        let _ = channel.basic_ack(last, options).now_or_never();
    }
    let took = begin.context("there was a delivery")?.elapsed();
    let rate = count as f64 / took.as_secs_f64();
    connection.close(200, "done".into()).await?;
    Ok(rate)
}

pub(crate) async fn tierline(scene: &Scene, count: usize) -> Result<f64> {
    let counter = crate::scene::Counter::reset();
    let working = scene.work();
    let took = counter.until(count, Duration::from_secs(120)).await?;
    let rate = count as f64 / took.as_secs_f64();
    working.end().await?;
    Ok(rate)
}

fn map(queue: &str, prefetch: u16) -> String {
    format!(
        r#"
        app = "bench"
        [tiers.bulk]
        queue = "{queue}"
        [groups.all]
        tiers = ["bulk"]
        concurrency = 8
        prefetch = {prefetch}
        [broker]
        ack_timeout = "365d"
        [tasks]
        bulk = "bulk"
        "#
    )
}
