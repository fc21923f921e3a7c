//! Publishing, against a real broker.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod closing;
mod faults;
#[cfg(feature = "deadpool-lapin")]
mod pool;
mod starting;

use std::time::{Duration, SystemTime};

use futures_util::future::join_all;
use futures_util::{StreamExt, stream};
use lapin::options::BasicConsumeOptions;
use lapin::types::FieldTable;
use lapin::{Connection, ConnectionProperties};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tierline::error::{PublishError, Stored};
use tierline::message::Message;
use tierline::task::PublishRequest;
use tierline::{Error, OnConnect, Task, Tierline, Topology};
use tierline_testbed::{Vhost, vhost};

const MAP: &str = r#"
    app = "shop"
    [broker]
    max_message_size = "64KiB"
    [tiers.critical]
    queue = "classic"
    [tiers.normal]
    queue = "quorum"
    [tiers.small]
    queue = "quorum"
    max_length = 1
    [groups.all]
    tiers = ["critical", "normal", "small"]
    concurrency = 4
    [tasks]
    "order.pay" = { tier = "critical", priority = 7 }
    "order.ship" = "normal"
    "order.count" = "small"
"#;

#[derive(Debug, Serialize, Deserialize)]
struct Pay {
    order: u64,
}

impl Task for Pay {
    const NAME: &'static str = "order.pay";
}

#[derive(Debug, Serialize, Deserialize)]
struct Ship {
    order: u64,
}

impl Task for Ship {
    const NAME: &'static str = "order.ship";
}

#[derive(Debug, Serialize, Deserialize)]
struct Forget;

impl Task for Forget {
    const NAME: &'static str = "order.forget";
}

async fn connect(url: &str) -> Tierline {
    let map = Topology::parse(MAP).unwrap();
    Tierline::builder(map).amqp(url).connect().await.unwrap()
}

/// Takes every message out of a queue.
async fn take_all(vhost: &Vhost, queue: &str) -> Vec<Message> {
    let depth = vhost.depth(queue).await.unwrap();
    let taken = take(vhost, queue, depth as usize).await;
    taken.into_iter().map(|(message, _)| message).collect()
}

/// Takes as many messages out of a queue, waiting for them; each with the time of its arrival.
async fn take(vhost: &Vhost, queue: &str, count: usize) -> Vec<(Message, SystemTime)> {
    let properties = ConnectionProperties::default();
    let connection = Connection::connect(vhost.amqp_url(), properties)
        .await
        .unwrap();
    let channel = connection.create_channel().await.unwrap();
    let options = BasicConsumeOptions {
        no_ack: true,
        ..BasicConsumeOptions::default()
    };
    let consumer = channel
        .basic_consume(queue.into(), "".into(), options, FieldTable::default())
        .await
        .unwrap();
    let tier = queue.rsplit('.').next().unwrap();
    let read = async |delivery: lapin::Result<lapin::message::Delivery>| {
        let (delivery, now) = (delivery.unwrap(), SystemTime::now());
        let read = Message::from_wire(&delivery.properties, delivery.data, tier, now);
        (read.unwrap(), now)
    };
    consumer.take(count).then(read).collect().await
}

