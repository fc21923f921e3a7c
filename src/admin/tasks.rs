//! The endpoints of tasks in Postgres.

use axum::Json;
use axum::extract::{Path, State};
use serde::Deserialize;

use super::request::{ApiResult, Body, read_body};
use super::{AdminState, NOBODY};
use crate::TaskId;
use crate::backlog::Escalated;

/// Where a task is to go.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct EscalateBody {
    to: String,
    #[serde(default)]
    now: bool,
    by: Option<String>,
    because: Option<String>,
}

pub(super) async fn escalate(
    State(admin): State<AdminState>,
    Path(id): Path<String>,
    body: Body,
) -> ApiResult<Json<Escalated>> {
    let body: EscalateBody = read_body(body, false)?;
    let escalating = admin
        .letters
        .backlog()
        .escalate(&TaskId::from(id), &body.to)
        .by(body.by.as_deref().unwrap_or(NOBODY))
        .because(body.because.as_deref().unwrap_or_default());
    let escalating = match body.now {
        true => escalating.at_once(),
        false => escalating,
    };
    Ok(Json(escalating.await?))
}
