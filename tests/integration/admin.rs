//! The admin API as a stranger, a clumsy program and an operator meet it.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use lapin::options::BasicPublishOptions;
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Connection, ConnectionProperties};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tierline::admin::{MAX_BODY, Token, router};
use tierline::dead::{DeadLetters, Filter, State};
use tierline::{Tierline, Topology};
use tierline_testbed::{Broker, Database, Vhost, database, vhost};
use tower::ServiceExt;

const MAP: &str = r#"
    app = "shop"
    [tiers.normal]
    queue = "quorum"
    [groups.all]
    tiers = ["normal"]
    concurrency = 1
    [tasks]
    "order.ship" = "normal"
"#;

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

struct Shop {
    admin: Router,
    letters: DeadLetters,
    vhost: Vhost,
    _database: Database,
    _app: Tierline,
}

impl Shop {
    /// With so many dead letters in its log.
    async fn with(count: usize) -> Self {
        Self::on(vhost().await, count).await
    }

    async fn on(vhost: Vhost, count: usize) -> Self {
        let database = database().await;
        let app = Tierline::builder(Topology::parse(MAP).unwrap())
            .amqp(vhost.amqp_url())
            .postgres(database.url())
            .connect()
            .await
            .unwrap();
        app.database().unwrap().migrate().await.unwrap();
        let properties = ConnectionProperties::default();
        let connection = Connection::connect(vhost.amqp_url(), properties).await;
        let channel = connection.unwrap().create_channel().await.unwrap();
        for number in 0..count {
            let mut headers = FieldTable::default();
            for (name, value) in [
                ("tierline-reason", "retries exhausted"),
                (
                    "tierline-error",
                    "<script>alert(1)</script> '; DROP TABLE x; --",
                ),
            ] {
                headers.insert(name.into(), AMQPValue::LongString(value.into()));
            }
            let properties = BasicProperties::default()
                .with_type("order.ship".into())
                .with_message_id(format!("ship-{number}").into())
                .with_headers(headers);
            let options = BasicPublishOptions::default();
            let exchange = "shop.normal.dlx".into();
            let sending = channel.basic_publish(exchange, "".into(), options, b"1", properties);
            sending.await.unwrap();
        }
        let collecting = tokio::spawn(app.collector().unwrap().into_future());
        let letters = app.dead_letters().unwrap();
        until(async || letters.count(&Filter::default()).await.unwrap() == count as u64).await;
        collecting.abort();
        let admin = router(&app, Token::new(TOKEN).unwrap()).unwrap();
        Self {
            admin: Router::new().nest("/admin", admin),
            letters,
            vhost,
            _database: database,
            _app: app,
        }
    }

    async fn ask(&self, request: Request<Body>) -> (StatusCode, String, Value) {
        let response = self.admin.clone().oneshot(request).await.unwrap();
        let status = response.status();
        let kind = response.headers().get(header::CONTENT_TYPE).cloned();
        let kind = kind.map_or(String::new(), |kind| kind.to_str().unwrap().to_owned());
        assert_eq!(response.headers()[header::CACHE_CONTROL], "no-store");
        let body = axum::body::to_bytes(response.into_body(), 10 << 20)
            .await
            .unwrap();
        let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
        (status, kind, body)
    }

    async fn call(&self, method: &str, path: &str, body: impl Into<Body>) -> (StatusCode, Value) {
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::AUTHORIZATION, format!("Bearer {TOKEN}"))
            .body(body.into())
            .unwrap();
        let (status, kind, body) = self.ask(request).await;
        let problem = status.is_client_error() || status.is_server_error();
        assert_eq!(
            problem,
            kind == "application/problem+json",
            "{status} {kind}"
        );
        (status, body)
    }

    async fn get(&self, path: &str) -> Value {
        let (status, body) = self.call("GET", path, "").await;
        assert_eq!(status, StatusCode::OK, "{path}: {body}");
        body
    }

    async fn dead(&self) -> u64 {
        let filter = Filter::default().state(State::Dead);
        self.letters.count(&filter).await.unwrap()
    }
}

