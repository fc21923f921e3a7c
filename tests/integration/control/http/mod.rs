//! What operators change at run time, over HTTP. Every answer is held against the description of the API.

mod refused;

use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tierline::backlog::{TaskFilter, TaskState};
use tierline::{Registry, Task, Tierline, Topology};
use tierline_testbed::{Database, Vhost, database, vhost};

use super::{Working, until, work_in};
use crate::openapi::Described;

const MAP: &str = r#"
    app = "shop"
    [tiers.high]
    queue = "quorum"
    ttl = "1h"
    [tiers.low]
    queue = "postgres"
    max_priority = 5
    lease = "2s"
    limit = { rate = "100/m", burst = 20 }
    [tiers.idle]
    queue = "postgres"
    [groups.all]
    tiers = ["high", "low"]
    concurrency = 2
    [groups.nobody]
    tiers = ["idle"]
    concurrency = 1
    [tasks]
    "order.ship" = "high"
    "order.notify" = "high"
    "mail.send" = "low"
"#;

#[derive(Debug, Serialize, Deserialize)]
struct Ship {}

impl Task for Ship {
    const NAME: &'static str = "order.ship";
}

#[derive(Debug, Serialize, Deserialize)]
struct Notify {}

impl Task for Notify {
    const NAME: &'static str = "order.notify";
}

/// An app with a worker that serves its group `all`, and its admin API.
struct Shop {
    api: Described,
    app: Tierline,
    working: Working,
}

impl Shop {
    async fn open() -> Self {
        let (vhost, database) = tokio::join!(vhost(), database());
        let app = app(&vhost, &database).await;
        let working = work_in(&app, ["all"]);
        let control = app.control().unwrap();
        until(async || !control.processes().await.unwrap().is_empty()).await;
        Self {
            api: Described::of(app.clone(), vhost, database),
            app,
            working,
        }
    }

    async fn get(&self, path: &str) -> Value {
        let at = path.split('?').next().unwrap();
        let operation = self.api.operation("GET", at);
        let (status, answer) = self.api.ask(&operation, path, None).await;
        assert_eq!(status, StatusCode::OK, "{path}: {answer}");
        answer
    }

    async fn post(&self, change: &str, body: Value) -> (StatusCode, Value) {
        let path = format!("/control/{change}");
        let operation = self.api.operation("POST", &path);
        self.api.ask(&operation, &path, Some(&body)).await
    }

    /// A change that is made.
    async fn make(&self, change: &str, body: Value) -> Value {
        let (status, answer) = self.post(change, body).await;
        assert_eq!(status, StatusCode::OK, "{change}: {answer}");
        answer
    }

    async fn end(self) {
        self.working.end().await;
    }
}

