//! What becomes of a message, by the way its run ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime};

use lapin::options::BasicPublishOptions;
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, ConnectionProperties};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tierline::message::{DeadReason, FailureKind};
use tierline::task::Handler;
use tierline::{
    Context, OnConnect, Outcome, Registry, Task, TaskError, TaskOptions, Tierline, Topology,
};
use tierline_testbed::Vhost;
use tokio::sync::Notify;

use super::{Heard, PATIENCE, Working, take_dead, take_one};

const MAP: &str = r#"
    app = "hotel"
    [tiers.normal]
    queue = "quorum"
    [tiers.urgent]
    queue = "classic"
    [groups.all]
    tiers = ["urgent", "normal"]
    concurrency = 4
    [tasks]
    "hotel.clean" = "normal"
    "hotel.unlock" = "urgent"
"#;

#[derive(Debug, Serialize, Deserialize)]
struct Clean {
    room: u32,
}

impl Task for Clean {
    const NAME: &'static str = "hotel.clean";
}

fn clean<Marker>(handler: impl Handler<Clean, Marker>) -> Registry {
    let options = TaskOptions::new()
        .retries(2)
        .backoff(Duration::from_millis(100))
        .soft_timeout(Duration::from_millis(200))
        .timeout(Duration::from_millis(400));
    let mut registry = Registry::new();
    registry
        .register_with::<Clean, _>(handler, options)
        .unwrap();
    registry
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_succeeds_runs_once_and_is_gone() {
    let runs = Arc::new(AtomicU32::new(0));
    let counted = runs.clone();
    let registry = clean(move |task: Clean| {
        counted.fetch_add(task.room, Ordering::Relaxed);
        async {}
    });
    let working = Working::begin(MAP, registry).await;
    for room in 1..=10 {
        working.app.publish(Clean { room }).await.unwrap();
    }
    working.heard.until("done hotel.clean 1", 10).await;
    let vhost = working.end().await;
    assert_eq!(runs.load(Ordering::Relaxed), 55);
    assert_eq!(vhost.depth("hotel.normal").await.unwrap(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_fails_is_retried_until_its_retries_are_used_up() {
    let registry = clean(|task: Clean, cx: Context| async move {
        let cause = std::io::Error::other("no soap");
        let error = anyhow::Error::from(cause).context(format!("room {}", task.room));
        match cx.attempt() {
            4.. => Ok(()),
            _ => Err(error),
        }
    });
    let working = Working::begin(MAP, registry).await;
    let publishing = working.app.publish(Clean { room: 7 });
    let receipt = publishing.header("tenant", "ada").await.unwrap();
    working.heard.until("dead hotel.clean", 1).await;
    let (message, death) = take_dead(&working.vhost, "hotel.normal.dlq").await;
    let message = message.unwrap();
    assert_eq!(death.reason, DeadReason::RetriesExhausted);
    assert_eq!(death.failure.message, "room 7");
    assert_eq!(death.failure.causes, ["no soap"]);
    assert_eq!(death.version, "1.2.3");
    assert!(death.worker.ends_with(&format!(":{}", std::process::id())));
    assert_eq!((message.id, message.attempt), (receipt.id, 3));
    assert_eq!(message.headers["tenant"], "ada");
    assert_eq!(message.payload, br#"{"room":7}"#);
    let attempts: Vec<_> = message
        .history
        .iter()
        .map(|failed| (failed.attempt, failed.error.as_str()))
        .collect();
    let error = "room 7: no soap";
    assert_eq!(attempts, [(1, error), (2, error), (3, error)]);
    assert_eq!(working.heard.count("retried hotel.clean"), 2);
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snooze_costs_no_attempt_and_a_discarded_task_is_gone() {
    let runs = Arc::new(AtomicU32::new(0));
    let registry = clean(move |_: Clean| {
        let run = runs.fetch_add(1, Ordering::Relaxed);
        async move {
            match run {
                0..5 => Outcome::Snooze(Duration::from_millis(100)),
                _ => Outcome::discard("nobody lives there"),
            }
        }
    });
    let working = Working::begin(MAP, registry).await;
    working.app.publish(Clean { room: 1 }).await.unwrap();
    let discarded = "discarded hotel.clean: nobody lives there";
    working.heard.until(discarded, 1).await;
    assert_eq!(working.heard.count("snoozed hotel.clean 1"), 5);
    let vhost = working.end().await;
    assert_eq!(vhost.depth("hotel.normal").await.unwrap(), 0);
    assert_eq!(vhost.depth("hotel.normal.dlq").await.unwrap(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn panics_and_handlers_past_their_limit_cost_an_attempt_of_their_own_task_alone() {
    let registry = clean(|task: Clean, cx: Context| async move {
        match (task.room, cx.attempt()) {
            (13, 1) => panic!("haunted"),
            (13, 2) => std::future::pending::<()>().await,
            _ => {}
        }
    });
    let working = Working::begin(MAP, registry).await;
    for room in 10..20 {
        working.app.publish(Clean { room }).await.unwrap();
    }
    working.heard.until("done hotel.clean 1", 9).await;
    working.heard.until("done hotel.clean 3", 1).await;
    let lines = working.heard.lines();
    let panicked = lines.iter().any(|line| line.contains("haunted"));
    let timed_out = lines.iter().any(|line| line.contains("timeout of 400ms"));
    assert!(panicked && timed_out, "{lines:#?}");
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_marked_permanent_is_a_dead_letter_at_once() {
    let registry =
        clean(|_: Clean| async { Err::<(), _>(TaskError::permanent("there is no such room")) });
    let working = Working::begin(MAP, registry).await;
    working.app.publish(Clean { room: 0 }).await.unwrap();
    let (message, death) = take_dead(&working.vhost, "hotel.normal.dlq").await;
    assert_eq!(death.reason, DeadReason::Permanent);
    assert_eq!(message.unwrap().attempt, 1);
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_came_too_late_is_skipped_and_counted() {
    let working = Working::begin(MAP, clean(|_: Clean| async {})).await;
    let late = working.app.publish(Clean { room: 1 });
    let late = late.delay(Duration::from_millis(300));
    late.expires(Duration::from_millis(100)).await.unwrap();
    working.heard.until("expired hotel.clean", 1).await;
    assert_eq!(working.heard.count("done"), 0);
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_this_program_cannot_run_is_parked_with_its_payload_intact() {
    let working = Working::begin(MAP, clean(|_: Clean| async {})).await;
    let unlock = json!({"door": "ž"});
    working
        .app
        .publish_named("hotel.unlock", &unlock)
        .await
        .unwrap();
    let (message, death) = take_dead(&working.vhost, "hotel.urgent.dlq").await;
    assert_eq!(death.reason, DeadReason::UnknownTask);
    assert_eq!(message.unwrap().payload, unlock.to_string().into_bytes());

    let wrong = json!({"floor": 3});
    working
        .app
        .publish_named("hotel.clean", &wrong)
        .await
        .unwrap();
    let (message, death) = take_dead(&working.vhost, "hotel.normal.dlq").await;
    assert_eq!(death.reason, DeadReason::Undecodable);
    assert_eq!(death.failure.kind, FailureKind::NotStarted);
    assert!(death.failure.message.contains("room"), "{death:?}");
    assert_eq!(message.unwrap().payload, br#"{"floor":3}"#);
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_message_that_makes_no_sense_is_parked_as_it_came() {
    let working = Working::begin(MAP, clean(|_: Clean| async {})).await;
    let mut headers = FieldTable::default();
    headers.insert("flag".into(), AMQPValue::Boolean(true));
    let properties = BasicProperties::default()
        .with_correlation_id("c-1".into())
        .with_headers(headers);
    send(&working.vhost, "normal", &[0, 159, 146, 150], properties).await;
    let (payload, properties) = take_one(&working.vhost, "hotel.normal.dlq").await;
    assert_eq!(payload, [0, 159, 146, 150]);
    assert_eq!(
        properties.correlation_id().as_ref().unwrap().as_str(),
        "c-1"
    );
    let headers = properties.headers().as_ref().unwrap().inner();
    assert_eq!(headers["flag"], AMQPValue::Boolean(true));
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_id_that_is_drawn_for_a_message_without_one_is_that_of_its_dead_letter() {
    let (sender, mut ids) = tokio::sync::mpsc::unbounded_channel();
    let registry = clean(move |_: Clean, cx: Context| {
        let _ = sender.send(cx.id().clone());
        async { Outcome::dead("no key") }
    });
    let working = Working::begin(MAP, registry).await;
    for id in [None, Some("")] {
        let mut properties = BasicProperties::default().with_type("hotel.clean".into());
        if let Some(id) = id {
            properties = properties.with_message_id(id.into());
        }
        send(&working.vhost, "normal", br#"{"room":1}"#, properties).await;
        let drawn = tokio::time::timeout(PATIENCE, ids.recv()).await;
        let (message, _) = take_dead(&working.vhost, "hotel.normal.dlq").await;
        assert_eq!(message.unwrap().id, drawn.unwrap().unwrap());
    }
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_in_the_queue_of_another_tier_is_run_and_counted() {
    let working = Working::begin(MAP, clean(|_: Clean| async {})).await;
    let properties = BasicProperties::default().with_type("hotel.clean".into());
    send(&working.vhost, "urgent", br#"{"room":1}"#, properties).await;
    working.heard.until("done hotel.clean 1", 1).await;
    assert_eq!(working.heard.count("strayed hotel.clean normal"), 1);
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delayed_task_has_waited_only_since_it_fell_due() {
    let working = Working::begin(MAP, clean(|_: Clean| async {})).await;
    let before = SystemTime::now();
    let publishing = working.app.publish(Clean { room: 1 });
    publishing.delay(Duration::from_millis(500)).await.unwrap();
    working.heard.until("done hotel.clean 1", 1).await;
    assert!(before.elapsed().unwrap() >= Duration::from_millis(500));
    working.end().await;
}

/// Publishes as a program without tierline would.
async fn send(vhost: &Vhost, tier: &str, payload: &[u8], properties: BasicProperties) {
    let connection = lapin::Connection::connect(vhost.amqp_url(), ConnectionProperties::default())
        .await
        .unwrap();
    let channel = connection.create_channel().await.unwrap();
    channel
        .basic_publish(
            "hotel.tasks".into(),
            tier.into(),
            BasicPublishOptions::default(),
            payload,
            properties,
        )
        .await
        .unwrap();
    // Answered after the message was taken.
    channel.close(200, "done".into()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_whose_dead_letter_cannot_be_stored_is_no_suspect_of_another_worker() {
    let registry = || clean(|_: Clean| async { Outcome::dead("no key") });
    let vhost = Working::begin(MAP, registry()).await.end().await;
    vhost.delete_queue("hotel.normal.dlq").await.unwrap();
    let heard = Heard::default();
    let app = Tierline::builder(Topology::parse(MAP).unwrap())
        .amqp(vhost.amqp_url())
        .registry(registry())
        // Else the queue would be declared again.
        .on_connect(OnConnect::Nothing)
        .observe(heard.ear())
        .connect()
        .await
        .unwrap();
    let stop = Arc::new(Notify::new());
    let worker = || {
        let stop = stop.clone();
        tokio::spawn(
            app.work(["all"])
                .until(async move { stop.notified().await }),
        )
    };
    let workers = [worker(), worker()];
    heard.until("consuming", 4).await;
    app.publish(Clean { room: 1 }).await.unwrap();
    heard.until("given back hotel.clean", 4).await;
    assert_eq!(heard.count("suspected"), 0);
    stop.notify_waiters();
    for worker in workers {
        worker.await.unwrap().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_queue_that_somebody_deleted_is_declared_again() {
    let working = Working::begin(MAP, clean(|_: Clean| async { Outcome::dead("no key") })).await;
    let queue = "hotel.normal.dlq";
    working.vhost.delete_queue(queue).await.unwrap();
    working.app.publish(Clean { room: 1 }).await.unwrap();
    working.heard.until("dead hotel.clean", 1).await;
    let (_, death) = take_dead(&working.vhost, queue).await;
    assert_eq!(death.reason, DeadReason::Permanent);
    working.end().await;
}
