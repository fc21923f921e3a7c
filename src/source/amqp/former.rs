//! The queue that a tier had before it moved, as a source.
//!
//! It is consumed from while it has messages, and otherwise looked at every few seconds: a program that still has the
//! map of before may publish to it, and may declare it again after it was deleted. A queue that is empty or gone has no
//! consumer, so that it can be deleted, and holds no slot. This source never declares it.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::time::{Instant, sleep};

use super::ConsumerSettings;
use super::consumer_connection::ConsumerConnection;
use super::queue::Queue;
use crate::amqp::QueueState;
use crate::source::{Delivery, Handle, Next, Source, Supply};
use crate::topology::{self, Tier};

/// How often the broker is asked whether the queue has messages.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// How long the queue must be quiet before its consumer is cancelled.
const QUIET: Duration = Duration::from_secs(2);
/// How long the broker may take to answer.
const LIMIT: Duration = Duration::from_secs(10);

pub(super) struct FormerQueue {
    settings: Arc<ConsumerSettings>,
    group: topology::Group,
    index: usize,
    tier: Tier,
    queue: String,
    state: State,
    next_handle: Handle,
    is_paused: bool,
    /// Whether the worker shuts down.
    is_draining: bool,
}

enum State {
    /// The future completes when messages are there.
    Waiting(BoxFuture<'static, ()>),
    Consuming(Box<Queue>),
    /// The queue is used up. Its consumer is being cancelled.
    Ending(Box<Queue>),
    /// The worker shuts down, and nothing is consumed.
    Ended,
}

impl FormerQueue {
    pub(super) fn new(
        settings: &Arc<ConsumerSettings>,
        group: &topology::Group,
        index: usize,
        tier: &Tier,
        queue: String,
    ) -> Self {
        let waiting = until_messages(settings.clone(), tier.name.clone(), queue.clone());
        Self {
            settings: settings.clone(),
            group: group.clone(),
            index,
            tier: tier.clone(),
            queue,
            state: State::Waiting(waiting),
            next_handle: 0,
            is_paused: false,
            is_draining: false,
        }
    }

    fn consume(&mut self) {
        let (tier, queue) = (&self.tier.name, self.queue.as_str());
        tracing::info!(tier, queue, "the queue of before the move has messages");
        let connection = ConsumerConnection::keep(self.settings.clone(), &self.group.name, tier);
        let source = Queue::former(
            &self.settings,
            &self.group,
            self.index,
            &self.tier,
            self.queue.clone(),
            connection,
            self.next_handle,
        );
        self.state = State::Consuming(Box::new(source));
    }

    fn wait(&mut self) {
        let (settings, tier) = (self.settings.clone(), self.tier.name.clone());
        self.state = State::Waiting(until_messages(settings, tier, self.queue.clone()));
    }

    /// The queue, while it is consumed from or given up.
    fn source(&self) -> Option<&Queue> {
        match &self.state {
            State::Consuming(source) | State::Ending(source) => Some(source),
            State::Waiting(_) | State::Ended => None,
        }
    }

    fn source_mut(&mut self) -> Option<&mut Queue> {
        match &mut self.state {
            State::Consuming(source) | State::Ending(source) => Some(source),
            State::Waiting(_) | State::Ended => None,
        }
    }

    /// Goes on to the next state. Whether it did.
    fn advance(&mut self, cx: &mut Context<'_>) -> bool {
        match &mut self.state {
            State::Waiting(waiting) => {
                if self.is_paused || waiting.as_mut().poll(cx).is_pending() {
                    return false;
                }
                self.consume();
                true
            }
            State::Consuming(source) => {
                let is_over = self.is_paused || source.is_used_up(QUIET).is_ok();
                if self.is_draining || !is_over {
                    return false;
                }
                source.drain();
                if let State::Consuming(source) = std::mem::replace(&mut self.state, State::Ended) {
                    self.state = State::Ending(source);
                }
                true
            }
            State::Ending(source) => {
                if self.is_draining || !(source.is_drained() && source.is_settled()) {
                    return false;
                }
                self.next_handle = source.next_handle();
                if let State::Ending(source) = std::mem::replace(&mut self.state, State::Ended) {
                    tokio::spawn(source.close());
                }
                self.wait();
                true
            }
            State::Ended => false,
        }
    }
}

impl Source for FormerQueue {
    fn tier(&self) -> Option<usize> {
        Some(self.index)
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Handle> {
        loop {
            if let Some(source) = self.source_mut()
                && let Poll::Ready(handle) = source.poll(cx)
            {
                return Poll::Ready(handle);
            }
            if !self.advance(cx) {
                return Poll::Pending;
            }
        }
    }

    fn wake_at(&self) -> Option<Instant> {
        let source = self.source()?;
        let used_up_at = match &self.state {
            State::Consuming(source) if !self.is_draining && !self.is_paused => {
                source.is_used_up(QUIET).err().flatten()
            }
            _ => None,
        };
        [source.wake_at(), used_up_at].into_iter().flatten().min()
    }

    fn supply(&mut self) -> Supply {
        self.source_mut().map_or(Supply::Empty, Source::supply)
    }

    fn take(&mut self) -> Option<Delivery> {
        self.source_mut()?.take()
    }

    fn hold(&mut self, cx: &mut Context<'_>) -> Option<Instant> {
        self.source_mut()?.hold(cx)
    }

    fn settle(&mut self, handle: Handle, next: Next) {
        if let Some(source) = self.source_mut() {
            source.settle(handle, next);
        }
    }

    fn flush(&mut self, is_quiet: bool) -> bool {
        self.source_mut().is_some_and(|it| it.flush(is_quiet))
    }

    /// A pause ends the consumer, and it is made again after it if the queue still has messages.
    fn set_paused(&mut self, is_paused: bool) {
        self.is_paused = is_paused;
    }

    fn drain(&mut self) {
        self.is_draining = true;
        match &mut self.state {
            State::Consuming(source) | State::Ending(source) => source.drain(),
            State::Waiting(_) | State::Ended => self.state = State::Ended,
        }
    }

    fn is_drained(&self) -> bool {
        match &self.state {
            State::Consuming(source) | State::Ending(source) => source.is_drained(),
            State::Waiting(_) => false,
            State::Ended => true,
        }
    }

    fn close(self: Box<Self>) -> BoxFuture<'static, ()> {
        match self.state {
            State::Consuming(source) | State::Ending(source) => source.close(),
            State::Waiting(_) | State::Ended => Box::pin(async {}),
        }
    }
}

/// Completes when the queue is there and has messages.
fn until_messages(
    settings: Arc<ConsumerSettings>,
    tier: String,
    queue: String,
) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        loop {
            let deadline = Instant::now() + LIMIT;
            let state = settings.publisher.queue_state(&tier, &queue, deadline);
            if let Some(QueueState::Available { messages: 1.., .. }) = state.await {
                return;
            }
            sleep(LOOK_EVERY).await;
        }
    })
}
