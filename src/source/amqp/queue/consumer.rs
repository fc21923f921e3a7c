//! The consumer of a queue: subscribed to, lost, and subscribed to again.

use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::Queue;
use crate::observe::Event;
use crate::source::amqp::consumer_connection::poll_changed;
use crate::source::amqp::subscribe::{
    AFTER_A_LOSS, Addresses, ConsumeOn, NotSubscribed, QueueToConsume, Subscribed, Subscribing,
};
use crate::source::amqp::subscription::Subscription;

/// How long lower tiers wait for the first subscription to a higher one on a new connection.
const FIRST_SUBSCRIPTION: Duration = Duration::from_secs(5);

/// How the queue is consumed from.
pub(super) enum Consumer {
    /// Not at all: there is no connection.
    None,
    Subscribing(Subscribing),
    Subscribed(Box<Subscription>),
}

impl Queue {
    /// Subscribes when there is a connection, and notices when that is lost.
    pub(super) fn poll_consumer(&mut self, cx: &mut Context<'_>) {
        if poll_changed(&mut self.connection_changed, &self.connection, cx) {
            self.connection_changed();
        }
        if matches!(self.consumer, Consumer::None) && self.drain.is_none() && !self.is_gone {
            self.subscribe(Duration::ZERO);
        }
        if let Consumer::Subscribing(subscribing) = &mut self.consumer {
            let polled = subscribing.poll(cx);
            if subscribing.has_failed() {
                self.first_subscription_by = None;
            }
            match polled {
                Poll::Ready(Ok(subscribed)) => self.subscribed(subscribed),
                Poll::Ready(Err(NotSubscribed::NoFormerQueue)) => {
                    self.consumer = Consumer::None;
                    self.is_gone = true;
                }
                Poll::Ready(Err(NotSubscribed::Lost)) => {
                    // The connection of the tier is gone, perhaps because of this queue.
                    self.consumer = Consumer::None;
                    self.has_own_connection = true;
                    self.connection.report_lost("the connection was closed");
                    cx.waker().wake_by_ref();
                }
                Poll::Pending => {}
            }
        }
    }

    /// Lets lower tiers wait for a subscription, for a while. They do not wait for a queue that the tier had before it
    /// moved.
    pub(super) fn expect_subscription(&mut self) {
        let by = Instant::now() + FIRST_SUBSCRIPTION;
        self.first_subscription_by = (!self.is_former).then_some(by);
    }

    fn connection_changed(&mut self) {
        if self.connection.current().is_some() {
            self.expect_subscription();
            return;
        }
        match &self.consumer {
            // A broker whose quorum queue has no leader answers a consumer with the end of the whole
            // connection. So a queue that was being subscribed to gets a connection of its own.
            Consumer::Subscribing(_) if !self.has_own_connection => {
                self.has_own_connection = true;
                self.consumer = Consumer::None;
            }
            Consumer::Subscribed(_) if !self.has_own_connection => self.lose(),
            _ => {}
        }
    }

    fn subscribe(&mut self, after: Duration) {
        let target = QueueToConsume {
            queue: self.queue.clone(),
            window: self.window,
            tag: format!("{} {}", self.settings.worker, self.name),
            is_former: self.is_former,
        };
        let name = &self.settings.connection_name;
        let addresses = Addresses {
            name: format!("{name} {} {}", self.group, self.name),
            next_url: self.settings.topology.share_of(&self.name),
        };
        let consume_on = match self.connection.current() {
            _ if self.has_own_connection => ConsumeOn::OwnConnection(addresses),
            Some(connection) => ConsumeOn::TierConnection(connection, addresses),
            None => return,
        };
        let subscribing = Subscribing::new(&self.settings, target, consume_on, after);
        self.consumer = Consumer::Subscribing(subscribing);
    }

    fn subscribed(&mut self, subscribed: Subscribed) {
        let (group, tier) = (&self.group, &*self.name);
        let observers = &self.settings.observers;
        if subscribed.was_declared {
            tracing::error!(group, tier, "the queue was gone, and is declared again");
            observers.emit(&Event::Redeclared { tier });
        }
        tracing::info!(group, tier, "consuming");
        observers.emit(&Event::Consuming { group, tier });
        self.generation += 1;
        self.first_subscription_by = None;
        self.has_own_connection = subscribed.subscription.has_own_connection();
        self.consumer = Consumer::Subscribed(Box::new(subscribed.subscription));
        self.subscribed_at = Instant::now();
        self.history.subscribed();
        // What waits in the queue is not known yet.
        self.outlook.expect_more();
    }

    /// The consumer does not work any more.
    pub(super) fn interrupted(&mut self, cause: &str) {
        let Consumer::Subscribed(subscription) = &self.consumer else {
            return;
        };
        let is_connected = subscription.is_connected();
        if is_connected || self.has_own_connection {
            let (group, tier) = (&self.group, &*self.name);
            tracing::warn!(group, tier, cause, "a consumer is lost");
            let observers = &self.settings.observers;
            observers.emit(&Event::Interrupted { group, tier, cause });
        }
        self.lose();
        if is_connected && self.drain.is_none() {
            let pause = self.pause_after_loss();
            self.subscribe(pause);
        } else if !is_connected {
            // One on a connection of its own tries the connection of the tier again.
            match std::mem::take(&mut self.has_own_connection) {
                true => {}
                false => self.connection.report_lost(cause),
            }
        }
    }

    /// The channel is gone, and with it all that was prefetched.
    fn lose(&mut self) {
        let Consumer::Subscribed(subscription) =
            std::mem::replace(&mut self.consumer, Consumer::None)
        else {
            return;
        };
        tokio::spawn(subscription.close());
        let waiting: Vec<_> = self
            .prefetched
            .drain_until(Instant::now())
            .into_iter()
            .filter_map(|handle| self.unsettled.remove(&handle))
            .map(|unsettled| unsettled.received.key())
            .collect();
        let mut unsettled: Vec<_> = self.unsettled.keys().copied().collect();
        // What runs on a channel of before a pause is not lost.
        unsettled.retain(|handle| !self.has_ending_channel(*handle));
        self.orphans = unsettled;
        let generation = self.generation;
        let without_id = self
            .unsettled
            .values()
            .filter(|it| it.generation == generation && !it.received.has_id())
            .count();
        self.history
            .lost(SystemTime::now(), waiting.into_iter(), without_id);
        self.outlook.lost();
        self.gathering_since = None;
    }

    /// How long to wait before the channel that is lost is made again.
    fn pause_after_loss(&mut self) -> Duration {
        let pause = self.backoff.next_after(self.subscribed_at.elapsed());
        pause.max(AFTER_A_LOSS)
    }
}
