//! Databases that are killed, away for longer than a lease, or replaced by their standby.

use std::collections::HashSet;
use std::time::Duration;

use sqlx::PgPool;
use tierline::task::Cancellation;
use tierline::{Context, Outcome, Registry, Tierline, Topology};
use tierline_testbed::{Database, Network, Postgres};
use tokio::time::{sleep, timeout};

use super::{MAP, Ship, Shipped, behind_a_proxy, rows, work};
use crate::worker::{Heard, PATIENCE};

const ORDERS: u32 = 600;
/// Orders below this number take until the worker's lease is lost, or until the fault is over.
/// There are more than both processes prefetch, so that all slots are busy with them.
const LONG: u32 = 24;

/// Handlers that take a few milliseconds, and a few that take as long as they may.
fn shipping(shipped: &Shipped, is_over: &Cancellation) -> Registry {
    let mut registry = Registry::new();
    let (shipped, is_over) = (shipped.clone(), is_over.clone());
    registry
        .register::<Ship, _>(move |ship: Ship, cx: Context| {
            let is_first = !shipped.orders().contains(&ship.order);
            shipped.add(ship.order);
            let is_over = is_over.clone();
            async move {
                sleep(Duration::from_millis(5)).await;
                if ship.order < LONG && is_first {
                    tokio::select! {
                        () = is_over.cancelled() => {}
                        () = cx.cancelled() => return Outcome::retry("the lease is lost: this does not count"),
                    }
                }
                Outcome::Done
            }
        })
        .unwrap();
    registry
}

/// Two processes ship what another one publishes while the database fails. Nothing is lost or stuck, and no task gets
/// the blame.
async fn ship_while(map: &str, urls: [&str; 2], first: u32, fail: impl AsyncFnOnce(&Shipped)) {
    let (heard, shipped) = (Heard::default(), Shipped::default());
    let is_over = Cancellation::new();
    let mut apps = Vec::new();
    for url in urls {
        let builder = Tierline::builder(Topology::parse(map).unwrap()).postgres(url);
        let builder = builder
            .registry(shipping(&shipped, &is_over))
            .observe(heard.ear());
        apps.push(builder.connect().await.unwrap());
    }
    let working: Vec<_> = apps.iter().map(work).collect();
    let publisher = apps[0].clone();
    let publishing = tokio::spawn(async move {
        for order in first..ORDERS {
            let publish = publisher.publish(Ship { order }).deadline("60s");
            publish.await.unwrap();
        }
    });
    fail(&shipped).await;
    is_over.cancel();
    publishing.await.unwrap();
    let pool = PgPool::connect(urls[0]).await.unwrap();
    let all = async {
        loop {
            let distinct: HashSet<u32> = shipped.orders().into_iter().collect();
            if distinct.len() == (ORDERS - first) as usize && rows(&pool).await == [0, 0, 0] {
                return;
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    let all = timeout(PATIENCE, all).await;
    let counts = || (shipped.orders().len(), heard.count("started"));
    assert!(all.is_ok(), "{:?}, {:?}", rows(&pool).await, counts());
    for working in working {
        working.end().await;
    }
    for app in apps {
        app.close().await;
    }
    let again = shipped.orders().len() - (ORDERS - first) as usize;
    println!("{again} of {ORDERS} tasks ran twice");
    for blamed in ["suspected", "dead", "retried"] {
        assert_eq!(heard.count(blamed), 0, "{:#?}", heard.lines());
    }
}

/// Waits until so many tasks have begun.
async fn until_shipped(shipped: &Shipped, count: usize) {
    let enough = async {
        while shipped.orders().len() < count {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, enough).await.unwrap();
}

/// Waits until both processes are busy with long tasks, and the database knows that.
async fn until_begun(shipped: &Shipped, database: &Database) {
    until_shipped(shipped, 4).await;
    let pool = PgPool::connect(database.url()).await.unwrap();
    let begun = async {
        while sqlx::query_scalar::<_, i64>("SELECT count(*) FROM tierline.running WHERE is_begun")
            .fetch_one(&pool)
            .await
            .unwrap()
            < 4
        {}
    };
    timeout(PATIENCE, begun).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_is_killed_under_load_loses_nothing_and_blames_nobody() {
    let server = Postgres::start_new().await.unwrap();
    let database = server.database().await.unwrap();
    ship_while(MAP, [database.url(); 2], LONG, async |shipped| {
        for share in [50, 200, 350] {
            until_shipped(shipped, share).await;
            server.kill_hard().await.unwrap();
            server.start().await.unwrap();
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_that_is_longer_than_the_lease_is_no_crash_of_what_ran_meanwhile() {
    let server = Postgres::start_new().await.unwrap();
    let database = server.database().await.unwrap();
    ship_while(MAP, [database.url(); 2], 0, async |shipped| {
        until_begun(shipped, &database).await;
        server.stop().await.unwrap();
        sleep(Duration::from_secs(5)).await;
        server.start().await.unwrap();
    })
    .await;
}

/// The process that reaches the database first must not take the other one for dead.
#[tokio::test(flavor = "multi_thread")]
async fn a_network_that_was_silent_for_longer_than_the_lease_is_no_crash_of_those_it_reaches_last()
{
    let server = Postgres::start_new().await.unwrap();
    let database = server.database().await.unwrap();
    let (first, first_url) = behind_a_proxy(database.url()).await;
    let (last, last_url) = behind_a_proxy(database.url()).await;
    let map = MAP.replace("lease = \"2s\"", "lease = \"4s\"");
    ship_while(&map, [&first_url, &last_url], 0, async |shipped| {
        until_begun(shipped, &database).await;
        first.set(Network::Silent);
        last.set(Network::Silent);
        sleep(Duration::from_secs(6)).await;
        first.set(Network::Good);
        sleep(Duration::from_secs(2)).await;
        last.set(Network::Good);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_that_is_promoted_goes_on_where_its_primary_was_killed() {
    let primary = Postgres::start_new().await.unwrap();
    let database = primary.database().await.unwrap();
    let standby = primary.start_standby().await.unwrap();
    let (proxy, url) = behind_a_proxy(database.url()).await;
    ship_while(MAP, [&url; 2], LONG, async |shipped| {
        until_shipped(shipped, 150).await;
        primary.kill_hard().await.unwrap();
        standby.promote().await.unwrap();
        proxy.switch_to(standby.port());
    })
    .await;
}
