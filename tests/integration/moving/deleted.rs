//! When the queue that a tier had is deleted, and when not.

use lapin::options::{BasicAckOptions, BasicGetOptions};
use lapin::types::FieldTable;
use tierline::Error;
use tierline::amqp::Management;
use tierline::error::TopologyError;
use tierline::moving::StepState;

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_with_messages_or_consumers_is_not_deleted() {
    for formerly in ["classic", "quorum"] {
        let before = format!("queue = {formerly:?}");
        let now = format!(
            "queue = \"quorum\"\ngeneration = 2\nformerly = {{ queue = {formerly:?}, generation = 1 }}"
        );
        let servers = Servers::new().await;
        let shipped = Shipped::default();
        let old = servers.worker(&before, &shipped).await;
        let missing = servers.moved(&now, false).await;
        assert!(missing.to_string().contains("apply the file"), "{missing}");
        let new = servers.publisher(&now, &shipped).await;
        old.heard.until("consuming normal", 1).await;

        let used = servers.moved(&now, false).await;
        assert!(used.to_string().contains("has 1 consumer"), "{used}");
        assert!(used.waits());
        old.end().await;

        let old = servers.publisher(&before, &shipped).await;
        old.ship(0..3).await;
        let full = servers.moved(&now, false).await;
        assert!(full.to_string().contains("3 messages wait"), "{full}");
        assert_eq!(full.steps[1].state, StepState::Waits);
        // It is bound as before.
        old.ship(3..4).await;
        servers.until_depth("shop.normal", 4).await;
        old.end().await;
        new.end().await;

        let new = servers.worker(&now, &shipped).await;
        new.heard.until("done order.ship", 4).await;
        let dry = servers.moved(&now, true).await;
        assert!(!dry.is_over(), "{dry}");
        assert!(servers.has_queue("shop.normal").await);
        servers.move_on(&now).await;
        assert!(!servers.has_queue("shop.normal").await);
        new.ship(10..12).await;
        new.heard.until("done order.ship", 6).await;
        new.end().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_falls_due_after_the_old_queue_is_gone_reaches_the_new_home() {
    for now in [TO_POSTGRES, SECOND] {
        // On a slow machine the messages fall due before the queue is gone: then with longer delays.
        let mut delay = Duration::from_secs(6);
        while !falls_due_after_the_move(now, delay).await {
            delay *= 2;
            assert!(
                delay < PATIENCE,
                "no move ended before its messages fell due"
            );
        }
    }
}

/// Whether the old queue was deleted before messages with this delay fell due. If so, they ran.
async fn falls_due_after_the_move(now: &str, delay: Duration) -> bool {
    let servers = Servers::new().await;
    let shipped = Shipped::default();
    let old = servers.publisher(QUORUM, &shipped).await;
    for order in 0..5 {
        let delayed = old.app.publish(Ship { order }).delay(delay);
        delayed.await.unwrap();
    }
    old.end().await;
    let new = servers.worker(now, &shipped).await;
    let moved = servers.moved(now, false).await;
    if servers.has_queue("shop.normal").await || !moved.to_string().contains("5 messages wait") {
        new.heard.until("done order.ship", 5).await;
        new.end().await;
        return false;
    }
    new.heard.until("done order.ship", 5).await;
    servers.move_on(now).await;
    let has_delays = servers.has_queue("shop.delay.normal.00").await;
    assert_eq!(has_delays, now == SECOND);
    new.end().await;
    assert!(shipped.orders().into_values().all(|times| times == 1));
    true
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_of_before_that_starts_after_the_move_does_no_harm() {
    let servers = Servers::new().await;
    let shipped = Shipped::default();
    let old = servers.publisher(QUORUM, &shipped).await;
    old.end().await;
    let new = servers.worker(TO_POSTGRES, &shipped).await;
    servers.move_on(TO_POSTGRES).await;
    let queues = servers.vhost.queue_names().await.unwrap();
    let left = queues.iter().filter(|it| it.contains("normal"));
    assert_eq!(left.count(), 0, "{queues:?}");

    let late = servers.publisher(QUORUM, &shipped).await;
    late.ship(0..10).await;
    let delayed = late.app.publish(Ship { order: 10 }).delay("200ms");
    delayed.await.unwrap();
    new.heard.until("done order.ship", 11).await;
    late.end().await;
    servers.move_on(TO_POSTGRES).await;
    new.end().await;
    let all: Vec<_> = shipped.orders().into_values().collect();
    assert_eq!(all, vec![1; 11]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_queue_of_which_a_consumer_may_hold_messages_is_not_deleted() {
    let servers = Servers::new().await;
    let shipped = Shipped::default();
    let old = servers.worker(QUORUM, &shipped).await;
    old.ship(2_000_000..2_000_001).await;
    old.heard.until("dead order.ship", 1).await;
    old.end().await;
    servers.until_depth("shop.normal.dlq", 1).await;
    servers.publisher(TO_POSTGRES, &shipped).await.end().await;
    servers.vhost.delete_queue("shop.normal").await.unwrap();
    let (_holder, channel) = servers.stranger().await;
    let queue = "shop.normal.dlq";
    let taken = channel.basic_get(queue.into(), BasicGetOptions::default());
    let held = taken.await.unwrap().unwrap();

    let connection = servers.connection().await;
    let database = tierline::Database::new(servers.database.url()).unwrap();
    let topology = map(TO_POSTGRES);
    let mover = Mover::new(&topology)
        .broker(&connection)
        .database(&database);
    let unknown = mover.run("normal").await.unwrap().to_string();
    let text = "queue shop.normal.dlq: empty, but collectors may hold messages of it";
    assert!(unknown.contains(text), "{unknown}");
    assert!(unknown.contains("--assume-acknowledged"), "{unknown}");

    let amqp = std::env::var(tierline_testbed::AMQP_URL).unwrap();
    let management = Management::new(&tierline_testbed::management_url(&amqp)).unwrap();
    let mover = mover.management(&management);
    let waits = mover.run("normal").await.unwrap();
    // The broker counts every few seconds: until then nobody knows.
    let counted = "queue shop.normal.dlq: 1 message not acknowledged";
    let waits = waits.to_string();
    assert!(waits.contains(counted) || waits.contains(text), "{waits}");
    assert!(servers.has_queue(queue).await);

    held.ack(BasicAckOptions::default()).await.unwrap();
    let deadline = Instant::now() + PATIENCE;
    while servers.has_queue(queue).await {
        // Each with a connection of its own: a run that the broker did not answer changes nothing.
        let connection = servers.connection().await;
        let mover = Mover::new(&topology)
            .broker(&connection)
            .database(&database)
            .management(&management);
        let moved = mover.run("normal").await;
        assert!(Instant::now() < deadline, "{moved:?}");
        connection.close().await;
    }
    connection.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_old_queue_that_an_interrupted_run_left_unbound_is_bound_again() {
    let servers = Servers::new().await;
    let shipped = Shipped::default();
    let old = servers.publisher(QUORUM, &shipped).await;
    old.ship(0..1).await;
    servers.publisher(SECOND, &shipped).await.end().await;
    let (_stranger, channel) = servers.stranger().await;
    let (queue, exchange) = ("shop.normal", "shop.tasks");
    let arguments = FieldTable::default();
    channel
        .queue_unbind(queue.into(), exchange.into(), "normal".into(), arguments)
        .await
        .unwrap();
    old.app.publish(Ship { order: 1 }).await.unwrap_err();

    let dry = servers.moved(SECOND, true).await;
    assert!(dry.waits(), "{dry}");
    old.app.publish(Ship { order: 1 }).await.unwrap_err();
    let waits = servers.moved(SECOND, false).await;
    assert!(waits.waits(), "{waits}");
    old.ship(1..2).await;
    servers.until_depth(queue, 2).await;
    old.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_all_tiers_shared_is_named_when_the_last_one_has_left_the_broker() {
    let servers = Servers::new().await;
    let file = |tier: &str| {
        let map = format!(
            "app = \"shop\"\n[tiers.normal]\n{tier}\n[groups.all]\ntiers = [\"normal\"]\nconcurrency = 1\n[tasks]\n"
        );
        Topology::parse(map).unwrap()
    };
    for tier in [QUORUM, TO_POSTGRES] {
        let app = Tierline::builder(file(tier)).amqp(servers.vhost.amqp_url());
        let app = app.postgres(servers.database.url()).connect().await;
        app.unwrap().close().await;
    }
    let connection = servers.connection().await;
    let database = tierline::Database::new(servers.database.url()).unwrap();
    let topology = file(TO_POSTGRES);
    let mover = Mover::new(&topology)
        .assume_acknowledged()
        .broker(&connection)
        .database(&database);
    let moved = mover.run("normal").await.unwrap();
    connection.close().await;
    assert!(moved.is_over(), "{moved}");
    let text = moved.to_string();
    for kept in [
        "quarantine shop.all.quarantine: empty, and not deleted",
        "delay queues shop.delay.long.* and queue shop.unrouted: empty, and not deleted",
        "shop.tasks",
    ] {
        assert!(text.contains(kept), "{text}");
    }
    assert!(servers.has_queue("shop.unrouted").await);
}

#[tokio::test]
async fn a_tier_that_does_not_move_and_a_server_that_is_not_given_are_errors() {
    let topology = map(TO_POSTGRES);
    let mover = Mover::new(&topology);
    for (tier, text) in [
        ("low", "has no formerly in it; these have: normal"),
        ("norml", "did you mean \"normal\"?"),
    ] {
        let error = mover.run(tier).await.unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
    }
    let error = mover.dry_run("normal").await.unwrap_err();
    let is_missing = matches!(error, Error::Topology(TopologyError::NoDatabase { .. }));
    assert!(is_missing, "{error}");
}

#[tokio::test]
async fn a_map_of_rows_with_a_tier_that_was_on_the_broker_needs_the_broker() {
    let rows = "app = \"shop\"\n[tiers.normal]\nqueue = \"postgres\"\nformerly = \"classic\"\n[groups.all]\n\
                tiers = [\"normal\"]\nconcurrency = 1\n[tasks]\n";
    let database = database().await;
    let connecting = Tierline::builder(Topology::parse(rows).unwrap()).postgres(database.url());
    let error = connecting.connect().await.unwrap_err().to_string();
    assert!(
        error.contains("formerly") && error.contains(".amqp(…)"),
        "{error}"
    );
}
