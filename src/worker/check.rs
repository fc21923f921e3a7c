//! Refuses, before anything is begun, a worker whose limits cannot hold. Overrides at run time refuse no worker: what they
//! make of its limits is a warning. Who makes an override is refused by the same limits, as far as live processes say what
//! their handlers need (`src/control/overriding/handlers.rs`).

use std::collections::BTreeMap;

use crate::Error;
use crate::control::Snapshot;
use crate::error::{LimitsTooLong, WorkerError};
use crate::task::{Registration, Registry};
use crate::topology::{MappedTask, Topology};

/// The groups to serve, each once and in the order given.
///
/// # Errors
/// [`WorkerError::UnknownGroup`]; [`WorkerError::LimitsTooLong`] where a message could wait prefetched, and then
/// run, for longer than the broker waits for its acknowledgement; [`WorkerError::RetriesWithoutDelays`].
pub(super) fn check(
    topology: &Topology,
    registry: &Registry,
    groups: &[String],
) -> Result<Vec<String>, Error> {
    let mut served: Vec<String> = Vec::new();
    for name in groups {
        let Some(group) = topology.group(name) else {
            let known: Vec<_> = topology
                .groups()
                .iter()
                .map(|it| it.name.as_str())
                .collect();
            return Err(Error::Worker(WorkerError::UnknownGroup {
                group: name.as_str().into(),
                known: known.join(", ").into(),
            }));
        };
        let ack_timeout = topology.broker().ack_timeout;
        for task in topology.tasks() {
            let Some(registration) = registry.get(&task.name) else {
                continue;
            };
            let timeout = registration.options().timeout;
            let tier = topology.tier(&task.tier);
            let is_too_long =
                tier.is_some_and(|it| topology.reaches_ack_timeout(timeout, group, it));
            if is_too_long && group.tiers.contains(&task.tier) {
                return Err(Error::Worker(WorkerError::LimitsTooLong(Box::new(
                    LimitsTooLong {
                        task: registration.name(),
                        timeout,
                        group: name.clone(),
                        prefetch: group.prefetch,
                        ack_timeout,
                    },
                ))));
            }
        }
        for tier in &group.tiers {
            check_retries(topology, registry, tier)?;
        }
        if !served.contains(name) {
            served.push(name.clone());
        }
    }
    Ok(served)
}

/// Refuses handlers with retries in a tier that has no delay queues.
fn check_retries(topology: &Topology, registry: &Registry, tier: &str) -> Result<(), Error> {
    if topology.tier(tier).is_none_or(|tier| tier.delays) {
        return Ok(());
    }
    let has_retries = |task: &&MappedTask| {
        let registration = registry.get(&task.name);
        let options = registration.map(Registration::options);
        task.tier == tier && options.is_some_and(|options| options.retry.retries > 0)
    };
    let tasks = topology.tasks().iter().filter(has_retries);
    let tasks: Vec<_> = tasks.map(|task| task.name.as_str()).collect();
    if tasks.is_empty() {
        return Ok(());
    }
    Err(Error::Worker(WorkerError::RetriesWithoutDelays {
        tier: tier.into(),
        tasks: tasks.join(", ").into(),
    }))
}

