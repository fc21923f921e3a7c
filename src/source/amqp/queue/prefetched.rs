//! The deliveries of a queue that wait for a slot.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use tokio::time::Instant;

use crate::control::{Gate, Outlook, Permit};
use crate::source::{Handle, Suspects};

/// Deliveries that may run, with when they came. Handles count up, so the lower one came first.
#[derive(Debug, Default)]
pub(super) struct Prefetched {
    ready: VecDeque<(Handle, Instant)>,
    /// Those with a crash count. They do not start while their process stores crash counts, and nothing waits for
    /// them.
    suspects: VecDeque<(Handle, Instant)>,
    /// Those that need a permit of their task's gate, by the task's name. Nothing waits for them.
    limited: HashMap<Arc<str>, Limited>,
}

#[derive(Debug)]
struct Limited {
    gate: Arc<Gate>,
    waiting: VecDeque<(Handle, Instant)>,
}

impl Prefetched {
    /// Adds a delivery that waits since then.
    pub(super) fn push(&mut self, handle: Handle, is_suspect: bool, since: Instant) {
        let waiting = match is_suspect {
            true => &mut self.suspects,
            false => &mut self.ready,
        };
        waiting.push_back((handle, since));
    }

    /// Adds a delivery that needs a permit of this gate.
    pub(super) fn push_limited(
        &mut self,
        task: &str,
        gate: &Arc<Gate>,
        handle: Handle,
        since: Instant,
    ) {
        let entry = (handle, since);
        if let Some(limited) = self.limited.get_mut(task) {
            limited.gate = gate.clone();
            limited.waiting.push_back(entry);
            return;
        }
        let limited = Limited {
            gate: gate.clone(),
            waiting: VecDeque::from([entry]),
        };
        self.limited.insert(task.into(), limited);
    }

    /// How many deliveries of a task wait for its gate.
    pub(super) fn limited(&self, task: &str) -> usize {
        self.limited
            .get(task)
            .map_or(0, |limited| limited.waiting.len())
    }

    pub(super) fn has_limited(&self) -> bool {
        !self.limited.is_empty()
    }

    /// Takes out, of each task that is near its limit, those that came last and cannot start soon.
    pub(super) fn take_excess(&mut self, window: usize) -> Vec<Handle> {
        let mut excess = Vec::new();
        for limited in self.limited.values_mut() {
            let waiting = limited.waiting.len();
            if let Outlook::NearLimit { startable } = limited.gate.outlook(waiting, window)
                && startable < waiting
            {
                excess.extend(limited.waiting.drain(startable..).map(|it| it.0));
            }
        }
        self.limited
            .retain(|_, limited| !limited.waiting.is_empty());
        excess.sort_unstable();
        excess
    }

    /// When a gate opens by itself.
    pub(super) fn opens_at(&self) -> Option<Instant> {
        self.limited
            .values()
            .filter_map(|limited| limited.gate.next_at())
            .min()
    }

    pub(super) fn has_suspect(&self) -> bool {
        !self.suspects.is_empty()
    }

    /// Whether one may start now.
    pub(super) fn is_ready(&self, suspects: &Suspects) -> bool {
        // Each gate is asked, so that it knows that something waits for it.
        let open = self
            .limited
            .values()
            .filter(|limited| limited.gate.is_open());
        open.count() > 0 || !self.ready.is_empty() || self.may_suspect_start(suspects)
    }

    /// The first of those that may start now, with the permit that it needs.
    pub(super) fn take(&mut self, suspects: &Suspects) -> Option<(Handle, Option<Permit>)> {
        match self.take_limited(suspects) {
            Some((handle, permit)) => Some((handle, Some(permit))),
            None => self.take_free(suspects).map(|handle| (handle, None)),
        }
    }

