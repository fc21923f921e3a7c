//! Consumes from one dead-letter queue.

use std::time::Duration;

use lapin::options::{BasicAckOptions, BasicConsumeOptions, BasicQosOptions};
use lapin::types::FieldTable;
use lapin::{Channel, Consumer};
use tokio::time::{Instant, timeout_at};

use crate::Error;
use crate::amqp::{Connection, ReadBudget, Repairs, close_unanswered};
use crate::message::Repaired;
use crate::secret::Secret;

/// How long a broker operation may take.
const STEP_LIMIT: Duration = Duration::from_secs(10);

/// The collector's connection, and the values that open another one like it.
#[derive(Clone, Copy)]
pub(super) struct Place<'c> {
    pub(super) connection: &'c Connection,
    pub(super) url: &'c Secret,
    /// The connection name that the management UI shows.
    pub(super) name: &'c str,
    pub(super) prefetch: u16,
    /// The read-ahead that all connections share.
    pub(super) budget: &'c ReadBudget,
}

/// A consumer of a queue. Tags belong to its channel: deliveries of an earlier subscription are not
/// acknowledged on this one.
pub(super) struct Subscription {
    pub(super) number: u64,
    channel: Channel,
    /// The queue's own connection, if it has one.
    own: Option<Connection>,
    repairs: Repairs,
}

impl Subscription {
    /// Takes the problem of a delivery's malformed properties.
    pub(super) fn repaired(&self, tag: u64) -> Option<Repaired> {
        self.repairs.take(self.channel.id(), tag)
    }

    pub(super) fn is_open(&self) -> bool {
        self.channel.status().connected()
    }

    /// Acknowledges everything up to a tag.
    ///
    /// # Errors
    /// The collector's connection is lost. A lost channel, or the loss of this queue's own connection, is no
    /// error: the broker delivers its messages again and the log recognises them.
    pub(super) async fn acknowledge(&self, tag: u64, shared: &Connection) -> Result<(), Error> {
        let deadline = Instant::now() + STEP_LIMIT;
        let options = BasicAckOptions { multiple: true };
        let failed = |cause: &str| shared.failed("acknowledge dead letters", cause);
        match timeout_at(deadline, self.channel.basic_ack(tag, options)).await {
            Ok(Ok(())) => Ok(()),
            _ if self.own.is_some() => Ok(()),
            Ok(Err(_)) if shared.is_open() => Ok(()),
            Ok(Err(error)) => Err(failed(&error.to_string())),
            Err(_) => Err(failed("the broker did not answer in time")),
        }
    }
}

/// A finished attempt to consume from a queue.
pub(super) struct Attempt {
    pub(super) queue: usize,
    pub(super) number: u64,
    pub(super) answer: Result<(Subscription, Consumer), Refused>,
}

/// Why an attempt failed.
pub(super) struct Refused {
    pub(super) error: Error,
    /// Whether the attempt may have ended the connection, or will end it. If a quorum queue has no leader,
    /// the broker closes the consumer's whole connection (`INTERNAL_ERROR`), at once or after more than a
    /// minute.
    pub(super) is_dangerous: bool,
}

/// Consumes from a queue on the collector's connection, or on its own.
pub(super) async fn attempt(
    place: Place<'_>,
    (queue, name): (usize, String),
    number: u64,
    alone: bool,
) -> Attempt {
    let answer = match alone {
        false => consume(place.connection, &name, place.prefetch).await,
        true => consume_alone(place, &name).await,
    };
    let answer = answer.map(|(channel, consumer, own)| {
        let connection = own.as_ref().unwrap_or(place.connection);
        let subscription = Subscription {
            number,
            channel,
            repairs: connection.repairs().clone(),
            own,
        };
        (subscription, consumer)
    });
    Attempt {
        queue,
        number,
        answer,
    }
}

type Consuming = (Channel, Consumer, Option<Connection>);

async fn consume_alone(place: Place<'_>, queue: &str) -> Result<Consuming, Refused> {
    let connecting = Connection::open_within(place.url.expose(), place.name, place.budget);
    let connection = connecting.await.map_err(|error| Refused {
        error,
        is_dangerous: true,
    })?;
    match consume(&connection, queue, place.prefetch).await {
        Ok((channel, consumer, _)) => Ok((channel, consumer, Some(connection))),
        Err(refused) => {
            connection.close().await;
            Err(refused)
        }
    }
}

async fn consume(
    connection: &Connection,
    queue: &str,
    prefetch: u16,
) -> Result<Consuming, Refused> {
    let refused = |error: Error, timed_out: bool| Refused {
        error,
        is_dangerous: timed_out || !connection.is_open(),
    };
    let deadline = Instant::now() + STEP_LIMIT;
    let channel = match connection.channel(deadline).await {
        Ok(channel) => channel,
        Err(error) => return Err(refused(error, false)),
    };
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
        Ok(Ok(consumer)) => Ok((channel, consumer, None)),
        Ok(Err(error)) => Err(refused(failed(&error.to_string()), false)),
        Err(_) => {
            close_unanswered(channel.clone());
            Err(refused(failed("the broker did not answer in time"), true))
        }
    }
}
