use std::io;
use std::panic::Location;
use std::time::Duration;

use crate::error::ErrorKind;

/// Why no worker can start with these handlers and this topology.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkerError {
    /// Two handlers were registered for one task.
    #[error(
        "task `{task}` has two handlers, at {first} and at {second}; remove one, or give its task \
         another name"
    )]
    DuplicateHandler {
        /// The task's name.
        task: &'static str,
        /// Where the handler is that was registered first.
        first: &'static Location<'static>,
        /// Where the handler is that was refused.
        second: &'static Location<'static>,
    },

    /// A handler's soft limit is not shorter than its hard one.
    #[error(
        "task `{task}` has a soft timeout of {soft_timeout:?} and a timeout of {timeout:?}; make \
         the soft one shorter, so that the handler has time left to end well"
    )]
    SoftTimeoutTooLong {
        /// The task's name.
        task: &'static str,
        /// The soft limit.
        soft_timeout: Duration,
        /// The hard limit.
        timeout: Duration,
    },

    /// A worker was asked to serve a group that the map does not have.
    #[error("there is no group {group:?} in the map; its groups are {known}")]
    UnknownGroup {
        /// The name that was given.
        group: Box<str>,
        /// The names there are.
        known: Box<str>,
    },

    /// A middleware was added to a group or a task that the map does not have.
    #[error(
        "cannot add middleware to {target}: there is none of that name{}",
        near.as_ref().map(|near| format!("; did you mean {near:?}?")).unwrap_or_default()
    )]
    MiddlewareWithoutTarget {
        /// The group or task that was named.
        target: Box<str>,
        /// One of nearly that name.
        near: Option<Box<str>>,
    },

    /// A handler may run for longer than the broker waits for an acknowledgement.
    #[error("{_0}")]
    LimitsTooLong(Box<LimitsTooLong>),

    /// Handlers may be retried, and their tier has no delay queues in which a retry could wait.
    #[error(
        "tier {tier:?} has delays = false in the map, and these tasks of it have retries: {tasks}; give them \
         retries = 0, or remove delays = false and apply the map"
    )]
    RetriesWithoutDelays {
        /// The tier.
        tier: Box<str>,
        /// The tasks.
        tasks: Box<str>,
    },

    /// The thread that watches for handlers which never yield could not be started.
    #[error("cannot start the watchdog's thread: {}; raise the limit on threads", cause.kind())]
    NoWatchdog {
        /// What the operating system answered.
        #[source]
        cause: io::Error,
    },
}

impl WorkerError {
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            WorkerError::DuplicateHandler { .. }
            | WorkerError::SoftTimeoutTooLong { .. }
            | WorkerError::LimitsTooLong(_)
            | WorkerError::RetriesWithoutDelays { .. } => ErrorKind::Configuration,
            WorkerError::UnknownGroup { .. } | WorkerError::MiddlewareWithoutTarget { .. } => {
                ErrorKind::NotFound
            }
            WorkerError::NoWatchdog { .. } => ErrorKind::System,
        }
    }
}

/// Limits that cannot hold: the deliveries of a task that a worker prefetched may outlast the broker's patience.
#[derive(Debug, thiserror::Error)]
#[error(
    "task `{task}` may run for {}, and group {group:?} holds {prefetch} per slot, so the last message \
     of a slot may be acknowledged after {}, when the broker has taken it away (ack_timeout {}); lower \
     the task's timeout or the group's prefetch, or give the task a tier with queue = \"postgres\", which \
     has no such limit, or raise the broker's consumer_timeout and ack_timeout in [broker] with it",
    humantime::format_duration(*timeout),
    humantime::format_duration(timeout.saturating_mul((*prefetch).into())),
    humantime::format_duration(*ack_timeout)
)]
#[non_exhaustive]
pub struct LimitsTooLong {
    /// The task.
    pub task: &'static str,
    /// Its hard limit.
    pub timeout: Duration,
    /// The group that serves its tier.
    pub group: String,
    /// How many messages the group holds per slot.
    pub prefetch: u16,
    /// How long the broker waits, as the map says.
    pub ack_timeout: Duration,
}
