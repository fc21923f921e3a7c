//! The library's one error.

use std::io;
use std::panic::Location;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::amqp::{Mismatch, Report};
use crate::task::TaskId;
use crate::topology::capabilities::{MINIMUM_VERSION, QUORUM_PRIORITIES_SINCE, Version};
use crate::topology::duration::InvalidDuration;
use crate::topology::near_miss;
use crate::topology::problem::InvalidTopology;

/// Everything that can go wrong in tierline, a variant per failure.
///
/// Each message says what was tried, on what, what happened and what to do next. The cause is part
/// of the message, so [`source`](std::error::Error::source) is empty and nothing is printed twice.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The topology file could not be read at all. What it says was not looked at.
    #[error("cannot read the topology file {}: {cause}; check the path and its permissions", path.display())]
    ReadTopology {
        /// The file that was tried.
        path: PathBuf,
        /// What the operating system answered.
        cause: io::Error,
    },

    /// The topology file was read and contains mistakes; all of them are inside.
    #[error(transparent)]
    InvalidTopology(Box<InvalidTopology>),

    /// The broker reported a version that is not one, so nothing is known about what it can do.
    #[error(
        "the broker reports the version {reported:?}, which does not start with two numbers such \
         as \"4.3\"; is it RabbitMQ?"
    )]
    UnknownBrokerVersion {
        /// What the broker said, cut to a readable length.
        reported: String,
    },

    /// The broker is older than every version that tierline runs on.
    #[error(
        "the broker is RabbitMQ {version}, and tierline needs {MINIMUM_VERSION} or newer (the first \
         with message TTL and at-least-once dead-lettering in quorum queues); upgrade the broker"
    )]
    UnsupportedBroker {
        /// The broker's version.
        version: Version,
    },

    /// A quorum tier has a `max_priority`, and the broker's quorum queues have no strict priorities.
    #[error(
        "tier {tier:?} is a quorum queue with max_priority = {max_priority}, which needs RabbitMQ \
         {QUORUM_PRIORITIES_SINCE} or newer, and the broker is {version}; either set queue = \
         \"classic\" for this tier (priorities on one node), or upgrade the broker"
    )]
    UnsupportedPriorities {
        /// The tier that asks for priorities.
        tier: String,
        /// What it asks for.
        max_priority: u8,
        /// The broker's version.
        version: Version,
    },

    /// The URL of the broker cannot be read. It is not shown, because it may hold a password.
    #[error(
        "cannot read the URL of the broker: {problem}; write \
         amqp://user:password@host:5672/virtual-host, or amqps:// for TLS"
    )]
    InvalidBrokerUrl {
        /// What is wrong with it.
        problem: Box<str>,
    },

    /// No connection to the broker could be made.
    #[error(
        "cannot connect to {address}: {cause}; is the broker running, and is this its address?"
    )]
    BrokerUnreachable {
        /// Where it was tried, without the credentials.
        address: Box<str>,
        /// What happened.
        cause: Box<str>,
    },

    /// The broker does not know the user, or the password is another.
    #[error(
        "{address} refuses the login of user {user:?}; check name and password (\"guest\" may log in \
         from the broker's own machine only)"
    )]
    LoginRefused {
        /// Where it was tried, without the credentials.
        address: Box<str>,
        /// The user.
        user: Box<str>,
    },

    /// The virtual host does not exist, or the user may not enter it.
    #[error(
        "cannot enter the virtual host {virtual_host}: {cause}; create it, give the user \
         permissions on it, or correct the end of the URL (nothing there means \"/\", and a lone \
         slash means \"\")"
    )]
    VirtualHostRefused {
        /// The virtual host, and the broker.
        virtual_host: Box<str>,
        /// What the broker says.
        cause: Box<str>,
    },

    /// The URL of the management API cannot be read. It is not shown, because it may hold a password.
    #[error(
        "cannot read the URL of the management API: {problem}; write \
         http://user:password@host:15672, or https:// for TLS"
    )]
    InvalidManagementUrl {
        /// What is wrong with it.
        problem: Box<str>,
    },

    /// The management API did not answer as it should.
    #[error("cannot {tried}: {cause}")]
    ManagementFailed {
        /// What was tried, and where.
        tried: Box<str>,
        /// What happened, and what to do.
        cause: Box<str>,
    },

    /// The connection was lost, or the broker did not answer in time.
    #[error("cannot {tried}: {cause}; check the broker, and try again")]
    BrokerFailed {
        /// What was tried, and where.
        tried: Box<str>,
        /// What happened.
        cause: Box<str>,
    },

    /// The user lacks a permission.
    #[error("cannot {tried}: access refused; the user needs the permission to {needed}")]
    AccessRefused {
        /// What was tried, where, and as which user.
        tried: Box<str>,
        /// The permission that it takes.
        needed: Box<str>,
    },

    /// The broker refuses what was asked, and will again.
    #[error("cannot {tried}: the broker says {cause:?}")]
    OperationRefused {
        /// What was tried, and where.
        tried: Box<str>,
        /// What the broker says.
        cause: Box<str>,
    },

    /// Something exists on the broker with other arguments than the file's. Nothing was changed.
    #[error("{_0}")]
    Mismatch(Box<Mismatch>),

    /// A message was to be delayed in the broker for longer than its ladders reach.
    #[error(
        "a delay of {} is above the {} that the broker holds; keep it in a table of your own, and \
         publish it when it is due",
        humantime::format_duration(*delay), humantime::format_duration(*longest)
    )]
    DelayTooLong {
        /// The delay that was asked for.
        delay: Duration,
        /// The longest delay there is: [`MAX_DELAY`](crate::topology::delay::MAX_DELAY).
        longest: Duration,
    },

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

    /// A payload has no JSON form, for example a map whose keys are not text.
    #[error("cannot encode the payload of task `{task}` as JSON: {cause}; change its type")]
    PayloadNotEncodable {
        /// The task's name.
        task: &'static str,
        /// What the encoder says.
        cause: serde_json::Error,
    },

    /// A task was published that the map does not have.
    #[error(
        "cannot publish task `{task}`: it is not mapped to a tier; add it to [tasks] in the map"
    )]
    UnmappedTask {
        /// The task's name.
        task: String,
    },

    /// The broker has no queue for the message: it was not stored.
    #[error("task {id} was not stored: no queue is bound for {queue}; apply the topology")]
    Unroutable {
        /// The task's identifier.
        id: TaskId,
        /// The queue that should be there.
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

    /// A payload is larger than the broker takes. Nothing was sent.
    #[error(
        "the payload of task `{task}` has {size} bytes, and the broker takes {limit}; store it elsewhere and publish where it is"
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

    /// The broker is not as the file says, and the app was told not to declare anything.
    #[error(
        "the broker is not as the topology says:\n{_0}\napply the topology, or connect with OnConnect::Apply"
    )]
    NotVerified(Box<Report>),

    /// A schedule cannot be as it was asked for.
    #[error("schedule {schedule:?}: {problem}")]
    InvalidSchedule {
        /// The schedule, or the part of it that is wrong.
        schedule: Box<str>,
        /// What is wrong with it.
        problem: Box<str>,
    },

    /// The app has no schedule of that name.
    #[error("there is no schedule {schedule:?}{}", near.as_ref().map(|near| format!("; did you mean {near:?}?")).unwrap_or_default())]
    UnknownSchedule {
        /// The name that was given.
        schedule: Box<str>,
        /// A schedule of nearly that name.
        near: Option<Box<str>>,
    },

    /// The URL of the database cannot be read. It is not shown, because it may hold a password.
    #[error(
        "cannot read the URL of the database: {problem}; write \
         postgres://user:password@host:5432/database"
    )]
    InvalidDatabaseUrl {
        /// What is wrong with it.
        problem: Box<str>,
    },

    /// Something needs a database, and the app has none.
    #[error("cannot {tried}: no database was given; call .postgres(…) on the builder")]
    NoDatabase {
        /// What was tried.
        tried: Box<str>,
    },

    /// There is no connection to the database, or none was free in time.
    #[error(
        "cannot {tried}: no connection: {cause}; is Postgres running, and is this its address?"
    )]
    DatabaseUnreachable {
        /// What was tried, and where, without the credentials.
        tried: Box<str>,
        /// What happened.
        cause: Box<str>,
    },

    /// Postgres does not let the user in: the role, its password or the database is another.
    #[error(
        "cannot {tried}: Postgres refuses the login: {cause}; check user, password and database of \
         its URL"
    )]
    DatabaseLoginRefused {
        /// What was tried, and where, without the credentials.
        tried: Box<str>,
        /// What Postgres says.
        cause: Box<str>,
    },

    /// The connection to the database was lost on the way, or the database gave up for now. What was
    /// asked for may have been done or not.
    #[error("cannot {tried}: {cause}; check Postgres, and try again")]
    DatabaseFailed {
        /// What was tried, and where.
        tried: Box<str>,
        /// What happened.
        cause: Box<str>,
    },

    /// The database refuses what was asked, and will again.
    #[error("cannot {tried}: Postgres says {cause:?}")]
    DatabaseRefused {
        /// What was tried, and where.
        tried: Box<str>,
        /// What Postgres says.
        cause: Box<str>,
    },

    /// The database lacks tables or columns of ours.
    #[error(
        "cannot {tried}: the database is not prepared for this release ({cause}); run its `tierline migrate`, or call \
         Database::migrate"
    )]
    NotMigrated {
        /// What was tried, and where.
        tried: Box<str>,
        /// What is missing.
        cause: Box<str>,
    },

    /// A filter, a page or another setting of a query cannot be used. Nothing was changed.
    #[error("cannot use this filter: {problem}")]
    InvalidFilter {
        /// What is wrong with it.
        problem: Box<str>,
    },

    /// A tier was named that is neither in the map nor in the log of dead letters.
    #[error(
        "there is no tier {tier:?} in the map, and no dead letter of one; {}",
        tier_that_was_meant(tier, known)
    )]
    UnknownTier {
        /// The name that was given.
        tier: Box<str>,
        /// The names there are, with commas between them.
        known: Box<str>,
    },

    /// There is no dead letter of this number in the app's log.
    #[error("there is no dead letter {id}; it may be past its retention")]
    DeadLetterNotFound {
        /// The number.
        id: i64,
    },

    /// What was asked cannot be done to this dead letter. It is as before.
    #[error("dead letter {id} is left as it is: {problem}")]
    DeadLetterRefused {
        /// Its number.
        id: i64,
        /// Why.
        problem: Box<str>,
    },

    /// There is no operation of this number in the app's log.
    #[error("there is no operation {id}")]
    BulkNotFound {
        /// The number.
        id: i64,
    },

    /// What was asked cannot be done to this operation.
    #[error("operation {id} is left as it is: {problem}")]
    BulkRefused {
        /// Its number.
        id: i64,
        /// Why.
        problem: Box<str>,
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
    #[error("cannot add middleware to {target}: there is none of that name{}", near.as_ref().map(|near| format!("; did you mean {near:?}?")).unwrap_or_default())]
    MiddlewareWithoutTarget {
        /// The group or task that was named.
        target: Box<str>,
        /// One of nearly that name.
        near: Option<Box<str>>,
    },

    /// A handler may run for longer than the broker waits for an acknowledgement.
    #[error("{_0}")]
    LimitsTooLong(Box<LimitsTooLong>),

    /// The thread that watches for handlers which never yield could not be started.
    #[error("cannot start the watchdog's thread: {cause}; raise the limit on threads")]
    NoWatchdog {
        /// What the operating system answered.
        cause: io::Error,
    },

    /// The process cannot listen to its signals.
    #[error("cannot listen to signals: {cause}; end the worker with `until` instead")]
    NoSignals {
        /// What the operating system answered.
        cause: io::Error,
    },

    /// What went wrong when the app was built, told again by everything that needs it.
    #[error(transparent)]
    Shared(Arc<Error>),

    /// The token of the admin API cannot be used. It is not shown.
    #[error(
        "cannot use the token of the admin API: it must have at least {shortest} bytes and no spaces \
         around it; draw one with `openssl rand -hex 32`"
    )]
    InvalidToken {
        /// How many bytes it must have.
        shortest: usize,
    },

    /// A span of time was given as text that cannot be read.
    #[error("{_0}")]
    InvalidDuration(Box<InvalidDuration>),

    /// The app was closed before, with [`Tierline::close`](crate::Tierline::close). Nothing was done.
    #[error("cannot {tried}: the app was closed; make a new one with Tierline::builder")]
    Closed {
        /// What was tried.
        tried: Box<str>,
    },

    /// Publishing cannot use the pool of AMQP connections that the app was given.
    #[error("cannot publish over the pool of AMQP connections: {problem}")]
    InvalidPool {
        /// What is wrong with it, and what to do.
        problem: Box<str>,
    },
}

