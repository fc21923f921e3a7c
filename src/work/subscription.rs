//! A consumer on a tier's queue, on a channel of its own.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::stream::Stream;
use lapin::message::Delivery;
use lapin::options::{
    BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions,
    QueueDeclareOptions,
};
use lapin::protocol::{AMQPErrorKind, AMQPSoftError};
use lapin::types::FieldTable;
use lapin::{Channel, Consumer, ErrorKind};
use tokio::time::{Instant, timeout, timeout_at};

use super::acks::Acks;
use crate::Error;
use crate::broker::Connection;

/// How long it may take to begin to consume.
const LIMIT: Duration = Duration::from_secs(10);

/// A tier that is consumed from.
#[derive(Debug)]
pub(super) struct Subscription {
    channel: Channel,
    consumer: Consumer,
    queue: String,
    acks: Acks,
}

/// Why there is no subscription.
#[derive(Debug)]
pub(super) enum NoSubscription {
    /// The queue does not exist.
    NoQueue,
    Failed(Error),
}

/// How many messages are ready in the queue.
pub(super) type Question = Pin<Box<dyn Future<Output = Option<u32>> + Send>>;

impl Subscription {
    /// Begins to consume, with at most `window` messages in hand.
    pub(super) async fn begin(
        connection: Arc<Connection>,
        queue: String,
        window: u16,
        tag: String,
    ) -> Result<Self, NoSubscription> {
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
            }),
            Ok(Err(error)) if is_not_found(&error) => Err(NoSubscription::NoQueue),
            Ok(Err(error)) => {
                let cause = error.to_string();
                Err(NoSubscription::Failed(connection.failed(&tried(), &cause)))
            }
            Err(_) => {
                let cause = "the broker did not answer in time";
                Err(NoSubscription::Failed(connection.failed(&tried(), cause)))
            }
        }
    }

    /// The next delivery, or why there will be no more.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Delivery, String>> {
        Pin::new(&mut self.consumer)
            .poll_next(cx)
            .map(|next| match next {
                Some(Ok(delivery)) => {
                    self.acks.delivered(delivery.delivery_tag);
                    Ok(delivery)
                }
                Some(Err(error)) => Err(error.to_string()),
                None => Err("the broker cancelled the consumer".to_owned()),
            })
    }

    /// How many messages the broker takes to be in hand.
    pub(super) fn unsettled(&self) -> usize {
        self.acks.unsettled()
    }

    /// A delivery may be acknowledged, which the next flush does.
    pub(super) fn finished(&mut self, tag: u64) {
        self.acks.finished(tag);
    }

    /// Acknowledges all that is finished; whether there was anything.
    ///
    /// lapin queues the frame when it is first asked, and then waits for the socket. Nobody needs to
    /// wait for that: if the channel is lost, so is the acknowledgement, and the consumer ends.
    pub(super) fn flush(&mut self) -> bool {
        let before = self.acks.unsettled();
        self.acks.flush(|ack| {
            let options = BasicAckOptions {
                multiple: ack.multiple,
            };
            let _ = self.channel.basic_ack(ack.tag, options).now_or_never();
        });
        self.acks.unsettled() != before
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

    /// Asks for no more deliveries. Some may be under way.
    pub(super) fn cancel(&self) {
        let options = BasicCancelOptions { nowait: true };
        let _ = self
            .channel
            .basic_cancel(self.consumer.tag(), options)
            .now_or_never();
    }

    /// Asks how many messages are ready. The broker answers on the same channel, after all that it
    /// has sent there before.
    pub(super) fn ask(&self) -> Question {
        let (channel, queue) = (self.channel.clone(), self.queue.as_str().into());
        Box::pin(async move {
            let options = QueueDeclareOptions {
                passive: true,
                ..QueueDeclareOptions::default()
            };
            let declared = channel.queue_declare(queue, options, FieldTable::default());
            let declared = timeout(LIMIT, declared).await.ok()?.ok()?;
            Some(declared.message_count())
        })
    }

    /// Closes the channel, so that the broker takes back what was not acknowledged.
    pub(super) fn abandon(self) {
        tokio::spawn(async move {
            let goodbye = self.channel.close(200, "done".into());
            // Without an answer it ends with the connection.
            let _ = timeout(LIMIT, goodbye).await;
        });
    }
}

fn is_not_found(error: &lapin::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::ProtocolError(said)
            if *said.kind() == AMQPErrorKind::Soft(AMQPSoftError::NOTFOUND)
    )
}
