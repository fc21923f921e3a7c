//! A shutdown: nothing is received any more, and what has not begun is copied.

use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::BoxFuture;
use lapin::message::Delivery as AmqpDelivery;
use tokio::time::Instant;

use super::{Consumer, Queue};
use crate::source::amqp::redelivery::RedeliveryCause;

/// How long a shutdown waits until the prefetch window is full before it cancels the consumer.
const FILL_LIMIT: Duration = Duration::from_millis(300);
/// How long a shutdown withholds acknowledgements until everything is settled. One acknowledgement then stands for
/// all; single ones might not be carried out before the channel is closed.
const GATHER_LIMIT: Duration = Duration::from_secs(1);

/// A shutdown that has begun.
pub(super) struct Drain {
    /// When to cancel the consumer at the latest.
    pub(super) cancel_by: Instant,
    /// When to acknowledge what is settled at the latest.
    pub(super) acknowledge_by: Instant,
    /// Whether the broker was asked if the queue is empty.
    has_asked: bool,
    pub(super) cancelling: Option<BoxFuture<'static, Vec<AmqpDelivery>>>,
}

impl Drain {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        Self {
            cancel_by: now + FILL_LIMIT,
            acknowledge_by: now + GATHER_LIMIT,
            has_asked: false,
            cancelling: None,
        }
    }
}

impl Queue {
    /// Goes on with a shutdown: copies what was prefetched, and cancels the consumer.
    ///
    /// A quorum queue takes back what is under way to a cancelled consumer, and marks it as redelivered. So the
    /// consumer is cancelled when nothing can be under way: its window is full, because nothing is acknowledged
    /// meanwhile, or the queue is empty. `Subscription::cancel` takes what is published in between.
    ///
    /// Returns whether the broker has just answered the cancel.
    pub(super) fn poll_drain(&mut self, cx: &mut Context<'_>) -> bool {
        if self.drain.is_none() {
            return false;
        }
        for handle in self.prefetched.drain_until(Instant::now()) {
            self.put_back(handle);
        }
        let Some(drain) = &mut self.drain else {
            return false;
        };
        // A consumer that is being made may have deliveries already: it is cancelled like any other.
        if matches!(self.consumer, Consumer::Subscribing(_)) && Instant::now() >= drain.cancel_by {
            self.consumer = Consumer::None;
        }
        if let Consumer::Subscribed(subscription) = &mut self.consumer
            && !subscription.is_cancelled()
        {
            let is_full = subscription.unsettled() >= self.window.into();
            if is_full || !self.outlook.expects_more || Instant::now() >= drain.cancel_by {
                let room = usize::from(self.window).saturating_sub(subscription.unsettled());
                drain.cancelling = Some(subscription.cancel(room));
                // The broker would answer that the queue has no consumer.
                self.outlook.lost();
            } else if !std::mem::replace(&mut drain.has_asked, true) {
                self.outlook.ask(subscription, cx);
            }
        }
        let Some(cancelling) = &mut drain.cancelling else {
            return false;
        };
        let Poll::Ready(taken) = cancelling.as_mut().poll(cx) else {
            return false;
        };
        drain.cancelling = None;
        for delivery in taken {
            if let Consumer::Subscribed(subscription) = &mut self.consumer {
                let repaired = subscription.delivered(&delivery);
                let (received, tag) = self.received(delivery, repaired);
                // It was redelivered because of this cancel, or most likely so.
                self.accept(received, tag, RedeliveryCause::Explained);
            }
        }
        true
    }

    pub(super) fn is_cancelled(&self) -> bool {
        match &self.consumer {
            Consumer::Subscribed(subscription) => subscription.is_cancelled(),
            _ => false,
        }
    }
}
