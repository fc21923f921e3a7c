//! Delayed messages that fell due while the queue of their tier was away.
//!
//! The exchange at the end of the delay queues sends a message that it cannot route to the queue `{app}.unrouted`. A
//! classic queue whose node restarts is such a case: RabbitMQ 3.10 has no bindings for it meanwhile. Each worker looks
//! into that queue every few seconds and publishes what it finds to its tier. A tier that has moved, and whose old queue
//! is deleted, is another: its delayed messages go to where it is now. A message whose tier is still away goes
//! to the back, so that it holds up no other tier. A message without a tier in the map is a dead letter.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::future::{BoxFuture, join_all};
use lapin::Channel;
use lapin::options::{BasicAckOptions, BasicGetOptions, BasicNackOptions};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::ConsumerSettings;
use super::successor::{Origin, Stored};
use crate::Error;
use crate::amqp::{Connection, QueueState};
use crate::error::Stored::Maybe;
use crate::message::{DeadReason, Failure, FailureKind, Message, Received};
use crate::observe::Event;
use crate::publish::{Content, Outgoing, OutgoingMessage};
use crate::source::{Next, task_ref};
use crate::topology::{self, Tier};

/// How often a worker asks whether messages are there.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// The longest pause while no tier takes its messages.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// How many messages it publishes at once. Each that was taken with `basic.get` is settled by a command of its own, of
/// which a channel gives a quorum queue 32 at a time and drops the others when it is closed. So each batch has a channel
/// of its own: on a slow broker the commands of two batches are more than that, and what is dropped is there twice.
const BATCH: usize = 30;
/// How many batches of which a part cannot be moved may stay unsettled. Each keeps its channel open.
const UNSETTLED_BATCHES: usize = 100;
/// About how many bytes these may have.
const BATCH_BYTES: usize = 4 << 20;
/// How long the broker may take for one step.
const LIMIT: Duration = Duration::from_secs(10);
/// How long the broker may take to confirm a message. A tier that is full refuses for as long.
const STORE_LIMIT: Duration = Duration::from_secs(3);
/// How much longer for each MiB: a message that is confirmed later is there twice.
const STORE_LIMIT_PER_MIB: Duration = Duration::from_secs(1);

/// Looks for unrouted messages until `ending` is cancelled. `group` is one that this worker serves: the dead letters of
/// its tiers are those that it may write.
pub(crate) async fn reroute(
    settings: Arc<ConsumerSettings>,
    group: topology::Group,
    ending: CancellationToken,
) {
    let unrouted = Unrouted {
        queue: settings.topology.names().unrouted(),
        settings,
        group,
    };
    let mut pause = LOOK_EVERY;
    while ending.run_until_cancelled(sleep(pause)).await.is_some() {
        let Some(are_there) = ending.run_until_cancelled(unrouted.are_there()).await else {
            return;
        };
        pause = match !are_there || unrouted.work_off(&ending).await {
            true => LOOK_EVERY,
            false => (pause * 2).min(LONGEST_PAUSE),
        };
    }
}

struct Unrouted {
    settings: Arc<ConsumerSettings>,
    queue: String,
    group: topology::Group,
}

/// Where a message went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moved {
    /// To its tier, or among the dead letters.
    Out,
    ToTheBack,
    No,
}

/// A delivery that is not acknowledged yet.
struct Taken {
    tag: u64,
    received: Received,
}

impl Unrouted {
    async fn are_there(&self) -> bool {
        let Some(tier) = self.group.tiers.first() else {
            return false;
        };
        let (publisher, deadline) = (&self.settings.publisher, Instant::now() + LIMIT);
        let state = publisher.queue_state(tier, &self.queue, deadline).await;
        matches!(state, Some(QueueState::Available { messages: 1.., .. }))
    }

