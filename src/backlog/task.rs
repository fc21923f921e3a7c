//! Tasks in Postgres, as an operator sees them.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use serde::{Serialize, Serializer};
use sqlx::Row;
use sqlx::postgres::PgRow;
use uuid::Uuid;

use super::row::ClaimedRow;
use crate::TaskId;
use crate::error::BacklogError;
use crate::message::{FailedAttempt, Message};
use crate::postgres::{Time, time};
use crate::task::{IntoDuration, TaskEnding, TaskKey};
use crate::topology::duration::Unreadable;

/// Where a task is on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum TaskState {
    /// A worker has claimed it: it runs, or is about to.
    Running,
    /// It is due, and waits for a worker. This includes tasks in quarantine.
    Ready,
    /// It is due, and is held back: it is paused, at a limit, or waits for the turn of its key.
    Parked,
    /// It waits for its due time: it was delayed, or failed and will be retried.
    Scheduled,
    /// It has ended, and its tier keeps it for a time (`keep` in the map). Lists have such tasks only if they are asked
    /// for.
    Finished,
}

impl TaskState {
    pub(super) const ALL: [Self; 5] = [
        Self::Running,
        Self::Ready,
        Self::Parked,
        Self::Scheduled,
        Self::Finished,
    ];

    /// The state as a word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Ready => "ready",
            Self::Parked => "parked",
            Self::Scheduled => "scheduled",
            Self::Finished => "finished",
        }
    }
}

impl fmt::Display for TaskState {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.as_str())
    }
}

impl FromStr for TaskState {
    type Err = BacklogError;

    fn from_str(word: &str) -> Result<Self, BacklogError> {
        let found = Self::ALL.into_iter().find(|state| state.as_str() == word);
        found.ok_or_else(|| BacklogError::InvalidFilter {
            problem: format!(
                "there is no state {word:?}: it is running, ready, parked, scheduled or finished"
            )
            .into(),
        })
    }
}

/// A task that waits, runs or has ended in a tier in Postgres.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct BacklogTask {
    /// Its id.
    #[serde(serialize_with = "text")]
    pub id: TaskId,
    /// Its name.
    pub task: String,
    /// Its tier.
    pub tier: String,
    /// The tier that it was published to, if it was promoted or escalated since.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_tier: Option<String>,
    /// Where it is on its way.
    pub state: TaskState,
    /// Whether it is in quarantine: two workers died while they ran it.
    pub is_quarantined: bool,
    /// Its priority within the tier.
    pub priority: u8,
    /// The attempt to come, or under way.
    pub attempt: u32,
    /// How many workers died while they ran it.
    pub crashes: u32,
    /// When it was first enqueued.
    #[serde(serialize_with = "time::serialize")]
    pub enqueued_at: SystemTime,
    /// When it falls due, or fell due.
    #[serde(serialize_with = "time::serialize")]
    pub due_at: SystemTime,
    /// The worker that has it, or ran it: host and process.
    pub worker: Option<String>,
    /// When it ended.
    #[serde(
        serialize_with = "optional_time",
        skip_serializing_if = "Option::is_none"
    )]
    pub finished_at: Option<SystemTime>,
    /// How it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ending: Option<TaskEnding>,
    /// How many bytes its payload has.
    pub size: u64,
}

/// A task with everything that is known of it.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct BacklogTaskDetails {
    /// What a list shows.
    pub summary: BacklogTask,
    /// The payload, as it was published.
    pub payload: Vec<u8>,
    /// The publisher's own headers.
    pub headers: BTreeMap<String, String>,
    /// When it is no longer worth running.
    pub expires_at: Option<SystemTime>,
    /// The attempts that failed, the latest last.
    pub history: Vec<FailedAttempt>,
    /// The unique or idempotency key that it was published with.
    pub key: Option<TaskKey>,
}