#[tokio::test]
async fn a_confirmed_task_is_in_its_tier_with_everything_that_was_said() {
    let vhost = vhost().await;
    let app = connect(vhost.amqp_url()).await;
    let before = SystemTime::now() - Duration::from_millis(1);
    let plain = app.publish(Pay { order: 1 }).await.unwrap();
    let full = app
        .publish(Pay { order: 2 })
        .id("order-2")
        .priority(9)
        .expires("1h")
        .header("tenant", "ada")
        .await
        .unwrap();
    assert_eq!(
        (plain.tier.as_str(), full.id.as_str()),
        ("critical", "order-2")
    );

    // The more urgent one comes first.
    let [second, first] = &take_all(&vhost, "shop.critical").await[..] else {
        panic!("not two messages");
    };
    assert_eq!(
        (first.id.clone(), first.priority, first.attempt),
        (plain.id, 7, 1)
    );
    assert_eq!(first.payload, br#"{"order":1}"#);
    assert!(first.enqueued_at >= before && first.expires_at.is_none());
    assert_eq!((second.task.as_str(), second.priority), ("order.pay", 9));
    assert_eq!(second.headers["tenant"], "ada");
    let lifetime = second
        .expires_at
        .unwrap()
        .duration_since(second.enqueued_at)
        .unwrap();
    assert_eq!(lifetime, Duration::from_secs(3600));
}

#[tokio::test]
async fn a_task_continues_the_trace_of_its_publisher() {
    let vhost = vhost().await;
    let map = Topology::parse(MAP).unwrap();
    let app = Tierline::builder(map)
        .amqp(vhost.amqp_url())
        .trace_context(|| Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".into()))
        .connect()
        .await
        .unwrap();
    app.publish(Ship { order: 1 }).await.unwrap();
    let [message] = &take_all(&vhost, "shop.normal").await[..] else {
        panic!("not one message");
    };
    let traceparent = message.traceparent.as_deref().unwrap();
    assert!(
        traceparent.starts_with("00-0af7651916cd43dd"),
        "{traceparent}"
    );
}

#[tokio::test]
async fn what_cannot_be_published_is_refused_and_nothing_is_sent() {
    let vhost = vhost().await;
    let app = connect(vhost.amqp_url()).await;
    let large = json!({ "order": "x".repeat(70_000) });
    assert!(matches!(
        app.publish(Forget).await,
        Err(Error::Publish(PublishError::UnmappedTask { .. }))
    ));
    assert!(matches!(
        app.publish_named("order.pay", &large).await,
        Err(Error::Publish(PublishError::TooLarge { .. }))
    ));
    let too_urgent = app.publish(Pay { order: 1 }).priority(11).await;
    assert!(matches!(
        too_urgent,
        Err(Error::Publish(PublishError::InvalidPriority {
            highest: Some(10),
            ..
        }))
    ));
    let unordered = app.publish(Ship { order: 1 }).priority(1).await;
    assert!(matches!(
        unordered,
        Err(Error::Publish(PublishError::InvalidPriority {
            highest: None,
            ..
        }))
    ));
    let long = app.publish(Pay { order: 1 }).delay("31d").await;
    assert!(matches!(
        long,
        Err(Error::Publish(PublishError::DelayTooLong { .. }))
    ));
    for (name, value) in [("x-death", "1"), ("tierline-attempt", "9"), ("", "1")] {
        let refused = app.publish(Pay { order: 1 }).header(name, value).await;
        assert!(
            matches!(
                refused,
                Err(Error::Publish(PublishError::InvalidMessage { .. }))
            ),
            "{name}"
        );
    }
    let value = "y".repeat(50_000);
    let big = app.publish(Pay { order: 1 }).header("big", value).await;
    assert!(
        matches!(
            big,
            Err(Error::Publish(PublishError::HeadersTooLarge { .. }))
        ),
        "{big:?}"
    );
    // Small ones fill a frame too: each takes more room there than its name and value.
    let many = (0..12_000).fold(app.publish(Pay { order: 1 }), |publishing, number| {
        publishing.header(format!("{number:x}"), "")
    });
    let many = many.await;
    assert!(
        matches!(
            many,
            Err(Error::Publish(PublishError::HeadersTooLarge { .. }))
        ),
        "{many:?}"
    );
    let nameless = app.publish(Pay { order: 1 }).id("").await;
    assert!(matches!(
        nameless,
        Err(Error::Publish(PublishError::InvalidMessage { .. }))
    ));
    assert_eq!(vhost.depth("shop.critical").await.unwrap(), 0);
    // None of it has cost the channel, and a deadline may be as far as one likes.
    let patient = app.publish(Pay { order: 1 }).deadline(Duration::MAX);
    patient.await.unwrap();
}

#[tokio::test]
async fn each_unroutable_task_is_told_so_and_no_other_one_is() {
    let vhost = vhost().await;
    let app = connect(vhost.amqp_url()).await;
    vhost.delete_queue("shop.normal").await.unwrap();
    let outcomes = join_all((0..400).map(async |order| match order % 2 {
        0 => app.publish(Pay { order }).await,
        _ => app.publish(Ship { order }).await,
    }))
    .await;
    for (order, outcome) in outcomes.iter().enumerate() {
        match order % 2 {
            0 => assert!(outcome.is_ok(), "{outcome:?}"),
            _ => {
                let error = outcome.as_ref().unwrap_err();
                let is_unroutable =
                    matches!(error, Error::Publish(PublishError::Unroutable { .. }));
                assert!(is_unroutable && !error.is_transient(), "{error:?}");
                assert_eq!(error.stored(), Some(Stored::No));
            }
        }
    }
    assert_eq!(vhost.depth("shop.critical").await.unwrap(), 200);
}

#[tokio::test]
async fn every_twin_of_an_unroutable_task_is_told_so() {
    let vhost = vhost().await;
    let app = connect(vhost.amqp_url()).await;
    vhost.delete_queue("shop.normal").await.unwrap();
    // The same id again and again, and beside it one with that id which has a queue.
    let outcomes = join_all((0..400).map(async |order| match order % 4 {
        0 => app.publish(Pay { order }).id("twin").await,
        _ => app.publish(Ship { order }).id("twin").await,
    }))
    .await;
    let confirmed = outcomes.iter().filter(|outcome| outcome.is_ok());
    let unroutable = outcomes.iter().filter(|outcome| {
        matches!(
            outcome,
            Err(Error::Publish(PublishError::Unroutable { .. }))
        )
    });
    assert_eq!((confirmed.count(), unroutable.count()), (100, 300));
    assert_eq!(vhost.depth("shop.critical").await.unwrap(), 100);
}

#[tokio::test]
async fn a_full_queue_refuses_until_there_is_room() {
    let vhost = vhost().await;
    let app = connect(vhost.amqp_url()).await;
    let publish = || {
        app.publish_named("order.count", &json!(null))
            .deadline("1s")
    };
    // A quorum queue may take one more than its limit before it refuses.
    let mut refused = None;
    for _ in 0..4 {
        refused = publish().await.err().or(refused);
    }
    assert!(
        matches!(refused, Some(Error::Publish(PublishError::Refused { .. }))),
        "{refused:?}"
    );
    assert!(!take_all(&vhost, "shop.small").await.is_empty());
    publish().deadline("10s").await.unwrap();
}

#[tokio::test]
async fn many_at_once_each_have_their_outcome_in_their_order() {
    let vhost = vhost().await;
    let app = connect(vhost.amqp_url()).await;
    let requests = stream::iter((0..10_000).map(|order| match order {
        5_000 => PublishRequest::new(&Forget).unwrap(),
        order => PublishRequest::new(&Ship { order }).unwrap(),
    }));
    let outcomes: Vec<_> = app.publish_many(requests).collect().await;
    assert_eq!(outcomes.len(), 10_000);
    let failed: Vec<_> = outcomes
        .iter()
        .enumerate()
        .filter(|(_, outcome)| outcome.is_err())
        .collect();
    assert!(
        matches!(
            failed[..],
            [(
                5_000,
                Err(Error::Publish(PublishError::UnmappedTask { .. }))
            )]
        ),
        "{failed:?}"
    );
    assert_eq!(vhost.depth("shop.normal").await.unwrap(), 9_999);
}

#[tokio::test]
async fn delayed_tasks_arrive_in_their_tier_and_none_early() {
    let vhost = vhost().await;
    let app = connect(vhost.amqp_url()).await;
    let delays = [0, 1, 100, 150, 300, 700, 1_100, 1_500, 2_300];
    let published = join_all(delays.map(async |delay| {
        let due = SystemTime::now() + Duration::from_millis(delay);
        let receipt = app
            .publish(Ship { order: delay })
            .delay(Duration::from_millis(delay))
            .await
            .unwrap();
        (receipt.id, due)
    }))
    .await;

    for (message, arrived) in take(&vhost, "shop.normal", delays.len()).await {
        let (_, due) = published.iter().find(|(id, _)| *id == message.id).unwrap();
        assert!(arrived >= *due, "{} came early", message.id);
    }
}

#[tokio::test]
async fn a_publish_that_is_dropped_costs_nobody_else_anything() {
    let vhost = vhost().await;
    let app = connect(vhost.amqp_url()).await;
    for order in 0..500 {
        let publishing = tokio::spawn(app.publish(Ship { order }).into_future());
        tokio::task::yield_now().await;
        publishing.abort();
    }
    for order in 0..100 {
        app.publish(Ship { order }).await.unwrap();
    }
    assert!(vhost.depth("shop.normal").await.unwrap() >= 100);
}

#[tokio::test]
async fn an_app_that_may_not_declare_says_what_is_missing() {
    let vhost = vhost().await;
    let verifying = || {
        Tierline::builder(Topology::parse(MAP).unwrap())
            .amqp(vhost.amqp_url())
            .on_connect(OnConnect::Verify)
    };
    let error = verifying().connect().await.unwrap_err().to_string();
    assert!(error.contains("nothing of it is on the broker"), "{error}");
    assert!(vhost.queue_names().await.unwrap().is_empty());

    connect(vhost.amqp_url()).await;
    verifying().connect().await.unwrap();
}
