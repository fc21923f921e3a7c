//! Counts the rows of tiers.

use std::collections::HashMap;
use std::time::Duration;

use crate::Error;
use crate::postgres::{Database, STATEMENT_LIMIT};

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

/// Counts the rows of tiers that slots could run, each up to `most`, so that a deep backlog costs no more than that. Those
/// are the ready ones; of a tier in `fair` also those that wait for the turn of their key; and one for each key that has
/// a limit, whatever number of its tasks waits.
pub(crate) async fn count_startable(
    database: &Database,
    app: &str,
    tiers: &[&str],
    fair: &[&str],
    most: u64,
    limit: Duration,
) -> Result<HashMap<String, u64>, Error> {
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
        sqlx::query_as::<_, (String, i64)>(
            "SELECT tier, (SELECT count(*) FROM ( \
                (SELECT FROM tierline.ready WHERE backlog = backlogs.id ORDER BY rank, due_at, id LIMIT $3) \
                UNION ALL (SELECT FROM tierline.parked WHERE backlog = backlogs.id AND tier = ANY($4) \
                    ORDER BY rank, due_at, id LIMIT $3) \
                UNION ALL (SELECT FROM tierline.lanes WHERE backlog = backlogs.id AND tier <> ALL($4) \
                    AND rank IS NOT NULL AND key <> '' ORDER BY task, rank, turn, id LIMIT $3) LIMIT $3) AS first) \
             FROM tierline.backlogs WHERE app = $1 AND tier = ANY($2)",
        )
        .bind(app)
        .bind(tiers)
        .bind(i64::try_from(most).unwrap_or(i64::MAX))
        .bind(fair)
        .fetch_all(connection)
        .await
    });
    let counts = counting.await?.into_iter();
    Ok(counts
        .map(|(tier, count)| (tier, u64::try_from(count).unwrap_or_default()))
        .collect())
}
