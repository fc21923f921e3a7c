//! The transactions of one attempt.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use sqlx::postgres::{PgDatabaseError, PgSeverity};
use tokio::time::timeout;

use super::marks::{Completion, complete};
use super::{Completions, RunningRow};
use crate::Error;
use crate::TaskId;
use crate::backlog::mark_begun;
use crate::error::TransactionError;
use crate::message::{CompletionKey, Received, Unidentified};
use crate::postgres::{ACQUIRE_LIMIT, HandlerTransaction, STATEMENT_LIMIT};
use crate::task::{AttemptTransactions, OpenTransaction, TaskTransaction, TransactionUse};

pub(super) struct Attempt {
    completions: Arc<Completions>,
    received: Arc<Received>,
    row: Option<RunningRow>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    phase: Phase,
    /// Whether the handler has ended. It may have left the transaction to somebody else.
    is_over: bool,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Phase {
    #[default]
    Unused,
    Open,
    NotCommitted,
    Completed,
}

impl Attempt {
    pub(super) fn new(
        completions: Arc<Completions>,
        received: Arc<Received>,
        row: Option<RunningRow>,
    ) -> Arc<Self> {
        Arc::new(Self {
            completions,
            received,
            row,
            state: Mutex::default(),
        })
    }

    async fn open(self: Arc<Self>) -> Result<TaskTransaction, Error> {
        let opening = self.clone().start()?;
        let key = self.key()?;
        let connections = &self.completions.connections;
        let tried = format!("open a transaction for task `{}`", self.task());
        if let Some(row) = &self.row {
            // Marked later, its row would be newer than the snapshot of a transaction that is REPEATABLE READ, which could
            // not complete it.
            let run = row.run;
            let marking = connections.within(ACQUIRE_LIMIT, &tried, move |mut connection| {
                let marking = async move { mark_begun(&mut connection, &[run]).await.map(drop) };
                marking.boxed()
            });
            marking.await?;
        }
        let transaction = connections.begin(&tried).await?;
        Ok(TaskTransaction::new(Box::new(OpenAttempt {
            transaction,
            key,
            opening,
        })))
    }

    /// The transaction is open from here on, until what is returned is dropped.
    fn start(self: Arc<Self>) -> Result<Opening, TransactionError> {
        let task = || self.task().into();
        let mut state = self.state();
        match state.phase {
            Phase::Completed => return Err(TransactionError::AlreadyCommitted { task: task() }),
            Phase::Open => return Err(TransactionError::StillOpen { task: task() }),
            _ if state.is_over => return Err(TransactionError::AttemptOver { task: task() }),
            Phase::Unused | Phase::NotCommitted => state.phase = Phase::Open,
        }
        drop(state);
        Ok(Opening(self))
    }

    /// The key of the task's mark. A row needs none, because its run is named by a token that is never used again. With
    /// one, a twin of the row is recognised: one that a repeated publish or a move between the homes of its tier left.
    fn key(&self) -> Result<Option<CompletionKey>, TransactionError> {
        let missing = match self.received.completion_key(&self.completions.app) {
            Ok(key) => return Ok(Some(key)),
            Err(_) if self.row.is_some() => return Ok(None),
            Err(Unidentified::NoId) => "the property message_id",
            Err(Unidentified::NoTime) => "the header tierline-enqueued-at",
        };
        let task = self.task().into();
        Err(TransactionError::NoIdentity { task, missing })
    }

    fn task(&self) -> &str {
        let message = self.received.message();
        message.map_or("", |message| &message.task)
    }

