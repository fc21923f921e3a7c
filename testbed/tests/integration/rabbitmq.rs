//! What the testbed does to brokers, seen through an ordinary client.

#![allow(clippy::unwrap_used, reason = "a test may panic")]
use std::time::Duration;

use futures_util::StreamExt;
use lapin::options::{
    BasicConsumeOptions, BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions,
    QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use tierline_testbed::{Broker, Cluster, Plugins, Release, depth, vhost};

const QUEUE: &str = "letters";

#[tokio::test]
async fn a_killed_node_comes_back_with_its_durable_messages() {
    let broker = Broker::start().await.unwrap();
    let vhost = broker.vhost().await.unwrap();
    for kind in ["classic", "quorum"] {
        let channel = open(vhost.amqp_url()).await;
        declare(&channel, kind, kind).await;
        for number in 0..10 {
            publish(&channel, kind, &format!("{kind} {number}")).await;
        }
    }

    broker.flush_declarations().await.unwrap();
    broker.kill().await.unwrap();
    assert!(
        connect(vhost.amqp_url()).await.is_err(),
        "a killed node answers"
    );
    broker.start().await.unwrap();

    let channel = open(vhost.amqp_url()).await;
    for kind in ["classic", "quorum"] {
        let mut found = Vec::new();
        while let Some(message) = channel
            .basic_get(kind.into(), BasicGetOptions { no_ack: true })
            .await
            .unwrap()
        {
            found.push(String::from_utf8(message.data.clone()).unwrap());
        }
        let sent: Vec<String> = (0..10).map(|number| format!("{kind} {number}")).collect();
        assert_eq!(found, sent);
    }
}

#[tokio::test]
async fn a_cluster_elects_a_new_leader_when_the_old_one_is_killed() {
    let cluster = Cluster::start().await.unwrap();
    let vhost = cluster.vhost().await.unwrap();
    let channel = open(vhost.amqp_url()).await;
    declare(&channel, QUEUE, "quorum").await;
    publish(&channel, QUEUE, "before the kill").await;

    let [first, second, _] = cluster.nodes();
    let old = cluster.leader(first, vhost.name(), QUEUE).await.unwrap();
    old.kill().await.unwrap();

    let witness = if old.name() == first.name() {
        second
    } else {
        first
    };
    let url = format!("{}/{}", witness.amqp_url(), vhost.name());
    // A channel that publishes during the election may never be answered again (seen on 3.10.8),
    // so every attempt has its own.
    let attempt = async || {
        let channel = open(&url).await;
        try_publish(&channel, QUEUE, "after the kill").await
    };
    let patience = Duration::from_secs(2);
    while !matches!(tokio::time::timeout(patience, attempt()).await, Ok(true)) {}
    let new = cluster.leader(witness, vhost.name(), QUEUE).await.unwrap();
    assert_ne!(new.name(), old.name());
    assert!(depth(&url, QUEUE).await.unwrap() >= 2);
}

#[tokio::test]
async fn an_alarm_blocks_a_publisher_and_clearing_it_lets_it_go_on() {
    let broker = Broker::start().await.unwrap();
    let vhost = broker.vhost().await.unwrap();
    let channel = open(vhost.amqp_url()).await;
    declare(&channel, QUEUE, "classic").await;

    broker.raise_memory_alarm().await.unwrap();
    let mut blocked = Box::pin(publish(&channel, QUEUE, "through the alarm"));
    let early = tokio::time::timeout(Duration::from_secs(1), &mut blocked).await;
    assert!(early.is_err(), "a publish was confirmed under an alarm");

    broker.clear_memory_alarm().await.unwrap();
    blocked.await;
    assert_eq!(vhost.depth(QUEUE).await.unwrap(), 1);
}

#[tokio::test]
async fn a_paused_node_is_silent_and_goes_on_where_it_was() {
    let broker = Broker::start().await.unwrap();
    let vhost = broker.vhost().await.unwrap();
    let channel = open(vhost.amqp_url()).await;
    declare(&channel, QUEUE, "quorum").await;

    broker.pause().await.unwrap();
    let mut silent = Box::pin(publish(&channel, QUEUE, "through the pause"));
    let early = tokio::time::timeout(Duration::from_secs(1), &mut silent).await;
    assert!(early.is_err(), "a paused node confirmed a publish");

    broker.resume().await.unwrap();
    silent.await;
    assert_eq!(vhost.depth(QUEUE).await.unwrap(), 1);
}

#[tokio::test]
async fn closed_connections_and_deleted_queues_are_noticed_by_their_clients() {
    let broker = Broker::start().await.unwrap();
    let vhost = broker.vhost().await.unwrap();
    let channel = open(vhost.amqp_url()).await;
    declare(&channel, QUEUE, "classic").await;
    let consume = async |channel: &Channel| {
        let options = BasicConsumeOptions::default();
        channel
            .basic_consume(QUEUE.into(), "".into(), options, FieldTable::default())
            .await
    };

    let mut consumer = consume(&channel).await.unwrap();
    vhost.delete_queue(QUEUE).await.unwrap();
    assert!(
        consumer.next().await.is_none(),
        "the server cancels the consumer of a deleted queue"
    );
    assert!(vhost.queues().await.unwrap().is_empty());

    declare(&channel, QUEUE, "classic").await;
    let mut consumer = consume(&channel).await.unwrap();
    broker.close_all_connections().await.unwrap();
    assert!(matches!(consumer.next().await, Some(Err(_)) | None));
    assert!(!channel.status().connected());
}

#[tokio::test]
async fn two_testbeds_at_once_do_not_meet() {
    let release = Release::find().unwrap();
    let metrics = Plugins {
        prometheus: true,
        ..Plugins::management()
    };
    let (one, other) = tokio::join!(Broker::start(), Broker::start_with(release, metrics));
    let (one, other) = (one.unwrap(), other.unwrap());
    assert!(one.prometheus_url().is_none());
    assert!(other.prometheus_url().is_some());

    let (mine, yours) = (one.vhost().await.unwrap(), other.vhost().await.unwrap());
    let channel = open(mine.amqp_url()).await;
    declare(&channel, QUEUE, "quorum").await;
    publish(&channel, QUEUE, "for one").await;
    one.restart().await.unwrap();
    assert_eq!(mine.depth(QUEUE).await.unwrap(), 1);
    assert!(yours.queues().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_virtual_host_starts_empty_and_is_gone_with_its_value() {
    let mine = vhost().await;
    let channel = open(mine.amqp_url()).await;
    declare(&channel, QUEUE, "classic").await;
    publish(&channel, QUEUE, "one").await;
    let queues = mine.queues().await.unwrap();
    assert_eq!((queues[0].name.as_str(), queues[0].depth), (QUEUE, 1));
    assert_eq!(queues[0].arguments["x-queue-type"], "classic");

    let url = mine.amqp_url().to_owned();
    drop(mine);
    assert!(
        connect(&url).await.is_err(),
        "the virtual host is still there"
    );
}

async fn connect(url: &str) -> lapin::Result<Connection> {
    Connection::connect(url, ConnectionProperties::default()).await
}

async fn open(url: &str) -> Channel {
    let connection = connect(url).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    channel
        .confirm_select(ConfirmSelectOptions::default())
        .await
        .unwrap();
    channel
}

async fn declare(channel: &Channel, queue: &str, kind: &str) {
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), AMQPValue::LongString(kind.into()));
    let options = QueueDeclareOptions {
        durable: true,
        ..QueueDeclareOptions::default()
    };
    channel
        .queue_declare(queue.into(), options, arguments)
        .await
        .unwrap();
}

async fn publish(channel: &Channel, queue: &str, text: &str) {
    assert!(
        try_publish(channel, queue, text).await,
        "the broker refused a message"
    );
}

async fn try_publish(channel: &Channel, queue: &str, text: &str) -> bool {
    let persistent = BasicProperties::default().with_delivery_mode(2);
    let options = BasicPublishOptions::default();
    let confirmation = channel
        .basic_publish(
            "".into(),
            queue.into(),
            options,
            text.as_bytes(),
            persistent,
        )
        .await
        .unwrap()
        .await
        .unwrap();
    confirmation.is_ack()
}
