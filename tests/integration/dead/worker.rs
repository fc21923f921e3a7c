//! A worker with a database: what it gives up is logged, and what is redriven reports back.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use tierline::dead::{Filter, Page, RedriveOutcome, State};
use tierline::observe::Event;
use tierline::{Registry, Task, TaskError, Tierline, Topology};
use tokio::sync::oneshot;

use super::support::{MAP, until};

#[derive(Serialize, Deserialize)]
struct Ship {
    order: u32,
}

impl Task for Ship {
    const NAME: &'static str = "order.ship";
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_logs_what_dies_and_reports_how_a_redrive_ended() {
    let (vhost, database) = tokio::join!(tierline_testbed::vhost(), tierline_testbed::database());
    let is_open = Arc::new(AtomicBool::new(false));
    let harbour = is_open.clone();
    let mut registry = Registry::new();
    registry
        .register::<Ship, _>(move |ship: Ship| {
            let is_open = harbour.load(Ordering::Relaxed);
            async move {
                match is_open {
                    true => Ok(()),
                    false => Err(TaskError::permanent(format!(
                        "order {}: no ship",
                        ship.order
                    ))),
                }
            }
        })
        .unwrap();
    let waiting_since = Arc::new(Mutex::new(Vec::new()));
    let heard = waiting_since.clone();
    let app = Tierline::builder(Topology::parse(MAP).unwrap())
        .amqp(vhost.amqp_url())
        .postgres(database.url())
        .registry(registry)
        .observe(move |event| {
            if let Event::Started { waited, .. } = event {
                heard.lock().unwrap().push(SystemTime::now() - *waited);
            }
        })
        .version("7.1")
        .connect()
        .await
        .unwrap();
    app.database().unwrap().migrate().await.unwrap();
    let (stop, stopped) = oneshot::channel::<()>();
    let worker = app.work(["all"]).grace(Duration::from_secs(5));
    let working = tokio::spawn(worker.until(async {
        let _ = stopped.await;
    }));

    let receipt = app.publish(Ship { order: 7 }).await.unwrap();
    let letters = app.dead_letters().unwrap();
    until("the dead letter to be logged", async || {
        let listed = letters.list(&Filter::default(), Page::default()).await;
        listed.unwrap().letters.len() == 1
    })
    .await;
    let listed = letters
        .list(&Filter::default(), Page::default())
        .await
        .unwrap();
    let row = letters.get(listed.letters[0].id).await.unwrap();
    assert_eq!(row.summary.message_id.as_deref(), Some(receipt.id.as_str()));
    assert_eq!(row.summary.error.as_deref(), Some("order 7: no ship"));

    is_open.store(true, Ordering::Relaxed);
    // Times travel in whole milliseconds.
    let before_redrive = SystemTime::now() - Duration::from_millis(1);
    letters.redrive(row.summary.id).await.unwrap();
    until("the redrive to report back", async || {
        let row = letters.get(row.summary.id).await.unwrap();
        row.summary.state == State::Redriven && row.summary.outcome == Some(RedriveOutcome::Done)
    })
    .await;
    let since = waiting_since.lock().unwrap()[1];
    assert!(
        since >= before_redrive,
        "as a dead letter it waits for no worker"
    );
    stop.send(()).unwrap();
    working.await.unwrap().unwrap();
}

#[tokio::test]
async fn an_app_that_is_closed_has_written_how_redrives_ended_and_leaves_a_pool_of_the_apps_open() {
    let (vhost, database) = tokio::join!(tierline_testbed::vhost(), tierline_testbed::database());
    let is_open = Arc::new(AtomicBool::new(false));
    let (done, is_done) = oneshot::channel();
    let mut registry = Registry::new();
    let harbour = is_open.clone();
    registry
        .register::<Ship, _>(move |_: Ship| {
            let is_open = harbour.load(Ordering::Relaxed);
            async move { is_open.then_some(()).ok_or(TaskError::permanent("no ship")) }
        })
        .unwrap();
    let pool = sqlx::PgPool::connect(database.url()).await.unwrap();
    let done = Mutex::new(Some(done));
    let app = Tierline::builder(Topology::parse(MAP).unwrap())
        .amqp(vhost.amqp_url())
        .postgres_pool(pool.clone())
        .registry(registry)
        .observe(move |event| {
            if let Event::Done { .. } = event {
                done.lock().unwrap().take().unwrap().send(()).unwrap();
            }
        })
        .connect()
        .await
        .unwrap();
    app.database().unwrap().migrate().await.unwrap();
    let shutdown = async {
        app.publish(Ship { order: 7 }).await.unwrap();
        let letters = app.dead_letters().unwrap();
        let count = async || letters.count(&Filter::default()).await.unwrap() == 1;
        until("the dead letter to be logged", count).await;
        is_open.store(true, Ordering::Relaxed);
        let listed = letters.list(&Filter::default(), Page::default()).await;
        letters
            .redrive(listed.unwrap().letters[0].id)
            .await
            .unwrap();
        is_done.await.unwrap();
    };
    app.work(["all"]).until(shutdown).await.unwrap();
    app.close().await;
    // The pool is still open.
    let outcome: Option<String> = sqlx::query_scalar("SELECT outcome FROM tierline.dead_letters")
        .fetch_one(&pool)
        .await
        .unwrap();
    assert_eq!(outcome.as_deref(), Some("done"));
    let refused = app.dead_letters();
    assert!(matches!(refused, Err(tierline::Error::Closed { .. })));
}

#[tokio::test]
async fn a_setting_of_the_log_that_cannot_be_used_is_reported_where_it_is_awaited() {
    let shop = super::support::Shop::open().await;
    let collector = || shop.app.collector().unwrap();
    let collect = async |collector: tierline::dead::Collector| {
        tokio::time::timeout(Duration::from_secs(60), collector.into_future())
            .await
            .unwrap_or(Ok(()))
    };
    let letters = &shop.letters;
    let leased = letters.clone().lease("soon");
    let all = || letters.redrive_all(Filter::default());
    let canary = tierline::dead::Canary::of(1).wait("soon");
    for (ended, setting) in [
        (collect(collector().retention("soon")).await, "retention"),
        (
            collect(collector().growth_limit(1, "soon")).await,
            "growth limit",
        ),
        (
            collect(collector().housekeeping_every("soon")).await,
            "housekeeping_every",
        ),
        (letters.expire("soon").await.map(drop), "keep"),
        (leased.redrive(1).await.map(drop), "lease"),
        (all().canary(canary).run().await.map(drop), "wait"),
    ] {
        let Err(tierline::Error::InvalidDuration(invalid)) = ended else {
            panic!("{setting}: {ended:?}");
        };
        assert_eq!((invalid.setting, invalid.text.as_str()), (setting, "soon"));
    }
    let unknown = collect(collector().tier_growth_limit("norml", 1, "1h")).await;
    let error = unknown.unwrap_err().to_string();
    assert!(error.contains("did you mean \"normal\"?"), "{error}");
}
