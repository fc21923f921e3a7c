//! The gate of a limited tier or task: who passes it may start one task.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::local::{Ended, Local, Start};
use crate::topology::Limit;

/// The limit of one tier or task, in this process. All its workers share the gate.
pub(crate) struct Gate {
    local: Mutex<Local>,
    /// Changes when more may start than before.
    opened: watch::Sender<()>,
    /// Wakes the rounds in which processes divide limits.
    rounds: Arc<Notify>,
}

/// The right to start one task. While it lives, the task counts as running.
#[derive(Debug)]
#[must_use = "the task counts as running only while this lives"]
pub(crate) struct Permit {
    gate: Arc<Gate>,
}

impl Gate {
    pub(super) fn new(limit: &Limit, rounds: &Arc<Notify>) -> Self {
        Self {
            local: Mutex::new(Local::new(limit, Instant::now())),
            opened: watch::channel(()).0,
            rounds: rounds.clone(),
        }
    }

    /// Takes the right to start one task, or says that there is one to be started. After a refusal, ask again at
    /// [`next_at`](Self::next_at) and after each of the [`changes`](Self::changes): a process that does not is taken for
    /// one that has nothing to start.
    pub(crate) fn try_start(self: &Arc<Self>) -> Option<Permit> {
        let start = self.local().try_start(Instant::now());
        match start {
            Start::Yes => Some(Permit { gate: self.clone() }),
            Start::No { is_new } => {
                if is_new {
                    self.rounds.notify_one();
                }
                None
            }
        }
    }

    /// Whether [`try_start`](Self::try_start) would succeed. Ask it only if there is a task to be started: a closed gate notes
    /// that, as if [`try_start`](Self::try_start) had refused.
    pub(crate) fn is_open(&self) -> bool {
        self.startable(true) > 0
    }

    /// How many tasks may start now. If it is none and there is one to be started (`is_asked`), that is as if
    /// [`try_start`](Self::try_start) had refused it.
    pub(crate) fn startable(&self, is_asked: bool) -> usize {
        let now = Instant::now();
        let mut local = self.local();
        let startable = local.startable(now);
        if startable == 0 && is_asked && local.refuse(now) {
            self.rounds.notify_one();
        }
        startable
    }

    /// Whether one more task may wait for its right to start beside so many: it starts in a moment, or this process has not
    /// asked for a share yet.
    pub(crate) fn may_wait(&self, waiting: usize) -> bool {
        let now = Instant::now();
        let mut local = self.local();
        local.startable(now) > waiting || waiting == 0 && local.starts_soon(now)
    }

    /// When a task may start by itself. `None`: now, or after one of the [`changes`](Self::changes).
    pub(crate) fn next_at(&self) -> Option<Instant> {
        let now = Instant::now();
        self.local().next_at(now).filter(|at| *at > now)
    }

    /// Changes when more may start than before, or when it is to be asked for again.
    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.opened.subscribe()
    }

    /// How many deliveries are worth holding prefetched: what may start in the next quarter of a second, or twice the places
    /// of those that run. At least 1, also while this process has no share: it gets one only if it has something to start.
    pub(crate) fn allowance(&self) -> usize {
        self.local().allowance(Instant::now())
    }

    /// Follows a change of the limit; `None`: there is none any more.
    pub(super) fn set_limit(&self, limit: Option<&Limit>) {
        let has_changed = self.local().set_limit(limit, Instant::now());
        if has_changed {
            self.rounds.notify_one();
            self.open();
        }
    }

    /// Tells those who wait that they should ask again.
    pub(super) fn open(&self) {
        self.opened.send_replace(());
    }

    pub(super) fn local(&self) -> MutexGuard<'_, Local> {
        self.local.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Permit {
    /// Nothing was started after all.
    pub(crate) fn give_back(self) {
        self.gate.local().give_token_back();
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let ended = self.gate.local().end();
        match ended {
            Ended::Opened => self.gate.open(),
            // Another process waits for the place.
            Ended::Lowered => self.gate.rounds.notify_one(),
            Ended::Nothing => {}
        }
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Gate").finish_non_exhaustive()
    }
}
