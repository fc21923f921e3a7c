//! Counts events in memory, where they happen.
//!
//! A busy process has hundreds of thousands of events a second, on all threads of its runtime. Each thread counts in a
//! shard of its own, so that nearly no event waits for a lock or takes a cache line from another processor. Counts of a
//! task are allocated once between two writes, which are seconds apart.

use std::cell::Cell as ThreadCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use super::RollupTotals;
use super::report::{TierReport, Watch};
use crate::control::KnownControls;
use crate::counting::{Names, Place, SloCount, SloRules, UNKNOWN};
use crate::observe::{Event, PublishResult};
use crate::topology::Topology;

/// More shards than a process has busy threads are of no use.
const MOST_SHARDS: usize = 32;

/// What is counted apart: a task, by its index in the map, and the tier that it was in. One index stands for
/// all tasks, or tiers, that are not in the map.
pub(super) type Cell = (usize, usize);

/// The counts of a process since they were taken last.
pub(super) struct Counters {
    names: Names,
    slo: SloRules,
    shards: Box<[Shard]>,
    /// Of each tier of the map.
    watches: Box<[Watch]>,
}

/// A task that this process runs, until it is dropped.
pub(crate) struct RunningTask {
    counters: Arc<Counters>,
    tier: usize,
}

/// The counts of some threads. Aligned, so that no two are in one cache line.
#[repr(align(128))]
#[derive(Default)]
struct Shard(Mutex<Counted>);

#[derive(Default)]
struct Counted {
    /// Of each task in the tier that the map gives it. Empty until something is counted.
    mapped: Vec<Option<Box<RollupTotals>>>,
    /// Of tasks elsewhere: they were moved or promoted, the map has changed, or does not know them.
    others: HashMap<Cell, Box<RollupTotals>>,
}

impl Counters {
    pub(super) fn new(topology: &Topology, controls: KnownControls) -> Self {
        let threads = std::thread::available_parallelism().map_or(4, usize::from);
        let shards = (2 * threads).min(MOST_SHARDS);
        let names = Names::new(topology);
        Self {
            slo: SloRules::new(&names, controls),
            names,
            shards: (0..shards).map(|_| Shard::default()).collect(),
            watches: topology.tiers().iter().map(|_| Watch::default()).collect(),
        }
    }

    /// Counts a task of this tier as running. `None`: the map does not have the tier.
    pub(super) fn run(self: &Arc<Self>, tier: &str) -> Option<RunningTask> {
        let tier = self.names.tier_index(tier);
        self.watches.get(tier)?.began();
        Some(RunningTask {
            counters: self.clone(),
            tier,
        })
    }

    /// What this process sees of each tier of the map.
    pub(super) fn reports(&self) -> impl Iterator<Item = (&str, TierReport)> {
        let names = self.names.tiers().iter().map(|tier| &*tier.name);
        names.zip(self.watches.iter().map(Watch::report))
    }

    fn watch(&self, tier: &str) -> Option<&Watch> {
        self.watches.get(self.names.tier_index(tier))
    }

    pub(super) fn names(&self) -> &Names {
        &self.names
    }

    /// Counts an event.
    pub(super) fn handle(&self, event: &Event<'_>) {
        let slo = self.slo.count(&self.names, event).unwrap_or_default();
        match event {
            Event::Published {
                name,
                tier,
                result,
                delay,
                ..
            } => self.count(name, tier.unwrap_or(UNKNOWN), |it| match result {
                PublishResult::Stored => {
                    it.published += 1;
                    it.delayed += u64::from(!delay.is_zero());
                }
                PublishResult::Replaced | PublishResult::Duplicate => it.duplicates += 1,
                PublishResult::Failed(_) => it.unpublished += 1,
            }),
            Event::Started { task, waited } => {
                if let Some(watch) = self.watch(task.tier) {
                    watch.started(*waited);
                }
                self.count(task.name, task.tier, |it| {
                    it.started += 1;
                    it.wait.add(*waited);
                    it.add_slo(slo);
                });
            }
            Event::Done { task, ran } => self.count(task.name, task.tier, |it| {
                it.done += 1;
                it.run.add(*ran);
            }),
            Event::Retried { task, ran, .. } => self.count(task.name, task.tier, |it| {
                it.retried += 1;
                it.add_run(*ran);
            }),
            Event::Snoozed { task, ran, .. } => self.count(task.name, task.tier, |it| {
                it.snoozed += 1;
                it.add_run(*ran);
            }),
            Event::Discarded { task, ran, .. } => self.count(task.name, task.tier, |it| {
                it.discarded += 1;
                it.add_run(*ran);
            }),
            Event::Expired { task, .. } => self.count(task.name, task.tier, |it| {
                it.expired += 1;
                it.add_slo(slo);
            }),
            Event::Dead { task, ran, .. } => self.count(task.name, task.tier, |it| {
                it.dead += 1;
                it.add_slo(slo);
                it.add_run(*ran);
            }),
            Event::DeadByBroker {
                name, tier, count, ..
            } => self.count(name, tier, |it| {
                it.dead += count;
                it.add_slo(slo);
            }),
            Event::QueueEmpty { tier } => {
                if let Some(watch) = self.watch(tier) {
                    watch.was_empty();
                }
            }
            Event::GivenBack { task, .. } => {
                self.count(task.name, task.tier, |it| it.given_back += 1);
            }
            _ => {}
        }
    }

