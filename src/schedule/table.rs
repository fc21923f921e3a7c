//! The statements of the leader.

use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use sqlx::postgres::PgRow;
use sqlx::{Executor, Row};

use super::due::{self, Decision};
use super::lease::Lease;
use super::{from_database, state, to_database};
use crate::Error;
use crate::postgres::{DedicatedConnection, PgConnection, Time};
use crate::topology::Schedule;

/// How long a statement may take.
const LIMIT: Duration = Duration::from_secs(2);
/// How many schedules one query returns.
pub(super) const BATCH: usize = 500;

/// The due schedules, and the next due time after them. Only the holder of the lease gets rows: a leader
/// that was suspended finds nothing.
const FIND: &str = "
(
    SELECT name, definition::text, next_due FROM tierline.schedules
    WHERE app = $1 AND next_due <= $2 AND name <> ALL ($3)
        AND EXISTS (
            SELECT FROM tierline.schedule_leaders
            WHERE app = $1 AND epoch = $4 AND expires_at > clock_timestamp()
        )
    ORDER BY next_due LIMIT $5
)
UNION ALL
(
    SELECT NULL, NULL, next_due FROM tierline.schedules
    WHERE app = $1 AND next_due > $2
    ORDER BY next_due LIMIT 1
)";

/// Advances only schedules that no other process has advanced, and only for the holder of the lease: the
/// row lock keeps the lease until this is committed. A schedule that was paused meanwhile stays paused.
const ADVANCE: &str = "
WITH held AS (
    SELECT FROM tierline.schedule_leaders WHERE app = $1 AND epoch = $2 FOR SHARE
)
UPDATE tierline.schedules AS s SET
    next_due = CASE WHEN s.next_due IS NOT NULL THEN a.next_due END,
    last_due = a.last_due,
    last_published = coalesce(a.published_at, s.last_published),
    published = s.published + (a.published_at IS NOT NULL)::int,
    missed = s.missed + a.missed
FROM unnest($3::text[], $4::timestamptz[], $5::timestamptz[], $6::timestamptz[],
        $7::timestamptz[], $8::bigint[])
    AS a (name, expected, next_due, last_due, published_at, missed)
WHERE s.app = $1 AND s.name = a.name AND (s.next_due = a.expected OR s.next_due IS NULL)
    AND EXISTS (SELECT FROM held)
RETURNING s.name";

const WAITING: &str = "
SELECT name, definition::text, next_due, last_due FROM tierline.schedules
WHERE app = $1 AND name > $2 AND next_due > $3 ORDER BY name LIMIT $4";

const SETTLE: &str = "
UPDATE tierline.schedules AS s SET next_due = n.next_due
FROM unnest($2::text[], $3::timestamptz[], $4::timestamptz[]) AS n (name, expected, next_due)
WHERE s.app = $1 AND s.name = n.name AND s.next_due = n.expected";

/// The schedules of one app, for the leader.
#[derive(Debug)]
pub(super) struct Table {
    connection: DedicatedConnection,
    app: String,
}

/// The result of a query for due schedules.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// The due schedules with their due times, the earliest first; at most a batch.
    pub(super) due: Vec<(Schedule, Timestamp)>,
    /// When the next one is due.
    pub(super) next: Option<Timestamp>,
}

/// A run that was published or skipped.
#[derive(Debug)]
pub(super) struct Settled {
    pub(super) schedule: Schedule,
    /// The due time that the database has for it.
    pub(super) expected: Timestamp,
    pub(super) decision: Decision,
    pub(super) published_at: Option<Timestamp>,
}

impl Table {
    pub(super) fn new(connection: DedicatedConnection, app: &str) -> Self {
        Self {
            connection,
            app: app.to_owned(),
        }
    }

