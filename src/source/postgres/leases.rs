//! The leases of a process: one row tells the database that it lives, for everything that it has claimed.
//!
//! A lease is lost when the process could send no heartbeat for most of its length. Then its sources cancel what runs,
//! before another process may take over. A database that was away takes nothing from anybody: see `recover`.
//!
//! A process that is silent for long enough to be taken for dead claims nothing more, also in tiers whose leases go on:
//! others may have removed its row, and would take over at once what it claims without one.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::RowSettings;
use super::look::is_not_migrated;
use crate::Error;
use crate::backlog::{add_backlogs, connection};
use crate::backoff::Backoff;
use crate::control::longest_silence;
use crate::postgres::{DedicatedConnection, PgConnection};

/// How many heartbeats a process sends before it is taken for dead.
const HEARTBEATS: u32 = 3;
/// The longest that a heartbeat may take.
const LONGEST_HEARTBEAT: Duration = Duration::from_secs(5);

pub(super) struct Leases {
    settings: Arc<RowSettings>,
    connection: DedicatedConnection,
    /// This process, as the database knows it.
    worker: Option<i64>,
    /// When the last heartbeat that was answered was sent.
    last_heartbeat: Option<Instant>,
    /// After how long without a heartbeat others take this process for dead.
    longest_silence: Duration,
    backoff: Backoff,
}

impl Leases {
    pub(super) fn new(settings: Arc<RowSettings>) -> Self {
        let leases = settings.tiers.values().map(|tier| tier.lease);
        Self {
            connection: connection(&settings.database),
            worker: None,
            last_heartbeat: None,
            longest_silence: longest_silence(leases.min().unwrap_or_default(), false),
            backoff: Backoff::new(),
            settings,
        }
    }

    pub(super) async fn run(mut self, ending: CancellationToken) {
        loop {
            let pause = match self.heartbeat().await {
                Ok(()) => {
                    self.backoff = Backoff::new();
                    self.longest_silence / HEARTBEATS
                }
                Err(error) => {
                    self.failed(&error);
                    let pause = self.longest_silence / 20;
                    let pause = pause.clamp(Duration::from_millis(50), Duration::from_millis(500));
                    self.until_silent(pause)
                }
            };
            if ending.run_until_cancelled(sleep(pause)).await.is_none() {
                break;
            }
        }
        self.leave().await;
    }

    /// Tells the database that this process lives.
    async fn heartbeat(&mut self) -> Result<(), Error> {
        let sent = Instant::now();
        let limit = match self.worker {
            Some(_) => self.until_silent((self.longest_silence / 6).min(LONGEST_HEARTBEAT)),
            None => LONGEST_HEARTBEAT,
        };
        let gap = match self.worker {
            Some(worker) => {
                let sending = self
                    .connection
                    .within(limit, "extend leases", async |connection| {
                        send_heartbeat(connection, worker).await
                    });
                sending.await?
            }
            None => None,
        };
        let Some(gap) = gap else {
            return self.register(sent).await;
        };
        // The monotonic clock stops while a machine sleeps; that of the database does not.
        let gap = self
            .last_heartbeat
            .map_or(gap, |last_heartbeat| gap.max(sent - last_heartbeat));
        self.lose(|lease| gap >= longest_gap(lease));
        self.alive(sent);
        Ok(())
    }

    /// Makes this process known to the database, under a new number.
    async fn register(&mut self, sent: Instant) -> Result<(), Error> {
        // If it was known before, somebody took it for dead, and everything that it held.
        self.lose(|_| true);
        let settings = &self.settings;
        let registering =
            self.connection
                .within(LONGEST_HEARTBEAT, "register a worker", async |connection| {
                    // Also those that this process does not serve: a task may move there.
                    let tiers = settings.consumer.topology.tiers().iter();
                    let tiers: Vec<&str> = tiers.map(|tier| tier.name.as_str()).collect();
                    add_backlogs(connection, settings.app(), &tiers).await?;
                    register(connection, settings).await
                });
        self.worker = Some(registering.await?);
        self.alive(sent);
        Ok(())
    }

    fn alive(&mut self, sent: Instant) {
        self.last_heartbeat = Some(sent);
        let worker = self.worker;
        for tier in self.settings.tiers.values() {
            tier.signal.change(|state| {
                state.worker = worker;
                state.has_lease = true;
            });
        }
    }

    /// At most this time, and no longer than until others may take this process for dead, which must be noticed before.
    fn until_silent(&self, time: Duration) -> Duration {
        let Some(last_heartbeat) = self.last_heartbeat else {
            return time;
        };
        let silent = last_heartbeat + longest_gap(self.longest_silence);
        match silent.checked_duration_since(Instant::now()) {
            Some(left) if !left.is_zero() => time.min(left),
            _ => time,
        }
    }

