//! The statements on schedules, except those of the leader.

use std::time::Duration;

use jiff::Timestamp;
use sqlx::{AssertSqlSafe, Row};

use super::state::{self, COLUMNS, Mark, Origin, ScheduleChange, ScheduleState};
use super::{from_database, to_database};
use crate::Error;
use crate::error::TopologyError;
use crate::postgres::{Database, Time};
use crate::topology::Schedule;

const LIMIT: Duration = Duration::from_secs(10);

/// The schedules of one app in the database.
#[derive(Debug, Clone)]
pub(super) struct Store {
    pub(super) database: Database,
    pub(super) app: String,
}

/// The result of declaring schedules.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Declared {
    /// New, or different from last time.
    pub(super) changed: Vec<String>,
    /// No longer declared.
    pub(super) gone: Vec<String>,
}

/// Declares schedules. If a declaration is the same as last time, nothing changes: state, pause and changes
/// made at run time stay. If it differs, it takes effect; a waiting run stays due unless the timing
/// differs.
const DECLARE: &str = "
WITH declared AS (
    INSERT INTO tierline.schedules AS s
        (app, name, definition, declared, origin, next_due, changed_by)
    SELECT $1, n.name, n.definition::jsonb, n.definition::jsonb, $2, n.next_due, $3
    FROM unnest($4::text[], $5::text[], $6::timestamptz[]) AS n (name, definition, next_due)
    ON CONFLICT (app, name) DO UPDATE SET
        definition = excluded.declared,
        declared = excluded.declared,
        origin = excluded.origin,
        gone_at = NULL,
        next_due = CASE
            WHEN s.paused_at IS NOT NULL THEN NULL
            WHEN s.gone_at IS NULL
                AND s.definition -> 'cron' IS NOT DISTINCT FROM excluded.declared -> 'cron'
                AND s.definition -> 'timezone' IS NOT DISTINCT FROM excluded.declared -> 'timezone'
                AND s.definition -> 'every' IS NOT DISTINCT FROM excluded.declared -> 'every'
            THEN s.next_due
            ELSE excluded.next_due
        END,
        changed_at = clock_timestamp(),
        changed_by = excluded.changed_by
    WHERE (s.declared <> excluded.declared OR s.gone_at IS NOT NULL OR s.origin <> excluded.origin)
        AND (excluded.origin = 'file' OR s.origin = 'code' OR s.gone_at IS NOT NULL)
    RETURNING name, definition, xmax = 0 AS is_new
), noted AS (
    INSERT INTO tierline.schedule_changes (app, name, by, what, definition)
    SELECT $1, name, $3, CASE WHEN is_new THEN 'added' ELSE 'changed' END, definition FROM declared
)
SELECT name FROM declared ORDER BY name";

/// Stops schedules that are no longer in the file. The rows stay, with state and history.
const RETIRE: &str = "
WITH gone AS (
    UPDATE tierline.schedules SET gone_at = clock_timestamp(), next_due = NULL
    WHERE app = $1 AND origin = 'file' AND gone_at IS NULL AND name <> ALL ($3)
    RETURNING name
), noted AS (
    INSERT INTO tierline.schedule_changes (app, name, by, what)
    SELECT $1, name, $2, 'gone' FROM gone
)
SELECT name FROM gone ORDER BY name";

/// One change to one schedule, with its entry in the history. The parameters are app, name and by.
fn change(what: &str, statement: &str) -> String {
    format!(
        "WITH changed AS ({statement}),
         noted AS (
             INSERT INTO tierline.schedule_changes (app, name, by, what, definition)
             SELECT app, name, $3, '{what}', definition FROM changed
         )
         SELECT {COLUMNS} FROM changed"
    )
}

impl Store {
    pub(super) fn new(database: Database, app: &str) -> Self {
        Self {
            database,
            app: app.to_owned(),
        }
    }