    /// The schedules that are due at `now`, without those in `aside`.
    pub(super) async fn find(
        &mut self,
        lease: &Lease,
        now: Timestamp,
        aside: &[String],
    ) -> Result<Found, Error> {
        let query = sqlx::query(FIND)
            .bind(&self.app)
            .bind(to_database(now))
            .bind(aside)
            .bind(lease.epoch)
            .bind(i64::try_from(BATCH).unwrap_or(i64::MAX));
        let find = async |connection: &mut PgConnection<'_>| {
            let mut found = Found::default();
            for row in connection.fetch_all(query).await? {
                let next_due = time(&row, "next_due")?;
                if row.try_get::<Option<&str>, _>("name")?.is_none() {
                    found.next = next_due;
                    continue;
                }
                let due = (state::definition(&row)?, next_due);
                found.due.extend(readable(due));
            }
            Ok(found)
        };
        self.connection
            .within(LIMIT, "query due schedules", find)
            .await
    }

    /// Records finished runs, unless another process has advanced the schedule. Returns the names of the recorded ones.
    pub(super) async fn advance(
        &mut self,
        lease: &Lease,
        settled: &[Settled],
    ) -> Result<Vec<String>, Error> {
        let names: Vec<&str> = settled
            .iter()
            .map(|run| run.schedule.name.as_str())
            .collect();
        let expected: Vec<Time> = settled
            .iter()
            .map(|run| to_database(run.expected))
            .collect();
        let next: Vec<Option<Time>> = settled
            .iter()
            .map(|run| run.decision.next.map(to_database))
            .collect();
        let last: Vec<Time> = settled
            .iter()
            .map(|run| to_database(run.decision.newest))
            .collect();
        let published: Vec<Option<Time>> = settled
            .iter()
            .map(|run| run.published_at.map(to_database))
            .collect();
        let missed: Vec<i64> = settled
            .iter()
            .map(|run| i64::try_from(run.decision.missed).unwrap_or(i64::MAX))
            .collect();
        let query = sqlx::query_scalar(ADVANCE)
            .bind(&self.app)
            .bind(lease.epoch)
            .bind(names)
            .bind(expected)
            .bind(next)
            .bind(last)
            .bind(published)
            .bind(missed);
        let advance = async |connection: &mut PgConnection<'_>| query.fetch_all(connection).await;
        self.connection
            .within(LIMIT, "record published runs", advance)
            .await
    }

    /// Corrects due times that do not fit this clock and these time zones: a batch of schedules whose names
    /// come after `seen`. Returns the last name if there may be more.
    pub(super) async fn correct_due_times(
        &mut self,
        now: Timestamp,
        seen: &str,
    ) -> Result<Option<String>, Error> {
        let query = sqlx::query(WAITING)
            .bind(&self.app)
            .bind(seen)
            .bind(to_database(now))
            .bind(i64::try_from(BATCH).unwrap_or(i64::MAX));
        let load = async |connection: &mut PgConnection<'_>| {
            let rows = connection.fetch_all(query).await?;
            let read = |row: &PgRow| {
                let place = (state::definition(row)?, time(row, "next_due")?);
                let name: String = row.try_get("name")?;
                Ok((name, place, time(row, "last_due")?))
            };
            rows.iter()
                .map(read)
                .collect::<Result<Vec<_>, sqlx::Error>>()
        };
        let tried = "check stored due times";
        let waiting = self.connection.within(LIMIT, tried, load).await?;
        let full = waiting.get(BATCH - 1).map(|(name, ..)| name.clone());
        let (mut names, mut expected, mut next) = (Vec::new(), Vec::new(), Vec::new());
        for (_, place, last_due) in waiting {
            let Some((schedule, next_due)) = readable(place) else {
                continue;
            };
            if let Some(corrected) = due::corrected(&schedule, next_due, last_due, now) {
                tracing::info!(
                    schedule = schedule.name,
                    "corrected its due time: the clock or the time zones have changed"
                );
                names.push(schedule.name);
                expected.push(to_database(next_due));
                next.push(corrected.map(to_database));
            }
        }
        if !names.is_empty() {
            let query = sqlx::query(SETTLE)
                .bind(&self.app)
                .bind(names)
                .bind(expected)
                .bind(next);
            let update = async |connection: &mut PgConnection<'_>| connection.execute(query).await;
            self.connection.within(LIMIT, tried, update).await?;
        }
        Ok(full)
    }
}

fn time(row: &PgRow, column: &str) -> Result<Option<Timestamp>, sqlx::Error> {
    let time: Option<Time> = row.try_get(column)?;
    Ok(time.map(from_database))
}

/// A schedule that cannot be parsed must not delay the others.
fn readable(
    (schedule, next_due): (Result<Schedule, Error>, Option<Timestamp>),
) -> Option<(Schedule, Timestamp)> {
    match schedule {
        Ok(schedule) => Some((schedule, next_due?)),
        Err(error) => {
            tracing::error!(%error, "a schedule does not run: its definition cannot be parsed");
            None
        }
    }
}

/// Converts a time to the type of other crates.
pub(super) fn system(time: Timestamp) -> SystemTime {
    SystemTime::from(time)
}
