//! Operations on many rows, and their progress.

use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::{DeadLetters, Filter, time_filter};
use crate::Error;
use crate::error::DeadLetterError;
use crate::postgres::Time;

/// An operation on many rows.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Operation {
    /// Its id.
    pub id: i64,
    /// The kind of the operation.
    pub action: OperationKind,
    /// The operator who began it.
    pub who: String,
    /// The operator's reason.
    pub why: String,
    /// The rows that it selects.
    pub filter: Value,
    /// Its state.
    pub state: OperationState,
    /// How many rows it selected when it began.
    pub total: u64,
    /// How many rows are done.
    pub done: u64,
    /// How many rows the broker did not confirm; they are still dead.
    pub failed: u64,
    /// How many rows cannot be redriven, for example because their task is not in the map.
    pub refused: u64,
    /// A note, for example why it stopped.
    pub note: String,
    /// When it began.
    #[serde(serialize_with = "time_filter::serialize")]
    pub started_at: SystemTime,
    /// When it ended.
    #[serde(serialize_with = "time_filter::optional::serialize")]
    pub ended_at: Option<SystemTime>,
}

/// The kind of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum OperationKind {
    /// Publishes the rows again.
    Redrive,
    /// Marks the rows as not needed.
    Discard,
    /// Deletes the rows.
    Purge,
}

impl OperationKind {
    fn as_str(self) -> &'static str {
        match self {
            Self::Redrive => "redrive",
            Self::Discard => "discard",
            Self::Purge => "purge",
        }
    }
}

/// The state of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum OperationState {
    /// It runs, or its process died and it can be resumed.
    Running,
    /// An operator stopped it; it ends after its batch.
    Stopping,
    /// It stopped before its last row, and can be resumed. The note says why.
    Stopped,
    /// It is complete.
    Done,
}

/// An operation and the fields that only its runner needs.
pub(super) struct Known {
    pub(super) operation: Operation,
    pub(super) runner: String,
    pub(super) upto: i64,
    pub(super) settings: String,
}

const COLUMNS: &str = "id, action, who, why, filter::text AS filter, settings::text AS settings, \
     state, runner, upto, total, done, failed, refused, note, started_at, ended_at";

impl DeadLetters {
    /// An operation and its progress.
    ///
    /// # Errors
    /// [`DeadLetterError::OperationNotFound`], and as every use of the database.
    pub async fn operation(&self, id: i64) -> Result<Operation, Error> {
        Ok(self.known_operation(id).await?.operation)
    }

    /// The latest operations, the newest first.
    ///
    /// # Errors
    /// As every use of the database.
    pub async fn operations(&self, most: u16) -> Result<Vec<Operation>, Error> {
        let reading = async {
            let rows = sqlx::query(sqlx::AssertSqlSafe(format!(
                "SELECT {COLUMNS} FROM tierline.dead_letter_operations WHERE app = $1 \
                 ORDER BY id DESC LIMIT $2"
            )))
            .bind(self.app())
            .bind(i64::from(most))
            .fetch_all(self.database.pool())
            .await?;
            let operations: Result<Vec<_>, _> = rows.iter().map(Known::read).collect();
            operations
        };
        let known = self.within("list operations", reading).await?;
        Ok(known.into_iter().map(|known| known.operation).collect())
    }

    /// Stops a bulk redrive after its batch, in whichever process it runs.
    ///
    /// # Errors
    /// [`DeadLetterError::OperationNotFound`]; [`DeadLetterError::OperationRefused`] if it does not run; as every use of the
    /// database.
    pub async fn stop(&self, id: i64) -> Result<(), Error> {
        let stopping = sqlx::query(
            "UPDATE tierline.dead_letter_operations SET state = 'stopping', \
             note = 'stopped by ' || $3 WHERE app = $1 AND id = $2 \
             AND state IN ('running', 'stopping')",
        )
        .bind(self.app())
        .bind(id)
        .bind(&*self.who)
        .execute(self.database.pool());
        let stopped = self.within("stop an operation", stopping).await?;
        if stopped.rows_affected() == 1 {
            return Ok(());
        }
        self.operation(id).await?;
        Err(Error::DeadLetter(DeadLetterError::OperationRefused {
            id,
            problem: "it no longer runs".into(),
        }))
    }

    pub(super) async fn known_operation(&self, id: i64) -> Result<Known, Error> {
        let reading = async {
            let row = sqlx::query(sqlx::AssertSqlSafe(format!(
                "SELECT {COLUMNS} FROM tierline.dead_letter_operations WHERE app = $1 AND id = $2"
            )))
            .bind(self.app())
            .bind(id)
            .fetch_optional(self.database.pool())
            .await?;
            row.as_ref().map(Known::read).transpose()
        };
        let known = self.within("read an operation", reading).await?;
        known.ok_or(Error::DeadLetter(DeadLetterError::OperationNotFound { id }))
    }