/// What is wrong with the overrides in force that lead to these groups, for a worker with these handlers.
pub(super) fn check_overrides(
    topology: &Topology,
    controls: &Snapshot,
    registry: &Registry,
    groups: &[String],
) -> Vec<String> {
    /// The tasks of a tier of one group, by what is wrong with them.
    #[derive(Default)]
    struct Wrong<'t> {
        unhandled: Vec<&'t str>,
        too_long: Vec<&'t str>,
        undelayed: Vec<&'t str>,
    }
    let mut wrong: BTreeMap<(&str, &str), Wrong<'_>> = BTreeMap::new();
    let groups = groups.iter().filter_map(|name| topology.group(name));
    for (group, name) in groups.flat_map(|it| it.tiers.iter().map(move |tier| (it, tier))) {
        let Some(tier) = topology.tier(name) else {
            continue;
        };
        for task in topology.tasks() {
            let overridden = controls.override_of(&task.name);
            let other = overridden.and_then(|it| it.tier.as_ref());
            if other != Some(name) || task.tier == *name {
                continue;
            }
            let wrong = wrong.entry((group.name.as_str(), name)).or_default();
            let Some(registration) = registry.get(&task.name) else {
                wrong.unhandled.push(&task.name);
                continue;
            };
            let options = registration.options();
            if topology.reaches_ack_timeout(options.timeout, group, tier) {
                wrong.too_long.push(&task.name);
            }
            if !tier.delays && tier.home.is_on_broker() && options.retry.retries > 0 {
                wrong.undelayed.push(&task.name);
            }
        }
    }
    let mut warnings = Vec::new();
    for ((group, tier), wrong) in wrong {
        let mut warn = |tasks: &[&str], problem: &str| {
            if !tasks.is_empty() {
                let tasks = tasks.join(", ");
                warnings.push(format!(
                    "overrides send these tasks to tier {tier} of group {group}: {tasks}; {problem}"
                ));
            }
        };
        warn(
            &wrong.unhandled,
            "this worker has no handler for them and makes dead letters of them; deploy the handlers, or end the overrides",
        );
        warn(
            &wrong.too_long,
            "with the group's prefetch, their timeouts reach the broker's ack timeout; lower the prefetch, or end the overrides",
        );
        warn(
            &wrong.undelayed,
            "the tier has no delay queues, so their retries become dead letters; end the overrides, or give the tier delays",
        );
    }
    warnings
}

#[cfg(all(test, feature = "postgres"))]
mod tests {
    use serde::{Deserialize, Serialize};

    use super::*;
    use crate::control::Override;
    use crate::task::{Task, TaskOptions};

    #[derive(Serialize, Deserialize)]
    struct Export;

    impl Task for Export {
        const NAME: &'static str = "report.export";
    }

    const MAP: &str = r#"
        app = "shop"
        [tiers.high]
        queue = "quorum"
        delays = false
        [tiers.low]
        queue = "postgres"
        [groups.urgent]
        tiers = ["high"]
        concurrency = 1
        prefetch = 4
        [groups.bulk]
        tiers = ["low"]
        concurrency = 1
        [tasks]
        "report.export" = "low"
        "report.send" = "low"
    "#;

    #[test]
    fn a_worker_says_which_overridden_tasks_it_cannot_run_as_they_are() {
        let topology = Topology::parse(MAP).unwrap();
        let mut registry = Registry::new();
        let options = TaskOptions::default().timeout("25m").retries(3);
        let registered = registry.register_with::<Export, _>(|_: Export| async {}, options);
        registered.unwrap();
        let groups = ["urgent".to_owned(), "bulk".to_owned()];
        let check = |controls: &Snapshot| check_overrides(&topology, controls, &registry, &groups);
        assert_eq!(check(&Snapshot::default()), Vec::<String>::new());
        let to = Override {
            tier: Some("high".to_owned()),
            priority: None,
        };
        let warnings = check(&Snapshot::of_prefix("report.", to));
        let begin = "overrides send these tasks to tier high of group urgent: ";
        let tasks: Vec<_> = warnings
            .iter()
            .filter_map(|it| it.strip_prefix(begin))
            .collect();
        let is_about = |warning: &str, task: &str, what: &str| {
            warning.starts_with(&format!("{task}; ")) && warning.contains(what)
        };
        assert_eq!(tasks.len(), 3, "{warnings:?}");
        assert!(
            is_about(tasks[0], "report.send", "no handler"),
            "{}",
            tasks[0]
        );
        assert!(
            is_about(tasks[1], "report.export", "ack timeout"),
            "{}",
            tasks[1]
        );
        assert!(
            is_about(tasks[2], "report.export", "dead letters"),
            "{}",
            tasks[2]
        );
    }
}
