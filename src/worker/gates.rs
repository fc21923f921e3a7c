//! The gates of a group's tiers: which of them may start something now.

use std::sync::Arc;
use std::task::Context;

use futures_util::future::{BoxFuture, FutureExt};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::control::{Gate, Limits, Permit};

/// The gates of the tiers of a group, by their index. A tier without a limit has none.
pub(super) struct TierGates {
    limits: Limits,
    limits_changed: BoxFuture<'static, ()>,
    gates: Vec<Option<Arc<Gate>>>,
    /// Completes when any gate of the process has opened: sources ask those of tasks.
    opened: BoxFuture<'static, ()>,
}

impl TierGates {
    pub(super) fn new(limits: &Limits, tiers: &[String]) -> Self {
        let mut gates = Self {
            limits_changed: changed(limits.changes()),
            limits: limits.clone(),
            gates: Vec::new(),
            opened: changed(limits.opened()),
        };
        gates.find(tiers);
        gates
    }

    /// Follows the limits, and wakes the group when a gate has changed. Whether there may be gates that were not there before.
    pub(super) fn poll(&mut self, tiers: &[String], cx: &mut Context<'_>) -> bool {
        let mut has_changed = false;
        while self.limits_changed.poll_unpin(cx).is_ready() {
            self.limits_changed = changed(self.limits.changes());
            self.find(tiers);
            has_changed = true;
        }
        while self.opened.poll_unpin(cx).is_ready() {
            self.opened = changed(self.limits.opened());
        }
        has_changed
    }

    fn find(&mut self, tiers: &[String]) {
        self.gates = tiers.iter().map(|name| self.limits.tier(name)).collect();
    }

    /// How many deliveries of a tier may start now. If there is one to be started (`is_ready`), that is noted.
    pub(super) fn startable(&self, tier: usize, is_ready: bool) -> usize {
        match &self.gates[tier] {
            Some(gate) => gate.startable(is_ready),
            None => usize::MAX,
        }
    }

    /// When the next delivery of a tier may start by itself.
    pub(super) fn next_at(&self, tier: usize) -> Option<Instant> {
        self.gates[tier].as_ref()?.next_at()
    }

    /// Takes the right to start a delivery of a tier.
    ///
    /// # Errors
    /// The gate is closed.
    pub(super) fn try_start(&self, tier: usize) -> Result<Option<Permit>, Closed> {
        match &self.gates[tier] {
            Some(gate) => gate.try_start().map(Some).ok_or(Closed),
            None => Ok(None),
        }
    }
}

/// The permits of a tier and a task that have limits. They end with the handler, in whatever way it ends, and also with one
/// that hangs: what it still does, nobody counts any more.
pub(super) struct Permits {
    tier: Option<Permit>,
    task: Option<Permit>,
}

impl Permits {
    pub(super) fn new(tier: Option<Permit>, task: Option<Permit>) -> Self {
        Self { tier, task }
    }

    /// Counts what runs at the gates that were not there when it started.
    pub(super) fn count_running(&mut self, gates: &TierGates, tier: usize, task: &str) {
        if self.tier.is_none() {
            self.tier = gates.gates[tier].as_ref().map(Gate::count_running);
        }
        if self.task.is_none() {
            self.task = gates.limits.task(task).as_ref().map(Gate::count_running);
        }
    }

    /// The handler was not called, for example because the publisher's `expires` had passed. That is not a start.
    pub(super) fn give_back(self) {
        let permits = self.tier.into_iter().chain(self.task);
        permits.for_each(Permit::give_back);
    }
}

/// Nothing of the tier may start now.
pub(super) struct Closed;

/// Completes when the value changes after this call.
pub(super) fn changed<T: Send + Sync + 'static>(
    mut value: watch::Receiver<T>,
) -> BoxFuture<'static, ()> {
    value.mark_unchanged();
    Box::pin(async move {
        if value.changed().await.is_err() {
            // The worker is gone, and with it its groups; or nothing can change any more.
            std::future::pending().await
        }
    })
}