impl Error {
    /// Whether the same call may succeed later with nothing changed.
    ///
    /// ```
    /// # use tierline::Topology;
    /// let mistake = Topology::parse("app = 5").unwrap_err();
    /// assert!(!mistake.is_transient());
    /// ```
    pub fn is_transient(&self) -> bool {
        match self {
            Error::ReadTopology { cause, .. } => matches!(
                cause.kind(),
                io::ErrorKind::Interrupted | io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock
            ),
            Error::BrokerUnreachable { .. }
            | Error::Refused { .. }
            | Error::Blocked { .. }
            | Error::NotConnected { .. }
            | Error::Unconfirmed { .. }
            | Error::BrokerFailed { .. }
            | Error::ManagementFailed { .. }
            | Error::DatabaseUnreachable { .. }
            | Error::DatabaseFailed { .. } => true,
            Error::Shared(error) => error.is_transient(),
            Error::InvalidTopology(_)
            | Error::UnknownGroup { .. }
            | Error::MiddlewareWithoutTarget { .. }
            | Error::LimitsTooLong(_)
            | Error::NoWatchdog { .. }
            | Error::NoSignals { .. }
            | Error::Unroutable { .. }
            | Error::TooLarge { .. }
            | Error::HeadersTooLarge { .. }
            | Error::InvalidMessage { .. }
            | Error::InvalidPriority { .. }
            | Error::NotVerified(_)
            | Error::InvalidBrokerUrl { .. }
            | Error::InvalidManagementUrl { .. }
            | Error::LoginRefused { .. }
            | Error::VirtualHostRefused { .. }
            | Error::AccessRefused { .. }
            | Error::OperationRefused { .. }
            | Error::Mismatch(_)
            | Error::UnknownBrokerVersion { .. }
            | Error::UnsupportedBroker { .. }
            | Error::UnsupportedPriorities { .. }
            | Error::DelayTooLong { .. }
            | Error::DuplicateHandler { .. }
            | Error::SoftTimeoutTooLong { .. }
            | Error::PayloadNotEncodable { .. }
            | Error::UnmappedTask { .. }
            | Error::InvalidSchedule { .. }
            | Error::UnknownSchedule { .. }
            | Error::InvalidDatabaseUrl { .. }
            | Error::NoDatabase { .. }
            | Error::DatabaseRefused { .. }
            | Error::DatabaseLoginRefused { .. }
            | Error::UnknownTier { .. }
            | Error::NotMigrated { .. }
            | Error::InvalidFilter { .. }
            | Error::DeadLetterNotFound { .. }
            | Error::DeadLetterRefused { .. }
            | Error::BulkNotFound { .. }
            | Error::BulkRefused { .. }
            | Error::InvalidToken { .. }
            | Error::InvalidDuration(_)
            | Error::Closed { .. }
            | Error::InvalidPool { .. } => false,
        }
    }
}

