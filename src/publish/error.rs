use std::time::Duration;

use crate::error::ErrorKind;
use crate::task::TaskId;

/// Why a task was not published. Whether it is stored all the same: [`stored`](PublishError::stored).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PublishError {
    /// A task was published that the map does not have.
    #[error(
        "cannot publish task `{task}`: it is not mapped to a tier; add it to [tasks] in the map"
    )]
    UnmappedTask {
        /// The task's name.
        task: String,
    },

    /// A payload has no JSON form, for example a map whose keys are not text.
    #[error(
        "cannot encode the payload of task `{task}` as JSON: a value in it has no JSON form; change its type"
    )]
    PayloadNotEncodable {
        /// The task's name.
        task: &'static str,
        /// What the encoder says.
        #[source]
        cause: serde_json::Error,
    },

    /// A payload is larger than the broker takes. Nothing was sent.
    #[error(
        "the payload of task `{task}` has {size} bytes, and max_message_size of the map is {limit}; store it elsewhere and publish \
         where it is, or raise the limit if the broker takes more"
    )]
    TooLarge {
        /// The task's name.
        task: Box<str>,
        /// Its size in bytes.
        size: u64,
        /// The limit in bytes, `max_message_size` of the map.
        limit: u64,
    },

    /// The headers do not fit into the one frame that they must fit into. Nothing was sent.
    #[error(
        "the headers of task `{task}` have {size} bytes, and may have {limit}; put large values into the payload"
    )]
    HeadersTooLarge {
        /// The task's name.
        task: Box<str>,
        /// Their size in bytes, as they are encoded.
        size: u64,
        /// The limit in bytes, [`MAX_HEADERS`](crate::message::wire::MAX_HEADERS).
        limit: u64,
    },

    /// An identifier or a header cannot be carried. Nothing was sent.
    #[error("cannot publish task `{task}`: {problem}")]
    InvalidMessage {
        /// The task's name.
        task: Box<str>,
        /// What is wrong.
        problem: Box<str>,
    },

    /// A priority was given that the tier does not have. Nothing was sent.
    #[error("cannot publish task `{task}` with priority {priority}: {}", highest_priority(*highest))]
    InvalidPriority {
        /// The task's name.
        task: Box<str>,
        /// The priority that was given.
        priority: u8,
        /// The tier's highest; `None`: it has no priorities.
        highest: Option<u8>,
    },

    /// A message was to be delayed in the broker for longer than its ladders reach. With a database it would be a row.
    #[error(
        "a delay of {} is above the {} that the broker holds; give the app a database, which holds longer ones, or \
         keep it in a table of your own and publish it when it is due",
        humantime::format_duration(*delay), humantime::format_duration(*longest)
    )]
    DelayTooLong {
        /// The delay that was asked for.
        delay: Duration,
        /// The longest delay there is: [`MAX_DELAY`](crate::topology::delay::MAX_DELAY).
        longest: Duration,
    },

    /// A message was to be delayed in a tier without delay queues. Nothing was sent.
    #[error(
        "cannot delay task `{task}`: its tier {tier:?} has delays = false in the map; remove that and apply the map, \
         or run the task without a delay"
    )]
    NoDelays {
        /// The task's name.
        task: Box<str>,
        /// Its tier.
        tier: Box<str>,
    },

    /// A message was to be delayed for longer than the delay queues of its tier reach, the app has no database for
    /// it, and the broker does not have the queues for longer delays. It was not stored.
    #[error(
        "task {id} was not stored: its delay is above the {} that the queues of its tier hold, and the broker has no \
         queue {queue}; give the app a database, in which such a delay is a row, or set long_delays = true in \
         [broker] of the map and apply it",
        humantime::format_duration(crate::topology::delay::MAX_TIER_DELAY)
    )]
    NoLongDelays {
        /// The task's identifier.
        id: TaskId,
        /// The queue that it would wait in.
        queue: Box<str>,
    },

    /// A unique or idempotency key cannot be used. Nothing was sent.
    #[error("cannot publish task `{task}`: {problem}")]
    InvalidKey {
        /// The task's name.
        task: Box<str>,
        /// What is wrong.
        problem: Box<str>,
    },

    /// A task was published with a unique or idempotency key, and the app has no database. Nothing was sent.
    #[error(
        "cannot publish task `{task}` with a key: keys are kept in Postgres, and the app has no database; call .postgres(…) \
         on the builder, with the crate's feature `postgres`"
    )]
    KeyWithoutDatabase {
        /// The task's name.
        task: Box<str>,
    },

    /// Another task has the unique key, and the publish [refuses](crate::task::Unique::or_refuse) to be a duplicate.
    /// Nothing was stored.
    #[error(
        "cannot publish task `{task}`: task {first} has the unique key {key:?}; publish it when that task \
         has ended"
    )]
    Duplicate {
        /// The task's name.
        task: Box<str>,
        /// The unique key.
        key: Box<str>,
        /// The id of the task that has the key.
        first: TaskId,
    },

    /// The idempotency key was used before, for another task or another payload. Nothing was stored.
    #[error(
        "cannot publish task `{task}`: the idempotency key {key:?} was used for task {first}, which has another name or \
         payload; use a new key for each piece of work"
    )]
    IdempotencyMismatch {
        /// The task's name.
        task: Box<str>,
        /// The idempotency key.
        key: Box<str>,
        /// The id of the task that was published with the key.
        first: TaskId,
    },

    /// The key was not to be had until the deadline, because another transaction has taken it, or changed it after the
    /// caller's own began. Nothing was stored. Transient.
    #[error("task {id} was not stored: {problem}")]
    KeyBusy {
        /// The task's identifier.
        id: TaskId,
        /// The unique or idempotency key.
        key: Box<str>,
        /// What happened to the key, and what to do.
        problem: Box<str>,
    },

    /// The broker has no queue for the message: it was not stored.
    #[error("task {id} was not stored: no queue is bound for {queue}; apply the topology")]
    Unroutable {
        /// The task's identifier.
        id: TaskId,
        /// The queue that should be there.
        queue: Box<str>,
    },

    /// The queue did not answer until the deadline, because its node is down or it has no leader: the message was not
    /// stored. A queue that was deleted is [`Unroutable`](Self::Unroutable).
    #[error(
        "task {id} was not stored: the queue {queue} does not answer, because its node is down or it has no leader; \
         publish it again when the node is back"
    )]
    QueueDown {
        /// The task's identifier.
        id: TaskId,
        /// The queue.
        queue: Box<str>,
    },

    /// The broker refused the message until the deadline: its queue is full or not available.
    #[error("task {id} was not stored: the broker refused it; is the tier's queue full?")]
    Refused {
        /// The task's identifier.
        id: TaskId,
    },

    /// The broker took nothing until the deadline, because it is short of memory or disk. If the
    /// alarm came while the message was on its way, it may be stored later: publish it again with
    /// the same id.
    #[error(
        "task {id} was not confirmed: the broker has a memory or disk alarm; free some, and publish it again with the same id"
    )]
    Blocked {
        /// The task's identifier.
        id: TaskId,
    },

    /// There was no connection to the broker until the deadline: the message was not sent.
    #[error("task {id} was not sent: {cause}")]
    NotConnected {
        /// The task's identifier.
        id: TaskId,
        /// Why there is no connection.
        cause: Box<str>,
    },

    /// The message was sent, and the confirm did not come: it may be stored or not.
    #[error("task {id} may or may not be stored: {cause}; publish it again with the same id")]
    Unconfirmed {
        /// The task's identifier.
        id: TaskId,
        /// What happened.
        cause: Box<str>,
    },
}

