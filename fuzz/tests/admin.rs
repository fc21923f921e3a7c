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

const QUERY: &str = "tier=normal&task=note&reason=hung&since=1h&text=%27x&page=10&after=1.2";
const BODY: &str = r#"{"filter":{"tier":"normal","task":"note","since":"2d"},"rate":10,
    "canary":{"count":3,"success":0.5,"wait":"1m"},"why":"because"}"#;

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
        let admin = router(app.dead_letters().unwrap(), token);
        (admin, (vhost, database, app))
    });
    // Every request is answered by a clone.
    let ask = AssertUnwindSafe(|request| runtime.block_on(admin.clone().oneshot(request)));
    bolero::check!()
        .with_type::<(u8, Vec<Edit>)>()
        .for_each(|(kind, edits)| {
            let ask = &ask;
            let body = edited(BODY.as_bytes(), edits);
            let query = edited(QUERY.as_bytes(), edits);
            let query: String = query
                .iter()
                .map(|byte| match byte {
                    b'=' | b'&' | b'%' => char::from(*byte).to_string(),
                    byte if byte.is_ascii_alphanumeric() => char::from(*byte).to_string(),
                    byte => format!("%{byte:02x}"),
                })
                .collect();
            let (method, path) = match kind % 6 {
                0 => ("POST", "/admin/dlq/redrive".to_owned()),
                1 => ("GET", format!("/admin/dlq?{query}")),
                2 => ("GET", format!("/admin/dlq/groups?{query}")),
                3 => ("POST", format!("/admin/dlq/{query}/redrive")),
                4 => ("DELETE", format!("/admin/dlq/{query}")),
                _ => ("GET", format!("/admin/dlq/{query}")),
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
