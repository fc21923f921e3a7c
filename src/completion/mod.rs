//! Effectively once: a handler's writes and the completion of its task, in one commit.
//!
//! `attempt` has the transactions that an attempt may open, and `marks` the statements. The commit of such a transaction
//! writes a mark, a row of `tierline.completed` whose key is the identity of the task, and ends the run if the task is a
//! row. So of all runs of a task, in whatever processes and from whatever copies of its message, one commits.

mod attempt;
pub(crate) mod error;
mod marks;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::time::Instant;

use crate::Error;
use crate::backlog::RunKey;
use crate::error::DatabaseError;
use crate::message::Received;
use crate::postgres::{Database, HandlerConnections};
use crate::task::Transactions;

use attempt::Attempt;
pub(crate) use marks::remove_marks;

/// How long marks are kept, unless the app says otherwise.
pub(crate) const KEEP_MARKS: Duration = Duration::from_secs(7 * 86_400);
/// The shortest time that they are kept: a message may come again that was acknowledged just now.
pub(crate) const SHORTEST_KEEP: Duration = Duration::from_secs(60);
/// How long a task waits for an answer whether it is done.
const LOOK_LIMIT: Duration = Duration::from_secs(1);
/// How long nobody asks a database again that did not answer: not every task may wait for it.
const PAUSE: Duration = Duration::from_secs(5);
/// The same where it has no table of marks.
const PAUSE_NOT_MIGRATED: Duration = Duration::from_secs(60);

/// Completes the tasks of a worker group. No other group uses its connections.
#[derive(Debug)]
pub(crate) struct Completions {
    app: Arc<str>,
    connections: Arc<HandlerConnections>,
    /// Until when the database is not asked whether tasks are done.
    paused_until: Mutex<Option<Instant>>,
}

/// A row that is running.
#[derive(Debug, Clone)]
pub(crate) struct RunningRow {
    pub(crate) run: RunKey,
    /// The name of the worker, if the tier keeps its tasks.
    pub(crate) keeper: Option<Arc<str>>,
}

impl Completions {
    /// At most `slots` transactions are open at a time.
    pub(crate) fn new(database: &Database, app: &str, slots: usize) -> Arc<Self> {
        Arc::new(Self {
            app: app.into(),
            connections: HandlerConnections::new(database, slots),
            paused_until: Mutex::default(),
        })
    }

    /// The transactions of an attempt. `row`: where the task is in a tier in Postgres.
    pub(crate) fn attempt(
        self: &Arc<Self>,
        received: &Arc<Received>,
        row: Option<RunningRow>,
    ) -> Transactions {
        Transactions::of(Attempt::new(self.clone(), received.clone(), row))
    }

    /// Whether a task is done, as far as the database can tell in a moment. If it is and this says no, its run cannot
    /// commit.
    pub(crate) async fn is_done(&self, received: &Received) -> bool {
        let Ok(key) = received.completion_key(&self.app) else {
            return false;
        };
        if self.is_paused() {
            return false;
        }
        let tried = "ask whether a task is done";
        let looking = self.connections.within(LOOK_LIMIT, tried, |connection| {
            marks::is_completed(connection, key).boxed()
        });
        match looking.await {
            Ok(is_done) => is_done,
            Err(error) => {
                tracing::debug!(%error, id = %received.id(), "running a task that may be done");
                let pause = match error {
                    Error::Database(DatabaseError::NotMigrated { .. }) => PAUSE_NOT_MIGRATED,
                    _ => PAUSE,
                };
                self.pause_for(pause);
                false
            }
        }
    }

    fn is_paused(&self) -> bool {
        let until = self.paused_until.lock();
        let until = *until.unwrap_or_else(PoisonError::into_inner);
        until.is_some_and(|until| Instant::now() < until)
    }

    fn pause_for(&self, pause: Duration) {
        let until = self.paused_until.lock();
        *until.unwrap_or_else(PoisonError::into_inner) = Some(Instant::now() + pause);
    }
}
