//! The endpoints of what operators change while the app runs.

use std::future::IntoFuture;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Deserialize;
use serde_json::json;

use super::problem::Problem;
use super::request::{ApiResult, Body, QueryResult, read_body, read_query};
use super::{AdminState, NOBODY};
use crate::Error;
use crate::control::{Changed, Control, Overridden};
use crate::dead::Page;
use crate::task::IntoDuration;

/// A tier, group or task to be paused.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct PauseBody {
    target: Pausable,
    name: String,
    #[serde(rename = "for")]
    length: Option<String>,
    by: Option<String>,
    because: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ResumeBody {
    target: Pausable,
    name: String,
    by: Option<String>,
    because: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LimitBody {
    target: Limitable,
    name: String,
    rate: Option<String>,
    burst: Option<u32>,
    running: Option<u32>,
    #[serde(default)]
    none: bool,
    #[serde(rename = "for")]
    length: Option<String>,
    by: Option<String>,
    because: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct UnlimitBody {
    target: Limitable,
    name: String,
    by: Option<String>,
    because: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct OverrideBody {
    target: Overridable,
    /// Tasks, or one prefix.
    names: Vec<String>,
    tier: Option<String>,
    priority: Option<u8>,
    #[serde(rename = "for")]
    length: Option<String>,
    by: Option<String>,
    because: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct EndOverrideBody {
    target: Overridable,
    name: String,
    by: Option<String>,
    because: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Pausable {
    Tier,
    Group,
    Task,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Limitable {
    Tier,
    Task,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Overridable {
    Task,
    Prefix,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct AuditQuery {
    limit: Option<u16>,
    before: Option<i64>,
}

pub(super) async fn list(State(admin): State<AdminState>) -> ApiResult {
    let controls = admin.control.list().await?;
    Ok(Json(json!({ "controls": controls })))
}

pub(super) async fn pause(State(admin): State<AdminState>, body: Body) -> ApiResult<Json<Changed>> {
    let body: PauseBody = read_body(body, false)?;
    let (control, name) = (admin.control_by(body.by), &body.name);
    let mut change = match body.target {
        Pausable::Tier => control.pause_tier(name),
        Pausable::Group => control.pause_group(name),
        Pausable::Task => control.pause_task(name),
    };
    if let Some(length) = length(body.length)? {
        change = change.lasting(length);
    }
    Ok(Json(change.because(&text(body.because)).await?))
}

pub(super) async fn resume(
    State(admin): State<AdminState>,
    body: Body,
) -> ApiResult<Json<Changed>> {
    let body: ResumeBody = read_body(body, false)?;
    let (control, name) = (admin.control_by(body.by), &body.name);
    let change = match body.target {
        Pausable::Tier => control.resume_tier(name),
        Pausable::Group => control.resume_group(name),
        Pausable::Task => control.resume_task(name),
    };
    Ok(Json(change.because(&text(body.because)).await?))
}

pub(super) async fn limit(State(admin): State<AdminState>, body: Body) -> ApiResult<Json<Changed>> {
    let body: LimitBody = read_body(body, false)?;
    let (control, name) = (admin.control_by(body.by), &body.name);
    let mut change = match body.target {
        Limitable::Tier => control.limit_tier(name),
        Limitable::Task => control.limit_task(name),
    };
    if let Some(rate) = &body.rate {
        change = change.rate(rate);
    }
    if let Some(burst) = body.burst {
        change = change.burst(burst);
    }
    if let Some(running) = body.running {
        change = change.running(running);
    }
    if body.none {
        change = change.none();
    }
    if let Some(length) = length(body.length)? {
        change = change.lasting(length);
    }
    Ok(Json(change.because(&text(body.because)).await?))
}

pub(super) async fn unlimit(
    State(admin): State<AdminState>,
    body: Body,
) -> ApiResult<Json<Changed>> {
    let body: UnlimitBody = read_body(body, false)?;
    let (control, name) = (admin.control_by(body.by), &body.name);
    let change = match body.target {
        Limitable::Tier => control.unlimit_tier(name),
        Limitable::Task => control.unlimit_task(name),
    };
    Ok(Json(change.because(&text(body.because)).await?))
}

pub(super) async fn override_tasks(
    State(admin): State<AdminState>,
    body: Body,
) -> ApiResult<Json<Overridden>> {
    let body: OverrideBody = read_body(body, false)?;
    let control = admin.control_by(body.by);
    let mut overriding = match (body.target, body.names.as_slice()) {
        (Overridable::Task, names) => control.override_tasks(names),
        (Overridable::Prefix, [prefix]) => control.override_prefix(prefix),
        (Overridable::Prefix, _) => {
            return Err(Problem::bad("`names` must have one prefix in it"));
        }
    };
    if let Some(tier) = &body.tier {
        overriding = overriding.tier(tier);
    }
    if let Some(priority) = body.priority {
        overriding = overriding.priority(priority);
    }
    if let Some(length) = length(body.length)? {
        overriding = overriding.lasting(length);
    }
    let overriding = overriding.because(&text(body.because));
    // Rows are moved to the end also when the client, or a proxy, does not wait so long.
    match tokio::spawn(overriding.into_future()).await {
        Ok(overridden) => Ok(Json(overridden?)),
        Err(error) => {
            tracing::error!(%error, "an override was interrupted");
            let detail = "the override was interrupted: look whether it is in force, and set it again to move the rest of the rows";
            Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail))
        }
    }
}

pub(super) async fn end_override(
    State(admin): State<AdminState>,
    body: Body,
) -> ApiResult<Json<Changed>> {
    let body: EndOverrideBody = read_body(body, false)?;
    let (control, name) = (admin.control_by(body.by), &body.name);
    let change = match body.target {
        Overridable::Task => control.end_override_task(name),
        Overridable::Prefix => control.end_override_prefix(name),
    };
    Ok(Json(change.because(&text(body.because)).await?))
}

pub(super) async fn processes(State(admin): State<AdminState>) -> ApiResult {
    let processes = admin.control.processes().await?;
    Ok(Json(json!({ "processes": processes })))
}

pub(super) async fn audit(
    State(admin): State<AdminState>,
    query: QueryResult<AuditQuery>,
) -> ApiResult {
    let query = read_query(query)?;
    let most = query.limit.unwrap_or(50);
    if most == 0 || most > Page::LARGEST {
        return Err(Problem::bad(format!(
            "`limit` must be 1 to {}",
            Page::LARGEST
        )));
    }
    let entries = admin.control.audit_log(query.before, most).await?;
    Ok(Json(json!({ "entries": entries })))
}

pub(super) async fn scaling(State(admin): State<AdminState>) -> ApiResult {
    let groups = admin.app.scaling().await?;
    Ok(Json(json!({ "groups": groups })))
}

impl AdminState {
    fn control_by(&self, who: Option<String>) -> Control {
        let who = who.as_deref().unwrap_or(NOBODY);
        self.control.clone().by(who)
    }
}

fn text(text: Option<String>) -> String {
    text.unwrap_or_default()
}

/// For how long a change is to last.
fn length(text: Option<String>) -> ApiResult<Option<Duration>> {
    let read = text.map(|text| text.as_str().into_duration());
    read.transpose()
        .map_err(|invalid| Error::from(invalid.of("for")).into())
}