/// With the payload as text, and what is no text in it replaced.
impl Serialize for BacklogTaskDetails {
    fn serialize<S: Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Failed<'a> {
            attempt: u32,
            #[serde(serialize_with = "time::serialize")]
            at: SystemTime,
            kind: &'a str,
            error: &'a str,
        }
        #[derive(Serialize)]
        struct Details<'a> {
            #[serde(flatten)]
            summary: &'a BacklogTask,
            payload: &'a str,
            headers: &'a BTreeMap<String, String>,
            #[serde(serialize_with = "optional_time")]
            expires_at: Option<SystemTime>,
            history: Vec<Failed<'a>>,
            #[serde(skip_serializing_if = "Option::is_none")]
            key: &'a Option<TaskKey>,
        }
        let history = self.history.iter().map(|failed| Failed {
            attempt: failed.attempt,
            at: failed.at,
            kind: failed.kind.as_str(),
            error: &failed.error,
        });
        let details = Details {
            summary: &self.summary,
            payload: &String::from_utf8_lossy(&self.payload),
            headers: &self.headers,
            expires_at: self.expires_at,
            history: history.collect(),
            key: &self.key,
        };
        details.serialize(out)
    }
}

/// Some tasks, and where the next page begins.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct BacklogPage {
    /// The tasks: those that run, those that are ready in the order in which they will be claimed, those that are parked,
    /// and those that are scheduled in the order in which they fall due, tier by tier. Those that have ended begin with the
    /// latest.
    pub tasks: Vec<BacklogTask>,
    /// Where the next page begins; `None` if this is the last. A page may have fewer tasks than asked for and still not
    /// be the last: a query looks at 10,000 tasks at most.
    pub next: Option<String>,
}

/// Which tasks are meant. Without any condition all are.
///
/// ```
/// use tierline::backlog::{TaskFilter, TaskState};
///
/// let stuck = TaskFilter::default().tier("exports").state(TaskState::Ready).waiting_for("1h");
/// ```
#[derive(Debug, Clone, Default)]
pub struct TaskFilter {
    pub(super) tier: Option<String>,
    pub(super) task: Option<String>,
    pub(super) state: Option<TaskState>,
    pub(super) waiting_for: Option<Duration>,
    pub(super) due_within: Option<Duration>,
    pub(super) unreadable: Unreadable,
}

impl TaskFilter {
    /// Tasks of this tier.
    #[must_use]
    pub fn tier(mut self, tier: impl Into<String>) -> Self {
        self.tier = Some(tier.into());
        self
    }

    /// Tasks of this name.
    #[must_use]
    pub fn task(mut self, task: impl Into<String>) -> Self {
        self.task = Some(task.into());
        self
    }

    /// Tasks in this state.
    #[must_use]
    pub fn state(mut self, state: TaskState) -> Self {
        self.state = Some(state);
        self
    }

    /// Tasks that fell due this long ago or longer, such as `"1h"`.
    #[must_use]
    pub fn waiting_for(mut self, time: impl IntoDuration) -> Self {
        let place = self.waiting_for.get_or_insert_default();
        self.unreadable.set("waiting_for", time, place);
        self
    }

    /// Tasks that fall due within this time, or fell due before, such as `"1d"`.
    #[must_use]
    pub fn due_within(mut self, time: impl IntoDuration) -> Self {
        let place = self.due_within.get_or_insert_default();
        self.unreadable.set("due_within", time, place);
        self
    }

    /// Whether a row is meant, apart from its tier and state.
    pub(super) fn matches(&self, row: &FoundRow, now: SystemTime) -> bool {
        let due = row.claimed.due_at;
        let is_late = |by: Duration| now.duration_since(due).is_ok_and(|late| late >= by);
        let is_soon = |within: Duration| now.checked_add(within).is_none_or(|end| due <= end);
        self.task.as_ref().is_none_or(|task| *task == row.task)
            && self.waiting_for.is_none_or(is_late)
            && self.due_within.is_none_or(is_soon)
    }
}

/// A row as a query found it.
pub(super) struct FoundRow {
    pub(super) claimed: ClaimedRow,
    pub(super) task: String,
    pub(super) tier: String,
    first_tier: Option<String>,
    pub(super) state: TaskState,
    worker: Option<String>,
    /// When and how it ended.
    finished: Option<(SystemTime, Option<TaskEnding>)>,
    size: u64,
}

