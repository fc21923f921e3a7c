//! Sends one message until the broker confirms it, at the latest until its deadline.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::confirm_channel::{ConfirmChannel, SendOutcome};
use super::connection::PublishConnection;
use super::outcome::Call;
use super::outgoing::{Outgoing, OutgoingMessage};
use super::pool::NoChannel;
use super::{Confirmed, Inner};
use crate::amqp::QueueState;
use crate::error::PublishError;
use crate::{Error, TaskId};

/// The pause before a refused or lost message is sent again. It doubles up to `LONGEST_PAUSE`.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// How often a message is sent again that was returned although its queue may be there. The queue's node may have come
/// back in that moment; otherwise the binding is missing, which only applying the topology mends.
const RETURNED_AT_MOST: u32 = 3;

/// A message, and how long the publisher tries to send it.
pub(super) struct PublishAttempt {
    pub(super) outgoing: Outgoing,
    pub(super) id: TaskId,
    pub(super) call: Call,
    pub(super) deadline: Instant,
    pub(super) patience: Patience,
    pub(super) _under_way: TaskTrackerToken,
}

/// What ends the attempts to send a message before their deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Patience {
    /// A confirm alone.
    Full,
    /// Also a confirm that is lost with its connection: the message may be stored.
    UnlessLost,
    /// Also a broker that refuses the message.
    #[cfg_attr(
        not(feature = "postgres"),
        expect(
            dead_code,
            reason = "the relay alone has another place for the message"
        )
    )]
    UnlessRefused,
}

/// Why a message is not confirmed, for the error at the deadline.
pub(super) enum SendFailure {
    Refused,
    /// It may be stored or not.
    Lost(String),
    Blocked,
    Down(String),
    /// This queue does not answer: its node is down, or it has no leader.
    QueueDown(String),
    /// The broker returned it although this queue may be there.
    Returned(String),
}

