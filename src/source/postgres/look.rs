//! Looks at all tiers of a worker at once, every second: which have tasks that are ready, and when the next one falls due.
//!
//! This is the net under notifications. It also finds what claims do not see, because they begin where rows were last
//! seen: tasks whose transaction committed late, that were given back, or that another process made ready. It changes
//! nothing, and reads no more than a row of each priority: a tier with many due tasks holds up no other.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use sqlx::Row;
use sqlx::postgres::PgRow;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::RowSettings;
use crate::Error;
use crate::backlog::{OpenLanes, connection, open_lanes};
use crate::backoff::Backoff;
use crate::error::DatabaseError;
use crate::postgres::{PgConnection, Time};

/// How often to look although nothing asks for it.
const EVERY: Duration = Duration::from_secs(1);
/// The shortest pause between two looks.
const SHORTEST: Duration = Duration::from_millis(2);
/// How long a look may take.
const LIMIT: Duration = Duration::from_secs(10);

/// What a look found in a tier.
#[derive(Default)]
struct Found {
    /// The first ready row of each rank that has any, by its due time.
    starts: Vec<(i16, SystemTime)>,
    /// How long until the first scheduled task falls due.
    next_due: Option<Duration>,
    /// The lanes in which tasks wait.
    lanes: Vec<OpenLanes>,
}

pub(super) async fn run(settings: Arc<RowSettings>, ending: CancellationToken) {
    let mut connection = connection(&settings.database);
    let tiers: Vec<&str> = settings.tiers.keys().map(String::as_str).collect();
    let mut backoff = Backoff::new();
    let looking = async {
        loop {
            let app = settings.app();
            let asking = connection.within(LIMIT, "look for ready tasks", async |connection| {
                look(connection, app, &tiers).await
            });
            let pause = match asking.await {
                Ok(found) => {
                    backoff = Backoff::new();
                    wake_sources(&settings, found);
                    EVERY
                }
                Err(error) => {
                    // Without a tier in Postgres nothing depends on rows.
                    let is_needed = settings.has_home() || !is_not_migrated(&error);
                    match backoff.is_worth_a_warning() && is_needed {
                        true => tracing::warn!(%error, "cannot look for ready tasks, trying again"),
                        false => {
                            tracing::debug!(%error, "cannot look for ready tasks, trying again")
                        }
                    }
                    backoff.next()
                }
            };
            tokio::select! {
                () = sleep(pause) => {}
                () = settings.look_now.notified() => sleep(SHORTEST).await,
            }
        }
    };
    let _: Option<()> = ending.run_until_cancelled(looking).await;
}

pub(super) fn is_not_migrated(error: &Error) -> bool {
    matches!(error, Error::Database(DatabaseError::NotMigrated { .. }))
}

async fn look(
    connection: &mut PgConnection<'_>,
    app: &str,
    tiers: &[&str],
) -> Result<HashMap<String, Found>, sqlx::Error> {
    let rows = sqlx::query(
        "SELECT of.tier, NULL::smallint AS rank, NULL::timestamptz AS first, \
            (SELECT extract(epoch FROM due_at - now())::float8 FROM tierline.scheduled \
             WHERE backlog = of.id ORDER BY due_at, id LIMIT 1) AS next_due \
         FROM tierline.backlogs AS of WHERE of.app = $1 AND of.tier = ANY($2) \
         UNION ALL \
         SELECT of.tier, first.rank, first.due_at, NULL FROM tierline.backlogs AS of \
         CROSS JOIN LATERAL ( \
            WITH RECURSIVE first AS ( \
                (SELECT rank, due_at FROM tierline.ready WHERE backlog = of.id \
                 ORDER BY rank, due_at, id LIMIT 1) \
                UNION ALL \
                SELECT next.rank, next.due_at FROM first CROSS JOIN LATERAL ( \
                    SELECT rank, due_at FROM tierline.ready \
                    WHERE backlog = of.id AND rank > first.rank ORDER BY rank, due_at, id LIMIT 1 \
                ) AS next \
            ) SELECT rank, due_at FROM first \
         ) AS first WHERE of.app = $1 AND of.tier = ANY($2)",
    )
    .bind(app)
    .bind(tiers)
    .fetch_all(&mut *connection)
    .await?;
    let mut found: HashMap<String, Found> = HashMap::new();
    for row in &rows {
        read(row, found.entry(row.try_get("tier")?).or_default())?;
    }
    for (tier, lanes) in open_lanes(connection, app, tiers).await? {
        found.entry(tier).or_default().lanes.push(lanes);
    }
    Ok(found)
}

fn read(row: &PgRow, found: &mut Found) -> Result<(), sqlx::Error> {
    let (rank, first) = (row.try_get("rank")?, row.try_get("first")?);
    if let (Some(rank), Some(Time(first))) = (rank, first) {
        found.starts.push((rank, first));
    }
    let next_due: Option<f64> = row.try_get("next_due")?;
    if let Some(next_due) = next_due {
        found.next_due = Duration::try_from_secs_f64(next_due.max(0.0)).ok();
    }
    Ok(())
}

/// Tells the sources what is ready, and when more will be.
fn wake_sources(settings: &RowSettings, found: HashMap<String, Found>) {
    let now = Instant::now();
    for (tier, found) in found {
        let Some(signal) = settings.signal(&tier) else {
            continue;
        };
        let next_due = found.next_due.and_then(|after| now.checked_add(after));
        if found.starts.is_empty() && next_due.is_none() && found.lanes.is_empty() {
            continue;
        }
        signal.change(|state| {
            state.lanes = Some(found.lanes);
            state.found_ready(&found.starts);
            state.falls_due(next_due);
        });
    }
}
