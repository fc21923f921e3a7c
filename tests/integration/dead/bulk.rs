//! Many back.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable};
use sqlx::Connection;
use tierline::dead::{Canary, Filter, OperationState, Outcomes, RedriveOutcome, State};

use super::support::{Letter, Shop, until};

/// A shop with so many dead letters in its log.
async fn with(count: u64) -> Shop {
    let shop = Shop::open().await;
    for number in 0..count {
        let id = format!("ship-{number}");
        let letter = Letter {
            id: &id,
            ..Letter::default()
        };
        shop.dies("normal", &letter).await;
    }
    let collecting = shop.collect();
    shop.logged(count).await;
    collecting.stop().await;
    shop
}

async fn redriven(shop: &Shop) -> u64 {
    let filter = Filter::default().state(State::Redriven);
    shop.letters.count(&filter).await.unwrap()
}

#[tokio::test]
async fn all_of_a_filter_go_back_and_their_progress_is_told() {
    let shop = with(30).await;
    let unmapped = Letter {
        task: "order.forget",
        id: "forget",
        ..Letter::default()
    };
    shop.dies("normal", &unmapped).await;
    let collecting = shop.collect();
    shop.logged(31).await;
    collecting.stop().await;
    let seen = Arc::new(AtomicU64::new(0));
    let seeing = Arc::clone(&seen);
    let letters = shop.letters.clone().by("ada").because("all is well");
    let operation = letters
        .redrive_all(Filter::default().tier("normal"))
        .on_progress(move |operation| seeing.store(operation.done, Ordering::Relaxed))
        .run()
        .await
        .unwrap();
    assert_eq!(operation.state, OperationState::Done, "{operation:?}");
    assert_eq!(
        (operation.total, operation.done, operation.refused),
        (31, 30, 1)
    );
    assert!(operation.note.contains("map has no tier"), "{operation:?}");
    assert_eq!(seen.load(Ordering::Relaxed), 30);
    assert_eq!(shop.depth("shop.normal").await, 30);
    assert_eq!(letters.operations(5).await.unwrap(), [operation]);
}

#[tokio::test]
async fn a_redrive_is_stopped_and_goes_on_from_there() {
    let shop = with(40).await;
    let slowly = shop.letters.redrive_all(Filter::default()).rate(20);
    let running = tokio::spawn(slowly.run());
    until("the first to be redriven", async || {
        redriven(&shop).await > 0
    })
    .await;
    let id = shop.letters.operations(1).await.unwrap()[0].id;
    assert!(shop.letters.resume(id).await.is_err());
    shop.letters.clone().by("bob").stop(id).await.unwrap();
    let stopped = running.await.unwrap().unwrap();
    assert_eq!(stopped.state, OperationState::Stopped);
    assert_eq!(stopped.note, "stopped by bob");
    assert!(stopped.done < 40, "{stopped:?}");
    assert!(shop.letters.stop(id).await.is_err());
    let done = shop.letters.resume(id).await.unwrap();
    // The rate is that of the operation: it was kept.
    assert_eq!((done.state, done.done), (OperationState::Done, 40));
    assert_eq!(shop.depth("shop.normal").await, 40);
    assert!(shop.letters.resume(id).await.is_err());
}

/// Somebody claims so many dead rows and dies.
async fn claim_and_die(shop: &Shop, count: i64) {
    let claimed = "UPDATE tierline.dead_letters SET state = 'redriving', claim = 'dead process', \
                   claimed_at = now() WHERE id IN (SELECT id FROM tierline.dead_letters \
                   WHERE state = 'dead' ORDER BY id LIMIT $1)";
    let mut connection = sqlx::PgConnection::connect(shop.database.url())
        .await
        .unwrap();
    let claiming = sqlx::query(claimed).bind(count).execute(&mut connection);
    assert_eq!(claiming.await.unwrap().rows_affected(), count as u64);
}

