//! What follows on a message: its next attempt, its dead letter, its copy. All of it is confirmed by
//! the broker before the message itself is acknowledged.

use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

use lapin::BasicProperties;
use tokio::time::Instant;

use super::Workshop;
use super::identity::{self, Key};
use crate::Error;
use crate::message::{DeadReason, Death, FailedAttempt, Failure, Message, Repaired};
use crate::publish::{Content, OutgoingMessage};
use crate::route::{self, RouteRequest};
use crate::task::TaskId;
use crate::topology::delay;

/// A message as it was delivered.
#[derive(Debug)]
pub(super) struct Package {
    /// The tier whose queue it was in.
    pub(super) tier: String,
    pub(super) properties: BasicProperties,
    pub(super) payload: Vec<u8>,
    /// What was wrong with its properties.
    pub(super) repaired: Option<Repaired>,
    key: OnceLock<Option<Key>>,
    /// The identifier of a message that came without one.
    drawn_id: OnceLock<TaskId>,
}

impl Package {
    pub(super) fn new(tier: String, properties: BasicProperties, payload: Vec<u8>) -> Self {
        Self {
            tier,
            properties,
            payload,
            repaired: None,
            key: OnceLock::new(),
            drawn_id: OnceLock::new(),
        }
    }

    /// By what the message is known again; `None` where it has no id. All of the payload is read for
    /// it, once.
    pub(super) fn key(&self) -> Option<Key> {
        *self
            .key
            .get_or_init(|| Key::of(&self.properties, &self.payload))
    }

    /// Whether the message has an id, without which nothing tells it from others.
    pub(super) fn has_id(&self) -> bool {
        identity::id(&self.properties).is_some()
    }

    /// Whether both are the same message. Most are told apart before a payload is read.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        self.has_id()
            && identity::id(&self.properties) == identity::id(&other.properties)
            && self.payload.len() == other.payload.len()
            && self.key() == other.key()
    }

    /// The message inside. Opened again, it has the same id.
    ///
    /// # Errors
    /// Why it cannot be read, for its dead letter.
    pub(super) fn open(&self, now: SystemTime) -> Result<Message, String> {
        if let Some(repaired) = &self.repaired
            && repaired.is_unreadable
        {
            return Err(format!(
                "its properties are not in order: {}",
                repaired.problem
            ));
        }
        let payload = self.payload.clone();
        let mut message = Message::from_wire(&self.properties, payload, &self.tier, now)?;
        if !self.has_id() {
            message.id = self.drawn_id.get_or_init(|| message.id.clone()).clone();
        }
        Ok(message)
    }
}

impl Workshop {
    /// The next attempt of a message that failed, after a delay.
    pub(super) async fn retry(
        &self,
        package: &Package,
        message: Message,
        failure: &Failure,
        after: Duration,
    ) -> Result<(), Error> {
        let mut next = remember(message, failure).next_attempt();
        // It ran to an end: whatever killed its worker before was not this.
        next.crashes = 0;
        self.later(package, next, after).await
    }

    /// The same attempt again, after a delay: it did not want to run yet.
    pub(super) async fn snooze(
        &self,
        package: &Package,
        message: Message,
        after: Duration,
    ) -> Result<(), Error> {
        let message = Message {
            crashes: 0,
            ..message
        };
        self.later(package, message, after).await
    }

    /// The same message again, with its crash count, behind all that wait in its tier.
    pub(super) async fn again(
        &self,
        package: &Package,
        message: Message,
        after: Duration,
    ) -> Result<(), Error> {
        self.later(package, message, after).await
    }

    /// A copy for the queue of the message's tier, in the place of one that was interrupted, or on
    /// which nothing else could follow.
    pub(super) async fn interrupted(
        &self,
        package: &Package,
        message: Message,
        limit: Duration,
    ) -> Result<(), Error> {
        let id = message.id.clone();
        let letter = self.addressed(package, &message, Duration::ZERO)?;
        let deadline = Instant::now() + limit;
        self.publisher.forward(letter, &id, deadline).await
    }

    /// The dead letter of a message, which may be one that cannot be read.
    pub(super) async fn bury(
        &self,
        package: &Package,
        message: Option<Message>,
        reason: DeadReason,
        failure: &Failure,
    ) -> Result<(), Error> {
        let message = message.map(|message| remember(message, failure));
        let id = match &message {
            Some(message) => message.id.clone(),
            None => given_id(&package.properties),
        };
        let death = Death {
            reason,
            failure: failure.clone(),
            at: SystemTime::now(),
            worker: self.worker.clone(),
            version: self.version.clone(),
        };
        let repaired = package.repaired.as_ref();
        let mut properties = death.properties(&package.properties, message.as_ref(), repaired);
        if message.is_some() {
            // One that was drawn is in logs and events already.
            properties = properties.with_message_id(id.as_str().into());
        }
        let letter = OutgoingMessage {
            exchange: self.topology.names().dead_letter_exchange(&package.tier),
            routing_key: package.tier.clone(),
            content: Content::Forwarded {
                payload: package.payload.clone(),
                properties,
            },
        };
        let deadline = Instant::now() + self.settle_limit;
        self.publisher.forward(letter, &id, deadline).await
    }

    async fn later(
        &self,
        package: &Package,
        mut message: Message,
        after: Duration,
    ) -> Result<(), Error> {
        let after = after.min(delay::MAX_DELAY);
        if !after.is_zero() {
            message.due_at = SystemTime::now().checked_add(after);
        }
        let letter = self.addressed(package, &message, after)?;
        let deadline = Instant::now() + self.settle_limit;
        self.publisher.forward(letter, &message.id, deadline).await
    }

    /// The message for its tier, as the map says today.
    fn addressed(
        &self,
        package: &Package,
        message: &Message,
        after: Duration,
    ) -> Result<OutgoingMessage, Error> {
        let origin = RouteRequest::Retry {
            tier: &package.tier,
            priority: message.priority,
        };
        let capabilities = self.publisher.capabilities();
        let (topology, task) = (&self.topology, &message.task);
        let route = route::destination(topology, &capabilities, task, origin, after)?;
        let properties = message.follow(&package.properties, package.repaired.as_ref());
        Ok(OutgoingMessage {
            exchange: route.exchange,
            routing_key: route.routing_key,
            content: Content::Forwarded {
                payload: package.payload.clone(),
                properties: properties.with_priority(route.priority),
            },
        })
    }
}

fn remember(mut message: Message, failure: &Failure) -> Message {
    message.history.push(FailedAttempt {
        attempt: message.attempt,
        at: SystemTime::now(),
        kind: failure.kind,
        error: failure.to_string(),
    });
    message
}

/// The identifier that a message came with, if any, for messages about it.
pub(super) fn given_id(properties: &BasicProperties) -> TaskId {
    TaskId::from(identity::id(properties).unwrap_or("without an id"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_without_an_id_has_one_however_often_it_is_opened() {
        for properties in [
            BasicProperties::default(),
            BasicProperties::default().with_message_id("".into()),
        ] {
            let properties = properties.with_type("greet".into());
            let package = Package::new("normal".to_owned(), properties, Vec::new());
            let opened = || package.open(SystemTime::now()).unwrap().id;
            assert_eq!(opened(), opened());
        }
    }
}
