//! Dead letters.

use std::time::{Duration, SystemTime};

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::Desk;
use super::problem::Problem;
use crate::dead::{
    Canary, DeadLetters, Filter, Operation, Page, Reason, State as Standing, parse_time,
};
use crate::task::IntoDuration;

/// The time of which failures are grouped, unless `since` is given.
const GROUPS_WINDOW: Duration = Duration::from_secs(24 * 3600);

type Answer<T = Json<Value>> = Result<T, Problem>;
type Asked<T> = Result<Query<T>, QueryRejection>;
type Body = Result<Bytes, BytesRejection>;

/// Which rows, in the query of a URL or in the body of a bulk redrive.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct ListQuery {
    tier: Option<String>,
    task: Option<String>,
    reason: Option<Reason>,
    fingerprint: Option<String>,
    state: Option<Standing>,
    since: Option<String>,
    until: Option<String>,
    text: Option<String>,
    limit: Option<u16>,
    after: Option<String>,
}

/// Who asks, and why.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct By {
    by: Option<String>,
    because: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Most {
    limit: Option<u16>,
}

/// A bulk redrive.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Bulk {
    /// Must be given: `{}` is everything that is dead. As fields, because a list would be read as the
    /// fields in their order, and an empty one as everything.
    filter: Map<String, Value>,
    rate: Option<u32>,
    canary: Option<Map<String, Value>>,
    by: Option<String>,
    because: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Bird {
    count: u32,
    success: Option<f64>,
    wait: Option<String>,
}

pub(super) async fn by_tier(State(desk): State<Desk>) -> Answer {
    let tiers = desk.letters.by_tier().await?;
    Ok(Json(json!({ "tiers": tiers })))
}

pub(super) async fn list(State(desk): State<Desk>, query: Asked<ListQuery>) -> Answer {
    let mut query = read_query(query)?;
    let size = query.limit.take().unwrap_or(50);
    let page = match query.after.take() {
        Some(cursor) => Page::after(size, cursor.parse()?),
        None => Page::first(size),
    };
    let filter = desk.checked(query.filter()?).await?;
    let listed = desk.letters.list(&filter, page).await?;
    Ok(Json(json!(listed)))
}

pub(super) async fn groups(State(desk): State<Desk>, query: Asked<ListQuery>) -> Answer {
    let mut query = read_query(query)?;
    let most = query.limit.take().unwrap_or(20);
    if query.after.is_some() {
        return Err(Problem::bad("groups have no pages: leave `after` out"));
    }
    let mut filter = desk.checked(query.filter()?).await?;
    // Every row of the window is counted, so there is one.
    let until = filter.until.unwrap_or_else(SystemTime::now);
    let window = until.checked_sub(GROUPS_WINDOW);
    filter.since = filter.since.or(window).or(Some(SystemTime::UNIX_EPOCH));
    let groups = desk.letters.groups(&filter, most).await?;
    Ok(Json(json!({ "groups": groups })))
}

pub(super) async fn show(State(desk): State<Desk>, Path(id): Path<String>) -> Answer {
    let letter = desk.letters.get(number(&id)?).await?;
    let assessment = desk.letters.assess(&letter.summary).await;
    let mut shown = json!(letter);
    shown["assessment"] = json!(assessment);
    Ok(Json(shown))
}

pub(super) async fn redrive(
    State(desk): State<Desk>,
    Path(id): Path<String>,
    body: Body,
) -> Answer {
    let id = number(&id)?;
    let by: By = read_body(body, true)?;
    let receipt = by.of(&desk.letters).redrive(id).await?;
    Ok(Json(json!({
        "id": id,
        "message_id": receipt.id.as_str(),
        "tier": receipt.tier,
    })))
}

