//! Everything of an app around its workers, for a map that needs no broker.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tierline::dead::{Canary, Filter, OperationState, Page};
use tierline::error::{DeadLetterError, TopologyError};
use tierline::{Error, ErrorKind, Registry, TaskError, TaskOptions, Tierline, Topology};

use super::{MAP, Ship, Shop, shipping};

const SCHEDULES: &str = r#"
    [schedules.often]
    task = "order.ship"
    every = "1s"
    payload = { order = 9 }
    expires = "1m"
"#;

/// Tiers on the broker beside the one in Postgres.
const MIXED: &str = r#"
    [tiers.urgent]
    queue = "classic"
    [tiers.bulk]
    queue = "quorum"
    [groups.others]
    tiers = ["urgent", "bulk"]
    concurrency = 1
"#;

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_are_redriven_in_bulk_with_a_canary_and_their_growth_is_reported() {
    let fails = Arc::new(AtomicBool::new(true));
    let mut registry = Registry::new();
    let failing = fails.clone();
    let handler = move |_: Ship| {
        let fails = failing.load(Ordering::SeqCst);
        async move {
            match fails {
                true => Err(TaskError::permanent("the provider is down")),
                false => Ok(()),
            }
        }
    };
    let options = TaskOptions::new().retries(0);
    registry.register_with::<Ship, _>(handler, options).unwrap();
    let shop = Shop::open(MAP, registry).await;
    let collector = shop.app.collector().unwrap();
    let collector = collector
        .growth_limit(2, "1h")
        .housekeeping_every("10ms")
        .until(shop.heard.until("DeadLettersGrow", 1));
    for order in 0..5 {
        shop.app.publish(Ship { order }).await.unwrap();
    }
    let working = shop.work();
    collector.await.unwrap();
    shop.heard.until("dead order.ship", 5).await;

    fails.store(false, Ordering::SeqCst);
    let letters = shop.app.dead_letters().unwrap().by("ada");
    let canary = Canary::of(1).wait("30s");
    let redrive = letters.redrive_all(Filter::default().task("order.ship"));
    let ended = redrive.canary(canary).run().await.unwrap();
    assert_eq!((ended.state, ended.done), (OperationState::Done, 5));
    shop.heard.until("done order.ship", 5).await;
    working.end().await;
    assert_eq!(shop.rows().await, [0, 0, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn schedules_fall_due_and_run() {
    let (registry, shipped) = shipping();
    let shop = Shop::open(&format!("{MAP}{SCHEDULES}"), registry).await;
    let working = shop.work();
    let scheduler = shop.app.scheduler().unwrap();
    let twice = shop.heard.until("done order.ship", 2);
    scheduler.until(twice).await.unwrap();
    working.end().await;
    assert_eq!(shipped.orders()[..2], [9, 9]);
    let schedules = shop.app.schedules().unwrap();
    assert!(schedules.get("often").await.unwrap().published >= 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_app_without_an_address_is_told_which_tiers_need_it() {
    let (registry, _) = shipping();
    let shop = Shop::open(MAP, registry).await;
    let mixed = Topology::parse(format!("{MAP}{MIXED}")).unwrap();
    let builder = || Tierline::builder(mixed.clone()).postgres(shop.database.url());
    for error in [
        builder().connect().await.unwrap_err(),
        builder().connect_lazy().unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Configuration);
        assert!(
            matches!(&error, Error::Topology(TopologyError::NoBroker { tiers }) if &**tiers == "urgent, bulk"),
            "{error}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_without_a_publisher_says_that_it_cannot_redrive() {
    let (registry, _) = shipping();
    let shop = Shop::open(MAP, registry).await;
    let topology = shop.app.topology().clone();
    let database = shop.app.database().unwrap().clone();
    let letters = tierline::dead::DeadLetters::without_broker(topology, database);
    assert!(
        letters
            .list(&Filter::default(), Page::first(1))
            .await
            .is_ok()
    );
    let error = letters.redrive(1).await.unwrap_err();
    assert!(
        matches!(error, Error::DeadLetter(DeadLetterError::NoPublisher)),
        "{error}"
    );
}
