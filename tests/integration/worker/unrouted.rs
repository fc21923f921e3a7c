//! Messages that fall due, or are published, while the queue of their tier is away.

use std::time::Duration;

use lapin::options::{BasicPublishOptions, ConfirmSelectOptions, QueueDeleteOptions};
use lapin::{BasicProperties, Channel, ConnectionProperties};
use tierline::error::PublishError;
use tierline::message::DeadReason;
use tierline::{Error, Tierline, Topology};
use tierline_testbed::{Cluster, Node, Vhost, vhost};
use tokio::sync::oneshot;

use super::tasks::{Dig, Fill, registry};
use super::{Heard, Working, take_dead};

const MAP: &str = r#"
    app = "yard"
    [tiers.first]
    queue = "classic"
    [tiers.second]
    queue = "quorum"
    [groups.first]
    tiers = ["first"]
    concurrency = 2
    [groups.second]
    tiers = ["second"]
    concurrency = 2
    [tasks]
    dig = "first"
    fill = "second"
"#;

async fn channel(vhost: &Vhost) -> Channel {
    let properties = ConnectionProperties::default();
    let connection = lapin::Connection::connect(vhost.amqp_url(), properties);
    let channel = connection.await.unwrap().create_channel().await.unwrap();
    let options = ConfirmSelectOptions::default();
    channel.confirm_select(options).await.unwrap();
    channel
}

/// Sends a message to where the delay queues send what they cannot route.
async fn send_unrouted(channel: &Channel, payload: &[u8], properties: BasicProperties) {
    let options = BasicPublishOptions::default();
    let exchange = "yard.unrouted".into();
    let sending = channel.basic_publish(exchange, "".into(), options, payload, properties);
    assert!(sending.await.unwrap().await.unwrap().is_ack());
}

fn of_task(task: &str, id: &str) -> BasicProperties {
    BasicProperties::default()
        .with_type(task.into())
        .with_message_id(id.into())
        .with_delivery_mode(2)
}

#[tokio::test]
async fn unrouted_tasks_run_in_their_tier_and_those_without_a_tier_are_dead_letters() {
    let working = Working::begin(MAP, registry()).await;
    let channel = channel(&working.vhost).await;
    // More than are taken at once.
    for number in 0..150 {
        let task = ["dig", "fill"][number % 2];
        send_unrouted(&channel, b"{}", of_task(task, &format!("id-{number}"))).await;
    }
    send_unrouted(&channel, b"{}", of_task("fell", "unmapped")).await;
    send_unrouted(&channel, b"{}", BasicProperties::default()).await;
    working.heard.until("done dig", 75).await;
    working.heard.until("done fill", 75).await;
    assert_eq!(working.heard.count("Rerouted"), 150);
    let mut problems = Vec::new();
    for _ in 0..2 {
        let (_, death) = take_dead(&working.vhost, "yard.first.dlq").await;
        assert_eq!(death.reason, DeadReason::Unroutable);
        problems.push(death.failure.message);
    }
    problems.sort();
    assert!(problems[0].contains("no tier"), "{problems:?}");
    assert!(problems[1].contains("type"), "{problems:?}");
    let vhost = working.end().await;
    assert_eq!(vhost.depth("yard.unrouted").await.unwrap(), 0);
}

#[tokio::test]
async fn unrouted_tasks_of_a_tier_whose_queue_is_gone_hold_up_no_other_tier() {
    let delete = async |channel: &Channel| {
        let options = QueueDeleteOptions::default();
        let deleting = channel.queue_delete("yard.first".into(), options);
        deleting.await.unwrap();
    };
    only_the_tasks_of_first_stay(MAP, delete).await;
}

#[tokio::test]
async fn unrouted_tasks_of_a_tier_that_is_full_hold_up_no_other_tier() {
    let map = MAP.replace("[tiers.second]", "max_length = 1\n[tiers.second]");
    let fill = async |channel: &Channel| {
        let (options, properties) = (BasicPublishOptions::default(), of_task("dig", "first"));
        let queue = "yard.first".into();
        let sending = channel.basic_publish("".into(), queue, options, b"{}", properties);
        assert!(sending.await.unwrap().await.unwrap().is_ack());
    };
    only_the_tasks_of_first_stay(&map, fill).await;
}

/// A worker of the other group finds tasks of a tier that takes none, and one of its own tier behind them.
async fn only_the_tasks_of_first_stay(map: &str, close_first: impl AsyncFn(&Channel)) {
    // More than are taken at once.
    const STAY: u32 = 40;
    let (vhost, heard) = (vhost().await, Heard::default());
    let app = Tierline::builder(Topology::parse(map).unwrap())
        .amqp(vhost.amqp_url())
        .registry(registry())
        .observe(heard.ear())
        .connect()
        .await
        .unwrap();
    let channel = channel(&vhost).await;
    close_first(&channel).await;
    for number in 0..STAY {
        send_unrouted(&channel, b"{}", of_task("dig", &format!("dig-{number}"))).await;
    }
    send_unrouted(&channel, b"{}", of_task("fill", "behind")).await;
    let (stop, stopped) = oneshot::channel::<()>();
    let worker = app.work(["second"]).until(async { drop(stopped.await) });
    let worker = tokio::spawn(worker);
    heard.until("done fill", 1).await;
    drop(stop);
    worker.await.unwrap().unwrap();
    assert_eq!(heard.count("dead"), 0);
    assert_eq!(vhost.depth("yard.unrouted").await.unwrap(), STAY);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_classic_tier_whose_node_restarts_gets_what_is_published_and_due_meanwhile() {
    let cluster = Cluster::start().await.unwrap();
    let vhost = cluster.vhost().await.unwrap();
    let [first, second, _] = cluster.nodes();
    let url = |node: &Node| format!("{}/{}", node.amqp_url(), vhost.name());
    // Declared through the second node, on which the classic queue is therefore.
    let topology = || Topology::parse(MAP).unwrap();
    drop(
        Tierline::builder(topology())
            .amqp(url(second))
            .connect()
            .await
            .unwrap(),
    );
    for node in cluster.nodes() {
        node.flush_declarations().await.unwrap();
    }
    let through_first = url(first);
    let working = Working::begin_at(&through_first, vhost, MAP, registry()).await;
    working.heard.until("consuming", 2).await;
    second.stop().await.unwrap();

    let error = working
        .app
        .publish(Dig {})
        .deadline("1s")
        .await
        .unwrap_err();
    // RabbitMQ 4 keeps the bindings of the queue, and refuses the message.
    let is_down = matches!(
        error,
        Error::Publish(PublishError::QueueDown { .. } | PublishError::Refused { .. })
    );
    assert!(is_down && error.is_transient(), "{error:?}");
    let patient = working.app.publish(Dig {}).deadline("120s").into_future();
    let patient = tokio::spawn(patient);
    for _ in 0..10 {
        working.app.publish(Dig {}).delay("100ms").await.unwrap();
    }
    // The other tier goes on meanwhile, with delays too.
    working.app.publish(Fill {}).delay("1s").await.unwrap();
    working.heard.until("done fill", 1).await;
    second.start().await.unwrap();
    patient.await.unwrap().unwrap();
    working.heard.until("done dig", 11).await;
    assert_eq!(working.heard.count("dead"), 0);
    tokio::time::timeout(Duration::from_secs(60), working.end())
        .await
        .unwrap();
}
