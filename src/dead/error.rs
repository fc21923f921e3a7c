use crate::error::ErrorKind;
use crate::topology::near_miss;

/// What can be wrong with a question about dead letters, or an operation on them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeadLetterError {
    /// A filter, a page or another setting of a query cannot be used. Nothing was changed.
    #[error("cannot use this filter: {problem}")]
    InvalidFilter {
        /// What is wrong with it.
        problem: Box<str>,
    },

    /// A redrive was asked for, and the log was opened without an app that publishes. Nothing was changed.
    #[error(
        "this log of dead letters cannot redrive, because it has no publisher: take the log from \
         Tierline::dead_letters of a connected app"
    )]
    NoPublisher,

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
    NotFound {
        /// The number.
        id: i64,
    },

    /// What was asked cannot be done to this dead letter. It is as before.
    #[error("dead letter {id} is left as it is: {problem}")]
    Refused {
        /// Its number.
        id: i64,
        /// Why.
        problem: Box<str>,
    },

    /// There is no operation of this number in the app's log.
    #[error("there is no operation {id}")]
    OperationNotFound {
        /// The number.
        id: i64,
    },

    /// What was asked cannot be done to this operation.
    #[error("operation {id} is left as it is: {problem}")]
    OperationRefused {
        /// Its number.
        id: i64,
        /// Why.
        problem: Box<str>,
    },
}

impl DeadLetterError {
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            DeadLetterError::InvalidFilter { .. } => ErrorKind::Invalid,
            DeadLetterError::NoPublisher => ErrorKind::Configuration,
            DeadLetterError::UnknownTier { .. }
            | DeadLetterError::NotFound { .. }
            | DeadLetterError::OperationNotFound { .. } => ErrorKind::NotFound,
            DeadLetterError::Refused { .. } | DeadLetterError::OperationRefused { .. } => {
                ErrorKind::Conflict
            }
        }
    }
}

fn tier_that_was_meant(tier: &str, known: &str) -> String {
    match near_miss(tier, known.split(", ")) {
        Some(near) => format!("did you mean {near:?}?"),
        None => format!("the tiers are {known}"),
    }
}
