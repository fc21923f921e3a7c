//! The transaction of a handler, whose commit also completes its task.

#[cfg(feature = "postgres")]
use std::fmt;
#[cfg(feature = "postgres")]
use std::ops::{Deref, DerefMut};
#[cfg(feature = "postgres")]
use std::sync::Arc;

#[cfg(feature = "postgres")]
use futures_util::future::BoxFuture;
#[cfg(feature = "postgres")]
use sqlx::PgConnection;

#[cfg(feature = "postgres")]
use super::Context;
#[cfg(feature = "postgres")]
use crate::Error;
#[cfg(feature = "postgres")]
use crate::error::TransactionError;

/// A transaction in the app's database whose commit also completes the task: the handler's writes and the completion, or
/// neither. [`Context::transaction`] opens it.
///
/// It dereferences to sqlx's [`PgConnection`], so `&mut *transaction` is an executor of queries. Dropped without
/// a commit, it is rolled back.
#[cfg(feature = "postgres")]
#[must_use = "a transaction that is not committed is rolled back"]
pub struct TaskTransaction(Box<dyn OpenTransaction>);

#[cfg(feature = "postgres")]
impl Context {
    /// Opens a transaction in the app's database, whose [commit](TaskTransaction::commit) also completes this task. So
    /// what it writes is written once, however often the task runs.
    ///
    /// ```
    /// # use serde::{Deserialize, Serialize};
    /// use tierline::{Context, TaskError};
    ///
    /// #[derive(Serialize, Deserialize)]
    /// struct Report { account: i64 }
    /// # async fn compute(_: &Report) -> Result<String, TaskError> { Ok(String::new()) }
    ///
    /// async fn report(report: Report, cx: Context) -> Result<(), TaskError> {
    ///     let text = compute(&report).await?; // the long part, before the transaction
    ///     let mut tx = cx.transaction().await?;
    ///     sqlx::query("INSERT INTO reports (account, text) VALUES ($1, $2)")
    ///         .bind(report.account)
    ///         .bind(text)
    ///         .execute(&mut *tx)
    ///         .await?;
    ///     tx.commit().await?; // the row and the completion, or neither
    ///     Ok(())
    /// }
    /// ```
    ///
    /// Open it late: while it is open, Postgres can remove no old rows, and its locks hold up others. Its connection is
    /// one of the worker group's own, of which there are as many as the group has slots. Waiting for one,
    /// connecting and beginning takes five seconds at most.
    ///
    /// After the commit the task is done, whatever the handler returns. If the handler does not commit, what it returns
    /// counts as ever. The guide has a page on [effectively once](crate::guide::effectively_once).
    ///
    /// # Errors
    /// [`TransactionError::NoDatabase`] where the app, or the test, has no database; [`TransactionError::NoIdentity`] for a
    /// message that came without an id; [`TransactionError::StillOpen`], [`TransactionError::AlreadyCommitted`] and
    /// [`TransactionError::AttemptOver`] for more than one transaction of an attempt; and as every use of
    /// the database.
    pub async fn transaction(&self) -> Result<TaskTransaction, Error> {
        match &self.transactions().attempt {
            Some(attempt) => attempt.clone().begin().await,
            None => Err(Error::Transaction(TransactionError::NoDatabase {
                task: self.task().into(),
            })),
        }
    }
}

#[cfg(feature = "postgres")]
impl TaskTransaction {
    pub(crate) fn new(open: Box<dyn OpenTransaction>) -> Self {
        Self(open)
    }

    /// Completes the task and commits, within 30 seconds.
    ///
    /// # Errors
    /// [`TransactionError::TakenOver`] where another worker has the task now, and [`TransactionError::AlreadyDone`] where
    /// a copy of the task has committed before: everything is rolled back then.
    /// [`TransactionError::Interrupted`] where the answer was lost, so that nobody knows yet whether it is committed: return
    /// the error, and the next attempt finds out. And as every use of the database.
    pub async fn commit(self) -> Result<(), Error> {
        self.0.commit().await
    }

    /// Rolls everything back. The handler may then open another transaction.
    ///
    /// # Errors
    /// As every use of the database. Everything is rolled back in any case.
    pub async fn rollback(self) -> Result<(), Error> {
        self.0.rollback().await
    }
}

#[cfg(feature = "postgres")]
impl Deref for TaskTransaction {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        self.0.connection()
    }
}

#[cfg(feature = "postgres")]
impl DerefMut for TaskTransaction {
    fn deref_mut(&mut self) -> &mut PgConnection {
        self.0.connection_mut()
    }
}

#[cfg(feature = "postgres")]
impl fmt::Debug for TaskTransaction {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("TaskTransaction").finish_non_exhaustive()
    }
}

/// The transactions that an attempt may open. By default it can open none.
#[derive(Clone, Default)]
pub(crate) struct Transactions {
    #[cfg(feature = "postgres")]
    attempt: Option<Arc<dyn AttemptTransactions>>,
}

impl Transactions {
    #[cfg(feature = "postgres")]
    pub(crate) fn of(attempt: Arc<dyn AttemptTransactions>) -> Self {
        let attempt = Some(attempt);
        Self { attempt }
    }

    /// Ends the attempt: what it has not committed until now is never committed.
    pub(crate) fn end(&self) -> TransactionUse {
        #[cfg(feature = "postgres")]
        if let Some(attempt) = &self.attempt {
            return attempt.end();
        }
        TransactionUse::None
    }
}

/// What an attempt did with its transactions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(
    not(feature = "postgres"),
    expect(dead_code, reason = "transactions are in Postgres")
)]
pub(crate) enum TransactionUse {
    None,
    /// It opened one and did not commit.
    NotCommitted,
    /// The task is done: this attempt committed, or learned that another one has.
    Completed,
}

/// Opens the transactions of one attempt, and remembers how they ended.
#[cfg(feature = "postgres")]
pub(crate) trait AttemptTransactions: Send + Sync {
    fn begin(self: Arc<Self>) -> BoxFuture<'static, Result<TaskTransaction, Error>>;

    fn end(&self) -> TransactionUse;
}

/// A transaction of a handler. Dropped, it is rolled back.
#[cfg(feature = "postgres")]
pub(crate) trait OpenTransaction: Send + Sync {
    fn connection(&self) -> &PgConnection;

    fn connection_mut(&mut self) -> &mut PgConnection;

    fn commit(self: Box<Self>) -> BoxFuture<'static, Result<(), Error>>;

    fn rollback(self: Box<Self>) -> BoxFuture<'static, Result<(), Error>>;
}
