use crate::TaskId;
use crate::error::ErrorKind;

/// What can be wrong with a question about tasks in Postgres, or an operation on them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BacklogError {
    /// A filter or a cursor cannot be used. Nothing was changed.
    #[error("cannot use this filter: {problem}")]
    InvalidFilter {
        /// What is wrong with it.
        problem: Box<str>,
    },

    /// No task with this id waits or runs in a tier in Postgres.
    #[error(
        "there is no task {id} in the tiers in Postgres: it has ended, waits on the broker, or is a dead letter"
    )]
    NotFound {
        /// The id.
        id: TaskId,
    },

    /// A task was to be moved to a tier that the map does not have. It is as before.
    #[error(
        "there is no tier {tier:?} in the map; {}",
        match near {
            Some(near) => format!("did you mean {near:?}?"),
            None => format!("its tiers are {known}"),
        }
    )]
    UnknownTier {
        /// The name that was given.
        tier: Box<str>,
        /// A tier of nearly that name.
        near: Option<Box<str>>,
        /// The names of the map's tiers, with commas between them.
        known: Box<str>,
    },

    /// What was asked cannot be done to this task. It is as before.
    #[error("task {id} is left as it is: {problem}")]
    Refused {
        /// Its id.
        id: TaskId,
        /// Why.
        problem: Box<str>,
    },
}

impl BacklogError {
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            BacklogError::InvalidFilter { .. } => ErrorKind::Invalid,
            BacklogError::NotFound { .. } | BacklogError::UnknownTier { .. } => ErrorKind::NotFound,
            BacklogError::Refused { .. } => ErrorKind::Conflict,
        }
    }
}
