use std::fmt;
use std::time::Duration;

use crate::task::TaskError;

/// What is to become of a message after its execution.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It succeeded.
    Done,
    /// It failed, and its next attempt is due after this time.
    Retry {
        /// The time until the next attempt.
        after: Duration,
        /// Why this attempt failed.
        failure: Failure,
    },
    /// It asked to run later; this costs no attempt.
    Snooze {
        /// The time until it runs again.
        after: Duration,
    },
    /// It said that there is nothing to do any more. Counted and logged, not kept.
    Discarded {
        /// What the handler gave as the reason.
        reason: String,
    },
    /// It came too late and was not run. Counted and logged, not kept.
    Expired {
        /// By how much it was late.
        late: Duration,
    },
    /// It is kept as a dead letter, payload intact.
    Dead {
        /// Why it is dead.
        reason: DeadReason,
        /// What went wrong last.
        failure: Failure,
    },
}

/// Why a message is a dead letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeadReason {
    /// The last retry failed too.
    RetriesExhausted,
    /// The handler said that another attempt would not help.
    Permanent,
    /// No handler of this name is in the program. Parked until a release that has one redrives it.
    UnknownTask,
    /// The payload is not what the task's type reads. Parked like an unknown task.
    Undecodable,
}

impl DeadReason {
    /// The reason in words, as it is written to headers and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::RetriesExhausted => "retries exhausted",
            Self::Permanent => "permanent error",
            Self::UnknownTask => "unknown task",
            Self::Undecodable => "undecodable payload",
        }
    }
}

impl fmt::Display for DeadReason {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

/// What went wrong in an attempt, as plain data that can be logged and sent.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Failure {
    /// In which way it failed.
    pub kind: FailureKind,
    /// What happened.
    pub message: String,
    /// The type of the error, where it is known.
    pub error_type: Option<String>,
    /// What led to it, the nearest cause first.
    pub causes: Vec<String>,
}

/// In which way an attempt failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FailureKind {
    /// The handler returned an error.
    Error,
    /// The handler panicked.
    Panic,
    /// The handler ran into its hard limit.
    TimedOut,
    /// The handler could not be started.
    NotStarted,
}

impl Failure {
    pub(super) fn new(kind: FailureKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            error_type: None,
            causes: Vec::new(),
        }
    }
}

impl From<&TaskError> for Failure {
    fn from(error: &TaskError) -> Self {
        Self {
            kind: FailureKind::Error,
            message: error.message(),
            error_type: error.type_name().map(str::to_owned),
            causes: error.causes(),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)?;
        for cause in &self.causes {
            write!(formatter, ": {cause}")?;
        }
        Ok(())
    }
}
