//! What reaches the queue of a tier, and that it does so once.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tierline::error::TopologyError;
use tierline::observe::Event;
use tierline::task::PublishRequest;
use tierline::{Context, Error, Registry, TaskError, TaskOptions, Tierline, Topology};
use tokio::sync::Notify;

use super::{MAP, Pay, Relaying, Ship, Shop, ids, milliseconds, ship_all};
use crate::amqp::until;
use crate::worker::Heard;

const TRACE: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

#[tokio::test(flavor = "multi_thread")]
async fn a_row_reaches_the_queue_of_its_tier_under_its_id_and_with_its_properties() {
    let shop = Shop::open().await;
    let mut request = PublishRequest::new(&Ship { order: 7 }).unwrap();
    request.id = Some("order-7".into());
    request.priority = Some(9);
    request.headers.insert("customer".into(), "Ada".into());
    request.traceparent = Some(TRACE.to_owned());
    request.expires = Some(Duration::from_secs(7_200));
    let sent = shop.rows.publisher().publish(request).await.unwrap();
    let before: String = sqlx::query_scalar("SELECT name FROM tierline.ready")
        .fetch_one(&shop.pool)
        .await
        .unwrap();
    assert_eq!(before, "order-7");
    let relaying = shop.relay(MAP).await;
    let message = shop.take("shop.bulk", 1).await.remove(0).message;
    assert_eq!(message.id.as_str(), "order-7");
    assert_eq!((message.task.as_str(), message.priority), ("order.ship", 9));
    assert_eq!((message.attempt, message.crashes, message.life), (1, 0, 0));
    assert_eq!(message.payload, br#"{"order":7}"#);
    assert_eq!(message.headers["customer"], "Ada");
    assert_eq!(message.traceparent.as_deref(), Some(TRACE));
    let worth = message
        .expires_at
        .unwrap()
        .duration_since(message.enqueued_at);
    assert_eq!(worth.unwrap(), Duration::from_secs(7_200));
    assert!(message.enqueued_at <= sent.confirmed_at);
    shop.until_no_rows().await;
    relaying.heard.until("relayed", 1).await;
    relaying.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plain_row_becomes_the_message_that_a_publish_would_have_sent() {
    let shop = Shop::open().await;
    let heard = Heard::default();
    let app = shop.app(MAP, Registry::new(), &heard).await;
    let relaying = Relaying::begin(app.relay().unwrap(), heard);
    let mut enqueued = Vec::new();
    for publisher in [&app, &shop.rows] {
        let receipt = publisher.publish(Ship { order: 1 }).await.unwrap();
        let taken = shop.take("shop.bulk", 1).await.remove(0);
        assert_eq!(taken.message.id, receipt.id);
        let [enqueued_at, confirmed_at] = [taken.message.enqueued_at, receipt.confirmed_at];
        enqueued.push(milliseconds(confirmed_at) - milliseconds(enqueued_at));
        let properties = taken.properties;
        // A row that was stored long after its id was drawn looks like a delayed one.
        let headers = properties.headers().iter().flat_map(|it| it.inner().keys());
        let is_plain = headers
            .into_iter()
            .all(|name| name.as_str() == "tierline-due-at");
        assert!(is_plain, "{properties:?}");
        assert_eq!(
            (*properties.priority(), *properties.delivery_mode()),
            (Some(5), Some(2))
        );
    }
    assert!(enqueued.iter().all(|late| *late < 30_000), "{enqueued:?}");
    relaying.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_failed_before_keeps_its_attempt_and_its_history() {
    let shop = Shop::open().await;
    let mut registry = Registry::new();
    let options = TaskOptions::new().retries(3).backoff("1h");
    let fails = |_: Ship| async { Err::<(), _>(TaskError::from("no ship")) };
    registry.register_with::<Ship, _>(fails, options).unwrap();
    let heard = Heard::default();
    let worker = shop.app(MAP, registry, &heard).await;
    shop.rows.publish(Ship { order: 1 }).await.unwrap();
    let retried = heard.until("retried", 1);
    worker.work(["slow"]).until(retried).await.unwrap();
    assert_eq!(shop.count().await, [1, 0, 0]);

    let relaying = shop.relay(MAP).await;
    shop.execute("UPDATE tierline.scheduled SET due_at = now()")
        .await;
    let message = shop.take("shop.bulk", 1).await.remove(0).message;
    assert_eq!((message.attempt, message.history.len()), (2, 1));
    assert_eq!(message.history[0].error, "no ship");
    shop.until_no_rows().await;
    relaying.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_that_may_kill_a_worker_are_relayed_too_and_not_counted() {
    let shop = Shop::open().await;
    ship_all(&shop, 0..20).await;
    shop.execute("UPDATE tierline.ready SET rank = 1000 + rank, is_held = true")
        .await;
    let relaying = shop.relay(MAP).await;
    let taken = shop.take("shop.bulk", 20).await;
    assert!(taken.iter().all(|it| it.message.crashes == 0));
    shop.until_no_rows().await;
    relaying.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn several_relays_at_once_publish_every_row_once() {
    const ROWS: u32 = 3_000;
    let shop = Shop::open().await;
    let sent = ship_all(&shop, 0..ROWS).await;
    let mut relays = Vec::new();
    for _ in 0..3 {
        relays.push(shop.relay(MAP).await);
    }
    let taken = shop.take("shop.bulk", ROWS as usize).await;
    shop.until_no_rows().await;
    for relaying in relays {
        relaying.end().await;
    }
    let ids = ids(&taken);
    assert!(ids.values().all(|times| *times == 1));
    assert_eq!(ids.into_keys().collect::<Vec<_>>(), sent);
    assert_eq!(
        super::get(&shop.channel().await, "shop.bulk")
            .await
            .map(|it| it.message),
        None
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_settles_what_was_sent_and_gives_all_other_rows_back() {
    const ROWS: u32 = 5_000;
    let shop = Shop::open().await;
    let sent = ship_all(&shop, 0..ROWS).await;
    // Ends with the first row that is relayed: many more are claimed by then.
    let stop = Arc::new(Notify::new());
    let stopping = stop.clone();
    let app = Tierline::builder(Topology::parse(MAP).unwrap())
        .amqp(shop.vhost.amqp_url())
        .postgres(shop.database.url())
        .observe(move |event| {
            if let Event::Relayed { .. } = event {
                stopping.notify_one();
            }
        })
        .connect()
        .await
        .unwrap();
    let relay = app.relay().unwrap();
    relay.until(stop.notified()).await.unwrap();
    let [_, ready, running] = shop.count().await;
    assert_eq!(running, 0, "rows are still held");
    assert!(ready > 0, "all were relayed before the shutdown");
    let held: i64 = sqlx::query_scalar("SELECT count(*) FROM tierline.ready WHERE is_held")
        .fetch_one(&shop.pool)
        .await
        .unwrap();
    assert_eq!(held, 0);

    let relaying = shop.relay(MAP).await;
    let taken = shop.take("shop.bulk", ROWS as usize).await;
    shop.until_no_rows().await;
    relaying.end().await;
    assert_eq!(ids(&taken).into_keys().collect::<Vec<_>>(), sent);
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_without_the_database_run_what_the_relay_publishes() {
    let shop = Shop::open().await;
    let runs: Arc<Mutex<Vec<(u32, String)>>> = Arc::default();
    let mut registry = Registry::new();
    let noted = runs.clone();
    let pay = move |pay: Pay, cx: Context| {
        noted.lock().unwrap().push((pay.order, cx.id().to_string()));
        async {}
    };
    registry.register::<Pay, _>(pay).unwrap();
    let heard = Heard::default();
    let worker = Tierline::builder(Topology::parse(MAP).unwrap())
        .amqp(shop.vhost.amqp_url())
        .registry(registry)
        .observe(heard.ear())
        .connect()
        .await
        .unwrap();
    let relaying = shop.relay(MAP).await;
    let sent = shop.rows.publish(Pay { order: 3 }).await.unwrap();
    let done = heard.until("done order.pay", 1);
    worker.work(["urgent"]).until(done).await.unwrap();
    assert_eq!(*runs.lock().unwrap(), [(3, sent.id.to_string())]);
    shop.until_no_rows().await;
    relaying.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_published_within_a_transaction_is_relayed_if_it_commits() {
    let shop = Shop::open().await;
    let heard = Heard::default();
    let app = shop.app(MAP, Registry::new(), &heard).await;
    let relaying = Relaying::begin(app.relay().unwrap(), heard);
    let mut undone = shop.pool.begin().await.unwrap();
    let publishing = app.publish(Ship { order: 1 }).within(&mut undone);
    publishing.await.unwrap();
    undone.rollback().await.unwrap();
    let mut transaction = shop.pool.begin().await.unwrap();
    let publishing = app.publish(Ship { order: 2 }).within(&mut transaction);
    let sent = publishing.await.unwrap();
    transaction.commit().await.unwrap();
    let message = shop.take("shop.bulk", 1).await.remove(0).message;
    assert_eq!(message.id, sent.id);
    shop.until_no_rows().await;
    relaying.end().await;
    let left = super::get(&shop.channel().await, "shop.bulk").await;
    assert!(left.is_none(), "{left:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_whose_task_has_moved_goes_where_the_map_says_today() {
    let shop = Shop::open().await;
    shop.rows.publish(Ship { order: 1 }).await.unwrap();
    shop.rows.publish(Pay { order: 2 }).await.unwrap();
    let to_critical = MAP.replace("\"order.ship\" = \"bulk\"", "\"order.ship\" = \"critical\"");
    // And the other one to a tier in Postgres.
    let moved = to_critical.replace(
        "[groups.urgent]",
        "[tiers.later]\nqueue = \"postgres\"\n[groups.late]\ntiers = [\"later\"]\nconcurrency = 1\n[groups.urgent]",
    );
    let moved = moved.replace("\"order.pay\" = \"critical\"", "\"order.pay\" = \"later\"");
    let relaying = shop.relay(&moved).await;
    let message = shop.take("shop.critical", 1).await.remove(0).message;
    assert_eq!(message.task, "order.ship");
    until("the other one is a row of its new tier", async || {
        let tiers: Vec<String> = sqlx::query_scalar(
            "SELECT tier FROM tierline.ready JOIN tierline.backlogs ON backlogs.id = ready.backlog",
        )
        .fetch_all(&shop.pool)
        .await
        .unwrap();
        tiers == ["later"]
    })
    .await;
    relaying.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_relay_of_some_tiers_leaves_the_others_and_refuses_those_that_have_no_queue() {
    let shop = Shop::open().await;
    let heard = Heard::default();
    let app = shop.app(MAP, Registry::new(), &heard).await;
    let refused = app.relay().unwrap().tiers(["critikal"]).await.unwrap_err();
    let Error::Topology(TopologyError::NotOnBroker { near, .. }) = &refused else {
        panic!("{refused}");
    };
    assert_eq!(near.as_deref(), Some("critical"), "{refused}");

    shop.rows.publish(Ship { order: 1 }).await.unwrap();
    shop.rows.publish(Pay { order: 2 }).await.unwrap();
    let relay = app.relay().unwrap().tiers(["critical"]);
    let relaying = Relaying::begin(relay, heard);
    shop.take("shop.critical", 1).await;
    until("one row is left", async || shop.count().await == [0, 1, 0]).await;
    relaying.end().await;
}
