//! How handlers learn of a shutdown, and what becomes of their tasks.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::{StreamExt, stream};
use lapin::ConnectionProperties;
use lapin::options::BasicGetOptions;
use serde::{Deserialize, Serialize};
use tierline::message::Message;
use tierline::task::PublishRequest;
use tierline::{Context, Outcome, Registry, Task, Tierline, Topology};
use tierline_testbed::vhost;
use tokio::sync::{Notify, Semaphore};
use tokio::time::timeout;

use super::{Heard, PATIENCE, Working, take_one};

const MAP: &str = r#"
    app = "hotel"
    [tiers.normal]
    queue = "quorum"
    [groups.all]
    tiers = ["normal"]
    concurrency = 2
    [tasks]
    "contacts.export" = "normal"
"#;

#[derive(Serialize, Deserialize)]
struct Export {
    pages: u32,
}

impl Task for Export {
    const NAME: &'static str = "contacts.export";
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handler_learns_of_a_shutdown_at_once_and_gives_way_without_losing_an_attempt() {
    async fn export(_: Export, cx: Context) -> Outcome {
        if cx.is_shutting_down() || cx.is_cancelled() {
            return Outcome::dead("there is no shutdown yet");
        }
        cx.data::<Arc<Semaphore>>().add_permits(1);
        cx.shutdown_started().await;
        match cx.is_shutting_down() && !cx.is_cancelled() {
            true => Outcome::Snooze(Duration::ZERO),
            false => Outcome::dead("the shutdown is a signal of its own"),
        }
    }
    let mut registry = Registry::new();
    registry.register::<Export, _>(export).unwrap();
    let (vhost, heard, shutdown) = (vhost().await, Heard::default(), Arc::new(Notify::new()));
    let running = Arc::new(Semaphore::new(0));
    let app = Tierline::builder(Topology::parse(MAP).unwrap())
        .amqp(vhost.amqp_url())
        .registry(registry)
        .data(running.clone())
        .observe(heard.ear())
        .connect()
        .await
        .unwrap();
    // No test waits so long: the worker ends because its handlers do.
    let worker = app.work(["all"]).grace(PATIENCE * 10);
    let stopped = shutdown.clone();
    let working = tokio::spawn(worker.until(async move { stopped.notified().await }));
    app.publish(Export { pages: 2 }).await.unwrap();
    app.publish(Export { pages: 3 }).await.unwrap();
    let both = timeout(PATIENCE, running.acquire_many(2)).await;
    both.unwrap().unwrap().forget();

    shutdown.notify_one();
    timeout(PATIENCE, working).await.unwrap().unwrap().unwrap();
    assert_eq!(
        heard.count("snoozed contacts.export 1"),
        2,
        "{:#?}",
        heard.lines()
    );
    for _ in 0..2 {
        let (payload, properties) = take_one(&vhost, "hotel.normal").await;
        let message = Message::from_wire(&properties, payload, "normal", SystemTime::now());
        let message = message.unwrap();
        assert_eq!((message.attempt, message.crashes), (1, 0));
    }
}

/// A prefetch window that is larger than what a channel gives a quorum queue at a time.
const LARGE_WINDOW: &str = r#"
    app = "hotel"
    [tiers.normal]
    queue = "quorum"
    [groups.all]
    tiers = ["normal"]
    concurrency = 4
    prefetch = 32
    [broker]
    ack_timeout = "365d"
    [tasks]
    "contacts.export" = "normal"
"#;

#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_with_a_large_prefetch_window_doubles_nothing_and_makes_no_suspects() {
    const TASKS: u32 = 256;
    for _ in 0..3 {
        let open = Arc::new(Semaphore::new(0));
        let mut registry = Registry::new();
        let gate = open.clone();
        registry
            .register::<Export, _>(move |_: Export| {
                let gate = gate.clone();
                async move { gate.acquire().await.unwrap().forget() }
            })
            .unwrap();
        let working = Working::begin(LARGE_WINDOW, registry).await;
        let tasks = (0..TASKS).map(|pages| PublishRequest::new(&Export { pages }).unwrap());
        let published = working.app.publish_many(stream::iter(tasks));
        published
            .for_each(async |outcome| drop(outcome.unwrap()))
            .await;
        working.heard.until("started", 4).await;
        let heard = working.heard.clone();
        // The handlers end when the shutdown has begun, and the worker ends at once.
        let (vhost, ()) = tokio::join!(working.end(), async { open.add_permits(1_000) });
        let done = heard.count("done");
        let connection =
            lapin::Connection::connect(vhost.amqp_url(), ConnectionProperties::default())
                .await
                .unwrap();
        let channel = connection.create_channel().await.unwrap();
        let mut ids = BTreeSet::new();
        let options = BasicGetOptions { no_ack: true };
        while let Some(got) = channel
            .basic_get("hotel.normal".into(), options)
            .await
            .unwrap()
        {
            let id = got.properties.message_id().as_ref().unwrap().to_string();
            assert!(!got.redelivered, "{id} is a suspect of the next worker");
            assert!(ids.insert(id), "a task is there twice");
        }
        assert_eq!(ids.len() + done, TASKS as usize);
    }
}
