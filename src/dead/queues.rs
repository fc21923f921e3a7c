//! The queues that the collector consumes from. They share a connection; a queue that may end the shared
//! connection gets its own.

use std::pin::{Pin, pin};
use std::time::{Duration, SystemTime};

use futures_util::stream::{FuturesUnordered, SelectAll};
use futures_util::{FutureExt, Stream, StreamExt};
use lapin::message::Delivery;
use tokio::time::Instant;

use super::entry::{DeadLetterQueue, Entry};
use super::subscription::{Attempt, Place, Subscription, attempt};
use crate::Error;
use crate::message::properties;
use crate::topology::Topology;

/// How many bytes of messages a batch has, about, before it is written. Until then they take about four
/// times as much memory.
const BATCH_BYTES: usize = 4 << 20;
/// How long to wait before a queue that could not be consumed from is tried again.
const PAUSE: Duration = Duration::from_secs(2);
/// The longest such pause for a queue that ends its connection: the pause doubles each time.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// The queues, each with its own channel: deliveries then arrive in the order of their tags, and one
/// acknowledgement covers a batch.
pub(super) struct Queues<'c> {
    place: Place<'c>,
    queues: Vec<Queue>,
    /// For each queue, whether it needs its own connection.
    apart: &'c mut [bool],
    deliveries: SelectAll<Feed>,
    attempts: FuturesUnordered<Attempting<'c>>,
    /// The number of the next subscription.
    next: u64,
}

struct Queue {
    source: DeadLetterQueue,
    subscription: Option<Subscription>,
    /// Whether an attempt to consume from it is under way.
    is_tried: bool,
    try_at: Instant,
    pause: Duration,
}

/// A delivery of a queue, or `None` if its consumer ended.
pub(super) struct Item {
    queue: usize,
    subscription: u64,
    delivery: Option<Delivery>,
}

/// The last delivery of a queue in a batch. Its tag is valid for its own subscription only.
pub(super) struct Last {
    subscription: u64,
    tag: u64,
}

type Feed = Pin<Box<dyn Stream<Item = Item> + Send>>;
type Attempting<'c> = Pin<Box<dyn Future<Output = Attempt> + Send + 'c>>;

impl<'c> Queues<'c> {
    pub(super) fn new(
        place: Place<'c>,
        sources: Vec<DeadLetterQueue>,
        apart: &'c mut [bool],
    ) -> Self {
        let queue = |source| Queue {
            source,
            subscription: None,
            is_tried: false,
            try_at: Instant::now(),
            pause: PAUSE,
        };
        Self {
            place,
            queues: sources.into_iter().map(queue).collect(),
            apart,
            deliveries: SelectAll::new(),
            attempts: FuturesUnordered::new(),
            next: 0,
        }
    }

    /// Starts to consume from each queue that has no consumer. This does not wait: a queue that is
    /// missing or does not answer delays no other. `false`: the connection is lost.
    pub(super) fn subscribe(&mut self) -> bool {
        if !self.place.connection.is_open() {
            return false;
        }
        for (index, queue) in self.queues.iter_mut().enumerate() {
            let subscription = queue.subscription.as_ref();
            if subscription.is_some_and(Subscription::is_open)
                || queue.is_tried
                || queue.try_at > Instant::now()
            {
                continue;
            }
            queue.is_tried = true;
            let name = queue.source.queue.clone();
            let trying = attempt(self.place, (index, name), self.next, self.apart[index]);
            self.next += 1;
            self.attempts.push(Box::pin(trying));
        }
        true
    }

    /// If the connection is lost, records the queues whose subscription was under way: one of them may have
    /// ended it.
    pub(super) fn note_loss(&mut self) {
        if self.place.connection.is_open() {
            return;
        }
        for (apart, queue) in self.apart.iter_mut().zip(&self.queues) {
            *apart |= queue.is_tried;
        }
    }

    /// Runs a future while attempts to consume continue.
    pub(super) async fn meanwhile<T>(&mut self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        loop {
            tokio::select! {
                biased;
                done = &mut work => return done,
                Some(attempt) = self.attempts.next() => self.tried(attempt),
            }
        }
    }

