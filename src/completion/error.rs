use crate::TaskId;
use crate::error::ErrorKind;

/// Why a handler's transaction cannot be opened or committed; see [`Context::transaction`](crate::Context::transaction).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransactionError {
    /// The app, or the test, has no database.
    #[error(
        "cannot open a transaction for task `{task}`: no database was given; call .postgres(…) on the builder of \
         the app, or .database(…) on that of a Tester"
    )]
    NoDatabase {
        /// The task's name.
        task: Box<str>,
    },

    /// The message came without what tells it from an equal one, so that a copy of it could not be recognised.
    #[error(
        "cannot open a transaction for task `{task}`: its message came without {missing}, so that it could not be \
         recognised if it came again; its publisher must set it, as the wire format says"
    )]
    NoIdentity {
        /// The task's name.
        task: Box<str>,
        /// What the message lacks: the property or the header.
        missing: &'static str,
    },

    /// The attempt has another transaction open.
    #[error(
        "cannot open a transaction for task `{task}`: this attempt has one open; commit it or roll it back before"
    )]
    StillOpen {
        /// The task's name.
        task: Box<str>,
    },

    /// The attempt has committed, and its task is done.
    #[error(
        "cannot open a transaction for task `{task}`: this attempt has committed, so its task is done; write everything \
         in one transaction"
    )]
    AlreadyCommitted {
        /// The task's name.
        task: Box<str>,
    },

    /// A transaction within it (a savepoint) was begun and neither committed nor rolled back, or its begin was dropped
    /// before the database answered: sqlx then rolls the outer one back. Nothing was committed, but for statements after such
    /// a begin.
    #[error(
        "cannot commit the transaction of task `{task}`: {problem}; end each transaction within it, and drop none of them \
         while it begins"
    )]
    Unbalanced {
        /// The task's name.
        task: Box<str>,
        /// What is wrong.
        problem: &'static str,
    },

    /// The attempt has ended: its handler has returned, or was given up. Nothing was committed.
    #[error(
        "cannot use a transaction of task `{task}`: its attempt is over, and nothing was committed; commit before the \
         handler returns and before its timeout"
    )]
    AttemptOver {
        /// The task's name.
        task: Box<str>,
    },

    /// Another worker has taken the task over, because this one could not extend its lease. Nothing was committed.
    #[error(
        "cannot commit the transaction of task `{task}` ({id}): another worker has taken the task over; everything was \
         rolled back, and the other worker's run counts"
    )]
    TakenOver {
        /// The task's name.
        task: Box<str>,
        /// Its id.
        id: TaskId,
    },

    /// A copy of the task has committed before. Nothing was committed, and the task counts as done.
    #[error(
        "cannot commit the transaction of task `{task}` ({id}): another run of it has committed before; everything was \
         rolled back, and the task is done"
    )]
    AlreadyDone {
        /// The task's name.
        task: Box<str>,
        /// Its id.
        id: TaskId,
    },

    /// The answer to the commit was lost. The transaction is committed or rolled back, and nobody knows yet.
    #[error(
        "cannot tell whether the transaction of task `{task}` is committed: {cause}; return this error from the handler: \
         the next attempt finds out, and runs only if it is not"
    )]
    Interrupted {
        /// The task's name.
        task: Box<str>,
        /// What happened.
        cause: Box<str>,
    },
}

impl TransactionError {
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            TransactionError::NoDatabase { .. } => ErrorKind::Configuration,
            TransactionError::NoIdentity { .. } | TransactionError::Unbalanced { .. } => {
                ErrorKind::Invalid
            }
            TransactionError::StillOpen { .. }
            | TransactionError::AlreadyCommitted { .. }
            | TransactionError::AttemptOver { .. }
            | TransactionError::TakenOver { .. }
            | TransactionError::AlreadyDone { .. } => ErrorKind::Conflict,
            TransactionError::Interrupted { .. } => ErrorKind::Connection,
        }
    }
}
