//! Which tasks of this process may have killed a worker before.
//!
//! When a process dies, the broker redelivers everything it held, so the redelivered flag does not say
//! which task killed it. A task that was held by two processes that died therefore runs from its group's
//! quarantine, where a process takes one task at a time, and only while it holds no other suspect. If the process
//! dies then, that task most likely did it. All other tasks run beside it as ever: one that was never suspected may
//! also be the killer, which is why one death condemns no task.
//!
//! A crash count is stored by publishing a counted copy and then acknowledging the delivery. A process that dies
//! between the two leaves both, and a killer that exists twice costs twice as many workers. So no suspect starts while
//! its process stores a crash count, and a crash count waits a moment for suspects that run.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep_until, timeout};

/// How long the broker may take to carry out an acknowledgement. Nothing tells when it has.
const ACKNOWLEDGED_WITHIN: Duration = Duration::from_millis(100);
/// How long a crash count waits for suspects that run, and suspects for crash counts. Most killers end their process within that time; the tasks
/// that wait have killed nobody, most of them.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// The suspects of a process, in all its groups.
#[derive(Debug)]
pub(crate) struct Suspects {
    state: Mutex<State>,
    changed: Notify,
    quarantine: Arc<Semaphore>,
}

#[derive(Debug, Default)]
struct State {
    /// Tasks with a crash count that run.
    running: usize,
    /// Crash counts that are being stored, or about to be.
    counting: usize,
    /// Since when there are any.
    counting_since: Option<Instant>,
    /// When the last delivery was acknowledged after its count was stored.
    counted_at: Option<Instant>,
}

/// A suspect that runs, until this is dropped.
#[derive(Debug)]
pub(crate) struct Running(Arc<Suspects>);

/// A crash count that is being stored. It is dropped when the delivery that it replaces is acknowledged.
#[derive(Debug)]
pub(crate) struct Counting(Arc<Suspects>);

impl Default for Suspects {
    fn default() -> Self {
        Self {
            state: Mutex::default(),
            changed: Notify::new(),
            quarantine: Arc::new(Semaphore::new(1)),
        }
    }
}

impl Suspects {
    /// A suspect starts. It runs for as long as the returned value lives.
    pub(crate) fn start(self: &Arc<Self>) -> Running {
        self.state().running += 1;
        Running(self.clone())
    }

    /// A crash count is to be stored. No suspect starts until the returned value is dropped.
    pub(crate) fn count(self: &Arc<Self>) -> Counting {
        let mut state = self.state();
        state.counting += 1;
        state.counting_since.get_or_insert_with(Instant::now);
        drop(state);
        Counting(self.clone())
    }

    /// When a suspect may start: `None` means now. While crash counts are being stored, the time is a guess.
    pub(crate) fn start_at(&self) -> Option<Instant> {
        let now = Instant::now();
        let state = self.state();
        let counted = match state.counting {
            0 => state.counted_at? + ACKNOWLEDGED_WITHIN,
            // A tier that cannot store a count must not hold up the suspects of the others.
            _ if state.counting_since? + LONGEST_WAIT <= now => return None,
            _ => now + ACKNOWLEDGED_WITHIN,
        };
        (counted > now).then_some(counted)
    }

    /// Waits until no suspect runs in this process, for a second at most: storing a crash count is safer then.
    pub(crate) async fn wait_for_running(&self) {
        let _ = timeout(LONGEST_WAIT, self.none_runs()).await;
    }

    /// The right to take a task from quarantine, once this process runs no other suspect and stores no crash count.
    pub(crate) async fn quarantine(&self) -> Option<OwnedSemaphorePermit> {
        let permit = self.quarantine.clone().acquire_owned().await.ok()?;
        loop {
            self.none_runs().await;
            match self.start_at() {
                None => return Some(permit),
                Some(at) => sleep_until(at).await,
            }
        }
    }

    async fn none_runs(&self) {
        loop {
            let changed = self.changed.notified();
            if self.state().running == 0 {
                return;
            }
            changed.await;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.state().running -= 1;
        self.0.changed.notify_waiters();
    }
}

impl Drop for Counting {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.counting -= 1;
        if state.counting == 0 {
            state.counting_since = None;
        }
        state.counted_at = Some(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn one_task_at_a_time_is_taken_from_quarantine() {
        let suspects = Arc::new(Suspects::default());
        let first = suspects.quarantine().await.unwrap();
        let mut second = Box::pin(suspects.quarantine());
        assert!(second.as_mut().now_or_never().is_none());
        drop(first);
        assert!(second.await.is_some());
    }

    #[tokio::test]
    async fn no_task_is_taken_from_quarantine_while_another_suspect_runs() {
        let suspects = Arc::new(Suspects::default());
        let (one, other) = (suspects.start(), suspects.start());
        let mut taken = Box::pin(suspects.quarantine());
        drop(one);
        assert!(taken.as_mut().now_or_never().is_none());
        drop(other);
        assert!(taken.await.is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn no_suspect_starts_before_crash_counts_are_stored_and_acknowledged() {
        let suspects = Arc::new(Suspects::default());
        assert_eq!(suspects.start_at(), None);
        let (one, other) = (suspects.count(), suspects.count());
        let mut taken = Box::pin(suspects.quarantine());
        drop(one);
        assert!(taken.as_mut().now_or_never().is_none());
        assert!(suspects.start_at().is_some());
        drop(other);
        assert!(suspects.start_at().is_some());
        let begin = Instant::now();
        assert!(taken.await.is_some());
        assert!(begin.elapsed() >= ACKNOWLEDGED_WITHIN);
        assert_eq!(suspects.start_at(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn suspects_wait_for_a_crash_count_that_is_not_stored_but_not_for_long() {
        let suspects = Arc::new(Suspects::default());
        let _counting = suspects.count();
        assert!(suspects.start_at().is_some());
        tokio::time::advance(LONGEST_WAIT).await;
        let _another = suspects.count();
        assert_eq!(suspects.start_at(), None);
        assert!(suspects.quarantine().await.is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_crash_count_waits_for_a_suspect_that_runs_but_not_for_long() {
        let suspects = Arc::new(Suspects::default());
        let running = suspects.start();
        let begin = Instant::now();
        suspects.wait_for_running().await;
        assert!(begin.elapsed() >= LONGEST_WAIT);
        let mut waiting = Box::pin(suspects.wait_for_running());
        assert!(waiting.as_mut().now_or_never().is_none());
        drop(running);
        assert!(waiting.now_or_never().is_some());
    }
}