#[tokio::test]
async fn a_crash_in_the_middle_loses_nothing_and_is_taken_up_after_the_lease() {
    let shop = with(200).await;
    let letters = shop.letters.clone().lease(Duration::from_secs(1));
    // A runtime of its own: when it ends, nothing of the redrive goes on, as in a process that died.
    let (amqp, postgres) = (
        shop.vhost.amqp_url().to_owned(),
        shop.database.url().to_owned(),
    );
    let crashing = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .unwrap();
    crashing.spawn(async move {
        let topology = tierline::Topology::parse(super::support::MAP).unwrap();
        let app = tierline::Tierline::builder(topology);
        let app = app.amqp(amqp).postgres(postgres).connect().await.unwrap();
        let redriving = app.dead_letters().unwrap().redrive_all(Filter::default());
        redriving.rate(100).run().await.unwrap();
    });
    until("some to be redriven", async || redriven(&shop).await > 5).await;
    crashing.shutdown_background();

    let id = letters.operations(1).await.unwrap()[0].id;
    let mut resumed = letters.resume(id).await;
    until("the operation to be given up by its process", async || {
        if resumed.is_err() {
            resumed = letters.resume(id).await;
        }
        resumed.is_ok()
    })
    .await;
    assert_eq!(resumed.unwrap().state, OperationState::Done);
    assert_eq!(redriven(&shop).await, 200);
    let mut published = BTreeMap::new();
    let depth = shop.depth("shop.normal").await as usize;
    for message in shop.take("shop.normal", depth).await {
        *published.entry(message.id.to_string()).or_insert(0) += 1;
    }
    assert_eq!(published.len(), 200);
    assert!(published.values().all(|times| *times <= 2), "{published:?}");
}

#[tokio::test]
async fn a_redrive_whose_caller_goes_away_ends_after_its_batch_and_leaves_nothing_claimed() {
    let shop = with(200).await;
    let slowly = shop.letters.redrive_all(Filter::default()).rate(50);
    tokio::select! {
        ended = slowly.run() => panic!("{ended:?}"),
        () = until("some to be redriven", async || redriven(&shop).await > 5) => {}
    }
    let id = shop.letters.operations(1).await.unwrap()[0].id;
    until("the operation to end", async || {
        let operation = shop.letters.operation(id).await.unwrap();
        operation.state == OperationState::Stopped
    })
    .await;
    let stopped = shop.letters.operation(id).await.unwrap();
    assert_eq!(stopped.note, "its caller went away");
    let counts = &shop.letters.by_tier().await.unwrap()[1];
    assert_eq!(
        (counts.redriving, counts.redriven),
        (0, stopped.done),
        "{counts:?}"
    );
    assert_eq!(u64::from(shop.depth("shop.normal").await), stopped.done);
    let done = shop.letters.resume(id).await.unwrap();
    assert_eq!((done.state, done.done), (OperationState::Done, 200));
    assert_eq!(shop.depth("shop.normal").await, 200);
}

#[tokio::test]
async fn large_rows_are_redriven_a_few_at_a_time_and_all_of_them() {
    let shop = Shop::open().await;
    let large = format!("\"{}\"", "x".repeat(3 << 20));
    for number in 0..6 {
        let id = format!("ship-{number}");
        let letter = Letter {
            id: &id,
            payload: &large,
            ..Letter::default()
        };
        shop.dies("normal", &letter).await;
    }
    let collecting = shop.collect();
    shop.logged(6).await;
    collecting.stop().await;
    let seen = Arc::new(Mutex::new(BTreeSet::new()));
    let seeing = Arc::clone(&seen);
    let redriving = shop.letters.redrive_all(Filter::default());
    let redriving = redriving.on_progress(move |operation| {
        seeing.lock().unwrap().insert(operation.done);
    });
    let done = redriving.run().await.unwrap();
    assert_eq!((done.state, done.done), (OperationState::Done, 6));
    // Two fit into a batch.
    assert_eq!(*seen.lock().unwrap(), BTreeSet::from([0, 2, 4, 6]));
    assert_eq!(shop.depth("shop.normal").await, 6);
}

#[tokio::test]
async fn what_a_dead_process_had_claimed_is_anybodys_after_the_lease() {
    let shop = with(5).await;
    claim_and_die(&shop, 5).await;
    let all = || shop.letters.redrive_all(Filter::default());
    let in_vain = all().run().await.unwrap();
    assert_eq!((in_vain.total, in_vain.done), (0, 0));

    let letters = shop.letters.clone().lease(Duration::from_millis(1));
    let dead = Filter::default().state(State::Dead);
    until("the lease to end", async || {
        letters.redrive_all(dead.clone()).run().await.unwrap().total == 5
    })
    .await;
    assert_eq!(redriven(&shop).await, 5);
    assert_eq!(shop.depth("shop.normal").await, 5);
}

#[tokio::test]
async fn two_operators_at_once_redrive_each_row_once() {
    let shop = with(400).await;
    let one = shop
        .letters
        .clone()
        .by("ada")
        .redrive_all(Filter::default());
    let other = shop
        .letters
        .clone()
        .by("bob")
        .redrive_all(Filter::default());
    let (one, other) = tokio::join!(one.run(), other.run());
    let (one, other) = (one.unwrap(), other.unwrap());
    assert_eq!(one.done + other.done, 400);
    assert_eq!(redriven(&shop).await, 400);
    assert_eq!(shop.depth("shop.normal").await, 400);
}