    /// The first of those that need a permit, if it comes before all others and there is one.
    fn take_limited(&mut self, suspects: &Suspects) -> Option<(Handle, Permit)> {
        let open = self
            .limited
            .iter()
            .filter(|(_, limited)| limited.gate.is_open());
        let first =
            open.filter_map(|(task, limited)| Some((limited.waiting.front()?.0, task.clone())));
        let (handle, task) = first.min()?;
        let ready = self.ready.front().map_or(Handle::MAX, |it| it.0);
        let suspect = match self.may_suspect_start(suspects) {
            true => self.suspects.front().map_or(Handle::MAX, |it| it.0),
            false => Handle::MAX,
        };
        if handle > ready.min(suspect) {
            return None;
        }
        let limited = self.limited.get_mut(&task)?;
        let permit = limited.gate.try_start()?;
        limited.waiting.pop_front();
        if limited.waiting.is_empty() {
            self.limited.remove(&task);
        }
        Some((handle, permit))
    }

    fn take_free(&mut self, suspects: &Suspects) -> Option<Handle> {
        let first = |waiting: &VecDeque<_>| waiting.front().map_or(Handle::MAX, |it: &(_, _)| it.0);
        let is_suspect_first =
            self.may_suspect_start(suspects) && first(&self.suspects) < first(&self.ready);
        let waiting = match is_suspect_first {
            true => &mut self.suspects,
            false => &mut self.ready,
        };
        waiting.pop_front().map(|it| it.0)
    }

    /// When the one came that has waited longest.
    pub(super) fn oldest(&self) -> Option<Instant> {
        let fronts = [self.ready.front(), self.suspects.front()];
        let limited = self.limited.values().map(|limited| limited.waiting.front());
        let fronts = fronts.into_iter().chain(limited);
        fronts.flatten().map(|it| it.1).min()
    }

    /// Takes all of them out, in the order in which they came, with the time when they did.
    pub(super) fn drain_all(&mut self) -> Vec<(Handle, Instant)> {
        let limited = std::mem::take(&mut self.limited).into_values();
        let mut all: Vec<_> = limited.flat_map(|limited| limited.waiting).collect();
        all.extend(self.ready.drain(..));
        all.extend(self.suspects.drain(..));
        all.sort_unstable();
        all
    }

    /// Takes those out that came at this time or before, in the order in which they came.
    pub(super) fn drain_until(&mut self, time: Instant) -> Vec<Handle> {
        let mut drained = Vec::new();
        let limited = self
            .limited
            .values_mut()
            .map(|limited| &mut limited.waiting);
        for waiting in [&mut self.ready, &mut self.suspects]
            .into_iter()
            .chain(limited)
        {
            let number = waiting.partition_point(|it| it.1 <= time);
            drained.extend(waiting.drain(..number).map(|it| it.0));
        }
        self.limited
            .retain(|_, limited| !limited.waiting.is_empty());
        drained.sort_unstable();
        drained
    }

    fn may_suspect_start(&self, suspects: &Suspects) -> bool {
        self.has_suspect() && suspects.start_at().is_none()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn prefetched() -> Prefetched {
        let mut prefetched = Prefetched::default();
        for (handle, is_suspect) in [(1, false), (2, true), (3, false), (4, true)] {
            prefetched.push(handle, is_suspect, Instant::now());
        }
        prefetched
    }

    fn taken(mut prefetched: Prefetched, suspects: &Suspects) -> Vec<Handle> {
        std::iter::from_fn(|| prefetched.take(suspects))
            .map(|it| it.0)
            .collect()
    }

    #[tokio::test]
    async fn deliveries_start_in_the_order_in_which_they_came() {
        let suspects = Arc::new(Suspects::default());
        assert_eq!(taken(prefetched(), &suspects), [1, 2, 3, 4]);
        assert_eq!(prefetched().drain_until(Instant::now()), [1, 2, 3, 4]);
    }

    #[tokio::test]
    async fn suspects_wait_while_crash_counts_are_stored_and_nothing_waits_for_them() {
        let suspects = Arc::new(Suspects::default());
        let _counting = suspects.count();
        assert_eq!(taken(prefetched(), &suspects), [1, 3]);
        let mut only_suspects = Prefetched::default();
        only_suspects.push(1, true, Instant::now());
        assert!(!only_suspects.is_ready(&suspects));
    }
}
