//! The only router: task, priority and delay in, destination out. Pure.
//!
//! A publish, a due run of a schedule, a retry, a redrive and the relay all take their exchange, routing key
//! and priority from here, so a change of the map, and an override at run time, apply to all of them alike.

use std::time::Duration;

use crate::Error;
use crate::control::Override;
use crate::error::PublishError;
use crate::topology::Version;
use crate::topology::{Formerly, Home, Tier, Topology, UNORDERED_PRIORITY, delay};

/// The place that a message is sent to, and the priority that it is sent with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Destination {
    /// The tier whose workers run the task.
    pub(crate) tier: String,
    pub(crate) address: Address,
    pub(crate) priority: u8,
}

/// The servers of the process that sends a message.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Servers {
    /// The version of the broker.
    pub(crate) broker: Version,
    pub(crate) has_database: bool,
}

/// Where a message is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Address {
    /// On the broker.
    Exchange {
        exchange: String,
        routing_key: String,
    },
    /// As a row of its tier in Postgres, which falls due after this time.
    Row { after: Duration },
}

/// The reason why a message is sent, which decides its priority.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RouteRequest<'a> {
    /// A publish, or a due run of a schedule, with the priority that it asks for, if any. A priority
    /// that the tier does not have is an error.
    Publish {
        priority: Option<u8>,
        /// Whether it asks for what only Postgres can give: then it is a row, whatever its tier's home.
        is_row: bool,
    },
    /// A worker sends a delivery from the queue of `tier` again. If the map no longer has the task,
    /// the message stays in that tier.
    Retry { tier: &'a str, priority: u8 },
    /// A worker runs a row of `tier` again. It stays a row, also in a tier on the broker, unless the tier has moved
    /// there from Postgres: then its rows must come to an end.
    #[cfg_attr(
        not(feature = "postgres"),
        expect(dead_code, reason = "rows are in Postgres")
    )]
    RetryRow { tier: &'a str, priority: u8 },
    /// A row that a rule or an operator has moved to `tier` is sent there, whatever the map or an override says of its
    /// task.
    #[cfg_attr(
        not(feature = "postgres"),
        expect(dead_code, reason = "rows are in Postgres")
    )]
    Moved { tier: &'a str, priority: u8 },
    /// An operator redrives a dead letter of `tier`.
    #[cfg_attr(
        not(feature = "postgres"),
        expect(dead_code, reason = "dead letters are logged in Postgres")
    )]
    Redrive { tier: &'a str, priority: u8 },
}

/// The tier that a task goes to now: that of its override, else the map's. `None`: the map does not have the task.
pub(crate) fn tier_of<'t>(
    topology: &'t Topology,
    overridden: Option<&Override>,
    task: &str,
) -> Option<&'t Tier> {
    let mapped = topology.task(task)?;
    let other = overridden.and_then(|it| it.tier.as_deref());
    // Another version of the map may have the tier of the override.
    let other = other.and_then(|tier| topology.tier(tier));
    other.or_else(|| topology.tier(&mapped.tier))
}

/// The destination of a message of `task` that is due after `delay`. An override counts before the map.
///
/// A new message has the priority that its publisher asks for, else the map's. A message that is sent
/// again keeps its priority while its task goes to the same tier, else it has the map's. The priority of an override
/// counts before all of these; if it has none, a message has the nearest priority that its tier has. No
/// priority is higher than the tier's highest, or than what the broker supports in a quorum queue;
/// the delay levels are quorum queues too. A publisher may ask for what the map's tier has, overridden or not.
///
/// A delay that is longer than the delay queues of a tier reach is a row if there is a database, unless the map has the
/// queues for it.
///
/// # Errors
/// [`PublishError::UnmappedTask`], [`PublishError::InvalidPriority`], [`PublishError::DelayTooLong`],
/// [`PublishError::NoDelays`].
pub(crate) fn destination(
    topology: &Topology,
    overridden: Option<&Override>,
    servers: Servers,
    task: &str,
    request: RouteRequest<'_>,
    delay: Duration,
) -> Result<Destination, Error> {
    let unmapped = || {
        Error::Publish(PublishError::UnmappedTask {
            task: task.to_owned(),
        })
    };
    let mapped = topology.task(task);
    let tier = match (mapped, request) {
        (_, RouteRequest::Moved { tier, .. }) => tier,
        (Some(_), _) => tier_of(topology, overridden, task)
            .ok_or_else(unmapped)?
            .name
            .as_str(),
        (None, RouteRequest::Retry { tier, .. } | RouteRequest::RetryRow { tier, .. }) => tier,
        (None, RouteRequest::Publish { .. } | RouteRequest::Redrive { .. }) => {
            return Err(unmapped());
        }
    };
    let tier = topology.tier(tier).ok_or_else(unmapped)?;
    let priority = priority(topology, overridden, task, tier, request)?;
    if is_row(topology, servers, tier, request, delay) {
        return Ok(Destination {
            tier: tier.name.clone(),
            address: Address::Row { after: delay },
            // Without priorities all rows are equal, whatever another program gave them.
            priority: match tier.home.max_priority() {
                Some(_) => priority,
                None => UNORDERED_PRIORITY,
            },
        });
    }
    let key = topology.names().routing_key(tier);
    let delayed = delay::route(topology.app(), &key, delay)?;
    if delayed.is_some() && !tier.delays {
        return Err(Error::Publish(PublishError::NoDelays {
            task: task.into(),
            tier: tier.name.as_str().into(),
        }));
    }
    let is_in_quorum_queue = match tier.home {
        Home::Classic { .. } | Home::Postgres { .. } => delayed.is_some(),
        Home::Quorum { .. } => true,
    };
    let (exchange, routing_key) = match delayed {
        Some(delayed) => (delayed.exchange, delayed.routing_key),
        None => (topology.names().tasks_exchange(), key),
    };
    Ok(Destination {
        tier: tier.name.clone(),
        address: Address::Exchange {
            exchange,
            routing_key,
        },
        priority: match is_in_quorum_queue {
            true => priority.min(servers.broker.highest_quorum_priority()),
            false => priority,
        },
    })
}

