//! Writes what a process has counted, in batches, on a connection of its own.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until, timeout};
use uuid::Uuid;

use super::counters::{Counters, RunningTask};
use super::pending::Pending;
use super::report::{TierReport, join_old_reports, write_reports};
use super::table::{add, is_migrated, remove_old, row};
use crate::Error;
use crate::backoff::Backoff;
use crate::control::KnownControls;
use crate::error::ErrorKind;
use crate::observe::{Event, Observers};
use crate::postgres::{Database, DedicatedConnection};
use crate::random;
use crate::service::Service;
use crate::topology::Topology;

/// How long rollups are kept, unless the app says otherwise.
pub(crate) const KEEP: Duration = Duration::from_secs(7 * 86_400);
/// The shortest time.
pub(crate) const SHORTEST_KEEP: Duration = Duration::from_secs(3_600);

/// How often counts are written, on average.
const EVERY: Duration = Duration::from_secs(10);
/// How long a statement may take.
const LIMIT: Duration = Duration::from_secs(5);
/// How often old minutes are looked for.
const REMOVE_EVERY: Duration = Duration::from_secs(600);
/// The pause between two batches of them.
const REMOVE_PAUSE: Duration = Duration::from_millis(200);
/// How many rows one statement removes.
const REMOVE_AT_ONCE: i64 = 1_000;
/// How many writes may be asked for at once; a further one comes to the same.
const REQUESTS: usize = 16;

/// Counts the events of a process, and writes them. Cheap to clone. With the last clone, what is not written yet is
/// tried once more.
#[derive(Clone)]
pub(crate) struct Recorder {
    counters: Arc<Counters>,
    /// Asks to write now, and to say when that was tried.
    requests: mpsc::Sender<oneshot::Sender<()>>,
}

impl Recorder {
    /// Writes from now on. `observers` are those who are told of a panic: this recorder is not among them, or it would
    /// keep itself alive.
    pub(crate) fn start(
        database: &Database,
        topology: &Topology,
        keep: Duration,
        observers: &Observers,
        controls: KnownControls,
    ) -> Self {
        let counters = Arc::new(Counters::new(topology, controls));
        let (requests, mut requested) = mpsc::channel(REQUESTS);
        let service = Service::new("rollups", observers);
        let (database, app) = (database.clone(), topology.app().to_owned());
        let counted = counters.clone();
        tokio::spawn(async move {
            let mut pending = Pending::new(Instant::now(), into_minute());
            // A batch that was being added when this panicked keeps its number, which is that of this process.
            let process = Uuid::now_v7();
            // One run at a time has what the next one goes on with.
            let state = tokio::sync::Mutex::new((&mut pending, &mut requested));
            let recording = service.run(|| async {
                let (pending, requested) = &mut *state.lock().await;
                let writing = Writing {
                    counters: &counted,
                    pending,
                    connection: DedicatedConnection::to(&database),
                    app: &app,
                    process,
                    keep,
                    reported: HashMap::new(),
                    report_at: Instant::now(),
                    is_migrated: false,
                    failures: Backoff::new(),
                    remove_at: Instant::now(),
                };
                writing.run(requested).await;
            });
            recording.await;
        });
        Self { counters, requests }
    }

    /// Counts an event.
    pub(crate) fn handle(&self, event: &Event<'_>) {
        self.counters.handle(event);
    }

    /// Counts a task of this tier as running until what is returned is dropped.
    pub(crate) fn run(&self, tier: &str) -> Option<RunningTask> {
        self.counters.run(tier)
    }

    /// Writes what was counted so far, or tries to, for `limit` at most. What is not written stays for the next time.
    pub(crate) async fn flush(&self, limit: Duration) {
        let (tried, is_tried) = oneshot::channel();
        let flushing = async {
            if self.requests.send(tried).await.is_ok() {
                let _ = is_tried.await;
            }
        };
        if timeout(limit, flushing).await.is_err() {
            tracing::debug!(?limit, "rollups were not written in time");
        }
    }
}

struct Writing<'a> {
    counters: &'a Counters,
    pending: &'a mut Pending,
    connection: DedicatedConnection,
    app: &'a str,
    process: Uuid,
    keep: Duration,
    /// What was last reported of tiers, where it is more than nothing.
    reported: HashMap<String, TierReport>,
    report_at: Instant,
    is_migrated: bool,
    failures: Backoff,
    remove_at: Instant,
}

