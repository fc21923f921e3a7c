//! Behind PgBouncer in transaction mode.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use futures_util::{StreamExt, stream};
use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions, Connection, PgConnection};
use tierline::backlog::{TaskFilter, TaskState};
use tierline::dead::{Filter, Page};
use tierline::error::{DatabaseError, ErrorKind};
use tierline::task::PublishRequest;
use tierline::{Database, Error, Registry, TaskError, TaskOptions, Tierline, Topology};
use tierline_testbed::{PgBouncer, PoolMode, database};

use super::{MAP, Ship, Shop, shipping};
use crate::worker::Heard;

/// Fewer server connections than an app has: statements of several of its connections share each.
const SERVER_CONNECTIONS: u32 = 2;

/// An app behind PgBouncer, on a database that has no tables yet.
async fn open(map: &str, registry: Registry) -> (PgBouncer, Shop) {
    let database = database().await;
    let pooler = PgBouncer::start(&database, PoolMode::Transaction, SERVER_CONNECTIONS);
    let pooler = pooler.await.unwrap();
    let heard = Heard::default();
    let app = app(pooler.url(), map, registry, &heard).await;
    let shop = Shop {
        database: database.into(),
        app,
        heard,
    };
    (pooler, shop)
}

async fn app(url: &str, map: &str, registry: Registry, heard: &Heard) -> Tierline {
    Tierline::builder(Topology::parse(map).unwrap())
        .postgres(url)
        .postgres_pooler(true)
        .registry(registry)
        .observe(heard.ear())
        .connect()
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn retries_delays_dead_letters_redrives_and_cancels_work_behind_a_transaction_pooler() {
    let fails = Arc::new(AtomicU32::new(3));
    let mut registry = Registry::new();
    let options = TaskOptions::new().retries(2).backoff("10ms");
    let left = fails.clone();
    let handler = move |_: Ship| {
        let left = left.clone();
        async move {
            match left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |it| it.checked_sub(1)) {
                Ok(left) => Err(TaskError::from(format!("{left} to go"))),
                Err(_) => Ok(()),
            }
        }
    };
    registry.register_with::<Ship, _>(handler, options).unwrap();
    let (_pooler, shop) = open(MAP, registry).await;
    let later = shop.app.publish(Ship { order: 2 }).delay("1h");
    let later = later.await.unwrap().id;
    let delayed = shop.app.publish(Ship { order: 1 }).delay("100ms");
    delayed.await.unwrap();
    let working = shop.work();
    shop.heard.until("dead order.ship", 1).await;
    let letters = shop.app.dead_letters().unwrap().by("ada");
    let page = letters.list(&Filter::default(), Page::first(10)).await;
    let page = page.unwrap();
    assert_eq!(page.letters.len(), 1);
    letters.redrive(page.letters[0].id).await.unwrap();
    shop.heard.until("done order.ship", 1).await;
    let backlog = shop.app.backlog().unwrap().by("ada");
    let scheduled = TaskFilter::default().state(TaskState::Scheduled);
    let page = backlog.list(&scheduled, None, 10).await;
    assert_eq!(page.unwrap().tasks.len(), 1);
    backlog.cancel(&later).await.unwrap();
    working.end().await;
    assert_eq!(shop.rows().await, [0, 0, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_workers_behind_a_pooler_run_every_task_once_and_leave_no_trace_on_its_connections() {
    let (registry, shipped) = shipping();
    let (pooler, shop) = open(MAP, registry).await;
    let (registry, shipped_by_other) = shipping();
    let other = Shop {
        database: database().await.into(),
        app: app(pooler.url(), MAP, registry, &shop.heard).await,
        heard: shop.heard.clone(),
    };
    let many = (0..2_000).map(|order| PublishRequest::new(&Ship { order }).unwrap());
    let (working, helping) = (shop.work(), other.work());
    let published: Vec<_> = shop
        .app
        .publish_many(stream::iter(many))
        .collect::<Vec<_>>()
        .await;
    assert!(published.iter().all(Result::is_ok));
    shop.heard.until("done order.ship", 2_000).await;
    working.end().await;
    helping.end().await;
    let mut orders = shipped.orders();
    orders.extend(shipped_by_other.orders());
    orders.sort_unstable();
    assert_eq!(orders, (0..2_000).collect::<Vec<_>>());
    // Another client gets each of the server connections: as many transactions at once as there are.
    let mut clients = Vec::new();
    for _ in 0..SERVER_CONNECTIONS {
        let options: sqlx::postgres::PgConnectOptions = pooler.url().parse().unwrap();
        let options = options.extra_float_digits(None);
        let mut client = PgConnection::connect_with(&options).await.unwrap();
        sqlx::raw_sql("BEGIN").execute(&mut client).await.unwrap();
        clients.push(client);
    }
    for client in &mut clients {
        // PgBouncer itself sets what clients say when they connect.
        let changed: Vec<String> = sqlx::query_scalar(
            "SELECT name FROM pg_settings WHERE source = 'session' \
             AND name NOT IN ('application_name', 'client_encoding', 'DateStyle', 'TimeZone')",
        )
        .persistent(false)
        .fetch_all(&mut *client)
        .await
        .unwrap();
        let prepared: Vec<String> =
            sqlx::query_scalar("SELECT statement FROM pg_prepared_statements WHERE name <> ''")
                .persistent(false)
                .fetch_all(&mut *client)
                .await
                .unwrap();
        assert!(
            changed.is_empty() && prepared.is_empty(),
            "{changed:?} {prepared:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn work_goes_on_when_a_killed_pooler_comes_back() {
    let (registry, shipped) = shipping();
    let (pooler, shop) = open(MAP, registry).await;
    let working = shop.work();
    shop.app.publish(Ship { order: 1 }).await.unwrap();
    shop.heard.until("done order.ship", 1).await;
    pooler.kill().await.unwrap();
    let publishing = tokio::spawn({
        let app = shop.app.clone();
        async move { app.publish(Ship { order: 2 }).await }
    });
    pooler.start_again().await.unwrap();
    publishing.await.unwrap().unwrap();
    shop.heard.until("done order.ship", 2).await;
    working.end().await;
    let mut orders = shipped.orders();
    orders.dedup();
    assert_eq!(orders, [1, 2]);
    assert_eq!(shop.heard.count("suspected"), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn schedules_are_published_behind_a_transaction_pooler() {
    let map = format!(
        "{MAP}\n[schedules.ship]\ntask = \"order.ship\"\nevery = \"1s\"\npayload = {{ order = 7 }}\nexpires = \"30s\""
    );
    let (registry, shipped) = shipping();
    let (_pooler, shop) = open(&map, registry).await;
    let working = shop.work();
    let scheduler = shop.app.scheduler().unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let scheduling = tokio::spawn(scheduler.until(async {
        let _ = stopped.await;
    }));
    shop.heard.until("done order.ship", 2).await;
    stop.send(()).unwrap();
    scheduling.await.unwrap().unwrap();
    working.end().await;
    assert!(shipped.orders().iter().all(|order| *order == 7));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_pooler_that_the_app_does_not_know_of_is_named_in_the_error() {
    let database = database().await;
    for connections in [1, 3] {
        let pooler = PgBouncer::start(&database, PoolMode::Transaction, connections);
        let pooler = pooler.await.unwrap();
        let app = Tierline::builder(Topology::parse(MAP).unwrap()).postgres(pooler.url());
        let error = app.connect().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Configuration, "{error}");
        assert!(error.to_string().contains("PgBouncer"), "{error}");
        let migrated = Database::new(pooler.url()).unwrap().migrate().await;
        assert!(
            matches!(
                migrated,
                Err(Error::Database(DatabaseError::TransactionPooler { .. }))
            ),
            "{migrated:?}"
        );
        let known = Database::new(pooler.url()).unwrap().behind_pooler(true);
        known.migrate().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pooler_that_is_busy_with_other_clients_is_recognised() {
    let database = database().await;
    let pooler = PgBouncer::start(&database, PoolMode::Transaction, 3);
    let pooler = pooler.await.unwrap();
    let mut clients = Vec::new();
    for _ in 0..6 {
        let options: sqlx::postgres::PgConnectOptions = pooler.url().parse().unwrap();
        let options = options.extra_float_digits(None);
        let mut client = PgConnection::connect_with(&options).await.unwrap();
        clients.push(tokio::spawn(async move {
            loop {
                let asking = sqlx::raw_sql("SELECT pg_sleep(0.0005)");
                asking.execute(&mut client).await.unwrap();
            }
        }));
    }
    for _ in 0..5 {
        let error = Database::new(pooler.url()).unwrap().migrate().await;
        let error = error.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Configuration, "{error}");
    }
    for client in clients {
        client.abort();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pooler_of_sessions_is_as_good_as_a_plain_server() {
    let database = database().await;
    let pooler = PgBouncer::start(&database, PoolMode::Session, 30);
    let pooler = pooler.await.unwrap();
    let (registry, _) = shipping();
    let url = pooler.url().to_owned();
    let shop = Shop::open_at(&url, database, MAP, registry).await;
    let working = shop.work();
    shop.app.publish(Ship { order: 1 }).await.unwrap();
    shop.heard.until("done order.ship", 1).await;
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_of_the_app_works_behind_a_transaction_pooler() {
    let database = database().await;
    let pooler = PgBouncer::start(&database, PoolMode::Transaction, SERVER_CONNECTIONS);
    let pooler = pooler.await.unwrap();
    let options: sqlx::postgres::PgConnectOptions = pooler.url().parse().unwrap();
    // PgBouncer refuses the parameter unless it is told to ignore it.
    let refused = sqlx::PgPool::connect_lazy_with(options.clone());
    let refused = Database::from_pool(refused).behind_pooler(true);
    let error = refused.migrate().await.unwrap_err();
    assert!(
        error.to_string().contains("ignore_startup_parameters"),
        "{error}"
    );
    let pool = sqlx::PgPool::connect_lazy_with(options.extra_float_digits(None));
    let (registry, _) = shipping();
    let heard = Heard::default();
    let app = Tierline::builder(Topology::parse(MAP).unwrap())
        .postgres_pool(pool)
        .postgres_pooler(true)
        .registry(registry)
        .observe(heard.ear())
        .connect()
        .await
        .unwrap();
    let shop = Shop {
        database: database.into(),
        app,
        heard,
    };
    let working = shop.work();
    shop.app.publish(Ship { order: 1 }).await.unwrap();
    shop.heard.until("done order.ship", 1).await;
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publish_within_needs_a_transaction_behind_a_transaction_pooler() {
    let (pooler, shop) = open(MAP, Registry::new()).await;
    let options: PgConnectOptions = pooler.url().parse().unwrap();
    let options = options.extra_float_digits(None).statement_cache_capacity(0);
    let mut connection = options.connect().await.unwrap();
    let publish = shop.app.publish(Ship { order: 1 });
    let refused = publish.within(&mut connection).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    assert!(refused.to_string().contains("begun with sqlx"), "{refused}");
    let mut tx = connection.begin().await.unwrap();
    let publish = shop.app.publish(Ship { order: 2 }).delay("1h");
    publish.within(&mut tx).await.unwrap();
    tx.commit().await.unwrap();
    assert_eq!(shop.rows().await, [1, 0, 0]);
}
