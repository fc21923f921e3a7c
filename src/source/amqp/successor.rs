//! What follows on a delivery: its next attempt, its dead letter, its copy. The broker confirms it before the
//! delivery itself is acknowledged.

#[cfg(feature = "postgres")]
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::ConsumerSettings;
use crate::Error;
#[cfg(feature = "postgres")]
use crate::backlog::{Lane, NewRow};
#[cfg(feature = "postgres")]
use crate::control::Gating;
#[cfg(feature = "postgres")]
use crate::dead::{Entry, write_entry};
use crate::error::PublishError;
use crate::message::{DeadReason, Death, Failure, Message, QUARANTINE_FROM, Received};
use crate::observe::Event;
use crate::publish::{Content, Outgoing, OutgoingMessage};
use crate::route::{self, RouteRequest};
use crate::source::crash::{crash_loop, delay_after_crash};
#[cfg(feature = "postgres")]
use crate::source::parked_tasks::lane_of;
use crate::source::{Next, emit_dead, emit_later, no_delays, task_ref, unreadable};
#[cfg(feature = "postgres")]
use crate::topology::UNORDERED_PRIORITY;
use crate::topology::delay;

/// How long the broker may take to confirm what follows on a delivery.
const STORE_LIMIT: Duration = Duration::from_secs(10);
/// How long the broker may take to confirm the copy of a message that goes back.
const COPY_LIMIT: Duration = Duration::from_secs(3);
/// The pause before a message goes back because the broker did not store what follows on it: the message
/// will be delivered again at once, and the cause may take longer to pass.
const BACK_PAUSE: Duration = Duration::from_secs(1);
/// How long the database may take to store a task that may not run now.
#[cfg(feature = "postgres")]
const PARK_LIMIT: Duration = Duration::from_secs(2);
/// After how long a task comes back that it did not store, and the pause where the tier has no delay queues.
#[cfg(feature = "postgres")]
const PARK_AGAIN_AFTER: Duration = Duration::from_secs(30);
#[cfg(feature = "postgres")]
const PARK_PAUSE: Duration = Duration::from_secs(5);
/// The queue that a delivery came from.
#[derive(Debug, Clone)]
pub(super) enum Origin {
    Tier(String),
    /// The quarantine of this group.
    Quarantine(String),
}

/// Whether what follows on a delivery is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stored {
    /// The delivery may be acknowledged. If it is delivered again all the same, it is done.
    Yes,
    /// A copy takes its place, which may be equal to it: the delivery may be acknowledged.
    Copied,
    /// The delivery must go back.
    No,
    /// The delivery must go back, and its crash is still to be counted.
    NoAndSuspect,
    /// The group has no quarantine: the delivery may run as it is.
    NoQuarantine,
}

impl ConsumerSettings {
    /// Stores what follows on a delivery. If the broker does not take it, a copy of the message takes its place.
    pub(super) async fn store(&self, origin: &Origin, received: &Received, next: Next) -> Stored {
        let message = received.message().ok();
        let stored = match next {
            Next::Done(_) => return Stored::Yes,
            Next::Back => return self.copy(origin, received, message.cloned()).await,
            Next::Later {
                message: later,
                after,
                failure,
            } => {
                let is_copy = after.is_zero() && failure.is_none();
                let stored = self.store_later(received, *later, after, &failure).await;
                match stored {
                    Ok(()) if is_copy => return Stored::Copied,
                    Err(Error::Publish(PublishError::NoDelays { tier, .. })) => {
                        let failure = no_delays(&tier, failure);
                        let dead = message.map(|message| message.clone().failed(&failure));
                        let reason = DeadReason::NoDelays;
                        self.store_dead(origin, received, dead.as_ref(), reason, failure)
                            .await
                    }
                    stored => stored,
                }
            }
            Next::Dead {
                message,
                reason,
                failure,
            } => {
                let message = message.as_deref();
                self.store_dead(origin, received, message, reason, failure)
                    .await
            }
        };
        match stored {
            Ok(()) => Stored::Yes,
            Err(error) => {
                self.report_not_stored(received, &error).await;
                // The handler came to an end, so it did not kill the worker that died before.
                let copy = message.map(|message| Message {
                    crashes: 0,
                    ..message.clone()
                });
                self.copy(origin, received, copy).await
            }
        }
    }