    /// Declares schedules. With [`Origin::File`] these are all of the file's schedules.
    pub(super) async fn declare(
        &self,
        schedules: &[Schedule],
        origin: Origin,
        by: &str,
        now: Timestamp,
    ) -> Result<Declared, Error> {
        let names: Vec<&str> = schedules
            .iter()
            .map(|schedule| schedule.name.as_str())
            .collect();
        let documents: Vec<String> = schedules
            .iter()
            .map(|schedule| schedule.document().to_string())
            .collect();
        let next_due: Vec<Option<Time>> = schedules
            .iter()
            .map(|schedule| {
                schedule
                    .timing
                    .next_after(now, &schedule.name)
                    .map(to_database)
            })
            .collect();
        self.database
            .within(LIMIT, "declare the schedules", async {
                let mut transaction = self.database.pool().begin().await?;
                let changed = sqlx::query_scalar(DECLARE)
                    .bind(&self.app)
                    .bind(origin.as_str())
                    .bind(by)
                    .bind(&names)
                    .bind(&documents)
                    .bind(&next_due)
                    .fetch_all(&mut *transaction)
                    .await?;
                let gone = match origin {
                    Origin::Code => Vec::new(),
                    Origin::File => {
                        let retire = sqlx::query_scalar(RETIRE);
                        let retire = retire.bind(&self.app).bind(by).bind(&names);
                        retire.fetch_all(&mut *transaction).await?
                    }
                };
                transaction.commit().await?;
                Ok(Declared { changed, gone })
            })
            .await
    }

    /// Every schedule, by name.
    pub(super) async fn list(&self) -> Result<Vec<ScheduleState>, Error> {
        let statement =
            format!("SELECT {COLUMNS} FROM tierline.schedules WHERE app = $1 ORDER BY name");
        let rows = self
            .database
            .within(LIMIT, "list the schedules", async {
                let list = sqlx::query(AssertSqlSafe(statement)).bind(&self.app);
                let rows = list.fetch_all(self.database.pool()).await?;
                rows.iter().map(state::read).collect::<Result<Vec<_>, _>>()
            })
            .await?;
        rows.into_iter().collect()
    }

    pub(super) async fn get(&self, name: &str) -> Result<ScheduleState, Error> {
        let statement =
            format!("SELECT {COLUMNS} FROM tierline.schedules WHERE app = $1 AND name = $2");
        let query = sqlx::query(AssertSqlSafe(statement))
            .bind(&self.app)
            .bind(name);
        self.one(name, "look up a schedule", query).await
    }

    /// Pauses a schedule; does nothing if it is already paused.
    pub(super) async fn pause(&self, name: &str, by: &str) -> Result<ScheduleState, Error> {
        let statement = change(
            "paused",
            "UPDATE tierline.schedules SET next_due = NULL, paused_at = clock_timestamp(),
                 paused_by = $3
             WHERE app = $1 AND name = $2 AND paused_at IS NULL RETURNING *",
        );
        self.change_or_get(name, by, "pause a schedule", statement, None)
            .await
    }

    /// Resumes a schedule with the run that is due at `next_due`; does nothing if it is not paused.
    pub(super) async fn resume(
        &self,
        name: &str,
        by: &str,
        next_due: Option<Timestamp>,
    ) -> Result<ScheduleState, Error> {
        let statement = change(
            "resumed",
            "UPDATE tierline.schedules SET paused_at = NULL, paused_by = NULL,
                 next_due = CASE WHEN gone_at IS NULL THEN $4 END
             WHERE app = $1 AND name = $2 AND paused_at IS NOT NULL RETURNING *",
        );
        let next_due = Some(next_due.map(to_database));
        self.change_or_get(name, by, "resume a schedule", statement, next_due)
            .await
    }

    async fn change_or_get(
        &self,
        name: &str,
        by: &str,
        tried: &str,
        statement: String,
        next_due: Option<Option<Time>>,
    ) -> Result<ScheduleState, Error> {
        let mut query = sqlx::query(AssertSqlSafe(statement))
            .bind(&self.app)
            .bind(name)
            .bind(by);
        if let Some(next_due) = next_due {
            query = query.bind(next_due);
        }
        match self.one(name, tried, query).await {
            Err(Error::Topology(TopologyError::UnknownSchedule { .. })) => self.get(name).await,
            other => other,
        }
    }

