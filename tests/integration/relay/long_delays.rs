//! Delays of more than 27 minutes: rows where there is a database, and queues of the broker where there is none.

use std::time::{Duration, SystemTime};

use sqlx::Row;
use tierline::amqp::{Connection, apply, doctor_with};
use tierline::error::PublishError;
use tierline::topology::plan::Plan;
use tierline::{Error, OnConnect, Outcome, Registry, TaskError, Tierline, Topology};

use super::{HOUR, MAP, Ship, Shop};
use crate::amqp::{management, until};
use crate::worker::Heard;

const DAY: Duration = Duration::from_secs(86_400);

/// A process without a database.
async fn without_database(shop: &Shop, map: &str, on_connect: OnConnect) -> Tierline {
    Tierline::builder(Topology::parse(map).unwrap())
        .amqp(shop.vhost.amqp_url())
        .on_connect(on_connect)
        .connect()
        .await
        .unwrap()
}

async fn long_queues(shop: &Shop) -> Vec<(String, u32)> {
    let queues = shop.vhost.queues().await.unwrap().into_iter();
    let queues = queues.filter(|it| it.name.contains(".delay.long."));
    queues.map(|it| (it.name, it.depth)).collect()
}

/// In how many seconds the scheduled row falls due.
async fn due_in(shop: &Shop) -> f64 {
    let due = sqlx::query(
        "SELECT extract(epoch FROM due_at - now())::float8 AS due_in, tier FROM tierline.scheduled \
         JOIN tierline.backlogs ON backlogs.id = scheduled.backlog",
    );
    let row = due.fetch_one(&shop.pool).await.unwrap();
    assert_eq!(row.get::<String, _>("tier"), "bulk");
    row.get("due_in")
}