impl FoundRow {
    pub(super) fn read(row: &PgRow, state: TaskState) -> Result<Self, sqlx::Error> {
        let size: i64 = row.try_get("size")?;
        let finished = match state {
            TaskState::Finished => {
                let Time(at) = row.try_get("finished_at")?;
                Some((at, TaskEnding::named(row.try_get("ending")?)))
            }
            _ => None,
        };
        Ok(Self {
            finished,
            claimed: ClaimedRow::read(row)?,
            task: row.try_get("task")?,
            tier: row.try_get("tier")?,
            first_tier: row.try_get("first_tier")?,
            state,
            worker: row.try_get("worker")?,
            size: size.unsigned_abs(),
        })
    }

    /// The place of a row in the order of its list.
    pub(super) fn place(&self) -> Place {
        Place {
            state: self.state,
            tier: self.tier.clone(),
            rank: self.claimed.rank,
            due_at: self.finished.map_or(self.claimed.due_at, |(at, _)| at),
            id: self.claimed.key.id,
        }
    }

    pub(super) fn into_details(self, now: SystemTime) -> BacklogTaskDetails {
        let Self {
            claimed,
            task,
            tier,
            first_tier,
            state,
            worker,
            finished,
            size,
        } = self;
        let (rank, due_at, id) = (claimed.rank, claimed.due_at, claimed.key.id);
        let received = claimed.into_received(&tier.as_str().into(), now);
        let message: Option<&Message> = received.message().ok();
        BacklogTaskDetails {
            summary: BacklogTask {
                id: message.map_or_else(|| TaskId::of_uuid(id), |it| it.id.clone()),
                task,
                tier,
                first_tier,
                state,
                is_quarantined: rank > 0,
                priority: super::row::priority(rank),
                attempt: message.map_or(1, |it| it.attempt),
                crashes: message.map_or(0, |it| it.crashes),
                enqueued_at: message.map_or(due_at, |it| it.enqueued_at),
                due_at,
                worker,
                finished_at: finished.map(|(at, _)| at),
                ending: finished.and_then(|(_, ending)| ending),
                size,
            },
            payload: message.map(|it| it.payload.clone()).unwrap_or_default(),
            headers: message.map(|it| it.headers.clone()).unwrap_or_default(),
            expires_at: message.and_then(|it| it.expires_at),
            history: message.map(|it| it.history.clone()).unwrap_or_default(),
            key: message.and_then(|it| it.key.clone()),
        }
    }
}

/// Where a page begins: after this row.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub(super) state: TaskState,
    pub(super) tier: String,
    pub(super) rank: i16,
    /// Of a task that has ended: when it did.
    pub(super) due_at: SystemTime,
    pub(super) id: Uuid,
}

impl fmt::Display for Place {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let since = self.due_at.duration_since(SystemTime::UNIX_EPOCH);
        let micros = since.unwrap_or_default().as_micros();
        let Self {
            state,
            tier,
            rank,
            id,
            ..
        } = self;
        write!(out, "{state}.{tier}.{rank}.{micros}.{id}")
    }
}

impl FromStr for Place {
    type Err = BacklogError;

    fn from_str(text: &str) -> Result<Self, BacklogError> {
        let read = || {
            let mut parts = text.split('.');
            let state = parts.next()?.parse().ok()?;
            let tier = parts.next()?.to_owned();
            let rank = parts.next()?.parse().ok()?;
            let micros = Duration::from_micros(parts.next()?.parse().ok()?);
            let due_at = SystemTime::UNIX_EPOCH.checked_add(micros)?;
            let id = parts.next()?.parse().ok()?;
            parts.next().is_none().then_some(Self {
                state,
                tier,
                rank,
                due_at,
                id,
            })
        };
        read().ok_or_else(|| BacklogError::InvalidFilter {
            problem: "the start of the page is not one that a page before has given".into(),
        })
    }
}

fn text<S: Serializer>(id: &TaskId, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_str(id.as_str())
}

fn optional_time<S: Serializer>(at: &Option<SystemTime>, out: S) -> Result<S::Ok, S::Error> {
    match at {
        Some(at) => time::serialize(at, out),
        None => out.serialize_none(),
    }
}
