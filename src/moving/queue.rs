//! Deletes the queue that a tier had before it moved, when it is empty and nothing uses it.

use std::time::Duration;

use tokio::time::sleep;

use super::{Mode, Mover, Step, StepState, count, waiting};
use crate::Error;
use crate::amqp::former::{Deleted, Looked, bind, delete_queue, look, unbind};
use crate::topology::plan::{Binding, DestinationType};
use crate::topology::{QueueType, Tier};

/// How far apart the looks are that must all find the queue empty and unused. A message that a publisher has sent, or a
/// channel gives back, is in the queue by then.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// The same with the management API. What it says of unacknowledged messages is up to 5 s old, so the last look, the third,
/// is that much later than the first, at which the queue had no consumer.
#[cfg(feature = "management")]
const LOOK_AGAIN_MANAGED: Duration = Duration::from_secs(3);

/// What to do when nobody knows whether consumers hold messages of a queue.
pub(super) const SHOW_HELD: &str = "give the management API, which shows them (--management); or, if no worker with \
                                    the old file is shutting down, say so (--assume-acknowledged)";

/// The queue that a tier had.
pub(super) struct OldQueue<'a> {
    mover: Mover<'a>,
    tier: &'a Tier,
    name: String,
    queue_type: QueueType,
    /// What leads messages into it.
    bindings: Vec<Binding>,
}

impl<'a> Mover<'a> {
    pub(super) fn former_queue(
        &self,
        tier: &'a Tier,
        queue_type: QueueType,
        generation: u32,
    ) -> OldQueue<'a> {
        let names = self.topology.names();
        let name = names.generation(&tier.name, generation);
        let key = names.key_of_generation(&tier.name, generation);
        let binding = |source: String, routing_key: String| Binding {
            source,
            destination: name.clone(),
            destination_type: DestinationType::Queue,
            routing_key,
            arguments: Default::default(),
        };
        OldQueue {
            bindings: vec![
                binding(names.tasks_exchange(), key.clone()),
                binding(names.delay_out(&tier.name), format!("{key}.#")),
            ],
            mover: *self,
            tier,
            name,
            queue_type,
        }
    }

    /// How far apart the looks at a queue are. Three of them show what consumers hold.
    pub(super) fn look_again(&self) -> Duration {
        #[cfg(feature = "management")]
        if self.management.is_some() {
            return LOOK_AGAIN_MANAGED;
        }
        LOOK_AGAIN
    }

    /// How many messages of a queue its consumers hold and have not acknowledged; `None`: nobody knows.
    #[cfg_attr(not(feature = "management"), expect(unused_variables))]
    pub(super) async fn unacknowledged(
        &self,
        tier: &Tier,
        queue: &str,
    ) -> Result<Option<u64>, Error> {
        #[cfg(feature = "management")]
        if let Some(management) = self.management {
            let connection = self.need_broker(tier)?;
            return crate::amqp::former::unacknowledged(connection, management, queue).await;
        }
        Ok(self.are_all_acknowledged.then_some(0))
    }
}

impl OldQueue<'_> {
    /// Deletes the queue, if that loses nothing.
    pub(super) async fn end(&self, mode: Mode) -> Result<Step, Error> {
        let name = &self.name;
        for number in 0..2 {
            if number > 0 {
                // A message that is given back, or on its way from a publisher, is seen a moment later.
                sleep(self.mover.look_again()).await;
            }
            match self.obstacle().await? {
                Obstacle::Gone => return Ok(Step::done(format!("{name} is gone"))),
                Obstacle::Unreachable(step) => return Ok(step),
                Obstacle::Waits(step) => {
                    if mode == Mode::Change {
                        // An earlier run may have ended between unbinding and binding.
                        bind(self.mover.need_broker(self.tier)?, &self.bindings).await?;
                    }
                    return Ok(step);
                }
                Obstacle::None => {}
            }
        }
        if mode == Mode::Look {
            let what = format!("{name} is empty and unused, and can be deleted");
            return Ok(Step::possible(what));
        }
        self.delete().await
    }

    /// Takes away what leads messages into the queue, and deletes it if none came meanwhile. Otherwise all is as before.
    async fn delete(&self) -> Result<Step, Error> {
        let connection = self.mover.need_broker(self.tier)?;
        unbind(connection, &self.bindings).await?;
        let deleted = self.delete_if_empty().await;
        if matches!(&deleted, Ok(step) if step.state == StepState::Done) {
            return deleted;
        }
        let bound = bind(connection, &self.bindings).await;
        let step = deleted?;
        bound.map(|()| step)
    }

    async fn delete_if_empty(&self) -> Result<Step, Error> {
        let name = &self.name;
        sleep(self.mover.look_again()).await;
        match self.obstacle().await? {
            Obstacle::Gone => return Ok(Step::done(format!("{name} is gone"))),
            Obstacle::Unreachable(step) | Obstacle::Waits(step) => return Ok(step),
            Obstacle::None => {}
        }
        let connection = self.mover.need_broker(self.tier)?;
        Ok(
            match delete_queue(connection, name, self.queue_type).await? {
                Deleted::Yes => Step::done(format!("{name} was empty and unused, and is deleted")),
                Deleted::Refused(why) => Step::waits(
                    format!("the broker does not delete {name}: {why}"),
                    "run this again when workers with this file have emptied it",
                ),
            },
        )
    }

    /// Why the queue cannot be deleted now.
    async fn obstacle(&self) -> Result<Obstacle, Error> {
        let name = &self.name;
        let connection = self.mover.need_broker(self.tier)?;
        let looked = look(connection, std::slice::from_ref(name)).await?;
        let (messages, consumers) = match looked.first() {
            Some(Looked::Found {
                messages,
                consumers,
            }) => (*messages, *consumers),
            Some(Looked::Unreachable) => {
                return Ok(Obstacle::Unreachable(Step::waits(
                    format!("{name} cannot be reached"),
                    "start its node, and run this again",
                )));
            }
            Some(Looked::Missing) | None => return Ok(Obstacle::Gone),
        };
        if messages > 0 {
            let what = format!(
                "{} in {name}, which has {}",
                waiting(messages.into()),
                count(consumers.into(), "consumer")
            );
            return Ok(Obstacle::Waits(Step::waits(
                what,
                "workers with this file take them; run this again when it is empty",
            )));
        }
        if consumers > 0 {
            let what = format!(
                "{name} is empty and has {}",
                count(consumers.into(), "consumer")
            );
            return Ok(Obstacle::Waits(Step::waits(
                what,
                "stop the processes that have the old file; workers with this file let go of it after a few \
                 seconds without a message, if nobody publishes to it",
            )));
        }
        Ok(match self.mover.unacknowledged(self.tier, name).await? {
            Some(0) => Obstacle::None,
            Some(held) => Obstacle::Waits(Step::waits(
                format!("{name} has {} not acknowledged", count(held, "message")),
                "a worker that shuts down still runs them; run this again when it has ended",
            )),
            None => Obstacle::Waits(Step::waits(
                format!("{name} is empty and unused, but workers may hold messages of it"),
                SHOW_HELD,
            )),
        })
    }
}

enum Obstacle {
    /// The queue is gone.
    Gone,
    /// Nobody knows what is in it. It cannot be bound either.
    Unreachable(Step),
    /// It is in use, or may be.
    Waits(Step),
    None,
}
