//! Which tasks of this process may have killed a worker before.
//!
//! When a process dies, the broker redelivers everything it held, so the redelivered flag does not say
//! which task killed it. A task that was held by two processes that died therefore runs from its group's
//! quarantine, where a process takes one task at a time, and only while it holds no other suspect. If the process
//! dies then, that task most likely did it. All other tasks run beside it as ever: one that was never suspected may
//! also be the killer, which is why one death condemns no task.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// From this crash count on a task runs from quarantine.
pub(crate) const QUARANTINE_FROM: u32 = 2;

/// Counts the suspects that a process holds, in all its groups.
#[derive(Debug)]
pub(crate) struct Suspects {
    /// Deliveries with a crash count that do not come from quarantine.
    held: AtomicUsize,
    released: Notify,
    quarantine: Arc<Semaphore>,
}

/// A suspect that does not come from quarantine, until this is dropped.
#[derive(Debug)]
pub(crate) struct Held(Arc<Suspects>);

impl Default for Suspects {
    fn default() -> Self {
        Self {
            held: AtomicUsize::new(0),
            released: Notify::new(),
            quarantine: Arc::new(Semaphore::new(1)),
        }
    }
}

impl Suspects {
    /// Counts a suspect for as long as the returned value lives.
    pub(crate) fn hold(self: &Arc<Self>) -> Held {
        self.held.fetch_add(1, Ordering::AcqRel);
        Held(self.clone())
    }

    /// The right to take a task from quarantine, once this process runs no other suspect.
    pub(crate) async fn none_held(&self) -> Option<OwnedSemaphorePermit> {
        let permit = self.quarantine.clone().acquire_owned().await.ok()?;
        loop {
            let released = self.released.notified();
            if self.held.load(Ordering::Acquire) == 0 {
                return Some(permit);
            }
            released.await;
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.0.held.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.released.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn one_task_at_a_time_is_taken_from_quarantine() {
        let suspects = Arc::new(Suspects::default());
        let first = suspects.none_held().await.unwrap();
        let mut second = Box::pin(suspects.none_held());
        assert!(second.as_mut().now_or_never().is_none());
        drop(first);
        assert!(second.await.is_some());
    }

    #[tokio::test]
    async fn no_task_is_taken_from_quarantine_while_another_suspect_is_held() {
        let suspects = Arc::new(Suspects::default());
        let (one, other) = (suspects.hold(), suspects.hold());
        let mut taken = Box::pin(suspects.none_held());
        drop(one);
        assert!(taken.as_mut().now_or_never().is_none());
        drop(other);
        assert!(taken.await.is_some());
    }
}
