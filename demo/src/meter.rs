//! The figures of every tier, computed from tierline's events.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tierline::observe::{Event, TaskRef};
use tierline::{TaskId, Topology};

use crate::ledger::Fate;

/// The window over which starts per second are counted.
const RATE_OVER: Duration = Duration::from_secs(2);

pub(crate) struct Meter {
    /// The tier of each task in the hotel's map, even if all go through one queue.
    tiers: HashMap<String, usize>,
    state: Mutex<State>,
}

struct State {
    tiers: Vec<Tier>,
    stages: HashMap<TaskId, Stage>,
}

/// The state of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Waiting,
    Running,
    /// It waits for its retry.
    Delayed,
    Dead,
    Expired,
    Ended,
}

#[derive(Default)]
struct Tier {
    name: String,
    slo: Option<Duration>,
    waits: Vec<Duration>,
    recent: VecDeque<Instant>,
    waiting: usize,
    running: usize,
    dead: usize,
    retries: usize,
    died: usize,
    redriven: usize,
    done: usize,
}

/// A tier's figures at one moment.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Figures {
    pub(crate) tier: String,
    pub(crate) slo: Option<Duration>,
    pub(crate) waiting: usize,
    pub(crate) running: usize,
    pub(crate) starts_per_second: f64,
    pub(crate) wait_p50: Option<Duration>,
    pub(crate) wait_p99: Option<Duration>,
    pub(crate) retries: usize,
    /// Dead letters at this moment.
    pub(crate) dead: usize,
    /// How often a task of this tier became a dead letter.
    pub(crate) died: usize,
    pub(crate) redriven: usize,
    pub(crate) done: usize,
}

impl Figures {
    /// Whether the tier meets its SLO; `None` if it has none, or nothing has started.
    pub(crate) fn keeps_slo(&self) -> Option<bool> {
        Some(self.wait_p99? <= self.slo?)
    }
}

impl Meter {
    pub(crate) fn new(hotel: &Topology) -> Self {
        let position = |tier: &str| hotel.tiers().iter().position(|it| it.name == tier);
        let tier_of = |task: &tierline::topology::MappedTask| {
            Some((task.name.clone(), position(&task.tier)?))
        };
        let of_map = |tier: &tierline::topology::Tier| Tier {
            name: tier.name.clone(),
            slo: tier.slo,
            ..Tier::default()
        };
        Self {
            tiers: hotel.tasks().iter().filter_map(tier_of).collect(),
            state: Mutex::new(State {
                tiers: hotel.tiers().iter().map(of_map).collect(),
                stages: HashMap::new(),
            }),
        }
    }

    /// Records a confirm. The task may have started already: confirms and deliveries race.
    pub(crate) fn published(&self, id: &TaskId, task: &str) {
        let Some(tier) = self.tiers.get(task) else {
            return;
        };
        let mut state = self.lock();
        if !state.stages.contains_key(id) {
            state.enter(id, *tier, Stage::Waiting);
        }
    }

    /// Handles an event.
    pub(crate) fn handle(&self, event: &Event<'_>) {
        match event {
            Event::Started { task, waited } => self.change(task, Stage::Running, |tier| {
                tier.waits.push(*waited);
                tier.recent.push_back(Instant::now());
                tier.redriven += usize::from(task.life > 0 && task.attempt == 1);
            }),
            Event::Done { task, .. } => self.change(task, Stage::Ended, |tier| tier.done += 1),
            Event::Retried { task, .. } => {
                self.change(task, Stage::Delayed, |tier| tier.retries += 1);
            }
            Event::Dead { task, .. } => self.change(task, Stage::Dead, |tier| tier.died += 1),
            Event::GivenBack { task, .. } => self.change(task, Stage::Waiting, |_| {}),
            Event::Snoozed { task, .. } => self.change(task, Stage::Delayed, |_| {}),
            Event::Expired { task, .. } => self.change(task, Stage::Expired, |_| {}),
            _ => {}
        }
    }