fn is_about(seconds: f64, delay: Duration) -> bool {
    (delay.as_secs_f64() - 120.0..=delay.as_secs_f64() + 1.0).contains(&seconds)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_delay_is_a_row_that_a_worker_with_the_database_runs_when_it_is_due() {
    let shop = Shop::open().await;
    let mut registry = Registry::new();
    registry.register::<Ship, _>(|_: Ship| async {}).unwrap();
    let heard = Heard::default();
    let app = shop.app(MAP, registry, &heard).await;
    for delay in [HOUR, 90 * DAY] {
        app.publish(Ship { order: 1 }).delay(delay).await.unwrap();
        let seconds = due_in(&shop).await;
        assert!(is_about(seconds, delay), "{seconds}");
        shop.execute("UPDATE tierline.scheduled SET due_at = now()")
            .await;
        let before = heard.count("done order.ship");
        let done = heard.until("done order.ship", before + 1);
        app.work(["slow"]).until(done).await.unwrap();
        assert_eq!(shop.count().await, [0; 3]);
    }
    assert_eq!(long_queues(&shop).await, []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_delay_reaches_workers_without_the_database_through_the_relay() {
    let shop = Shop::open().await;
    let relaying = shop.relay(MAP).await;
    let app = shop.app(MAP, Registry::new(), &Heard::default()).await;
    let begin = SystemTime::now();
    let sent = app.publish(Ship { order: 1 }).delay("45d").await.unwrap();
    assert_eq!(shop.count().await, [1, 0, 0]);
    shop.execute("UPDATE tierline.scheduled SET due_at = now() + interval '1 s'")
        .await;
    let message = shop.take("shop.bulk", 1).await.remove(0).message;
    assert_eq!(message.id, sent.id);
    // Its wait counts from then on.
    let due_at = message.due_at.unwrap();
    assert!(due_at > message.enqueued_at && due_at < begin + HOUR);
    shop.until_no_rows().await;
    relaying.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn long_retries_and_snoozes_of_messages_are_rows_too() {
    let shop = Shop::open().await;
    let mut registry = Registry::new();
    let handler = |ship: Ship| async move {
        match ship.order {
            1 => Err(TaskError::retry_after("2h", "no ship")),
            _ => Ok(Outcome::snooze("60d")),
        }
    };
    registry.register::<Ship, _>(handler).unwrap();
    let heard = Heard::default();
    let app = shop.app(MAP, registry, &heard).await;
    for (order, event, delay) in [(1, "retried", 2 * HOUR), (2, "snoozed", 60 * DAY)] {
        app.publish(Ship { order }).await.unwrap();
        let stored = heard.until(event, 1);
        app.work(["slow"]).until(stored).await.unwrap();
        let seconds = due_in(&shop).await;
        assert!(is_about(seconds, delay), "{seconds}");
        shop.execute("DELETE FROM tierline.scheduled").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_database_long_delays_wait_in_the_broker_as_before() {
    let shop = Shop::open().await;
    let app = without_database(&shop, MAP, OnConnect::Apply).await;
    assert_eq!(long_queues(&shop).await.len(), 11);
    app.publish(Ship { order: 1 }).delay("1h").await.unwrap();
    until("it is in the queue of its delay", async || {
        let queues = long_queues(&shop).await;
        queues.contains(&("shop.delay.long.15".to_owned(), 1))
    })
    .await;
    let refused = app.publish(Ship { order: 1 }).delay("31d").await;
    let refused = refused.unwrap_err();
    assert!(matches!(
        refused,
        Error::Publish(PublishError::DelayTooLong { .. })
    ));
    assert!(refused.to_string().contains("a database"), "{refused}");
    assert_eq!(shop.count().await, [0; 3]);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_database_and_without_these_queues_a_long_delay_is_a_clear_error() {
    let shop = Shop::open().await;
    // It declares everything that an app with a database needs.
    shop.app(MAP, Registry::new(), &Heard::default()).await;
    let app = without_database(&shop, MAP, OnConnect::Nothing).await;
    let refused = app
        .publish(Ship { order: 1 })
        .delay("1h")
        .await
        .unwrap_err();
    let Error::Publish(PublishError::NoLongDelays { queue, .. }) = &refused else {
        panic!("{refused}");
    };
    assert_eq!(&**queue, "shop.delay.long.15");
    for part in ["27m", "give the app a database", "long_delays = true"] {
        assert!(refused.to_string().contains(part), "{refused}");
    }
    // Shorter ones work.
    app.publish(Ship { order: 2 }).delay("100ms").await.unwrap();
    shop.take("shop.bulk", 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_map_with_long_delays_has_their_queues_and_uses_them_with_a_database_too() {
    let shop = Shop::open().await;
    let map = MAP.replace(
        "[tiers.critical]",
        "[broker]\nlong_delays = true\n[tiers.critical]",
    );
    let app = shop.app(&map, Registry::new(), &Heard::default()).await;
    app.publish(Ship { order: 1 }).delay("1h").await.unwrap();
    until("it is in the queue of its delay", async || {
        let queues = long_queues(&shop).await;
        queues.contains(&("shop.delay.long.15".to_owned(), 1))
    })
    .await;
    app.publish(Ship { order: 1 }).delay("31d").await.unwrap();
    assert_eq!(shop.count().await, [1, 0, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn queues_of_long_delays_from_before_are_noted_and_still_lead_to_their_tier() {
    let shop = Shop::open().await;
    let topology = Topology::parse(MAP).unwrap();
    let connection = Connection::open(shop.vhost.amqp_url(), "test")
        .await
        .unwrap();
    let before = Plan::new(&topology, connection.version(), false).unwrap();
    apply(&connection, &before).await.unwrap();
    let after = Plan::new(&topology, connection.version(), true).unwrap();
    assert_eq!(before.queues.len() - after.queues.len(), 11);
    apply(&connection, &after).await.unwrap();
    // A message at the end of the long delays: all bits are spent but those of 100 ms.
    let channel = shop.channel().await;
    let properties = lapin::BasicProperties::default()
        .with_type("order.ship".into())
        .with_message_id("late".into());
    let key = format!("bulk{}.1", ".0".repeat(24));
    let publishing = channel.basic_publish(
        "shop.delay.long.out".into(),
        key.as_str().into(),
        Default::default(),
        b"{\"order\":1}",
        properties,
    );
    publishing.await.unwrap();
    let message = shop.take("shop.bulk", 1).await.remove(0).message;
    assert_eq!(message.id.as_str(), "late");

    let report = doctor_with(&connection, &topology, true, &management()).await;
    let report = report.unwrap();
    let of_delays = report.findings.iter();
    let of_delays: Vec<_> = of_delays
        .filter(|it| it.object.contains("delay.long"))
        .collect();
    assert!(report.is_well(), "{report}");
    let [note] = of_delays.as_slice() else {
        panic!("{report}");
    };
    assert!(
        note.what.starts_with("11 queues and 12 exchanges"),
        "{report}"
    );
    assert!(note.what.ends_with("nothing waits in them"), "{report}");
    assert!(note.help.starts_with("delete them"), "{report}");
    let report = doctor_with(&connection, &topology, false, &management()).await;
    let is_of_delays = |it: &tierline::amqp::Finding| it.object.contains("delay.long");
    assert!(!report.unwrap().findings.iter().any(is_of_delays));
}