/// Whether a message is stored as a row.
fn is_row(
    topology: &Topology,
    servers: Servers,
    tier: &Tier,
    request: RouteRequest<'_>,
    delay: Duration,
) -> bool {
    if !tier.home.is_on_broker() {
        return true;
    }
    match request {
        RouteRequest::Publish { is_row: true, .. } => return true,
        RouteRequest::RetryRow { .. } if tier.formerly != Some(Formerly::Postgres) => return true,
        _ => {}
    }
    let longest = match topology.has_long_delay_queues(servers.has_database) {
        true => delay::MAX_DELAY,
        false => delay::MAX_TIER_DELAY,
    };
    servers.has_database && tier.delays && delay > longest
}

/// Refuses a payload that is larger than the broker accepts.
///
/// # Errors
/// [`PublishError::TooLarge`].
pub(crate) fn check_size(topology: &Topology, task: &str, payload: &[u8]) -> Result<(), Error> {
    let limit = topology.broker().max_message_size;
    let size = payload.len() as u64;
    if size > limit {
        return Err(Error::Publish(PublishError::TooLarge {
            task: task.into(),
            size,
            limit,
        }));
    }
    Ok(())
}

/// The priority in `tier`, before the limits of the broker.
fn priority(
    topology: &Topology,
    overridden: Option<&Override>,
    task: &str,
    tier: &Tier,
    request: RouteRequest<'_>,
) -> Result<u8, Error> {
    let mapped = topology.task(task);
    let home = mapped.and_then(|mapped| topology.tier(&mapped.tier));
    // The nearest priority that the tier has to one of the map's tier.
    let nearest = |priority: u8| match home {
        Some(home) if home.name != tier.name => {
            let priorities = tier.priorities_from(home);
            priority.clamp(*priorities.start(), *priorities.end())
        }
        _ => priority,
    };
    let kept = match request {
        RouteRequest::Publish { priority: None, .. } => None,
        RouteRequest::Publish {
            priority: Some(wanted),
            ..
        } => match home.unwrap_or(tier).home.max_priority() {
            Some(highest) if wanted <= highest => Some(nearest(wanted)),
            highest => {
                return Err(Error::Publish(PublishError::InvalidPriority {
                    task: task.into(),
                    priority: wanted,
                    highest,
                }));
            }
        },
        RouteRequest::Retry {
            tier: from,
            priority,
        }
        | RouteRequest::RetryRow {
            tier: from,
            priority,
        }
        | RouteRequest::Moved {
            tier: from,
            priority,
        }
        | RouteRequest::Redrive {
            tier: from,
            priority,
        } => {
            let highest = tier.home.max_priority().unwrap_or(u8::MAX);
            (from == tier.name).then_some(priority.min(highest))
        }
    };
    let is_moved = matches!(request, RouteRequest::Moved { .. });
    let of_override = overridden.and_then(|it| it.priority.filter(|_| !is_moved));
    if let (Some(wanted), Some(highest)) = (of_override, tier.home.max_priority()) {
        return Ok(wanted.min(highest));
    }
    let of_map = mapped.map(|mapped| nearest(mapped.priority));
    Ok(kept.or(of_map).unwrap_or_default())
}

#[cfg(test)]
mod tests;
