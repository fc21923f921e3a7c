//! Tasks of a tier without delay queues.

use std::time::Duration;

use lapin::options::{BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions};
use lapin::types::FieldTable;
use lapin::{BasicProperties, ConnectionProperties};
use serde::{Deserialize, Serialize};
use tierline::error::{PublishError, WorkerError};
use tierline::message::DeadReason;
use tierline::task::Handler;
use tierline::{
    Error, ErrorKind, Outcome, Registry, Task, TaskError, TaskOptions, Tierline, Topology,
};
use tierline_testbed::{Vhost, vhost};

use super::{Heard, Working, take_dead};

const MAP: &str = r#"
    app = "hotel"
    [tiers.normal]
    queue = "quorum"
    delays = false
    [tiers.late]
    queue = "quorum"
    [groups.all]
    tiers = ["normal"]
    concurrency = 2
    [groups.other]
    tiers = ["late"]
    concurrency = 2
    [tasks]
    "hotel.clean" = "normal"
    "hotel.bill" = "late"
"#;

#[derive(Serialize, Deserialize)]
struct Clean {
    room: u32,
}

impl Task for Clean {
    const NAME: &'static str = "hotel.clean";
}

#[derive(Serialize, Deserialize)]
struct Bill {}

impl Task for Bill {
    const NAME: &'static str = "hotel.bill";
}

fn clean<Marker>(handler: impl Handler<Clean, Marker>) -> Registry {
    let mut registry = Registry::new();
    let once = TaskOptions::new().retries(0);
    registry.register_with::<Clean, _>(handler, once).unwrap();
    registry.register::<Bill, _>(|_: Bill| async {}).unwrap();
    registry
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delayed_task_is_refused_before_it_is_sent() {
    let working = Working::begin(MAP, clean(|_: Clean| async {})).await;
    let delayed = |room| {
        let publishing = working.app.publish(Clean { room });
        publishing.delay(Duration::from_millis(100))
    };
    let refused = delayed(1).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    assert!(matches!(
        refused,
        Error::Publish(PublishError::NoDelays { .. })
    ));
    let bill = working.app.publish(Bill {});
    bill.delay(Duration::from_millis(100)).await.unwrap();
    working.app.publish(Clean { room: 2 }).await.unwrap();
    working.heard.until("done hotel.bill", 1).await;
    working.heard.until("done hotel.clean", 1).await;
    let vhost = working.end().await;
    assert!(vhost.depth("hotel.delay.normal.00").await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_whose_tasks_have_retries_is_refused_at_the_start() {
    let vhost = vhost().await;
    let mut registry = Registry::new();
    registry.register::<Clean, _>(|_: Clean| async {}).unwrap();
    registry.register::<Bill, _>(|_: Bill| async {}).unwrap();
    let app = Tierline::builder(Topology::parse(MAP).unwrap())
        .amqp(vhost.amqp_url())
        .registry(registry)
        .connect()
        .await
        .unwrap();
    let refused = app.work(["other", "all"]).until(async {}).await;
    let refused = refused.unwrap_err();
    let Error::Worker(WorkerError::RetriesWithoutDelays { tier, tasks }) = &refused else {
        panic!("{refused}")
    };
    assert_eq!((&**tier, &**tasks), ("normal", "hotel.clean"));
    assert!(refused.to_string().contains("retries = 0"), "{refused}");
    // Its tier has delays.
    app.work(["other"]).until(async {}).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_snoozes_all_the_same_is_a_dead_letter() {
    let registry = clean(|_: Clean| async { Outcome::Snooze(Duration::from_secs(1)) });
    let working = Working::begin(MAP, registry).await;
    let receipt = working.app.publish(Clean { room: 1 }).await.unwrap();
    let (message, death) = take_dead(&working.vhost, "hotel.normal.dlq").await;
    let message = message.unwrap();
    assert_eq!(death.reason, DeadReason::NoDelays);
    let said = "asked to run again later, which it cannot: its tier \"normal\" has delays = false";
    assert!(death.failure.message.contains(said), "{death:?}");
    assert_eq!((message.id, message.attempt), (receipt.id, 1));
    assert_eq!(message.history.len(), 1);
    working.heard.until("dead hotel.clean: no delays", 1).await;
    assert_eq!(working.heard.count("given back"), 0);
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_of_a_task_that_has_moved_to_a_tier_without_delays_is_a_dead_letter() {
    let heard = Heard::default();
    let mut registry = Registry::new();
    let no_soap = |_: Clean| async { Err::<(), _>(TaskError::from("no soap")) };
    registry.register::<Clean, _>(no_soap).unwrap();
    let vhost = vhost().await;
    let app = Tierline::builder(Topology::parse(MAP).unwrap())
        .amqp(vhost.amqp_url())
        .registry(registry)
        .observe(heard.ear())
        .connect()
        .await
        .unwrap();
    // Its tier is served by other workers, and this is the tier that it had before.
    send(&vhost, "late", 0).await;
    let dead = heard.until("dead hotel.clean: no delays", 1);
    app.work(["other"]).until(dead).await.unwrap();
    let (_, death) = take_dead(&vhost, "hotel.late.dlq").await;
    assert_eq!(death.reason, DeadReason::NoDelays);
    let said = "no soap; it is not retried, because its tier \"normal\" has delays = false";
    assert!(death.failure.message.contains(said), "{death:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_whose_workers_died_goes_to_quarantine_and_runs() {
    let vhost = Working::begin(MAP, clean(|_: Clean| async {}))
        .await
        .end()
        .await;
    two_workers_die_with_a_task(&vhost).await;
    let working = Working::begin_on(vhost, MAP, clean(|_: Clean| async {})).await;
    working.heard.until("done hotel.clean", 1).await;
    assert_eq!(working.heard.count("suspected hotel.clean 2"), 1);
    assert_eq!(working.heard.count("given back"), 0);
    working.end().await;
}

/// Leaves a message as two workers would that died with it: the second death is not counted yet.
async fn two_workers_die_with_a_task(vhost: &Vhost) {
    let channel = send(vhost, "normal", 1).await;
    let options = BasicGetOptions { no_ack: false };
    let got = channel.basic_get("hotel.normal".into(), options).await;
    got.unwrap().unwrap();
    channel.close(200, "".into()).await.unwrap();
}

/// Publishes a task with this crash count to the queue of a tier. The channel is open.
async fn send(vhost: &Vhost, tier: &str, crashes: i64) -> lapin::Channel {
    let properties = ConnectionProperties::default();
    let connection = lapin::Connection::connect(vhost.amqp_url(), properties);
    let connection = connection.await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    let confirm = ConfirmSelectOptions::default();
    channel.confirm_select(confirm).await.unwrap();
    let mut headers = FieldTable::default();
    headers.insert("tierline-crashes".into(), crashes.into());
    let properties = BasicProperties::default()
        .with_type(Clean::NAME.into())
        .with_message_id("one".into())
        .with_delivery_mode(2)
        .with_headers(headers);
    let options = BasicPublishOptions::default();
    let payload = br#"{"room":1}"#;
    let exchange = "hotel.tasks".into();
    let sent = channel.basic_publish(exchange, tier.into(), options, payload, properties);
    sent.await.unwrap().await.unwrap();
    channel
}
