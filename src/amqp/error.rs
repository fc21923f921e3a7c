use super::{Mismatch, Report};
use crate::error::ErrorKind;
use crate::topology::{MINIMUM_VERSION, QUORUM_PRIORITIES_SINCE, Version};

/// What can go wrong with the broker and its management API.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BrokerError {
    /// The URL of the broker cannot be read. It is not shown, because it may hold a password.
    #[error(
        "cannot read the URL of the broker: {problem}; write \
         amqp://user:password@host:5672/virtual-host, or amqps:// for TLS"
    )]
    InvalidUrl {
        /// What is wrong with it.
        problem: Box<str>,
    },

    /// No connection to the broker could be made.
    #[error(
        "cannot connect to {address}: {cause}; is the broker running, and is this its address?"
    )]
    Unreachable {
        /// Where it was tried, without the credentials.
        address: Box<str>,
        /// What happened.
        cause: Box<str>,
        /// What the operating system answered.
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },

    /// Publishing cannot use the pool of AMQP connections that the app was given.
    #[error("cannot publish over the pool of AMQP connections: {problem}")]
    InvalidPool {
        /// What is wrong with it, and what to do.
        problem: Box<str>,
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

    /// The broker reported a version that is not one, so nothing is known about what it can do.
    #[error(
        "the broker reports the version {reported:?}, which does not start with two numbers such \
         as \"4.3\"; is it RabbitMQ?"
    )]
    UnknownVersion {
        /// What the broker said, cut to a readable length.
        reported: String,
    },

    /// The broker is older than every version that tierline runs on.
    #[error(
        "the broker is RabbitMQ {version}, and tierline needs {MINIMUM_VERSION} or newer (the first \
         with message TTL and at-least-once dead-lettering in quorum queues); upgrade the broker"
    )]
    UnsupportedVersion {
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

    /// The connection was lost, or the broker did not answer in time.
    #[error("cannot {tried}: {cause}; check the broker, and try again")]
    Failed {
        /// What was tried, and where.
        tried: Box<str>,
        /// What happened.
        cause: Box<str>,
        /// What the operating system answered.
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
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
    Refused {
        /// What was tried, and where.
        tried: Box<str>,
        /// What the broker says.
        cause: Box<str>,
    },

    /// Something exists on the broker with other arguments than the file's. Nothing was changed.
    #[error("{_0}")]
    Mismatch(Box<Mismatch>),

    /// The broker is not as the file says, and the app was told not to declare anything.
    #[error(
        "the broker is not as the topology says:\n{_0}\napply the topology, or connect with OnConnect::Apply"
    )]
    NotVerified(Box<Report>),

    /// The URL of the management API cannot be read. It is not shown, because it may hold a password.
    #[error(
        "cannot read the URL of the management API: {problem}; write \
         http://user:password@host:15672, or https:// for TLS"
    )]
    InvalidManagementUrl {
        /// What is wrong with it.
        problem: Box<str>,
    },

    /// The management API was not reached, or did not answer as it should.
    #[error("cannot {tried}: {cause}")]
    ManagementFailed {
        /// What was tried, and where.
        tried: Box<str>,
        /// What happened, and what to do.
        cause: Box<str>,
        /// What the operating system answered.
        source: Option<Box<dyn std::error::Error + Send + Sync>>,
    },

    /// The management API does not let the user in.
    #[error(
        "cannot {tried}: it refuses the login of user {user:?}; check name, password and the user's tags"
    )]
    ManagementLoginRefused {
        /// What was tried, and where.
        tried: Box<str>,
        /// The user.
        user: Box<str>,
    },
}

impl BrokerError {
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            BrokerError::InvalidUrl { .. } | BrokerError::InvalidManagementUrl { .. } => {
                ErrorKind::Invalid
            }
            BrokerError::InvalidPool { .. } => ErrorKind::Configuration,
            BrokerError::Unreachable { .. }
            | BrokerError::Failed { .. }
            | BrokerError::ManagementFailed { .. } => ErrorKind::Connection,
            BrokerError::LoginRefused { .. }
            | BrokerError::VirtualHostRefused { .. }
            | BrokerError::AccessRefused { .. }
            | BrokerError::ManagementLoginRefused { .. } => ErrorKind::Permission,
            BrokerError::UnknownVersion { .. }
            | BrokerError::UnsupportedVersion { .. }
            | BrokerError::UnsupportedPriorities { .. } => ErrorKind::Unsupported,
            BrokerError::Refused { .. } => ErrorKind::Refused,
            BrokerError::Mismatch(_) | BrokerError::NotVerified(_) => ErrorKind::Mismatch,
        }
    }
}