    fn tried(&mut self, attempt: Attempt) {
        let (index, number) = (attempt.queue, attempt.number);
        let queue = &mut self.queues[index];
        queue.is_tried = false;
        let (subscription, consumer) = match attempt.answer {
            Ok(consuming) => consuming,
            Err(refused) => {
                let (error, name) = (&refused.error, &queue.source.queue);
                match queue.source.is_former {
                    false => {
                        tracing::warn!(%error, queue = name, "cannot consume from a dead-letter queue")
                    }
                    true => {
                        tracing::debug!(%error, queue = name, "cannot consume from a dead-letter queue of before a move")
                    }
                }
                queue.try_at = Instant::now() + queue.pause;
                if refused.is_dangerous {
                    self.apart[index] = true;
                    queue.pause = (queue.pause * 2).min(LONGEST_PAUSE);
                }
                return;
            }
        };
        self.apart[index] = false;
        queue.pause = PAUSE;
        queue.subscription = Some(subscription);
        let item = move |delivery| Item {
            queue: index,
            subscription: number,
            delivery,
        };
        // Deleting a queue ends its consumer without an error.
        let end = futures_util::stream::once(async move { item(None) });
        let deliveries = consumer.map(move |delivery| item(delivery.ok()));
        self.deliveries.push(Box::pin(deliveries.chain(end)));
    }

    /// Waits for a delivery, and adds those that have already arrived.
    pub(super) async fn gather(&mut self, most: usize) -> Vec<Item> {
        let budget = self.place.budget;
        let first = loop {
            tokio::select! {
                biased;
                Some(item) = self.deliveries.next() => break item,
                Some(attempt) = self.attempts.next() => self.tried(attempt),
                () = budget.used_up() => budget.reset(),
            }
        };
        let mut bytes = taken(&first);
        let mut batch = vec![first];
        while batch.len() < most && bytes < BATCH_BYTES {
            let Some(Some(next)) = self.deliveries.next().now_or_never() else {
                break;
            };
            bytes += taken(&next);
            batch.push(next);
        }
        let payloads = |item: &Item| item.delivery.as_ref().map_or(0, |it| it.data.len());
        budget.give_back(batch.iter().map(payloads).sum());
        batch
    }

    /// The rows for a batch, and the last delivery of each queue in it. `has_earlier`: the log may have rows
    /// of an earlier release.
    pub(super) fn read(
        &mut self,
        topology: &Topology,
        batch: Vec<Item>,
        has_earlier: bool,
    ) -> (Vec<Entry>, Vec<Option<Last>>) {
        let mut last: Vec<Option<Last>> = self.queues.iter().map(|_| None).collect();
        let now = SystemTime::now();
        let mut entries = Vec::with_capacity(batch.len());
        for item in batch {
            let index = item.queue;
            let queue = &mut self.queues[index];
            let current = queue.subscription.as_ref();
            if current.is_none_or(|current| current.number != item.subscription) {
                continue;
            }
            // Deliveries of a closed channel cannot be acknowledged; the broker delivers them again.
            if item.delivery.is_some() && !current.is_some_and(Subscription::is_open) {
                continue;
            }
            let Some(delivery) = item.delivery else {
                // The broker delivers unacknowledged messages again on a new channel.
                queue.subscription = None;
                last[index] = None;
                continue;
            };
            let (properties, payload) = (&delivery.properties, delivery.data);
            let repaired = current.and_then(|current| current.repaired(delivery.delivery_tag));
            let mut entry = Entry::new(topology, &queue.source, properties, payload, now);
            entry.repaired(properties, repaired.as_ref());
            if !(has_earlier || delivery.redelivered) {
                // A first delivery: no earlier release has logged it.
                entry.earlier_identity = None;
            }
            entries.push(entry);
            last[index] = Some(Last {
                subscription: item.subscription,
                tag: delivery.delivery_tag,
            });
        }
        (entries, last)
    }

    /// Acknowledges everything up to the last delivery of each queue. If a queue was subscribed to again
    /// while its rows were written, the broker delivers its messages again and the log recognises them.
    pub(super) async fn acknowledge(&mut self, last: &[Option<Last>]) -> Result<(), Error> {
        for (queue, last) in self.queues.iter().zip(last) {
            if let (Some(subscription), Some(last)) = (&queue.subscription, last)
                && subscription.number == last.subscription
            {
                let shared = self.place.connection;
                subscription.acknowledge(last.tag, shared).await?;
            }
        }
        Ok(())
    }
}

/// How much memory a delivery takes, about.
fn taken(item: &Item) -> usize {
    let delivery = item.delivery.as_ref();
    delivery.map_or(0, |it| it.data.len() + properties::memory(&it.properties))
}
