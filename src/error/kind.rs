/// The sorts of failures that a caller can tell apart. See [`Error::kind`](crate::Error::kind).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The topology file, the handlers of the program or the app's settings do not fit together. Correct them and
    /// start again.
    Configuration,
    /// A value that was given cannot be used: a URL, a duration, a filter, a payload, a priority.
    Invalid,
    /// Something was named that does not exist: a task, tier, group or schedule of the topology, or a dead letter.
    NotFound,
    /// The state of a task, a dead letter, an operation or a key does not allow what was asked. Nothing was changed.
    Conflict,
    /// The broker, its management API or the database was not reached, did not answer in time, or the connection
    /// was lost. Transient.
    Connection,
    /// The broker takes no more messages for now: a queue is full, or memory or disk runs short. Transient.
    Overloaded,
    /// The broker, its management API or the database does not let the user in, or the user lacks a permission.
    Permission,
    /// The broker does not match the topology, or the database this release: apply the topology, or migrate.
    Mismatch,
    /// The broker's version is too old for what was asked.
    Unsupported,
    /// The broker or the database refused a request for a reason of its own, and will again.
    Refused,
    /// The app was closed before.
    Closed,
    /// The operating system refused something to this process.
    System,
}

impl ErrorKind {
    /// The kind in one word, as labels of metrics and attributes of spans have it: `not_found`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Configuration => "configuration",
            Self::Invalid => "invalid",
            Self::NotFound => "not_found",
            Self::Conflict => "conflict",
            Self::Connection => "connection",
            Self::Overloaded => "overloaded",
            Self::Permission => "permission",
            Self::Mismatch => "mismatch",
            Self::Unsupported => "unsupported",
            Self::Refused => "refused",
            Self::Closed => "closed",
            Self::System => "system",
        }
    }
}
