//! What follows on a run in a tier in Postgres.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures_util::{StreamExt, stream};
use tierline::dead::{Filter, Page, Reason};
use tierline::task::PublishRequest;
use tierline::{Context, Outcome, Registry, TaskError, TaskOptions};

use super::{MAP, Ship, Shop, gated, shipping};

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_attempt_is_retried_and_the_last_one_is_a_dead_letter_that_can_be_redriven() {
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
    let shop = Shop::open(MAP, registry).await;
    let receipt = shop.app.publish(Ship { order: 1 }).await.unwrap();
    let working = shop.work();
    shop.heard.until("dead order.ship", 1).await;
    assert_eq!(shop.heard.count("retried"), 2, "{:#?}", shop.heard.lines());
    let letters = shop.app.dead_letters().unwrap();
    let page = letters
        .list(&Filter::default(), Page::first(10))
        .await
        .unwrap();
    let [letter] = &page.letters[..] else {
        panic!("{page:?}");
    };
    assert_eq!(letter.reason, Reason::RetriesExhausted);
    assert_eq!(letter.tier, "normal");
    let full = letters.get(letter.id).await.unwrap();
    assert_eq!(
        full.summary.message_id.as_deref(),
        Some(receipt.id.as_str())
    );
    assert_eq!(full.history.len(), 3);
    let redriven = letters.by("ada").redrive(letter.id).await.unwrap();
    assert_eq!(redriven.id, receipt.id);
    shop.heard.until("done order.ship 1", 1).await;
    working.end().await;
    assert_eq!(shop.rows().await, [0, 0, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snooze_costs_no_attempt_and_a_payload_that_cannot_be_read_is_parked() {
    let mut registry = Registry::new();
    let snoozed = Arc::new(AtomicU32::new(0));
    let times = snoozed.clone();
    registry
        .register::<Ship, _>(move |_: Ship, cx: Context| {
            let time = times.fetch_add(1, Ordering::SeqCst);
            async move {
                assert_eq!(cx.attempt(), 1);
                match time {
                    0 => Outcome::Snooze(Duration::ZERO),
                    1 => Outcome::Snooze(Duration::from_millis(20)),
                    _ => Outcome::Done,
                }
            }
        })
        .unwrap();
    let shop = Shop::open(MAP, registry).await;
    shop.app.publish(Ship { order: 1 }).await.unwrap();
    let nonsense = serde_json::json!({ "order": "\u{0}" });
    shop.app
        .publish_named("order.ship", &nonsense)
        .await
        .unwrap();
    let working = shop.work();
    shop.heard.until("snoozed", 2).await;
    shop.heard.until("done", 1).await;
    shop.heard
        .until("dead order.ship: undecodable payload", 1)
        .await;
    working.end().await;
    assert_eq!(shop.rows().await, [0, 0, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_gives_back_what_has_not_begun_and_what_it_does_not_wait_for() {
    let (registry, open) = gated();
    let shop = Shop::open(MAP, registry).await;
    for order in 0..20 {
        shop.app.publish(Ship { order }).await.unwrap();
    }
    let worker = shop.app.work(["all"]).grace("10ms");
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let working = tokio::spawn(worker.until(async {
        let _ = stopped.await;
    }));
    shop.heard.until("started", 2).await;
    stop.send(()).unwrap();
    working.await.unwrap().unwrap();
    assert_eq!(shop.rows().await, [0, 20, 0]);
    assert_eq!(shop.heard.count("suspected"), 0);
    // None has a crash count, and all run.
    open.add_permits(1_000);
    let working = shop.work();
    shop.heard.until("done", 20).await;
    working.end().await;
    assert_eq!(shop.rows().await, [0, 0, 0]);
    let pool = shop.pool().await;
    let workers: i64 = sqlx::query_scalar("SELECT count(*) FROM tierline.workers")
        .fetch_one(&pool)
        .await
        .unwrap();
    assert_eq!(workers, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_waits_for_longer_than_its_tier_allows_is_a_dead_letter() {
    let map = MAP.replace("lease = \"2s\"", "ttl = \"50ms\"");
    let (registry, shipped) = shipping();
    let shop = Shop::open(&map, registry).await;
    // A wave of them is stored over few connections.
    let many = (0..300).map(|order| PublishRequest::new(&Ship { order }).unwrap());
    let published = shop.app.publish_many(stream::iter(many));
    let published: Vec<_> = published.collect().await;
    let late = published.into_iter().next_back().unwrap().unwrap();
    while late.confirmed_at.elapsed().unwrap() < Duration::from_millis(60) {
        tokio::task::yield_now().await;
    }
    let working = shop.work();
    shop.heard.until("dead order.ship: expired", 300).await;
    let sessions: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()",
    )
    .fetch_one(&shop.pool().await)
    .await
    .unwrap();
    assert!(sessions < 30, "{sessions} sessions");
    working.end().await;
    assert!(shipped.orders().is_empty());
}
