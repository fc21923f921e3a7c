//! Rows of a tier that lives on the broker.

use std::time::Duration;

use sqlx::Executor;
use tierline::{Registry, TaskError, TaskOptions, Tierline, Topology};
use tierline_testbed::{Database, Vhost, database, vhost};
use tokio::time::{Instant, sleep};

use super::{MAP, Ship, Shipped, Shop, gated};
use crate::worker::{Heard, PATIENCE};

/// The same app whose tier lives on the broker.
fn map_on_broker() -> String {
    let map = MAP.replace("\"postgres\"", "\"quorum\"");
    let map = map.replace("lease = \"2s\"", "");
    map.replace("concurrency = 2", "concurrency = 1")
}

/// An app whose map has the tier on the broker, with the database of one whose map has it in Postgres.
async fn open(vhost: &Vhost, database: &Database, registry: Registry, heard: &Heard) -> Tierline {
    Tierline::builder(Topology::parse(map_on_broker()).unwrap())
        .amqp(vhost.amqp_url())
        .postgres(database.url())
        .registry(registry)
        .observe(heard.ear())
        .connect()
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_tier_on_the_broker_run_although_its_queue_is_never_empty() {
    const ROWS: u32 = 4;
    let (registry, open_gate) = gated();
    let (vhost, database) = (vhost().await, database().await);
    let shop = Shop::open_on(database, MAP, Registry::new()).await;
    let heard = Heard::default();
    let app = open(&vhost, &shop.database, registry, &heard).await;
    for order in 0..200 {
        app.publish(Ship { order }).await.unwrap();
    }
    for order in 0..ROWS {
        shop.app.publish(Ship { order }).await.unwrap();
    }
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let working = tokio::spawn(app.work(["all"]).until(async { drop(stopped.await) }));
    let deadline = Instant::now() + PATIENCE;
    while shop.rows().await != [0, 0, ROWS.into()] {
        assert!(Instant::now() < deadline, "{:?}", shop.rows().await);
        sleep(Duration::from_millis(10)).await;
    }
    // They take turns with the queue: after ten more tasks all of them have run.
    open_gate.add_permits(10);
    heard.until("done", 10).await;
    let deadline = Instant::now() + PATIENCE;
    while shop.rows().await != [0, 0, 0] {
        assert!(Instant::now() < deadline, "{:?}", shop.rows().await);
        sleep(Duration::from_millis(10)).await;
    }
    open_gate.add_permits(1_000);
    heard.until("done", 200 + ROWS as usize).await;
    drop(stop);
    working.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_of_such_a_row_stays_a_row() {
    let shipped = Shipped::default();
    let mut registry = Registry::new();
    let noted = shipped.clone();
    let handler = move |ship: Ship| {
        noted.add(ship.order);
        let is_first = noted.orders().len() == 1;
        async move {
            match is_first {
                true => Err(TaskError::from("not yet")),
                false => Ok(()),
            }
        }
    };
    let options = TaskOptions::new().retries(1).backoff("1h");
    registry.register_with::<Ship, _>(handler, options).unwrap();
    let (vhost, database) = (vhost().await, database().await);
    let shop = Shop::open_on(database, MAP, Registry::new()).await;
    let heard = Heard::default();
    let app = open(&vhost, &shop.database, registry, &heard).await;
    shop.app.publish(Ship { order: 7 }).await.unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let working = tokio::spawn(app.work(["all"]).until(async { drop(stopped.await) }));
    heard.until("retried", 1).await;
    assert_eq!(shop.rows().await, [1, 0, 0]);
    let due = "UPDATE tierline.scheduled SET due_at = now()";
    shop.pool().await.execute(due).await.unwrap();
    heard.until("done order.ship 2", 1).await;
    drop(stop);
    working.await.unwrap().unwrap();
    assert_eq!(shipped.orders(), [7, 7]);
    assert_eq!(shop.rows().await, [0, 0, 0]);
}
