//! The dead-letter endpoints.

use std::time::{Duration, SystemTime};

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::problem::Problem;
use super::request::{ApiResult, Body, QueryResult, fields, read_body, read_query};
use super::{AdminState, MAX_BULK_REDRIVES, NOBODY};
use crate::dead::{Canary, DeadLetters, Filter, Operation, Page, Reason, State as StateFilter};

/// The time window of groups if `since` is missing.
const GROUPS_WINDOW: Duration = Duration::from_secs(24 * 3600);

/// The filter in the query of a URL or in the body of a bulk redrive.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct ListQuery {
    tier: Option<String>,
    task: Option<String>,
    reason: Option<Reason>,
    fingerprint: Option<String>,
    state: Option<StateFilter>,
    since: Option<String>,
    until: Option<String>,
    text: Option<String>,
    limit: Option<u16>,
    after: Option<String>,
}

/// The operator and the reason.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct By {
    by: Option<String>,
    because: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct LimitQuery {
    limit: Option<u16>,
}

/// A bulk redrive.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Bulk {
    /// Required: `{}` selects every dead row. It is a map of fields, because serde would read a list as the
    /// fields in their order, and an empty one as everything.
    filter: Map<String, Value>,
    rate: Option<u32>,
    canary: Option<Map<String, Value>>,
    by: Option<String>,
    because: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CanaryBody {
    count: u32,
    success: Option<f64>,
    wait: Option<String>,
}

pub(super) async fn by_tier(State(admin): State<AdminState>) -> ApiResult {
    let tiers = admin.letters.by_tier().await?;
    Ok(Json(json!({ "tiers": tiers })))
}

pub(super) async fn list(
    State(admin): State<AdminState>,
    query: QueryResult<ListQuery>,
) -> ApiResult {
    let mut query = read_query(query)?;
    let size = query.limit.take().unwrap_or(50);
    let page = match query.after.take() {
        Some(cursor) => Page::after(size, cursor.parse()?),
        None => Page::first(size),
    };
    let filter = admin.checked(query.filter()?).await?;
    let listed = admin.letters.list(&filter, page).await?;
    Ok(Json(json!(listed)))
}

pub(super) async fn groups(
    State(admin): State<AdminState>,
    query: QueryResult<ListQuery>,
) -> ApiResult {
    let mut query = read_query(query)?;
    let most = query.limit.take().unwrap_or(20);
    if query.after.is_some() {
        return Err(Problem::bad("groups have no pages: leave `after` out"));
    }
    let mut filter = admin.checked(query.filter()?).await?;
    // Postgres counts every row of the window, so there is always one.
    let until = filter.until.unwrap_or_else(SystemTime::now);
    let window = until.checked_sub(GROUPS_WINDOW);
    filter.since = filter.since.or(window).or(Some(SystemTime::UNIX_EPOCH));
    let groups = admin.letters.groups(&filter, most).await?;
    Ok(Json(json!({ "groups": groups })))
}

pub(super) async fn show(State(admin): State<AdminState>, Path(id): Path<String>) -> ApiResult {
    let letter = admin.letters.get(number(&id)?).await?;
    let assessment = admin.letters.assess(&letter.summary).await;
    let mut shown = json!(letter);
    shown["assessment"] = json!(assessment);
    Ok(Json(shown))
}

pub(super) async fn redrive(
    State(admin): State<AdminState>,
    Path(id): Path<String>,
    body: Body,
) -> ApiResult {
    let id = number(&id)?;
    let by: By = read_body(body, true)?;
    let receipt = by.of(&admin.letters).redrive(id).await?;
    Ok(Json(json!({
        "id": id,
        "message_id": receipt.id.as_str(),
        "tier": receipt.tier,
    })))
}

