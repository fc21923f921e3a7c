//! A tier's queue as a source: what is prefetched, what runs, and whether more is to be expected.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use futures_util::future::BoxFuture;
use lapin::message::Delivery as AmqpDelivery;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::ConsumerSettings;
use super::consumer_connection::{ConsumerConnection, poll_changed};
use super::outlook::Outlook;
use super::redelivery::{RedeliveryCause, RedeliveryHistory};
use super::subscribe::{AFTER_A_LOSS, Addresses, Place, QueueToConsume, Subscribed, Subscribing};
use super::subscription::Subscription;
use super::successor::{Origin, Stored, unreadable};
use crate::backoff::Backoff;
use crate::message::{Received, Repaired};
use crate::observe::Event;
use crate::source::suspects::Held;
use crate::source::{Came, Delivery, Handle, Next, QUARANTINE_FROM, Source, Supply, task_ref};
use crate::topology::{self, Tier};

/// A prefetched message goes back when it has waited for a slot during this part of the broker's ack timeout.
const ACK_TIMEOUT_PARTS: u32 = 3;
/// How long an acknowledgement may wait for others. What is not acknowledged when a worker dies runs
/// again, so this is all that gathering can cost.
const LONGEST_GATHERING: Duration = Duration::from_millis(1);
/// How long lower tiers wait for the first subscription to a higher one on a new connection.
const FIRST_SUBSCRIPTION: Duration = Duration::from_secs(5);
/// How long a shutdown waits until the prefetch window is full before it cancels the consumer.
const FILL_LIMIT: Duration = Duration::from_millis(300);

/// The queue of a tier, consumed from on a channel of its own.
pub(super) struct Queue {
    settings: Arc<ConsumerSettings>,
    group: String,
    tier: usize,
    name: String,
    queue: String,
    window: u16,
    /// How long a prefetched message may wait for a slot.
    patience: Duration,
    connection: ConsumerConnection,
    connection_changed: BoxFuture<'static, ()>,
    consumer: Consumer,
    /// Counts the channels: a delivery tag means nothing on another one.
    generation: u64,
    /// Whether to consume on a connection of its own: on the shared one this queue may end it for the
    /// other tiers.
    is_apart: bool,
    /// Until when the other tiers wait for the first subscription on this connection.
    first_subscription_by: Option<Instant>,
    /// Deliveries that may run, in the order of their arrival.
    prefetched: VecDeque<(Handle, Instant)>,
    /// All deliveries that are not settled.
    unsettled: HashMap<Handle, Unsettled>,
    next_handle: Handle,
    history: RedeliveryHistory,
    outlook: Outlook,
    /// Since when something is finished and not acknowledged.
    gathering_since: Option<Instant>,
    subscribed_at: Instant,
    /// The pauses after channels that were lost.
    backoff: Backoff,
    drain: Option<Drain>,
    stored: mpsc::UnboundedReceiver<(Handle, Stored)>,
    sender: mpsc::UnboundedSender<(Handle, Stored)>,
    settled: VecDeque<Handle>,
}

/// How the queue is consumed from.
enum Consumer {
    /// Not at all: there is no connection.
    None,
    Subscribing(Subscribing),
    Subscribed(Subscription),
}

/// A delivery that is not settled. The channel that it came on may be lost meanwhile.
struct Unsettled {
    generation: u64,
    tag: u64,
    received: Arc<Received>,
    /// Whether the group has it in a slot.
    is_taken: bool,
    /// What follows on it, while that is being stored.
    storing: Option<AbortOnDropHandle<()>>,
    _suspect: Option<Held>,
}

/// A shutdown that has begun.
struct Drain {
    /// When to cancel the consumer at the latest.
    cancel_by: Instant,
    /// Whether the broker was asked if the queue is empty.
    has_asked: bool,
    cancelling: Option<BoxFuture<'static, ()>>,
}

