//! How a process keeps its snapshot up to date: it asks the database twice a second, on a connection of its own.
//!
//! A poll is enough, and it is the same with and without a transaction pooler, through which nothing can be heard. Each poll
//! reads a few rows.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::watch;
#[cfg(feature = "postgres")]
use tokio::time::sleep_until;
use tokio::time::{Instant, timeout, timeout_at};
#[cfg(feature = "postgres")]
use tokio_util::sync::CancellationToken;

#[cfg(feature = "postgres")]
use super::Limits;
#[cfg(feature = "postgres")]
use super::table::{LastLoaded, Loaded, load};
use super::{Override, Snapshot};
#[cfg(feature = "postgres")]
use crate::backoff::Backoff;
#[cfg(feature = "postgres")]
use crate::observe::Observers;
#[cfg(feature = "postgres")]
use crate::postgres::{Database, DedicatedConnection};
#[cfg(feature = "postgres")]
use crate::service::Service;
use crate::topology::Topology;

/// How often the database is asked. With the time that a consumer takes to stop, this is well below two seconds.
#[cfg(feature = "postgres")]
const EVERY: Duration = Duration::from_millis(500);
/// Within how much time every process that reaches the database follows a change.
#[cfg(feature = "postgres")]
pub(super) const KNOWN_WITHIN: Duration = Duration::from_secs(2);
/// How long an answer may take.
#[cfg(feature = "postgres")]
const LIMIT: Duration = Duration::from_secs(5);
/// How long the start of an app, of a worker, and of what is published meanwhile waits for the first answer.
const FIRST_ANSWER: Duration = Duration::from_secs(3);

/// The snapshot of a process. Cheap to clone; all clones are the same.
#[derive(Debug, Clone)]
pub(crate) struct KnownControls {
    snapshot: watch::Receiver<Arc<Snapshot>>,
    /// Whether the database has answered, or there is none.
    is_loaded: watch::Receiver<bool>,
    flags: Arc<Flags>,
    /// Until when the first publishes wait for the first answer.
    first_answer_by: Instant,
    /// Ends the polls.
    #[cfg(feature = "postgres")]
    closing: CancellationToken,
}

/// What each publish asks. It takes no lock.
#[derive(Debug)]
struct Flags {
    is_loaded: AtomicBool,
    has_overrides: AtomicBool,
}

impl KnownControls {
    /// Those of an app without a database: what the map says.
    pub(crate) fn none(topology: &Topology) -> Self {
        Self {
            snapshot: watch::channel(Arc::new(Snapshot::of(topology))).1,
            is_loaded: watch::channel(true).1,
            flags: Flags::new(true),
            first_answer_by: Instant::now(),
            #[cfg(feature = "postgres")]
            closing: CancellationToken::new(),
        }
    }

    /// Those of a test.
    #[cfg(test)]
    pub(crate) fn fixed(snapshot: Snapshot) -> Self {
        Self {
            flags: Flags {
                has_overrides: snapshot.has_overrides().into(),
                is_loaded: true.into(),
            }
            .into(),
            first_answer_by: Instant::now(),
            snapshot: watch::channel(Arc::new(snapshot)).1,
            is_loaded: watch::channel(true).1,
            #[cfg(feature = "postgres")]
            closing: CancellationToken::new(),
        }
    }

    /// Asks the database from now on, until it is [closed](Self::close) or its last clone is dropped.
    #[cfg(feature = "postgres")]
    pub(crate) fn watch(
        database: &Database,
        topology: &Topology,
        limits: &Limits,
        observers: &Observers,
    ) -> Self {
        let (snapshot, known) = watch::channel(Arc::new(Snapshot::of(topology)));
        let (loaded, is_loaded) = watch::channel(false);
        let flags = Flags::new(false);
        let flags_too = flags.clone();
        let closing = CancellationToken::new();
        let closed = closing.clone();
        let (database, topology, limits, service) = (
            database.clone(),
            topology.clone(),
            limits.clone(),
            Service::new("controls", observers),
        );
        tokio::spawn(async move {
            let watching = service.run(|| {
                let watcher = Watcher {
                    last: LastLoaded::default(),
                    connection: DedicatedConnection::to(&database),
                    topology: &topology,
                    limits: &limits,
                    snapshot: &snapshot,
                    is_loaded: &loaded,
                    flags: &flags_too,
                };
                watcher.run()
            });
            tokio::select! {
                () = watching => {}
                // Nobody wants to know any more.
                () = snapshot.closed() => return,
                () = closed.cancelled() => {}
            }
            // Whoever waits for changes waits on.
            snapshot.closed().await;
        });
        Self {
            snapshot: known,
            is_loaded,
            flags,
            first_answer_by: Instant::now() + FIRST_ANSWER,
            closing,
        }
    }

