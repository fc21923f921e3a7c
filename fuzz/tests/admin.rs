//! Requests that no operator would make.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::panic::AssertUnwindSafe;

use axum::body::Body;
use axum::http::{Request, header};
use tierline::admin::{Token, router};
use tierline::{Tierline, Topology};
use tierline_fuzz::{Edit, MAP, edited};
use tierline_testbed::{database, vhost};
use tower::ServiceExt;

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

const QUERY: &str = "tier=normal&task=note&reason=hung&since=1h&text=%27x&limit=10&after=1-2";
const AUDIT_QUERY: &str = "limit=10&before=7";
const BODY: &str = r#"{"filter":{"tier":"normal","task":"note","since":"2d"},"rate":10,
    "canary":{"count":3,"success":0.5,"wait":"1m"},"because":"why"}"#;
const CHANGE: &str = r#"{"target":"tier","name":"normal","rate":"100/m","burst":5,"running":2,"for":"2d","by":"ada"}"#;
const OVERRIDE: &str =
    r#"{"target":"task","names":["note"],"tier":"normal","priority":3,"for":"2d"}"#;

/// The body of a kind of request.
fn body_of(kind: u8) -> &'static str {
    match kind {
        6..=8 => CHANGE,
        9 => OVERRIDE,
        _ => BODY,
    }
}

#[test]
fn any_request_is_answered_and_never_with_a_failure_of_ours() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .unwrap();
    let (admin, _kept) = runtime.block_on(async {
        let (vhost, database) = tokio::join!(vhost(), database());
        let app = Tierline::builder(Topology::parse(MAP).unwrap())
            .amqp(vhost.amqp_url())
            .postgres(database.url())
            .connect()
            .await
            .unwrap();
        app.database().unwrap().migrate().await.unwrap();
        let token = Token::new(TOKEN).unwrap();
        let admin = router(&app, token).unwrap();
        (admin, (vhost, database, app))
    });
    // Every request is answered by a clone.
    let ask = AssertUnwindSafe(|request| runtime.block_on(admin.clone().oneshot(request)));
    bolero::check!()
        .with_type::<(u8, Vec<Edit>)>()
        .for_each(|(kind, edits)| {
            let ask = &ask;
            let kind = kind % 11;
            let body = edited(body_of(kind).as_bytes(), edits);
            let query = if kind == 10 { AUDIT_QUERY } else { QUERY };
            let query = edited(query.as_bytes(), edits);
            let query: String = query
                .iter()
                .map(|byte| match byte {
                    b'=' | b'&' | b'%' => char::from(*byte).to_string(),
                    byte if byte.is_ascii_alphanumeric() => char::from(*byte).to_string(),
                    byte => format!("%{byte:02x}"),
                })
                .collect();
            let (method, path) = match kind {
                0 => ("POST", "/dlq/redrive".to_owned()),
                1 => ("GET", format!("/dlq?{query}")),
                2 => ("GET", format!("/dlq/groups?{query}")),
                3 => ("POST", format!("/dlq/{query}/redrive")),
                4 => ("DELETE", format!("/dlq/{query}")),
                6 => ("POST", "/control/pause".to_owned()),
                7 => ("POST", "/control/resume".to_owned()),
                8 => ("POST", "/control/limit".to_owned()),
                9 => ("POST", "/control/override".to_owned()),
                10 => ("GET", format!("/control/audit?{query}")),
                _ => ("GET", format!("/dlq/{query}")),
            };
            let request = Request::builder()
                .method(method)
                .uri(&path)
                .header(header::AUTHORIZATION, format!("Bearer {TOKEN}"))
                .header(header::CONTENT_TYPE, "application/json")
                .body(Body::from(body));
            // What is no URI is refused before it comes here.
            let Ok(request) = request else { return };
            let response = ask(request).unwrap();
            assert!(
                response.status().as_u16() < 500,
                "{method} {path}: {response:?}"
            );
        });
}
