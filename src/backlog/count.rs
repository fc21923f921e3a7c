//! Counts the rows of tiers.

use std::collections::HashMap;
use std::time::Duration;

use crate::Error;
use crate::postgres::{Database, STATEMENT_LIMIT};

/// How many rows of a table are looked at to count some tasks.
const MOST_LOOKED_AT: i64 = 10_000;

/// How many rows a tier has, by their phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowCounts {
    pub(crate) ready: u64,
    pub(crate) parked: u64,
    pub(crate) scheduled: u64,
    pub(crate) running: u64,
}

impl RowCounts {
    pub(crate) fn all(self) -> u64 {
        self.ready + self.parked + self.scheduled + self.running
    }
}

/// Counts the rows of a tier, all in one snapshot: a row is in exactly one table.
pub(crate) async fn count_rows(
    database: &Database,
    app: &str,
    tier: &str,
) -> Result<RowCounts, Error> {
    let counting = sqlx::query_as::<_, (i64, i64, i64, i64)>(
        "WITH tier AS MATERIALIZED (SELECT id FROM tierline.backlogs WHERE app = $1 AND tier = $2) \
         SELECT (SELECT count(*) FROM tierline.ready WHERE backlog = (SELECT id FROM tier)), \
            (SELECT count(*) FROM tierline.parked WHERE backlog = (SELECT id FROM tier)), \
            (SELECT count(*) FROM tierline.scheduled WHERE backlog = (SELECT id FROM tier)), \
            (SELECT count(*) FROM tierline.running WHERE backlog = (SELECT id FROM tier))",
    )
    .bind(app)
    .bind(tier)
    .fetch_one(database.pool());
    let tried = "count the tasks of a tier in Postgres";
    let (ready, parked, scheduled, running) =
        database.within(STATEMENT_LIMIT, tried, counting).await?;
    let number = |count: i64| u64::try_from(count).unwrap_or_default();
    Ok(RowCounts {
        ready: number(ready),
        parked: number(parked),
        scheduled: number(scheduled),
        running: number(running),
    })
}

/// Which tasks may not start as they come.
#[derive(Debug)]
pub(crate) struct HeldBack<'a> {
    /// None of these starts.
    pub(crate) paused: Vec<&'a str>,
    /// These have a limit.
    pub(crate) limited: Vec<&'a str>,
}

/// How many rows of a tier slots could run.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Startable {
    pub(crate) count: u64,
    /// Whether more may wait behind the rows that were looked at.
    pub(crate) may_be_more: bool,
}

