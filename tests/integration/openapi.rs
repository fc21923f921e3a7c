//! The description of the admin API, held against the server that it describes.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use serde_json::{Value, json};
use tierline::admin::{Token, description, router};
use tierline::observe::Event;
use tierline::{Registry, Tierline, Topology};
use tierline_testbed::{Database, Vhost, database, vhost};
use tokio::sync::Semaphore;
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

/// A server with dead letters, and what it says of itself.
pub(crate) struct Described {
    admin: Router,
    description: Value,
    _servers: (Vhost, Database, Tierline),
}

impl Described {
    /// Of this app.
    pub(crate) fn of(app: Tierline, vhost: Vhost, database: Database) -> Self {
        Self {
            admin: router(&app, Token::new(TOKEN).unwrap()).unwrap(),
            description: description(),
            _servers: (vhost, database, app),
        }
    }

    /// With so many dead letters.
    async fn with(count: u32) -> Self {
        let (vhost, database) = tokio::join!(vhost(), database());
        let collected = Arc::new(Semaphore::new(0));
        let tell = collected.clone();
        let app = Tierline::builder(Topology::parse(MAP).unwrap())
            .amqp(vhost.amqp_url())
            .postgres(database.url())
            // A task that no handler is there for is a dead letter.
            .registry(Registry::new())
            .metrics()
            .observe(move |event| {
                if let Event::Collected { count, .. } = event {
                    tell.add_permits(usize::try_from(*count).unwrap());
                }
            })
            .connect()
            .await
            .unwrap();
        app.database().unwrap().migrate().await.unwrap();
        for order in 0..count {
            app.publish_named("order.ship", &json!({ "order": order }))
                .await
                .unwrap();
        }
        let all = async {
            collected.acquire_many(count).await.unwrap().forget();
        };
        app.work(["all"]).until(all).await.unwrap();
        Self::of(app, vhost, database)
    }

    pub(crate) async fn call(
        &self,
        operation: &Operation,
        path: &str,
        body: Option<&Value>,
    ) -> StatusCode {
        self.ask(operation, path, body).await.0
    }

    /// Sends a request, and holds the answer against what the description says of the operation.
    pub(crate) async fn ask(
        &self,
        operation: &Operation,
        path: &str,
        body: Option<&Value>,
    ) -> (StatusCode, Value) {
        let request = Request::builder()
            .method(operation.method.as_str())
            .uri(path)
            .header(header::AUTHORIZATION, format!("Bearer {TOKEN}"))
            .body(body.map_or(Body::empty(), |body| Body::from(body.to_string())))
            .unwrap();
        let response = self.admin.clone().oneshot(request).await.unwrap();
        let status = response.status();
        let kind = response.headers().get(header::CONTENT_TYPE).cloned();
        let bytes = axum::body::to_bytes(response.into_body(), 10 << 20).await;
        let bytes = bytes.unwrap();
        let text = || Value::String(String::from_utf8_lossy(&bytes).into_owned());
        let answer: Value = match bytes.is_empty() {
            true => Value::Null,
            false => serde_json::from_slice(&bytes).unwrap_or_else(|_| text()),
        };
        let said = format!("{} {path} {body:?}: {status} {answer}", operation.method);
        let described = &operation.content["responses"][status.as_str()];
        assert!(described.is_object(), "not described: {said}");
        if let Some(kind) = kind {
            let schema = &described["content"][kind.to_str().unwrap()]["schema"];
            assert!(schema.is_object(), "not described: {said}");
            if let Err(problem) = self.check(schema, &answer) {
                panic!("not as described: {problem}: {said}");
            }
        }
        (status, answer)
    }

    /// Whether a value is of a schema of the description.
    pub(crate) fn check(&self, schema: &Value, value: &Value) -> Result<(), String> {
        let mut schema = schema.clone();
        // Where its references lead.
        schema["components"] = self.description["components"].clone();
        let validator = jsonschema::validator_for(&schema).unwrap();
        validator.validate(value).map_err(|error| error.to_string())
    }

    fn operations(&self) -> Vec<Operation> {
        let paths = self.description["paths"].as_object().unwrap();
        let operations = paths.iter().flat_map(|(path, methods)| {
            let methods = methods.as_object().unwrap().iter();
            methods.map(|(method, content)| Operation {
                path: path.clone(),
                method: method.to_uppercase(),
                content: content.clone(),
            })
        });
        operations.collect()
    }

    pub(crate) fn operation(&self, method: &str, path: &str) -> Operation {
        let mut operations = self.operations().into_iter();
        operations
            .find(|operation| operation.method == method && operation.path == path)
            .unwrap()
    }
}

