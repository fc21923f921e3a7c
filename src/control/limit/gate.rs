//! The gate of a limited tier or task: who passes it may start one task.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use tokio::sync::watch;
use tokio::time::Instant;

use super::local::{Ended, Local, Outlook, Start};
use crate::topology::Limit;

/// The limit of one tier or task, in this process. All its workers share the gate.
pub(crate) struct Gate {
    local: Mutex<Local>,
    signals: Arc<Signals>,
}

/// What the gates of a process tell others. They share it: whoever waits subscribes once, however many limits there are.
pub(super) struct Signals {
    /// Changes when more may start than before, or when those who wait are to ask again.
    opened: watch::Sender<()>,
    /// Changes when a round in which processes divide limits may be due.
    due: watch::Sender<()>,
}

/// The right to start one task. While it lives, the task counts as running.
#[derive(Debug)]
#[must_use = "the task counts as running only while this lives"]
pub(crate) struct Permit {
    gate: Arc<Gate>,
}

impl Gate {
    pub(super) fn new(limit: &Limit, signals: &Arc<Signals>) -> Self {
        let local = Local::new(limit, Instant::now(), SystemTime::now());
        Self {
            local: Mutex::new(local),
            signals: signals.clone(),
        }
    }

    /// Takes the right to start one task, or says that there is one to be started. After a refusal, ask again at
    /// [`next_at`](Self::next_at) and whenever gates have [`opened`](super::Limits::opened): a process that does not is taken
    /// for one that has nothing to start.
    pub(crate) fn try_start(self: &Arc<Self>) -> Option<Permit> {
        let start = self.local().try_start(Instant::now());
        match start {
            Start::Yes => Some(Permit { gate: self.clone() }),
            Start::No { is_new } => {
                if is_new {
                    self.signals.round_is_due();
                }
                None
            }
        }
    }

    /// Counts a task that ran before there was a limit.
    pub(crate) fn count_running(self: &Arc<Self>) -> Permit {
        self.local().count_running();
        self.signals.round_is_due();
        Permit { gate: self.clone() }
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
            self.signals.round_is_due();
        }
        startable
    }

    /// What one more task may expect that would wait for its right to start beside so many, in a source that holds at most
    /// `window` deliveries.
    pub(crate) fn outlook(&self, waiting: usize, window: usize) -> Outlook {
        self.local().outlook(waiting, window, Instant::now())
    }

    /// When a task may start by itself. `None`: now, or when gates have [`opened`](super::Limits::opened).
    pub(crate) fn next_at(&self) -> Option<Instant> {
        let now = Instant::now();
        let mut local = self.local();
        let next = local.next_at(now)?;
        if next > now {
            return Some(next);
        }
        // A token has come since somebody was refused, who will set no timer for it.
        if local.must_ask_again() {
            drop(local);
            self.signals.open();
        }
        None
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
            self.signals.round_is_due();
            self.signals.open();
        }
    }

    pub(super) fn local(&self) -> MutexGuard<'_, Local> {
        let mut local = self.local.lock().unwrap_or_else(PoisonError::into_inner);
        local.set_wall_clock(SystemTime::now());
        local
    }
}

impl Permit {
    /// Nothing was started after all.
    pub(crate) fn give_back(self) {
        let is_opened = self.gate.local().give_token_back(Instant::now());
        if is_opened {
            self.gate.signals.open();
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let ended = self.gate.local().end();
        match ended {
            Ended::Opened => self.gate.signals.open(),
            // Another process waits for the place.
            Ended::GivesUpPlace => self.gate.signals.round_is_due(),
            Ended::Nothing => {}
        }
    }
}

impl Signals {
    pub(super) fn new() -> Self {
        Self {
            opened: watch::channel(()).0,
            due: watch::channel(()).0,
        }
    }

    /// Tells those who wait to ask again.
    pub(super) fn open(&self) {
        self.opened.send_replace(());
    }

    /// Changes when those who wait are to ask again.
    pub(super) fn opened(&self) -> watch::Receiver<()> {
        self.opened.subscribe()
    }

    fn round_is_due(&self) {
        self.due.send_replace(());
    }

    /// Changes when a round may be due.
    #[cfg(feature = "postgres")]
    pub(super) fn due(&self) -> watch::Receiver<()> {
        self.due.subscribe()
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Gate").finish_non_exhaustive()
    }
}
