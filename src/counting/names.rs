//! The tasks and tiers of the map by name and by index. Whatever names messages have, there are no more of these.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::time::Duration;

use super::UNKNOWN;
use crate::topology::Topology;

/// The tasks and tiers of the map. One index stands for all tasks that the map does not have, and one for all such tiers.
pub(crate) struct Names {
    /// The index of each task, and of the tier that the map gives it.
    tasks: ByName<(usize, usize)>,
    tiers: ByName<usize>,
    /// By their index.
    task_names: Vec<Box<str>>,
    /// The index of tasks that the map does not have.
    unknown: usize,
    known_tiers: Vec<KnownTier>,
}

/// Where an event is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    /// The index of the task.
    pub(crate) task: usize,
    /// The index of the tier that it was in.
    pub(crate) tier: usize,
    /// Whether that is the tier that the map gives the task.
    pub(crate) is_mapped: bool,
}

/// A tier of the map.
pub(crate) struct KnownTier {
    pub(crate) name: Box<str>,
    /// The group that serves it.
    pub(crate) group: Box<str>,
    pub(crate) slo: Option<Duration>,
    #[cfg(feature = "prometheus")]
    pub(crate) objective: Option<f64>,
}

/// The names are those of the map, so nobody can choose ones that collide, and a quick hash will do: each event looks one up.
type ByName<T> = HashMap<Box<str>, T, BuildHasherDefault<Fnv>>;

/// FNV-1a, which is quick for names as short as these.
pub(crate) struct Fnv(u64);

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

impl Names {
    pub(crate) fn new(topology: &Topology) -> Self {
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
                #[cfg(feature = "prometheus")]
                objective: tier.objective(),
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
            known_tiers,
        }
    }

    /// Where an event of a task in a tier is counted.
    pub(crate) fn place(&self, task: &str, tier: &str) -> Place {
        let mapped = self.tasks.get(task).copied();
        // Nearly always the tier is the one that the map says.
        if let Some((task, index)) = mapped
            && self.tier(index) == tier
        {
            return Place {
                task,
                tier: index,
                is_mapped: index < self.known_tiers.len(),
            };
        }
        Place {
            task: mapped.map_or(self.unknown, |(index, _)| index),
            tier: self.tier_index(tier),
            is_mapped: false,
        }
    }

    /// The name of a task.
    pub(crate) fn task(&self, index: usize) -> &str {
        self.task_names.get(index).map_or(UNKNOWN, |name| name)
    }

    /// How many tasks the map has. One more index stands for all others.
    pub(crate) fn tasks(&self) -> usize {
        self.task_names.len()
    }

    /// The name of a tier.
    pub(crate) fn tier(&self, index: usize) -> &str {
        let tier = self.known_tiers.get(index);
        tier.map_or(UNKNOWN, |tier| &tier.name)
    }

    /// The tiers of the map, by their index. One more index stands for all others.
    pub(crate) fn tiers(&self) -> &[KnownTier] {
        &self.known_tiers
    }

    pub(crate) fn known_tier(&self, name: &str) -> Option<&KnownTier> {
        self.known_tiers.get(*self.tiers.get(name)?)
    }

    pub(crate) fn tier_index(&self, name: &str) -> usize {
        let index = self.tiers.get(name).copied();
        index.unwrap_or(self.known_tiers.len())
    }

    /// The tier that the map gives a task.
    pub(crate) fn tier_of(&self, task: usize) -> usize {
        let name = self.task_names.get(task);
        let mapped = name.and_then(|name| self.tasks.get(name));
        mapped.map_or(self.known_tiers.len(), |(_, tier)| *tier)
    }
}
