//! The statements of the leader.

use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use sqlx::postgres::PgRow;
use sqlx::{Executor, Row};

use super::due::{self, Decision};
use super::lease::Lease;
use super::line::Line;
use super::{from_database, state, to_database};
use crate::Error;
use crate::postgres::Time;
use crate::topology::Schedule;

/// How long a statement may take.
const LIMIT: Duration = Duration::from_secs(2);
/// How many schedules one look finds.
pub(super) const BATCH: usize = 500;

/// What is due, and the time of what is due after that. Only for who holds the lease: a leader that
/// slept finds nothing.
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

/// Moves on only what nobody else has moved, and only for who holds the lease: the lock keeps it
/// from changing hands until this is committed. A schedule that was paused meanwhile stays paused.
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

/// The schedules of one app, for who leads.
#[derive(Debug)]
pub(super) struct Table {
    line: Line,
    app: String,
}

/// What a look found.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// What is due, with its due time, the earliest first; at most a batch.
    pub(super) due: Vec<(Schedule, Timestamp)>,
    /// When the next one is due.
    pub(super) next: Option<Timestamp>,
}

/// A run that was published or given up.
#[derive(Debug)]
pub(super) struct Settled {
    pub(super) schedule: Schedule,
    /// The due time that the database has for it.
    pub(super) expected: Timestamp,
    pub(super) decision: Decision,
    pub(super) published_at: Option<Timestamp>,
}

impl Table {
    pub(super) fn new(line: Line, app: &str) -> Self {
        Self {
            line,
            app: app.to_owned(),
        }
    }

    /// What is due at `now`, without those `aside`.
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
        let find = async |connection: &mut sqlx::PgConnection| {
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
        self.line.within(LIMIT, "look for what is due", find).await
    }

    /// Moves on what was settled, as far as it is still ours to move, and gives the names of that.
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
        let advance = async |connection: &mut sqlx::PgConnection| query.fetch_all(connection).await;
        self.line.within(LIMIT, "move schedules on", advance).await
    }

    /// Mends what waits for a time that is not its next, by this clock and these time zones: a batch
    /// of those whose names come after `seen`. Gives the last name, if there may be more.
    pub(super) async fn settle(
        &mut self,
        now: Timestamp,
        seen: &str,
    ) -> Result<Option<String>, Error> {
        let query = sqlx::query(WAITING)
            .bind(&self.app)
            .bind(seen)
            .bind(to_database(now))
            .bind(i64::try_from(BATCH).unwrap_or(i64::MAX));
        let load = async |connection: &mut sqlx::PgConnection| {
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
        let tried = "look at what waits";
        let waiting = self.line.within(LIMIT, tried, load).await?;
        let full = waiting.get(BATCH - 1).map(|(name, ..)| name.clone());
        let (mut names, mut expected, mut next) = (Vec::new(), Vec::new(), Vec::new());
        for (_, place, last_due) in waiting {
            let Some((schedule, next_due)) = readable(place) else {
                continue;
            };
            if let Some(settled) = due::settle(&schedule, next_due, last_due, now) {
                tracing::info!(
                    schedule = schedule.name,
                    "it waits for another time than it did"
                );
                names.push(schedule.name);
                expected.push(to_database(next_due));
                next.push(settled.map(to_database));
            }
        }
        if !names.is_empty() {
            let query = sqlx::query(SETTLE)
                .bind(&self.app)
                .bind(names)
                .bind(expected)
                .bind(next);
            let settle =
                async |connection: &mut sqlx::PgConnection| connection.execute(query).await;
            self.line.within(LIMIT, tried, settle).await?;
        }
        Ok(full)
    }
}

fn time(row: &PgRow, column: &str) -> Result<Option<Timestamp>, sqlx::Error> {
    let time: Option<Time> = row.try_get(column)?;
    Ok(time.map(from_database))
}

/// One schedule that cannot be read must not hold up the others.
fn readable(
    (schedule, next_due): (Result<Schedule, Error>, Option<Timestamp>),
) -> Option<(Schedule, Timestamp)> {
    match schedule {
        Ok(schedule) => Some((schedule, next_due?)),
        Err(error) => {
            tracing::error!(%error, "a schedule does not run");
            None
        }
    }
}

/// The time as others have it.
pub(super) fn system(time: Timestamp) -> SystemTime {
    SystemTime::from(time)
}
