//! Housekeeping beside the collector: deletes old rows, checks growth, folds the maintained counts.

use std::time::{Duration, SystemTime};

use sqlx::Row;
use tokio::time::{MissedTickBehavior, interval};

use crate::Error;
use crate::observe::{Event, Observers};
use crate::postgres::{Database, STATEMENT_LIMIT, Time};
use crate::topology::Topology;

/// How long rows are kept by default.
pub const DEFAULT_RETENTION: Duration = Duration::from_secs(30 * 86_400);
/// How many old rows one statement deletes: few enough that no other statement waits for long.
const BATCH: i64 = 1_000;
const EVERY: Duration = Duration::from_secs(30);
/// A longer duration would exceed the range of Postgres' times.
const LONGEST_SPAN: Duration = Duration::from_secs(100 * 365 * 86_400);

#[derive(Debug, Clone)]
pub(super) struct Housekeeping {
    /// `None`: for ever.
    pub(super) retention: Option<Duration>,
    pub(super) growth: Vec<Growth>,
    pub(super) every: Duration,
}

/// How fast a tier may grow.
#[derive(Debug, Clone)]
pub(super) struct Growth {
    /// `None`: every tier that has no limit of its own.
    pub(super) tier: Option<String>,
    pub(super) count: u64,
    pub(super) within: Duration,
}

impl Default for Housekeeping {
    fn default() -> Self {
        Self {
            retention: Some(DEFAULT_RETENTION),
            growth: Vec::new(),
            every: EVERY,
        }
    }
}

impl Housekeeping {
    /// Runs for ever. A step that fails is tried again the next time.
    pub(super) async fn run(&self, database: Database, topology: Topology, observers: Observers) {
        let mut ticks = interval(self.every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let app = topology.app();
            if let Some(retention) = self.retention
                && let Err(error) = expire(&database, app, retention).await
            {
                tracing::debug!(%error, "cannot delete old dead letters; trying again later");
            }
            if let Err(error) = fold_counts(&database).await {
                tracing::debug!(%error, "cannot fold the counts of dead letters; trying again later");
            }
            if let Err(error) = self.watch(&database, &topology, &observers).await {
                tracing::debug!(%error, "cannot check the growth of dead letters; trying again later");
            }
        }
    }

    /// Emits an event for each tier that grows too fast: one within its time, for all collectors of the
    /// app.
    async fn watch(
        &self,
        database: &Database,
        topology: &Topology,
        observers: &Observers,
    ) -> Result<(), Error> {
        for tier in topology.tiers() {
            let own = self
                .growth
                .iter()
                .rfind(|growth| growth.tier.as_ref() == Some(&tier.name));
            let of_all = || self.growth.iter().rfind(|growth| growth.tier.is_none());
            let Some(limit) = own.or_else(of_all) else {
                continue;
            };
            let alert = raise_alert(database, topology.app(), &tier.name, limit);
            if let Some(count) = alert.await? {
                observers.emit(&Event::DeadLettersGrow {
                    tier: &tier.name,
                    count,
                    within: limit.within,
                });
                tracing::warn!(tier = tier.name, count, within = ?limit.within, "dead letters grow");
            }
        }
        Ok(())
    }
}

/// Records an alert if more messages of a tier died than its limit allows, and returns how many. `None` if
/// fewer died, or if any collector raised an alert within the time.
async fn raise_alert(
    database: &Database,
    app: &str,
    tier: &str,
    limit: &Growth,
) -> Result<Option<u64>, Error> {
    let since = SystemTime::now()
        .checked_sub(limit.within)
        .unwrap_or(SystemTime::UNIX_EPOCH);
    // Postgres checks the condition of an update again under the row's lock, so one of two simultaneous
    // collectors sees the other's alert. Rows are counted only if there is none.
    let raising = sqlx::query_scalar(
        "INSERT INTO tierline.dead_letter_alerts AS alert (app, tier, raised_at, count) \
         SELECT $1, $2, now(), died.count FROM (SELECT count(*) FROM tierline.dead_letters \
             WHERE app = $1 AND tier = $2 AND died_at >= $3 \
             AND NOT EXISTS (SELECT FROM tierline.dead_letter_alerts WHERE app = $1 AND tier = $2 \
                 AND raised_at > now() - make_interval(secs => $5))) AS died (count) \
         WHERE died.count > $4 \
         ON CONFLICT (app, tier) DO UPDATE SET raised_at = now(), count = excluded.count \
             WHERE alert.raised_at <= now() - make_interval(secs => $5) \
         RETURNING count",
    )
    .bind(app)
    .bind(tier)
    .bind(Time(since))
    .bind(i64::try_from(limit.count).unwrap_or(i64::MAX))
    .bind(limit.within.min(LONGEST_SPAN).as_secs_f64())
    .fetch_optional(database.pool());
    let tried = "check the growth of dead letters";
    let count: Option<i64> = database.within(STATEMENT_LIMIT, tried, raising).await?;
    Ok(count.map(i64::unsigned_abs))
}

/// Deletes rows that died, and were logged, longer ago than `keep`, in small batches. Rows that are being
/// redriven stay. Returns how many were deleted.
///
/// A message may have waited long in its queue, and its time of death may be wrong: with the time of death
/// alone, a row could be deleted before an operator saw it.
///
/// # Errors
/// As every use of the database.
pub(super) async fn expire(database: &Database, app: &str, keep: Duration) -> Result<u64, Error> {
    let Some(before) = SystemTime::now().checked_sub(keep) else {
        return Ok(0);
    };
    let mut gone = 0;
    loop {
        let deleting = sqlx::query(
            "DELETE FROM tierline.dead_letters WHERE id IN (SELECT id FROM tierline.dead_letters \
             WHERE app = $1 AND died_at < $2 AND collected_at < $2 AND state <> 'redriving' \
             ORDER BY died_at LIMIT $3 FOR UPDATE SKIP LOCKED)",
        )
        .bind(app)
        .bind(Time(before))
        .bind(BATCH)
        .execute(database.pool());
        let tried = "delete old dead letters";
        let deleted = database.within(STATEMENT_LIMIT, tried, deleting).await?;
        gone += deleted.rows_affected();
        if deleted.rows_affected() < BATCH.unsigned_abs() {
            return Ok(gone);
        }
        tokio::task::yield_now().await;
    }
}

/// Sums up the changes when there are many. Concurrent readers see the changes or the sum.
pub(super) async fn fold_counts(database: &Database) -> Result<(), Error> {
    const MANY: i64 = 200;
    let folding = async {
        let count: i64 = sqlx::query("SELECT count(*) FROM tierline.dead_letter_counts")
            .fetch_one(database.pool())
            .await?
            .get(0);
        if count >= MANY {
            sqlx::query(
                "WITH taken AS (DELETE FROM tierline.dead_letter_counts WHERE ctid = ANY(ARRAY( \
                     SELECT ctid FROM tierline.dead_letter_counts FOR UPDATE SKIP LOCKED)) \
                     RETURNING app, tier, state, change) \
                 INSERT INTO tierline.dead_letter_counts \
                     SELECT app, tier, state, sum(change) FROM taken GROUP BY app, tier, state \
                     HAVING sum(change) <> 0",
            )
            .execute(database.pool())
            .await?;
        }
        Ok(())
    };
    let tried = "fold the counts of dead letters";
    database.within(STATEMENT_LIMIT, tried, folding).await
}
