//! A row as the message that is published in its place.

use crate::Error;
use crate::message::{DeadReason, Failure, FailureKind, Message, Received};
use crate::publish::{Content, Outgoing};
use crate::route::{self, Address, RouteRequest};
use crate::source::amqp::ConsumerSettings;
use crate::source::{Next, dead, unmapped, unreadable};
use crate::topology::delay;

use std::time::Duration;

/// A message on its way.
pub(super) struct Relayed {
    pub(super) outgoing: Outgoing,
    /// Whether it goes to the queue of the tier that it was a row of, and not to that of a tier that the map has moved its
    /// task to.
    pub(super) is_own_tier: bool,
}

/// The message of a row, as the map and its overrides say now; else what follows on the row, which cannot be published.
pub(super) fn relayed(settings: &ConsumerSettings, received: &Received) -> Result<Relayed, Next> {
    let Ok(message) = received.message() else {
        return Err(unreadable(received));
    };
    if settings.topology.task(&message.task).is_none() {
        return Err(unmapped(message));
    }
    match outgoing(settings, received, message) {
        Ok(Some(relayed)) => Ok(relayed),
        // The map, or an override, has moved the task to a tier in Postgres.
        Ok(None) => Err(Next::Later {
            message: Box::new(message.clone()),
            after: Duration::ZERO,
            failure: None,
        }),
        Err(error) => Err(unpublishable(message, &error)),
    }
}

/// What follows on a row that the broker will never take.
pub(super) fn unpublishable(message: &Message, error: &Error) -> Next {
    let problem = format!("the relay cannot publish it: {error}");
    let failure = Failure::new(FailureKind::NotStarted, problem);
    dead(message, DeadReason::Unpublishable, failure)
}

/// The message, with its destination; `None` if it is to stay a row.
fn outgoing(
    settings: &ConsumerSettings,
    received: &Received,
    message: &Message,
) -> Result<Option<Relayed>, Error> {
    let (tier, priority) = (message.tier.as_str(), message.priority);
    let request = match received.is_moved() {
        true => RouteRequest::Moved { tier, priority },
        false => RouteRequest::Retry { tier, priority },
    };
    let (topology, servers) = (&settings.topology, settings.publisher.servers());
    let task = &message.task;
    let overridden = settings.controls.override_of(task);
    let overridden = overridden.as_deref();
    let route = route::destination(topology, overridden, servers, task, request, Duration::ZERO)?;
    if let Address::Row { .. } = route.address {
        return Ok(None);
    }
    route::check_size(topology, &message.task, &message.payload)?;
    message.check()?;
    let mut message = message.clone();
    message.priority = route.priority;
    // Every row has a due time. It says something if the task was delayed.
    let is_delayed = |due_at| due_at > message.enqueued_at + delay::UNIT;
    message.due_at = message.due_at.filter(|due_at| is_delayed(*due_at));
    let is_own_tier = route.tier == message.tier;
    let id = message.id.clone();
    let content = match received.has_properties() {
        true => Content::Forwarded {
            properties: received.successor(&message),
            payload: message.payload,
        },
        false => Content::New {
            message,
            is_id_drawn: true,
            claim: None,
        },
    };
    Ok(Some(Relayed {
        outgoing: Outgoing::new(route, &id, content)?,
        is_own_tier,
    }))
}
