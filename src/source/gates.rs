//! The gates of the tasks of a source: they wake it when something may start.

use std::sync::Arc;
use std::task::Context;

use tokio::sync::watch;

use crate::control::{Gates, Gating, Limits, WatchedGate};

pub(crate) struct TaskGates {
    limits: watch::Receiver<Arc<Gates>>,
    watched: Vec<WatchedGate>,
}

impl TaskGates {
    pub(crate) fn new(limits: &Limits, gating: &Gating) -> Self {
        let mut limits = limits.changes();
        limits.mark_unchanged();
        let mut gates = Self {
            limits,
            watched: Vec::new(),
        };
        gates.watch(gating);
        gates
    }

    /// Whether tasks have come to have a limit, or have lost it, since the last call of [`watch`](Self::watch).
    pub(crate) fn has_changed(&self) -> bool {
        matches!(self.limits.has_changed(), Ok(true))
    }

    /// Waits for these gates from now on.
    pub(crate) fn watch(&mut self, gating: &Gating) {
        self.limits.mark_unchanged();
        self.watched = gating.gates().cloned().map(WatchedGate::new).collect();
    }

    /// Whether a gate has opened, most likely. The waker of `cx` is woken when one does.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> bool {
        let opened = self
            .watched
            .iter_mut()
            .filter_map(|gate| gate.poll(cx).then_some(()));
        opened.count() > 0
    }
}
