//! What is counted in each minute, over all processes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use futures_util::{StreamExt, stream};
use serde::{Deserialize, Serialize};
use sqlx::{Connection, PgConnection, PgPool};
use tierline::rollup::{Rollup, RollupTotals, Rollups, UNKNOWN};
use tierline::task::PublishRequest;
use tierline::{Context, OnConnect, Outcome, Registry, Task, Tierline, Topology};
use tierline_testbed::{Database, Network, Proxy, database, vhost};

use super::{until, work_in};
use crate::worker::Heard;

const MAP: &str = r#"
    app = "shop"
    [tiers.mail]
    queue = "postgres"
    slo = "1h"
    [tiers.bulk]
    queue = "postgres"
    [groups.all]
    tiers = ["mail", "bulk"]
    concurrency = 4
    prefetch = 4
    [tasks]
    "mail.send" = "mail"
    "report.export" = "bulk"
"#;

/// What its handler is to do.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum Mail {
    Succeed,
    FailOnce,
    Die,
}

impl Task for Mail {
    const NAME: &'static str = "mail.send";
}

#[derive(Debug, Serialize, Deserialize)]
struct Export;

impl Task for Export {
    const NAME: &'static str = "report.export";
}

fn handlers() -> Registry {
    let mut registry = Registry::new();
    registry
        .register::<Mail, _>(async |mail: Mail, cx: Context| match mail {
            Mail::FailOnce if cx.attempt() == 1 => Outcome::retry("not yet"),
            Mail::Succeed | Mail::FailOnce => Outcome::Done,
            Mail::Die => Outcome::dead("it cannot be sent"),
        })
        .unwrap();
    registry
        .register::<Export, _>(async |_: Export| Outcome::discard("nobody wants it"))
        .unwrap();
    registry
}

async fn app_at(url: &str, heard: &Heard) -> Tierline {
    Tierline::builder(Topology::parse(MAP).unwrap())
        .postgres(url)
        .registry(handlers())
        .observe(heard.ear())
        .connect()
        .await
        .unwrap()
}

/// What the database has, read past all proxies.
fn rollups(database: &Database) -> Rollups {
    let topology = Topology::parse(MAP).unwrap();
    Rollups::new(&topology, tierline::Database::new(database.url()).unwrap())
}

async fn total(database: &Database, tier: &str) -> RollupTotals {
    let sums = rollups(database).last("1d").tier(tier).await.unwrap();
    assert!(sums.len() <= 1);
    let totals = sums.into_iter().next().map(|sum| sum.totals);
    totals.unwrap_or_default()
}

