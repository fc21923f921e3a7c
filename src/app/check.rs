//! Refuses, before anything is connected, an app that lacks what its map needs.

use crate::Error;
#[cfg(feature = "deadpool-lapin")]
use crate::error::BrokerError;
use crate::error::TopologyError;
use crate::topology::{Limit, Tier, Topology};

/// Refuses a map with tiers on a server that the app has no address of, or that were there before they moved, and one
/// with limits that need a database that the app does not have.
pub(super) fn check_homes(
    topology: &Topology,
    has_broker: bool,
    has_database: bool,
) -> Result<(), Error> {
    let on_broker = names(topology.tiers_using_broker());
    let in_postgres = names(topology.tiers_using_postgres());
    if !has_database && !in_postgres.is_empty() {
        let tiers = in_postgres.into();
        return Err(Error::Topology(TopologyError::NoDatabase { tiers }));
    }
    if !has_broker && !on_broker.is_empty() {
        let tiers = on_broker.into();
        return Err(Error::Topology(TopologyError::NoBroker { tiers }));
    }
    if !has_database {
        check_limits(topology)?;
    }
    Ok(())
}

/// Refuses limits that processes could only share by way of a database.
fn check_limits(topology: &Topology) -> Result<(), Error> {
    let needs_database = |limit: &Option<Limit>| limit.as_ref().is_some_and(Limit::needs_database);
    let tiers = topology.tiers().iter();
    let tiers = tiers.filter(|tier| needs_database(&tier.limit));
    let tiers: Vec<_> = tiers.map(|tier| format!("tier {}", tier.name)).collect();
    // What a limited task may not run yet waits as a row, whatever its scope is.
    let tasks = topology.tasks().iter().filter(|task| task.limit.is_some());
    let tasks: Vec<_> = tasks.map(|task| format!("task {}", task.name)).collect();
    if tiers.is_empty() && tasks.is_empty() {
        return Ok(());
    }
    Err(Error::Topology(TopologyError::LimitsWithoutDatabase {
        limited: [tiers, tasks].concat().join(", ").into(),
    }))
}

fn names<'t>(tiers: impl Iterator<Item = &'t Tier>) -> String {
    let names: Vec<_> = tiers.map(|tier| tier.name.as_str()).collect();
    names.join(", ")
}

/// Refuses a pool of the app's that is too small for publishing.
#[cfg(feature = "deadpool-lapin")]
pub(super) fn check_size(
    pool: &deadpool_lapin::Pool,
    of_each: usize,
    groups: usize,
) -> Result<(), Error> {
    let (size, needed) = (pool.status().max_size, of_each * groups);
    if size >= needed {
        return Ok(());
    }
    Err(Error::Broker(BrokerError::InvalidPool {
        problem: format!(
            "it has at most {size} connections, and publishing keeps {needed}, {of_each} for each of {groups} worker \
             groups; set its max_size to {needed} and what the app itself needs, or lower publish_connections"
        )
        .into(),
    }))
}