/// A method of a path.
pub(crate) struct Operation {
    path: String,
    method: String,
    content: Value,
}

impl Operation {
    /// The path with a number where it takes one, and a query.
    fn at(&self, id: i64, query: &[(&str, &str)]) -> String {
        let mut path = self.path.replace("{id}", &id.to_string());
        for (place, (name, value)) in query.iter().enumerate() {
            let separator = if place == 0 { '?' } else { '&' };
            path += &format!("{separator}{name}={}", encoded(value));
        }
        path
    }

    /// The parameters of the query, with their schemas.
    fn query(&self) -> Vec<(&str, &Value)> {
        let parameters = self.content["parameters"].as_array().unwrap().iter();
        let parameters = parameters.filter(|parameter| parameter["in"] == "query");
        parameters
            .map(|parameter| (parameter["name"].as_str().unwrap(), &parameter["schema"]))
            .collect()
    }

    /// The schema of its body, and the examples of it.
    pub(crate) fn body(&self) -> Option<(&Value, Vec<&Value>)> {
        let body = self.content["requestBody"]["content"].as_object()?;
        let body = &body["application/json"];
        let examples = body["examples"].as_object().unwrap().values();
        Some((
            &body["schema"],
            examples.map(|example| &example["value"]).collect(),
        ))
    }
}