impl Writing<'_> {
    async fn run(mut self, requested: &mut mpsc::Receiver<oneshot::Sender<()>>) {
        let mut write_at = Instant::now() + jittered(EVERY);
        loop {
            let mut wake_at = write_at.min(self.pending.next_minute());
            if self.is_migrated {
                wake_at = wake_at.min(self.remove_at);
            }
            let (is_over, tried) = tokio::select! {
                request = requested.recv() => (request.is_none(), request),
                () = sleep_until(wake_at) => (false, None),
            };
            self.take();
            let now = Instant::now();
            if is_over || tried.is_some() || now >= write_at {
                self.write().await;
                write_at = Instant::now() + jittered(EVERY);
            }
            if self.is_migrated && now >= self.remove_at {
                self.remove().await;
            }
            if let Some(tried) = tried {
                // Whoever waits no longer need not know.
                let _ = tried.send(());
            }
            if is_over {
                return;
            }
        }
    }

    /// Takes what was counted, into the minute that ends or goes on.
    fn take(&mut self) {
        let now = Instant::now();
        let pending = &mut *self.pending;
        self.counters
            .take(|cell, totals| pending.add(now, cell, totals));
        for cell in self.counters.paused(at(pending.minute_begin(now))) {
            pending.mark(now, cell);
        }
        pending.turn(now);
    }

    async fn write(&mut self) {
        match self.try_to_write().await {
            Ok(()) => self.failures = Backoff::new(),
            Err(error) => self.failed(&error),
        }
    }

    async fn try_to_write(&mut self) -> Result<(), Error> {
        let reports = self.reports();
        if (self.pending.next_batch().is_some() || !reports.is_empty()) && !self.is_migrated {
            let checking =
                self.connection
                    .within(LIMIT, "look for the rollups", async |connection| {
                        is_migrated(connection).await
                    });
            self.is_migrated = checking.await?;
            if !self.is_migrated {
                // Many apps have a database that they have not migrated, and may never.
                self.pending.forget();
                return Ok(());
            }
        }
        while let Some(batch) = self.pending.next_batch() {
            let since = at(batch.begin);
            let names = self.counters.names();
            let rows: Vec<serde_json::Value> = batch
                .cells
                .iter()
                .map(|(cell, totals)| {
                    let mut row = row(names.tier(cell.1), names.task(cell.0), totals);
                    if self.counters.is_paused(*cell, since) {
                        row["is_paused"] = true.into();
                    }
                    row
                })
                .collect();
            let rows = serde_json::Value::Array(rows).to_string();
            let (process, app) = (self.process, self.app);
            let adding = self
                .connection
                .within(LIMIT, "add rollups", async |connection| {
                    add(connection, process, app, batch, &rows).await
                });
            let into_minute = adding.await?;
            self.pending.forget_batch();
            self.pending.set_clock(Instant::now(), into_minute);
        }
        self.write_reports(reports).await
    }

    /// What has changed of the tiers since it was last reported, and what runs: a report without an end is repeated.
    fn reports(&self) -> Vec<(String, TierReport)> {
        if Instant::now() < self.report_at {
            return Vec::new();
        }
        let reports = self.counters.reports().filter(|(tier, report)| {
            let before = self.reported.get(*tier).copied().unwrap_or_default();
            *report != before || report.running > 0
        });
        let reports = reports.map(|(tier, report)| (tier.to_owned(), report));
        reports.collect()
    }

    async fn write_reports(&mut self, reports: Vec<(String, TierReport)>) -> Result<(), Error> {
        if reports.is_empty() {
            return Ok(());
        }
        let (process, app) = (self.process, self.app);
        let rows: Vec<(&str, TierReport)> = reports
            .iter()
            .map(|(tier, report)| (tier.as_str(), *report))
            .collect();
        let writing = self
            .connection
            .within(LIMIT, "report on tiers", async |connection| {
                write_reports(connection, process, app, &rows).await
            });
        match writing.await {
            Ok(()) => self.reported.extend(reports),
            // A database that is still to be migrated for this release, or whose user may not write these.
            Err(error) if matches!(error.kind(), ErrorKind::Mismatch | ErrorKind::Refused) => {
                tracing::debug!(%error, "trying again in some minutes");
                self.report_at = Instant::now() + REMOVE_EVERY;
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    async fn remove(&mut self) {
        let (app, keep) = (self.app, self.keep);
        let has_reports = !self.reported.is_empty();
        let removing = self
            .connection
            .within(LIMIT, "remove old rollups", async |connection| {
                if has_reports {
                    join_old_reports(connection, app, REMOVE_AT_ONCE).await?;
                }
                remove_old(connection, app, keep, REMOVE_AT_ONCE).await
            });
        let pause = match removing.await {
            Ok(count) if count >= REMOVE_AT_ONCE.unsigned_abs() => REMOVE_PAUSE,
            Ok(_) => jittered(REMOVE_EVERY),
            Err(error) => {
                tracing::debug!(%error, "trying again in some minutes");
                jittered(REMOVE_EVERY)
            }
        };
        self.remove_at = Instant::now() + pause;
    }

    fn failed(&mut self, error: &Error) {
        match error.kind() {
            // The tables were there, and are gone.
            ErrorKind::Mismatch => self.is_migrated = false,
            // The same batch would be refused again, and all that follow it.
            ErrorKind::Refused => self.pending.forget_batch(),
            _ => {}
        }
        match self.failures.is_worth_a_warning() {
            true => {
                tracing::warn!(%error, "rollups are not written: counting on, and trying again; minutes that cannot be kept are joined");
            }
            false => tracing::debug!(%error, "rollups are not written, trying again"),
        }
    }
}

/// Somewhat less or more, so that processes that were started together write at different times.
fn jittered(time: Duration) -> Duration {
    time.mul_f64(0.75 + f64::from(random::number()) / f64::from(u32::MAX) / 2.0)
}

/// The time of an instant that is past, by the clock of this machine.
fn at(instant: Instant) -> SystemTime {
    SystemTime::now()
        .checked_sub(instant.elapsed())
        .unwrap_or(SystemTime::UNIX_EPOCH)
}

/// How much of the present minute is over, by the clock of this machine. The database corrects it.
fn into_minute() -> Duration {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let now = now.unwrap_or_default();
    Duration::from_secs(now.as_secs() % 60) + Duration::from_nanos(now.subsec_nanos().into())
}