pub(super) async fn discard(
    State(admin): State<AdminState>,
    Path(id): Path<String>,
    query: QueryResult<By>,
) -> ApiResult<StatusCode> {
    let id = number(&id)?;
    let by = read_query(query)?;
    by.of(&admin.letters).discard(id).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn redrive_all(
    State(admin): State<AdminState>,
    body: Body,
) -> ApiResult<(StatusCode, Json<Operation>)> {
    let bulk: Bulk = read_body(body, false)?;
    let by = By {
        by: bulk.by,
        because: bulk.because,
    };
    let letters = by.of(&admin.letters);
    let filter: ListQuery = fields(bulk.filter)?;
    if filter.limit.is_some() || filter.after.is_some() {
        let problem =
            "`limit` and `after` are for lists: a redrive takes every row that the filter selects";
        return Err(Problem::bad(problem));
    }
    let filter = admin.checked(filter.filter()?).await?;
    let mut redriving = letters.redrive_all(filter);
    if let Some(rate) = bulk.rate {
        if rate == 0 {
            return Err(Problem::bad("`rate` must be at least 1"));
        }
        redriving = redriving.rate(rate);
    }
    if let Some(body) = bulk.canary {
        redriving = redriving.canary(fields::<CanaryBody>(body)?.canary()?);
    }
    // The permit is held until the redrive ends; its progress is in its operation.
    let operation = redriving.run_in_background(admin.permit()?).await?;
    Ok((StatusCode::ACCEPTED, Json(operation)))
}

pub(super) async fn operations(
    State(admin): State<AdminState>,
    query: QueryResult<LimitQuery>,
) -> ApiResult {
    let most = read_query(query)?.limit.unwrap_or(50);
    if most == 0 || most > Page::LARGEST {
        return Err(Problem::bad(format!(
            "`limit` must be 1 to {}",
            Page::LARGEST
        )));
    }
    let operations = admin.letters.operations(most).await?;
    Ok(Json(json!({ "operations": operations })))
}

pub(super) async fn operation(
    State(admin): State<AdminState>,
    Path(id): Path<String>,
) -> ApiResult<Json<Operation>> {
    Ok(Json(admin.letters.operation(number(&id)?).await?))
}

pub(super) async fn stop(
    State(admin): State<AdminState>,
    Path(id): Path<String>,
    body: Body,
) -> ApiResult<Json<Operation>> {
    let id = number(&id)?;
    let by: By = read_body(body, true)?;
    by.of(&admin.letters).stop(id).await?;
    Ok(Json(admin.letters.operation(id).await?))
}

pub(super) async fn resume(
    State(admin): State<AdminState>,
    Path(id): Path<String>,
    body: Body,
) -> ApiResult<(StatusCode, Json<Operation>)> {
    let id = number(&id)?;
    let by: By = read_body(body, true)?;
    let letters = by.of(&admin.letters);
    // Checked before the permit: an operation that cannot be resumed is reported even at the limit.
    letters.resumable(id).await?;
    let operation = letters.resume_in_background(id, admin.permit()?).await?;
    Ok((StatusCode::ACCEPTED, Json(operation)))
}

impl AdminState {
    /// Refuses an unknown tier: a filter with it would select nothing without an error.
    async fn checked(&self, filter: Filter) -> ApiResult<Filter> {
        if let Some(tier) = &filter.tier {
            self.letters.check_tier(tier).await?;
        }
        Ok(filter)
    }

    fn permit(&self) -> ApiResult<tokio::sync::OwnedSemaphorePermit> {
        let permit = std::sync::Arc::clone(&self.bulks).try_acquire_owned();
        permit.map_err(|_| {
            let detail = format!(
                "concurrent bulk redrive limit ({MAX_BULK_REDRIVES}) reached: stop one, or wait"
            );
            Problem::new(StatusCode::TOO_MANY_REQUESTS, detail)
        })
    }
}

impl By {
    fn of(&self, letters: &DeadLetters) -> DeadLetters {
        let letters = letters.clone().by(self.by.as_deref().unwrap_or(NOBODY));
        letters.because(self.because.as_deref().unwrap_or_default())
    }
}

impl CanaryBody {
    fn canary(self) -> ApiResult<Canary> {
        if self.count == 0 {
            return Err(Problem::bad("`canary.count` must be at least 1"));
        }
        let mut canary = Canary::of(self.count);
        if let Some(share) = self.success {
            if !(0.0..=1.0).contains(&share) {
                return Err(Problem::bad("`canary.success` must be from 0 to 1"));
            }
            canary = canary.success(share);
        }
        if let Some(wait) = self.wait {
            canary = canary.wait(wait);
        }
        Ok(canary)
    }
}

impl ListQuery {
    fn filter(self) -> ApiResult<Filter> {
        let mut filter = Filter {
            tier: self.tier,
            task: self.task,
            reason: self.reason,
            fingerprint: self.fingerprint,
            state: self.state,
            text: self.text,
            ..Filter::default()
        };
        if let Some(since) = self.since {
            filter = filter.since_text(&since)?;
        }
        if let Some(until) = self.until {
            filter = filter.until_text(&until)?;
        }
        Ok(filter)
    }
}

fn number(text: &str) -> ApiResult<i64> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse().ok().filter(|_| digits);
    number.ok_or_else(|| Problem::bad("the id in the path is not a valid row id"))
}