    /// Counts a crash, before anything else is done with the message.
    ///
    /// While the broker stores nothing, a message that was never counted goes back and runs when it is delivered
    /// again: a broker with a memory alarm takes no messages until its queues are worked off.
    pub(super) async fn count_crash(&self, origin: &Origin, received: &Received) -> Stored {
        let Ok(message) = received.message() else {
            return self.store(origin, received, unreadable(received)).await;
        };
        self.suspects.wait_for_running().await;
        let crashes = message.crashes.saturating_add(1);
        let counted = Message {
            crashes,
            ..message.clone()
        };
        let stored = if crashes >= self.dead_at_crashes {
            let failure = crash_loop(crashes);
            let dead = counted.clone().failed(&failure);
            let reason = DeadReason::CrashLoop;
            self.store_dead(origin, received, Some(&dead), reason, failure)
                .await
        } else {
            let task = task_ref(message);
            let stored = self.store_counted(received, &counted).await;
            if stored.is_ok() {
                let (name, id) = (task.name, task.id);
                tracing::warn!(task = name, %id, crashes, "a worker died while it held this task");
                self.observers.emit(&Event::Suspected { task, crashes });
            }
            stored
        };
        match stored {
            Ok(()) => Stored::Yes,
            Err(error) => {
                self.report_not_stored(received, &error).await;
                match message.crashes {
                    0 => Stored::No,
                    _ => Stored::NoAndSuspect,
                }
            }
        }
    }

    /// Publishes a message with a crash count, after a pause. A tier without delay queues has no pause.
    async fn store_counted(&self, received: &Received, counted: &Message) -> Result<(), Error> {
        let after = delay_after_crash(counted.crashes);
        match self.publish_counted(received, counted, after).await {
            Err(Error::Publish(PublishError::NoDelays { tier, .. })) => {
                if counted.crashes < QUARANTINE_FROM {
                    return self
                        .publish_counted(received, counted, Duration::ZERO)
                        .await;
                }
                let mut groups = self.topology.groups().iter();
                let group = groups.find(|group| group.tiers.iter().any(|it| **it == *tier));
                let group = group.map_or("", |group| &group.name);
                self.publish_to_quarantine(group, received, counted).await
            }
            stored => stored,
        }
    }

    /// Moves a suspect from its tier's queue to the quarantine of its group.
    pub(super) async fn quarantine(&self, group: &str, received: &Received) -> Stored {
        let Ok(message) = received.message() else {
            return Stored::NoQuarantine;
        };
        let stored = match self.outgoing(received, message, Duration::ZERO) {
            // Rows with a crash count wait among the others, at ranks of their own.
            Ok(row) if row.is_row() => self.forward_once(row, message).await,
            _ => self.publish_to_quarantine(group, received, message).await,
        };
        match stored {
            Ok(()) => Stored::Yes,
            Err(Error::Publish(PublishError::Unroutable { .. })) => {
                let (task, id) = (&message.task, &message.id);
                tracing::error!(task, %id, group, "the quarantine queue is missing: apply the topology");
                self.redeclare().await;
                Stored::NoQuarantine
            }
            Err(error) => {
                self.report_not_stored(received, &error).await;
                Stored::No
            }
        }
    }

    /// Stores a message as a row of its tier, where it waits until it may run: in the lane that `gating` says, or among the
    /// ready rows.
    ///
    /// While the database stores nothing, the message waits in the tier's delay queue. It must not go back to its queue: then
    /// another process would take it for the victim of a crash, and it would keep the tier's other tasks from the prefetch
    /// window.
    #[cfg(feature = "postgres")]
    pub(super) async fn park(
        &self,
        origin: &Origin,
        received: &Received,
        gating: Option<&Gating>,
    ) -> Stored {
        let Ok(message) = received.message() else {
            return self.store(origin, received, unreadable(received)).await;
        };
        if !self.parked_tasks.are_failing() {
            let deadline = Instant::now() + PARK_LIMIT;
            let lane = gating.map(|gating| lane_of(gating, received));
            let row = self.parked_row(received, message, lane);
            let parking = self.publisher.forward(row, &message.id, deadline);
            match parking.await {
                Ok(()) => {
                    if self.parked_tasks.succeeded() {
                        tracing::info!("tasks that may not run now are stored in Postgres again");
                    }
                    return Stored::Yes;
                }
                Err(error) if self.parked_tasks.failed() => {
                    tracing::warn!(%error, "cannot store tasks in Postgres that may not run now: they wait in delay queues on the broker, \
                         and are tried again");
                }
                Err(error) => tracing::debug!(%error, "cannot store a task in Postgres"),
            }
        }
        match self
            .publish_later(received, message, PARK_AGAIN_AFTER)
            .await
        {
            Ok(()) => Stored::Copied,
            Err(Error::Publish(PublishError::NoDelays { .. })) => {
                tokio::time::sleep(PARK_PAUSE).await;
                self.copy(origin, received, Some(message.clone())).await
            }
            Err(error) => {
                self.report_not_stored(received, &error).await;
                self.copy(origin, received, Some(message.clone())).await
            }
        }
    }