pub(super) async fn discard(
    State(desk): State<Desk>,
    Path(id): Path<String>,
    query: Asked<By>,
) -> Answer<StatusCode> {
    let id = number(&id)?;
    let by = read_query(query)?;
    by.of(&desk.letters).discard(id).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn redrive_all(
    State(desk): State<Desk>,
    body: Body,
) -> Answer<(StatusCode, Json<Operation>)> {
    let bulk: Bulk = read_body(body, false)?;
    let by = By {
        by: bulk.by,
        because: bulk.because,
    };
    let letters = by.of(&desk.letters);
    let filter: ListQuery = fields(bulk.filter)?;
    if filter.limit.is_some() || filter.after.is_some() {
        let problem =
            "`limit` and `after` are for lists: a redrive takes all that the filter means";
        return Err(Problem::bad(problem));
    }
    let filter = desk.checked(filter.filter()?).await?;
    let mut redriving = letters.redrive_all(filter);
    if let Some(rate) = bulk.rate {
        if rate == 0 {
            return Err(Problem::bad("`rate` must be at least 1"));
        }
        redriving = redriving.rate(rate);
    }
    if let Some(bird) = bulk.canary {
        redriving = redriving.canary(fields::<Bird>(bird)?.canary()?);
    }
    // The permit is kept until it has ended; its progress is in its operation.
    let operation = redriving.run_in_background(desk.permit()?).await?;
    Ok((StatusCode::ACCEPTED, Json(operation)))
}

pub(super) async fn operations(State(desk): State<Desk>, query: Asked<Most>) -> Answer {
    let most = read_query(query)?.limit.unwrap_or(50);
    if most == 0 || most > Page::LARGEST {
        return Err(Problem::bad(format!("`limit` is 1 to {}", Page::LARGEST)));
    }
    let operations = desk.letters.operations(most).await?;
    Ok(Json(json!({ "operations": operations })))
}

pub(super) async fn operation(
    State(desk): State<Desk>,
    Path(id): Path<String>,
) -> Answer<Json<Operation>> {
    Ok(Json(desk.letters.operation(number(&id)?).await?))
}

pub(super) async fn stop(
    State(desk): State<Desk>,
    Path(id): Path<String>,
    body: Body,
) -> Answer<Json<Operation>> {
    let id = number(&id)?;
    let by: By = read_body(body, true)?;
    by.of(&desk.letters).stop(id).await?;
    Ok(Json(desk.letters.operation(id).await?))
}

pub(super) async fn resume(
    State(desk): State<Desk>,
    Path(id): Path<String>,
    body: Body,
) -> Answer<(StatusCode, Json<Operation>)> {
    let id = number(&id)?;
    let by: By = read_body(body, true)?;
    let letters = by.of(&desk.letters);
    // What cannot be resumed says so, also where no more may run.
    letters.resumable(id).await?;
    let operation = letters.resume_in_background(id, desk.permit()?).await?;
    Ok((StatusCode::ACCEPTED, Json(operation)))
}

impl Desk {
    /// Refuses a tier that nobody knows: the filter would mean nothing, in silence.
    async fn checked(&self, filter: Filter) -> Answer<Filter> {
        if let Some(tier) = &filter.tier {
            self.letters.check_tier(tier).await?;
        }
        Ok(filter)
    }

    fn permit(&self) -> Answer<tokio::sync::OwnedSemaphorePermit> {
        let permit = std::sync::Arc::clone(&self.bulks).try_acquire_owned();
        permit.map_err(|_| {
            let detail = "as many bulk redrives run here as may: stop one, or wait";
            Problem::new(StatusCode::TOO_MANY_REQUESTS, detail)
        })
    }
}

impl By {
    fn of(&self, letters: &DeadLetters) -> DeadLetters {
        let letters = letters
            .clone()
            .by(self.by.as_deref().unwrap_or("admin API"));
        letters.because(self.because.as_deref().unwrap_or_default())
    }
}

impl Bird {
    fn canary(self) -> Answer<Canary> {
        if self.count == 0 {
            return Err(Problem::bad("`canary.count` must be at least 1"));
        }
        let mut canary = Canary::of(self.count);
        if let Some(share) = self.success {
            if !(0.0..=1.0).contains(&share) {
                return Err(Problem::bad("`canary.success` is a share, from 0 to 1"));
            }
            canary = canary.success(share);
        }
        if let Some(wait) = self.wait {
            canary = canary.wait(wait.as_str().into_duration()?);
        }
        Ok(canary)
    }
}

impl ListQuery {
    fn filter(self) -> Answer<Filter> {
        let now = SystemTime::now();
        let time = |text: Option<String>| {
            let time = text.map(|text| parse_time(&text, now)).transpose();
            time.map_err(Problem::bad)
        };
        Ok(Filter {
            tier: self.tier,
            task: self.task,
            reason: self.reason,
            fingerprint: self.fingerprint,
            state: self.state,
            since: time(self.since)?,
            until: time(self.until)?,
            text: self.text,
        })
    }
}

fn number(text: &str) -> Answer<i64> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    let number = text.parse().ok().filter(|_| digits);
    number.ok_or_else(|| Problem::bad("the number in the path is none that a row can have"))
}

fn read_query<T>(query: Asked<T>) -> Answer<T> {
    let query = query.map_err(|rejection| Problem::bad(rejection.body_text()))?;
    Ok(query.0)
}

fn read_body<T: DeserializeOwned>(body: Body, may_be_empty: bool) -> Answer<T> {
    let body = body.map_err(|rejection| Problem::new(rejection.status(), rejection.body_text()))?;
    let body = match body.is_empty() && may_be_empty {
        true => b"{}",
        false => body.as_ref(),
    };
    fields(serde_json::from_slice(body).map_err(wrong_body)?)
}

fn fields<T: DeserializeOwned>(fields: Map<String, Value>) -> Answer<T> {
    serde_json::from_value(Value::Object(fields)).map_err(wrong_body)
}

fn wrong_body(error: serde_json::Error) -> Problem {
    Problem::bad(format!("the body is not what it should be: {error}"))
}
