//! What becomes of a delivery: what follows on it is stored, then it is acknowledged or goes back.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::{Consumer, Queue, pause};
use crate::message::Received;
use crate::observe::Event;
use crate::source::amqp::subscription::Subscription;
use crate::source::amqp::successor::Stored;
use crate::source::suspects::{Counting, Running};
use crate::source::unreadable;
use crate::source::{Handle, Next, Source, task_ref};

/// A delivery that is not settled. The channel that it came on may be lost meanwhile.
pub(super) struct Unsettled {
    pub(super) generation: u64,
    pub(super) tag: u64,
    pub(super) received: Arc<Received>,
    /// Whether the group has it in a slot.
    pub(super) is_taken: bool,
    /// What follows on it, while that is being stored.
    pub(super) storing: Option<AbortOnDropHandle<()>>,
    /// Set while it runs, if it has a crash count.
    pub(super) running: Option<Running>,
    /// Set while its crash count is being stored, until it is settled.
    pub(super) counting: Option<Counting>,
}

/// Tells the source when it is dropped, even if the task that stores panics.
struct Report {
    handle: Handle,
    stored: Stored,
    sender: mpsc::UnboundedSender<(Handle, Stored)>,
}

impl Report {
    fn done(mut self, stored: Stored) {
        self.stored = stored;
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        // Without a receiver the source is gone, and the broker takes the delivery back.
        let _ = self.sender.send((self.handle, self.stored));
    }
}

impl Queue {
    /// Stores what follows on a delivery, in a task of its own.
    pub(super) fn store(
        &mut self,
        handle: Handle,
        storing: impl Future<Output = Stored> + Send + 'static,
    ) {
        let Some(unsettled) = self.unsettled.get_mut(&handle) else {
            return;
        };
        let report = Report {
            handle,
            stored: Stored::No,
            sender: self.sender.clone(),
        };
        unsettled.storing = Some(AbortOnDropHandle::new(tokio::spawn(async move {
            let stored = storing.await;
            report.done(stored);
        })));
    }

    /// Settles a delivery after what follows on it was stored or refused.
    pub(super) fn stored(&mut self, handle: Handle, stored: Stored) {
        if stored == Stored::NoQuarantine
            && self.drain.is_none()
            && let Some(unsettled) = self.unsettled.get_mut(&handle)
            && unsettled.generation == self.generation
            && matches!(self.consumer, Consumer::Subscribed(_))
        {
            unsettled.storing = None;
            self.prefetched.push(handle, true, Instant::now());
            return;
        }
        let Some(unsettled) = self.unsettled.remove(&handle) else {
            return;
        };
        let Unsettled {
            generation,
            tag,
            received,
            is_taken,
            counting,
            ..
        } = unsettled;
        match stored {
            // If its channel is lost, it will be delivered again all the same.
            Stored::Yes => {
                if !self.finished(generation, tag) {
                    self.history.ended_unacknowledged(received.key());
                }
            }
            // Its copy may have the same key, and only one of the two may be taken for done.
            Stored::Copied => {
                if !self.finished(generation, tag) && received.has_id() {
                    self.history.returned(received.key());
                }
            }
            Stored::No | Stored::NoQuarantine => self.give_back(generation, tag, &received),
            Stored::NoAndSuspect => {
                self.refuse(generation, tag);
                self.history.refused();
            }
        }
        if is_taken {
            self.settled.push_back(handle);
        }
        drop(counting);
    }

    /// A delivery can be acknowledged. Whether its channel is there.
    pub(super) fn finished(&mut self, generation: u64, tag: u64) -> bool {
        let subscription = self.on_channel(generation);
        subscription.map(|it| it.finished(tag)).is_some()
    }

    /// Returns a delivery to the broker. When it is delivered again, that explains it.
    fn give_back(&mut self, generation: u64, tag: u64, received: &Received) {
        let is_lost = !self.refuse(generation, tag);
        // One without an id was counted when its channel was lost.
        if received.has_id() || !is_lost {
            self.history.returned(received.key());
        }
    }

    /// Returns a delivery to the broker, which explains nothing. Whether its channel is there.
    fn refuse(&mut self, generation: u64, tag: u64) -> bool {
        let subscription = self.on_channel(generation);
        subscription.map(|it| it.give_back(tag)).is_some()
    }

    /// The channel, if it is the one of this generation.
    fn on_channel(&mut self, generation: u64) -> Option<&mut Subscription> {
        match &mut self.consumer {
            Consumer::Subscribed(subscription) if self.generation == generation => {
                Some(subscription)
            }
            _ => pause::find(&mut self.ending_channels, generation),
        }
    }

    /// Puts prefetched deliveries back that have waited so long that the broker's ack timeout draws near.
    pub(super) fn put_back_starved(&mut self) {
        let now = Instant::now();
        let oldest = self.prefetched.oldest();
        if oldest.is_none_or(|oldest| now.duration_since(oldest) < self.patience) {
            return;
        }
        let is_limited = self.settings.limits.tier(&self.name).is_some();
        for handle in self.prefetched.drain_until(now - self.patience / 2) {
            // As a row it waits for its limit without being published again and again.
            if let Some(unsettled) = self.unsettled.get(&handle)
                && self.settings.publisher.has_database()
                && (is_limited || self.gating.of(unsettled.received.task()).is_some())
            {
                let received = unsettled.received.clone();
                self.park(handle, received);
                continue;
            }
            if let Some(unsettled) = self.unsettled.get(&handle)
                && let Ok(message) = unsettled.received.message()
            {
                let task = task_ref(message);
                let why = "no slot was free for it before the broker's ack timeout drew near";
                let observers = &self.settings.observers;
                let ran = None;
                observers.emit(&Event::GivenBack { task, why, ran });
            }
            self.put_back(handle);
        }
    }

    /// Puts a delivery back that has not begun.
    pub(super) fn put_back(&mut self, handle: Handle) {
        if let Some(unsettled) = self.unsettled.get(&handle) {
            let next = match unsettled.received.message() {
                Ok(_) => Next::Back,
                Err(_) => unreadable(&unsettled.received),
            };
            self.settle(handle, next);
        }
    }
}
