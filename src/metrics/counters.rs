//! Counts events where they happen, in atomics: an event costs a lookup of its task and a few additions.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use super::histogram::{AtomicHistogram, Edges};
use super::labels::{BY_BROKER, Outcome, PURPOSES, REASONS, RESULTS};
use super::labels::{purpose_index, reason_index, result_index};
use super::running::Running;
use crate::control::KnownControls;
use crate::counting::{Names, Place, SloRules, UNKNOWN};
use crate::observe::{Event, TaskRef};
use crate::topology::{Group, Topology};

/// More services than a process has are counted as one.
const MOST_SERVICES: usize = 200;

/// The counts of a process since it began.
pub(super) struct Counters {
    pub(super) names: Names,
    slo: SloRules,
    /// Of waits: they have an edge at every SLO of the map.
    pub(super) wait_edges: Edges,
    pub(super) edges: Edges,
    /// By task, then by tier. Made when something is counted there.
    tasks: Box<[OnceLock<TaskRow>]>,
    /// By their index, and those that the map does not have.
    pub(super) tiers: Box<[TierCounts]>,
    pub(super) groups: Box<[GroupCounts]>,
    pub(super) schedules: Box<[ScheduleCounts]>,
    pub(super) schedule_late: AtomicHistogram,
    pub(super) running: Running,
    pub(super) process: Arc<ProcessCounts>,
}

/// A task's counts by tier.
type TaskRow = Box<[OnceLock<Box<TaskCounts>>]>;

/// The counts of a task in a tier.
pub(super) struct TaskCounts {
    /// By [`RESULTS`].
    pub(super) published: [AtomicU64; RESULTS.len()],
    pub(super) wait: AtomicHistogram,
    /// By [`Outcome`].
    pub(super) outcomes: [AtomicU64; Outcome::ALL.len()],
    pub(super) runs: [OnceLock<Box<AtomicHistogram>>; Outcome::ALL.len()],
    /// By [`REASONS`].
    pub(super) dead: [AtomicU64; REASONS.len()],
}

/// The counts of a tier.
#[derive(Default)]
pub(super) struct TierCounts {
    pub(super) publish: OnceLock<Box<AtomicHistogram>>,
    pub(super) slo_met: AtomicU64,
    pub(super) slo_missed: AtomicU64,
    pub(super) suspected: AtomicU64,
    pub(super) leases_lost: AtomicU64,
    pub(super) relayed: AtomicU64,
    pub(super) rerouted: AtomicU64,
    pub(super) redriven: [AtomicU64; RESULTS.len()],
    /// By the tier that tasks moved to. Empty for tiers without `promote`.
    pub(super) promoted: OnceLock<Box<[AtomicU64]>>,
}

/// A group, and whether this process works for it.
pub(super) struct GroupCounts {
    pub(super) name: Box<str>,
    /// The slots of its workers in this process.
    pub(super) slots: AtomicI64,
    pub(super) workers: AtomicI64,
    pub(super) tiers: Box<[GroupTier]>,
}

/// A tier of a group.
pub(super) struct GroupTier {
    pub(super) tier: usize,
    pub(super) is_consuming: AtomicBool,
}

pub(super) struct ScheduleCounts {
    pub(super) name: Box<str>,
    pub(super) published: AtomicU64,
    pub(super) missed: AtomicU64,
}

/// What is counted of the process itself.
#[derive(Default)]
pub(super) struct ProcessCounts {
    /// By [`PURPOSES`].
    pub(super) connected: [AtomicI64; PURPOSES.len()],
    pub(super) connect_failures: [AtomicU64; PURPOSES.len()],
    pub(super) leads: AtomicBool,
    pub(super) restarts: Mutex<BTreeMap<Box<str>, u64>>,
}

impl Counters {
    pub(super) fn new(
        topology: &Topology,
        controls: KnownControls,
        process: Arc<ProcessCounts>,
    ) -> Self {
        let names = Names::new(topology);
        let edges = Edges::with([]);
        let tiers = 0..=names.tiers().len();
        let schedules = topology.schedules().iter();
        let schedules = schedules.map(|it| it.name.as_str()).chain([UNKNOWN]);
        Self {
            slo: SloRules::new(&names, controls),
            wait_edges: Edges::with(names.tiers().iter().filter_map(|tier| tier.slo)),
            tasks: (0..=names.tasks()).map(|_| OnceLock::new()).collect(),
            tiers: tiers.map(|_| TierCounts::default()).collect(),
            groups: topology
                .groups()
                .iter()
                .map(|group| GroupCounts::new(group, &names))
                .collect(),
            schedules: schedules.map(ScheduleCounts::new).collect(),
            schedule_late: AtomicHistogram::new(&edges),
            running: Running::default(),
            process,
            names,
            edges,
        }
    }

