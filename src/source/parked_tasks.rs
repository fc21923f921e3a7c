//! Which tasks have parked rows, as far as this process knows. Their messages on the broker are parked too, so that they keep
//! their order. And whether rows can be parked at all.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

#[cfg(feature = "postgres")]
use crate::backlog::Lane;
#[cfg(feature = "postgres")]
use crate::control::Gating;
#[cfg(feature = "postgres")]
use crate::message::Received;

/// For how long no row is parked after the database has failed to store one.
const FAILING_FOR: Duration = Duration::from_secs(5);
/// How often a failure is worth a warning.
const WARN_EVERY: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(crate) struct ParkedTasks {
    /// Nearly always there are none.
    has_any: AtomicBool,
    /// By tier and task, when a row was parked the last time.
    tasks: Mutex<HashMap<(String, String), Instant>>,
    failure: Mutex<Option<Failure>>,
}

/// The last failure of the database to store a row.
#[derive(Debug)]
struct Failure {
    at: Instant,
    warned_at: Instant,
}

#[cfg_attr(
    not(feature = "postgres"),
    expect(dead_code, reason = "rows are in Postgres")
)]
impl ParkedTasks {
    /// A row of a task was parked.
    pub(crate) fn insert(&self, tier: &str, task: &str) {
        let mut tasks = self.tasks();
        tasks.insert((tier.to_owned(), task.to_owned()), Instant::now());
        self.has_any.store(true, Ordering::Release);
    }

    pub(crate) fn remove(&self, tier: &str, task: &str) {
        let mut tasks = self.tasks();
        tasks.remove(&(tier.to_owned(), task.to_owned()));
        self.has_any.store(!tasks.is_empty(), Ordering::Release);
    }

    pub(crate) fn contains(&self, tier: &str, task: &str) -> bool {
        self.has_any.load(Ordering::Acquire)
            && self
                .tasks()
                .contains_key(&(tier.to_owned(), task.to_owned()))
    }

    /// The tasks of a tier, each with the time when a row of it was parked the last time.
    pub(crate) fn of_tier(&self, tier: &str) -> Vec<(String, Instant)> {
        if !self.has_any.load(Ordering::Acquire) {
            return Vec::new();
        }
        let tasks = self.tasks();
        let of_tier = tasks.iter().filter(|((of, _), _)| of == tier);
        of_tier.map(|((_, task), at)| (task.clone(), *at)).collect()
    }

    /// Whether the database has failed to store a row a moment ago.
    pub(crate) fn are_failing(&self) -> bool {
        let failure = self.failure();
        failure
            .as_ref()
            .is_some_and(|failure| failure.at.elapsed() < FAILING_FOR)
    }

    /// The database has not stored a row; whether that is worth a warning.
    pub(crate) fn failed(&self) -> bool {
        let now = Instant::now();
        let mut failure = self.failure();
        let is_new = failure
            .as_ref()
            .is_none_or(|failure| now >= failure.warned_at + WARN_EVERY);
        match &mut *failure {
            Some(failure) if !is_new => failure.at = now,
            failure => {
                *failure = Some(Failure {
                    at: now,
                    warned_at: now,
                })
            }
        }
        is_new
    }

    /// The database has stored a row; whether it failed before.
    pub(crate) fn succeeded(&self) -> bool {
        self.failure().take().is_some()
    }

    fn failure(&self) -> MutexGuard<'_, Option<Failure>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tasks(&self) -> MutexGuard<'_, HashMap<(String, String), Instant>> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The lane of a task that may not run as it comes. It reads the payload.
#[cfg(feature = "postgres")]
pub(super) fn lane_of(gating: &Gating, received: &Received) -> Lane {
    let task = received.task();
    let message = received.message().ok();
    let given = message.and_then(|it| it.limit_key.as_deref());
    Lane {
        key: gating.lane_key(task, given, received.payload()),
        task: gating.lane_task(task).to_owned(),
    }
}