    #[cfg(feature = "postgres")]
    fn parked_row(&self, received: &Received, message: &Message, lane: Option<Lane>) -> Outgoing {
        let tier = self.topology.tier(&message.tier);
        let is_ordered = tier.is_some_and(|tier| tier.home.max_priority().is_some());
        let priority = match is_ordered {
            true => message.priority,
            // Without priorities all rows are equal, whatever another program gave them.
            false => UNORDERED_PRIORITY,
        };
        let properties = received.successor(message).with_priority(priority);
        let (tier, payload) = (message.tier.clone(), message.payload.clone());
        let row = NewRow {
            was_queued: true,
            lane,
            ..NewRow::forwarded(tier, Duration::ZERO, &message.id, &properties, payload)
        };
        Outgoing::Row(Arc::new(row))
    }

    async fn store_later(
        &self,
        received: &Received,
        message: Message,
        after: Duration,
        failure: &Option<Failure>,
    ) -> Result<(), Error> {
        // It came to an end: it did not kill the worker that died before.
        let message = Message {
            crashes: 0,
            ..message
        };
        self.publish_later(received, &message, after).await?;
        emit_later(&self.observers, received, after, failure.as_ref());
        Ok(())
    }

    async fn store_dead(
        &self,
        origin: &Origin,
        received: &Received,
        message: Option<&Message>,
        reason: DeadReason,
        failure: Failure,
    ) -> Result<(), Error> {
        let death = Death {
            reason,
            failure,
            at: SystemTime::now(),
            worker: self.worker.clone(),
            version: self.version.clone(),
        };
        let tier = self.tier_of(origin, received);
        let payload = received.payload().to_vec();
        let properties = received.dead_letter(&death, message);
        #[cfg(feature = "postgres")]
        if let Some(database) = &self.database
            && !self.topology.is_on_broker(&tier)
        {
            // It came from the queue that the tier had before it moved, whose exchange for dead letters may be gone.
            let entry = Entry::of_tier(
                &self.topology,
                &tier,
                &properties,
                payload,
                SystemTime::now(),
            );
            write_entry(database, self.topology.app(), entry).await?;
            emit_dead(&self.observers, received, &tier, &death);
            return Ok(());
        }
        let outgoing = OutgoingMessage {
            tier: tier.clone(),
            exchange: self.topology.names().dead_letter_exchange(&tier),
            routing_key: tier.clone(),
            content: Content::Forwarded {
                payload,
                properties,
            },
        };
        let deadline = Instant::now() + STORE_LIMIT;
        let id = received.id();
        self.publisher.forward(outgoing, id, deadline).await?;
        emit_dead(&self.observers, received, &tier, &death);
        Ok(())
    }

    /// Publishes a copy to where the delivery came from. A message that is returned to the broker instead is
    /// marked as redelivered, and the next worker takes it for the victim of a crash.
    async fn copy(&self, origin: &Origin, received: &Received, message: Option<Message>) -> Stored {
        let Some(message) = message else {
            return Stored::No;
        };
        let copied = match origin {
            Origin::Tier(_) => self.copy_to_tier(received, &message).await,
            Origin::Quarantine(group) => {
                let outgoing = self.quarantined(group, received, &message);
                match self.publish_copy(outgoing, &message).await {
                    // Somebody deleted the quarantine: what is returned to it is lost.
                    Err(Error::Publish(PublishError::Unroutable { .. })) => {
                        self.copy_to_tier(received, &message).await
                    }
                    copied => copied,
                }
            }
        };
        match copied {
            Ok(()) => Stored::Copied,
            Err(_) => Stored::No,
        }
    }

    async fn copy_to_tier(&self, received: &Received, message: &Message) -> Result<(), Error> {
        let outgoing = self.outgoing(received, message, Duration::ZERO)?;
        self.publish_copy(outgoing, message).await
    }

