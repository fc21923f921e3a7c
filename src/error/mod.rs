//! The library's one error, composed of the errors of its parts.
//!
//! Each part defines its errors beside the code that meets them. This module joins them into [`Error`], so it is
//! the one module that may import from all others.

mod cause;
mod kind;

use std::io;
use std::sync::Arc;

pub(crate) use cause::Cause;
pub use kind::ErrorKind;

pub use crate::amqp::error::BrokerError;
#[cfg(feature = "postgres")]
pub use crate::backlog::error::BacklogError;
#[cfg(feature = "postgres")]
pub use crate::completion::error::TransactionError;
#[cfg(feature = "postgres")]
pub use crate::control::error::{ControlError, UnknownName};
#[cfg(feature = "postgres")]
pub use crate::dead::error::DeadLetterError;
#[cfg(feature = "postgres")]
pub use crate::postgres::error::DatabaseError;
pub use crate::publish::error::{PublishError, Stored};
pub use crate::topology::duration::InvalidDuration;
pub use crate::topology::error::TopologyError;
pub use crate::worker::error::{LimitsTooLong, WorkerError};

/// Everything that can go wrong in tierline.
///
/// # What to match on
/// Most callers need no variant: [`kind`](Error::kind) says what sort of failure it is,
/// [`is_transient`](Error::is_transient) whether to try again, and [`stored`](Error::stored) whether a task that
/// could not be published is stored all the same. The variants hold the details.
///
/// # What to print
/// `{error}` is complete: it says what was tried, on what, what happened and what to do next. Where an error of the
/// operating system or of another library is behind it, [`source`](std::error::Error::source) returns that one.
/// The text describes it in words of its own and does not repeat its text, so nothing is printed twice by
/// `{:#}` of `anyhow`, or by another report that walks along the sources.
///
/// ```
/// use std::error::Error;
/// use tierline::{ErrorKind, Topology};
///
/// let error = Topology::load("/no/such/file.toml").unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::Configuration);
/// assert!(!error.is_transient());
/// assert_eq!(
///     error.to_string(),
///     "cannot read the topology file /no/such/file.toml: entity not found; check the path and its permissions"
/// );
/// let source = error.source().unwrap().downcast_ref::<std::io::Error>().unwrap();
/// assert_eq!(source.kind(), std::io::ErrorKind::NotFound);
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The topology file cannot be used, or lacks a schedule.
    #[error(transparent)]
    Topology(#[from] TopologyError),

    /// The broker or its management API failed, or refused something other than a task.
    #[error(transparent)]
    Broker(#[from] BrokerError),

    /// A task was not published, or nobody knows whether it was.
    #[error(transparent)]
    Publish(#[from] PublishError),

    /// A worker cannot start.
    #[error(transparent)]
    Worker(#[from] WorkerError),

    /// The database failed, or refused something.
    #[cfg(feature = "postgres")]
    #[error(transparent)]
    Database(#[from] DatabaseError),

    /// A task in Postgres is not there, or not in a state for what was asked.
    #[cfg(feature = "postgres")]
    #[error(transparent)]
    Backlog(#[from] BacklogError),

    /// A handler's transaction cannot be opened, or cannot be committed.
    #[cfg(feature = "postgres")]
    #[error(transparent)]
    Transaction(#[from] TransactionError),

    /// A dead letter or an operation on many of them is not there, or not in a state for what was asked.
    #[cfg(feature = "postgres")]
    #[error(transparent)]
    DeadLetter(#[from] DeadLetterError),

    /// A tier, a group or a task cannot be paused, limited or overridden as was asked.
    #[cfg(feature = "postgres")]
    #[error(transparent)]
    Control(#[from] ControlError),

    /// A span of time was given as text that cannot be read.
    #[error("{_0}")]
    InvalidDuration(Box<InvalidDuration>),

    /// The app was closed before, with [`Tierline::close`](crate::Tierline::close). Nothing was done.
    #[error("cannot {tried}: the app was closed; make a new one with Tierline::builder")]
    Closed {
        /// What was tried.
        tried: Box<str>,
    },

    /// Metrics were asked of an app that counts none.
    #[cfg(feature = "prometheus")]
    #[error("this app counts no metrics: call `metrics()` on its builder before it connects")]
    NoMetrics,

    /// The token of the admin API cannot be used. It is not shown.
    #[error(
        "cannot use the token of the admin API: it must have at least {shortest} bytes and no spaces \
         around it; draw one with `openssl rand -hex 32`"
    )]
    InvalidToken {
        /// How many bytes it must have.
        shortest: usize,
    },

    /// The process cannot listen to its signals.
    #[error("cannot listen to signals: {}; end the worker with `until` instead", cause.kind())]
    NoSignals {
        /// What the operating system answered.
        #[source]
        cause: io::Error,
    },

    /// An error from when the app was built, which every call reports that needs what could not be built.
    #[error(transparent)]
    Shared(Arc<Error>),
}

impl Error {
    /// What sort of failure this is.
    ///
    /// ```
    /// use tierline::{Error, ErrorKind};
    ///
    /// fn status(error: &Error) -> u16 {
    ///     match error.kind() {
    ///         ErrorKind::Invalid => 400,
    ///         ErrorKind::NotFound => 404,
    ///         ErrorKind::Conflict => 409,
    ///         _ if error.is_transient() => 503,
    ///         _ => 500,
    ///     }
    /// }
    /// ```
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Topology(error) => error.kind(),
            Error::Broker(error) => error.kind(),
            Error::Publish(error) => error.kind(),
            Error::Worker(error) => error.kind(),
            #[cfg(feature = "postgres")]
            Error::Database(error) => error.kind(),
            #[cfg(feature = "postgres")]
            Error::Backlog(error) => error.kind(),
            #[cfg(feature = "postgres")]
            Error::Transaction(error) => error.kind(),
            #[cfg(feature = "postgres")]
            Error::DeadLetter(error) => error.kind(),
            #[cfg(feature = "postgres")]
            Error::Control(error) => error.kind(),
            Error::InvalidDuration(_) | Error::InvalidToken { .. } => ErrorKind::Invalid,
            Error::Closed { .. } => ErrorKind::Closed,
            #[cfg(feature = "prometheus")]
            Error::NoMetrics => ErrorKind::Configuration,
            Error::NoSignals { .. } => ErrorKind::System,
            Error::Shared(error) => error.kind(),
        }
    }

    /// Whether the same call may succeed later without a change by a human: the connection comes back, the
    /// queue drains, the alarm ends.
    ///
    /// ```
    /// # use tierline::Topology;
    /// let mistake = Topology::parse("app = 5").unwrap_err();
    /// assert!(!mistake.is_transient());
    /// ```
    pub fn is_transient(&self) -> bool {
        match self {
            Error::Shared(error) => error.is_transient(),
            Error::Topology(TopologyError::Unreadable { cause, .. }) => matches!(
                cause.kind(),
                io::ErrorKind::Interrupted | io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock
            ),
            // The transaction that has the key will end.
            Error::Publish(PublishError::KeyBusy { .. }) => true,
            _ => matches!(self.kind(), ErrorKind::Connection | ErrorKind::Overloaded),
        }
    }

    /// Whether the task that could not be published is stored by the broker. `None`: the error is not one of
    /// publishing.
    ///
    /// ```
    /// use tierline::Error;
    /// use tierline::error::Stored;
    ///
    /// fn advice(error: &Error) -> &'static str {
    ///     match error.stored() {
    ///         Some(Stored::No) if error.is_transient() => "publish it again",
    ///         Some(Stored::No) => "it will not be stored until somebody changes something",
    ///         Some(Stored::Maybe) => "publish it again with the same id: it may be stored already",
    ///         None => "this is not about publishing",
    ///     }
    /// }
    /// ```
    pub fn stored(&self) -> Option<Stored> {
        match self {
            Error::Publish(error) => Some(error.stored()),
            Error::Closed { .. } => Some(Stored::No),
            Error::Shared(error) => error.stored(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
