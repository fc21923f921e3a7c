use crate::error::ErrorKind;

/// What can be wrong with a change at run time. Nothing was changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// The map has no tier, group or task of this name.
    #[error(transparent)]
    Unknown(Box<UnknownName>),

    /// The change makes no sense, whatever the map and the app are like.
    #[error("cannot {tried}: {problem}")]
    Invalid {
        /// What was tried.
        tried: Box<str>,
        /// What is wrong with it.
        problem: Box<str>,
    },

    /// The change cannot be made in this app, or not now.
    #[error("cannot {tried}: {problem}")]
    Refused {
        /// What was tried.
        tried: Box<str>,
        /// Why it cannot be.
        problem: Box<str>,
    },
}

/// A name that the map does not have.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot {tried}: the map has no {what} {name:?}; {}",
    match near {
        Some(near) => format!("did you mean {near:?}?"),
        None => format!("look at the names in the map of {app:?}"),
    }
)]
#[non_exhaustive]
pub struct UnknownName {
    /// What was tried.
    pub tried: Box<str>,
    /// `tier`, `group`, `task`, or `task that begins with`.
    pub what: &'static str,
    /// The name that was given.
    pub name: Box<str>,
    /// One of nearly that name.
    pub near: Option<Box<str>>,
    /// The app.
    pub app: Box<str>,
}

impl ControlError {
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            ControlError::Unknown(_) => ErrorKind::NotFound,
            ControlError::Invalid { .. } => ErrorKind::Invalid,
            ControlError::Refused { .. } => ErrorKind::Conflict,
        }
    }
}
