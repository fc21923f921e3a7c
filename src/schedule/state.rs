//! The state of a schedule.

use std::time::SystemTime;

use serde::{Serialize, Serializer};
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::from_database;
use crate::Error;
use crate::postgres::Time;
use crate::topology::Schedule;

/// A schedule and its state.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ScheduleState {
    /// The definition in effect.
    #[serde(flatten)]
    pub schedule: Schedule,
    /// Where it was declared.
    pub origin: Origin,
    /// Whether it was changed at run time: the definition in effect is not the declared one.
    pub is_changed: bool,
    /// When the next run is due. `None`: it is paused or gone.
    #[serde(serialize_with = "time")]
    pub next_due: Option<SystemTime>,
    /// The due time of the latest run that was published or missed.
    #[serde(serialize_with = "time")]
    pub last_due: Option<SystemTime>,
    /// When the latest run was published.
    #[serde(serialize_with = "time")]
    pub last_published: Option<SystemTime>,
    /// How many runs were published.
    pub published: u64,
    /// How many runs were missed.
    pub missed: u64,
    /// The operator who paused it, and when, if it is paused.
    pub paused: Option<Mark>,
    /// Since when it is no longer in the file. Then it does not run.
    #[serde(serialize_with = "time")]
    pub gone: Option<SystemTime>,
    /// The operator who last added or changed it, and when.
    pub changed: Mark,
}

/// Where a schedule was declared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// The topology file. A new declaration there takes effect at the next start.
    File,
    /// [`Schedules::add`](super::Schedules::add).
    Code,
}

impl Origin {
    /// The database's text for it.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Origin::File => "file",
            Origin::Code => "code",
        }
    }
}

/// An operator and a time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Mark {
    /// The operator.
    pub by: String,
    /// The time, by the database's clock.
    #[serde(serialize_with = "some_time")]
    pub at: SystemTime,
}

/// An entry of a schedule's history.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ScheduleChange {
    /// The operator and the time.
    #[serde(flatten)]
    pub mark: Mark,
    /// The change: `"added"`, `"changed"`, `"paused"`, `"resumed"`, `"run"`, `"removed"` or `"gone"`.
    pub what: String,
}

/// The columns that [`read`] needs.
pub(super) const COLUMNS: &str = "name, definition::text, origin, definition <> declared AS is_changed, \
     next_due, last_due, last_published, published, missed, paused_at, paused_by, gone_at, \
     changed_at, changed_by";

/// Reads a row of these columns, or the problem if its schedule cannot be parsed.
pub(super) fn read(row: &PgRow) -> Result<Result<ScheduleState, Error>, sqlx::Error> {
    let time = |column: &str| {
        let time: Option<Time> = row.try_get(column)?;
        Ok::<_, sqlx::Error>(time.map(|Time(time)| time))
    };
    let count = |column: &str| {
        let count: i64 = row.try_get(column)?;
        Ok::<_, sqlx::Error>(count.unsigned_abs())
    };
    let Time(changed_at) = row.try_get("changed_at")?;
    let origin: &str = row.try_get("origin")?;
    let paused_by: Option<String> = row.try_get("paused_by")?;
    let paused = time("paused_at")?.zip(paused_by);
    let schedule = match definition(row)? {
        Ok(schedule) => schedule,
        Err(error) => return Ok(Err(error)),
    };
    Ok(Ok(ScheduleState {
        schedule,
        origin: match origin == Origin::File.as_str() {
            true => Origin::File,
            false => Origin::Code,
        },
        is_changed: row.try_get("is_changed")?,
        next_due: time("next_due")?,
        last_due: time("last_due")?,
        last_published: time("last_published")?,
        published: count("published")?,
        missed: count("missed")?,
        paused: paused.map(|(at, by)| Mark { by, at }),
        gone: time("gone_at")?,
        changed: Mark {
            by: row.try_get("changed_by")?,
            at: changed_at,
        },
    }))
}

/// The schedule of a row with the columns `name` and `definition`, as text.
pub(super) fn definition(row: &PgRow) -> Result<Result<Schedule, Error>, sqlx::Error> {
    let name: &str = row.try_get("name")?;
    let definition: &str = row.try_get("definition")?;
    let document = serde_json::from_str(definition);
    let document = document.map_err(|error| sqlx::Error::Decode(error.into()))?;
    Ok(Schedule::from_document(name, document))
}

fn time<S: Serializer>(time: &Option<SystemTime>, serializer: S) -> Result<S::Ok, S::Error> {
    match time {
        Some(time) => some_time(time, serializer),
        None => serializer.serialize_none(),
    }
}

fn some_time<S: Serializer>(time: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&from_database(Time(*time)))
}
