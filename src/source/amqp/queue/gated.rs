//! Deliveries of tasks that are paused or limited.

use std::sync::Arc;

use tokio::time::Instant;

use super::Queue;
use crate::control::{Gated, Gating, Outlook};
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
        self.gating = Arc::new(Gating::new(topology, &self.name, &snapshot, limits));
        self.parks_arrivals = false;
        for (handle, since) in self.prefetched.drain_all() {
            let Some(unsettled) = self.unsettled.get(&handle) else {
                continue;
            };
            let received = unsettled.received.clone();
            match self.must_park(&received) {
                true => self.park(handle, received),
                false => self.admit(handle, &received, since),
            }
        }
    }

    /// Lets a delivery wait for a slot, and for the gate of its task if it has one.
    pub(super) fn admit(&mut self, handle: Handle, received: &Received, since: Instant) {
        match self.gating.of(received.task()) {
            Some(Gated::Limited(gate)) => {
                self.prefetched
                    .push_limited(received.task(), gate, handle, since);
            }
            _ => self.prefetched.push(handle, received.crashes() > 0, since),
        }
    }

    /// Whether a delivery has to become a row of its tier, where it waits until it may run. Without a database it waits here.
    ///
    /// One that waits here for its gate has a place of the prefetch window, which other tasks of the tier need.
    pub(super) fn must_park(&self, received: &Received) -> bool {
        if !self.settings.publisher.has_database() || self.drain.is_some() {
            return false;
        }
        let task = received.task();
        let parked = &self.settings.parked_tasks;
        match self.gating.of(task) {
            None => false,
            Some(Gated::Paused { .. } | Gated::PerKey { .. }) => true,
            Some(Gated::Limited(gate)) => {
                let waiting = self.prefetched.limited(task);
                // While no row can be stored, this process starts from here what its share allows.
                match parked.are_failing() {
                    true => waiting >= gate.allowance(),
                    false => match gate.outlook(waiting, self.window.into()) {
                        Outlook::Undecided | Outlook::FarFromLimit => received.crashes() > 0,
                        Outlook::NearLimit { startable } => {
                            received.crashes() > 0
                                || parked.contains(&self.name, task)
                                || startable <= waiting
                        }
                    },
                }
            }
        }
    }

    /// Makes rows of deliveries that have waited for their gate, and will wait on: others need their places of the prefetch
    /// window.
    pub(super) fn park_excess(&mut self) {
        if !self.prefetched.has_limited()
            || !self.settings.publisher.has_database()
            || self.drain.is_some()
            || self.settings.parked_tasks.are_failing()
        {
            return;
        }
        for handle in self.prefetched.take_excess(self.window.into()) {
            if let Some(unsettled) = self.unsettled.get(&handle) {
                let received = unsettled.received.clone();
                self.park(handle, received);
            }
        }
    }

    /// Makes a delivery a row of its tier.
    pub(super) fn park(&mut self, handle: Handle, received: Arc<Received>) {
        #[cfg(feature = "postgres")]
        {
            let is_gated = self.gating.of(received.task()).is_some();
            if is_gated {
                // Those that come later must not start before it.
                self.settings
                    .parked_tasks
                    .insert(&self.name, received.task());
            }
            let gating = is_gated.then(|| self.gating.clone());
            let (settings, origin) = (self.settings.clone(), self.origin());
            self.store(handle, async move {
                settings.park(&origin, &received, gating.as_deref()).await
            });
        }
        #[cfg(not(feature = "postgres"))]
        let _ = (handle, received);
    }
}
