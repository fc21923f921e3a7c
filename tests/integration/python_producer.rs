//! A task that a Python program published, run by a Rust handler.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use lapin::options::BasicGetOptions;
use lapin::{Connection, ConnectionProperties};
use serde::{Deserialize, Serialize};
use tierline::execute::Verdict;
use tierline::message::Message;
use tierline::testing::Tester;
use tierline::topology::plan::Plan;
use tierline::{Registry, Task, Tierline, Topology};
use tierline_testbed::{Python, vhost};

const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/python_producer");
const MAP: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/topology/minimal.toml");

#[derive(Serialize, Deserialize)]
struct SendReceipt {
    order: u64,
}

impl Task for SendReceipt {
    const NAME: &'static str = "email.send_receipt";
}

#[tokio::test]
async fn a_task_published_from_python_is_run_by_a_rust_handler() {
    let vhost = vhost().await;
    let python = Python::with(&Path::new(EXAMPLE).join("requirements.txt"))
        .await
        .unwrap();
    let topology = Topology::load(MAP).unwrap();
    let app = Tierline::builder(topology.clone()).amqp(vhost.amqp_url());
    // It declares the queues.
    app.connect().await.unwrap();
    let connection = Connection::connect(vhost.amqp_url(), ConnectionProperties::default())
        .await
        .unwrap();
    let broker = tierline::amqp::Connection::open(vhost.amqp_url(), "test");
    let plan = Plan::new(&topology, broker.await.unwrap().version(), false).unwrap();
    // What `tierline topology plan --json` prints.
    let file = std::env::temp_dir().join(format!("{}.json", vhost.name()));
    std::fs::write(&file, serde_json::to_string(&plan).unwrap()).unwrap();

    let script = Path::new(EXAMPLE).join("producer.py");
    let plan = file.to_str().unwrap();
    let arguments = [vhost.amqp_url(), plan, SendReceipt::NAME, r#"{"order": 7}"#];
    let printed = python.run(&script, &arguments).await.unwrap();
    let unmapped = [vhost.amqp_url(), plan, "email.forget", "{}"];
    let refused = python.run(&script, &unmapped).await.unwrap_err();
    std::fs::remove_file(&file).unwrap();
    assert!(
        format!("{refused:#}").contains("not mapped to a tier"),
        "{refused:#}"
    );

    let channel = connection.create_channel().await.unwrap();
    let taken = channel.basic_get("shop.default".into(), BasicGetOptions { no_ack: true });
    let delivery = taken.await.unwrap().unwrap().delivery;
    let headers = delivery.properties.headers().clone().unwrap();
    let is_ours = |name: &str| name.starts_with("tierline-");
    assert!(!headers.inner().keys().any(|name| is_ours(name.as_str())));
    // It is read much later, but its id says when it was enqueued.
    let (now, hour) = (SystemTime::now(), Duration::from_secs(3_600));
    let read = Message::from_wire(&delivery.properties, delivery.data, "default", now + hour);
    let message = read.unwrap();
    assert_eq!(message.id.as_str(), printed.trim());
    assert_eq!(message.headers["producer"], "python");
    assert!(message.enqueued_at > now - hour && message.enqueued_at <= now);

    let ran = Arc::new(Mutex::new(None));
    let noted = Arc::clone(&ran);
    let mut registry = Registry::new();
    registry
        .register(move |receipt: SendReceipt| {
            *noted.lock().unwrap() = Some(receipt.order);
            async {}
        })
        .unwrap();
    let tester = Tester::builder().registry(registry).build();
    assert_eq!(tester.run_message(message).await.verdict, Verdict::Done);
    assert_eq!(*ran.lock().unwrap(), Some(7));
}
