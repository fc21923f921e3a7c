//! Deliveries of tasks that are paused or limited.

use std::sync::Arc;

use tokio::time::Instant;

use super::Queue;
use crate::control::{Gated, Gating};
use crate::message::Received;
use crate::source::Handle;

impl Queue {
    /// Follows what operators change: what was prefetched may have to wait now, or may run.
    pub(super) fn follow_controls(&mut self) {
        let has_changed = matches!(self.controls.has_changed(), Ok(true));
        if !matches!(self.limits.has_changed(), Ok(true)) && !has_changed {
            return;
        }
        self.limits.mark_unchanged();
        let snapshot = self.controls.borrow_and_update().clone();
        let (topology, limits) = (&self.settings.topology, &self.settings.limits);
        self.gating = Gating::new(topology, &self.name, &snapshot, limits);
        for handle in self.prefetched.drain_until(Instant::now()) {
            self.admit_again(handle);
        }
    }

    fn admit_again(&mut self, handle: Handle) {
        let Some(unsettled) = self.unsettled.get(&handle) else {
            return;
        };
        let received: Arc<Received> = unsettled.received.clone();
        if self.must_park(&received) {
            #[cfg(feature = "postgres")]
            {
                let settings = self.settings.clone();
                self.store(handle, async move { settings.park(&received).await });
            }
            return;
        }
        match self.gating.of(received.task()) {
            Some(Gated::Limited(gate)) => {
                self.prefetched.push_limited(received.task(), gate, handle);
            }
            _ => self.prefetched.push(handle, received.crashes() > 0),
        }
    }

    /// Whether a delivery has to become a row of its tier, where it waits until it may run. Without a database it waits here.
    pub(super) fn must_park(&self, received: &Received) -> bool {
        if !self.settings.publisher.has_database() || self.drain.is_some() {
            return false;
        }
        let task = received.task();
        match self.gating.of(task) {
            None => false,
            Some(Gated::Paused | Gated::PerKey { .. }) => true,
            Some(Gated::Limited(gate)) => {
                let is_full = self.prefetched.limited(task) >= gate.allowance();
                let is_behind = self.settings.parked_tasks.contains(&self.name, task);
                if is_full {
                    // Those that come later must not start before it.
                    self.settings.parked_tasks.insert(&self.name, task);
                }
                is_full || is_behind
            }
        }
    }
}
