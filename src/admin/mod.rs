//! The admin HTTP API (feature `admin`): dead letters, tasks in Postgres, what operators change at run time and statistics as
//! JSON, behind a token.
//!
//! [`router`] returns an axum router to nest in any app; `tierline serve` serves it alone. `openapi.json`
//! describes the API, from the same list of routes as the router.

mod control;
mod dlq;
#[cfg(feature = "prometheus")]
mod metrics;
mod openapi;
mod problem;
mod request;
mod stats;
mod tasks;
mod token;

use std::sync::Arc;

use axum::extract::DefaultBodyLimit;
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware;
use axum::response::Response;
use axum::routing::{MethodRouter, delete, get, post};
use axum::{Json, Router};
use tokio::sync::Semaphore;

pub use openapi::description;
pub use token::Token;

use crate::control::Control;
use crate::dead::DeadLetters;
#[cfg(feature = "prometheus")]
use crate::metrics::Metrics;
use crate::{Error, Tierline};
use problem::Problem;

/// The largest request body, in bytes.
pub const MAX_BODY: usize = 64 << 10;
/// How many bulk redrives one server runs at once.
const MAX_BULK_REDRIVES: usize = 4;
/// The operator of a request that names none.
const NOBODY: &str = "admin API";

/// The state that all handlers share.
#[derive(Clone)]
struct AdminState {
    app: Tierline,
    letters: DeadLetters,
    control: Control,
    #[cfg(feature = "prometheus")]
    metrics: Option<Metrics>,
    bulks: Arc<Semaphore>,
}

/// The admin API of an app. Every request must carry `Authorization: Bearer` and the token.
///
/// ```no_run
/// # fn example(app: tierline::Tierline) -> Result<axum::Router, tierline::Error> {
/// use tierline::admin::{Token, router};
///
/// let token = Token::new(std::env::var("ADMIN_TOKEN").unwrap_or_default())?;
/// let admin = router(&app, token)?;
/// let my_app = axum::Router::new().nest("/admin", admin);
/// # Ok(my_app) }
/// ```
///
/// # Errors
/// [`DatabaseError::NotConfigured`](crate::error::DatabaseError::NotConfigured) where the app has no database.
pub fn router(app: &Tierline, token: Token) -> Result<Router, Error> {
    let admin = AdminState {
        app: app.clone(),
        letters: app.dead_letters()?,
        control: app.control()?,
        #[cfg(feature = "prometheus")]
        metrics: app.metrics_with_stats().ok(),
        bulks: Arc::new(Semaphore::new(MAX_BULK_REDRIVES)),
    };
    let mut router = Router::new();
    for route in routes() {
        router = router.route(route.path, route.answer);
    }
    let router = router
        .fallback(async || Problem::new(StatusCode::NOT_FOUND, "no endpoint has this path"))
        .method_not_allowed_fallback(async || {
            let detail = "the endpoint at this path does not support this method";
            Problem::new(StatusCode::METHOD_NOT_ALLOWED, detail)
        })
        .layer(DefaultBodyLimit::max(MAX_BODY))
        // The outermost layer: a request without the token is refused before anything else runs.
        .layer(middleware::from_fn_with_state(token, token::check))
        .layer(middleware::map_response(protect))
        .with_state(admin);
    Ok(router)
}

/// A path and its handler. A test checks that the description has the same paths.
struct Route {
    path: &'static str,
    answer: MethodRouter<AdminState>,
}

fn routes() -> Vec<Route> {
    let route = |path, answer| Route { path, answer };
    vec![
        route("/dlq/by-tier", get(dlq::by_tier)),
        route("/dlq", get(dlq::list)),
        route("/dlq/groups", get(dlq::groups)),
        route("/dlq/redrive", post(dlq::redrive_all)),
        route("/dlq/operations", get(dlq::operations)),
        route("/dlq/operations/{id}", get(dlq::operation)),
        route("/dlq/operations/{id}/stop", post(dlq::stop)),
        route("/dlq/operations/{id}/resume", post(dlq::resume)),
        route("/dlq/{id}", get(dlq::show).merge(delete(dlq::discard))),
        route("/dlq/{id}/redrive", post(dlq::redrive)),
        route("/tasks/{id}/escalate", post(tasks::escalate)),
        route("/control", get(control::list)),
        route("/control/pause", post(control::pause)),
        route("/control/resume", post(control::resume)),
        route("/control/limit", post(control::limit)),
        route("/control/unlimit", post(control::unlimit)),
        route("/control/override", post(control::override_tasks)),
        route("/control/end-override", post(control::end_override)),
        route("/control/processes", get(control::processes)),
        route("/control/audit", get(control::audit)),
        route("/control/scaling", get(control::scaling)),
        #[cfg(feature = "prometheus")]
        route("/metrics", get(metrics::scrape)),
        route("/stats", get(stats::stats)),
        route("/openapi.json", get(async || Json(description()))),
    ]
}

/// Responses are private: caches must not store them, and browsers must not guess their type.
async fn protect(mut response: Response) -> Response {
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    let nosniff = HeaderValue::from_static("nosniff");
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, nosniff);
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_route_is_described() {
        let described = description();
        let mut described: Vec<&String> = described["paths"].as_object().unwrap().keys().collect();
        let routes = routes();
        let mut routed: Vec<&str> = routes.iter().map(|route| route.path).collect();
        described.sort_unstable();
        routed.sort_unstable();
        assert_eq!(described, routed);
    }
}