impl Queue {
    pub(super) fn new(
        settings: &Arc<ConsumerSettings>,
        group: &topology::Group,
        index: usize,
        tier: &Tier,
        connection: ConsumerConnection,
    ) -> Self {
        let window = group.concurrency.saturating_mul(group.prefetch);
        let (sender, stored) = mpsc::unbounded_channel();
        Self {
            group: group.name.clone(),
            tier: index,
            name: tier.name.clone(),
            queue: settings.topology.names().queue(tier),
            window,
            patience: settings.topology.broker().ack_timeout / ACK_TIMEOUT_PARTS,
            connection_changed: connection.changed(),
            connection,
            consumer: Consumer::None,
            generation: 0,
            is_apart: false,
            first_subscription_by: Some(Instant::now() + FIRST_SUBSCRIPTION),
            prefetched: VecDeque::new(),
            unsettled: HashMap::new(),
            next_handle: 0,
            history: RedeliveryHistory::new(window.into()),
            outlook: Outlook::new(),
            gathering_since: None,
            subscribed_at: Instant::now(),
            backoff: Backoff::new(),
            drain: None,
            stored,
            sender,
            settled: VecDeque::new(),
            settings: settings.clone(),
        }
    }

    /// Subscribes when there is a connection, and notices when that is lost.
    fn poll_consumer(&mut self, cx: &mut Context<'_>) {
        if poll_changed(&mut self.connection_changed, &self.connection, cx) {
            self.connection_changed();
        }
        if matches!(self.consumer, Consumer::None) && self.drain.is_none() {
            self.subscribe(Duration::ZERO);
        }
        if let Consumer::Subscribing(subscribing) = &mut self.consumer {
            let polled = subscribing.poll(cx);
            if subscribing.has_failed() {
                self.first_subscription_by = None;
            }
            match polled {
                Poll::Ready(Some(subscribed)) => self.subscribed(subscribed),
                Poll::Ready(None) => {
                    // The shared connection is gone, perhaps because of this queue.
                    self.consumer = Consumer::None;
                    self.is_apart = true;
                    self.connection.report_lost("the connection was closed");
                    cx.waker().wake_by_ref();
                }
                Poll::Pending => {}
            }
        }
    }

    fn connection_changed(&mut self) {
        if self.connection.current().is_some() {
            self.first_subscription_by = Some(Instant::now() + FIRST_SUBSCRIPTION);
            return;
        }
        match &self.consumer {
            // A broker whose quorum queue has no leader answers a consumer with the end of the whole
            // connection. So a queue that was being subscribed to gets a connection of its own.
            Consumer::Subscribing(_) if !self.is_apart => {
                self.is_apart = true;
                self.consumer = Consumer::None;
            }
            Consumer::Subscribed(_) if !self.is_apart => self.lose(),
            _ => {}
        }
    }

    fn subscribe(&mut self, after: Duration) {
        let target = QueueToConsume {
            queue: self.queue.clone(),
            window: self.window,
            tag: format!("{} {}", self.settings.worker, self.name),
        };
        let name = &self.settings.connection_name;
        let addresses = Addresses {
            name: format!("{name} {} {}", self.group, self.name),
            next_url: 0,
        };
        let place = match self.connection.current() {
            _ if self.is_apart => Place::Apart(addresses),
            Some(connection) => Place::Shared(connection, addresses),
            None => return,
        };
        let subscribing = Subscribing::new(&self.settings, target, place, after);
        self.consumer = Consumer::Subscribing(subscribing);
    }

    fn subscribed(&mut self, subscribed: Subscribed) {
        let (group, tier) = (&self.group, &self.name);
        let observers = &self.settings.observers;
        if subscribed.was_declared {
            tracing::error!(group, tier, "the queue was gone, and is declared again");
            observers.emit(&Event::Redeclared { tier });
        }
        tracing::info!(group, tier, "consuming");
        observers.emit(&Event::Consuming { group, tier });
        self.generation += 1;
        self.first_subscription_by = None;
        self.is_apart = subscribed.subscription.is_apart();
        self.consumer = Consumer::Subscribed(subscribed.subscription);
        self.subscribed_at = Instant::now();
        self.history.subscribed();
        // What waits in the queue is not known yet.
        self.outlook.expect_more();
    }

    /// Receives what has arrived, and the broker's answers.
    fn poll_deliveries(&mut self, cx: &mut Context<'_>) -> Result<bool, String> {
        let mut has_changed = false;
        while let Consumer::Subscribed(subscription) = &mut self.consumer
            && let Poll::Ready(delivery) = subscription.poll(cx)
        {
            let (delivery, repaired) = delivery?;
            self.receive(delivery, repaired);
            has_changed = true;
        }
        if let Consumer::Subscribed(subscription) = &self.consumer {
            if subscription.unsettled() >= self.window.into() {
                // A full window means that there may be more.
                self.outlook.expects_more = true;
            }
            has_changed |= self.outlook.poll_answer(cx)?;
        }
        Ok(has_changed)
    }

