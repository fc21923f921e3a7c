//! Unique work, in both homes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::{StreamExt, stream};
use tierline::backlog::TaskState;
use tierline::error::{ErrorKind, PublishError};
use tierline::task::{PublishRequest, Receipt, TaskEnding, TaskKey, Unique};
use tierline::{Error, Registry, TaskError, TaskOptions, Tierline, Topology};
use tierline_testbed::{Database, PgBouncer, PoolMode, Vhost, database, vhost};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use super::{MAP, Ship, Shipped, Shop, gated, rows, shipping, work};
use crate::worker::{Heard, PATIENCE};

/// The same app, whose tier is on the broker.
fn map_on_broker() -> String {
    let map = MAP.replace(
        "queue = \"postgres\"\n    lease = \"2s\"",
        "queue = \"quorum\"",
    );
    assert_ne!(map, MAP);
    map
}

/// An app whose tier is on the broker, with a database.
async fn open_on_broker(
    vhost: &Vhost,
    database: &Database,
    registry: Registry,
    heard: &Heard,
) -> Tierline {
    let app = Tierline::builder(Topology::parse(map_on_broker()).unwrap())
        .amqp(vhost.amqp_url())
        .postgres(database.url())
        .registry(registry)
        .observe(heard.ear())
        .connect()
        .await
        .unwrap();
    app.database().unwrap().migrate().await.unwrap();
    app
}

/// Publishes until the key is free.
async fn until_free(app: &Tierline, order: u32, unique: &Unique) -> Receipt {
    let publishing = async {
        loop {
            let publish = app.publish(Ship { order }).unique(unique.clone());
            let receipt = publish.deadline("30s").await.unwrap();
            if !receipt.is_duplicate {
                return receipt;
            }
            sleep(Duration::from_millis(5)).await;
        }
    };
    let free = timeout(PATIENCE, publishing).await;
    free.expect("the key was never free")
}

async fn publish(app: &Tierline, order: u32, unique: impl Into<Unique>) -> Receipt {
    let publish = app.publish(Ship { order }).unique(unique);
    publish.deadline("30s").await.unwrap()
}

/// Handlers that note the orders that they ship, when the gate is open.
fn gated_shipping() -> (Registry, Shipped, Arc<Semaphore>) {
    let (shipped, open) = (Shipped::default(), Arc::new(Semaphore::new(0)));
    let (noted, gate) = (shipped.clone(), open.clone());
    let mut registry = Registry::new();
    registry
        .register::<Ship, _>(move |ship: Ship| {
            noted.add(ship.order);
            let gate = gate.clone();
            async move { gate.acquire().await.unwrap().forget() }
        })
        .unwrap();
    (registry, shipped, open)
}

