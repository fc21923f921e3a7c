//! Whether the live processes can run the tasks of an override. Pure.

use crate::control::process::Process;

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

/// Some names, and how many more there are.
pub(in crate::control) fn listed(names: &[&str]) -> String {
    let shown = names[..names.len().min(NAMED)].join(", ");
    match names.len().saturating_sub(NAMED) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}
