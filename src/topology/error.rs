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
}

impl TopologyError {
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            TopologyError::Unreadable { .. } | TopologyError::Invalid(_) => {
                ErrorKind::Configuration
            }
            TopologyError::InvalidSchedule { .. } => ErrorKind::Invalid,
            TopologyError::UnknownSchedule { .. } => ErrorKind::NotFound,
        }
    }
}