/// Each key is published 64 times at once by two processes, while workers run. Exactly one of each runs, and after it
/// is done the key is free.
async fn one_of_64_runs(apps: [&Tierline; 2], heard: &Heard, shipped: &Shipped, open: &Semaphore) {
    const KEYS: u32 = 12;
    let publishes = (0..KEYS * 64).map(|number| {
        let (order, app) = (number % KEYS, apps[(number / KEYS % 2) as usize]);
        let publish = app.publish(Ship { order }).unique(format!("ship:{order}"));
        async move { (order, publish.deadline("60s").await.unwrap()) }
    });
    let mut receipts: BTreeMap<u32, Vec<Receipt>> = BTreeMap::new();
    for (order, receipt) in join_all(publishes).await {
        receipts.entry(order).or_default().push(receipt);
    }
    for (order, receipts) in &receipts {
        assert_eq!(receipts.len(), 64);
        let first: Vec<_> = receipts.iter().filter(|it| !it.is_duplicate).collect();
        assert_eq!(first.len(), 1, "{order}");
        let same = receipts
            .iter()
            .all(|it| it.id == first[0].id && it.tier == "normal");
        assert!(same, "{receipts:?}");
    }
    open.add_permits(KEYS as usize);
    heard.until("done", KEYS as usize).await;
    let mut orders = shipped.orders();
    orders.sort_unstable();
    assert_eq!(orders, (0..KEYS).collect::<Vec<_>>());
    open.add_permits(KEYS as usize);
    for order in 0..KEYS {
        until_free(apps[0], order, &format!("ship:{order}").into()).await;
    }
    heard.until("done", 2 * KEYS as usize).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn of_64_publishes_of_a_key_at_once_one_runs_in_a_tier_in_postgres() {
    let (registry, shipped, open) = gated_shipping();
    let shop = Shop::open(MAP, registry).await;
    let other = Shop::open_beside(&shop, MAP, Registry::new()).await;
    let working = shop.work();
    one_of_64_runs([&shop.app, &other.app], &shop.heard, &shipped, &open).await;
    working.end().await;
    assert_eq!(shop.rows().await, [0, 0, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_64_publishes_of_a_key_at_once_one_runs_in_a_tier_on_the_broker() {
    let (vhost, database) = tokio::join!(vhost(), database());
    let (registry, shipped, open) = gated_shipping();
    let heard = Heard::default();
    let app = open_on_broker(&vhost, &database, registry, &heard).await;
    let other = open_on_broker(&vhost, &database, Registry::new(), &heard).await;
    let working = work(&app);
    one_of_64_runs([&app, &other], &heard, &shipped, &open).await;
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_with_a_key_for_a_tier_on_the_broker_is_stored_while_the_broker_is_away() {
    let (vhost, database) = tokio::join!(vhost(), database());
    let (registry, shipped) = shipping();
    let heard = Heard::default();
    let app = open_on_broker(&vhost, &database, registry, &heard).await;
    let away = Tierline::builder(Topology::parse(map_on_broker()).unwrap())
        .amqp("amqp://127.0.0.1:1")
        .postgres(database.url())
        .connect_lazy()
        .unwrap();
    let first = publish(&away, 1, "one").await;
    assert_eq!(first.tier, "normal");
    let delayed = away.publish(Ship { order: 2 }).unique("two");
    delayed.delay("200ms").deadline("30s").await.unwrap();
    assert!(publish(&app, 1, "one").await.is_duplicate);
    let working = work(&app);
    heard.until("done", 2).await;
    working.end().await;
    let mut orders = shipped.orders();
    orders.sort_unstable();
    assert_eq!(orders, [1, 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_64_publishes_of_a_key_at_once_one_runs_behind_a_transaction_pooler() {
    let (registry, shipped, open) = gated_shipping();
    let database = database().await;
    let pooler = PgBouncer::start(&database, PoolMode::Transaction, 2);
    let pooler = pooler.await.unwrap();
    let heard = Heard::default();
    let map = Topology::parse(MAP).unwrap();
    let app = Tierline::builder(map)
        .postgres(pooler.url())
        .postgres_pooler(true)
        .registry(registry)
        .observe(heard.ear())
        .connect()
        .await
        .unwrap();
    let working = work(&app);
    one_of_64_runs([&app, &app], &heard, &shipped, &open).await;
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_is_held_until_started_is_free_while_the_task_runs() {
    let (registry, open) = gated();
    let map = MAP.replace("concurrency = 2", "concurrency = 3");
    let shop = Shop::open(&map, registry).await;
    let unique = Unique::key("ship").until_started();
    let first = publish(&shop.app, 1, unique.clone()).await;
    let second = publish(&shop.app, 1, unique.clone()).await;
    assert!(second.is_duplicate && second.id == first.id, "{second:?}");
    let working = shop.work();
    shop.heard.until("started", 1).await;
    let third = publish(&shop.app, 1, unique).await;
    assert!(!third.is_duplicate, "{third:?}");
    // By default a task that runs has the key.
    let running = publish(&shop.app, 2, "other").await;
    shop.heard.until("started", 3).await;
    let again = publish(&shop.app, 2, "other").await;
    assert!(again.is_duplicate && again.id == running.id, "{again:?}");
    open.add_permits(10);
    shop.heard.until("done", 3).await;
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_waits_for_its_retry_has_its_key_and_a_dead_letter_has_not() {
    let fails = Arc::new(AtomicU32::new(0));
    let mut registry = Registry::new();
    let failing = fails.clone();
    let handler = move |_: Ship| {
        failing.fetch_add(1, Ordering::SeqCst);
        async { Err::<(), _>(TaskError::from("no")) }
    };
    let options = TaskOptions::new().retries(1).backoff("500ms");
    registry.register_with::<Ship, _>(handler, options).unwrap();
    let shop = Shop::open(MAP, registry).await;
    let first = publish(&shop.app, 1, "ship").await;
    let working = shop.work();
    shop.heard.until("retried", 1).await;
    let again = publish(&shop.app, 1, "ship").await;
    assert!(again.is_duplicate && again.id == first.id, "{again:?}");
    assert_eq!(shop.heard.count("dead"), 0, "the retry came too early");
    shop.heard.until("dead", 1).await;
    let free = until_free(&shop.app, 1, &"ship".into()).await;
    assert_ne!(free.id, first.id);
    shop.heard.until("dead", 2).await;
    working.end().await;
    assert_eq!(fails.load(Ordering::SeqCst), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_period_holds_a_key_after_the_task_is_done_and_no_longer() {
    let (registry, shipped) = shipping();
    let shop = Shop::open(MAP, registry).await;
    let working = shop.work();
    let hour = Unique::key("hour").for_period("1h");
    let first = publish(&shop.app, 1, hour.clone()).await;
    let moment = Unique::key("moment").for_period("300ms");
    publish(&shop.app, 2, moment.clone()).await;
    shop.heard.until("done", 2).await;
    // Workers would remove the key after a minute.
    working.end().await;
    until_free(&shop.app, 2, &moment).await;
    let again = publish(&shop.app, 1, hour).await;
    assert!(again.is_duplicate && again.id == first.id, "{again:?}");
    assert_eq!(shop.rows().await, [0, 1, 0]);
    assert_eq!(shipped.orders().iter().filter(|it| **it == 1).count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_key_is_held_longer_than_its_maximum_which_counts_from_when_the_task_is_due() {
    let (registry, open) = gated();
    let shop = Shop::open(MAP, registry).await;
    let working = shop.work();
    let unique = Unique::key("ship").at_most("200ms");
    publish(&shop.app, 1, unique.clone()).await;
    shop.heard.until("started", 1).await;
    until_free(&shop.app, 1, &unique).await;
    shop.heard.until("started", 2).await;
    let later = Unique::key("later").at_most("1ms");
    let delayed = shop.app.publish(Ship { order: 2 }).unique(later.clone());
    delayed.delay("1h").await.unwrap();
    let again = publish(&shop.app, 2, later).await;
    assert!(again.is_duplicate, "{again:?}");
    open.add_permits(2);
    working.end().await;
    // Workers remove keys whose time is over, as soon as they begin.
    let pool = shop.pool().await;
    let is_over = "SELECT expires_at < now() FROM tierline.unique_keys WHERE key = 'ship'";
    let over = async {
        while !sqlx::query_scalar::<_, bool>(is_over)
            .fetch_one(&pool)
            .await
            .unwrap()
        {}
    };
    timeout(PATIENCE, over).await.unwrap();
    let working = shop.work();
    let removed = async {
        loop {
            let query = "SELECT key FROM tierline.unique_keys ORDER BY key";
            let keys: Vec<String> = sqlx::query_scalar(query).fetch_all(&pool).await.unwrap();
            if keys == ["later"] {
                return;
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, removed).await.unwrap();
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_waits_is_replaced_and_one_that_runs_is_not() {
    let map = MAP.replace("lease = \"2s\"", "lease = \"2s\"\nkeep = \"1h\"");
    let (registry, shipped, open) = gated_shipping();
    let shop = Shop::open(&map, registry).await;
    let unique = Unique::key("ship").or_replace();
    let delayed = shop.app.publish(Ship { order: 1 }).unique(unique.clone());
    let first = delayed.delay("1h").await.unwrap();
    assert!(first.replaced.is_none());
    let second = publish(&shop.app, 2, unique.clone()).await;
    assert_eq!(second.replaced.as_ref(), Some(&first.id));
    assert!(!second.is_duplicate && second.id != first.id, "{second:?}");
    let third = publish(&shop.app, 3, unique.clone()).await;
    assert_eq!(third.replaced.as_ref(), Some(&second.id));
    assert_eq!(shop.rows().await, [0, 1, 0]);
    let gone = shop.app.backlog().unwrap().get(&first.id).await.unwrap();
    assert_eq!(gone.summary.state, TaskState::Finished);
    assert_eq!(gone.summary.ending, Some(TaskEnding::Cancelled));
    let working = shop.work();
    shop.heard.until("started", 1).await;
    let late = publish(&shop.app, 4, unique).await;
    assert!(late.is_duplicate && late.replaced.is_none(), "{late:?}");
    assert_eq!(late.id, third.id);
    open.add_permits(1);
    shop.heard.until("done", 1).await;
    working.end().await;
    assert_eq!(shipped.orders(), [3]);
}

#[tokio::test(flavor = "multi_thread")]
async fn replacing_while_workers_claim_runs_the_last_and_nothing_twice() {
    let (registry, shipped) = shipping();
    let shop = Shop::open(MAP, registry).await;
    let working = shop.work();
    let (mut replaced, mut duplicates) = (0, 0);
    let unique = Unique::key("ship").until_started().or_replace();
    for order in 0..300 {
        let receipt = publish(&shop.app, order, unique.clone()).await;
        replaced += u32::from(receipt.replaced.is_some());
        duplicates += u32::from(receipt.is_duplicate);
    }
    let expected = (300 - replaced - duplicates) as usize;
    shop.heard.until("done", expected).await;
    working.end().await;
    let mut orders = shipped.orders();
    assert_eq!(orders.len(), expected);
    orders.sort_unstable();
    orders.dedup();
    assert_eq!(orders.len(), expected);
    assert_eq!(orders.last(), Some(&299));
    assert_eq!(shop.rows().await, [0, 0, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publish_that_refuses_to_be_a_duplicate_fails_with_the_first_ones_id() {
    let shop = Shop::open(MAP, Registry::new()).await;
    let unique = Unique::key("ship:7").or_refuse();
    let first = publish(&shop.app, 1, unique.clone()).await;
    let refused = shop.app.publish(Ship { order: 1 }).unique(unique).await;
    let error = refused.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Conflict);
    assert!(!error.is_transient());
    assert!(
        matches!(&error, Error::Publish(PublishError::Duplicate { first: id, key, .. })
            if *id == first.id && &**key == "ship:7"),
        "{error}"
    );
    assert_eq!(shop.rows().await, [0, 1, 0]);
}

/// The key of a task whose transaction is open, as another process would take it.
const TAKE: &str = "WITH row AS (INSERT INTO tierline.ready (id, due_at, backlog, rank, task, payload) \
     SELECT '01998b1c-7d3a-7a5e-b0c4-92f16e08d3b7', now(), id, 0, 'order.ship', '{\"order\":99}' FROM tierline.backlogs \
     RETURNING id) \
     INSERT INTO tierline.unique_keys (app, kind, key, row_id, task_id, tier, holds, expires_at) \
     SELECT 'shop', 'unique', 'ship', id, 'holder', 'normal', 'done', now() + interval '1 hour' FROM row \
     ON CONFLICT (app, kind, key) DO UPDATE SET row_id = excluded.row_id, task_id = excluded.task_id";

#[tokio::test(flavor = "multi_thread")]
async fn a_key_in_an_open_transaction_is_busy_and_holds_up_no_other() {
    let shop = Shop::open(MAP, Registry::new()).await;
    let pool = shop.pool().await;
    // Gives the tier its number.
    shop.app.publish(Ship { order: 0 }).await.unwrap();
    for does_commit in [false, true] {
        let mut open = pool.begin().await.unwrap();
        let taken = sqlx::query(TAKE).execute(&mut *open).await.unwrap();
        assert_eq!(taken.rows_affected(), 1);
        let busy = shop.app.publish(Ship { order: 1 }).unique("ship");
        let error = busy.deadline("3s").await.unwrap_err();
        assert!(
            matches!(&error, Error::Publish(PublishError::KeyBusy { key, .. }) if &**key == "ship"),
            "{error}"
        );
        assert!(error.is_transient() && error.kind() == ErrorKind::Conflict);
        let before = rows(&pool).await[1];
        // Of one stream: the busy key first, then others, with and without keys.
        let requests = (0..100).map(move |order| {
            let mut request = PublishRequest::new(&Ship { order }).unwrap();
            request.deadline = Some(PATIENCE);
            request.unique = match order {
                0 => Some("ship".into()),
                1..50 => Some(format!("{does_commit}:{order}").into()),
                _ => None,
            };
            request
        });
        let publishing = shop.app.publish_many(stream::iter(requests));
        let publishing = tokio::spawn(publishing.collect::<Vec<_>>());
        let others = async { while rows(&pool).await[1] < before + 99 {} };
        timeout(PATIENCE, others)
            .await
            .expect("others were held up");
        assert!(!publishing.is_finished());
        match does_commit {
            true => open.commit().await.unwrap(),
            false => open.rollback().await.unwrap(),
        }
        let outcomes = publishing.await.unwrap();
        assert_eq!(outcomes.iter().filter(|it| it.is_ok()).count(), 100);
        let decided = outcomes.into_iter().next().unwrap().unwrap();
        assert_eq!(decided.is_duplicate, does_commit, "{decided:?}");
        match does_commit {
            true => assert_eq!(decided.id.as_str(), "holder"),
            false => {
                let backlog = shop.app.backlog().unwrap();
                backlog.cancel(&decided.id).await.unwrap();
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn equal_ids_that_callers_choose_do_not_confuse_keys() {
    let (registry, _) = shipping();
    let shop = Shop::open(MAP, registry).await;
    let publish = |order, key: &str| {
        let publish = shop.app.publish(Ship { order }).id("same");
        publish.unique(key).deadline("30s")
    };
    let first = publish(1, "one").await.unwrap();
    let second = publish(2, "two").delay("1h").await.unwrap();
    assert!(!first.is_duplicate && !second.is_duplicate);
    assert_eq!((first.id.as_str(), second.id.as_str()), ("same", "same"));
    assert_eq!(shop.rows().await, [1, 1, 0]);
    let working = shop.work();
    shop.heard.until("done", 1).await;
    until_free(&shop.app, 1, &"one".into()).await;
    assert!(publish(2, "two").await.unwrap().is_duplicate);
    shop.heard.until("done", 2).await;
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_key_of_a_task_can_be_looked_up_and_survives_its_retry() {
    let mut registry = Registry::new();
    let handler = |_: Ship| async { Err::<(), _>(TaskError::from("no")) };
    let options = TaskOptions::new().retries(1).backoff("1h");
    registry.register_with::<Ship, _>(handler, options).unwrap();
    let shop = Shop::open(MAP, registry).await;
    let receipt = publish(&shop.app, 1, "ship:7").await;
    let backlog = shop.app.backlog().unwrap();
    let key = Some(TaskKey::Unique("ship:7".into()));
    assert_eq!(backlog.get(&receipt.id).await.unwrap().key, key);
    let working = shop.work();
    shop.heard.until("retried", 1).await;
    working.end().await;
    let task = backlog.get(&receipt.id).await.unwrap();
    assert_eq!((task.summary.state, task.key), (TaskState::Scheduled, key));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_without_a_database_or_of_no_use_fails_at_the_call() {
    let map = Topology::parse(map_on_broker()).unwrap();
    let app = Tierline::builder(map).amqp("amqp://127.0.0.1:1");
    let app = app.connect_lazy().unwrap();
    let without = app.publish(Ship { order: 1 }).unique("ship").await;
    let error = without.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Configuration);
    assert!(
        matches!(
            error,
            Error::Publish(PublishError::KeyWithoutDatabase { .. })
        ),
        "{error}"
    );
    let both = app
        .publish(Ship { order: 1 })
        .unique("a")
        .idempotency_key("a");
    for invalid in [both, app.publish(Ship { order: 1 }).unique("")] {
        let error = invalid.await.unwrap_err();
        assert!(
            matches!(error, Error::Publish(PublishError::InvalidKey { .. })),
            "{error}"
        );
    }
}