    /// Works off what is there now. Whether any message has left the queue. The connection is opened for that alone:
    /// nearly always there is nothing to do.
    async fn work_off(&self, ending: &CancellationToken) -> bool {
        let name = format!("{} unrouted", self.settings.connection_name);
        let worked_off = async {
            let opening = Connection::open_any(&self.settings.urls, &name);
            let Some(opened) = ending.run_until_cancelled(opening).await else {
                return Ok(true);
            };
            let connection = opened?;
            let worked_off = self.store_all(&connection, ending).await;
            connection.close().await;
            worked_off
        };
        worked_off.await.unwrap_or_else(|error| {
            let queue = &self.queue;
            tracing::warn!(%error, queue, "cannot send delayed tasks to their tiers again; the next try follows");
            false
        })
    }

    async fn store_all(
        &self,
        connection: &Connection,
        ending: &CancellationToken,
    ) -> Result<bool, Error> {
        let (mut left, mut has_any_left) = (usize::MAX, false);
        // What cannot be moved stays unacknowledged until the end: what is returned comes first again.
        let mut unsettled = Vec::new();
        while left > 0 && unsettled.len() < UNSETTLED_BATCHES && !ending.is_cancelled() {
            let channel = connection.channel(Instant::now() + LIMIT).await?;
            let batch = self.take(connection, &channel, &mut left).await?;
            let stored = join_all(batch.iter().map(|it| self.store(&it.received))).await;
            let mut unmoved = Vec::new();
            for (taken, moved) in batch.iter().zip(stored) {
                has_any_left |= moved == Moved::Out;
                match moved {
                    Moved::Out | Moved::ToTheBack => {
                        let options = BasicAckOptions::default();
                        let acknowledging = Box::pin(channel.basic_ack(taken.tag, options));
                        settle(connection, acknowledging).await?;
                    }
                    Moved::No => unmoved.push(taken.tag),
                }
            }
            match unmoved.is_empty() {
                true => settle(connection, Box::pin(channel.close(200, "done".into()))).await?,
                false => unsettled.push((channel, unmoved)),
            }
        }
        for (channel, tags) in unsettled {
            for tag in tags {
                let back = BasicNackOptions {
                    multiple: false,
                    requeue: true,
                };
                settle(connection, Box::pin(channel.basic_nack(tag, back))).await?;
            }
        }
        Ok(has_any_left)
    }

    /// Takes the next messages, and counts down how many of those are left that were there at the beginning.
    async fn take(
        &self,
        connection: &Connection,
        channel: &Channel,
        left: &mut usize,
    ) -> Result<Vec<Taken>, Error> {
        let (mut batch, mut bytes) = (Vec::new(), 0);
        while batch.len() < BATCH && bytes < BATCH_BYTES && *left > 0 {
            let options = BasicGetOptions { no_ack: false };
            let getting = channel.basic_get(self.queue.as_str().into(), options);
            let tried = "take an unrouted task";
            let got = match timeout(LIMIT, getting).await {
                Ok(Ok(got)) => got,
                Ok(Err(error)) => return Err(connection.failed(tried, &error)),
                Err(_) => return Err(connection.failed(tried, "the broker did not answer in time")),
            };
            let Some(got) = got else {
                *left = 0;
                break;
            };
            *left = (*left - 1).min(got.message_count as usize);
            let delivery = got.delivery;
            let tag = delivery.delivery_tag;
            let repaired = connection.repairs().take(channel.id(), tag);
            bytes += delivery.data.len();
            let (properties, now) = (delivery.properties, SystemTime::now());
            let received = Received::new(properties, delivery.data, repaired, "".into(), now);
            batch.push(Taken { tag, received });
        }
        Ok(batch)
    }