async fn behind_a_proxy(database: &Database) -> (Proxy, String) {
    let (server, path) = database.url().rsplit_once('/').unwrap();
    let (host, port) = server.rsplit_once(':').unwrap();
    let proxy = Proxy::start(port.parse().unwrap()).await.unwrap();
    let url = format!("{host}:{}/{path}", proxy.port());
    (proxy, url)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_counts_of_two_processes_add_up_to_what_happened() {
    let database = database().await;
    let heard = Heard::default();
    let first = app_at(database.url(), &heard).await;
    let second = app_at(database.url(), &heard).await;
    for app in [&first, &second] {
        for mail in [Mail::Succeed, Mail::Succeed, Mail::FailOnce, Mail::Die] {
            app.publish(mail).await.unwrap();
        }
        let many = (0..50).map(|_| PublishRequest::new(&Export).unwrap());
        let published = app.publish_many(stream::iter(many));
        let published: Vec<_> = published.collect().await;
        assert!(published.iter().all(Result::is_ok) && published.len() == 50);
        let expiring = app.publish(Mail::Succeed).expires(Duration::from_millis(1));
        expiring.await.unwrap();
    }
    let pool = PgPool::connect(database.url()).await.unwrap();
    let mut transaction = pool.begin().await.unwrap();
    let within = first.publish(Mail::Succeed).within(&mut transaction);
    within.await.unwrap();
    transaction.commit().await.unwrap();
    second.publish(Export).unique("one").await.unwrap();
    assert!(
        first
            .publish(Export)
            .unique("one")
            .await
            .unwrap()
            .is_duplicate
    );
    let unmapped = serde_json::json!(7);
    assert!(
        first
            .publish_named("no.such.task", &unmapped)
            .await
            .is_err()
    );
    let refused = second.publish(Mail::Succeed).priority(200).await;
    assert!(refused.is_err());

    let working = [work_in(&first, ["all"]), work_in(&second, ["all"])];
    heard.until("done mail.send", 7).await;
    heard.until("dead", 2).await;
    heard.until("expired", 2).await;
    heard.until("discarded", 101).await;
    for worker in working {
        worker.end().await;
    }
    // Each worker has written its counts. The app's end adds nothing that is there already.
    let [mail, bulk] = [
        total(&database, "mail").await,
        total(&database, "bulk").await,
    ];
    first.close().await;
    second.close().await;
    assert_eq!(mail, total(&database, "mail").await);

    let counts = [
        mail.published,
        mail.duplicates,
        mail.unpublished,
        mail.started,
    ];
    assert_eq!(counts, [11, 0, 1, 11], "{mail:?}");
    let outcomes = [
        mail.done,
        mail.retried,
        mail.dead,
        mail.expired,
        mail.given_back,
    ];
    assert_eq!(outcomes, [7, 2, 2, 2, 0], "{mail:?}");
    assert_eq!((mail.wait.count(), mail.run.count()), (11, 11));
    assert_eq!((mail.slo_met, mail.slo_counted), (11, 13));
    assert_eq!(mail.slo_share(), Some(11.0 / 13.0));
    assert!(!mail.is_paused);
    let counts = [
        bulk.published,
        bulk.duplicates,
        bulk.started,
        bulk.discarded,
    ];
    assert_eq!(counts, [101, 1, 101, 101], "{bulk:?}");
    assert_eq!(bulk.slo_counted, 0);
    assert_eq!(total(&database, UNKNOWN).await.unpublished, 1);

    // The same by task and minute.
    let minutes = rollups(&database).last("1d").by_task().every("1m");
    let minutes = minutes.await.unwrap();
    let exported = minutes
        .iter()
        .filter(|it| it.task.as_deref() == Some(Export::NAME));
    let exported: u64 = exported.map(|it| it.totals.discarded).sum();
    assert_eq!(exported, 101, "{minutes:#?}");
    let is_whole = |it: &Rollup| {
        let since = it.since.unwrap().duration_since(SystemTime::UNIX_EPOCH);
        since.unwrap().as_secs().is_multiple_of(60)
    };
    assert!(minutes.iter().all(is_whole), "{minutes:#?}");
    let earlier = SystemTime::now() - Duration::from_secs(86_400);
    let before = rollups(&database).between(earlier - Duration::from_secs(60), earlier);
    assert_eq!(before.await.unwrap(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_broker_dead_letters_is_counted_when_it_is_collected() {
    let map = MAP.replacen(
        "queue = \"postgres\"",
        "queue = \"quorum\"\nttl = \"1s\"",
        1,
    );
    let (database, vhost) = (database().await, vhost().await);
    let app = Tierline::builder(Topology::parse(map).unwrap())
        .amqp(vhost.amqp_url())
        .postgres(database.url())
        .registry(handlers())
        .connect()
        .await
        .unwrap();
    for _ in 0..3 {
        app.publish(Mail::Succeed).await.unwrap();
    }
    let pool = PgPool::connect(database.url()).await.unwrap();
    let logged = async || -> i64 {
        let count = sqlx::query_scalar("SELECT count(*) FROM tierline.dead_letters");
        count.fetch_one(&pool).await.unwrap()
    };
    // It collects, and runs nothing.
    let collecting = work_in(&app, [] as [&str; 0]);
    until(async || logged().await == 3).await;
    collecting.end().await;
    app.close().await;
    until(async || total(&database, "mail").await.dead == 3).await;
    let mail = total(&database, "mail").await;
    assert_eq!((mail.started, mail.slo_met, mail.slo_counted), (0, 0, 3));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_published_with_a_delay_is_no_arrival() {
    let database = database().await;
    let app = app_at(database.url(), &Heard::default()).await;
    for _ in 0..5 {
        app.publish(Mail::Succeed).delay("1h").await.unwrap();
    }
    app.publish(Export).await.unwrap();
    work_in(&app, [] as [&str; 0]).end().await;
    let mail = total(&database, "mail").await;
    assert_eq!((mail.published, mail.delayed), (5, 5));
    let scaling = app.scaling().await.unwrap();
    let arrivals = |tier: &str| {
        let mut tiers = scaling.iter().flat_map(|group| &group.tiers);
        let tier = tiers.find(|it| it.tier == tier).unwrap();
        tier.arrivals_per_second
    };
    assert_eq!(arrivals("mail"), 0.0);
    assert!(arrivals("bulk") > 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_is_marked_where_nothing_happens() {
    let database = database().await;
    let app = app_at(database.url(), &Heard::default()).await;
    let control = app.control().unwrap();
    control.pause_tier("mail").await.unwrap();
    until(async || {
        // What ends writes what was counted.
        work_in(&app, [] as [&str; 0]).end().await;
        total(&database, "mail").await.is_paused
    })
    .await;
    let minutes = rollups(&database).last("1d").by_task().every("1m");
    let minutes = minutes.await.unwrap();
    let idle = RollupTotals::default();
    for minute in &minutes {
        let names = (minute.tier.as_str(), minute.task.as_deref());
        assert_eq!(names, ("mail", Some("mail.send")));
        assert!(minute.totals.is_paused);
        assert_eq!(minute.totals.started, idle.started);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn publishes_that_are_refused_are_counted_where_they_would_have_gone() {
    let database = database().await;
    let app = app_at(database.url(), &Heard::default()).await;
    let pool = PgPool::connect(database.url()).await.unwrap();
    let refused = || {
        let mut request = PublishRequest::new(&Mail::Succeed).unwrap();
        request.priority = Some(200);
        request
    };
    let mail = || PublishRequest::new(&Mail::Succeed).unwrap();
    let export = || PublishRequest::new(&Export).unwrap();
    let mut transaction = pool.begin().await.unwrap();
    // None of them is published.
    let requests = [mail(), export(), refused(), export()];
    let within = app.publish_many_within(requests, &mut transaction).await;
    within.unwrap_err();
    transaction.commit().await.unwrap();
    let working = work_in(&app, ["all"]);
    let control = app.control().unwrap();
    until(async || !control.processes().await.unwrap().is_empty()).await;
    let overriding = control.override_task("mail.send").tier("bulk");
    overriding.await.unwrap();
    app.publish(Mail::Succeed).priority(200).await.unwrap_err();
    working.end().await;
    let [mail, bulk] = [
        total(&database, "mail").await,
        total(&database, "bulk").await,
    ];
    assert_eq!((mail.unpublished, bulk.unpublished), (2, 3));
}

#[tokio::test(flavor = "multi_thread")]
async fn counts_of_a_time_without_the_database_are_written_when_it_is_back() {
    let database = database().await;
    let (proxy, url) = behind_a_proxy(&database).await;
    let heard = Heard::default();
    let app = app_at(&url, &heard).await;
    app.publish(Mail::Succeed).await.unwrap();
    work_in(&app, ["all"]).end().await;
    assert_eq!(total(&database, "mail").await.published, 1);

    proxy.set(Network::Cut);
    // Failed publishes are counted without the database.
    for _ in 0..5 {
        let publish = app.publish(Mail::Succeed).deadline("20ms");
        publish.await.unwrap_err();
    }
    work_in(&app, [] as [&str; 0]).end().await;
    assert_eq!(total(&database, "mail").await.unpublished, 0);
    proxy.set(Network::Good);
    // The app's end does not wait for long, and tries.
    app.close().await;
    drop(app);
    until(async || total(&database, "mail").await.unpublished == 5).await;
    assert_eq!(total(&database, "mail").await.published, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_whose_answer_is_lost_does_not_count_twice() {
    let database = database().await;
    let (proxy, url) = behind_a_proxy(&database).await;
    let heard = Heard::default();
    let app = app_at(&url, &heard).await;
    for _ in 0..3 {
        app.publish(Mail::Succeed).await.unwrap();
    }
    // The commit of the write waits for a lock of the test's.
    let pool = PgPool::connect(database.url()).await.unwrap();
    sqlx::raw_sql(
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
             PERFORM pg_advisory_xact_lock(7); RETURN NULL; END $$; \
         CREATE CONSTRAINT TRIGGER wait AFTER INSERT OR UPDATE ON tierline.rollups \
             DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION wait()",
    )
    .execute(&pool)
    .await
    .unwrap();
    let mut holder = PgConnection::connect(database.url()).await.unwrap();
    let lock = sqlx::query("SELECT pg_advisory_lock(7)");
    lock.execute(&mut holder).await.unwrap();
    let is_ended = AtomicBool::new(false);
    let ending = async {
        work_in(&app, [] as [&str; 0]).end().await;
        is_ended.store(true, Ordering::Relaxed);
    };
    let cutting = async {
        until(async || {
            let waiting =
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted \
                    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
            let waiting = sqlx::query_scalar::<_, i64>(waiting);
            waiting.fetch_one(&pool).await.unwrap() == 1
        })
        .await;
        proxy.set(Network::HalfOpen);
        let unlock = sqlx::query("SELECT pg_advisory_unlock(7)");
        unlock.execute(&mut holder).await.unwrap();
        until(async || total(&database, "mail").await.published == 3).await;
        proxy.reset();
        // Else the answer might be carried before the connection is cut.
        until(async || is_ended.load(Ordering::Relaxed)).await;
        proxy.set(Network::Good);
    };
    tokio::join!(ending, cutting);
    app.publish(Mail::Succeed).await.unwrap();
    // Nobody can write the new count without having tried to write the old ones again.
    app.close().await;
    drop(app);
    until(async || total(&database, "mail").await.published >= 4).await;
    assert_eq!(total(&database, "mail").await.published, 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_app_without_tables_counts_nothing_until_it_has_them() {
    let map = MAP.replace("postgres", "quorum");
    let (database, vhost) = (database().await, vhost().await);
    let app = Tierline::builder(Topology::parse(&map).unwrap())
        .amqp(vhost.amqp_url())
        .postgres(database.url())
        .on_connect(OnConnect::Apply)
        .connect()
        .await
        .unwrap();
    let pool = PgPool::connect(database.url()).await.unwrap();
    app.publish(Mail::Succeed).await.unwrap();
    work_in(&app, [] as [&str; 0]).end().await;
    let has_schema = "SELECT count(*) FROM pg_namespace WHERE nspname = 'tierline'";
    let has_schema: i64 = sqlx::query_scalar(has_schema)
        .fetch_one(&pool)
        .await
        .unwrap();
    assert_eq!(has_schema, 0);
    app.database().unwrap().migrate().await.unwrap();
    app.publish(Export).await.unwrap();
    work_in(&app, [] as [&str; 0]).end().await;
    assert_eq!(total(&database, "bulk").await.published, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn old_minutes_are_removed_and_those_of_other_apps_are_not() {
    let database = database().await;
    let heard = Heard::default();
    let app = app_at(database.url(), &heard).await;
    let pool = PgPool::connect(database.url()).await.unwrap();
    for (app, days) in [("shop", 8), ("shop", 6), ("other", 8)] {
        sqlx::query(
            "INSERT INTO tierline.rollups SELECT $1, date_trunc('minute', now()) - make_interval(days => $2) \
                - make_interval(mins => minute), 'mail', 'mail.send', 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, \
                false, 5, 5, '{0,1}', '{1}' FROM generate_series(1, 1200) AS minute",
        )
        .bind(app)
        .bind(days)
        .execute(&pool)
        .await
        .unwrap();
    }
    let count = async |app: &str| -> i64 {
        let count = sqlx::query_scalar("SELECT count(*) FROM tierline.rollups WHERE app = $1");
        count.bind(app).fetch_one(&pool).await.unwrap()
    };
    // A process that has nothing to count removes nothing.
    app.publish(Export).await.unwrap();
    work_in(&app, [] as [&str; 0]).end().await;
    until(async || count("shop").await == 1_201).await;
    assert_eq!(count("other").await, 1_200);
    let kept = rollups(&database).last("7d").tier("mail").await.unwrap();
    let [mail] = kept.as_slice() else {
        panic!("{kept:#?}");
    };
    assert_eq!(mail.totals.wait.count(), 1_200);
    assert_eq!(mail.totals.run.sum(), Duration::from_micros(6_000));
}