/// Counts the rows of tiers that slots could run. Those are the ready ones and those that are parked, but for paused tasks; of
/// a task with a limit, one for each lane, whatever number of its tasks waits there. It looks at `most` rows of either kind,
/// so that a deep backlog costs no more than that. If no other task is among them, one counts: it may wait behind them, and
/// without a worker nobody parks the paused ones.
pub(crate) async fn count_startable(
    database: &Database,
    app: &str,
    tiers: &[&str],
    held_back: &HeldBack<'_>,
    most: u64,
    limit: Duration,
) -> Result<HashMap<String, Startable>, Error> {
    // For index scans, whatever the statistics say.
    let mut connection = super::connection(database);
    let counting = connection.within(limit, "count tasks that could start", async |connection| {
        let is_migrated: bool =
            sqlx::query_scalar("SELECT to_regclass('tierline.ready') IS NOT NULL")
                .fetch_one(&mut *connection)
                .await?;
        if !is_migrated {
            return Ok(Vec::new());
        }
        sqlx::query_as::<_, (String, i64, bool)>(
            "WITH RECURSIVE known AS ( \
                SELECT backlogs.id AS backlog, first.task FROM tierline.backlogs CROSS JOIN LATERAL ( \
                    SELECT task FROM tierline.lanes WHERE backlog = backlogs.id AND rank IS NOT NULL \
                    ORDER BY task, rank, turn, id LIMIT 1 \
                ) AS first WHERE app = $1 AND tier = ANY($2) \
                UNION ALL \
                SELECT known.backlog, next.task FROM known CROSS JOIN LATERAL ( \
                    SELECT task FROM tierline.lanes WHERE backlog = known.backlog AND task > known.task \
                        AND rank IS NOT NULL ORDER BY task, rank, turn, id LIMIT 1 \
                ) AS next \
             ) \
             SELECT tier, ready.count + parked.count, ready.looked_at >= $3 OR parked.looked_at >= $3 \
             FROM tierline.backlogs CROSS JOIN LATERAL ( \
                SELECT count(*) AS looked_at, count(*) FILTER (WHERE task <> ALL($4)) AS count FROM ( \
                    SELECT task FROM tierline.ready WHERE backlog = backlogs.id ORDER BY rank, due_at, id LIMIT $3 \
                ) AS first \
             ) AS ready CROSS JOIN LATERAL ( \
                SELECT count(*) AS looked_at, count(*) FILTER (WHERE task <> ALL($4)) AS count FROM ( \
                    SELECT row.task FROM known CROSS JOIN LATERAL ( \
                        SELECT id FROM tierline.lanes \
                        WHERE backlog = known.backlog AND task = known.task AND rank IS NOT NULL \
                        ORDER BY rank, turn, id LIMIT $3 \
                    ) AS lane CROSS JOIN LATERAL ( \
                        SELECT task FROM tierline.parked WHERE parked.lane = lane.id AND rank <= 0 ORDER BY rank, due_at, id \
                        LIMIT CASE WHEN known.task = ANY($5) THEN 1 ELSE $3 END \
                    ) AS row WHERE known.backlog = backlogs.id AND known.task <> ALL($4) LIMIT $3 \
                ) AS first \
             ) AS parked WHERE app = $1 AND tier = ANY($2)",
        )
        .bind(app)
        .bind(tiers)
        .bind(i64::try_from(most).unwrap_or(i64::MAX))
        .bind(&held_back.paused)
        .bind(&held_back.limited)
        .fetch_all(connection)
        .await
    });
    let counts = counting.await?.into_iter();
    Ok(counts
        .map(|(tier, count, may_be_more)| {
            let count = u64::try_from(count).unwrap_or_default();
            let count = count.max(may_be_more.into());
            (tier, Startable { count, may_be_more })
        })
        .collect())
}

/// How many of some tasks a tier has, as far as its first rows were looked at.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TasksLeft {
    /// How many wait.
    pub(crate) waiting: u64,
    /// Whether more may wait behind the rows that were looked at.
    pub(crate) may_be_more: bool,
    /// How many processes have claimed.
    pub(crate) claimed: u64,
}

/// Counts the tasks of these names among the first rows of a tier, and those that processes have claimed.
pub(crate) async fn count_tasks_left(
    database: &Database,
    app: &str,
    tier: &str,
    tasks: &[&str],
) -> Result<TasksLeft, Error> {
    // For index scans, whatever the statistics say.
    let mut connection = super::connection(database);
    let counting = connection.within(STATEMENT_LIMIT, "count the tasks that stay in a tier", {
        async |connection| {
            sqlx::query_as::<_, (i64, bool, i64)>(
                "WITH tier AS MATERIALIZED (SELECT id FROM tierline.backlogs WHERE app = $1 AND tier = $2), \
                 looked_at AS MATERIALIZED ( \
                    (SELECT 'ready' AS phase, task FROM tierline.ready WHERE backlog = (SELECT id FROM tier) \
                     ORDER BY rank, due_at, id LIMIT $4) \
                    UNION ALL (SELECT 'scheduled', task FROM tierline.scheduled WHERE backlog = (SELECT id FROM tier) \
                     ORDER BY due_at, id LIMIT $4) \
                    UNION ALL (SELECT 'parked', task FROM tierline.parked WHERE backlog = (SELECT id FROM tier) \
                     ORDER BY rank, due_at, id LIMIT $4) \
                 ) SELECT (SELECT count(*) FROM looked_at WHERE task = ANY($3)), \
                    EXISTS (SELECT FROM looked_at GROUP BY phase HAVING count(*) >= $4), \
                    (SELECT count(*) FROM tierline.running WHERE backlog = (SELECT id FROM tier) AND task = ANY($3))",
            )
            .bind(app)
            .bind(tier)
            .bind(tasks)
            .bind(MOST_LOOKED_AT)
            .fetch_one(connection)
            .await
        }
    });
    let (waiting, may_be_more, claimed) = counting.await?;
    Ok(TasksLeft {
        waiting: waiting.unsigned_abs(),
        may_be_more,
        claimed: claimed.unsigned_abs(),
    })
}
