//! Counts events in memory, where they happen.
//!
//! A busy process has hundreds of thousands of events a second, on all threads of its runtime. Each thread counts in a
//! shard of its own, so that nearly no event waits for a lock or takes a cache line from another processor. Counts of a
//! task are allocated once between two writes, which are seconds apart.

use std::cell::Cell as ThreadCell;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use super::RollupTotals;
use crate::control::KnownControls;
use crate::message::DeadReason;
use crate::observe::{Event, PublishResult};
use crate::topology::Topology;

/// The name under which tiers and tasks are counted that are not in the map.
pub const UNKNOWN: &str = "(unknown)";

/// More shards than a process has busy threads are of no use.
const MOST_SHARDS: usize = 32;

/// What is counted apart: a task, by its index in the map, and the tier that it was in. One index stands for
/// all tasks, or tiers, that are not in the map.
pub(super) type Cell = (usize, usize);

/// The counts of a process since they were taken last.
pub(super) struct Counters {
    names: Names,
    controls: KnownControls,
    shards: Box<[Shard]>,
}

/// The tasks and tiers of the map.
pub(super) struct Names {
    /// The index of each task, and of the tier that the map gives it.
    tasks: ByName<(usize, usize)>,
    tiers: ByName<usize>,
    has_slo: bool,
    /// By their index.
    task_names: Vec<Box<str>>,
    /// The index of tasks that are not in the map.
    unknown: usize,
    known_tiers: Vec<KnownTier>,
}

/// The names are those of the map, so nobody can choose ones that collide, and a quick hash will do: each event looks one up.
type ByName<T> = HashMap<Box<str>, T, BuildHasherDefault<Fnv>>;

/// FNV-1a, which is quick for names as short as these.
struct Fnv(u64);

impl Default for Fnv {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Hasher for Fnv {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

struct KnownTier {
    name: Box<str>,
    group: Box<str>,
    slo: Option<Duration>,
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
        Self {
            names: Names::new(topology),
            controls,
            shards: (0..shards).map(|_| Shard::default()).collect(),
        }
    }

    pub(super) fn names(&self) -> &Names {
        &self.names
    }

