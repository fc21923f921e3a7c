//! What the testbed does to brokers, seen through an ordinary client.

#![allow(clippy::unwrap_used, reason = "a test may panic")]
use std::ops::Deref;
use std::time::Duration;

use futures_util::StreamExt;
use lapin::options::{
    BasicConsumeOptions, BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions,
    QueueDeclareOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Connection, ConnectionProperties};
use tierline_testbed::{Broker, Cluster, Plugins, Release, vhost};

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
    let channel = open(&url).await;
    // During the election the broker may refuse, or never answer at all (seen on 3.10.8).
    let patience = Duration::from_secs(2);
    let again = || try_publish(&channel, QUEUE, "after the kill");
    while !matches!(tokio::time::timeout(patience, again()).await, Ok(true)) {}
    let new = cluster.leader(witness, vhost.name(), QUEUE).await.unwrap();
    assert_ne!(new.name(), old.name());
    let queues = witness.queues(vhost.name()).await.unwrap();
    assert_eq!(queues[0].kind, "quorum");
    assert!(queues[0].messages_ready >= 2, "{queues:?}");
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
    broker.delete_queue(vhost.name(), QUEUE).await.unwrap();
    assert!(
        consumer.next().await.is_none(),
        "the server cancels the consumer of a deleted queue"
    );
    assert!(vhost.queue_names().await.unwrap().is_empty());

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
        management: true,
        prometheus: true,
    };
    let (one, other) = tokio::join!(Broker::start(), Broker::start_with(release, metrics));
    let (one, other) = (one.unwrap(), other.unwrap());
    assert!(one.prometheus_url().is_none());
    assert!(other.prometheus_url().is_some());

    let channel = open(&one.amqp_url()).await;
    declare(&channel, QUEUE, "quorum").await;
    one.stop().await.unwrap();
    assert!(other.queues("/").await.unwrap().is_empty());
    one.restart().await.unwrap();
    assert_eq!(one.queues("/").await.unwrap().len(), 1);
}

#[tokio::test]
async fn a_virtual_host_starts_empty_and_is_gone_with_its_value() {
    let mine = vhost().await;
    let channel = open(mine.amqp_url()).await;
    declare(&channel, QUEUE, "classic").await;
    assert_eq!(mine.queue_names().await.unwrap(), [QUEUE]);
    assert_eq!(
        mine.arguments(QUEUE).await.unwrap()["x-queue-type"],
        "classic"
    );

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

/// A channel together with its connection, which ends when it is dropped.
struct Client {
    _connection: Connection,
    channel: Channel,
}

impl Deref for Client {
    type Target = Channel;

    fn deref(&self) -> &Channel {
        &self.channel
    }
}

async fn open(url: &str) -> Client {
    let connection = connect(url).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    channel
        .confirm_select(ConfirmSelectOptions::default())
        .await
        .unwrap();
    Client {
        _connection: connection,
        channel,
    }
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
