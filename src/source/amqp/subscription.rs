//! A consumer on a tier's queue, on a channel of its own.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use futures_util::stream::Stream;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicGetOptions, BasicNackOptions,
    BasicQosOptions, QueueDeclareOptions,
};
use lapin::protocol::{AMQPErrorKind, AMQPSoftError};
use lapin::types::FieldTable;
use lapin::{Channel, Consumer, ErrorKind};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use super::acks::Acks;
use super::subscribe::QueueToConsume;
use crate::Error;
use crate::amqp::{Connection, Repairs, close_unanswered};
use crate::message::Repaired;

/// How long it may take to begin to consume.
const LIMIT: Duration = Duration::from_secs(10);
/// How long the broker may take for each acknowledgement before a channel is closed. It gives a quorum queue 32 of a
/// channel's commands at a time, and drops the others when the channel is closed.
const ACK_TIME: Duration = Duration::from_millis(1);
/// How long a close waits for that, at most.
const LONGEST_ACK_TIME: Duration = Duration::from_millis(1_500);

/// A tier that is consumed from.
#[derive(Debug)]
pub(super) struct Subscription {
    channel: Channel,
    consumer: Consumer,
    queue: String,
    acks: Acks,
    repairs: Repairs,
    connection: Weak<Connection>,
    /// The connection of a tier that has one of its own.
    own: Option<Arc<Connection>>,
    /// Whether no more deliveries are wanted.
    is_cancelled: bool,
    /// When the broker has carried out all acknowledgements, most likely.
    acknowledged_by: Instant,
}

/// Why there is no subscription.
#[derive(Debug)]
pub(super) enum NoSubscription {
    /// The queue does not exist.
    NoQueue,
    Failed(Error),
    /// The broker has not answered the consumer. It may answer later: one whose quorum queue has no leader
    /// ends the whole connection (`INTERNAL_ERROR`), at once or after more than a minute.
    NoAnswer(Error),
}

/// A question to the broker about a queue. Without an answer the queue is gone, or the channel.
pub(super) type QueueStateFuture = Pin<Box<dyn Future<Output = Option<QueueState>> + Send>>;

/// What the broker says of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct QueueState {
    /// How many messages wait in it.
    pub(super) ready: u32,
    /// How many consumers it has.
    pub(super) consumers: u32,
}

impl Subscription {
    /// Begins to consume, with the target's window as its prefetch. `own` is
    /// the connection, where no other tier uses it.
    pub(super) async fn begin(
        connection: &Arc<Connection>,
        own: Option<Arc<Connection>>,
        target: QueueToConsume,
    ) -> Result<Self, NoSubscription> {
        let QueueToConsume {
            queue, window, tag, ..
        } = target;
        let deadline = Instant::now() + LIMIT;
        let channel = connection.channel(deadline).await;
        let channel = channel.map_err(NoSubscription::Failed)?;
        let consuming = async {
            channel
                .basic_qos(window, BasicQosOptions::default())
                .await?;
            channel
                .basic_consume(
                    queue.as_str().into(),
                    tag.into(),
                    BasicConsumeOptions::default(),
                    FieldTable::default(),
                )
                .await
        };
        let tried = || format!("consume from the queue {queue:?}");
        match timeout_at(deadline, consuming).await {
            Ok(Ok(consumer)) => Ok(Self {
                channel,
                consumer,
                queue,
                acks: Acks::default(),
                repairs: connection.repairs().clone(),
                connection: Arc::downgrade(connection),
                own,
                is_cancelled: false,
                acknowledged_by: Instant::now(),
            }),
            Ok(Err(error)) if is_not_found(&error) => Err(NoSubscription::NoQueue),
            Ok(Err(error)) => {
                let cause = error.to_string();
                Err(NoSubscription::Failed(
                    connection.failed(&tried(), cause.as_str()),
                ))
            }
            Err(_) => {
                close_unanswered(channel);
                let cause = "the broker did not answer in time";
                Err(NoSubscription::NoAnswer(connection.failed(&tried(), cause)))
            }
        }
    }

