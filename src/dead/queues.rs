//! The queues that the collector takes from, on one connection.

use std::future::pending;
use std::pin::Pin;
use std::time::{Duration, SystemTime};

use futures_util::{FutureExt, StreamExt, stream::SelectAll};
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;
use lapin::{Channel, Consumer};
use tokio::time::{Instant, timeout_at};

use super::entry::{Entry, Source};
use crate::Error;
use crate::broker::Connection;
use crate::message::Repaired;
use crate::topology::Topology;

/// How much memory a batch may take, about.
const BATCH_BYTES: usize = 16 << 20;
/// How long a step on the broker may take.
const STEP_LIMIT: Duration = Duration::from_secs(10);

/// The queues, each with a channel of its own: its deliveries then come in the order of their tags,
/// and one acknowledgement stands for a batch.
pub(super) struct Queues {
    sources: Vec<Source>,
    subscriptions: Vec<Option<Subscription>>,
    deliveries: SelectAll<Feed>,
    prefetch: u16,
    /// The number of the next subscription.
    next: u64,
}

/// Tags belong to the channel that they came from: what an earlier one still gives is not used.
struct Subscription {
    number: u64,
    channel: Channel,
}

/// Something from a queue: a delivery, or `None` where its consumer ended.
pub(super) struct Item {
    queue: usize,
    subscription: u64,
    delivery: Option<Delivery>,
    /// What was wrong with its properties.
    repaired: Option<Repaired>,
}

type Feed = Pin<Box<dyn futures_util::Stream<Item = Item> + Send>>;

impl Queues {
    pub(super) fn new(sources: Vec<Source>, prefetch: u16) -> Self {
        Self {
            subscriptions: sources.iter().map(|_| None).collect(),
            sources,
            deliveries: SelectAll::new(),
            prefetch,
            next: 0,
        }
    }

    /// Consumes from each queue that is not consumed from. A queue that is missing does not keep the
    /// others from being collected. `false`: the connection is gone.
    pub(super) async fn subscribe(&mut self, connection: &Connection) -> bool {
        for queue in 0..self.sources.len() {
            let known = self.subscriptions[queue].as_ref();
            if known.is_some_and(|known| known.channel.status().connected()) {
                continue;
            }
            if !connection.is_open() {
                return false;
            }
            let name = &self.sources[queue].queue;
            let (channel, consumer) = match consume(connection, name, self.prefetch).await {
                Ok(consuming) => consuming,
                Err(error) => {
                    tracing::warn!(%error, queue = name, "cannot collect from a queue");
                    continue;
                }
            };
            let number = self.next;
            self.next += 1;
            let (repairs, channel_id) = (connection.repairs().clone(), channel.id());
            let item = move |delivery: Option<Delivery>| Item {
                queue,
                subscription: number,
                repaired: delivery
                    .as_ref()
                    .and_then(|delivery| repairs.take(channel_id, delivery.delivery_tag)),
                delivery,
            };
            self.subscriptions[queue] = Some(Subscription { number, channel });
            // A queue that is deleted ends its consumer without an error.
            let end = item.clone();
            let end = futures_util::stream::once(async move { end(None) });
            let deliveries = consumer.map(move |delivery| item(delivery.ok()));
            self.deliveries.push(Box::pin(deliveries.chain(end)));
        }
        connection.is_open()
    }

    /// Waits for a delivery, and takes along what is there already.
    pub(super) async fn gather(&mut self, most: usize) -> Vec<Item> {
        let Some(first) = self.deliveries.next().await else {
            // Nothing is consumed from yet.
            return pending().await;
        };
        let size = |item: &Item| item.delivery.as_ref().map_or(0, |it| it.data.len());
        let mut bytes = size(&first);
        let mut batch = vec![first];
        while batch.len() < most && bytes < BATCH_BYTES {
            let Some(Some(next)) = self.deliveries.next().now_or_never() else {
                break;
            };
            bytes += size(&next);
            batch.push(next);
        }
        batch
    }

    /// The rows for a batch, and the last tag of each queue in it.
    pub(super) fn read(
        &mut self,
        topology: &Topology,
        batch: Vec<Item>,
    ) -> (Vec<Entry>, Vec<Option<u64>>) {
        let mut last = vec![None; self.sources.len()];
        let now = SystemTime::now();
        let mut entries = Vec::with_capacity(batch.len());
        for item in batch {
            let queue = item.queue;
            let current = self.subscriptions[queue].as_ref();
            if current.is_none_or(|current| current.number != item.subscription) {
                continue;
            }
            let Some(delivery) = item.delivery else {
                // What is not acknowledged comes again on a new channel.
                self.subscriptions[queue] = None;
                last[queue] = None;
                continue;
            };
            let (properties, payload) = (&delivery.properties, delivery.data);
            let source = &self.sources[queue];
            let mut entry = Entry::new(topology, source, properties, payload, now);
            entry.repaired(properties, item.repaired.as_ref());
            entries.push(entry);
            last[queue] = Some(delivery.delivery_tag);
        }
        (entries, last)
    }

    /// Acknowledges everything up to the last tag of each queue.
    pub(super) async fn acknowledge(
        &mut self,
        connection: &Connection,
        last: &[Option<u64>],
    ) -> Result<(), Error> {
        let options = BasicAckOptions { multiple: true };
        for (subscription, tag) in self.subscriptions.iter().zip(last) {
            let (Some(Subscription { channel, .. }), Some(tag)) = (subscription, *tag) else {
                continue;
            };
            let deadline = Instant::now() + STEP_LIMIT;
            let failed = |cause: &str| connection.failed("acknowledge dead letters", cause);
            match timeout_at(deadline, channel.basic_ack(tag, options)).await {
                Ok(Ok(())) => {}
                // The channel is gone: they come again, and are known again.
                Ok(Err(_)) if connection.is_open() => {}
                Ok(Err(error)) => return Err(failed(&error.to_string())),
                Err(_) => return Err(failed("the broker did not answer in time")),
            }
        }
        Ok(())
    }
}

async fn consume(
    connection: &Connection,
    queue: &str,
    prefetch: u16,
) -> Result<(Channel, Consumer), Error> {
    let deadline = Instant::now() + STEP_LIMIT;
    let channel = connection.channel(deadline).await?;
    let consuming = async {
        channel
            .basic_qos(prefetch, BasicQosOptions::default())
            .await?;
        let (options, arguments) = (BasicConsumeOptions::default(), FieldTable::default());
        channel
            .basic_consume(queue.into(), "".into(), options, arguments)
            .await
    };
    let failed = |cause: &str| connection.failed(&format!("consume from {queue}"), cause);
    match timeout_at(deadline, consuming).await {
        Ok(Ok(consumer)) => Ok((channel, consumer)),
        Ok(Err(error)) => Err(failed(&error.to_string())),
        Err(_) => Err(failed("the broker did not answer in time")),
    }
}