impl Inner {
    /// Sends a message until it is confirmed, or committed as a row, at the latest until the deadline.
    pub(super) async fn send_until_confirmed(
        &self,
        attempt: &PublishAttempt,
    ) -> Result<Confirmed, Error> {
        #[cfg_attr(
            not(feature = "postgres"),
            allow(
                clippy::infallible_destructuring_match,
                reason = "rows are there with Postgres alone"
            )
        )]
        let message = match &attempt.outgoing {
            Outgoing::Message(message) => message,
            #[cfg(feature = "postgres")]
            Outgoing::Row(row) => {
                return Box::pin(self.insert_until_committed(attempt, row)).await;
            }
        };
        if self.is_long_delay(message) {
            Box::pin(self.check_long_delay(attempt, message)).await?;
        }
        let mut attempted = None;
        // Nearly all messages take this path. It is kept short, because a thousand of its futures are
        // alive at once.
        if let Some((connection, channel)) = self.pools.of(&message.tier).ready_channel() {
            match send(&connection, &channel, message, attempt.deadline).await {
                Ok(SendOutcome::Confirmed) => return Ok(Confirmed::Stored),
                met => attempted = Some(met),
            }
        }
        Box::pin(self.retry_until_deadline(attempt, message, attempted)).await
    }

    /// Sends again after a first attempt, if there was one, until the deadline.
    pub(super) async fn retry_until_deadline(
        &self,
        attempt: &PublishAttempt,
        message: &Arc<OutgoingMessage>,
        mut attempted: Option<Result<SendOutcome, SendFailure>>,
    ) -> Result<Confirmed, Error> {
        let PublishAttempt {
            id,
            deadline,
            patience,
            ..
        } = attempt;
        let mut pause = FIRST_PAUSE;
        let mut times_returned = 0;
        let mut queue_down: Option<String> = None;
        // An attempt without a confirm may have stored the message, whatever the later ones say.
        let mut lost: Option<SendFailure> = None;
        loop {
            let met = match attempted.take() {
                Some(met) => met,
                None => match queue_down.take() {
                    // The message is not sent as long as the answer is known.
                    Some(queue) if self.is_down(message, &queue, *deadline).await => {
                        Err(SendFailure::QueueDown(queue))
                    }
                    _ => self.try_once(message, *deadline).await,
                },
            };
            let failure = match met {
                Ok(SendOutcome::Confirmed) => return Ok(Confirmed::Stored),
                Ok(SendOutcome::Unroutable) => {
                    times_returned += 1;
                    match self.why_returned(message, *deadline).await {
                        Some(failure) if times_returned <= RETURNED_AT_MOST => failure,
                        Some(failure @ SendFailure::QueueDown(_)) => failure,
                        _ => {
                            // The queue may have been there when an earlier attempt got no answer.
                            let lost = lost.map(|lost| lost.into_error(id.clone()));
                            return Err(lost.unwrap_or_else(|| self.unroutable(attempt, message)));
                        }
                    }
                }
                Ok(SendOutcome::Refused) => SendFailure::Refused,
                Ok(SendOutcome::Lost(cause)) => SendFailure::Lost(cause),
                Ok(SendOutcome::NotSent) => SendFailure::Down("the channel was closed".to_owned()),
                Err(failure) => failure,
            };
            let is_over = match patience {
                Patience::Full => false,
                Patience::UnlessLost => matches!(failure, SendFailure::Lost(_)),
                Patience::UnlessRefused => matches!(failure, SendFailure::Refused),
            };
            if is_over || Instant::now() + pause >= *deadline {
                return Err(lost.unwrap_or(failure).into_error(id.clone()));
            }
            match failure {
                SendFailure::Lost(_) => lost = Some(failure),
                SendFailure::QueueDown(queue) => queue_down = Some(queue),
                _ => {}
            }
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    async fn try_once(
        &self,
        message: &Arc<OutgoingMessage>,
        deadline: Instant,
    ) -> Result<SendOutcome, SendFailure> {
        let channel = self.pools.of(&message.tier).channel(deadline).await;
        let (connection, channel) = channel.map_err(SendFailure::from)?;
        send(&connection, &channel, message, deadline).await
    }

    /// Why the broker returned a message. `None`: it has no queue for it, and will have none unless somebody applies
    /// the topology.
    ///
    /// A classic queue whose node is down has no bindings on RabbitMQ 3.10, so the broker returns what is published to
    /// it as if the queue were gone.
    async fn why_returned(
        &self,
        message: &OutgoingMessage,
        deadline: Instant,
    ) -> Option<SendFailure> {
        let queue = self.destination_queue(message)?;
        let state = self
            .lookups
            .state(&self.pools, &message.tier, &queue, deadline);
        match state.await {
            Ok(QueueState::Missing) => None,
            Ok(QueueState::Unreachable) => Some(SendFailure::QueueDown(queue)),
            Ok(QueueState::Available { .. } | QueueState::NotAllowed) => {
                Some(SendFailure::Returned(queue))
            }
            Err(failure) => Some(failure),
        }
    }

    /// Whether a queue still does not answer.
    async fn is_down(&self, message: &OutgoingMessage, queue: &str, deadline: Instant) -> bool {
        let state = self
            .lookups
            .state(&self.pools, &message.tier, queue, deadline);
        matches!(state.await, Ok(QueueState::Unreachable))
    }

    /// The queue that a message is stored in, if it is the queue of a tier or of its dead letters. Other queues are
    /// quorum queues, which keep their bindings.
    fn destination_queue(&self, message: &OutgoingMessage) -> Option<String> {
        let names = self.topology.names();
        let tier = self.topology.tier(&message.tier)?;
        if message.exchange == names.dead_letter_exchange(&tier.name) {
            return Some(names.dead_letter_queue(&tier.name));
        }
        let is_direct = message.exchange == names.tasks_exchange()
            && message.routing_key == names.routing_key(tier);
        is_direct.then(|| names.queue(tier))
    }

    /// Whether a message is on its way to the delay queues that all tiers share.
    pub(super) fn is_long_delay(&self, message: &OutgoingMessage) -> bool {
        message.exchange.starts_with(&self.long_delays)
    }

    /// Refuses a long delay that the broker has no queue for: publishing to an exchange that is not there ends the
    /// whole channel.
    async fn check_long_delay(
        &self,
        attempt: &PublishAttempt,
        message: &OutgoingMessage,
    ) -> Result<(), Error> {
        // The queue of a level has the name of its exchange.
        let queue = message.exchange.as_str();
        let state = self
            .lookups
            .state(&self.pools, &message.tier, queue, attempt.deadline);
        match state.await {
            Ok(QueueState::Missing) => Err(Error::Publish(PublishError::NoLongDelays {
                id: attempt.id.clone(),
                queue: queue.into(),
            })),
            // What else is wrong shows when it is sent.
            _ => Ok(()),
        }
    }

    fn unroutable(&self, attempt: &PublishAttempt, message: &OutgoingMessage) -> Error {
        let queue = self.destination_queue(message);
        Error::Publish(PublishError::Unroutable {
            id: attempt.id.clone(),
            queue: queue.unwrap_or_else(|| message.exchange.clone()).into(),
        })
    }
}

/// Sends a message once, on one channel.
async fn send(
    connection: &PublishConnection,
    channel: &ConfirmChannel,
    message: &Arc<OutgoingMessage>,
    deadline: Instant,
) -> Result<SendOutcome, SendFailure> {
    match timeout_at(deadline, channel.send(Arc::clone(message))).await {
        Ok(answer) => Ok(answer),
        Err(_) => Err(overdue(connection, channel)),
    }
}

/// The failure of a message that has no confirm at its deadline.
pub(super) fn overdue(connection: &PublishConnection, channel: &ConfirmChannel) -> SendFailure {
    if connection.is_blocked() {
        return SendFailure::Blocked;
    }
    channel.give_up_if_stuck();
    SendFailure::Lost("the broker did not confirm it in time".to_owned())
}

impl From<NoChannel> for SendFailure {
    fn from(why: NoChannel) -> Self {
        match why {
            NoChannel::Blocked => SendFailure::Blocked,
            NoChannel::Down(why) => SendFailure::Down(why),
        }
    }
}

impl SendFailure {
    pub(super) fn into_error(self, id: TaskId) -> Error {
        match self {
            SendFailure::Refused => Error::Publish(PublishError::Refused { id }),
            SendFailure::Blocked => Error::Publish(PublishError::Blocked { id }),
            SendFailure::QueueDown(queue) => Error::Publish(PublishError::QueueDown {
                id,
                queue: queue.into(),
            }),
            SendFailure::Returned(queue) => Error::Publish(PublishError::Unroutable {
                id,
                queue: queue.into(),
            }),
            SendFailure::Down(cause) => Error::Publish(PublishError::NotConnected {
                id,
                cause: cause.into(),
            }),
            SendFailure::Lost(cause) => Error::Publish(PublishError::Unconfirmed {
                id,
                cause: cause.into(),
            }),
        }
    }
}