    /// Counts an event.
    pub(super) fn handle(&self, event: &Event<'_>) {
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
                let met = self.meets_slo(task.name, task.tier, *waited);
                self.count(task.name, task.tier, |it| {
                    it.started += 1;
                    it.wait.add(*waited);
                    it.slo_counted += u64::from(met.is_some());
                    it.slo_met += u64::from(met == Some(true));
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
            Event::Expired { task, .. } => {
                let has_slo = self.slo(task.tier).is_some();
                self.count(task.name, task.tier, |it| {
                    it.expired += 1;
                    it.slo_counted += u64::from(has_slo);
                });
            }
            Event::Dead {
                task, reason, ran, ..
            } => {
                let waited_in_vain =
                    *reason == DeadReason::Expired && self.slo(task.tier).is_some();
                self.count(task.name, task.tier, |it| {
                    it.dead += 1;
                    it.slo_counted += u64::from(waited_in_vain);
                    it.add_run(*ran);
                });
            }
            Event::DeadByBroker {
                name,
                tier,
                has_expired,
                count,
            } => {
                let waited_in_vain = *has_expired && self.slo(tier).is_some();
                self.count(name, tier, |it| {
                    it.dead += count;
                    it.slo_counted += if waited_in_vain { *count } else { 0 };
                });
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
        if !self.controls.now().has_pauses(since) {
            return Vec::new();
        }
        let tasks = 0..self.names.task_names.len();
        let cells = tasks.map(|task| (task, self.names.tier_of(task)));
        cells.filter(|cell| self.is_paused(*cell, since)).collect()
    }

    fn count(&self, name: &str, tier: &str, add: impl FnOnce(&mut RollupTotals)) {
        let Some(Shard(shard)) = self.shards.get(shard_of_thread() % self.shards.len()) else {
            return;
        };
        let names = &self.names;
        let task = names.tasks.get(name).copied();
        // Nearly always the tier is the one that the map says.
        let is_mapped = task.is_some_and(|(_, mapped)| {
            let mapped = names.known_tiers.get(mapped);
            mapped.is_some_and(|mapped| &*mapped.name == tier)
        });
        let index = task.map_or(names.unknown, |(index, _)| index);
        let tier = match is_mapped {
            true => 0,
            false => names.tier_index(tier),
        };
        let mut counted = shard.lock().unwrap_or_else(PoisonError::into_inner);
        let totals = match is_mapped {
            true => {
                if counted.mapped.is_empty() {
                    counted.mapped.resize(names.task_names.len(), None);
                }
                match counted.mapped.get_mut(index) {
                    Some(totals) => totals.get_or_insert_default(),
                    None => return,
                }
            }
            false => counted.others.entry((index, tier)).or_default(),
        };
        add(totals);
    }

    fn slo(&self, tier: &str) -> Option<Duration> {
        match self.names.has_slo {
            true => self.tier(tier)?.slo,
            false => None,
        }
    }

    fn tier(&self, name: &str) -> Option<&KnownTier> {
        self.names.known_tiers.get(*self.names.tiers.get(name)?)
    }

    /// Whether a start meets the SLO of its tier; `None` if that has none.
    fn meets_slo(&self, task: &str, tier: &str, waited: Duration) -> Option<bool> {
        let slo = self.slo(tier)?;
        if waited <= slo {
            return Some(true);
        }
        let now = SystemTime::now();
        let since = now.checked_sub(waited)?;
        let group = self.tier(tier).map_or("", |tier| &*tier.group);
        let snapshot = self.controls.now();
        let paused = snapshot.paused_between(group, tier, task, since, now);
        Some(waited.saturating_sub(paused) <= slo)
    }

    /// Whether a task or its tier is paused, or was for a while since then.
    pub(super) fn is_paused(&self, (task, tier): Cell, since: SystemTime) -> bool {
        let (task, Some(tier)) = (self.names.task(task), self.names.known_tiers.get(tier)) else {
            return false;
        };
        let snapshot = self.controls.now();
        let now = SystemTime::now();
        snapshot.is_paused(&tier.group, &tier.name)
            || snapshot.is_task_paused(task)
            || !snapshot
                .paused_between(&tier.group, &tier.name, task, since, now)
                .is_zero()
    }
}

impl RollupTotals {
    fn add_run(&mut self, ran: Option<Duration>) {
        if let Some(ran) = ran {
            self.run.add(ran);
        }
    }
}

impl Names {
    fn new(topology: &Topology) -> Self {
        let group_of = |tier: &str| {
            let group = topology.group_of(tier);
            group.map_or("", |group| &group.name).into()
        };
        let known_tiers: Vec<KnownTier> = topology
            .tiers()
            .iter()
            .map(|tier| KnownTier {
                name: tier.name.as_str().into(),
                group: group_of(&tier.name),
                slo: tier.slo,
            })
            .collect();
        let tiers = known_tiers.iter().map(|tier| tier.name.clone());
        let tiers: ByName<usize> = tiers.zip(0..).collect();
        let tier_of = |name: &str| tiers.get(name).copied().unwrap_or(known_tiers.len());
        let tasks = topology.tasks().iter().enumerate();
        let mut names = topology.tasks().iter();
        Self {
            // A task may have the name under which these are counted: two cells of one name would be one row twice.
            unknown: names
                .position(|task| task.name == UNKNOWN)
                .unwrap_or(topology.tasks().len()),
            tasks: tasks
                .map(|(index, task)| (task.name.as_str().into(), (index, tier_of(&task.tier))))
                .collect(),
            task_names: topology
                .tasks()
                .iter()
                .map(|task| task.name.as_str().into())
                .collect(),
            tiers,
            has_slo: known_tiers.iter().any(|tier| tier.slo.is_some()),
            known_tiers,
        }
    }

    /// The name of a task.
    pub(super) fn task(&self, index: usize) -> &str {
        self.task_names.get(index).map_or(UNKNOWN, |name| name)
    }

    /// The name of a tier.
    pub(super) fn tier(&self, index: usize) -> &str {
        let tier = self.known_tiers.get(index);
        tier.map_or(UNKNOWN, |tier| &tier.name)
    }

    fn tier_index(&self, name: &str) -> usize {
        let index = self.tiers.get(name).copied();
        index.unwrap_or(self.known_tiers.len())
    }

    /// The tier that the map gives a task.
    fn tier_of(&self, task: usize) -> usize {
        let name = self.task_names.get(task);
        let mapped = name.and_then(|name| self.tasks.get(name));
        mapped.map_or(self.known_tiers.len(), |(_, tier)| *tier)
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
