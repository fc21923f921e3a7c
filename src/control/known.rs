//! How a process keeps its snapshot up to date: it asks the database twice a second, on a connection of its own.
//!
//! A poll is enough, and it is the same with and without a transaction pooler, through which nothing can be heard. Each poll
//! reads a few rows.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;
#[cfg(feature = "postgres")]
use tokio::time::{Instant, sleep_until};

use super::Snapshot;
#[cfg(feature = "postgres")]
use super::table::{Loaded, load};
#[cfg(feature = "postgres")]
use crate::backoff::Backoff;
#[cfg(feature = "postgres")]
use crate::observe::Observers;
#[cfg(feature = "postgres")]
use crate::postgres::{Database, DedicatedConnection};
#[cfg(feature = "postgres")]
use crate::service::Service;
#[cfg(feature = "postgres")]
use crate::topology::Topology;

/// How often the database is asked. With the time that a consumer takes to stop, this is well below two seconds.
#[cfg(feature = "postgres")]
const EVERY: Duration = Duration::from_millis(500);
/// How long an answer may take.
#[cfg(feature = "postgres")]
const LIMIT: Duration = Duration::from_secs(5);
/// How long the start of an app, or of a worker, waits for the first answer.
const FIRST_ANSWER: Duration = Duration::from_secs(3);

/// The snapshot of a process. Cheap to clone; all clones are the same.
#[derive(Debug, Clone)]
pub(crate) struct KnownControls {
    snapshot: watch::Receiver<Arc<Snapshot>>,
    /// Whether the database has answered, or there is none.
    is_loaded: watch::Receiver<bool>,
}

impl KnownControls {
    /// Those of an app without a database: there are none.
    pub(crate) fn none() -> Self {
        Self {
            snapshot: watch::channel(Arc::default()).1,
            is_loaded: watch::channel(true).1,
        }
    }

    /// Those of a test.
    #[cfg(test)]
    pub(crate) fn fixed(snapshot: Snapshot) -> Self {
        Self {
            snapshot: watch::channel(Arc::new(snapshot)).1,
            is_loaded: watch::channel(true).1,
        }
    }

    /// Asks the database from now on, as long as a clone of this value lives.
    #[cfg(feature = "postgres")]
    pub(crate) fn watch(database: &Database, topology: &Topology, observers: &Observers) -> Self {
        let (snapshot, known) = watch::channel(Arc::default());
        let (loaded, is_loaded) = watch::channel(false);
        let (database, topology, service) = (
            database.clone(),
            topology.clone(),
            Service::new("controls", observers),
        );
        tokio::spawn(async move {
            let watching = service.run(|| {
                let watcher = Watcher {
                    connection: DedicatedConnection::to(&database),
                    topology: &topology,
                    snapshot: &snapshot,
                    is_loaded: &loaded,
                };
                watcher.run()
            });
            // Nobody wants to know any more.
            tokio::select! {
                () = watching => {}
                () = snapshot.closed() => {}
            }
        });
        Self {
            snapshot: known,
            is_loaded,
        }
    }

    /// What is in force.
    pub(crate) fn now(&self) -> Arc<Snapshot> {
        self.snapshot.borrow().clone()
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
                "the database has not said which tiers and tasks are paused: going on as if none were, until it does"
            );
        }
    }
}

/// Asks the database again and again.
#[cfg(feature = "postgres")]
struct Watcher<'a> {
    connection: DedicatedConnection,
    topology: &'a Topology,
    snapshot: &'a watch::Sender<Arc<Snapshot>>,
    is_loaded: &'a watch::Sender<bool>,
}

#[cfg(feature = "postgres")]
impl Watcher<'_> {
    async fn run(mut self) {
        let mut backoff = Backoff::new();
        loop {
            let next_poll = Instant::now() + EVERY;
            let asking = self
                .connection
                .within(LIMIT, "read the controls", async |connection| {
                    load(connection, self.topology).await
                });
            let next_end = match asking.await {
                Ok(Loaded { snapshot, next_end }) => {
                    backoff = Backoff::new();
                    self.learn(snapshot);
                    next_end
                }
                Err(error) => {
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
        self.snapshot.send_if_modified(|known| {
            let is_new = **known != learned;
            if is_new {
                *known = Arc::new(learned);
            }
            is_new
        });
        self.is_loaded
            .send_if_modified(|is_loaded| !std::mem::replace(is_loaded, true));
    }
}
