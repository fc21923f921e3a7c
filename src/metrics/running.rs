//! Which handlers run, and since when.

use std::hash::Hasher;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::TaskId;
use crate::counting::{Fnv, Place};

/// More than a process has busy threads, so that they seldom wait for each other.
const SHARDS: usize = 64;

/// The handlers that run in this process. A start and an end look at a few entries of one shard.
pub(super) struct Running {
    shards: Box<[Shard]>,
}

/// Aligned, so that no two are in one cache line.
#[repr(align(128))]
#[derive(Default)]
struct Shard(Mutex<Vec<Run>>);

#[derive(Clone, Copy)]
struct Run {
    /// A hash of the task's id. Two runs with one hash have the same id, in practice, and either entry will do.
    id: u64,
    place: Place,
    begin: Instant,
}

/// The handlers of a task in a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RunningTask {
    pub(super) task: usize,
    pub(super) tier: usize,
    pub(super) count: u64,
    /// For how long the oldest one has run.
    pub(super) oldest: Duration,
}

impl Default for Running {
    fn default() -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Shard::default()).collect(),
        }
    }
}

impl Running {
    pub(super) fn started(&self, id: &TaskId, place: Place) {
        let id = hash(id);
        let begin = Instant::now();
        self.with_shard(id, |runs| runs.push(Run { id, place, begin }));
    }

    pub(super) fn ended(&self, id: &TaskId, place: Place) {
        let id = hash(id);
        self.with_shard(id, |runs| {
            let mut entries = runs.iter();
            if let Some(index) = entries.position(|run| run.id == id && run.place == place) {
                runs.swap_remove(index);
            }
        });
    }

    /// What runs now, by task and tier, in order.
    pub(super) fn read(&self) -> Vec<RunningTask> {
        let now = Instant::now();
        let mut runs = Vec::new();
        for Shard(shard) in &self.shards {
            let shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            runs.extend_from_slice(&shard);
        }
        runs.sort_unstable_by_key(|run| (run.place.tier, run.place.task, run.begin));
        let mut tasks: Vec<RunningTask> = Vec::new();
        for Run { place, begin, .. } in runs {
            match tasks.last_mut() {
                Some(last) if (last.tier, last.task) == (place.tier, place.task) => last.count += 1,
                _ => tasks.push(RunningTask {
                    task: place.task,
                    tier: place.tier,
                    count: 1,
                    oldest: now.saturating_duration_since(begin),
                }),
            }
        }
        tasks
    }

    fn with_shard(&self, id: u64, change: impl FnOnce(&mut Vec<Run>)) {
        // The upper bits: the last characters of ids differ most, and every multiplication moves them up.
        let index = usize::try_from(id >> 32).unwrap_or_default() % SHARDS;
        if let Some(Shard(shard)) = self.shards.get(index) {
            change(&mut shard.lock().unwrap_or_else(PoisonError::into_inner));
        }
    }
}

fn hash(id: &TaskId) -> u64 {
    let mut hasher = Fnv::default();
    hasher.write(id.as_str().as_bytes());
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_counted_from_their_start_to_their_end() {
        let running = Running::default();
        let place = |task| Place {
            task,
            tier: 0,
            is_mapped: true,
        };
        let ids: Vec<TaskId> = (0..1_000).map(|_| TaskId::random()).collect();
        for id in &ids {
            running.started(id, place(1));
        }
        running.started(&ids[0], place(2));
        let counts = |running: &Running| {
            let tasks = running.read();
            let counts = tasks.iter().map(|it| (it.task, it.count));
            counts.collect::<Vec<_>>()
        };
        assert_eq!(counts(&running), [(1, 1_000), (2, 1)]);
        for id in &ids {
            running.ended(id, place(1));
            running.ended(id, place(1));
        }
        assert_eq!(counts(&running), [(2, 1)]);
    }
}
