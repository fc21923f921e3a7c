//! Tasks that are published within the caller's own transaction, in Rust and by SQL.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection, Executor, PgConnection, PgPool};
use tierline::error::{DatabaseError, PublishError, Stored};
use tierline::task::PublishRequest;
use tierline::{Context, Error, Registry, Task, Tierline, Topology};
use tierline_testbed::{database, vhost};

use super::{MAP, Ship, Shop, rows, shipping, work};
use crate::worker::Heard;

/// The same app with its tier on the broker.
fn map_on_broker() -> String {
    MAP.replace("\"postgres\"", "\"classic\"")
        .replace("lease = \"2s\"", "")
}

#[tokio::test(flavor = "multi_thread")]
async fn what_commits_runs_and_what_rolls_back_never_does() {
    for is_on_broker in [false, true] {
        let (registry, shipped) = shipping();
        let heard = Heard::default();
        let (vhost, database) = (vhost().await, database().await);
        let map = match is_on_broker {
            true => map_on_broker(),
            false => MAP.to_owned(),
        };
        let app = Tierline::builder(Topology::parse(map).unwrap())
            .amqp(vhost.amqp_url())
            .postgres(database.url())
            .registry(registry)
            .observe(heard.ear())
            .connect()
            .await
            .unwrap();
        let pool = PgPool::connect(database.url()).await.unwrap();
        pool.execute("CREATE TABLE orders (id integer)")
            .await
            .unwrap();
        let working = work(&app);
        for order in 0..30 {
            let mut tx = pool.begin().await.unwrap();
            let writing = sqlx::query("INSERT INTO orders VALUES ($1)").bind(order as i32);
            writing.execute(&mut *tx).await.unwrap();
            let receipt = app.publish(Ship { order }).within(&mut tx).await.unwrap();
            assert_eq!(receipt.tier, "normal");
            match order % 3 {
                0 => tx.rollback().await.unwrap(),
                1 => tx.commit().await.unwrap(),
                // A connection without a transaction commits at once.
                _ => {
                    tx.commit().await.unwrap();
                    let mut connection = pool.acquire().await.unwrap();
                    let again = Ship { order: order + 100 };
                    app.publish(again).within(&mut connection).await.unwrap();
                }
            }
        }
        heard.until("done order.ship", 30).await;
        working.end().await;
        let mut ran = shipped.orders();
        ran.sort_unstable();
        let committed = (0..30).filter(|order| order % 3 != 0);
        let at_once = (0..30).filter(|order| order % 3 == 2).map(|it| it + 100);
        assert_eq!(ran, committed.chain(at_once).collect::<Vec<u32>>());
        assert_eq!(rows(&pool).await, [0, 0, 0]);
        app.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_sees_a_task_before_its_transaction_commits() {
    let (registry, shipped) = shipping();
    let shop = Shop::open(MAP, registry).await;
    let working = shop.work();
    let pool = shop.pool().await;
    let mut tx = pool.begin().await.unwrap();
    let order = Ship { order: 1 };
    shop.app.publish(order).within(&mut tx).await.unwrap();
    // It was published first, and would run first.
    shop.app.publish(Ship { order: 2 }).await.unwrap();
    shop.heard.until("done order.ship", 1).await;
    assert_eq!(shipped.orders(), [2]);
    tx.commit().await.unwrap();
    shop.heard.until("done order.ship", 2).await;
    working.end().await;
    assert_eq!(shipped.orders(), [2, 1]);
}

/// What a handler was given: id, priority, attempt, and headers.
type Seen = Arc<Mutex<Vec<(String, u8, u32, BTreeMap<String, String>)>>>;

fn noting() -> (Registry, Seen) {
    let seen = Seen::default();
    let mut registry = Registry::new();
    let noted = seen.clone();
    let handler = move |_: Ship, cx: Context| {
        let headers = cx.headers();
        let headers = headers.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let said = (
            cx.id().to_string(),
            cx.priority(),
            cx.attempt(),
            headers.collect(),
        );
        noted.lock().unwrap().push(said);
        async {}
    };
    registry.register::<Ship, _>(handler).unwrap();
    (registry, seen)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_option_of_a_publish_holds_within_a_transaction() {
    let (registry, seen) = noting();
    let shop = Shop::open(MAP, registry).await;
    let pool = shop.pool().await;
    let mut tx = pool.begin().await.unwrap();
    let app = &shop.app;
    let far = app.publish(Ship { order: 1 }).delay("400d");
    far.within(&mut tx).await.unwrap();
    let expired = app.publish(Ship { order: 2 }).expires(Duration::ZERO);
    expired.within(&mut tx).await.unwrap();
    let rich = app.publish(Ship { order: 3 }).priority(9).id("order-3");
    let rich = rich.header("who", "Ada").within(&mut tx);
    assert_eq!(rich.await.unwrap().id.as_str(), "order-3");
    let soon = app.publish(Ship { order: 4 }).delay("50ms");
    let soon = soon.within(&mut tx).await.unwrap().id;
    tx.commit().await.unwrap();
    assert_eq!(shop.rows().await, [2, 2, 0]);
    let working = shop.work();
    shop.heard.until("expired", 1).await;
    shop.heard.until("done", 2).await;
    working.end().await;
    let headers = BTreeMap::from([("who".to_owned(), "Ada".to_owned())]);
    let mut expected = [
        ("order-3".to_owned(), 9, 1, headers),
        (soon.to_string(), 5, 1, BTreeMap::new()),
    ];
    expected.sort();
    let mut seen = seen.lock().unwrap().clone();
    // Two handlers run at once.
    seen.sort();
    assert_eq!(seen, expected);
    assert_eq!(shop.rows().await, [1, 0, 0]);
}

#[tokio::test]
async fn a_task_that_could_never_be_published_fails_at_the_call_and_the_transaction_goes_on() {
    #[derive(serde::Serialize, serde::Deserialize)]
    struct Unmapped {}
    impl Task for Unmapped {
        const NAME: &'static str = "order.unmapped";
    }
    let map = format!("{MAP}[broker]\nmax_message_size = \"1KiB\"\n");
    let shop = Shop::open(&map, Registry::new()).await;
    let pool = shop.pool().await;
    let mut tx = pool.begin().await.unwrap();
    let app = &shop.app;
    let unmapped = app.publish(Unmapped {}).within(&mut tx).await;
    assert!(matches!(
        unmapped,
        Err(Error::Publish(PublishError::UnmappedTask { .. }))
    ));
    let large = PublishRequest::named("order.ship", vec![b' '; 2_000]);
    let small = || PublishRequest::named("order.ship", b"{}".to_vec());
    let many = app.publish_many_within([small(), large, small()], &mut tx);
    assert!(matches!(
        many.await,
        Err(Error::Publish(PublishError::TooLarge { .. }))
    ));
    let urgent = app.publish(Ship { order: 1 }).priority(11).within(&mut tx);
    assert!(matches!(
        urgent.await,
        Err(Error::Publish(PublishError::InvalidPriority { .. }))
    ));
    let reserved = app.publish(Ship { order: 1 }).header("x-death", "1");
    assert!(reserved.within(&mut tx).await.is_err());
    app.publish(Ship { order: 2 })
        .within(&mut tx)
        .await
        .unwrap();
    tx.commit().await.unwrap();
    assert_eq!(shop.rows().await, [0, 1, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_are_published_together_or_not_at_all() {
    const MANY: u32 = 1_200;
    let (registry, shipped) = shipping();
    let shop = Shop::open(MAP, registry).await;
    let pool = shop.pool().await;
    let requests = || {
        let requests = (0..MANY).map(|order| PublishRequest::new(&Ship { order }).unwrap());
        // Of both kinds in turns, in more than one statement.
        requests.enumerate().map(|(place, mut request)| {
            let is_later = (place / 100) % 2 == 1;
            request.delay = is_later.then_some(Duration::from_millis(100));
            request
        })
    };
    let mut tx = pool.begin().await.unwrap();
    let publishing = shop.app.publish_many_within(requests(), &mut tx);
    publishing.await.unwrap();
    tx.rollback().await.unwrap();
    assert_eq!(shop.rows().await, [0, 0, 0]);
    let mut tx = pool.begin().await.unwrap();
    let publishing = shop.app.publish_many_within(requests(), &mut tx);
    let receipts = publishing.await.unwrap();
    assert_eq!(receipts.len(), MANY as usize);
    let nothing = shop.app.publish_many_within([], &mut tx).await.unwrap();
    assert!(nothing.is_empty());
    tx.commit().await.unwrap();
    let working = shop.work();
    shop.heard.until("done", MANY as usize).await;
    working.end().await;
    let mut ran = shipped.orders();
    ran.sort_unstable();
    assert_eq!(ran, (0..MANY).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_full_tier_refuses_within_a_transaction_too() {
    let map = MAP.replace("lease = \"2s\"", "max_length = 10");
    let shop = Shop::open(&map, Registry::new()).await;
    let pool = shop.pool().await;
    let mut tx = pool.begin().await.unwrap();
    let mut taken = 0;
    let refused = loop {
        let publishing = shop.app.publish(Ship { order: taken });
        match publishing.within(&mut tx).await {
            Ok(_) => taken += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(taken, 10);
    assert!(
        matches!(refused, Error::Publish(PublishError::Refused { .. })),
        "{refused}"
    );
    tx.commit().await.unwrap();
    assert_eq!(shop.rows().await, [0, 10, 0]);
}

#[tokio::test]
async fn many_for_a_tier_that_has_no_room_for_all_leave_nothing_in_the_transaction() {
    let map = MAP.replace("lease = \"2s\"", "max_length = 550");
    let shop = Shop::open(&map, Registry::new()).await;
    let pool = shop.pool().await;
    let mut tx = pool.begin().await.unwrap();
    let many = |orders: std::ops::Range<u32>| {
        orders.map(|order| PublishRequest::new(&Ship { order }).unwrap())
    };
    let refused = shop.app.publish_many_within(many(0..600), &mut tx).await;
    let refused = refused.unwrap_err();
    assert!(
        matches!(refused, Error::Publish(PublishError::Refused { .. })),
        "{refused}"
    );
    let fits = shop.app.publish_many_within(many(0..550), &mut tx).await;
    assert_eq!(fits.unwrap().len(), 550);
    tx.commit().await.unwrap();
    assert_eq!(shop.rows().await, [0, 550, 0]);
}

#[tokio::test]
async fn the_first_publish_within_needs_no_other_connection_of_the_apps_pool() {
    let (vhost, database) = (vhost().await, database().await);
    let pool = PgPoolOptions::new().max_connections(1);
    let pool = pool.connect(database.url()).await.unwrap();
    let app = Tierline::builder(Topology::parse(map_on_broker()).unwrap())
        .amqp(vhost.amqp_url())
        .postgres_pool(pool.clone())
        .connect()
        .await
        .unwrap();
    // The tables are made by it, too.
    let mut tx = pool.begin().await.unwrap();
    app.publish(Ship { order: 1 })
        .within(&mut tx)
        .await
        .unwrap();
    tx.commit().await.unwrap();
    assert_eq!(rows(&pool).await, [0, 1, 0]);
}

#[tokio::test]
async fn a_transaction_that_is_older_than_its_tier_is_to_be_run_again() {
    for key in [None, Some("once")] {
        let shop = Shop::open(MAP, Registry::new()).await;
        let pool = shop.pool().await;
        // As after a restore.
        pool.execute("DELETE FROM tierline.backlogs").await.unwrap();
        let mut refused = 0;
        loop {
            let mut tx = pool.begin().await.unwrap();
            tx.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM tierline.backlogs")
                .await
                .unwrap();
            let publish = shop.app.publish(Ship { order: 1 });
            let publish = match key {
                None => publish,
                Some(key) => publish.unique(key),
            };
            match publish.within(&mut tx).await {
                Ok(_) => break tx.commit().await.unwrap(),
                Err(error) => {
                    assert!(error.is_transient(), "{error}");
                    assert_eq!(error.stored(), Some(Stored::No));
                    refused += 1;
                    assert!(refused < 3, "{error}");
                }
            }
        }
        assert_eq!(shop.rows().await, [0, 1, 0]);
    }
}

#[tokio::test]
async fn a_publish_that_got_no_answer_in_time_may_be_in_the_transaction() {
    let shop = Shop::open(MAP, Registry::new()).await;
    let pool = shop.pool().await;
    shop.app.publish(Ship { order: 0 }).await.unwrap();
    let mut other = pool.begin().await.unwrap();
    other
        .execute("LOCK tierline.ready IN SHARE MODE")
        .await
        .unwrap();
    let mut tx = pool.begin().await.unwrap();
    let publish = shop.app.publish(Ship { order: 1 }).deadline("500ms");
    let unknown = publish.within(&mut tx).await.unwrap_err();
    assert_eq!(unknown.stored(), Some(Stored::Maybe), "{unknown}");
    assert!(
        unknown.to_string().contains("roll the transaction back"),
        "{unknown}"
    );
    other.rollback().await.unwrap();
    tx.rollback().await.unwrap();
    assert_eq!(shop.rows().await, [0, 1, 0]);
}

#[tokio::test]
async fn an_app_without_a_database_and_a_foreign_database_are_told_apart() {
    let vhost = vhost().await;
    let database = database().await;
    let topology = Topology::parse(map_on_broker()).unwrap();
    let builder = Tierline::builder(topology.clone()).amqp(vhost.amqp_url());
    let app = builder.connect().await.unwrap();
    let mut connection = PgConnection::connect(database.url()).await.unwrap();
    let refused = app.publish(Ship { order: 1 }).within(&mut connection).await;
    assert!(matches!(
        refused,
        Err(Error::Database(DatabaseError::NotConfigured { .. }))
    ));
    let other = tierline_testbed::database().await;
    let builder = Tierline::builder(topology).amqp(vhost.amqp_url());
    let app = builder.postgres(other.url()).connect().await.unwrap();
    let refused = app.publish(Ship { order: 1 }).within(&mut connection).await;
    let refused = refused.unwrap_err();
    assert!(!refused.is_transient());
    assert!(
        refused.to_string().contains("the app's own database"),
        "{refused}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn other_languages_publish_by_sql() {
    let (registry, seen) = noting();
    let shop = Shop::open(MAP, registry).await;
    let pool = shop.pool().await;
    let publish = async |arguments: &str| -> Result<String, sqlx::Error> {
        let text = format!("SELECT tierline.publish('shop', 'order.ship', {arguments})");
        let statement = sqlx::AssertSqlSafe(text);
        sqlx::query_scalar(statement).fetch_one(&pool).await
    };
    let plain = publish(r#"'{"order": 1}', delay => NULL, headers => NULL"#)
        .await
        .unwrap();
    let rich = publish(
        r#"'{"order": 2}', priority => 9, expires => '1 hour', id => 'order-2', headers => '{"who": "Ada é", "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}'"#,
    );
    assert_eq!(rich.await.unwrap(), "order-2");
    let expired = publish(r#"'{"order": 3}', expires => '0'"#).await.unwrap();
    let soon = publish(r#"'{"order": 4}', delay => '50 ms', headers => '{"a": ""}'"#);
    let soon = soon.await.unwrap();
    publish(r#"'{"order": 5}', delay => '2 years'"#)
        .await
        .unwrap();
    assert_eq!(shop.rows().await, [2, 3, 0]);
    // Each id is that of its task, as the command line shows it.
    let backlog = shop.app.backlog().unwrap();
    let found = backlog.get(&expired.as_str().into()).await.unwrap();
    assert_eq!(found.summary.id.as_str(), expired);
    let working = shop.work();
    shop.heard.until("expired", 1).await;
    shop.heard.until("done", 3).await;
    working.end().await;
    let who = BTreeMap::from([("who".to_owned(), "Ada é".to_owned())]);
    let empty = BTreeMap::from([("a".to_owned(), String::new())]);
    let mut expected = [
        ("order-2".to_owned(), 9, 1, who),
        (plain, 5, 1, BTreeMap::new()),
        (soon, 5, 1, empty),
    ];
    expected.sort();
    let mut seen = seen.lock().unwrap().clone();
    // Two handlers run at once.
    seen.sort();
    assert_eq!(seen, expected);
    assert_eq!(shop.rows().await, [1, 0, 0]);
}

#[tokio::test]
async fn what_sql_cannot_publish_is_an_error_that_says_why() {
    let map = format!("{MAP}[broker]\nmax_message_size = \"1KiB\"\n");
    let shop = Shop::open(&map, Registry::new()).await;
    let pool = shop.pool().await;
    for (arguments, why) in [
        ("'shop', 'order.spam', '1'", "it is not mapped to a tier"),
        ("'stop', 'order.ship', '1'", "it is not mapped to a tier"),
        ("'shop', 'order.ship', NULL", "its payload is NULL"),
        (
            "'shop', 'order.ship', to_jsonb(repeat('x', 1100))",
            "max_message_size of the map is 1024",
        ),
        ("'shop', 'order.ship', '1', priority => 11", "takes 0 to 10"),
        ("'shop', 'order.ship', '1', priority => -1", "takes 0 to 10"),
        (
            "'shop', 'order.ship', '1', delay => '-1 s'",
            "must not be negative",
        ),
        ("'shop', 'order.ship', '1', id => ''", "1 to 255 bytes"),
        (
            "'shop', 'order.ship', '1', id => repeat('é', 200)",
            "1 to 255 bytes",
        ),
        (
            "'shop', 'order.ship', '1', headers => '[]'",
            "a JSON object of texts",
        ),
        (
            "'shop', 'order.ship', '1', headers => '{\"n\": 1}'",
            "\"n\" is reserved, too long, or no text",
        ),
        (
            "'shop', 'order.ship', '1', headers => '{\"x-death\": \"1\"}'",
            "\"x-death\" is reserved",
        ),
        (
            "'shop', 'order.ship', '1', headers => jsonb_build_object('a', repeat('x', 50000))",
            "may have 49152",
        ),
    ] {
        let text = format!("SELECT tierline.publish({arguments})");
        let statement = sqlx::AssertSqlSafe(text.as_str());
        let refused = sqlx::query(statement).execute(&pool).await.unwrap_err();
        assert!(refused.to_string().contains(why), "{text}: {refused}");
    }
    assert_eq!(shop.rows().await, [0, 0, 0]);
}

#[tokio::test]
async fn sql_publishes_to_the_tier_of_the_map_that_was_applied_last() {
    let shop = Shop::open(MAP, Registry::new()).await;
    let pool = shop.pool().await;
    let map = format!(
        "{MAP}[tiers.low]\nqueue = \"postgres\"\n[groups.rest]\ntiers = [\"low\"]\nconcurrency = 1\n"
    );
    let map = map.replace("\"order.ship\" = \"normal\"", "\"order.post\" = \"low\"");
    let topology = Topology::parse(map).unwrap();
    let database = tierline::Database::new(shop.database.url()).unwrap();
    tierline::backlog::apply(&database, &topology)
        .await
        .unwrap();
    pool.execute("SELECT tierline.publish('shop', 'order.post', '1')")
        .await
        .unwrap();
    let gone = pool.execute("SELECT tierline.publish('shop', 'order.ship', '1')");
    assert!(gone.await.unwrap_err().to_string().contains("not mapped"));
    let tier: String = sqlx::query_scalar(
        "SELECT tier FROM tierline.ready JOIN tierline.backlogs ON backlogs.id = backlog",
    )
    .fetch_one(&pool)
    .await
    .unwrap();
    assert_eq!(tier, "low");
}