    /// Counts an event.
    pub(super) fn handle(&self, event: &Event<'_>) {
        match event {
            Event::Published {
                name,
                tier,
                result,
                took,
                ..
            } => {
                let place = self.names.place(name, tier.unwrap_or(UNKNOWN));
                add(&self.task(place).published, result_index(*result), 1);
                let tier = self.tier(place.tier);
                let publish = tier.publish.get_or_init(|| self.histogram());
                publish.add(&self.edges, *took);
            }
            Event::Started { task, waited } => {
                let place = self.place(task);
                self.task(place).wait.add(&self.wait_edges, *waited);
                self.running.started(task.id, place);
                self.count_slo(event, place.tier);
            }
            Event::Ended { task, .. } => self.running.ended(task.id, self.place(task)),
            Event::Done { task, ran } => self.ended(task, Outcome::Done, Some(*ran)),
            Event::Retried { task, ran, .. } => self.ended(task, Outcome::Retried, *ran),
            Event::Snoozed { task, ran, .. } => self.ended(task, Outcome::Snoozed, *ran),
            Event::Discarded { task, ran, .. } => self.ended(task, Outcome::Discarded, *ran),
            Event::GivenBack { task, ran, .. } => self.ended(task, Outcome::GivenBack, *ran),
            Event::Expired { task, .. } => {
                self.ended(task, Outcome::Expired, None);
                self.count_slo(event, self.place(task).tier);
            }
            Event::Dead {
                task, reason, ran, ..
            } => {
                self.ended(task, Outcome::Dead, *ran);
                let place = self.place(task);
                add(&self.task(place).dead, reason_index(*reason), 1);
                self.count_slo(event, place.tier);
            }
            Event::DeadByBroker {
                name,
                tier,
                has_expired,
                count,
            } => {
                let place = self.names.place(name, tier);
                let counts = self.task(place);
                let reason = match has_expired {
                    true => reason_index(crate::message::DeadReason::Expired),
                    false => BY_BROKER,
                };
                add(&counts.outcomes, Outcome::Dead as usize, *count);
                add(&counts.dead, reason, *count);
                self.count_slo(event, place.tier);
            }
            Event::Redriven { tier, result, .. } => {
                let tier = self.tier(self.names.tier_index(tier));
                add(&tier.redriven, result_index(*result), 1);
            }
            Event::Suspected { task, .. } => self.tier_of(task.tier, |it| &it.suspected),
            Event::LeaseLost { task } => self.tier_of(task.tier, |it| &it.leases_lost),
            Event::Relayed { task } => self.tier_of(task.tier, |it| &it.relayed),
            Event::Rerouted { task } => self.tier_of(task.tier, |it| &it.rerouted),
            Event::Promoted { from, to, count } => {
                let tiers = self.tiers.len();
                let from = self.tier(self.names.tier_index(from));
                let promoted = from
                    .promoted
                    .get_or_init(|| (0..tiers).map(|_| AtomicU64::new(0)).collect());
                add(promoted, self.names.tier_index(to), *count);
            }
            Event::GroupStarted { group, slots } => self.change_group(group, *slots, 1),
            Event::GroupEnded { group, slots } => self.change_group(group, *slots, -1),
            Event::Consuming { group, tier } => self.set_consuming(group, tier, true),
            Event::Interrupted { group, tier, .. } => self.set_consuming(group, tier, false),
            Event::SchedulePublished { schedule, late, .. } => {
                self.schedule_late.add(&self.edges, *late);
                if let Some(schedule) = self.schedule(schedule) {
                    schedule.published.fetch_add(1, Ordering::Relaxed);
                }
            }
            Event::ScheduleMissed {
                schedule, count, ..
            } => {
                if let Some(schedule) = self.schedule(schedule) {
                    schedule.missed.fetch_add(*count, Ordering::Relaxed);
                }
            }
            _ => self.process.handle(event),
        }
    }

    /// The counts of a task in a tier, if anything was counted there.
    pub(super) fn counted(&self, task: usize, tier: usize) -> Option<&TaskCounts> {
        let counts = self.tasks.get(task)?.get()?.get(tier)?.get()?;
        Some(counts)
    }

    fn ended(&self, task: &TaskRef<'_>, outcome: Outcome, ran: Option<Duration>) {
        let counts = self.task(self.place(task));
        add(&counts.outcomes, outcome as usize, 1);
        if let (Some(ran), Some(runs)) = (ran, counts.runs.get(outcome as usize)) {
            runs.get_or_init(|| self.histogram()).add(&self.edges, ran);
        }
    }