    /// Replaces the definition. The next run is due at `next_due` if the timing differs.
    pub(super) async fn change(
        &self,
        schedule: &Schedule,
        by: &str,
        next_due: Option<Timestamp>,
    ) -> Result<ScheduleState, Error> {
        let statement = change(
            "changed",
            "UPDATE tierline.schedules SET
                 definition = $4::jsonb, changed_at = clock_timestamp(), changed_by = $3,
                 next_due = CASE
                     WHEN next_due IS NULL
                         OR (definition -> 'cron' IS NOT DISTINCT FROM $4::jsonb -> 'cron'
                         AND definition -> 'timezone' IS NOT DISTINCT FROM $4::jsonb -> 'timezone'
                         AND definition -> 'every' IS NOT DISTINCT FROM $4::jsonb -> 'every')
                     THEN next_due
                     ELSE $5
                 END
             WHERE app = $1 AND name = $2 RETURNING *",
        );
        let query = sqlx::query(AssertSqlSafe(statement))
            .bind(&self.app)
            .bind(&schedule.name)
            .bind(by)
            .bind(schedule.document().to_string())
            .bind(next_due.map(to_database));
        self.one(&schedule.name, "change a schedule", query).await
    }

    /// Removes a schedule that is not in the file.
    pub(super) async fn remove(&self, name: &str, by: &str) -> Result<ScheduleState, Error> {
        let statement = change(
            "removed",
            "DELETE FROM tierline.schedules
             WHERE app = $1 AND name = $2 AND (origin = 'code' OR gone_at IS NOT NULL) RETURNING *",
        );
        let query = sqlx::query(AssertSqlSafe(statement))
            .bind(&self.app)
            .bind(name)
            .bind(by);
        self.one(name, "remove a schedule", query).await
    }

    /// Records a run that an operator requested.
    pub(super) async fn note_run(&self, name: &str, by: &str) -> Result<(), Error> {
        let note = "INSERT INTO tierline.schedule_changes (app, name, by, what) \
                    VALUES ($1, $2, $3, 'run')";
        let note = sqlx::query(note).bind(&self.app).bind(name).bind(by);
        let noting = async { note.execute(self.database.pool()).await.map(drop) };
        self.database.within(LIMIT, "record a run", noting).await
    }

    /// The history of a schedule, the latest first.
    pub(super) async fn history(
        &self,
        name: &str,
        count: u32,
    ) -> Result<Vec<ScheduleChange>, Error> {
        let history = "SELECT by, at, what FROM tierline.schedule_changes \
                       WHERE app = $1 AND name = $2 ORDER BY id DESC LIMIT $3";
        let history = sqlx::query(history)
            .bind(&self.app)
            .bind(name)
            .bind(i64::from(count));
        let reading = async {
            let rows = history.fetch_all(self.database.pool()).await?;
            let read = |row: &sqlx::postgres::PgRow| {
                let Time(at) = row.try_get("at")?;
                let by = row.try_get("by")?;
                let what = row.try_get("what")?;
                Ok(ScheduleChange {
                    mark: Mark { by, at },
                    what,
                })
            };
            rows.iter().map(read).collect()
        };
        self.database
            .within(LIMIT, "read the history of a schedule", reading)
            .await
    }

    /// The database's clock.
    pub(super) async fn now(&self) -> Result<Timestamp, Error> {
        let now = sqlx::query_scalar("SELECT clock_timestamp()");
        let now: Time = self
            .database
            .within(
                LIMIT,
                "read the database's clock",
                now.fetch_one(self.database.pool()),
            )
            .await?;
        Ok(from_database(now))
    }

    async fn one(
        &self,
        name: &str,
        tried: &str,
        query: sqlx::query::Query<'_, sqlx::Postgres, sqlx::postgres::PgArguments>,
    ) -> Result<ScheduleState, Error> {
        let state = async {
            let row = query.fetch_optional(self.database.pool()).await?;
            row.as_ref().map(state::read).transpose()
        };
        let state = self.database.within(LIMIT, tried, state).await?;
        state.unwrap_or_else(|| {
            Err(Error::Topology(TopologyError::UnknownSchedule {
                schedule: name.into(),
                near: None,
            }))
        })
    }
}
