//! What workers do with the queue that a tier had before it moved.

use tierline::dead::{Filter, Page};

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_takes_from_the_old_queue_beside_the_new_one_and_lets_go_of_it() {
    let servers = Servers::new().await;
    let shipped = Shipped::default();
    let old = servers.publisher(QUORUM, &shipped).await;
    old.ship(0..30).await;
    let new = servers.worker(SECOND, &shipped).await;
    new.ship(100..130).await;
    new.heard.until("done order.ship", 60).await;
    // An old publisher that is still there is served too, again and again.
    for order in [200, 201] {
        let moved = servers.moved_until(SECOND, "can be deleted").await;
        assert!(!moved.is_over() && !moved.waits(), "{moved}");
        old.ship(order..order + 1).await;
        let done = 60 + (order as usize - 199);
        new.heard.until("done order.ship", done).await;
    }
    new.end().await;
    old.end().await;
    let all: Vec<_> = shipped.orders().into_values().collect();
    assert_eq!(all, vec![1; 62]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_queue_that_is_not_there_is_not_declared_and_holds_up_no_lower_tier() {
    for tier in [SECOND, TO_POSTGRES] {
        let servers = Servers::new().await;
        let new = servers.worker(tier, &Shipped::default()).await;
        for _ in 0..20 {
            new.app.publish(Count {}).await.unwrap();
        }
        new.ship(0..5).await;
        new.heard.until("done order.count", 20).await;
        new.heard.until("done order.ship", 5).await;
        assert_eq!(new.heard.count("redeclared"), 0);
        new.end().await;
        assert!(!servers.has_queue("shop.normal").await);
        let over = servers.moved(tier, true).await;
        assert!(over.is_over(), "{over}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_queue_that_is_deleted_while_it_is_consumed_from_ends_nothing() {
    let servers = Servers::new().await;
    let shipped = Shipped::default();
    let old = servers.publisher(QUORUM, &shipped).await;
    old.ship(0..5).await;
    let new = servers.worker(SECOND, &shipped).await;
    new.heard.until("done order.ship", 5).await;
    servers.vhost.delete_queue("shop.normal").await.unwrap();
    new.ship(10..20).await;
    new.heard.until("done order.ship", 15).await;
    old.end().await;
    // A process that starts with the old map declares it again, and its tasks run.
    let late = servers.publisher(QUORUM, &shipped).await;
    late.ship(30..35).await;
    new.heard.until("done order.ship", 20).await;
    late.end().await;
    new.end().await;
    assert_eq!(shipped.number(), 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_follows_on_a_delivery_of_the_old_queue_goes_to_postgres() {
    let servers = Servers::new().await;
    let shipped = Shipped::default();
    let old = servers.publisher(QUORUM, &shipped).await;
    old.ship(1_000_000..1_000_005).await;
    old.ship(2_000_000..2_000_003).await;
    old.end().await;
    let new = servers.worker(TO_POSTGRES, &shipped).await;
    new.heard.until("done order.ship 2", 5).await;
    new.heard.until("dead order.ship", 3).await;
    let letters = new.app.dead_letters().unwrap();
    let dead = letters.list(&Filter::default(), Page::first(10)).await;
    assert_eq!(dead.unwrap().letters.len(), 3);
    new.end().await;
    assert!(shipped.orders().into_values().all(|times| times == 2));
    let levels = servers.vhost.queues().await.unwrap();
    let mut delayed = levels.iter().filter(|it| it.name.contains(".delay."));
    assert!(delayed.all(|it| it.depth == 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_of_before_the_move_are_collected() {
    let servers = Servers::new().await;
    let shipped = Shipped::default();
    let old = servers.worker(QUORUM, &shipped).await;
    old.ship(2_000_000..2_000_003).await;
    old.heard.until("dead order.ship", 3).await;
    old.end().await;
    servers.until_depth("shop.normal.dlq", 3).await;
    let unprepared = servers.moved(TO_POSTGRES, false).await;
    assert!(
        unprepared.to_string().contains("tierline migrate"),
        "{unprepared}"
    );
    servers.publisher(TO_POSTGRES, &shipped).await.end().await;
    let waits = servers.moved(TO_POSTGRES, false).await.to_string();
    let text = "queue shop.normal.dlq: 3 messages wait";
    assert!(waits.contains(text), "{waits}");
    let new = servers.worker(TO_POSTGRES, &shipped).await;
    new.heard.until("Collected", 1).await;
    servers.until_depth("shop.normal.dlq", 0).await;
    servers.move_on(TO_POSTGRES).await;
    assert!(!servers.has_queue("shop.normal.dlq").await);
    let letters = new.app.dead_letters().unwrap();
    let dead = letters.list(&Filter::default(), Page::first(10)).await;
    assert_eq!(dead.unwrap().letters.len(), 3);
    new.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_reaches_one_generation_and_never_both() {
    let servers = Servers::new().await;
    let shipped = Shipped::default();
    let old = servers.publisher(QUORUM, &shipped).await;
    let new = servers.publisher(SECOND, &shipped).await;
    // Applied again, as by a process that starts late.
    let late = servers.publisher(QUORUM, &shipped).await;
    for process in [&old, &new, &late] {
        process.ship(0..10).await;
        for order in 10..15 {
            let delayed = process.app.publish(Ship { order }).delay("300ms");
            delayed.await.unwrap();
        }
    }
    servers.until_depth("shop.normal.g2", 15).await;
    servers.until_depth("shop.normal", 30).await;
    for process in [old, new, late] {
        process.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_before_the_move_run_and_their_retries_wait_on_the_broker() {
    let servers = Servers::new().await;
    let shipped = Shipped::default();
    let old = servers.publisher(POSTGRES, &shipped).await;
    old.ship(0..10).await;
    old.ship(1_000_000..1_000_003).await;
    let delayed = old.app.publish(Ship { order: 20 }).delay("1s");
    delayed.await.unwrap();
    let waits = servers.moved(FROM_POSTGRES, false).await;
    assert!(waits.waits(), "{waits}");
    let new = servers.worker(FROM_POSTGRES, &shipped).await;
    let waits = servers.moved(FROM_POSTGRES, false).await.to_string();
    new.heard.until("done order.ship", 14).await;
    new.heard.until("retried order.ship", 3).await;
    servers.move_on(FROM_POSTGRES).await;
    new.end().await;
    old.end().await;
    assert_eq!(shipped.number(), 14, "{waits}");
}

impl Servers {
    /// Looks until a step of the move says this.
    async fn moved_until(&self, tier: &str, text: &str) -> TierMove {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let moved = self.moved(tier, true).await;
            if moved.to_string().contains(text) {
                return moved;
            }
            assert!(Instant::now() < deadline, "{moved}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_that_leaves_for_the_broker_keeps_its_key() {
    let servers = Servers::new().await;
    let shipped = Shipped::default();
    let publisher = servers.publisher(POSTGRES, &shipped).await;
    let ship = |order| publisher.app.publish(Ship { order }).unique("the order");
    let first = ship(1_000_000).await.unwrap();
    let mut registry = Registry::new();
    let fails = |_: Ship| async { Err::<(), _>(TaskError::from("not yet")) };
    // The longest delay that is not a row.
    let options = TaskOptions::new().retries(1).backoff("20m");
    registry.register_with::<Ship, _>(fails, options).unwrap();
    registry.register::<Count, _>(|_: Count| async {}).unwrap();
    let heard = Heard::default();
    let app = Tierline::builder(map(FROM_POSTGRES))
        .amqp(servers.vhost.amqp_url())
        .postgres(servers.database.url())
        .registry(registry)
        .observe(heard.ear())
        .connect()
        .await
        .unwrap();
    let retried = heard.until("retried", 1);
    app.work(["all"]).until(retried).await.unwrap();
    let second = ship(2).await.unwrap();
    assert!(second.is_duplicate && second.id == first.id, "{second:?}");
    app.close().await;
    publisher.end().await;
}