    fn failed(&mut self, error: &Error) {
        // Without a tier in Postgres nothing depends on rows.
        let is_needed = self.settings.has_home() || !is_not_migrated(error);
        match self.backoff.is_worth_a_warning() && is_needed {
            true => tracing::warn!(%error, "cannot extend leases, trying again"),
            false => tracing::debug!(%error, "cannot extend leases, trying again"),
        }
        let gap = self
            .last_heartbeat
            .map(|last_heartbeat| last_heartbeat.elapsed());
        if let Some(gap) = gap {
            if gap >= longest_gap(self.longest_silence) {
                self.claim_nothing();
            }
            self.lose(|lease| gap >= longest_gap(lease));
        }
    }

    /// Until the next heartbeat.
    fn claim_nothing(&self) {
        for tier in self.settings.tiers.values() {
            tier.signal.change(|state| state.worker = None);
        }
    }

    /// What was claimed in tiers with these leases is no longer ours.
    fn lose(&self, is_lost: impl Fn(Duration) -> bool) {
        for tier in self.settings.tiers.values() {
            if is_lost(tier.lease) {
                tier.signal.change(|state| {
                    state.worker = None;
                    // Once until the next heartbeat.
                    if std::mem::take(&mut state.has_lease) {
                        state.generation += 1;
                    }
                });
            }
        }
    }

    /// Removes the row of this process, if it holds nothing.
    async fn leave(&mut self) {
        let Some(worker) = self.worker else {
            return;
        };
        let leaving = self
            .connection
            .within(Duration::from_secs(1), "leave", async |connection| {
                sqlx::query(
                    "DELETE FROM tierline.workers WHERE id = $1 \
                     AND NOT EXISTS (SELECT FROM tierline.running WHERE worker = $1)",
                )
                .bind(worker)
                .execute(connection)
                .await
            });
        if let Err(error) = leaving.await {
            tracing::debug!(%error, "a worker's row stays until its lease is over");
        }
    }
}

/// A process whose last heartbeat is older than this cancels what it runs, before another one may take over.
fn longest_gap(lease: Duration) -> Duration {
    lease / 6 * 5
}

/// Returns how long ago the last heartbeat was, by the clock of the database; `None` if the database
/// does not know it any more.
async fn send_heartbeat(
    connection: &mut PgConnection<'_>,
    worker: i64,
) -> Result<Option<Duration>, sqlx::Error> {
    let gap: Option<f64> = sqlx::query_scalar(
        "WITH before AS (SELECT heartbeat_at FROM tierline.workers WHERE id = $1) \
         UPDATE tierline.workers SET heartbeat_at = clock_timestamp() WHERE id = $1 \
         RETURNING extract(epoch FROM clock_timestamp() - (SELECT heartbeat_at FROM before))::float8",
    )
    .bind(worker)
    .fetch_optional(connection)
    .await?;
    Ok(gap.map(|gap| Duration::try_from_secs_f64(gap.max(0.0)).unwrap_or_default()))
}

/// Adds the row of this process. Returns its number.
async fn register(
    connection: &mut PgConnection<'_>,
    settings: &RowSettings,
) -> Result<i64, sqlx::Error> {
    // A database that was migrated by an older release has no place for the groups and tasks of a process. Its rows are
    // worked on all the same.
    let has_description: bool =
        sqlx::query_scalar("SELECT to_regclass('tierline.controls') IS NOT NULL")
            .fetch_one(&mut *connection)
            .await?;
    let statement = match has_description {
        true => {
            "INSERT INTO tierline.workers (app, name, version, leases, is_relay, groups, tasks, timeouts) \
             VALUES ($1, $2, $3, $4::jsonb, $5, $6::jsonb, $7, $8) RETURNING id"
        }
        false => {
            "INSERT INTO tierline.workers (app, name, version, leases, is_relay) \
             SELECT $1, $2, $3, $4::jsonb, $5 WHERE $6::text IS NOT NULL AND $7::text[] IS NOT NULL AND $8::float8[] IS NOT NULL \
             RETURNING id"
        }
    };
    let consumer = &settings.consumer;
    let tiers = settings.tiers.iter();
    let leases: serde_json::Map<String, serde_json::Value> = tiers
        .map(|(name, tier)| (name.clone(), tier.lease.as_secs_f64().into()))
        .collect();
    let groups = settings.served_groups.iter().map(
        |group| json!({ "name": group.name, "slots": group.concurrency, "tiers": group.tiers }),
    );
    let handlers: &[_] = match settings.is_relay {
        true => &[],
        false => &consumer.handlers,
    };
    let tasks: Vec<&str> = handlers.iter().map(|(task, _)| *task).collect();
    let timeouts: Vec<f64> = handlers
        .iter()
        .map(|(_, timeout)| timeout.as_secs_f64())
        .collect();
    sqlx::query_scalar(statement)
        .bind(settings.app())
        .bind(&consumer.worker)
        .bind(&consumer.version)
        .bind(serde_json::Value::Object(leases).to_string())
        .bind(settings.is_relay)
        .bind(groups.collect::<serde_json::Value>().to_string())
        .bind(tasks)
        .bind(timeouts)
        .fetch_one(connection)
        .await
}
