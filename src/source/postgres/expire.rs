//! Dead-letters tasks that have waited for longer than their tier's `ttl`, whether a claim would come to them or not.
//!
//! A claim notices an expired task when it takes it. Tasks behind a busy backlog, or of a low priority, would wait on and
//! count for `max_length`. Here they are found in the order of the index of claims, rank by rank, up to the first that is
//! not expired.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use sqlx::Row;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::RowSettings;
use super::look::is_not_migrated;
use super::settle::waited_too_long;
use crate::Error;
use crate::backlog::{ClaimedRow, connection, lock_lanes_of, place_lanes};
use crate::backoff::Backoff;
use crate::dead::{Entry, insert_entries};
use crate::error::DatabaseError;
use crate::message::{DeadReason, Death, Received};
use crate::postgres::{DedicatedConnection, PgConnection};
use crate::source::emit_dead;

/// How many times to look within the shortest `ttl`.
const LOOKS: u32 = 10;
/// The pauses between two looks that find nothing.
const SHORTEST: Duration = Duration::from_secs(2);
const LONGEST: Duration = Duration::from_secs(60);
/// The pause between two batches: claims and publishes come between them.
const PAUSE: Duration = Duration::from_millis(20);
/// How many tasks one transaction takes, and how many bytes, about.
const AT_ONCE: i64 = 100;
const BYTES_AT_ONCE: i64 = 1 << 20;
/// How many expired tasks of each rank one look goes through while some tasks are paused: those expire later.
const LOOKED_AT: i64 = 2_000;
/// How often Postgres may refuse a dead letter before nothing is left to leave out of it.
const MOST_REDUCTIONS: u32 = 3;
/// How long a step may take.
const LIMIT: Duration = Duration::from_secs(10);

/// Where tasks wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Waiting {
    Ready,
    /// A limit holds them back, or they wait for the turn of their key.
    Parked,
}

pub(super) async fn run(settings: Arc<RowSettings>, ending: CancellationToken) {
    let topology = &settings.consumer.topology;
    let tiers: Vec<(&str, Duration)> = settings
        .tiers
        .keys()
        .filter_map(|name| Some((name.as_str(), topology.tier(name)?.ttl?)))
        .collect();
    let Some(shortest) = tiers.iter().map(|(_, ttl)| *ttl).min() else {
        return;
    };
    let every = (shortest / LOOKS).clamp(SHORTEST, LONGEST);
    let mut connection = connection(&settings.database);
    let mut backoff = Backoff::new();
    let expiring = async {
        loop {
            let pause = match settings.expire_all(&mut connection, &tiers).await {
                Ok(0) => every,
                Ok(_) => PAUSE,
                Err(error) => {
                    match backoff.is_worth_a_warning() && !is_not_migrated(&error) {
                        true => {
                            tracing::warn!(%error, "cannot dead-letter expired tasks, trying again")
                        }
                        false => {
                            tracing::debug!(%error, "cannot dead-letter expired tasks, trying again")
                        }
                    }
                    every
                }
            };
            sleep(pause).await;
        }
    };
    let _: Option<()> = ending.run_until_cancelled(expiring).await;
}

impl RowSettings {
    /// Dead-letters some expired tasks of each tier. Returns how many.
    async fn expire_all(
        &self,
        connection: &mut DedicatedConnection,
        tiers: &[(&str, Duration)],
    ) -> Result<usize, Error> {
        // Nothing that is paused is a dead letter.
        let tiers = tiers.iter();
        let tiers = tiers.filter_map(|(tier, ttl)| Some((*tier, self.waiting_time(tier, *ttl)?)));
        let tiers: Vec<(&str, Duration)> = tiers.collect();
        let (mut count, mut failed) = (0, None);
        for waiting in [Waiting::Ready, Waiting::Parked] {
            let looking = connection.within(LIMIT, "look for expired tasks", async |connection| {
                expired_tiers(connection, waiting, self.app(), &tiers).await
            });
            let expired = looking.await?;
            for (tier, ttl) in &tiers {
                if expired.iter().any(|it| it == tier) {
                    // A tier that fails keeps no other one waiting.
                    match self.expire_some(connection, waiting, tier, *ttl).await {
                        Ok(more) => count += more,
                        Err(error) => failed = failed.or(Some(error)),
                    }
                }
            }
        }
        failed.map_or(Ok(count), Err)
    }

