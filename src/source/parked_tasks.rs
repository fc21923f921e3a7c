//! Which tasks have parked rows, as far as this process knows. Their messages on the broker are parked too, so that they keep
//! their order.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

#[derive(Debug, Default)]
pub(crate) struct ParkedTasks {
    /// Nearly always there are none.
    has_any: AtomicBool,
    /// Tier and task.
    tasks: Mutex<HashSet<(String, String)>>,
}

#[cfg_attr(
    not(feature = "postgres"),
    expect(dead_code, reason = "rows are in Postgres")
)]
impl ParkedTasks {
    pub(crate) fn insert(&self, tier: &str, task: &str) {
        let mut tasks = self.tasks();
        tasks.insert((tier.to_owned(), task.to_owned()));
        self.has_any.store(true, Ordering::Release);
    }

    pub(crate) fn remove(&self, tier: &str, task: &str) {
        let mut tasks = self.tasks();
        tasks.remove(&(tier.to_owned(), task.to_owned()));
        self.has_any.store(!tasks.is_empty(), Ordering::Release);
    }

    pub(crate) fn contains(&self, tier: &str, task: &str) -> bool {
        self.has_any.load(Ordering::Acquire)
            && self.tasks().contains(&(tier.to_owned(), task.to_owned()))
    }

    fn tasks(&self) -> MutexGuard<'_, HashSet<(String, String)>> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