    /// Records an operation on `total` rows up to the row `upto`.
    pub(super) async fn begin(
        &self,
        action: OperationKind,
        filter: &Filter,
        settings: &str,
        runner: &str,
        (upto, total): (i64, u64),
    ) -> Result<Operation, Error> {
        let filter = serde_json::to_string(filter).unwrap_or_default();
        let beginning = sqlx::query(sqlx::AssertSqlSafe(format!(
            "INSERT INTO tierline.dead_letter_operations \
             (app, action, who, why, filter, settings, runner, upto, total) \
             VALUES ($1, $2, $3, $4, $5::jsonb, $6::jsonb, $7, $8, $9) RETURNING {COLUMNS}"
        )))
        .bind(self.app())
        .bind(action.as_str())
        .bind(&*self.who)
        .bind(&*self.why)
        .bind(filter)
        .bind(settings)
        .bind(runner)
        .bind(upto)
        .bind(i64::try_from(total).unwrap_or(i64::MAX))
        .fetch_one(self.database.pool());
        let beginning = async { Known::read(&beginning.await?) };
        let known = self.within("begin an operation", beginning).await?;
        Ok(known.operation)
    }

    /// Assigns a redrive to `runner`, if it is stopped or its process has stopped reporting. `None` if
    /// another process runs it.
    pub(super) async fn take_over(
        &self,
        id: i64,
        runner: &str,
    ) -> Result<Option<Operation>, Error> {
        let taking = sqlx::query(sqlx::AssertSqlSafe(format!(
            "UPDATE tierline.dead_letter_operations SET state = 'running', runner = $3, \
             heard_at = now(), ended_at = NULL, note = '' WHERE app = $1 AND id = $2 \
             AND (state = 'stopped' OR state <> 'done' \
                  AND heard_at < now() - make_interval(secs => $4)) RETURNING {COLUMNS}"
        )))
        .bind(self.app())
        .bind(id)
        .bind(runner)
        .bind(self.lease.as_secs_f64())
        .fetch_optional(self.database.pool());
        let taking = async { taking.await?.as_ref().map(Known::read).transpose() };
        let known = self.within("resume an operation", taking).await?;
        Ok(known.map(|known| known.operation))
    }

    /// Adds to an operation's counts, and returns whether it may continue.
    pub(super) async fn report(
        &self,
        id: i64,
        runner: &str,
        (done, failed, refused): (u64, u64, u64),
    ) -> Result<bool, Error> {
        let number = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
        let reporting = sqlx::query_scalar(
            "UPDATE tierline.dead_letter_operations SET done = done + $3, failed = failed + $4, \
             refused = refused + $5, heard_at = now() WHERE id = $1 AND runner = $2 \
             RETURNING state",
        )
        .bind(id)
        .bind(runner)
        .bind(number(done))
        .bind(number(failed))
        .bind(number(refused))
        .fetch_optional(self.database.pool());
        let state: Option<String> = self.within("report progress", reporting).await?;
        // None: another process has resumed it.
        Ok(state.as_deref() == Some("running"))
    }

    /// Records the end of an operation. An empty note keeps the earlier one.
    pub(super) async fn end(
        &self,
        id: i64,
        runner: &str,
        state: OperationState,
        note: &str,
    ) -> Result<Operation, Error> {
        let state = match state {
            OperationState::Done => "done",
            _ => "stopped",
        };
        let ending = sqlx::query(
            "UPDATE tierline.dead_letter_operations SET state = $3, ended_at = now(), \
             note = CASE WHEN $4 = '' THEN note ELSE $4 END WHERE id = $1 AND runner = $2",
        )
        .bind(id)
        .bind(runner)
        .bind(state)
        .bind(note.replace('\0', ""))
        .execute(self.database.pool());
        self.within("end an operation", ending).await?;
        self.operation(id).await
    }
}

impl Known {
    fn read(row: &PgRow) -> Result<Self, sqlx::Error> {
        let count = |column: &str| {
            let count: i64 = row.try_get(column)?;
            Ok::<_, sqlx::Error>(count.unsigned_abs())
        };
        let filter: String = row.try_get("filter")?;
        let action: String = row.try_get("action")?;
        let state: String = row.try_get("state")?;
        let ended_at: Option<Time> = row.try_get("ended_at")?;
        Ok(Self {
            runner: row.try_get("runner")?,
            upto: row.try_get("upto")?,
            settings: row.try_get("settings")?,
            operation: Operation {
                id: row.try_get("id")?,
                action: match action.as_str() {
                    "discard" => OperationKind::Discard,
                    "purge" => OperationKind::Purge,
                    _ => OperationKind::Redrive,
                },
                who: row.try_get("who")?,
                why: row.try_get("why")?,
                filter: serde_json::from_str(&filter).unwrap_or_default(),
                state: match state.as_str() {
                    "running" => OperationState::Running,
                    "stopping" => OperationState::Stopping,
                    "stopped" => OperationState::Stopped,
                    _ => OperationState::Done,
                },
                total: count("total")?,
                done: count("done")?,
                failed: count("failed")?,
                refused: count("refused")?,
                note: row.try_get("note")?,
                started_at: row.try_get::<Time, _>("started_at")?.0,
                ended_at: ended_at.map(|time| time.0),
            },
        })
    }
}