    /// Stores a message in the queue of its tier, at the back of the unrouted ones, or as a dead letter.
    async fn store(&self, received: &Received) -> Moved {
        let settings = &self.settings;
        let routed = received
            .message()
            .map(|message| Some((message, settings.goes_to(&message.task)?)));
        let (message, tier) = match routed {
            Ok(Some(routed)) => routed,
            Ok(None) => {
                let problem = "its delay has ended, and the map gives it no tier";
                return self.dead_letter(received, problem.to_owned()).await;
            }
            Err(unreadable) => {
                return self.dead_letter(received, unreadable.problem.clone()).await;
            }
        };
        let message = Message {
            tier: tier.name.clone(),
            ..message.clone()
        };
        match self.queue_of(tier).await {
            Some(QueueState::Available { .. } | QueueState::NotAllowed) => {}
            Some(QueueState::Unreachable | QueueState::Missing) => {
                return self.to_the_back(received, &message).await;
            }
            None => return Moved::No,
        }
        match self.publish(received, &message).await {
            Ok(()) => {
                let task = task_ref(&message);
                let (name, id, tier) = (task.name, task.id, task.tier);
                tracing::info!(task = name, %id, tier, "a delayed task that found no queue is in its tier");
                settings.observers.emit(&Event::Rerouted { task });
                Moved::Out
            }
            Err(error) => {
                let id = received.id();
                tracing::warn!(%id, %error, "a delayed task was not sent to its tier again; the next try follows");
                match error.stored() {
                    // A copy at the back would be a second one.
                    Some(Maybe) => Moved::No,
                    _ => self.to_the_back(received, &message).await,
                }
            }
        }
    }

    /// Whether the queue of a tier is there. A tier in Postgres needs none. `None`: the broker could not be asked.
    async fn queue_of(&self, tier: &Tier) -> Option<QueueState> {
        if !tier.home.is_on_broker() {
            return Some(QueueState::Available {
                messages: 0,
                consumers: 0,
            });
        }
        let (publisher, deadline) = (&self.settings.publisher, Instant::now() + LIMIT);
        let queue = self.settings.topology.names().queue(tier);
        publisher.queue_state(&tier.name, &queue, deadline).await
    }

    /// A message that its tier does not take now must not hold up those of other tiers.
    async fn to_the_back(&self, received: &Received, message: &Message) -> Moved {
        let outgoing = OutgoingMessage {
            tier: message.tier.clone(),
            exchange: self.settings.topology.names().unrouted(),
            routing_key: message.tier.clone(),
            content: Content::Forwarded {
                payload: message.payload.clone(),
                properties: received.successor(message),
            },
        };
        match self.forward(received, message, outgoing).await {
            Ok(()) => Moved::ToTheBack,
            Err(_) => Moved::No,
        }
    }

    async fn publish(&self, received: &Received, message: &Message) -> Result<(), Error> {
        let outgoing = self.settings.outgoing(received, message, Duration::ZERO)?;
        self.forward(received, message, outgoing).await
    }

    /// Sends a message once: sending it again could store it twice.
    async fn forward(
        &self,
        received: &Received,
        message: &Message,
        outgoing: impl Into<Outgoing>,
    ) -> Result<(), Error> {
        let (publisher, deadline) = (&self.settings.publisher, Instant::now() + limit(received));
        publisher
            .forward_once(outgoing, &message.id, deadline)
            .await
    }

    async fn dead_letter(&self, received: &Received, problem: String) -> Moved {
        let tier = self.group.tiers.first().cloned().unwrap_or_default();
        let next = Next::Dead {
            message: received.message().ok().cloned().map(Box::new),
            reason: DeadReason::Unroutable,
            failure: Failure::new(FailureKind::NotStarted, problem),
        };
        let origin = Origin::Tier(tier);
        match self.settings.store(&origin, received, next).await {
            Stored::Yes => Moved::Out,
            // The broker did not take the dead letter. A message of no tier has no copy either.
            _ => Moved::No,
        }
    }
}

async fn settle(
    connection: &Connection,
    settling: BoxFuture<'_, lapin::Result<()>>,
) -> Result<(), Error> {
    let tried = "settle unrouted tasks";
    match timeout(LIMIT, settling).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(connection.failed(tried, &error)),
        Err(_) => Err(connection.failed(tried, "the broker did not answer in time")),
    }
}

fn limit(received: &Received) -> Duration {
    let mebibytes = u32::try_from(received.payload().len() >> 20).unwrap_or(u32::MAX);
    STORE_LIMIT + STORE_LIMIT_PER_MIB.saturating_mul(mebibytes)
}