    async fn publish_copy(
        &self,
        outgoing: impl Into<Outgoing>,
        message: &Message,
    ) -> Result<(), Error> {
        let deadline = Instant::now() + COPY_LIMIT;
        let publishing = self.publisher.forward(outgoing, &message.id, deadline);
        publishing.await
    }

    async fn publish_later(
        &self,
        received: &Received,
        message: &Message,
        after: Duration,
    ) -> Result<(), Error> {
        let outgoing = self.later(received, message, after)?;
        let deadline = Instant::now() + STORE_LIMIT;
        self.publisher
            .forward(outgoing, &message.id, deadline)
            .await
    }

    /// Publishes a message with a higher crash count. If the confirm is lost, the delivery comes again and is counted
    /// again: sending the copy twice would leave one killer more.
    async fn publish_counted(
        &self,
        received: &Received,
        counted: &Message,
        after: Duration,
    ) -> Result<(), Error> {
        let outgoing = self.later(received, counted, after)?;
        self.forward_once(outgoing, counted).await
    }

    async fn forward_once(
        &self,
        outgoing: impl Into<Outgoing>,
        message: &Message,
    ) -> Result<(), Error> {
        let deadline = Instant::now() + STORE_LIMIT;
        self.publisher
            .forward_once(outgoing, &message.id, deadline)
            .await
    }

    /// The message on its way to its tier, after a delay.
    fn later(
        &self,
        received: &Received,
        message: &Message,
        after: Duration,
    ) -> Result<Outgoing, Error> {
        let after = match self.publisher.has_database() {
            true => after,
            false => after.min(delay::MAX_DELAY),
        };
        let mut message = message.clone();
        if !after.is_zero() {
            message.due_at = SystemTime::now().checked_add(after);
        }
        self.outgoing(received, &message, after)
    }

    async fn publish_to_quarantine(
        &self,
        group: &str,
        received: &Received,
        message: &Message,
    ) -> Result<(), Error> {
        let outgoing = self.quarantined(group, received, message);
        self.forward_once(outgoing, message).await
    }

    fn quarantined(&self, group: &str, received: &Received, message: &Message) -> OutgoingMessage {
        let highest = self.publisher.broker_version().highest_quorum_priority();
        let priority = message.priority.min(highest);
        let names = self.topology.names();
        OutgoingMessage {
            tier: message.tier.clone(),
            exchange: names.tasks_exchange(),
            routing_key: names.quarantine_key(group),
            content: Content::Forwarded {
                payload: message.payload.clone(),
                properties: received.successor(message).with_priority(priority),
            },
        }
    }

    /// The message on its way to its tier, as the map and its overrides say now.
    pub(super) fn outgoing(
        &self,
        received: &Received,
        message: &Message,
        after: Duration,
    ) -> Result<Outgoing, Error> {
        let request = RouteRequest::Retry {
            tier: &message.tier,
            priority: message.priority,
        };
        let servers = self.publisher.servers();
        let (topology, task) = (&self.topology, &message.task);
        let overridden = self.controls.override_of(task);
        let overridden = overridden.as_deref();
        let route = route::destination(topology, overridden, servers, task, request, after)?;
        let properties = received.successor(message);
        let content = Content::Forwarded {
            payload: message.payload.clone(),
            properties: properties.with_priority(route.priority),
        };
        Outgoing::new(route, &message.id, content)
    }

    fn tier_of(&self, origin: &Origin, received: &Received) -> String {
        match (origin, received.message()) {
            (Origin::Tier(tier), _) => tier.clone(),
            (Origin::Quarantine(_), Ok(message)) => message.tier.clone(),
            (Origin::Quarantine(group), Err(_)) => {
                let group = self.topology.group(group);
                let first = group.and_then(|group| group.tiers.first());
                first.cloned().unwrap_or_default()
            }
        }
    }

    async fn report_not_stored(&self, received: &Received, error: &Error) {
        let id = received.id();
        tracing::warn!(%id, %error, "the broker did not store what follows on a task: it goes back");
        if let Ok(message) = received.message() {
            let (task, why, ran) = (task_ref(message), &error.to_string(), received.ran());
            self.observers.emit(&Event::GivenBack { task, why, ran });
        }
        if matches!(error, Error::Publish(PublishError::Unroutable { .. })) {
            self.redeclare().await;
        }
        tokio::time::sleep(BACK_PAUSE).await;
    }
}
