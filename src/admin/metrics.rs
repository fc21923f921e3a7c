//! The metrics of the process, for Prometheus. It sends the token if its configuration has `authorization`.

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::AdminState;
use super::problem::Problem;
use crate::Error;
use crate::metrics::Metrics;

pub(super) async fn scrape(State(admin): State<AdminState>) -> Response {
    match &admin.metrics {
        Some(metrics) => {
            let content_type = [(header::CONTENT_TYPE, Metrics::CONTENT_TYPE)];
            (content_type, metrics.render().await).into_response()
        }
        None => {
            let error = Error::NoMetrics.to_string();
            Problem::new(StatusCode::NOT_FOUND, error).into_response()
        }
    }
}
