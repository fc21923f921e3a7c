//! Middleware around the handlers of a worker.

use serde::{Deserialize, Serialize};
use tierline::error::WorkerError;
use tierline::message::DeadReason;
use tierline::task::{Attempt, Next};
use tierline::{Error, Outcome, Registry, Task, Tierline, Topology};
use tierline_testbed::vhost;

use super::{Heard, take_dead};

const MAP: &str = r#"
    app = "hotel"
    [tiers.normal]
    queue = "quorum"
    [tiers.urgent]
    queue = "classic"
    [groups.slow]
    tiers = ["normal"]
    concurrency = 2
    [groups.fast]
    tiers = ["urgent"]
    concurrency = 2
    [tasks]
    "hotel.clean" = "normal"
    "hotel.unlock" = "urgent"
"#;

#[derive(Serialize, Deserialize)]
struct Clean {
    room: u32,
}

impl Task for Clean {
    const NAME: &'static str = "hotel.clean";
}

#[derive(Serialize, Deserialize)]
struct Unlock;

impl Task for Unlock {
    const NAME: &'static str = "hotel.unlock";
}

async fn check_tenant(attempt: Attempt, next: Next) -> Outcome {
    match attempt.context().header("tenant") {
        Some("ada") => next.run(attempt).await,
        _ => Outcome::dead("not a tenant of this hotel"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_runs_the_middleware_of_its_groups_around_their_handlers_alone() {
    let vhost = vhost().await;
    let mut registry = Registry::new();
    registry.register(|_: Clean| async {}).unwrap();
    registry.register(|_: Unlock| async {}).unwrap();
    let heard = Heard::default();
    let app = Tierline::builder(Topology::parse(MAP).unwrap())
        .amqp(vhost.amqp_url())
        .registry(registry)
        .observe(heard.ear())
        .group_middleware("slow", check_tenant)
        .connect()
        .await
        .unwrap();
    app.publish(Unlock).await.unwrap();
    app.publish(Clean { room: 1 }).await.unwrap();
    let clean = app.publish(Clean { room: 2 });
    clean.header("tenant", "ada").await.unwrap();
    let settled = async {
        heard.until("done hotel.unlock 1", 1).await;
        heard.until("done hotel.clean 1", 1).await;
        heard.until("dead hotel.clean", 1).await;
    };
    app.work(["slow", "fast"]).until(settled).await.unwrap();
    let (message, death) = take_dead(&vhost, "hotel.normal.dlq").await;
    assert_eq!(message.unwrap().payload, br#"{"room":1}"#);
    assert_eq!(death.reason, DeadReason::Permanent);
    assert_eq!(death.failure.message, "not a tenant of this hotel");
    assert_eq!(heard.count("done"), 2);
}

#[tokio::test]
async fn an_app_whose_middleware_is_for_an_unknown_group_or_task_does_not_connect() {
    let builder = || Tierline::builder(Topology::parse(MAP).unwrap()).amqp("amqp://127.0.0.1:1");
    let group = builder().group_middleware("slwo", check_tenant);
    let task = builder().task_middleware("hotel.unlok", check_tenant);
    for (builder, meant) in [(group, "slow"), (task, "hotel.unlock")] {
        let error = builder.connect().await.unwrap_err();
        assert!(matches!(
            error,
            Error::Worker(WorkerError::MiddlewareWithoutTarget { .. })
        ));
        let text = error.to_string();
        assert!(text.contains(&format!("did you mean {meant:?}?")), "{text}");
    }
}