    async fn expire_some(
        &self,
        connection: &mut DedicatedConnection,
        waiting: Waiting,
        tier: &str,
        ttl: Duration,
    ) -> Result<usize, Error> {
        match self
            .expire(connection, waiting, tier, ttl, AT_ONCE, 0)
            .await
        {
            Err(Error::Database(DatabaseError::Refused { .. })) => {}
            expired => return expired,
        }
        // Postgres refuses one of them: each by itself then, with less and less in it.
        let (mut count, mut reductions) = (0, 0);
        while count < AT_ONCE as usize {
            match self
                .expire(connection, waiting, tier, ttl, 1, reductions)
                .await
            {
                Ok(0) => break,
                Ok(more) => {
                    count += more;
                    reductions = 0;
                }
                Err(Error::Database(DatabaseError::Refused { cause, .. }))
                    if reductions < MOST_REDUCTIONS =>
                {
                    tracing::warn!(%cause, "Postgres refuses a dead letter; writing it with less in it");
                    reductions += 1;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(count)
    }

    /// Moves at most `rows` expired tasks of a tier to the log of dead letters, in one transaction. Returns how many.
    async fn expire(
        &self,
        connection: &mut DedicatedConnection,
        waiting: Waiting,
        tier: &str,
        ttl: Duration,
        rows: i64,
        reductions: u32,
    ) -> Result<usize, Error> {
        let death = self.death(DeadReason::Expired, waited_too_long());
        let controls = self.consumer.controls.now();
        let paused: Vec<&str> = controls.paused_tasks().collect();
        let expiring = connection.within(LIMIT, "dead-letter expired tasks", async |connection| {
            let mut transaction = connection.begin().await?;
            let known = (self.app(), tier, ttl);
            let found = find_expired(&mut transaction, waiting, known, &paused, rows).await?;
            // Whoever moves tasks of a lane locks the lane first.
            let lanes = match waiting {
                Waiting::Ready => Vec::new(),
                Waiting::Parked => lock_lanes_of(&mut transaction, &found).await?,
            };
            let mut expired = lock_expired(&mut transaction, waiting, known, &found).await?;
            expired.retain(|it| it.row.is_expired);
            let ids: Vec<Uuid> = expired.iter().map(|it| it.id).collect();
            let name = tier.into();
            let now = SystemTime::now();
            let received: Vec<Received> = expired
                .into_iter()
                .filter(|it| !it.is_running)
                .map(|it| it.row.into_received(&name, now))
                .collect();
            let entries = received
                .iter()
                .map(|it| self.reduced(it, &death, reductions));
            let entries: Vec<Entry> = entries.collect();
            if !ids.is_empty() {
                insert_entries(&mut transaction, self.app(), &entries).await?;
                delete(&mut transaction, waiting, &ids).await?;
                place_lanes(&mut transaction, &lanes).await?;
            }
            transaction.commit().await?;
            Ok((ids.len(), received))
        });
        let (count, received) = expiring.await?;
        for received in &received {
            emit_dead(&self.consumer.observers, received, tier, &death);
        }
        Ok(count)
    }

    fn reduced(&self, received: &Received, death: &Death, reductions: u32) -> Entry {
        let mut entry = self.entry(received, received.message().ok(), death);
        for _ in 0..reductions {
            entry.reduce();
        }
        entry
    }
}

macro_rules! expired_tiers {
    ($table:literal) => {
        concat!(
            "SELECT of.tier FROM unnest($2::text[], $3::float8[]) AS wanted (tier, ttl) \
         JOIN tierline.backlogs AS of ON of.app = $1 AND of.tier = wanted.tier \
         WHERE EXISTS ( \
            WITH RECURSIVE first AS ( \
                (SELECT rank, due_at FROM tierline.",
            $table,
            " WHERE backlog = of.id AND rank <= 0 \
                 ORDER BY rank, due_at, id LIMIT 1) \
                UNION ALL \
                SELECT next.rank, next.due_at FROM first CROSS JOIN LATERAL ( \
                    SELECT rank, due_at FROM tierline.",
            $table,
            " \
                    WHERE backlog = of.id AND rank > first.rank AND rank <= 0 ORDER BY rank, due_at, id LIMIT 1 \
                ) AS next \
            ) SELECT FROM first WHERE due_at < now() - make_interval(secs => wanted.ttl))"
        )
    };
}

/// The tiers whose first task of any rank is expired.
async fn expired_tiers(
    connection: &mut PgConnection<'_>,
    waiting: Waiting,
    app: &str,
    tiers: &[(&str, Duration)],
) -> Result<Vec<String>, sqlx::Error> {
    let names: Vec<&str> = tiers.iter().map(|(tier, _)| *tier).collect();
    let ttls: Vec<f64> = tiers.iter().map(|(_, ttl)| ttl.as_secs_f64()).collect();
    sqlx::query_scalar(match waiting {
        Waiting::Ready => expired_tiers!("ready"),
        Waiting::Parked => expired_tiers!("parked"),
    })
    .bind(app)
    .bind(names)
    .bind(ttls)
    .fetch_all(connection)
    .await
}

/// A task that has waited for too long.
struct ExpiredRow {
    id: Uuid,
    row: ClaimedRow,
    /// Whether the same task runs already: its publish got no answer and was repeated.
    is_running: bool,
}

macro_rules! find_expired {
    ($table:literal) => {
        concat!(
            "WITH RECURSIVE of AS MATERIALIZED (SELECT id FROM tierline.backlogs WHERE app = $1 AND tier = $2), ranks AS ( \
            (SELECT rank FROM tierline.",
            $table,
            " WHERE backlog = (SELECT id FROM of) AND rank <= 0 \
             ORDER BY rank, due_at, id LIMIT 1) \
            UNION ALL \
            SELECT next.rank FROM ranks CROSS JOIN LATERAL ( \
                SELECT rank FROM tierline.",
            $table,
            " \
                WHERE backlog = (SELECT id FROM of) AND rank > ranks.rank AND rank <= 0 \
                ORDER BY rank, due_at, id LIMIT 1 \
            ) AS next \
         ) SELECT id FROM ( \
            SELECT id, sum(size) OVER (ORDER BY rank, due_at, id) - size AS before FROM ( \
                SELECT near.* FROM ranks CROSS JOIN LATERAL ( \
                    SELECT id, rank, due_at, task, octet_length(payload) + coalesce(octet_length(properties), 0) AS size \
                    FROM tierline.",
            $table,
            " \
                    WHERE backlog = (SELECT id FROM of) AND rank = ranks.rank \
                        AND due_at < now() - make_interval(secs => $3) \
                    ORDER BY due_at, id LIMIT $6 \
                ) AS near WHERE near.task <> ALL($7) LIMIT $4 \
            ) AS found \
         ) AS found WHERE before < $5"
        )
    };
}

/// Finds some expired tasks of a tier that are not `paused`. Suspects (ranks above 0) wait for their turn without a limit, as
/// in claims.
async fn find_expired(
    connection: &mut PgConnection<'_>,
    waiting: Waiting,
    (app, tier, ttl): (&str, &str, Duration),
    paused: &[&str],
    rows: i64,
) -> Result<Vec<Uuid>, sqlx::Error> {
    let looked_at = match paused.is_empty() {
        true => rows,
        false => LOOKED_AT,
    };
    sqlx::query_scalar(match waiting {
        Waiting::Ready => find_expired!("ready"),
        Waiting::Parked => find_expired!("parked"),
    })
    .bind(app)
    .bind(tier)
    .bind(ttl.as_secs_f64())
    .bind(rows)
    .bind(BYTES_AT_ONCE)
    .bind(looked_at)
    .bind(paused)
    .fetch_all(connection)
    .await
}

macro_rules! lock_expired {
    ($table:literal) => {
        concat!(
            "SELECT id, 0::bigint AS token, due_at, rank, is_held, first_backlog, task, name, properties, payload, \
                backlog = (SELECT id FROM tierline.backlogs WHERE app = $1 AND tier = $2) AND rank <= 0 \
                    AND due_at < now() - make_interval(secs => $3) AS is_expired, \
                EXISTS (SELECT FROM tierline.running WHERE running.id = waiting.id) AS is_running \
             FROM tierline.",
            $table,
            " AS waiting WHERE id = ANY($4) ORDER BY id FOR UPDATE OF waiting SKIP LOCKED"
        )
    };
}

/// Locks these tasks. Those that were moved to another tier or postponed since they were found are not expired.
async fn lock_expired(
    connection: &mut PgConnection<'_>,
    waiting: Waiting,
    (app, tier, ttl): (&str, &str, Duration),
    ids: &[Uuid],
) -> Result<Vec<ExpiredRow>, sqlx::Error> {
    let rows = sqlx::query(match waiting {
        Waiting::Ready => lock_expired!("ready"),
        Waiting::Parked => lock_expired!("parked"),
    })
    .bind(app)
    .bind(tier)
    .bind(ttl.as_secs_f64())
    .bind(ids)
    .fetch_all(connection)
    .await?;
    let read = |row| {
        Ok(ExpiredRow {
            id: Row::try_get(row, "id")?,
            row: ClaimedRow::read(row)?,
            is_running: Row::try_get(row, "is_running")?,
        })
    };
    rows.iter().map(read).collect()
}

async fn delete(
    connection: &mut PgConnection<'_>,
    waiting: Waiting,
    ids: &[Uuid],
) -> Result<(), sqlx::Error> {
    sqlx::query(match waiting {
        Waiting::Ready => "DELETE FROM tierline.ready WHERE id = ANY($1)",
        Waiting::Parked => "DELETE FROM tierline.parked WHERE id = ANY($1)",
    })
    .bind(ids)
    .execute(connection)
    .await?;
    Ok(())
}