    /// The end of a task that no handler finished.
    pub(crate) fn fate(&self, id: &TaskId) -> Option<Fate> {
        match self.lock().stages.get(id)? {
            Stage::Dead => Some(Fate::Dead),
            Stage::Expired => Some(Fate::Expired),
            _ => None,
        }
    }

    /// How many dead letters there are at this moment.
    pub(crate) fn dead(&self) -> usize {
        self.lock().tiers.iter().map(|tier| tier.dead).sum()
    }

    /// The figures of every tier, in the order of the map.
    pub(crate) fn figures(&self) -> Vec<Figures> {
        let mut state = self.lock();
        let parts: Vec<_> = state.tiers.iter_mut().map(Tier::figures).collect();
        drop(state);
        // Sorting happens without the lock: events are emitted on the workers' threads.
        let complete = |(mut figures, mut waits): (Figures, Vec<Duration>)| {
            waits.sort_unstable();
            figures.wait_p50 = percentile(&waits, 50);
            figures.wait_p99 = percentile(&waits, 99);
            figures
        };
        parts.into_iter().map(complete).collect()
    }

    fn change(&self, task: &TaskRef<'_>, stage: Stage, count: impl FnOnce(&mut Tier)) {
        let Some(tier) = self.tiers.get(task.name) else {
            return;
        };
        let mut state = self.lock();
        state.enter(task.id, *tier, stage);
        count(&mut state.tiers[*tier]);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn enter(&mut self, id: &TaskId, tier: usize, stage: Stage) {
        let before = self.stages.insert(id.clone(), stage);
        let tier = &mut self.tiers[tier];
        if let Some(count) = before.and_then(|before| tier.count(before)) {
            *count -= 1;
        }
        if let Some(count) = tier.count(stage) {
            *count += 1;
        }
    }
}

impl Tier {
    fn count(&mut self, stage: Stage) -> Option<&mut usize> {
        match stage {
            Stage::Waiting => Some(&mut self.waiting),
            Stage::Running => Some(&mut self.running),
            Stage::Dead => Some(&mut self.dead),
            Stage::Delayed | Stage::Expired | Stage::Ended => None,
        }
    }

    fn figures(&mut self) -> (Figures, Vec<Duration>) {
        while self
            .recent
            .front()
            .is_some_and(|at| at.elapsed() > RATE_OVER)
        {
            self.recent.pop_front();
        }
        let figures = Figures {
            tier: self.name.clone(),
            slo: self.slo,
            waiting: self.waiting,
            running: self.running,
            starts_per_second: self.recent.len() as f64 / RATE_OVER.as_secs_f64(),
            retries: self.retries,
            dead: self.dead,
            died: self.died,
            redriven: self.redriven,
            done: self.done,
            ..Figures::default()
        };
        (figures, self.waits.clone())
    }
}

/// The percentile: the smallest value that this share of all values does not exceed.
fn percentile(sorted: &[Duration], percent: usize) -> Option<Duration> {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;
    use crate::hotel;

    #[test]
    fn a_percentile_is_a_value_that_was_measured() {
        let waits: Vec<_> = (1..=200).map(Duration::from_millis).collect();
        assert_eq!(percentile(&waits, 50), Some(Duration::from_millis(100)));
        assert_eq!(percentile(&waits, 99), Some(Duration::from_millis(198)));
        assert_eq!(percentile(&waits[..1], 99), Some(Duration::from_millis(1)));
        assert_eq!(percentile(&[], 99), None);
    }

    #[test]
    fn a_confirm_that_comes_after_the_start_does_not_put_the_task_back() {
        let meter = Meter::new(&hotel().unwrap());
        meter.published(&"early".into(), "sms.send");
        meter.lock().enter(&"early".into(), 0, Stage::Running);
        meter.lock().enter(&"late".into(), 0, Stage::Ended);
        meter.published(&"late".into(), "sms.send");
        let critical = &meter.figures()[0];
        assert_eq!((critical.waiting, critical.running), (0, 1));
    }
}
