//! What `apply` makes of a broker.

use lapin::ExchangeKind;
use lapin::options::{ExchangeDeclareOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use serde_json::{Value, json};
use tierline::amqp::apply_with;
use tierline::error::BrokerError;
use tierline::topology::QUORUM_PRIORITIES_SINCE;
use tierline::topology::plan::Plan;
use tierline::{Error, Topology};
use tierline_testbed::{Vhost, vhost};

use super::{apply, hotel, hotel_with, management, open, plan, publish, stranger, until};

const DAYS_30: u64 = 30 * 86_400_000;

#[tokio::test]
async fn the_hotel_is_laid_out_as_its_file_says() {
    let vhost = vhost().await;
    let connection = open(&vhost).await;
    apply(&connection, &hotel()).await.unwrap();

    for tier in ["critical", "high", "calls"] {
        let arguments = vhost.arguments(&format!("hotel.{tier}")).await.unwrap();
        assert_eq!(arguments["x-queue-type"], "classic", "{tier}");
        assert_eq!(arguments["x-max-priority"], 10, "{tier}");
    }
    for tier in ["normal", "low", "bulk"] {
        let arguments = vhost.arguments(&format!("hotel.{tier}")).await.unwrap();
        assert_eq!(arguments["x-queue-type"], "quorum", "{tier}");
        assert_eq!(arguments["x-max-priority"], Value::Null, "{tier}");
        assert_eq!(
            arguments["x-dead-letter-strategy"], "at-least-once",
            "{tier}"
        );
    }
    for tier in ["critical", "high", "normal", "low", "bulk", "calls"] {
        let arguments = vhost.arguments(&format!("hotel.{tier}.dlq")).await.unwrap();
        assert_eq!(arguments["x-queue-type"], "quorum", "{tier}");
        assert_eq!(arguments["x-message-ttl"], DAYS_30, "{tier}");
    }
    let planned = plan(&connection, &hotel()).queues.len();
    assert_eq!(vhost.queue_names().await.unwrap().len(), planned);
}

#[tokio::test]
async fn applied_again_it_changes_nothing() {
    let vhost = vhost().await;
    let connection = open(&vhost).await;
    apply(&connection, &hotel()).await.unwrap();
    let (_stranger, channel) = stranger(vhost.amqp_url()).await;
    publish(&channel, "hotel.tasks", "normal").await.unwrap();
    let before = everything(&vhost).await;

    apply(&connection, &hotel()).await.unwrap();

    assert_eq!(everything(&vhost).await, before);
    assert_eq!(vhost.depth("hotel.normal").await.unwrap(), 1);
}

#[tokio::test]
async fn a_changed_argument_is_shown_with_a_way_out_and_nothing_is_touched() {
    let vhost = vhost().await;
    let connection = open(&vhost).await;
    apply(&connection, &hotel()).await.unwrap();
    let (_stranger, channel) = stranger(vhost.amqp_url()).await;
    for _ in 0..3 {
        publish(&channel, "hotel.tasks", "critical").await.unwrap();
    }
    let before = everything(&vhost).await;
    let changed = hotel_with(
        "[tiers.critical]",
        "[tiers.critical]\nmax_priority = 5\nttl = \"1h\"",
    );

    let error = apply(&connection, &changed).await.unwrap_err();

    assert!(
        matches!(error, Error::Broker(BrokerError::Mismatch(_))),
        "{error}"
    );
    assert!(!error.is_transient());
    let error = error.to_string();
    for part in [
        "queue hotel.critical",
        "the file says",
        "the broker has",
        "generation = 2 in [tiers.critical]",
        "nothing was deleted",
        "111 queues",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert_eq!(everything(&vhost).await, before);
    assert_eq!(vhost.depth("hotel.critical").await.unwrap(), 3);

    let error = apply_with(&connection, &plan(&connection, &changed), &management())
        .await
        .unwrap_err()
        .to_string();
    for part in [
        "x-max-priority: the file says 5, the broker has 10",
        "x-message-ttl: the file says 3600000, the broker has nothing",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
}

#[tokio::test]
async fn everything_that_does_not_differ_is_declared() {
    let vhost = vhost().await;
    let (_stranger, channel) = stranger(vhost.amqp_url()).await;
    let options = ExchangeDeclareOptions {
        durable: true,
        ..ExchangeDeclareOptions::default()
    };
    let (topic, none) = (ExchangeKind::Topic, FieldTable::default());
    channel
        .exchange_declare("hotel.tasks".into(), topic, options, none)
        .await
        .unwrap();
    for tier in ["critical", "normal"] {
        let queue = format!("hotel.{tier}");
        let options = QueueDeclareOptions::default();
        channel
            .queue_declare(queue.into(), options, FieldTable::default())
            .await
            .unwrap();
    }

    let connection = open(&vhost).await;
    let error = apply(&connection, &hotel()).await.unwrap_err();

    let Error::Broker(BrokerError::Mismatch(mismatch)) = &error else {
        panic!("{error}");
    };
    let names: Vec<_> = mismatch
        .differences
        .iter()
        .map(|difference| &difference.name)
        .collect();
    assert_eq!(names, ["hotel.tasks", "hotel.critical", "hotel.normal"]);
    assert!(
        error
            .to_string()
            .contains("type: the file says direct, the broker has topic")
    );
    assert_eq!(
        mismatch.applied.bindings,
        plan(&connection, &hotel()).bindings.len()
    );
    assert_eq!(vhost.queue_names().await.unwrap().len(), 112);
}

#[tokio::test]
async fn each_generation_gets_the_messages_of_its_own_routing_key() {
    let vhost = vhost().await;
    let connection = open(&vhost).await;
    apply(&connection, &hotel()).await.unwrap();
    let (_stranger, channel) = stranger(vhost.amqp_url()).await;
    let shortest_delay = format!("normal{}.1", ".0".repeat(24));
    publish(&channel, "hotel.tasks", "normal").await.unwrap();

    let third = hotel_with(
        "[tiers.normal]",
        "[tiers.normal]\ngeneration = 3\nttl = \"1h\"",
    );
    apply(&connection, &third).await.unwrap();
    publish(&channel, "hotel.tasks", "normal").await.unwrap();
    let key = &plan(&connection, &third).tasks["documents.index"].routing_key;
    publish(&channel, "hotel.tasks", key).await.unwrap();
    for delay in [&shortest_delay, &shortest_delay.replace("normal", key)] {
        publish(&channel, "hotel.delay.normal.00", delay)
            .await
            .unwrap();
    }

    let depth = async |queue| vhost.depth(queue).await.unwrap();
    let arrived = async || {
        depth("hotel.delay.normal.00").await == 0
            && depth("hotel.normal.g3").await >= 2
            && depth("hotel.normal").await >= 3
    };
    until("each message arrives in its generation", arrived).await;
    let depths = (depth("hotel.normal.g3").await, depth("hotel.normal").await);
    assert_eq!(depths, (2, 3), "no message is in both");
}

#[tokio::test]
async fn many_apply_at_once_and_all_are_told_of_the_same_mismatch() {
    let vhost = vhost().await;
    let (_stranger, channel) = stranger(vhost.amqp_url()).await;
    let options = QueueDeclareOptions::default();
    channel
        .queue_declare("hotel.critical".into(), options, FieldTable::default())
        .await
        .unwrap();

    let mut appliers = tokio::task::JoinSet::new();
    for _ in 0..10 {
        let connection = open(&vhost).await;
        appliers.spawn(async move { apply(&connection, &hotel()).await });
    }
    while let Some(applied) = appliers.join_next().await {
        let error = applied.unwrap().unwrap_err();
        let Error::Broker(BrokerError::Mismatch(mismatch)) = &error else {
            panic!("{error}");
        };
        assert_eq!(mismatch.differences.len(), 1, "{error}");
    }
    assert_eq!(vhost.queue_names().await.unwrap().len(), 112);
}

#[tokio::test]
async fn priorities_in_a_quorum_tier_need_a_broker_that_has_them() {
    let vhost = vhost().await;
    let connection = open(&vhost).await;
    let version = connection.version();
    let asking = hotel_with("[tiers.normal]", "[tiers.normal]\nmax_priority = 9");

    let planned = Plan::new(&asking, connection.version(), false);

    if version >= QUORUM_PRIORITIES_SINCE {
        apply(&connection, &asking).await.unwrap();
    } else {
        let error = planned.unwrap_err().to_string();
        for part in [
            "\"normal\"",
            &version.to_string(),
            "4.3.0 or newer",
            "\"classic\"",
        ] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }
}

#[tokio::test]
async fn the_longest_names_and_the_largest_values_are_taken() {
    let vhost = vhost().await;
    let connection = open(&vhost).await;
    let (app, tier) = ("a".repeat(100), "t".repeat(100));
    let file = format!(
        "app = \"{app}\"\n[tiers.{tier}]\nqueue = \"quorum\"\nttl = \"49d\"\nmax_length = 2147483647\n\
         delivery_limit = 2147483647\ngeneration = 9\n[groups.g]\ntiers = [\"{tier}\"]\n\
         concurrency = 1\n[tasks]\n"
    );
    apply(&connection, &Topology::parse(file).unwrap())
        .await
        .unwrap();
    let arguments = vhost.arguments(&format!("{app}.{tier}.g9")).await.unwrap();
    assert_eq!(arguments["x-message-ttl"], json!(49_u64 * 86_400_000));
}

/// Every queue with its arguments.
async fn everything(vhost: &Vhost) -> Vec<(String, Value)> {
    let mut queues = Vec::new();
    for name in vhost.queue_names().await.unwrap() {
        // The levels of delays are many and alike.
        if !name.contains(".delay.") {
            let arguments = vhost.arguments(&name).await.unwrap();
            queues.push((name, arguments));
        }
    }
    queues
}