/// Limits that cannot hold: what a worker has in hand of a task may outlast the broker's patience.
#[derive(Debug, thiserror::Error)]
#[error(
    "task `{task}` may run for {}, and group {group:?} holds {prefetch} per slot, so the last message \
     of a slot may be acknowledged after {}, when the broker has taken it away (ack_timeout {}); lower \
     the task's timeout or the group's prefetch, or raise the broker's consumer_timeout and \
     ack_timeout in [broker] with it",
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

fn highest_priority(highest: Option<u8>) -> String {
    match highest {
        Some(highest) => format!("its tier takes 0 to {highest}"),
        None => "its tier has no priorities; set max_priority for it in the map".to_owned(),
    }
}

fn tier_that_was_meant(tier: &str, known: &str) -> String {
    match near_miss(tier, known.split(", ")) {
        Some(near) => format!("did you mean {near:?}?"),
        None => format!("the tiers are {known}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_stays_small_enough_to_return_by_value() {
        assert!(size_of::<Error>() <= 48, "{} bytes", size_of::<Error>());
    }

    #[test]
    fn an_unreadable_file_is_named_with_its_cause() {
        let error = Error::ReadTopology {
            path: "hotel.toml".into(),
            cause: io::ErrorKind::NotFound.into(),
        };
        assert_eq!(
            error.to_string(),
            "cannot read the topology file hotel.toml: entity not found; check the path and its permissions"
        );
    }
}
