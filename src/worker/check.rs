//! Refuses, before anything is begun, a worker whose limits cannot hold.

use crate::Error;
use crate::error::{LimitsTooLong, WorkerError};
use crate::task::{Registration, Registry};
use crate::topology::{MappedTask, Tier, Topology};

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
            let in_hand = timeout.saturating_mul(group.prefetch.into());
            // A lease is extended for as long as it takes. But a task from the queue of before the move has none.
            let tier = topology.tier(&task.tier);
            let has_ack_timeout = tier.is_some_and(Tier::uses_broker);
            if has_ack_timeout && group.tiers.contains(&task.tier) && in_hand >= ack_timeout {
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
