//! Workers that stall, die, or lose their database.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use serde::{Deserialize, Serialize};
use tierline::task::CancelReason;
use tierline::{Context, Outcome, Registry, Task, Tierline, Topology};
use tierline_testbed::{Network, database, vhost};
use tokio::sync::Semaphore;

use super::{MAP, Ship, Shop, behind_a_proxy, gated, shipping};
use crate::worker::{Heard, PATIENCE};

/// A worker whose database does not answer any more.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_cannot_extend_its_lease_cancels_the_handler_and_another_one_runs_the_task() {
    let reasons = Arc::new(std::sync::Mutex::new(Vec::new()));
    let stalled = Arc::new(Semaphore::new(0));
    let mut registry = Registry::new();
    let (told, cancelled) = (reasons.clone(), stalled.clone());
    registry
        .register::<Ship, _>(move |_: Ship, cx: Context| {
            let (told, cancelled) = (told.clone(), cancelled.clone());
            async move {
                cx.cancelled().await;
                told.lock().unwrap().push(cx.cancel_reason());
                cancelled.add_permits(1);
                // Whatever it says now does not count.
                Outcome::dead("too late")
            }
        })
        .unwrap();
    let database = database().await;
    let url = database.url().to_owned();
    let (proxy, proxied) = behind_a_proxy(&url).await;
    let stalling = Shop::open_at(&proxied, database, MAP, registry).await;
    let working = stalling.work();
    let (registry, shipped) = shipping();
    let other = tierline::Tierline::builder(tierline::Topology::parse(MAP).unwrap())
        .postgres(&url)
        .registry(registry)
        .observe(stalling.heard.ear())
        .connect()
        .await
        .unwrap();
    other.publish(Ship { order: 1 }).await.unwrap();
    stalling.heard.until("started", 1).await;
    proxy.set(Network::Silent);
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let taking_over = tokio::spawn(other.work(["all"]).until(async {
        let _ = stopped.await;
    }));
    stalled.acquire().await.unwrap().forget();
    assert_eq!(
        reasons.lock().unwrap().clone(),
        [Some(CancelReason::LeaseLost)]
    );
    stalling.heard.until("done", 1).await;
    assert_eq!(shipped.orders(), [1]);
    // It comes back, and changes nothing.
    proxy.set(Network::Good);
    working.end().await;
    stop.send(()).unwrap();
    taking_over.await.unwrap().unwrap();
    assert_eq!(stalling.rows().await, [0, 0, 0]);
    assert_eq!(stalling.heard.count("dead"), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_whose_connections_are_cut_again_and_again_loses_nothing_and_runs_nothing_twice() {
    let ran = Arc::new(AtomicU32::new(0));
    let mut registry = Registry::new();
    let count = ran.clone();
    registry
        .register::<Ship, _>(move |_: Ship| {
            count.fetch_add(1, Ordering::SeqCst);
            async {}
        })
        .unwrap();
    let shop = Shop::open(MAP, registry).await;
    let working = shop.work();
    for round in 0..10 {
        for order in 0..20 {
            let publish = shop.app.publish(Ship {
                order: round * 20 + order,
            });
            publish.deadline("30s").await.unwrap();
        }
        shop.database.kill_connections().await.unwrap();
    }
    shop.heard.until("done", 200).await;
    working.end().await;
    assert_eq!(shop.rows().await, [0, 0, 0]);
    assert_eq!(shop.heard.count("suspected"), 0);
}

/// A tier on the broker below one in Postgres.
const MIXED: &str = r#"
    app = "shop"
    [tiers.high]
    queue = "postgres"
    [tiers.low]
    queue = "quorum"
    [groups.all]
    tiers = ["high", "low"]
    concurrency = 2
    [tasks]
    "order.ship" = "high"
    "order.archive" = "low"
"#;

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_is_away_from_the_start_on_holds_up_no_tier_on_the_broker() {
    let (vhost, database) = tokio::join!(vhost(), database());
    let (proxy, url) = behind_a_proxy(database.url()).await;
    let (mut registry, shipped) = shipping();
    let archived = shipped.clone();
    registry
        .register::<Archive, _>(move |archive: Archive| {
            archived.add(archive.order);
            async {}
        })
        .unwrap();
    let heard = Heard::default();
    let app = Tierline::builder(Topology::parse(MIXED).unwrap())
        .amqp(vhost.amqp_url())
        .postgres(url)
        .registry(registry)
        .observe(heard.ear())
        .connect()
        .await
        .unwrap();
    app.publish(Ship { order: 1 }).await.unwrap();
    proxy.set(Network::Silent);
    for order in 2..12 {
        app.publish(Archive { order }).await.unwrap();
    }
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let worker = app.work(["all"]).without_collector().grace("1s");
    let working = tokio::spawn(worker.until(async {
        let _ = stopped.await;
    }));
    heard.until("done order.archive", 10).await;
    proxy.set(Network::Good);
    heard.until("done order.ship", 1).await;
    stop.send(()).unwrap();
    working.await.unwrap().unwrap();
    assert_eq!(shipped.orders().last(), Some(&1));
}

#[derive(Debug, Serialize, Deserialize)]
struct Archive {
    order: u32,
}

impl Task for Archive {
    const NAME: &'static str = "order.archive";
}

/// As after a publish that got no answer, and was repeated.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_is_there_twice_harms_no_other() {
    let (registry, open) = gated();
    let shop = Shop::open(MAP, registry).await;
    shop.app.publish(Ship { order: 1 }).await.unwrap();
    let working = shop.work();
    shop.heard.until("started", 1).await;
    let columns = "id, due_at, rank, is_held, backlog, task, name, properties, payload";
    let pool = shop.pool().await;
    for table in ["ready", "scheduled"] {
        let copy = format!(
            "INSERT INTO tierline.{table} ({columns}) SELECT {columns} FROM tierline.running"
        );
        sqlx::query(sqlx::AssertSqlSafe(copy))
            .execute(&pool)
            .await
            .unwrap();
    }
    for order in 2..12 {
        shop.app.publish(Ship { order }).await.unwrap();
    }
    open.add_permits(100);
    shop.heard.until("done", 11).await;
    let drained = async { while shop.rows().await != [0, 0, 0] {} };
    let drained = tokio::time::timeout(PATIENCE, drained).await;
    assert!(drained.is_ok(), "{:?}", shop.rows().await);
    working.end().await;
}