async fn until(mut is_so: impl AsyncFnMut() -> bool) {
    let begin = Instant::now();
    while !is_so().await {
        assert!(begin.elapsed() < Duration::from_secs(60));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn an_operator_reads_redrives_and_discards() {
    let shop = Shop::with(6).await;
    assert_eq!(shop.get("/admin/dlq/by-tier").await["tiers"][0]["dead"], 6);
    let listed = shop.get("/admin/dlq?limit=4&tier=normal").await;
    assert_eq!(listed["letters"].as_array().unwrap().len(), 4);
    let next = listed["next"].as_str().unwrap();
    let rest = shop.get(&format!("/admin/dlq?after={next}")).await;
    assert_eq!(rest["letters"].as_array().unwrap().len(), 2);
    let groups = shop.get("/admin/dlq/groups").await;
    assert_eq!(groups["groups"][0]["count"], 6);

    let id = listed["letters"][0]["id"].as_i64().unwrap();
    let path = format!("/admin/dlq/{id}");
    let shown = shop.get(&path).await;
    assert_eq!(shown["payload_json"], 1);
    assert!(shown["error"].as_str().unwrap().starts_with("<script>"));
    let body = json!({ "by": "ada", "because": "it is back" }).to_string();
    let redrive = format!("{path}/redrive");
    let (status, body) = shop.call("POST", &redrive, body).await;
    assert_eq!(
        (status, &body["tier"]),
        (StatusCode::OK, &json!("normal")),
        "{body}"
    );
    assert_eq!(shop.get(&path).await["actions"][0]["who"], "ada");
    let (status, _) = shop.call("POST", &redrive, "").await;
    assert_eq!(status, StatusCode::CONFLICT);

    let other = listed["letters"][1]["id"].as_i64().unwrap();
    let path = format!("/admin/dlq/{other}");
    let (status, _) = shop.call("DELETE", &format!("{path}?by=ada"), "").await;
    assert_eq!(status, StatusCode::NO_CONTENT);
    assert_eq!(shop.get(&path).await["state"], "discarded");

    let body = json!({ "filter": { "tier": "normal" }, "rate": 1000, "by": "ada" });
    let (status, begun) = shop
        .call("POST", "/admin/dlq/redrive", body.to_string())
        .await;
    assert_eq!(
        (status, &begun["total"]),
        (StatusCode::ACCEPTED, &json!(4)),
        "{begun}"
    );
    assert_eq!(
        (&begun["state"], &begun["note"]),
        (&json!("running"), &json!(""))
    );
    let path = format!("/admin/dlq/operations/{}", begun["id"]);
    until(async || shop.get(&path).await["state"] == "done").await;
    assert_eq!(shop.get(&path).await["done"], 4);
    assert_eq!(shop.vhost.depth("shop.normal").await.unwrap(), 5);
    let (status, _) = shop.call("POST", &format!("{path}/resume"), "").await;
    assert_eq!(status, StatusCode::CONFLICT);
}

#[tokio::test]
async fn a_bulk_redrive_is_said_to_run_when_it_begins_and_when_it_is_resumed() {
    let shop = Shop::with(40).await;
    let body = json!({ "filter": {}, "rate": 20 }).to_string();
    let (status, begun) = shop.call("POST", "/admin/dlq/redrive", body).await;
    assert_eq!(status, StatusCode::ACCEPTED, "{begun}");
    assert_eq!(begun["state"], "running", "{begun}");
    let path = format!("/admin/dlq/operations/{}", begun["id"]);
    let resume = format!("{path}/resume");
    let (status, _) = shop.call("POST", &resume, "").await;
    assert_eq!(status, StatusCode::CONFLICT, "it runs");
    let (status, _) = shop.call("POST", &format!("{path}/stop"), "").await;
    assert_eq!(status, StatusCode::OK);
    until(async || shop.get(&path).await["state"] == "stopped").await;
    let (status, resumed) = shop.call("POST", &resume, "").await;
    assert_eq!(status, StatusCode::ACCEPTED, "{resumed}");
    assert_eq!(resumed["state"], "running", "{resumed}");
    until(async || shop.get(&path).await["state"] == "done").await;
    assert_eq!(shop.vhost.depth("shop.normal").await.unwrap(), 40);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_disconnects_in_the_middle_of_a_redrive_leaves_nothing_claimed() {
    let broker = Broker::start().await.unwrap();
    let shop = Shop::on(broker.vhost().await.unwrap(), 1).await;
    let id = shop.get("/admin/dlq").await["letters"][0]["id"].clone();
    let path = format!("/admin/dlq/{id}");
    let state = async || shop.get(&path).await["state"].clone();
    broker.pause().await.unwrap();
    // The server drops the request's future when its client is gone.
    let redrive = format!("{path}/redrive");
    tokio::select! {
        answer = shop.call("POST", &redrive, "") => panic!("{answer:?}"),
        () = until(async || state().await == "redriving") => {}
    }
    broker.resume().await.unwrap();
    until(async || state().await != "redriving").await;
    assert_eq!(state().await, "redriven");
    assert_eq!(shop.vhost.depth("shop.normal").await.unwrap(), 1);
}

#[tokio::test]
async fn nobody_without_the_token_learns_or_changes_anything() {
    let shop = Shop::with(1).await;
    let id = shop.get("/admin/dlq").await["letters"][0]["id"].clone();
    for given in [
        None,
        Some(""),
        Some("Bearer "),
        Some("Bearer 0123456789abcdef"),
        Some("Bearer 0123456789abcdef0123456789abcdef0"),
        Some("Basic 0123456789abcdef0123456789abcdef"),
        Some(TOKEN),
    ] {
        for (method, path) in [
            ("GET", "/admin/dlq".to_owned()),
            ("GET", "/admin/openapi.json".to_owned()),
            ("GET", "/admin/nothing".to_owned()),
            ("POST", format!("/admin/dlq/{id}/redrive")),
            ("DELETE", format!("/admin/dlq/{id}")),
            ("GET", "/admin/control".to_owned()),
            ("GET", "/admin/control/scaling".to_owned()),
            ("POST", "/admin/control/pause".to_owned()),
        ] {
            let mut request = Request::builder().method(method).uri(&path);
            if let Some(given) = given {
                request = request.header(header::AUTHORIZATION, given);
            }
            let (status, kind, body) = shop.ask(request.body(Body::empty()).unwrap()).await;
            assert_eq!(status, StatusCode::UNAUTHORIZED, "{given:?} {path}");
            assert_eq!(kind, "application/problem+json");
            assert!(!body.to_string().contains(TOKEN));
        }
    }
    assert_eq!(shop.dead().await, 1);
}

#[tokio::test]
async fn nonsense_is_answered_clearly_and_changes_nothing() {
    let shop = Shop::with(1).await;
    let large = "x".repeat(10 << 20);
    let deep = "[".repeat(MAX_BODY - 1);
    let bad = StatusCode::BAD_REQUEST;
    for (method, path, body, expected) in [
        ("GET", "/admin/dlq/abc", "", bad),
        ("GET", "/admin/dlq/-1", "", bad),
        ("GET", "/admin/dlq/1.5", "", bad),
        ("GET", "/admin/dlq/99999999999999999999", "", bad),
        ("GET", "/admin/dlq/%00", "", bad),
        ("GET", "/admin/dlq/1'%20OR%201=1", "", bad),
        (
            "GET",
            "/admin/dlq/9223372036854775807",
            "",
            StatusCode::NOT_FOUND,
        ),
        ("GET", "/admin/dlq?limit=0", "", bad),
        ("GET", "/admin/dlq?limit=501", "", bad),
        ("GET", "/admin/dlq?limit=-1", "", bad),
        ("GET", "/admin/dlq?limit=x", "", bad),
        ("GET", "/admin/dlq?colour=red", "", bad),
        ("GET", "/admin/dlq?reason=boredom", "", bad),
        ("GET", "/admin/dlq?state=%27", "", bad),
        ("GET", "/admin/dlq?since=yesterday", "", bad),
        ("GET", "/admin/dlq?text=x", "", bad),
        ("GET", "/admin/dlq?text=%00&since=1h", "", bad),
        ("GET", "/admin/dlq?tier=", "", bad),
        ("GET", "/admin/dlq?tier=a&tier=b", "", bad),
        ("GET", "/admin/dlq?after=1-2-3;", "", bad),
        (
            "GET",
            "/admin/dlq?since=2026-01-02T00:00:00Z&until=2026-01-01T00:00:00Z",
            "",
            bad,
        ),
        ("GET", "/admin/dlq/groups?after=1-2", "", bad),
        ("GET", "/admin/dlq/operations?limit=0", "", bad),
        ("GET", "/admin/dlq/operations/77", "", StatusCode::NOT_FOUND),
        (
            "POST",
            "/admin/dlq/operations/77/stop",
            "",
            StatusCode::NOT_FOUND,
        ),
        (
            "POST",
            "/admin/dlq/operations/77/resume",
            "",
            StatusCode::NOT_FOUND,
        ),
        ("POST", "/admin/dlq/77/redrive", "", StatusCode::NOT_FOUND),
        ("POST", "/admin/dlq/77/redrive", "{", bad),
        ("POST", "/admin/dlq/77/redrive", "[]", bad),
        ("POST", "/admin/dlq/77/redrive", r#"{"who":"ada"}"#, bad),
        (
            "POST",
            "/admin/dlq/77/redrive",
            large.as_str(),
            StatusCode::PAYLOAD_TOO_LARGE,
        ),
        ("POST", "/admin/dlq/redrive", "", bad),
        ("POST", "/admin/dlq/redrive", "{}", bad),
        ("POST", "/admin/dlq/redrive", deep.as_str(), bad),
        (
            "POST",
            "/admin/dlq/redrive",
            r#"{"filter":[null,null]}"#,
            bad,
        ),
        ("POST", "/admin/dlq/redrive", r#"{"filter":null}"#, bad),
        (
            "POST",
            "/admin/dlq/redrive",
            r#"{"filter":{},"canary":[1]}"#,
            bad,
        ),
        (
            "POST",
            "/admin/dlq/redrive",
            r#"{"filter":{"tear":"normal"}}"#,
            bad,
        ),
        (
            "POST",
            "/admin/dlq/redrive",
            r#"{"filter":{"state":"redriven"}}"#,
            bad,
        ),
        (
            "POST",
            "/admin/dlq/redrive",
            r#"{"filter":{"text":"x"}}"#,
            bad,
        ),
        (
            "POST",
            "/admin/dlq/redrive",
            r#"{"filter":{"task":"\u0000"}}"#,
            bad,
        ),
        (
            "POST",
            "/admin/dlq/redrive",
            r#"{"filter":{},"rate":0}"#,
            bad,
        ),
        (
            "POST",
            "/admin/dlq/redrive",
            r#"{"filter":{},"rate":-1}"#,
            bad,
        ),
        (
            "POST",
            "/admin/dlq/redrive",
            r#"{"filter":{},"canary":{"count":0}}"#,
            bad,
        ),
        (
            "POST",
            "/admin/dlq/redrive",
            r#"{"filter":{},"canary":{"count":1,"success":7}}"#,
            bad,
        ),
        (
            "POST",
            "/admin/dlq/redrive",
            r#"{"filter":{},"canary":{"count":1,"wait":"long"}}"#,
            bad,
        ),
        ("DELETE", "/admin/dlq/77", "", StatusCode::NOT_FOUND),
        ("DELETE", "/admin/dlq/77?who=ada", "", bad),
        ("PUT", "/admin/dlq/77", "", StatusCode::METHOD_NOT_ALLOWED),
        ("GET", "/admin/secrets", "", StatusCode::NOT_FOUND),
    ] {
        let (status, problem) = shop.call(method, path, body.to_owned()).await;
        assert_eq!(status, expected, "{method} {path}: {problem}");
        assert!(!problem["detail"].as_str().unwrap().is_empty(), "{path}");
        let shown = problem.to_string();
        assert!(!shown.contains("tierline.dead_letters") && !shown.contains("postgres://"));
    }
    assert_eq!(shop.dead().await, 1);
    assert!(shop.letters.operations(1).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_database_that_is_away_is_said_without_where_it_is() {
    let topology = Topology::parse(MAP).unwrap();
    let away = "postgres://ada:secret@127.0.0.1:1/hotel";
    let app = Tierline::builder(topology)
        .amqp("amqp://127.0.0.1:1")
        .postgres(away)
        .connect_lazy()
        .unwrap();
    let admin = router(&app, Token::new(TOKEN).unwrap()).unwrap();
    let request = Request::builder()
        .uri("/dlq")
        .header(header::AUTHORIZATION, format!("Bearer {TOKEN}"))
        .body(Body::empty())
        .unwrap();
    let response = admin.oneshot(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    let body = axum::body::to_bytes(response.into_body(), 10_000)
        .await
        .unwrap();
    let body = String::from_utf8(body.to_vec()).unwrap();
    for secret in ["secret", "127.0.0.1", "ada", "hotel"] {
        assert!(!body.contains(secret), "{body}");
    }
}
