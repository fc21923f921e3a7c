//! A dead letter as read from the log.

use std::time::SystemTime;

use lapin::types::ShortString;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::fingerprint::hex;
use super::{Reason, RedriveOutcome, State, identity, time_filter};
use crate::message::properties;
use crate::postgres::Time;

/// A dead letter without the fields that may be large.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Summary {
    /// Its id in the log.
    pub id: i64,
    /// The message's id, if it has one.
    pub message_id: Option<String>,
    /// The task's name; `None` if it could not be read.
    pub task: Option<String>,
    /// The tier whose queue dead-lettered it; `"unrouted"` for one without a tier in the map.
    pub tier: String,
    /// The reason for its death.
    pub reason: Reason,
    /// The last error.
    pub error: Option<String>,
    /// The type of the error, if known.
    pub error_type: Option<String>,
    /// The kind of the last failure, a text of
    /// [`FailureKind`](crate::message::FailureKind).
    pub error_kind: Option<String>,
    /// The attempts since it was published or last redriven.
    pub attempts: u32,
    /// Its redrive count: how often it had been redriven when it died.
    pub life: u32,
    /// When it was first enqueued, if known.
    #[serde(serialize_with = "time_filter::optional::serialize")]
    pub enqueued_at: Option<SystemTime>,
    /// When it died.
    #[serde(serialize_with = "time_filter::serialize")]
    pub died_at: SystemTime,
    /// The fingerprint that it shares with equal failures.
    pub fingerprint: String,
    /// Its state.
    pub state: State,
    /// The dead letter that it was redriven from.
    pub redriven_from: Option<i64>,
    /// When it was redriven.
    #[serde(serialize_with = "time_filter::optional::serialize")]
    pub redriven_at: Option<SystemTime>,
    /// How its redrive ended.
    pub outcome: Option<RedriveOutcome>,
}

/// A dead letter with all its fields.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct DeadLetter {
    /// The fields that a list shows.
    #[serde(flatten)]
    pub summary: Summary,
    /// The causes of the error, the nearest first.
    pub causes: Vec<String>,
    /// The attempts that failed, the latest last.
    pub history: Vec<PastAttempt>,
    /// The worker that dead-lettered it.
    pub worker: Option<String>,
    /// The version of the program that the worker ran.
    pub worker_version: Option<String>,
    /// When the collector logged it.
    #[serde(serialize_with = "time_filter::serialize")]
    pub collected_at: SystemTime,
    /// When the outcome of its redrive was recorded.
    #[serde(serialize_with = "time_filter::optional::serialize")]
    pub outcome_at: Option<SystemTime>,
    /// The dead letters that it became after it was redriven.
    pub died_again_as: Vec<i64>,
    /// The headers, for display.
    pub headers: Value,
    /// The payload, if it is JSON that Postgres accepts.
    pub payload_json: Option<Value>,
    /// The payload as it arrived.
    #[serde(skip)]
    pub payload: Vec<u8>,
    /// The payload in base 16, if `payload_json` does not have it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub payload_hex: Option<String>,
    /// The AMQP properties as they arrived (flags and values), if they had to be repaired to be parsed. In
    /// base 16 when serialized. The error says what was wrong.
    #[serde(serialize_with = "in_base_16", skip_serializing_if = "Option::is_none")]
    pub raw_properties: Option<Vec<u8>>,
    /// The actions of operators on it.
    pub actions: Vec<Action>,
}

/// An attempt that failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PastAttempt {
    /// Its number, from 1.
    pub attempt: u32,
    /// When it failed, in milliseconds since 1970.
    pub at: i64,
    /// The kind of the failure.
    pub kind: String,
    /// The error, shortened.
    pub error: String,
}

/// An operator's action on a dead letter.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Action {
    /// When, in RFC 3339.
    pub at: String,
    /// The operator.
    pub who: String,
    /// The action: `redriven`, `discarded`.
    pub what: String,
    /// The operator's reason.
    pub why: String,
}

/// The columns of a [`Summary`].
pub(super) const SUMMARY: &str = "id, message_id, task, tier, reason, error, error_type, \
     error_kind, attempts, life, enqueued_at, died_at, fingerprint, state, redriven_from, \
     redriven_at, outcome";