    fn count_slo(&self, event: &Event<'_>, tier: usize) {
        if let Some(count) = self.slo.count(&self.names, event) {
            let tier = self.tier(tier);
            tier.slo_met.fetch_add(count.met, Ordering::Relaxed);
            let missed = count.counted - count.met;
            tier.slo_missed.fetch_add(missed, Ordering::Relaxed);
        }
    }

    fn place(&self, task: &TaskRef<'_>) -> Place {
        self.names.place(task.name, task.tier)
    }

    fn task(&self, place: Place) -> &TaskCounts {
        let tiers = self.tiers.len();
        let row =
            self.tasks[place.task].get_or_init(|| (0..tiers).map(|_| OnceLock::new()).collect());
        row[place.tier].get_or_init(|| Box::new(TaskCounts::new(&self.wait_edges)))
    }

    fn tier(&self, index: usize) -> &TierCounts {
        &self.tiers[index]
    }

    fn tier_of(&self, name: &str, count: impl FnOnce(&TierCounts) -> &AtomicU64) {
        let tier = self.tier(self.names.tier_index(name));
        count(tier).fetch_add(1, Ordering::Relaxed);
    }

    fn histogram(&self) -> Box<AtomicHistogram> {
        Box::new(AtomicHistogram::new(&self.edges))
    }

    fn group(&self, name: &str) -> Option<&GroupCounts> {
        self.groups.iter().find(|group| *group.name == *name)
    }

    fn change_group(&self, group: &str, slots: usize, by: i64) {
        let Some(group) = self.group(group) else {
            return;
        };
        let slots = i64::try_from(slots).unwrap_or_default();
        group.slots.fetch_add(by * slots, Ordering::Relaxed);
        if group.workers.fetch_add(by, Ordering::Relaxed) + by <= 0 {
            for tier in &group.tiers {
                tier.is_consuming.store(false, Ordering::Relaxed);
            }
        }
    }

    fn set_consuming(&self, group: &str, tier: &str, is_consuming: bool) {
        let tier = self.names.tier_index(tier);
        let group = self.group(group);
        let mut tiers = group.into_iter().flat_map(|group| &group.tiers);
        if let Some(tier) = tiers.find(|it| it.tier == tier) {
            tier.is_consuming.store(is_consuming, Ordering::Relaxed);
        }
    }

    fn schedule(&self, name: &str) -> Option<&ScheduleCounts> {
        let mut schedules = self.schedules.iter();
        let known = schedules.find(|it| *it.name == *name);
        // The last one stands for those that the map does not have.
        known.or(self.schedules.last())
    }
}

impl ProcessCounts {
    /// Counts an event of the process itself.
    pub(super) fn handle(&self, event: &Event<'_>) {
        let connected = |purpose, by| {
            if let Some(connected) = self.connected.get(purpose_index(purpose)) {
                connected.fetch_add(by, Ordering::Relaxed);
            }
        };
        match event {
            Event::Connected { purpose, .. } => connected(*purpose, 1),
            Event::Disconnected { purpose, .. } | Event::ConnectionClosed { purpose } => {
                connected(*purpose, -1);
            }
            Event::ConnectFailed { purpose, .. } => {
                add(&self.connect_failures, purpose_index(*purpose), 1);
            }
            Event::LeaderChanged { leads, .. } => self.leads.store(*leads, Ordering::Relaxed),
            Event::Restarted { service, .. } => {
                let mut restarts = self.restarts.lock().unwrap_or_else(PoisonError::into_inner);
                let name = match restarts.len() < MOST_SERVICES || restarts.contains_key(*service) {
                    true => service,
                    false => UNKNOWN,
                };
                *restarts.entry(name.into()).or_default() += 1;
            }
            _ => {}
        }
    }
}

impl TaskCounts {
    fn new(wait_edges: &Edges) -> Self {
        Self {
            published: Default::default(),
            wait: AtomicHistogram::new(wait_edges),
            outcomes: Default::default(),
            runs: Default::default(),
            dead: Default::default(),
        }
    }
}

impl GroupCounts {
    fn new(group: &Group, names: &Names) -> Self {
        let tiers = group.tiers.iter().map(|tier| GroupTier {
            tier: names.tier_index(tier),
            is_consuming: AtomicBool::new(false),
        });
        Self {
            name: group.name.as_str().into(),
            slots: AtomicI64::new(0),
            workers: AtomicI64::new(0),
            tiers: tiers.collect(),
        }
    }

    /// Whether this process works for it.
    pub(super) fn is_worked(&self) -> bool {
        self.workers.load(Ordering::Relaxed) > 0
    }
}

impl ScheduleCounts {
    fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            published: AtomicU64::new(0),
            missed: AtomicU64::new(0),
        }
    }
}

fn add(counts: &[AtomicU64], index: usize, more: u64) {
    if let Some(count) = counts.get(index) {
        count.fetch_add(more, Ordering::Relaxed);
    }
}