/// A worker that ends every task of a tier in the same way.
async fn work(shop: &Shop, outcome: RedriveOutcome, count: usize) {
    let outcomes = Outcomes::start(shop.app.database().unwrap().clone(), "shop");
    for message in shop.take("shop.normal", count).await {
        outcomes.record(&message, outcome);
    }
}

#[tokio::test]
async fn a_canary_that_lives_lets_the_rest_follow() {
    let shop = with(30).await;
    let canary = Canary::of(5).success(0.8);
    let redriving = shop.letters.redrive_all(Filter::default()).canary(canary);
    let (operation, ()) = tokio::join!(redriving.run(), work(&shop, RedriveOutcome::Done, 5));
    let operation = operation.unwrap();
    assert_eq!(
        (operation.state, operation.done),
        (OperationState::Done, 30)
    );
}

#[tokio::test]
async fn a_canary_that_dies_keeps_the_rest_where_it_is() {
    let shop = with(30).await;
    let canary = Canary::of(5).success(0.8);
    let redriving = shop.letters.redrive_all(Filter::default()).canary(canary);
    let (operation, ()) = tokio::join!(redriving.run(), work(&shop, RedriveOutcome::Dead, 5));
    let operation = operation.unwrap();
    assert_eq!(
        (operation.state, operation.done),
        (OperationState::Stopped, 5)
    );
    assert!(
        operation.note.contains("the canary failed"),
        "{operation:?}"
    );
    let dead = Filter::default().state(State::Dead);
    assert_eq!(shop.letters.count(&dead).await.unwrap(), 25);
}

#[tokio::test]
async fn a_canary_of_which_nothing_is_heard_keeps_the_rest_where_it_is() {
    let shop = with(10).await;
    let canary = Canary::of(2).wait(Duration::from_millis(100));
    let redriving = shop.letters.redrive_all(Filter::default()).canary(canary);
    let operation = redriving.run().await.unwrap();
    assert_eq!(
        (operation.state, operation.done),
        (OperationState::Stopped, 2)
    );
    assert!(operation.note.contains("inconclusive"), "{operation:?}");
}

#[tokio::test]
async fn a_canary_that_cannot_be_published_keeps_the_rest_where_it_is() {
    let shop = Shop::open().await;
    // In a version of the wire format that this release does not read.
    let mut headers = FieldTable::default();
    headers.insert("tierline-version".into(), AMQPValue::LongInt(7));
    let unreadable = BasicProperties::default()
        .with_type("order.ship".into())
        .with_delivery_mode(2)
        .with_headers(headers);
    for _ in 0..3 {
        let properties = unreadable.clone();
        shop.send("shop.normal.dlx", "", b"1", properties).await;
    }
    let collecting = shop.collect();
    shop.logged(3).await;
    shop.dies("normal", &Letter::default()).await;
    shop.logged(4).await;
    collecting.stop().await;
    let redriving = shop.letters.redrive_all(Filter::default());
    let operation = redriving.canary(Canary::of(2)).run().await.unwrap();
    assert_eq!(
        (operation.state, operation.refused),
        (OperationState::Stopped, 2)
    );
    assert!(
        operation.note.contains("none of its 2 rows"),
        "{operation:?}"
    );
    assert_eq!(shop.depth("shop.normal").await, 0);
}

#[tokio::test]
async fn what_dies_again_during_a_redrive_is_left_to_the_next() {
    let shop = with(20).await;
    let collecting = shop.collect();
    let slowly = shop.letters.redrive_all(Filter::default()).rate(20);
    let running = tokio::spawn(slowly.run());
    for message in shop.take("shop.normal", 10).await {
        let letter = Letter {
            id: message.id.as_str(),
            life: message.life.into(),
            redriven_from: message.redriven.unwrap().from.parse().ok(),
            ..Letter::default()
        };
        shop.dies("normal", &letter).await;
    }
    let operation = running.await.unwrap().unwrap();
    assert_eq!(operation.done, 20);
    shop.logged(30).await;
    let dead = Filter::default().state(State::Dead);
    assert_eq!(shop.letters.count(&dead).await.unwrap(), 10);
    collecting.stop().await;
}

#[tokio::test]
async fn discarding_and_purging_many_is_on_record() {
    let shop = with(12).await;
    let letters = shop.letters.clone().by("ada").because("old");
    let filter = Filter::default().task("order.ship");
    let discarded = letters.discard_all(&filter).await.unwrap();
    assert_eq!((discarded.done, discarded.who.as_str()), (12, "ada"));
    let purged = letters.purge(&filter).await.unwrap();
    assert_eq!((purged.done, purged.why.as_str()), (12, "old"));
    assert_eq!(letters.count(&Filter::default()).await.unwrap(), 0);
    assert_eq!(letters.operations(5).await.unwrap().len(), 2);
}
