//! Removes the rows of dead processes, whatever they served: so the list of processes has those that live.
//!
//! A process that shares a tier with a live one is removed when that one takes over what it held (`recover`). This finds
//! the others, in the same way: a heartbeat that has not changed for as long as a live process is silent at most, by the
//! monotonic clock of the process that looks.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use sqlx::Row;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::RowSettings;
use crate::Error;
use crate::control::longest_silence;
use crate::postgres::{PgConnection, STATEMENT_LIMIT, Time};

/// The longest time between two looks.
const EVERY: Duration = Duration::from_secs(30);

/// A row of the table, as it was when it was first seen like this.
struct Seen {
    heartbeat_at: SystemTime,
    since: Instant,
}

pub(super) async fn run(settings: Arc<RowSettings>, ending: CancellationToken) {
    let leases = settings.tiers.values().map(|tier| tier.lease);
    let every = leases.min().unwrap_or(EVERY).min(EVERY);
    let mut seen = HashMap::new();
    let looking = async {
        loop {
            let begin = Instant::now();
            if let Err(error) = look(&settings, &mut seen).await {
                tracing::debug!(%error, "trying again later");
                seen.clear();
            }
            sleep(every).await;
            if begin.elapsed() > every * 2 {
                // This process stood still, and perhaps its whole machine.
                seen.clear();
            }
        }
    };
    let _: Option<()> = ending.run_until_cancelled(looking).await;
}

/// Removes the processes that were silent for too long.
async fn look(settings: &RowSettings, seen: &mut HashMap<i64, Seen>) -> Result<(), Error> {
    let database = &settings.database;
    let reading = sqlx::query(
        "SELECT id, heartbeat_at, groups IS NULL AS is_older, \
            (SELECT min(seconds::float8) FROM jsonb_each_text(leases) AS lease (tier, seconds)) AS lease \
         FROM tierline.workers WHERE app = $1",
    )
    .bind(settings.app())
    .fetch_all(database.pool());
    let tried = "look for dead processes";
    let rows = database.within(STATEMENT_LIMIT, tried, reading).await?;
    let now = Instant::now();
    let (mut known, mut silent) = (HashMap::new(), Vec::new());
    for row in rows {
        let read = || -> Result<_, sqlx::Error> {
            Ok((
                row.try_get("id")?,
                row.try_get("heartbeat_at")?,
                row.try_get("lease")?,
                row.try_get("is_older")?,
            ))
        };
        let (id, Time(heartbeat_at), lease, is_older): (i64, Time, Option<f64>, bool) =
            read().map_err(|error| database.failed(tried, error))?;
        let lease = Duration::try_from_secs_f64(lease.unwrap_or_default()).unwrap_or_default();
        let is_silent = |seen: &Seen| seen.heartbeat_at == heartbeat_at;
        let since = seen
            .get(&id)
            .filter(|it| is_silent(it))
            .map_or(now, |it| it.since);
        known.insert(
            id,
            Seen {
                heartbeat_at,
                since,
            },
        );
        // Two looks at least: what was seen once may have been written a moment ago.
        if since < now && now - since >= longest_silence(lease, is_older) {
            silent.push((id, heartbeat_at));
        }
    }
    *seen = known;
    if silent.is_empty() {
        return Ok(());
    }
    let forgetting = async {
        let mut connection = database.pool().acquire().await?;
        forget(&mut connection, &silent).await
    };
    database
        .within(STATEMENT_LIMIT, "forget dead processes", forgetting)
        .await
}

/// Removes those of these processes, each with its last heartbeat, that are still silent and hold nothing.
pub(super) async fn forget(
    connection: &mut PgConnection<'_>,
    silent: &[(i64, SystemTime)],
) -> Result<(), sqlx::Error> {
    let (ids, heartbeats): (Vec<i64>, Vec<Time>) =
        silent.iter().map(|(id, at)| (*id, Time(*at))).unzip();
    sqlx::query(
        "DELETE FROM tierline.workers USING unnest($1::bigint[], $2::timestamptz[]) AS silent (id, heartbeat_at) \
         WHERE workers.id = silent.id AND workers.heartbeat_at = silent.heartbeat_at \
            AND NOT EXISTS (SELECT FROM tierline.running WHERE worker = workers.id)",
    )
    .bind(ids)
    .bind(heartbeats)
    .execute(connection)
    .await
    .map(drop)
}
