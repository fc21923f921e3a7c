//! Claimed rows that wait for a slot, in the order of the tier. Those of a task with a limit wait for its gate too, and hold
//! up no others.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use tokio::time::Instant;

use super::OrderKey;
use crate::control::{Gate, Permit};
use crate::source::Handle;

#[derive(Default)]
pub(super) struct Waiting {
    free: BTreeMap<OrderKey, Handle>,
    /// By the name of their task.
    limited: HashMap<Arc<str>, Limited>,
}

struct Limited {
    gate: Arc<Gate>,
    rows: BTreeMap<OrderKey, Handle>,
}

impl Waiting {
    pub(super) fn insert(&mut self, place: OrderKey, handle: Handle) {
        self.free.insert(place, handle);
    }

    /// Adds a row that needs a permit of this gate.
    pub(super) fn insert_limited(
        &mut self,
        task: &str,
        gate: &Arc<Gate>,
        place: OrderKey,
        handle: Handle,
    ) {
        if let Some(limited) = self.limited.get_mut(task) {
            limited.gate = gate.clone();
            limited.rows.insert(place, handle);
            return;
        }
        let limited = Limited {
            gate: gate.clone(),
            rows: BTreeMap::from([(place, handle)]),
        };
        self.limited.insert(task.into(), limited);
    }

    /// How many rows of a task wait for its gate.
    pub(super) fn limited(&self, task: &str) -> usize {
        self.limited
            .get(task)
            .map_or(0, |limited| limited.rows.len())
    }

    /// How many rows wait for the gate of their task.
    pub(super) fn waiting_for_gates(&self) -> usize {
        self.limited
            .values()
            .map(|limited| limited.rows.len())
            .sum()
    }

    pub(super) fn remove(&mut self, place: &OrderKey) {
        if self.free.remove(place).is_none() {
            for limited in self.limited.values_mut() {
                limited.rows.remove(place);
            }
            self.limited.retain(|_, limited| !limited.rows.is_empty());
        }
    }

    /// Whether one may start now.
    pub(super) fn is_ready(&self) -> bool {
        // Each gate is asked, so that it knows that something waits for it.
        let open = self
            .limited
            .values()
            .filter(|limited| limited.gate.is_open());
        open.count() > 0 || !self.free.is_empty()
    }

    /// The first of those that may start now, with its permit.
    pub(super) fn take(&mut self) -> Option<(Handle, Option<Permit>)> {
        let free = self.free.first_key_value().map(|(place, _)| *place);
        let open = self
            .limited
            .iter()
            .filter(|(_, limited)| limited.gate.is_open());
        let first =
            open.filter_map(|(task, limited)| Some((*limited.rows.first_key_value()?.0, task)));
        let first = first.min_by_key(|(place, _)| *place);
        if let Some((place, task)) = first
            && free.is_none_or(|free| place < free)
        {
            let task = task.clone();
            if let Some(limited) = self.limited.get_mut(&task)
                && let Some(permit) = limited.gate.try_start()
                && let Some((_, handle)) = limited.rows.pop_first()
            {
                if limited.rows.is_empty() {
                    self.limited.remove(&task);
                }
                return Some((handle, Some(permit)));
            }
        }
        self.free.pop_first().map(|(_, handle)| (handle, None))
    }

    /// When a gate opens by itself.
    pub(super) fn opens_at(&self) -> Option<Instant> {
        self.limited
            .values()
            .filter_map(|limited| limited.gate.next_at())
            .min()
    }

    /// Takes all of them out.
    pub(super) fn drain(&mut self) -> Vec<Handle> {
        let free = std::mem::take(&mut self.free);
        let limited = std::mem::take(&mut self.limited).into_values();
        let mut all: Vec<(OrderKey, Handle)> = limited.flat_map(|it| it.rows).chain(free).collect();
        all.sort_unstable();
        all.into_iter().map(|(_, handle)| handle).collect()
    }
}