    /// Goes on with what is known, and asks the database no more.
    #[cfg(feature = "postgres")]
    pub(crate) fn close(&self) {
        self.closing.cancel();
    }

    /// What is in force.
    #[cfg(any(feature = "postgres", feature = "prometheus"))]
    pub(crate) fn now(&self) -> Arc<Snapshot> {
        self.snapshot.borrow().clone()
    }

    /// The override of a task. Nearly always there is none, and then this is one atomic load.
    pub(crate) fn override_of(&self, task: &str) -> Option<Arc<Override>> {
        if !self.flags.has_overrides.load(Ordering::Acquire) {
            return None;
        }
        self.snapshot.borrow().override_of(task).cloned()
    }

    /// Whether a publish should wait for the first answer of the database: it could go out by the map although an override
    /// is in force.
    pub(crate) fn must_wait_for_overrides(&self) -> bool {
        !self.flags.is_loaded.load(Ordering::Acquire) && Instant::now() < self.first_answer_by
    }

    /// Waits for the first answer of the database, as long as a publish with this deadline can: half of its time, and
    /// not longer than three seconds after the app was made. Without an answer it goes by the map.
    pub(crate) async fn wait_until_known(&self, deadline: Instant) {
        if !self.must_wait_for_overrides() {
            return;
        }
        let now = Instant::now();
        let half = now + deadline.saturating_duration_since(now) / 2;
        let mut is_loaded = self.is_loaded.clone();
        let loading = is_loaded.wait_for(|is_loaded| *is_loaded);
        // Whoever asks the database says why it does not answer.
        let _ = timeout_at(half.min(self.first_answer_by), loading).await;
    }

    /// What is in force, and a way to be told when that changes.
    pub(crate) fn changes(&self) -> watch::Receiver<Arc<Snapshot>> {
        self.snapshot.clone()
    }

    /// Waits until the database has answered for the first time, but not for long: a pause that is in force must hold
    /// from the beginning, and a database that is away must not keep a process from its work on the broker.
    pub(crate) async fn loaded(&self) {
        let mut is_loaded = self.is_loaded.clone();
        let loading = is_loaded.wait_for(|is_loaded| *is_loaded);
        if timeout(FIRST_ANSWER, loading).await.is_err() {
            tracing::warn!(
                "the database did not say within {FIRST_ANSWER:?} which tiers and tasks are paused or overridden; tasks start and go by the map until it does; check Postgres"
            );
        }
    }
}

impl Flags {
    fn new(is_loaded: bool) -> Arc<Self> {
        Arc::new(Self {
            is_loaded: AtomicBool::new(is_loaded),
            has_overrides: AtomicBool::new(false),
        })
    }
}

/// Asks the database again and again.
#[cfg(feature = "postgres")]
struct Watcher<'a> {
    connection: DedicatedConnection,
    last: LastLoaded,
    topology: &'a Topology,
    limits: &'a Limits,
    snapshot: &'a watch::Sender<Arc<Snapshot>>,
    is_loaded: &'a watch::Sender<bool>,
    flags: &'a Flags,
}

#[cfg(feature = "postgres")]
impl Watcher<'_> {
    async fn run(mut self) {
        let mut backoff = Backoff::new();
        loop {
            let next_poll = Instant::now() + EVERY;
            let (topology, last) = (self.topology, &mut self.last);
            let asking = self
                .connection
                .within(LIMIT, "read the controls", async |connection| {
                    load(connection, topology, last).await
                });
            let next_end = match asking.await {
                Ok(Loaded { snapshot, next_end }) => {
                    backoff = Backoff::new();
                    self.learn(snapshot);
                    next_end
                }
                Err(error) => {
                    self.last.failed();
                    match backoff.is_worth_a_warning() {
                        true => {
                            tracing::warn!(%error, "going on with the pauses, limits and overrides that are known; asking again")
                        }
                        false => tracing::debug!(%error, "cannot read the controls, asking again"),
                    }
                    None
                }
            };
            let next = next_end.map_or(next_poll, |end| end.min(next_poll));
            sleep_until(next).await;
        }
    }

    fn learn(&self, learned: Snapshot) {
        // Whoever learns of the limits finds their gates.
        self.limits.follow(&learned);
        let has_overrides = learned.has_overrides();
        self.snapshot.send_if_modified(|known| {
            let is_new = **known != learned;
            if is_new {
                *known = Arc::new(learned);
            }
            is_new
        });
        self.flags
            .has_overrides
            .store(has_overrides, Ordering::Release);
        self.flags.is_loaded.store(true, Ordering::Release);
        self.is_loaded
            .send_if_modified(|is_loaded| !std::mem::replace(is_loaded, true));
    }
}
