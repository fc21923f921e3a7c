//! An operator moves tasks to another tier.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use futures_util::{StreamExt, stream};
use serde_json::{Value, json};
use sqlx::Executor;
use tierline::admin::{Token, router};
use tierline::backlog::{Backlog, TaskState};
use tierline::error::{BacklogError, ErrorKind};
use tierline::task::PublishRequest;
use tierline::{Context, Error, Registry, TaskId};
use tower::ServiceExt;

use super::{Ship, Shop, gated, shipping, work_in};

const MAP: &str = r#"
    app = "shop"
    [tiers.critical]
    queue = "postgres"
    lease = "2s"
    max_priority = 5
    [tiers.hasty]
    queue = "postgres"
    ttl = "5m"
    [tiers.low]
    queue = "postgres"
    lease = "2s"
    keep = "1d"
    [groups.critical]
    tiers = ["critical", "hasty"]
    concurrency = 2
    [groups.low]
    tiers = ["low"]
    concurrency = 2
    [tasks]
    "order.ship" = "low"
"#;

/// The problem of a task that was not escalated.
async fn refused(backlog: &Backlog, id: &TaskId, tier: &str) -> String {
    match backlog.escalate(id, tier).await {
        Err(Error::Backlog(BacklogError::Refused { problem, .. })) => problem.into(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_waits_moves_as_it_is_and_the_audit_log_says_who_and_why() {
    let (registry, shipped) = shipping();
    let shop = Shop::open(MAP, registry).await;
    let publish = shop.app.publish(Ship { order: 7 }).header("who", "Ada");
    let id = publish.priority(9).id("order-7").await.unwrap().id;
    let backlog = shop.app.backlog().unwrap();
    let was = backlog.get(&id).await.unwrap();

    let escalating = backlog.escalate(&id, "critical");
    let escalated = escalating.by("ada").because("the customer waits").await;
    let escalated = escalated.unwrap();
    assert_eq!(escalated.before, was.summary);
    let mut expected = was.clone();
    expected.summary.tier = "critical".to_owned();
    expected.summary.first_tier = Some("low".to_owned());
    expected.summary.priority = 5;
    assert_eq!(escalated.after, expected.summary);
    assert_eq!(backlog.get(&id).await.unwrap(), expected);

    let entries = backlog.audit_log(None, 10).await.unwrap();
    let [entry] = &entries[..] else {
        panic!("{entries:?}");
    };
    assert_eq!(
        (entry.who.as_str(), entry.why.as_str()),
        ("ada", "the customer waits")
    );
    assert_eq!(entry.action, "escalate task");
    assert_eq!(
        entry.subject,
        json!({ "task": "order-7", "to": "critical" })
    );
    let tier = |of: &Option<Value>| of.as_ref().unwrap()["tier"].clone();
    assert_eq!(
        (tier(&entry.before), tier(&entry.after)),
        (json!("low"), json!("critical"))
    );

    // It runs in its new tier, which nobody else serves.
    let working = work_in(&shop.app, ["critical"]);
    shop.heard.until("done", 1).await;
    working.end().await;
    assert_eq!(shipped.orders(), [7]);
    assert_eq!(shop.heard.count("strayed"), 0);
    // Back where it was published to is as if it had never moved.
    let id = shop.app.publish(Ship { order: 8 }).await.unwrap().id;
    backlog.escalate(&id, "critical").await.unwrap();
    let back = backlog.escalate(&id, "low").await.unwrap();
    assert_eq!(back.before.first_tier.as_deref(), Some("low"));
    assert_eq!(back.after.first_tier, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_for_later_keeps_its_due_time_unless_it_is_wanted_at_once() {
    let (registry, shipped) = shipping();
    let shop = Shop::open(MAP, registry).await;
    let backlog = shop.app.backlog().unwrap();
    let mut ids = Vec::new();
    for order in [1, 2] {
        let publish = shop.app.publish(Ship { order }).delay("90d");
        ids.push(publish.await.unwrap().id);
    }
    let working = work_in(&shop.app, ["critical"]);
    let kept = backlog.escalate(&ids[0], "critical").await.unwrap();
    assert_eq!(kept.after.state, TaskState::Scheduled);
    assert_eq!(kept.after.due_at, kept.before.due_at);
    let at_once = backlog
        .escalate(&ids[1], "critical")
        .at_once()
        .await
        .unwrap();
    assert_eq!(at_once.before.state, TaskState::Scheduled);
    assert_eq!(at_once.after.state, TaskState::Ready);
    assert!(at_once.after.due_at < at_once.before.due_at);
    shop.heard.until("done", 1).await;
    working.end().await;
    assert_eq!(shipped.orders(), [2]);
    assert_eq!(shop.rows().await, [1, 0, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_runs_has_ended_or_cannot_be_told_apart_is_left_as_it_is() {
    let (registry, open) = gated();
    let shop = Shop::open(MAP, registry).await;
    let backlog = shop.app.backlog().unwrap();
    let running = shop.app.publish(Ship { order: 1 }).await.unwrap().id;
    let working = work_in(&shop.app, ["low"]);
    shop.heard.until("started", 1).await;
    let problem = refused(&backlog, &running, "critical").await;
    assert!(problem.contains("a worker has claimed it"), "{problem}");
    open.add_permits(1);
    shop.heard.until("done", 1).await;
    working.end().await;
    let problem = refused(&backlog, &running, "critical").await;
    assert!(problem.contains("it has ended"), "{problem}");

    let waiting = shop.app.publish(Ship { order: 2 }).await.unwrap().id;
    let problem = refused(&backlog, &waiting, "low").await;
    assert_eq!(problem, "it is in the tier low already");
    let pool = shop.pool().await;
    let age = "UPDATE tierline.ready SET due_at = now() - interval '10 minutes'";
    pool.execute(age).await.unwrap();
    let problem = refused(&backlog, &waiting, "hasty").await;
    assert!(
        problem.contains("the tier hasty dead-letters what has waited for 5m"),
        "{problem}"
    );
    for order in 3..5 {
        let publish = shop
            .app
            .publish(Ship { order })
            .id("order-7")
            .delay(match order {
                3 => Duration::ZERO,
                _ => Duration::from_secs(3_600),
            });
        publish.await.unwrap();
    }
    let problem = refused(&backlog, &"order-7".into(), "critical").await;
    assert!(problem.contains("several tasks have this id"), "{problem}");

    let unknown = backlog.escalate(&waiting, "critcal").await.unwrap_err();
    assert_eq!(
        unknown.to_string(),
        "there is no tier \"critcal\" in the map; did you mean \"critical\"?"
    );
    let missing = backlog.escalate(&"nothing".into(), "critical").await;
    assert_eq!(missing.unwrap_err().kind(), ErrorKind::NotFound);
    let tiers: Vec<String> = sqlx::query_scalar(
        "SELECT DISTINCT tier FROM tierline.ready JOIN tierline.backlogs ON backlogs.id = backlog",
    )
    .fetch_all(&pool)
    .await
    .unwrap();
    assert_eq!(tiers, ["low"]);
    assert_eq!(backlog.audit_log(None, 10).await.unwrap(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_is_escalated_while_workers_drain_runs_once_and_in_one_tier() {
    const TASKS: u32 = 600;
    let map = MAP.replace("concurrency = 2", "concurrency = 8\nprefetch = 2");
    let (mut registry, runs) = (Registry::new(), Arc::new(Mutex::new(Vec::new())));
    let noted = runs.clone();
    registry
        .register::<Ship, _>(move |ship: Ship, cx: Context| {
            let run = (ship.order, cx.tier().to_owned());
            noted.lock().unwrap().push(run);
            tokio::time::sleep(Duration::from_millis(5))
        })
        .unwrap();
    let shop = Shop::open(&map, registry).await;
    let requests = (0..TASKS).map(|order| PublishRequest::new(&Ship { order }).unwrap());
    let published = shop.app.publish_many(stream::iter(requests));
    let ids: Vec<TaskId> = published.map(|it| it.unwrap().id).collect().await;
    let working = work_in(&shop.app, ["critical", "low"]);
    shop.heard.until("started", 1).await;
    let backlog = shop.app.backlog().unwrap();
    // From the end of the backlog, so that the workers come towards it.
    let escalating = ids.iter().enumerate().rev().map(|(order, id)| {
        let escalating = backlog.escalate(id, "critical");
        async move { (order as u32, escalating.await) }
    });
    let escalated: BTreeMap<u32, _> = stream::iter(escalating).buffer_unordered(6).collect().await;
    shop.heard.until("done", TASKS as usize).await;
    working.end().await;
    let runs = runs.lock().unwrap().clone();
    let tiers: BTreeMap<u32, String> = runs.iter().cloned().collect();
    assert_eq!((runs.len(), tiers.len()), (TASKS as usize, TASKS as usize));
    let mut moved = 0;
    for (order, result) in &escalated {
        let expected = match result {
            Ok(_) => "critical",
            Err(Error::Backlog(BacklogError::Refused { .. })) => "low",
            Err(error) => panic!("{error}"),
        };
        moved += u32::from(result.is_ok());
        assert_eq!(tiers[order], expected, "{order}: {result:?}");
    }
    println!("{moved} of {TASKS} were escalated");
    assert!(moved > 0 && moved < TASKS, "{moved}");
    assert_eq!(shop.rows().await, [0, 0, 0]);
}

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

async fn post(admin: &Router, path: &str, body: &Value, token: &str) -> (StatusCode, Value) {
    let request = Request::builder()
        .method("POST")
        .uri(path)
        .header(header::AUTHORIZATION, format!("Bearer {token}"))
        .body(Body::from(body.to_string()))
        .unwrap();
    let response = admin.clone().oneshot(request).await.unwrap();
    let status = response.status();
    let body = axum::body::to_bytes(response.into_body(), 1 << 20).await;
    (status, serde_json::from_slice(&body.unwrap()).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_are_escalated_by_http() {
    let shop = Shop::open(MAP, Registry::new()).await;
    let admin = router(&shop.app, Token::new(TOKEN).unwrap()).unwrap();
    let publish = shop.app.publish(Ship { order: 1 }).id("a/b").delay("1h");
    publish.await.unwrap();
    let path = "/tasks/a%2Fb/escalate";
    let body = json!({ "to": "critical", "now": true, "by": "ada", "because": "asked" });
    let (status, _) = post(&admin, path, &body, "wrong").await;
    assert_eq!(status, StatusCode::UNAUTHORIZED);
    let (status, answer) = post(&admin, path, &body, TOKEN).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    assert_eq!(answer["before"]["tier"], "low");
    assert_eq!(
        (
            &answer["after"]["tier"],
            &answer["after"]["first_tier"],
            &answer["after"]["state"]
        ),
        (&json!("critical"), &json!("low"), &json!("ready"))
    );
    for (path, body, expected) in [
        (path, json!({ "to": "critical" }), StatusCode::CONFLICT),
        (path, json!({ "to": "critcal" }), StatusCode::BAD_REQUEST),
        (path, json!({ "tier": "low" }), StatusCode::BAD_REQUEST),
        (path, json!({}), StatusCode::BAD_REQUEST),
        (
            "/tasks/none/escalate",
            json!({ "to": "low" }),
            StatusCode::NOT_FOUND,
        ),
    ] {
        let (status, answer) = post(&admin, path, &body, TOKEN).await;
        assert_eq!(status, expected, "{path} {body}: {answer}");
    }
    let backlog = shop.app.backlog().unwrap();
    let entries = backlog.audit_log(None, 10).await.unwrap();
    let who: Vec<_> = entries
        .iter()
        .map(|it| (it.who.as_str(), it.why.as_str()))
        .collect();
    assert_eq!(who, [("ada", "asked")]);
}
