use std::io;
use std::path::PathBuf;

use crate::error::ErrorKind;

use super::problem::InvalidTopology;

/// What can be wrong with a topology file and its schedules.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// The file could not be read at all. What it says was not looked at.
    #[error(
        "cannot read the topology file {}: {}; check the path and its permissions",
        path.display(), cause.kind()
    )]
    Unreadable {
        /// The file that was tried.
        path: PathBuf,
        /// What the operating system answered.
        #[source]
        cause: io::Error,
    },

    /// The file was read and contains mistakes; all of them are inside.
    #[error(transparent)]
    Invalid(Box<InvalidTopology>),

    /// A schedule cannot be as it was asked for.
    #[error("schedule {schedule:?}: {problem}")]
    InvalidSchedule {
        /// The schedule, or the part of it that is wrong.
        schedule: Box<str>,
        /// What is wrong with it.
        problem: Box<str>,
    },

    /// The app has no schedule of that name.
    #[error(
        "there is no schedule {schedule:?}{}",
        near.as_ref().map(|near| format!("; did you mean {near:?}?")).unwrap_or_default()
    )]
    UnknownSchedule {
        /// The name that was given.
        schedule: Box<str>,
        /// A schedule of nearly that name.
        near: Option<Box<str>>,
    },

    /// The map has tiers on RabbitMQ, or that were there before they moved (`formerly`), and the app was given no address
    /// of a broker.
    #[error(
        "the map has tiers on RabbitMQ, or that were there before they moved ({tiers}), and the app has no address of a \
         broker: call .amqp(…) on the builder. Or write queue = \"postgres\" for these tiers, and remove formerly when \
         `tierline topology move` says that nothing is left there"
    )]
    NoBroker {
        /// Their names.
        tiers: Box<str>,
    },

    /// The map has tiers in Postgres, and the app was given no database.
    #[error(
        "the map has tiers in Postgres ({tiers}), and the app has no database: call .postgres(…) on the builder, with \
         the crate's feature `postgres`"
    )]
    NoDatabase {
        /// Their names.
        tiers: Box<str>,
    },

    /// The map has limits that need the database, and the app was given none.
    #[error(
        "the map has limits that its processes share by way of the database ({limited}), and the app has none: call \
         .postgres(…) on the builder, with the crate's feature `postgres`. Or write scope = \"process\" in the limit of a \
         tier, which then holds for each process by itself; the limit of a task always needs the database, where its tasks \
         wait, so give the task a tier of its own with a limit"
    )]
    LimitsWithoutDatabase {
        /// The tiers and tasks that have them.
        limited: Box<str>,
    },

    /// A tier was to be relayed that the map does not have on the broker.
    #[error(
        "tier {tier:?} is not on the broker, so it cannot be relayed{}; these are: {on_broker}",
        near.as_ref().map(|near| format!(" (did you mean {near:?}?)")).unwrap_or_default()
    )]
    NotOnBroker {
        /// The tier.
        tier: Box<str>,
        /// A tier of nearly that name.
        near: Option<Box<str>>,
        /// The tiers that are on the broker.
        on_broker: Box<str>,
    },

    /// A tier was to be moved that has no `formerly` in the map.
    #[error(
        "tier {tier:?} is not moving: the map {}{}",
        match near {
            Some(near) => format!("has no such tier; did you mean {near:?}?"),
            None => "has no formerly in it".to_owned(),
        },
        match &**moving {
            "" => "; no tier has".to_owned(),
            moving => format!("; these have: {moving}"),
        }
    )]
    NotMoving {
        /// The tier.
        tier: Box<str>,
        /// A tier of nearly that name, if the map does not have this one.
        near: Option<Box<str>>,
        /// The tiers that are moving.
        moving: Box<str>,
    },
}

impl TopologyError {
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            TopologyError::Unreadable { .. }
            | TopologyError::Invalid(_)
            | TopologyError::NoBroker { .. }
            | TopologyError::NoDatabase { .. }
            | TopologyError::LimitsWithoutDatabase { .. } => ErrorKind::Configuration,
            TopologyError::InvalidSchedule { .. } => ErrorKind::Invalid,
            TopologyError::UnknownSchedule { .. }
            | TopologyError::NotMoving { .. }
            | TopologyError::NotOnBroker { .. } => ErrorKind::NotFound,
        }
    }
}