    fn receive(&mut self, delivery: AmqpDelivery, repaired: Option<Repaired>) {
        self.outlook.moved();
        let AmqpDelivery {
            delivery_tag: tag,
            redelivered,
            properties,
            data,
            ..
        } = delivery;
        let received = Received::new(properties, data, repaired, &self.name, SystemTime::now());
        let cause = match redelivered {
            true if self.adopt(&received, tag) => return,
            true => self.history.cause_of(&received),
            false => self.history.first_delivery(),
        };
        if cause == RedeliveryCause::Done {
            self.finished(self.generation, tag);
            return;
        }
        let handle = self.next_handle;
        self.next_handle += 1;
        let crashes = received.crashes();
        let is_unexplained = cause == RedeliveryCause::Unexplained;
        let is_suspect = is_unexplained || crashes > 0;
        let received = Arc::new(received);
        let unsettled = Unsettled {
            generation: self.generation,
            tag,
            received: received.clone(),
            is_taken: false,
            storing: None,
            _suspect: is_suspect.then(|| self.settings.suspects.hold()),
        };
        self.unsettled.insert(handle, unsettled);
        let (settings, origin) = (self.settings.clone(), self.origin());
        if is_unexplained {
            self.store(handle, async move {
                settings.count_crash(&origin, &received).await
            });
        } else if crashes >= QUARANTINE_FROM {
            let group = self.group.clone();
            self.store(handle, async move {
                settings.quarantine(&group, &received).await
            });
        } else {
            self.prefetched.push_back((handle, Instant::now()));
        }
    }

    /// Gives a delivery to the run of the same message that came on an earlier channel, if there is one. Each
    /// delivery is given to one run: of equal messages each needs its own acknowledgement.
    fn adopt(&mut self, received: &Received, tag: u64) -> bool {
        let generation = self.generation;
        let orphan = self.unsettled.values_mut().find(|unsettled| {
            unsettled.generation != generation && unsettled.received.is_same(received)
        });
        match orphan {
            Some(orphan) => {
                orphan.generation = generation;
                orphan.tag = tag;
                true
            }
            None => false,
        }
    }

    fn origin(&self) -> Origin {
        Origin::Tier(self.name.clone())
    }

    /// Stores what follows on a delivery, in a task of its own.
    fn store(&mut self, handle: Handle, storing: impl Future<Output = Stored> + Send + 'static) {
        let Some(unsettled) = self.unsettled.get_mut(&handle) else {
            return;
        };
        let sender = self.sender.clone();
        unsettled.storing = Some(AbortOnDropHandle::new(tokio::spawn(async move {
            // Without a receiver the source is gone, and the broker takes the delivery back.
            let _ = sender.send((handle, storing.await));
        })));
    }

    /// Settles a delivery after what follows on it was stored or refused.
    fn stored(&mut self, handle: Handle, stored: Stored) {
        if stored == Stored::NoQuarantine && self.drain.is_none() {
            if let Some(unsettled) = self.unsettled.get_mut(&handle) {
                unsettled.storing = None;
                self.prefetched.push_back((handle, Instant::now()));
            }
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
            ..
        } = unsettled;
        match stored {
            // If its channel is lost it will be delivered again all the same. That is explained.
            Stored::Yes => {
                if !self.finished(generation, tag) && received.has_id() {
                    self.history.returned(received.key());
                }
            }
            Stored::No | Stored::NoQuarantine => self.give_back(generation, tag, &received),
            Stored::NoAndSuspect => drop(self.refuse(generation, tag)),
        }
        if is_taken {
            self.settled.push_back(handle);
        }
    }

