//! The queue of a tier, as a source that can be paused.
//!
//! A pause ends the consumer as a shutdown does: nothing is received any more, and what was prefetched is copied, so that
//! no redelivered flag tells of a crash that never was. What runs goes on, and is settled on the channel that it came on.
//! After the pause the queue is consumed from on a new channel, beside what may still run from before.

use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::future::{BoxFuture, join_all};
use tokio::time::Instant;

use super::ConsumerSettings;
use super::consumer_connection::ConsumerConnection;
use super::queue::Queue;
use crate::source::{Delivery, Handle, Next, Source, Supply};
use crate::topology::{self, Tier};

pub(super) struct TierQueue {
    settings: Arc<ConsumerSettings>,
    group: topology::Group,
    index: usize,
    tier: Tier,
    connection: ConsumerConnection,
    queue: Box<Queue>,
    /// Those of before a pause whose deliveries still run, each with its first handle.
    ending: Vec<(Handle, Box<Queue>)>,
    /// The first handle of `queue`.
    first_handle: Handle,
    is_paused: bool,
    is_draining: bool,
}

impl TierQueue {
    pub(super) fn new(
        settings: &Arc<ConsumerSettings>,
        group: &topology::Group,
        index: usize,
        tier: &Tier,
        connection: ConsumerConnection,
    ) -> Self {
        let queue = Queue::new(settings, group, index, tier, connection.clone());
        Self {
            settings: settings.clone(),
            group: group.clone(),
            index,
            tier: tier.clone(),
            connection,
            queue: Box::new(queue),
            ending: Vec::new(),
            first_handle: 0,
            is_paused: false,
            is_draining: false,
        }
    }

    /// The queue that gave this handle out.
    fn of(&mut self, handle: Handle) -> &mut Queue {
        match handle >= self.first_handle {
            true => &mut self.queue,
            false => {
                let mut newest_first = self.ending.iter_mut().rev();
                match newest_first.find(|(first, _)| handle >= *first) {
                    Some((_, queue)) => queue,
                    None => &mut self.queue,
                }
            }
        }
    }

    /// Consumes again after a pause, once everything that was prefetched is copied.
    fn resume(&mut self) {
        if self.is_paused || self.is_draining || !self.queue.is_paused() || !self.queue.is_drained()
        {
            return;
        }
        let again = Queue::after_pause(
            &self.settings,
            &self.group,
            self.index,
            &self.tier,
            self.connection.clone(),
            &mut self.queue,
        );
        let first = std::mem::replace(&mut self.first_handle, again.next_handle());
        let before = std::mem::replace(&mut self.queue, Box::new(again));
        self.ending.push((first, before));
    }

    /// Closes the channels of before a pause whose deliveries are all settled.
    fn close_ended(&mut self) {
        let is_ended = |it: &mut (Handle, Box<Queue>)| it.1.is_settled();
        for (_, queue) in self.ending.extract_if(.., is_ended) {
            tokio::spawn(queue.close());
        }
    }

    fn queues(&self) -> impl Iterator<Item = &Queue> {
        let ending = self.ending.iter().map(|(_, queue)| &**queue);
        ending.chain(std::iter::once(&*self.queue))
    }

    fn queues_mut(&mut self) -> impl Iterator<Item = &mut Queue> {
        let ending = self.ending.iter_mut().map(|(_, queue)| &mut **queue);
        ending.chain(std::iter::once(&mut *self.queue))
    }
}

impl Source for TierQueue {
    fn tier(&self) -> Option<usize> {
        Some(self.index)
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Handle> {
        self.resume();
        for queue in self.queues_mut() {
            if let Poll::Ready(handle) = queue.poll(cx) {
                return Poll::Ready(handle);
            }
        }
        self.close_ended();
        let must_resume = self.queue.is_paused() && !self.is_paused && !self.is_draining;
        if must_resume && self.queue.is_drained() {
            // The new consumer has not registered its waker yet.
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }

    fn wake_at(&self) -> Option<Instant> {
        self.queues().filter_map(|queue| queue.wake_at()).min()
    }

    fn supply(&mut self) -> Supply {
        match self.is_paused {
            true => Supply::Empty,
            false => self.queue.supply(),
        }
    }

    fn take(&mut self) -> Option<Delivery> {
        self.queue.take()
    }

    fn hold(&mut self, cx: &mut Context<'_>) -> Option<Instant> {
        self.queue.hold(cx)
    }

    fn settle(&mut self, handle: Handle, next: Next) {
        self.of(handle).settle(handle, next);
    }

    fn flush(&mut self, is_quiet: bool) -> bool {
        // Each of them, also after one that must be flushed again.
        let again = self.queues_mut().map(|queue| queue.flush(is_quiet));
        again.fold(false, |any, again| any | again)
    }

    fn set_paused(&mut self, is_paused: bool) {
        self.is_paused = is_paused;
        if is_paused {
            self.queue.set_paused(true);
        }
    }

    fn drain(&mut self) {
        self.is_draining = true;
        self.queues_mut().for_each(Source::drain);
    }

    fn is_drained(&self) -> bool {
        self.queues().all(Source::is_drained)
    }

    fn close(self: Box<Self>) -> BoxFuture<'static, ()> {
        let Self {
            connection,
            queue,
            ending,
            ..
        } = *self;
        let queues = ending.into_iter().map(|(_, queue)| queue);
        let closing: Vec<_> = queues.chain([queue]).map(Source::close).collect();
        Box::pin(async move {
            join_all(closing).await;
            connection.close().await;
        })
    }
}