async fn app(vhost: &Vhost, database: &Database) -> Tierline {
    let mut registry = Registry::new();
    registry.register::<Ship, _>(|_: Ship| async {}).unwrap();
    registry
        .register::<Notify, _>(|_: Notify| async {})
        .unwrap();
    Tierline::builder(Topology::parse(MAP).unwrap())
        .amqp(vhost.amqp_url())
        .postgres(database.url())
        .registry(registry)
        .connect()
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn pauses_and_limits_are_made_listed_and_ended_over_http() {
    let shop = Shop::open().await;
    let pause = json!({
        "target": "tier", "name": "high", "for": "1h", "by": "ada", "because": "the provider is down",
    });
    let paused = shop.make("pause", pause).await;
    assert_eq!(paused["before"], Value::Null);
    assert_eq!(
        (
            &paused["after"]["kind"],
            &paused["after"]["who"],
            &paused["after"]["why"]
        ),
        (
            &json!("pause"),
            &json!("ada"),
            &json!("the provider is down")
        )
    );
    assert!(paused["after"]["until"].is_string(), "{paused}");
    let note = paused["notes"][0].as_str().unwrap();
    assert!(note.contains("longer than its ttl of 1h"), "{note}");
    let group = json!({ "target": "group", "name": "all" });
    shop.make("pause", group).await;
    let resumed = shop
        .make("resume", json!({ "target": "tier", "name": "high" }))
        .await;
    assert_eq!(resumed["before"]["who"], "ada");
    assert_eq!(
        resumed["notes"],
        json!(["group all is still paused, by admin API"])
    );

    let limit =
        json!({ "target": "tier", "name": "low", "rate": "50/m", "burst": 5, "running": 2 });
    let limited = shop.make("limit", limit).await;
    assert_eq!(
        (
            &limited["after"]["rate"],
            &limited["after"]["burst"],
            &limited["after"]["running"]
        ),
        (&json!("50/m"), &json!(5), &json!(2))
    );
    let listed = shop.get("/control").await;
    let listed = listed["controls"].as_array().unwrap();
    let shown: Vec<_> = listed.iter().map(|it| (&it["kind"], &it["name"])).collect();
    assert_eq!(
        shown,
        [
            (&json!("pause"), &json!("all")),
            (&json!("limit"), &json!("low"))
        ]
    );
    let none = json!({ "target": "tier", "name": "low", "none": true, "for": "10 min" });
    let lifted = shop.make("limit", none).await;
    assert_eq!(lifted["before"], listed[1]);
    assert_eq!(lifted["after"].get("rate"), None);
    let unlimited = shop
        .make("unlimit", json!({ "target": "tier", "name": "low" }))
        .await;
    let note = "the limit of the map is in force again: 100/m with bursts of 20";
    assert_eq!(unlimited["notes"], json!([note]));
    let task = json!({ "target": "task", "name": "order.ship", "running": 1 });
    shop.make("limit", task).await;

    let log = shop.get("/control/audit?limit=2").await;
    let entries = log["entries"].as_array().unwrap();
    assert_eq!(entries.len(), 2);
    assert_eq!(entries[0]["action"], "limit task");
    let next = shop
        .get(&format!("/control/audit?before={}", entries[1]["id"]))
        .await;
    assert_eq!(next["entries"].as_array().unwrap().len(), 5, "{next}");
    shop.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_are_overridden_over_http_and_processes_and_scaling_are_shown() {
    let shop = Shop::open().await;
    shop.make("pause", json!({ "target": "group", "name": "all" }))
        .await;
    let both = json!({
        "target": "task", "names": ["order.ship", "order.notify"], "tier": "low", "priority": 3, "for": "7d",
        "by": "ada", "because": "the quarter",
    });
    let overridden = shop.make("override", both).await;
    assert_eq!(overridden["after"].as_array().unwrap().len(), 2);
    // The API has the app's broker, and asks it.
    assert_eq!(
        overridden["waiting"],
        json!([{ "tier": "high", "messages": 0 }])
    );
    let published = shop.app.publish(Ship {}).await.unwrap();
    assert_eq!(published.tier, "low");
    let (status, problem) = shop
        .post(
            "override",
            json!({ "target": "prefix", "names": ["mail."], "tier": "low" }),
        )
        .await;
    assert_eq!(status, StatusCode::CONFLICT, "{problem}");
    let detail = problem["detail"].as_str().unwrap();
    assert!(detail.contains("has a handler for mail.send"), "{detail}");
    let ended = json!({ "target": "task", "name": "order.ship" });
    let ended = shop.make("end-override", ended).await;
    assert_eq!(ended["before"], overridden["after"][1]);

    let processes = shop.get("/control/processes").await;
    let process = &processes["processes"][0];
    assert_eq!(process["is_alive"], true);
    assert_eq!(
        process["groups"],
        json!([{ "name": "all", "slots": 2, "tiers": ["high", "low"] }])
    );
    let scaling = shop.get("/control/scaling").await;
    let groups = scaling["groups"].as_array().unwrap();
    assert_eq!(
        (
            &groups[0]["group"],
            &groups[0]["slots"],
            &groups[0]["processes"]
        ),
        (&json!("all"), &json!(2), &json!(1))
    );
    assert_eq!(groups[0]["tiers"][0]["is_paused"], true);
    assert_eq!(groups[1]["processes"], 0);
    shop.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_disconnects_in_the_middle_of_an_override_leaves_no_row_behind() {
    let shop = Shop::open().await;
    shop.app.publish(Ship {}).delay("1h").await.unwrap();
    let body = json!({ "target": "task", "names": ["order.ship"], "tier": "low" });
    let control = shop.app.control().unwrap();
    // The server drops the request's future when its client is gone.
    tokio::select! {
        answer = shop.post("override", body) => panic!("{answer:?}"),
        () = until(async || !control.list().await.unwrap().is_empty()) => {}
    }
    let backlog = shop.app.backlog().unwrap();
    let low = TaskFilter::default().tier("low");
    until(async || backlog.list(&low, None, 1).await.unwrap().tasks.len() == 1).await;
    shop.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_a_pause_holds_back_is_escalated_over_http() {
    let shop = Shop::open().await;
    let pause = json!({ "target": "task", "name": "mail.send" });
    shop.make("pause", pause).await;
    let backlog = shop.app.backlog().unwrap();
    let parked = TaskFilter::default().state(TaskState::Parked);
    let parked = async || backlog.list(&parked, None, 1).await.unwrap().tasks;
    // The worker runs what comes before it knows of the pause.
    until(async || {
        let publish = shop.app.publish_named("mail.send", &json!({}));
        publish.await.unwrap();
        !parked().await.is_empty()
    })
    .await;
    let id = parked().await[0].id.clone();
    let operation = shop.api.operation("POST", "/tasks/{id}/escalate");
    let path = format!("/tasks/{id}/escalate");
    let body = json!({ "to": "idle" });
    let (status, answer) = shop.api.ask(&operation, &path, Some(&body)).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    assert_eq!(answer["before"]["state"], "parked");
    shop.end().await;
}