    /// A delivery can be acknowledged. Whether its channel is there.
    fn finished(&mut self, generation: u64, tag: u64) -> bool {
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
            _ => None,
        }
    }

    /// The consumer does not work any more.
    fn interrupted(&mut self, cause: &str) {
        let Consumer::Subscribed(subscription) = &self.consumer else {
            return;
        };
        let is_connected = subscription.is_connected();
        if is_connected || self.is_apart {
            let (group, tier) = (&self.group, &self.name);
            tracing::warn!(group, tier, cause, "a consumer is lost");
            let observers = &self.settings.observers;
            observers.emit(&Event::Interrupted { group, tier, cause });
        }
        self.lose();
        if is_connected && self.drain.is_none() {
            let pause = self.pause_after_loss();
            self.subscribe(pause);
        } else if !is_connected {
            // One on a connection of its own tries the shared one again.
            match std::mem::take(&mut self.is_apart) {
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
            .drain(..)
            .filter_map(|(handle, _)| self.unsettled.remove(&handle))
            .map(|unsettled| unsettled.received.key())
            .collect();
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

    /// Puts prefetched deliveries back that have waited so long that the broker's ack timeout draws near.
    fn put_back_starved(&mut self) {
        let now = Instant::now();
        let is_due = |oldest: &(Handle, Instant)| now.duration_since(oldest.1) >= self.patience;
        if !self.prefetched.front().is_some_and(is_due) {
            return;
        }
        let since = now - self.patience / 2;
        let number = self.prefetched.partition_point(|it| it.1 <= since);
        for (handle, _) in self.prefetched.drain(..number).collect::<Vec<_>>() {
            if let Some(unsettled) = self.unsettled.get(&handle)
                && let Ok(message) = &unsettled.received.message
            {
                let task = task_ref(message);
                let why = "no slot was free for it before the broker's ack timeout drew near";
                let observers = &self.settings.observers;
                observers.emit(&Event::GivenBack { task, why });
            }
            self.settle(handle, Next::Back);
        }
    }

    /// Goes on with a shutdown: copies what was prefetched, and cancels the consumer.
    ///
    /// A quorum queue takes back what is under way to a cancelled consumer, and marks it as redelivered. So the
    /// consumer is cancelled when nothing can be under way: its window is full, because nothing is acknowledged
    /// meanwhile, or the queue is empty.
    fn poll_drain(&mut self, cx: &mut Context<'_>) {
        if self.drain.is_none() {
            return;
        }
        for (handle, _) in std::mem::take(&mut self.prefetched) {
            let unsettled = self.unsettled.get(&handle);
            let next = match unsettled.map(|it| unreadable(&it.received)) {
                Some(dead) if unsettled.is_some_and(|it| it.received.message.is_err()) => dead,
                _ => Next::Back,
            };
            self.settle(handle, next);
        }
        let Some(drain) = &mut self.drain else {
            return;
        };
        if let Consumer::Subscribed(subscription) = &mut self.consumer
            && !subscription.is_cancelled()
        {
            let is_full = subscription.unsettled() >= self.window.into();
            if is_full || !self.outlook.expects_more || Instant::now() >= drain.cancel_by {
                drain.cancelling = Some(subscription.cancel());
                // The broker would answer that the queue has no consumer.
                self.outlook.lost();
            } else if !std::mem::replace(&mut drain.has_asked, true) {
                self.outlook.ask(subscription, cx);
            }
        }
        if let Some(cancelling) = &mut drain.cancelling
            && cancelling.as_mut().poll(cx).is_ready()
        {
            drain.cancelling = None;
        }
    }
}

impl Source for Queue {
    fn tier(&self) -> Option<usize> {
        Some(self.tier)
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Came> {
        self.poll_consumer(cx);
        let has_changed = match self.poll_deliveries(cx) {
            Ok(has_changed) => has_changed,
            Err(cause) => {
                self.interrupted(&cause);
                // Whatever follows the loss has not registered its waker yet.
                cx.waker().wake_by_ref();
                true
            }
        };
        while let Poll::Ready(Some((handle, stored))) = self.stored.poll_recv(cx) {
            self.stored(handle, stored);
        }
        self.put_back_starved();
        self.poll_drain(cx);
        if let Consumer::Subscribed(subscription) = &self.consumer
            && self.drain.is_none()
        {
            self.outlook.check_consumer(subscription, cx);
        }
        if let Some(handle) = self.settled.pop_front() {
            return Poll::Ready(Came::Settled(handle));
        }
        match has_changed {
            true => Poll::Ready(Came::Changed),
            false => Poll::Pending,
        }
    }

    fn wake_at(&self) -> Option<Instant> {
        let starved = self.prefetched.front().map(|it| it.1 + self.patience);
        let drain = self.drain.as_ref();
        let cancel = drain
            .map(|it| it.cancel_by)
            .filter(|_| !self.is_cancelled());
        let check = match &self.consumer {
            Consumer::Subscribed(_) if drain.is_none() => Some(self.outlook.next_check()),
            _ => None,
        };
        [starved, cancel, check].into_iter().flatten().min()
    }

    fn supply(&mut self) -> Supply {
        if !self.prefetched.is_empty() {
            return Supply::Ready;
        }
        match &self.consumer {
            Consumer::Subscribed(subscription) => {
                // What is finished makes room as soon as it is acknowledged, which is about to happen.
                let room = usize::from(self.window).saturating_sub(subscription.open());
                match self.outlook.expects_more && room > 0 {
                    true => Supply::Coming(room),
                    false => Supply::Empty,
                }
            }
            // What a lower tier has must not be taken for all there is.
            _ => match self.first_subscription_by {
                Some(by) if Instant::now() < by && self.connection.current().is_some() => {
                    Supply::Coming(self.window.into())
                }
                _ => Supply::Empty,
            },
        }
    }

    fn take(&mut self) -> Option<Delivery> {
        let (handle, _) = self.prefetched.pop_front()?;
        let unsettled = self.unsettled.get_mut(&handle)?;
        unsettled.is_taken = true;
        let received = unsettled.received.clone();
        Some(Delivery { handle, received })
    }

    fn hold(&mut self, cx: &mut Context<'_>) -> Option<Instant> {
        let Consumer::Subscribed(subscription) = &mut self.consumer else {
            return self.first_subscription_by;
        };
        if subscription.has_finished() {
            // What the slot is held for comes only after that.
            subscription.flush();
            self.gathering_since = None;
            self.outlook.moved();
        }
        self.outlook.hold(subscription, cx)
    }

    fn settle(&mut self, handle: Handle, next: Next) {
        if !matches!(next, Next::Done) {
            let Some(unsettled) = self.unsettled.get(&handle) else {
                return;
            };
            let (settings, origin) = (self.settings.clone(), self.origin());
            let received = unsettled.received.clone();
            return self.store(handle, async move {
                settings.store(&origin, &received, next).await
            });
        }
        let Some(unsettled) = self.unsettled.remove(&handle) else {
            return;
        };
        let key = unsettled.received.key();
        match self.finished(unsettled.generation, unsettled.tag) {
            true => self.history.ended(key),
            false => self.history.ended_unacknowledged(key),
        }
    }

    fn flush(&mut self, is_quiet: bool) -> bool {
        let is_filling = self.drain.is_some() && !self.is_cancelled();
        let Consumer::Subscribed(subscription) = &mut self.consumer else {
            return false;
        };
        if is_filling || !subscription.has_finished() {
            self.gathering_since = None;
            return false;
        }
        let now = Instant::now();
        let since = *self.gathering_since.get_or_insert(now);
        if !is_quiet && now < since + LONGEST_GATHERING {
            return true;
        }
        subscription.flush();
        self.gathering_since = None;
        self.outlook.moved();
        false
    }

    fn drain(&mut self) {
        if self.drain.is_some() {
            return;
        }
        self.connection.drain();
        if let Consumer::Subscribing(_) = self.consumer {
            self.consumer = Consumer::None;
        }
        self.drain = Some(Drain {
            cancel_by: Instant::now() + FILL_LIMIT,
            has_asked: false,
            cancelling: None,
        });
    }

    fn is_drained(&self) -> bool {
        let Some(drain) = &self.drain else {
            return false;
        };
        let is_cancelled = match &self.consumer {
            Consumer::Subscribed(_) => self.is_cancelled(),
            _ => true,
        };
        is_cancelled && drain.cancelling.is_none() && self.unsettled.values().all(|it| it.is_taken)
    }

    fn close(self: Box<Self>) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let Self {
                consumer,
                connection,
                connection_changed,
                ..
            } = *self;
            drop(connection_changed);
            if let Consumer::Subscribed(subscription) = consumer {
                subscription.close().await;
            }
            connection.close().await;
        })
    }
}

impl Queue {
    fn is_cancelled(&self) -> bool {
        match &self.consumer {
            Consumer::Subscribed(subscription) => subscription.is_cancelled(),
            _ => false,
        }
    }
}
