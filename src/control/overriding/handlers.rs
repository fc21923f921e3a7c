//! Whether the live processes can run the tasks of an override. Pure.

use std::time::Duration;

use crate::control::process::Process;
use crate::topology::{Topology, show_duration};

/// How many names an error or a note lists.
const NAMED: usize = 10;

/// Why the workers of a tier cannot run some tasks.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::control) enum Unhandled<'t> {
    /// None lives.
    NoProcess,
    /// None has a handler for these.
    Tasks(Vec<&'t str>),
}

/// The live processes that serve a tier.
fn serving<'p>(processes: &'p [Process], tier: &str) -> Vec<&'p Process> {
    let serving = |process: &&Process| process.is_alive && process.serves(tier);
    processes.iter().filter(serving).collect()
}

/// Which of these tasks no live process that serves a tier could run; `None`: there are no such tasks.
pub(in crate::control) fn unhandled<'t>(
    processes: &[Process],
    tier: &str,
    tasks: &[&'t str],
) -> Option<Unhandled<'t>> {
    let serving = serving(processes, tier);
    if serving.is_empty() {
        return Some(Unhandled::NoProcess);
    }
    let is_unhandled = |task: &&str| !serving.iter().any(|process| process.has_handler(task));
    let tasks: Vec<&str> = tasks.iter().copied().filter(is_unhandled).collect();
    (!tasks.is_empty()).then_some(Unhandled::Tasks(tasks))
}

/// Names the live processes that serve a tier and lack some of the handlers, in a sentence. They take the tasks all the same.
pub(in crate::control) fn partly_handled(
    processes: &[Process],
    tier: &str,
    tasks: &[&str],
) -> Option<String> {
    let lacking = serving(processes, tier).into_iter().filter_map(|process| {
        let lacks = |task: &&str| !process.has_handler(task);
        let lacked: Vec<&str> = tasks.iter().copied().filter(lacks).collect();
        let name = &process.name;
        (!lacked.is_empty()).then(|| format!("{name} (no handler for {})", listed(&lacked)))
    });
    let lacking: Vec<String> = lacking.collect();
    (!lacking.is_empty()).then(|| {
        let lacking: Vec<&str> = lacking.iter().map(String::as_str).collect();
        format!(
            "some live processes that serve tier {tier} make dead letters of tasks that they have no handler for: {}",
            listed(&lacking)
        )
    })
}

/// What a worker with these handlers would refuse if the map gave them this tier, in a sentence: a message could wait
/// prefetched, and then run, for longer than the broker waits for its acknowledgement.
pub(in crate::control) fn too_long(
    topology: &Topology,
    processes: &[Process],
    tier: &str,
    tasks: &[&str],
) -> Option<String> {
    let (group, tier) = (topology.group_of(tier)?, topology.tier(tier)?);
    let serving = serving(processes, &tier.name);
    let timeout = |task: &str| -> Option<Duration> {
        let timeouts = serving.iter().filter_map(|process| process.timeout(task));
        let longest = timeouts.max()?;
        let reaches = topology.reaches_ack_timeout(longest, group, tier);
        reaches.then_some(longest)
    };
    let tasks = tasks.iter().filter_map(|task| {
        let timeout = show_duration(timeout(task)?);
        Some(format!("{task} ({timeout})"))
    });
    let tasks: Vec<String> = tasks.collect();
    (!tasks.is_empty()).then(|| {
        let tasks: Vec<&str> = tasks.iter().map(String::as_str).collect();
        format!(
            "with the prefetch {} of group {}, the timeouts of these tasks reach the ack_timeout of {} at which the broker \
             closes the channel of tier {}: {}",
            group.prefetch,
            group.name,
            show_duration(topology.broker().ack_timeout),
            tier.name,
            listed(&tasks)
        )
    })
}

/// Names the live processes of releases that know no overrides, in a sentence.
pub(in crate::control) fn older(processes: &[Process]) -> Option<String> {
    let older = processes.iter().filter(|it| it.is_alive && it.is_older());
    let older: Vec<&str> = older.map(|process| process.name.as_str()).collect();
    (!older.is_empty()).then(|| {
        format!(
            "{} live processes are of a release that follows no overrides, and publish and retry by the map: {}",
            older.len(),
            listed(&older)
        )
    })
}

/// Some names, and how many more there are.
pub(in crate::control) fn listed(names: &[&str]) -> String {
    let shown = names[..names.len().min(NAMED)].join(", ");
    match names.len().saturating_sub(NAMED) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}