    /// Takes all that was counted.
    pub(super) fn take(&self, mut each: impl FnMut(Cell, Box<RollupTotals>)) {
        for Shard(shard) in &self.shards {
            let mut counted = shard.lock().unwrap_or_else(PoisonError::into_inner);
            if counted.mapped.is_empty() && counted.others.is_empty() {
                continue;
            }
            // Those who count do not wait for what follows.
            let Counted { mapped, others } = std::mem::take(&mut *counted);
            drop(counted);
            for (task, totals) in mapped.into_iter().enumerate() {
                if let Some(totals) = totals {
                    each((task, self.names.tier_of(task)), totals);
                }
            }
            for (cell, totals) in others {
                each(cell, totals);
            }
        }
    }

    /// The tasks that are paused, or were for a while since then, in the tiers that the map gives them.
    pub(super) fn paused(&self, since: SystemTime) -> Vec<Cell> {
        // Nearly always nothing is paused.
        if !self.slo.has_pauses(since) {
            return Vec::new();
        }
        let tasks = 0..self.names.tasks();
        let cells = tasks.map(|task| (task, self.names.tier_of(task)));
        cells.filter(|cell| self.is_paused(*cell, since)).collect()
    }

    fn count(&self, name: &str, tier: &str, add: impl FnOnce(&mut RollupTotals)) {
        let Some(Shard(shard)) = self.shards.get(shard_of_thread() % self.shards.len()) else {
            return;
        };
        let Place {
            task,
            tier,
            is_mapped,
        } = self.names.place(name, tier);
        let mut counted = shard.lock().unwrap_or_else(PoisonError::into_inner);
        let totals = match is_mapped {
            true => {
                if counted.mapped.is_empty() {
                    counted.mapped.resize(self.names.tasks(), None);
                }
                match counted.mapped.get_mut(task) {
                    Some(totals) => totals.get_or_insert_default(),
                    None => return,
                }
            }
            false => counted.others.entry((task, tier)).or_default(),
        };
        add(totals);
    }

    /// Whether a task or its tier is paused, or was for a while since then.
    pub(super) fn is_paused(&self, cell: Cell, since: SystemTime) -> bool {
        self.slo.is_paused(&self.names, cell, since)
    }
}

impl Drop for RunningTask {
    fn drop(&mut self) {
        if let Some(watch) = self.counters.watches.get(self.tier) {
            watch.ended();
        }
    }
}

impl RollupTotals {
    fn add_run(&mut self, ran: Option<Duration>) {
        if let Some(ran) = ran {
            self.run.add(ran);
        }
    }

    fn add_slo(&mut self, slo: SloCount) {
        self.slo_counted += slo.counted;
        self.slo_met += slo.met;
    }
}

/// The number of this thread, from 0.
fn shard_of_thread() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static NUMBER: ThreadCell<Option<usize>> = const { ThreadCell::new(None) };
    }
    let known = NUMBER.try_with(|number| {
        number.get().unwrap_or_else(|| {
            let next = NEXT.fetch_add(1, Ordering::Relaxed);
            number.set(Some(next));
            next
        })
    });
    // A thread that is ending.
    known.unwrap_or_default()
}

#[cfg(test)]
mod tests;
