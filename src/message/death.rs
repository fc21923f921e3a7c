//! Why a message is a dead letter, as plain data that travels with it.

use std::fmt;
use std::time::SystemTime;

use crate::task::TaskError;

/// What is known of a message's death: written by the worker that gave it up, read by the collector.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Death {
    /// Why it is dead.
    pub reason: DeadReason,
    /// What went wrong last.
    pub failure: Failure,
    /// When it died.
    pub at: SystemTime,
    /// The worker that gave it up: host and process.
    pub worker: String,
    /// The version of the program that the worker runs.
    pub version: String,
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
    /// Worker after worker died while it ran.
    CrashLoop,
    /// It was past its hard limit and never yielded, so nothing could stop it.
    Hung,
    /// It was to run again later, and its tier has no delay queues.
    NoDelays,
    /// Its delay ended, and the map has no tier for it.
    Unroutable,
    /// It waited for longer than the `ttl` of its tier, which is in Postgres. Queues of the broker do this themselves.
    Expired,
    /// It was a row of a tier on the broker, and the relay cannot publish it: it is larger than the broker takes, or its
    /// id or headers do not fit into a message.
    Unpublishable,
}

impl DeadReason {
    pub(crate) const ALL: [Self; 10] = [
        Self::RetriesExhausted,
        Self::Permanent,
        Self::UnknownTask,
        Self::Undecodable,
        Self::CrashLoop,
        Self::Hung,
        Self::NoDelays,
        Self::Unroutable,
        Self::Expired,
        Self::Unpublishable,
    ];

    /// The reason in words, as it is written to headers and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::RetriesExhausted => "retries exhausted",
            Self::Permanent => "permanent error",
            Self::UnknownTask => "unknown task",
            Self::Undecodable => "undecodable payload",
            Self::CrashLoop => "crash loop",
            Self::Hung => "hung",
            Self::NoDelays => "no delays",
            Self::Unroutable => "unroutable",
            Self::Expired => "expired",
            Self::Unpublishable => "unpublishable",
        }
    }

    /// The reason that [`as_str`](Self::as_str) wrote.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| reason.as_str() == text)
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
    /// The worker's process died.
    Crash,
}

impl FailureKind {
    const ALL: [Self; 5] = [
        Self::Error,
        Self::Panic,
        Self::TimedOut,
        Self::NotStarted,
        Self::Crash,
    ];

    /// The kind in words, as it is written to headers and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Panic => "panic",
            Self::TimedOut => "timed out",
            Self::NotStarted => "not started",
            Self::Crash => "crash",
        }
    }

    /// The kind that [`as_str`](Self::as_str) wrote.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == text)
    }
}

impl fmt::Display for FailureKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

impl Failure {
    pub(crate) fn new(kind: FailureKind, message: impl Into<String>) -> Self {
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

/// An attempt that failed. A message carries the last ones with it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FailedAttempt {
    /// Its number, from 1.
    pub attempt: u32,
    /// When it failed.
    pub at: SystemTime,
    /// In which way.
    pub kind: FailureKind,
    /// What happened, shortened.
    pub error: String,
}