/// Whether a task whose publishing ended with an error is stored by the broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stored {
    /// It is not, and will not be: nobody runs it unless it is published again.
    No,
    /// It may be stored, now or a little later: publish it again with the same id, so that a handler can tell.
    Maybe,
}

impl PublishError {
    /// Whether the task is stored all the same.
    pub fn stored(&self) -> Stored {
        match self {
            PublishError::Blocked { .. } | PublishError::Unconfirmed { .. } => Stored::Maybe,
            PublishError::UnmappedTask { .. }
            | PublishError::PayloadNotEncodable { .. }
            | PublishError::TooLarge { .. }
            | PublishError::HeadersTooLarge { .. }
            | PublishError::InvalidMessage { .. }
            | PublishError::InvalidPriority { .. }
            | PublishError::DelayTooLong { .. }
            | PublishError::NoDelays { .. }
            | PublishError::NoLongDelays { .. }
            | PublishError::InvalidKey { .. }
            | PublishError::KeyWithoutDatabase { .. }
            | PublishError::Duplicate { .. }
            | PublishError::IdempotencyMismatch { .. }
            | PublishError::KeyBusy { .. }
            | PublishError::Unroutable { .. }
            | PublishError::QueueDown { .. }
            | PublishError::Refused { .. }
            | PublishError::NotConnected { .. } => Stored::No,
        }
    }

    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            PublishError::UnmappedTask { .. } => ErrorKind::NotFound,
            PublishError::PayloadNotEncodable { .. }
            | PublishError::TooLarge { .. }
            | PublishError::HeadersTooLarge { .. }
            | PublishError::InvalidMessage { .. }
            | PublishError::InvalidPriority { .. }
            | PublishError::DelayTooLong { .. }
            | PublishError::NoDelays { .. }
            | PublishError::InvalidKey { .. } => ErrorKind::Invalid,
            PublishError::KeyWithoutDatabase { .. } => ErrorKind::Configuration,
            PublishError::Duplicate { .. }
            | PublishError::IdempotencyMismatch { .. }
            | PublishError::KeyBusy { .. } => ErrorKind::Conflict,
            PublishError::NoLongDelays { .. } | PublishError::Unroutable { .. } => {
                ErrorKind::Mismatch
            }
            PublishError::Refused { .. } | PublishError::Blocked { .. } => ErrorKind::Overloaded,
            PublishError::NotConnected { .. }
            | PublishError::QueueDown { .. }
            | PublishError::Unconfirmed { .. } => ErrorKind::Connection,
        }
    }
}

fn highest_priority(highest: Option<u8>) -> String {
    match highest {
        Some(highest) => format!("its tier takes 0 to {highest}"),
        None => "its tier has no priorities; set max_priority for it in the map".to_owned(),
    }
}
