//! How the tasks that serve all tiers reach the source of one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::SystemTime;

use futures_util::task::AtomicWaker;
use tokio::time::Instant;

use crate::backlog::OpenLanes;

/// What the source of a tier must know.
#[derive(Debug, Default)]
pub(super) struct TierSignal {
    waker: AtomicWaker,
    is_served: AtomicBool,
    state: Mutex<Signalled>,
}

/// What has happened to a tier.
#[derive(Debug, Default, Clone)]
pub(super) struct Signalled {
    /// Rows are ready that may not be known yet.
    pub(super) is_woken: bool,
    /// The first ready row of each rank that has any, by its due time.
    pub(super) starts: Option<Vec<(i16, SystemTime)>>,
    /// The lanes in which tasks wait, as the last look has found them.
    pub(super) lanes: Option<Vec<OpenLanes>>,
    /// When a scheduled task falls due that may not be known yet.
    pub(super) next_due: Option<Instant>,
    /// This process, as the database knows it. `None` while its leases cannot be extended.
    pub(super) worker: Option<i64>,
    /// Whether this process may still run what it has claimed here.
    pub(super) has_lease: bool,
    /// Rises each time when what was claimed before is lost.
    pub(super) generation: u64,
}

impl Signalled {
    /// Ready rows were found, the first of each rank by its due time.
    pub(super) fn found_ready(&mut self, found: &[(i16, SystemTime)]) {
        self.is_woken |= !found.is_empty();
        let starts = self.starts.get_or_insert_default();
        for (rank, first) in found {
            match starts.iter_mut().find(|(known, _)| known == rank) {
                Some((_, known)) => *known = (*known).min(*first),
                None => starts.push((*rank, *first)),
            }
        }
    }

    /// A scheduled task falls due then.
    pub(super) fn falls_due(&mut self, at: Option<Instant>) {
        self.next_due = earlier(self.next_due, at);
    }
}

/// The earlier of two times of which each may be missing.
pub(super) fn earlier(one: Option<Instant>, other: Option<Instant>) -> Option<Instant> {
    match (one, other) {
        (Some(one), Some(other)) => Some(one.min(other)),
        (one, other) => one.or(other),
    }
}

impl TierSignal {
    /// Whether there was a source before this call. It has ended with a panic then.
    pub(super) fn is_served_again(&self) -> bool {
        self.is_served.swap(true, Ordering::Relaxed)
    }

    /// There may be ready rows.
    pub(super) fn wake(&self) {
        self.change(|state| state.is_woken = true);
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut Signalled)) {
        change(&mut self.state());
        self.waker.wake();
    }

    /// What is new since the last call. `waker` is woken when there is more.
    pub(super) fn take(&self, waker: &Waker) -> Signalled {
        self.waker.register(waker);
        let mut state = self.state();
        let taken = Signalled {
            starts: state.starts.take(),
            lanes: state.lanes.take(),
            next_due: state.next_due.take(),
            ..state.clone()
        };
        state.is_woken = false;
        taken
    }

    fn state(&self) -> MutexGuard<'_, Signalled> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
