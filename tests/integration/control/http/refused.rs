//! Changes that cannot be made.

use axum::http::StatusCode;
use serde_json::json;

use super::Shop;

#[tokio::test(flavor = "multi_thread")]
async fn changes_that_cannot_be_made_are_explained_and_change_nothing() {
    let shop = Shop::open().await;
    let not_found = StatusCode::NOT_FOUND;
    let conflict = StatusCode::CONFLICT;
    for (change, body, expected, said) in [
        (
            "pause",
            json!({ "target": "tier", "name": "hihg" }),
            not_found,
            "did you mean \"high\"?",
        ),
        (
            "pause",
            json!({ "target": "group", "name": "al" }),
            not_found,
            "did you mean \"all\"?",
        ),
        (
            "limit",
            json!({ "target": "task", "name": "order.shp", "running": 1 }),
            not_found,
            "did you mean \"order.ship\"?",
        ),
        (
            "override",
            json!({ "target": "task", "names": ["order.ship"], "tier": "lwo" }),
            not_found,
            "did you mean \"low\"?",
        ),
        (
            "override",
            json!({ "target": "prefix", "names": ["ordre."], "tier": "low" }),
            not_found,
            "did you mean \"order.\"?",
        ),
        (
            "override",
            json!({ "target": "task", "names": ["order.ship"], "tier": "idle" }),
            conflict,
            "no live process serves tier idle",
        ),
        (
            "override",
            json!({ "target": "task", "names": ["mail.send"], "priority": 6 }),
            conflict,
            "which takes 0 to 5",
        ),
    ] {
        let (status, problem) = shop.post(change, body.clone()).await;
        assert_eq!(status, expected, "{change} {body}: {problem}");
        let detail = problem["detail"].as_str().unwrap();
        assert!(detail.contains(said), "{detail}");
    }
    assert_eq!(shop.get("/control").await, json!({ "controls": [] }));
    assert_eq!(shop.get("/control/audit").await, json!({ "entries": [] }));
    shop.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_description_refuses_of_a_change_the_server_refuses() {
    let shop = Shop::open().await;
    let many: Vec<String> = (0..501).map(|number| format!("order.{number}")).collect();
    for (change, body) in [
        ("pause", json!({})),
        ("pause", json!(null)),
        ("pause", json!([{ "target": "tier", "name": "high" }])),
        ("pause", json!({ "target": "tier" })),
        ("pause", json!({ "target": "prefix", "name": "order." })),
        ("pause", json!({ "target": "Tier", "name": "high" })),
        ("pause", json!({ "target": "tier", "name": ["high"] })),
        (
            "pause",
            json!({ "target": "tier", "name": "high", "for": "5" }),
        ),
        (
            "pause",
            json!({ "target": "tier", "name": "high", "for": 5 }),
        ),
        (
            "pause",
            json!({ "target": "tier", "name": "high", "until": "1h" }),
        ),
        ("pause", json!({ "target": "tier", "name": "a\0b" })),
        (
            "resume",
            json!({ "target": "tier", "name": "high", "for": "1h" }),
        ),
        ("resume", json!({ "target": "tier", "name": "a\0b" })),
        (
            "limit",
            json!({ "target": "group", "name": "all", "running": 1 }),
        ),
        (
            "limit",
            json!({ "target": "tier", "name": "low", "rate": "fast" }),
        ),
        (
            "limit",
            json!({ "target": "tier", "name": "low", "rate": 5 }),
        ),
        (
            "limit",
            json!({ "target": "tier", "name": "low", "running": 0 }),
        ),
        (
            "limit",
            json!({ "target": "tier", "name": "low", "running": -1 }),
        ),
        (
            "limit",
            json!({ "target": "tier", "name": "low", "running": 2_000_000 }),
        ),
        (
            "limit",
            json!({ "target": "tier", "name": "low", "rate": "1/s", "burst": 1.5 }),
        ),
        (
            "limit",
            json!({ "target": "tier", "name": "low", "none": null }),
        ),
        (
            "limit",
            json!({ "target": "tier", "name": "low", "per": "customer", "running": 1 }),
        ),
        ("unlimit", json!({ "target": "prefix", "name": "order." })),
        (
            "override",
            json!({ "target": "tier", "names": ["high"], "tier": "low" }),
        ),
        (
            "override",
            json!({ "target": "task", "names": "order.ship", "tier": "low" }),
        ),
        (
            "override",
            json!({ "target": "task", "names": [], "tier": "low" }),
        ),
        (
            "override",
            json!({ "target": "task", "names": many, "tier": "low" }),
        ),
        (
            "override",
            json!({ "target": "task", "names": ["order.ship"], "priority": 256 }),
        ),
        (
            "override",
            json!({ "target": "task", "names": ["order.ship"], "priority": -1 }),
        ),
        (
            "override",
            json!({ "target": "task", "name": "order.ship", "tier": "low" }),
        ),
        (
            "end-override",
            json!({ "target": "task", "names": ["order.ship"] }),
        ),
        (
            "end-override",
            json!({ "target": "prefix", "name": "a\0b" }),
        ),
    ] {
        let (status, problem) = shop.post(change, body.clone()).await;
        assert_eq!(
            status,
            StatusCode::BAD_REQUEST,
            "{change} {body}: {problem}"
        );
        let operation = shop.api.operation("POST", &format!("/control/{change}"));
        let schema = operation.body().unwrap().0;
        assert!(shop.api.check(schema, &body).is_err(), "{change} {body}");
    }
    // What a schema does not say.
    for (change, body) in [
        ("limit", json!({ "target": "tier", "name": "low" })),
        (
            "limit",
            json!({ "target": "tier", "name": "low", "burst": 5 }),
        ),
        (
            "limit",
            json!({ "target": "tier", "name": "low", "none": true, "running": 1 }),
        ),
        (
            "limit",
            json!({ "target": "tier", "name": "low", "rate": "0/s" }),
        ),
        (
            "pause",
            json!({ "target": "tier", "name": "high", "for": "0s" }),
        ),
        (
            "pause",
            json!({ "target": "tier", "name": "high", "for": "1000w" }),
        ),
        (
            "override",
            json!({ "target": "task", "names": ["order.ship"] }),
        ),
        (
            "override",
            json!({ "target": "prefix", "names": ["order.", "mail."], "tier": "low" }),
        ),
    ] {
        let (status, problem) = shop.post(change, body.clone()).await;
        assert_eq!(
            status,
            StatusCode::BAD_REQUEST,
            "{change} {body}: {problem}"
        );
    }
    for path in [
        "/control/audit?limit=0",
        "/control/audit?limit=501",
        "/control/audit?before=x",
        "/control/audit?before=9223372036854775808",
        "/control/audit?after=1",
    ] {
        let operation = shop.api.operation("GET", "/control/audit");
        let status = shop.api.call(&operation, path, None).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{path}");
    }
    assert_eq!(shop.get("/control").await, json!({ "controls": [] }));
    shop.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_with_texts_from_anywhere_is_kept_as_it_can_be() {
    let shop = Shop::open().await;
    let long = "ž".repeat(1_000);
    let pause = json!({ "target": "tier", "name": "high", "by": "a\0b", "because": long });
    let paused = shop.make("pause", pause).await;
    assert_eq!(paused["after"]["who"], "a\u{fffd}b");
    assert_eq!(paused["after"]["why"], "ž".repeat(100));
    let resume = json!({ "target": "tier", "name": "'; DROP TABLE x; --" });
    let (status, problem) = shop.post("resume", resume).await;
    assert_eq!(status, StatusCode::NOT_FOUND, "{problem}");
    let listed = shop.get("/control").await;
    assert_eq!(listed["controls"][0], paused["after"]);
    shop.end().await;
}