    /// The next delivery, with what was wrong with its properties, or why there will be no more.
    pub(super) fn poll(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(Delivery, Option<Repaired>), String>> {
        match Pin::new(&mut self.consumer).poll_next(cx) {
            Poll::Ready(Some(Ok(delivery))) => {
                let repaired = self.delivered(&delivery);
                Poll::Ready(Ok((delivery, repaired)))
            }
            // The channel goes on: what is running is still to be acknowledged.
            Poll::Ready(_) if self.is_cancelled => Poll::Pending,
            Poll::Ready(Some(Err(error))) => Poll::Ready(Err(error.to_string())),
            Poll::Ready(None) => {
                let cause = "the broker cancelled the consumer".to_owned();
                Poll::Ready(Err(cause))
            }
            Poll::Pending => Poll::Pending,
        }
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.is_cancelled
    }

    /// Whether it has a connection of its own.
    pub(super) fn has_own_connection(&self) -> bool {
        self.own.is_some()
    }

    /// Whether the connection under it is open.
    pub(super) fn is_connected(&self) -> bool {
        self.connection.upgrade().is_some_and(|it| it.is_open())
    }

    /// Whether its channel is open.
    pub(super) fn is_open(&self) -> bool {
        self.channel.status().connected()
    }

    /// How many deliveries the broker waits for.
    pub(super) fn unsettled(&self) -> usize {
        self.acks.unsettled()
    }

    /// How many of them are not done with.
    pub(super) fn open(&self) -> usize {
        self.acks.open()
    }

    /// A delivery may be acknowledged, which the next flush does.
    pub(super) fn finished(&mut self, tag: u64) {
        self.acks.finished(tag);
    }

    /// Whether there is something to acknowledge.
    pub(super) fn has_finished(&self) -> bool {
        self.acks.has_finished()
    }

    /// Acknowledges all that is finished.
    ///
    /// lapin queues the frame when it is first asked, and then waits for the socket. Nobody needs to
    /// wait for that: if the channel is lost, so is the acknowledgement, and the consumer ends.
    pub(super) fn flush(&mut self) {
        let mut sent = 0;
        self.acks.flush(|ack| {
            sent += 1;
            let options = BasicAckOptions {
                multiple: ack.multiple,
            };
            let _ = self.channel.basic_ack(ack.tag, options).now_or_never();
        });
        let begin = self.acknowledged_by.max(Instant::now());
        self.acknowledged_by = begin + ACK_TIME * sent;
    }

    /// Gives a delivery back to the broker.
    pub(super) fn give_back(&mut self, tag: u64) {
        self.acks.returned(tag);
        let options = BasicNackOptions {
            multiple: false,
            requeue: true,
        };
        let _ = self.channel.basic_nack(tag, options).now_or_never();
    }

    /// Asks for no more deliveries. When the future completes, all that the broker has sent are here: lapin
    /// drops those that arrive after a cancel that does not wait for its answer.
    ///
    /// A message that was published in the moment of the cancel may have been on its way. A quorum queue takes it
    /// back before it answers, and marks it as redelivered. So the future takes what is marked at the head of the
    /// queue, as many as the prefetch window has room for, and at most one that is not marked.
    pub(super) fn cancel(&mut self, room: usize) -> BoxFuture<'static, Vec<Delivery>> {
        self.is_cancelled = true;
        let (channel, tag) = (self.channel.clone(), self.consumer.tag());
        let queue = self.queue.clone();
        Box::pin(async move {
            let options = BasicCancelOptions { nowait: false };
            let cancelled = timeout(LIMIT, channel.basic_cancel(tag, options)).await;
            let mut taken: Vec<Delivery> = Vec::new();
            if !matches!(cancelled, Ok(Ok(()))) {
                return taken;
            }
            while taken.len() < room && taken.last().is_none_or(|last| last.redelivered) {
                let options = BasicGetOptions { no_ack: false };
                let getting = channel.basic_get(queue.as_str().into(), options);
                match timeout(LIMIT, getting).await {
                    Ok(Ok(Some(got))) => taken.push(got.delivery),
                    _ => break,
                }
            }
            taken
        })
    }

    /// Counts a delivery. What was wrong with its properties, if anything.
    pub(super) fn delivered(&mut self, delivery: &Delivery) -> Option<Repaired> {
        self.acks.delivered(delivery.delivery_tag);
        self.repairs.take(self.channel.id(), delivery.delivery_tag)
    }

    /// Asks what the queue is like. The broker answers on the same channel, after all that it
    /// has sent there before.
    pub(super) fn queue_state(&self) -> QueueStateFuture {
        let (channel, queue) = (self.channel.clone(), self.queue.as_str().into());
        Box::pin(async move {
            let options = QueueDeclareOptions {
                passive: true,
                ..QueueDeclareOptions::default()
            };
            let declared = channel.queue_declare(queue, options, FieldTable::default());
            let declared = timeout(LIMIT, declared).await.ok()?.ok()?;
            Some(QueueState {
                ready: declared.message_count(),
                consumers: declared.consumer_count(),
            })
        })
    }

    /// Closes the channel and waits for that: the broker has then read every acknowledgement, and
    /// taken back all else. Dropping it instead would drop frames that are not sent yet.
    pub(super) async fn close(self) {
        let latest = Instant::now() + LONGEST_ACK_TIME;
        sleep_until(self.acknowledged_by.min(latest)).await;
        let goodbye = self.channel.close(200, "done".into());
        // Without an answer it ends with the connection.
        let _ = timeout(LIMIT, goodbye).await;
        if let Some(connection) = self.own.and_then(Arc::into_inner) {
            connection.close().await;
        }
    }
}

fn is_not_found(error: &lapin::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::ProtocolError(said)
            if *said.kind() == AMQPErrorKind::Soft(AMQPSoftError::NOTFOUND)
    )
}
