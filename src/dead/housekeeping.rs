//! Housekeeping beside the collector: old rows go, growth is watched, kept counts are folded.

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime};

use sqlx::Row;
use tokio::time::{MissedTickBehavior, interval};

use crate::Error;
use crate::database::{Database, STATEMENT_LIMIT, Time};
use crate::observe::{Event, Observers};
use crate::topology::Topology;

/// How long rows are kept unless told otherwise.
pub const DEFAULT_RETENTION: Duration = Duration::from_secs(30 * 86_400);
/// How many old rows go in one statement: few enough that nobody waits for them.
const BATCH: i64 = 1_000;
const EVERY: Duration = Duration::from_secs(30);

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
    /// Goes on for ever. What fails is tried again the next time.
    pub(super) async fn run(&self, database: Database, topology: Topology, observers: Observers) {
        let mut told = BTreeMap::new();
        let mut ticks = interval(self.every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let app = topology.app();
            if let Some(retention) = self.retention
                && let Err(error) = expire(&database, app, retention).await
            {
                tracing::debug!(%error, "old dead letters stay for now");
            }
            if let Err(error) = fold_counts(&database).await {
                tracing::debug!(%error, "counts of dead letters are not folded for now");
            }
            if let Err(error) = self
                .watch(&database, &topology, &observers, &mut told)
                .await
            {
                tracing::debug!(%error, "the growth of dead letters is not watched for now");
            }
        }
    }

    /// Says which tiers grow too fast; each at most once in its span of time.
    async fn watch(
        &self,
        database: &Database,
        topology: &Topology,
        observers: &Observers,
        told: &mut BTreeMap<String, Instant>,
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
            let is_news = |at: &Instant| at.elapsed() >= limit.within;
            if !told.get(&tier.name).is_none_or(is_news) {
                continue;
            }
            let count = died_within(database, topology.app(), &tier.name, limit.within).await?;
            if count > limit.count {
                told.insert(tier.name.clone(), Instant::now());
                observers.tell(&Event::DeadLettersGrow {
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

async fn died_within(
    database: &Database,
    app: &str,
    tier: &str,
    within: Duration,
) -> Result<u64, Error> {
    let since = SystemTime::now()
        .checked_sub(within)
        .unwrap_or(SystemTime::UNIX_EPOCH);
    let counting = sqlx::query_scalar(
        "SELECT count(*) FROM tierline.dead_letters WHERE app = $1 AND tier = $2 AND died_at >= $3",
    )
    .bind(app)
    .bind(tier)
    .bind(Time(since))
    .fetch_one(database.pool());
    let tried = "count new dead letters";
    let count: i64 = database.within(STATEMENT_LIMIT, tried, counting).await?;
    Ok(count.unsigned_abs())
}

/// Removes rows that died longer ago than `keep`, in small batches. Rows that are being redriven
/// stay. Answers how many went.
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
             WHERE app = $1 AND died_at < $2 AND state <> 'redriving' \
             ORDER BY died_at LIMIT $3 FOR UPDATE SKIP LOCKED)",
        )
        .bind(app)
        .bind(Time(before))
        .bind(BATCH)
        .execute(database.pool());
        let tried = "remove old dead letters";
        let deleted = database.within(STATEMENT_LIMIT, tried, deleting).await?;
        gone += deleted.rows_affected();
        if deleted.rows_affected() < BATCH.unsigned_abs() {
            return Ok(gone);
        }
        tokio::task::yield_now().await;
    }
}

/// Adds up changes that are many. Whoever reads meanwhile sees the old ones or the sum.
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