impl Summary {
    pub(super) fn read(row: &PgRow) -> Result<Self, sqlx::Error> {
        let time = |column: &str| {
            let time: Option<Time> = row.try_get(column)?;
            Ok::<_, sqlx::Error>(time.map(|time| time.0))
        };
        let count = |column: &str| {
            let count: i32 = row.try_get(column)?;
            Ok::<_, sqlx::Error>(count.unsigned_abs())
        };
        let outcome: Option<String> = row.try_get("outcome")?;
        Ok(Self {
            id: row.try_get("id")?,
            message_id: row.try_get("message_id")?,
            task: row.try_get("task")?,
            tier: row.try_get("tier")?,
            reason: Reason::parse(row.try_get("reason")?).unwrap_or(Reason::Unknown),
            error: row.try_get("error")?,
            error_type: row.try_get("error_type")?,
            error_kind: row.try_get("error_kind")?,
            attempts: count("attempts")?,
            life: count("life")?,
            enqueued_at: time("enqueued_at")?,
            died_at: row.try_get::<Time, _>("died_at")?.0,
            fingerprint: row.try_get("fingerprint")?,
            state: State::parse(row.try_get("state")?).unwrap_or(State::Dead),
            redriven_from: row.try_get("redriven_from")?,
            redriven_at: time("redriven_at")?,
            outcome: outcome.as_deref().and_then(RedriveOutcome::parse),
        })
    }
}

/// The columns of a [`DeadLetter`]; JSON is read as text.
pub(super) const DETAILS: &str = "causes::text AS causes, history::text AS history, worker, \
     worker_version, collected_at, outcome_at, payload, payload_json::text AS payload_json, \
     raw_properties, headers::text AS headers, actions::text AS actions, identity, properties";

/// The identities that the row's message has after later redrives.
pub(super) fn later_identities(row: &PgRow) -> Result<Vec<String>, sqlx::Error> {
    let identity: String = row.try_get("identity")?;
    let payload: &[u8] = row.try_get("payload")?;
    let Some(properties) = properties::decode(row.try_get("properties")?) else {
        return Ok(vec![identity]);
    };
    let text = |text: &Option<ShortString>| text.as_ref().map(|text| text.as_str().to_owned());
    // A message without an id was redriven with its identity as its id.
    let id = text(properties.message_id()).filter(|id| !id.is_empty());
    let id = id.as_deref().unwrap_or(&identity);
    let later = identity::of_message(id, text(properties.kind()).as_deref(), payload);
    Ok(vec![identity, later])
}

impl DeadLetter {
    /// Reads all fields except the dead letters that it became.
    pub(super) fn read(row: &PgRow) -> Result<Self, sqlx::Error> {
        let json = |column: &str| {
            let text: Option<String> = row.try_get(column)?;
            Ok::<_, sqlx::Error>(text.unwrap_or_default())
        };
        let outcome_at: Option<Time> = row.try_get("outcome_at")?;
        let payload: Vec<u8> = row.try_get("payload")?;
        let payload_json = serde_json::from_str(&json("payload_json")?).ok();
        Ok(Self {
            summary: Summary::read(row)?,
            causes: serde_json::from_str(&json("causes")?).unwrap_or_default(),
            history: serde_json::from_str(&json("history")?).unwrap_or_default(),
            worker: row.try_get("worker")?,
            worker_version: row.try_get("worker_version")?,
            collected_at: row.try_get::<Time, _>("collected_at")?.0,
            outcome_at: outcome_at.map(|time| time.0),
            died_again_as: Vec::new(),
            headers: serde_json::from_str(&json("headers")?).unwrap_or_default(),
            payload_hex: payload_json.is_none().then(|| hex(&payload)),
            payload_json,
            payload,
            raw_properties: row.try_get("raw_properties")?,
            actions: serde_json::from_str(&json("actions")?).unwrap_or_default(),
        })
    }
}

fn in_base_16<S: serde::Serializer>(
    bytes: &Option<Vec<u8>>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    bytes.as_deref().map(hex).serialize(serializer)
}
