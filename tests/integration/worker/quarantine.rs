//! Tasks in quarantine, whose broker loses what it was told.

use std::sync::Arc;

use lapin::options::BasicPublishOptions;
use lapin::types::FieldTable;
use lapin::{BasicProperties, ConnectionProperties};
use serde::{Deserialize, Serialize};
use tierline::{Registry, Task};
use tierline_testbed::{Network, Vhost, vhost};
use tokio::sync::Semaphore;

use super::{Working, behind_a_proxy, take_one};

const MAP: &str = r#"
    app = "hotel"
    [tiers.normal]
    queue = "quorum"
    [groups.all]
    tiers = ["normal"]
    concurrency = 2
    [tasks]
    "hotel.clean" = "normal"
"#;

#[derive(Serialize, Deserialize)]
struct Clean {
    room: u32,
}

impl Task for Clean {
    const NAME: &'static str = "hotel.clean";
}

/// Each run takes one permit.
fn clean(open: &Arc<Semaphore>) -> Registry {
    let mut registry = Registry::new();
    let open = open.clone();
    registry
        .register::<Clean, _>(move |_: Clean| {
            let open = open.clone();
            async move { open.acquire().await.unwrap().forget() }
        })
        .unwrap();
    registry
}

/// Puts a task into quarantine that is a dead letter after the next crash.
async fn send_suspect(vhost: &Vhost, id: &str) {
    let connection = lapin::Connection::connect(vhost.amqp_url(), ConnectionProperties::default())
        .await
        .unwrap();
    let channel = connection.create_channel().await.unwrap();
    let mut headers = FieldTable::default();
    headers.insert("tierline-crashes".into(), 4.into());
    channel
        .basic_publish(
            "hotel.tasks".into(),
            "all.quarantine".into(),
            BasicPublishOptions::default(),
            br#"{"room":7}"#,
            BasicProperties::default()
                .with_type(Clean::NAME.into())
                .with_message_id(id.into())
                .with_delivery_mode(2)
                .with_headers(headers),
        )
        .await
        .unwrap();
    // Answered after the message was taken.
    channel.close(200, "done".into()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_suspect_that_ended_while_the_network_was_silent_is_done_and_no_crash_loop() {
    let vhost = vhost().await;
    let (url, proxy) = behind_a_proxy(&vhost).await;
    let open = Arc::new(Semaphore::new(0));
    let working = Working::begin_at(&url, vhost, MAP, clean(&open)).await;
    send_suspect(&working.vhost, "one").await;
    working.heard.until("started", 1).await;
    proxy.set(Network::Silent);
    open.add_permits(1);
    working.heard.until("done", 1).await;
    // The acknowledgement is lost, and only the heartbeat shows it.
    working.heard.until("disconnected Work", 1).await;
    proxy.set(Network::Good);
    working.heard.until("consuming", 2).await;
    // It comes after the first one, which is delivered again.
    send_suspect(&working.vhost, "other").await;
    open.add_permits(1);
    working.heard.until("done", 2).await;
    let heard = &working.heard;
    let counts = ["started", "suspected", "dead"].map(|kind| heard.count(kind));
    assert_eq!(counts, [2, 0, 0], "{:#?}", heard.lines());
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_suspect_whose_quarantine_was_deleted_goes_back_to_its_tier_at_a_shutdown() {
    let working = Working::begin(MAP, clean(&Arc::new(Semaphore::new(0)))).await;
    send_suspect(&working.vhost, "one").await;
    working.heard.until("started", 1).await;
    let quarantine = "hotel.all.quarantine";
    working.vhost.delete_queue(quarantine).await.unwrap();
    let vhost = working.end().await;
    let (payload, properties) = take_one(&vhost, "hotel.normal").await;
    let id = properties.message_id().as_ref().map(|id| id.as_str());
    assert_eq!((&payload[..], id), (&br#"{"room":7}"#[..], Some("one")));
}