    fn id(&self) -> TaskId {
        self.received.id().clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AttemptTransactions for Attempt {
    fn begin(self: Arc<Self>) -> BoxFuture<'static, Result<TaskTransaction, Error>> {
        Box::pin(self.open())
    }

    fn end(&self) -> TransactionUse {
        let mut state = self.state();
        state.is_over = true;
        match state.phase {
            Phase::Unused => TransactionUse::None,
            Phase::Open | Phase::NotCommitted => TransactionUse::NotCommitted,
            Phase::Completed => TransactionUse::Completed,
        }
    }
}

/// While this lives, the attempt has a transaction open.
struct Opening(Arc<Attempt>);

impl Drop for Opening {
    fn drop(&mut self) {
        let mut state = self.0.state();
        if state.phase == Phase::Open {
            state.phase = Phase::NotCommitted;
        }
    }
}

/// An open transaction.
struct OpenAttempt {
    transaction: HandlerTransaction,
    key: Option<CompletionKey>,
    opening: Opening,
}

impl OpenAttempt {
    async fn complete_and_commit(mut self) -> Result<(), Error> {
        let attempt = self.opening.0.clone();
        let task = || attempt.task().into();
        if attempt.state().is_over {
            return Err(TransactionError::AttemptOver { task: task() }.into());
        }
        let problem = match self.transaction.depth() {
            1 => None,
            0 => Some(
                "the begin of a transaction within it was dropped or failed, which rolled everything back",
            ),
            _ => Some("a transaction within it is open"),
        };
        if let Some(problem) = problem {
            let task = task();
            return Err(TransactionError::Unbalanced { task, problem }.into());
        }
        let (app, row) = (&attempt.completions.app, attempt.row.as_ref());
        let database = attempt.completions.connections.database();
        let tried = format!("complete task `{}`", attempt.task());
        let completing = complete(&mut self.transaction, app, self.key, row);
        match database.within(STATEMENT_LIMIT, &tried, completing).await? {
            Completion::Completed => {}
            Completion::AlreadyDone => {
                attempt.state().phase = Phase::Completed;
                let (task, id) = (task(), attempt.id());
                return Err(TransactionError::AlreadyDone { task, id }.into());
            }
            Completion::TakenOver => {
                let (task, id) = (task(), attempt.id());
                return Err(TransactionError::TakenOver { task, id }.into());
            }
        }
        let Self {
            transaction,
            opening: _opening,
            ..
        } = self;
        let cause = match timeout(STATEMENT_LIMIT, transaction.commit()).await {
            Ok(Ok(())) => {
                attempt.state().phase = Phase::Completed;
                return Ok(());
            }
            Ok(Err(error)) if is_rolled_back(&error) => {
                let tried = format!("commit the transaction of task `{}`", attempt.task());
                return Err(database.failed(&tried, error));
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {STATEMENT_LIMIT:?}"),
        };
        let (task, cause) = (task(), cause.into());
        Err(TransactionError::Interrupted { task, cause }.into())
    }
}

impl OpenTransaction for OpenAttempt {
    fn connection(&self) -> &sqlx::PgConnection {
        &self.transaction
    }

    fn connection_mut(&mut self) -> &mut sqlx::PgConnection {
        &mut self.transaction
    }

    fn commit(self: Box<Self>) -> BoxFuture<'static, Result<(), Error>> {
        Box::pin(self.complete_and_commit())
    }

    fn rollback(self: Box<Self>) -> BoxFuture<'static, Result<(), Error>> {
        Box::pin(async move {
            let Self {
                transaction,
                opening,
                ..
            } = *self;
            let attempt = &opening.0;
            let database = attempt.completions.connections.database();
            let tried = format!("roll the transaction of task `{}` back", attempt.task());
            let rolling_back = transaction.rollback();
            database.within(STATEMENT_LIMIT, &tried, rolling_back).await
        })
    }
}

/// Whether an answer to a commit says that nothing was committed, as a deferred constraint does. A server that ends the
/// connection, or a pooler that lost it, does not know.
fn is_rolled_back(error: &sqlx::Error) -> bool {
    let said = error.as_database_error();
    let said = said.and_then(|said| said.try_downcast_ref::<PgDatabaseError>());
    said.is_some_and(|said| said.severity() == PgSeverity::Error && !said.code().starts_with("08"))
}