fn encoded(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// What a parameter cannot do without.
fn companion(name: &str) -> Option<(&'static str, &'static str)> {
    (name == "text").then_some(("since", "24h"))
}

#[tokio::test]
async fn every_example_is_of_its_schema_and_is_accepted() {
    let described = Described::with(1).await;
    let mut sent = 0;
    for operation in described.operations() {
        for (name, schema) in operation.query() {
            let words = schema["enum"].as_array();
            let examples = words.or(schema["examples"].as_array());
            let examples = examples.unwrap_or_else(|| panic!("{name} has no example"));
            for example in examples {
                described.check(schema, example).unwrap();
                let value = text(example);
                let query: Vec<_> = [(name, value.as_str())]
                    .into_iter()
                    .chain(companion(name))
                    .collect();
                let path = operation.at(4711, &query);
                let status = described.call(&operation, &path, None).await;
                assert_ne!(status, StatusCode::BAD_REQUEST, "{path}");
                sent += 1;
            }
        }
        let Some((schema, examples)) = operation.body() else {
            continue;
        };
        for example in examples {
            described.check(schema, example).unwrap();
            let path = operation.at(4711, &[]);
            let status = described.call(&operation, &path, Some(example)).await;
            assert_ne!(status, StatusCode::BAD_REQUEST, "{path} {example}");
            sent += 1;
        }
    }
    assert!(sent > 40, "only {sent} examples");
}

#[tokio::test]
async fn the_description_accepts_what_the_server_accepts() {
    let described = Described::with(1).await;
    let long = "x".repeat(1_000);
    let list = described.operation("GET", "/dlq");
    for (name, value) in [
        ("since", "5 sec"),
        ("since", " 1h 30m "),
        ("since", "0s"),
        ("since", "2 weeks"),
        ("since", "2026-10-20T20:30:00Z"),
        ("since", "2026-12-31 23:59:59.999999999-11:30"),
        ("until", "1.5h"),
        ("tier", "normal"),
        ("task", long.as_str()),
        ("task", "ž 'quoted'"),
        ("text", "%_\u{1f600}"),
        ("limit", "1"),
        ("limit", "500"),
        ("after", "0-0"),
        ("after", "18446744073709-9223372036854775807"),
    ] {
        let query: Vec<_> = [(name, value)].into_iter().chain(companion(name)).collect();
        let path = list.at(0, &query);
        let status = described.call(&list, &path, None).await;
        assert_eq!(status, StatusCode::OK, "{path}");
        let given = match name {
            "limit" => json!(value.parse::<u16>().unwrap()),
            _ => json!(value),
        };
        let (_, schema) = list.query().into_iter().find(|it| it.0 == name).unwrap();
        assert_eq!(described.check(schema, &given), Ok(()), "{name}");
    }

    let discard = described.operation("DELETE", "/dlq/{id}");
    for value in ["", "\0", long.repeat(3).as_str()] {
        let path = discard.at(4711, &[("by", value)]);
        let status = described.call(&discard, &path, None).await;
        assert_eq!(status, StatusCode::NOT_FOUND);
        let (_, schema) = discard.query()[0];
        assert_eq!(described.check(schema, &json!(value)), Ok(()));
    }

    let bulk = described.operation("POST", "/dlq/redrive");
    for body in [
        json!({ "filter": { "tier": null, "since": "5 sec" }, "rate": null, "canary": null }),
        json!({ "filter": { "until": "2026-01-01T00:00:00+01:00", "state": "dead" }, "by": null }),
        json!({ "filter": { "since": "0s" }, "canary": { "count": 1, "success": null, "wait": null } }),
        json!({ "filter": { "since": "0s" }, "canary": { "count": 4_294_967_295_u32, "wait": "1.5 h" } }),
        json!({ "filter": { "since": "0s" }, "rate": 4_294_967_295_u32, "because": "" }),
    ] {
        let schema = bulk.body().unwrap().0;
        assert_eq!(described.check(schema, &body), Ok(()), "{body}");
        let status = described.call(&bulk, "/dlq/redrive", Some(&body)).await;
        let is_taken = [StatusCode::ACCEPTED, StatusCode::TOO_MANY_REQUESTS].contains(&status);
        assert!(is_taken, "{status} {body}");
    }
}

#[tokio::test]
async fn what_the_description_refuses_the_server_refuses() {
    let described = Described::with(0).await;
    let list = described.operation("GET", "/dlq");
    for (name, value) in [
        ("since", "5 0s"),
        ("since", "1 month"),
        ("since", "2026-01-31T10:00:00"),
        ("since", "2026-01-31T10:00:00Zulu"),
        ("tier", ""),
        ("task", "a\0b"),
        ("reason", "boredom"),
        ("after", "1-2-3"),
    ] {
        let path = list.at(0, &[(name, value)]);
        let status = described.call(&list, &path, None).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{path}");
        let (_, schema) = list.query().into_iter().find(|it| it.0 == name).unwrap();
        assert!(
            described.check(schema, &json!(value)).is_err(),
            "{name}={value:?}"
        );
    }
    let bulk = described.operation("POST", "/dlq/redrive");
    for body in [
        json!({}),
        json!({ "filter": null }),
        json!({ "filter": { "limit": 5 } }),
        json!({ "filter": { "state": "redriven" } }),
        json!({ "filter": { "since": "soon" } }),
        json!({ "filter": {}, "rate": 0 }),
        json!({ "filter": {}, "canary": { "success": 0.5 } }),
        json!({ "filter": {}, "canary": { "count": 1, "wait": "5" } }),
    ] {
        let status = described.call(&bulk, "/dlq/redrive", Some(&body)).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{body}");
        let schema = bulk.body().unwrap().0;
        assert!(described.check(schema, &body).is_err(), "{body}");
    }
}

#[tokio::test]
async fn answers_about_real_rows_are_as_described() {
    let described = Described::with(3).await;
    for path in [
        "/dlq/by-tier",
        "/dlq",
        "/dlq/groups",
        "/dlq/operations",
        "/openapi.json",
    ] {
        let operation = described.operation("GET", path);
        assert_eq!(described.call(&operation, path, None).await, StatusCode::OK);
    }
    let list = described.operation("GET", "/dlq");
    let (_, listed) = described.ask(&list, "/dlq", None).await;
    let id = |row: usize| listed["letters"][row]["id"].as_i64().unwrap();
    let show = described.operation("GET", "/dlq/{id}");
    let redrive = described.operation("POST", "/dlq/{id}/redrive");
    let discard = described.operation("DELETE", "/dlq/{id}");
    for (operation, id, expected) in [
        (&show, id(0), StatusCode::OK),
        (&redrive, id(0), StatusCode::OK),
        (&redrive, id(0), StatusCode::CONFLICT),
        (&show, id(0), StatusCode::OK),
        (&discard, id(1), StatusCode::NO_CONTENT),
        (&show, id(1), StatusCode::OK),
    ] {
        let path = operation.at(id, &[]);
        assert_eq!(
            described.call(operation, &path, None).await,
            expected,
            "{path}"
        );
    }
    let bulk = described.operation("POST", "/dlq/redrive");
    let body = json!({ "filter": {} });
    let (status, begun) = described.ask(&bulk, "/dlq/redrive", Some(&body)).await;
    assert_eq!(status, StatusCode::ACCEPTED);
    assert_eq!(begun["state"], "running");
    for (method, path) in [
        ("GET", "/dlq/operations"),
        ("GET", "/dlq/operations/{id}"),
        ("POST", "/dlq/operations/{id}/stop"),
        ("POST", "/dlq/operations/{id}/resume"),
    ] {
        let operation = described.operation(method, path);
        let path = operation.at(begun["id"].as_i64().unwrap(), &[]);
        described.call(&operation, &path, None).await;
    }
}
