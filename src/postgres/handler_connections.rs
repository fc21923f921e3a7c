//! The connections of a worker group's handlers.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use sqlx::postgres::{PgConnectOptions, PgTransactionManager};
use sqlx::{ConnectOptions, Connection, Executor};
use sqlx_core::transaction::TransactionManager;
use tokio::runtime::Handle as Runtime;
use tokio::sync::{self, OwnedMutexGuard, OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::{ACQUIRE_LIMIT, Database, PgConnection};
use crate::Error;
use crate::error::DatabaseError;

/// How long a connection stays open that nobody uses.
const IDLE_FOR: Duration = Duration::from_secs(10);
/// How long a connection that was idle may take to answer, before a new one is opened in its place.
const IDLE_ANSWER: Duration = Duration::from_secs(1);
/// How long a connection whose transaction was dropped may take to roll it back, before it is closed.
const ROLLBACK_LIMIT: Duration = Duration::from_millis(250);

/// How Postgres shows the connections, unless the app's own pool says otherwise.
const APPLICATION_NAME: &str = "tierline handler";

/// Settings of each connection, except behind a transaction pooler. The server notices within a minute that the machine
/// of a handler is gone, and within two seconds that a handler was dropped while its statement ran. Otherwise their locks
/// would stay, and hold up the next attempt. Postgres 13, and some systems, do not know the last setting.
const SETUP: &str = "SET tcp_keepalives_idle = 20; SET tcp_keepalives_interval = 10; SET tcp_keepalives_count = 3; \
    DO $$ BEGIN PERFORM set_config('client_connection_check_interval', '2s', false); \
    EXCEPTION WHEN OTHERS THEN NULL; END $$";

/// A few connections, opened when they are needed and closed when they are idle.
///
/// sqlx's pool would not do here. It tests a connection that comes back without a time limit: if the
/// connection is half open, it would occupy a place in the pool for minutes.
pub(crate) struct HandlerConnections {
    database: Database,
    options: PgConnectOptions,
    most: usize,
    permits: Arc<Semaphore>,
    idle: Mutex<Idle>,
}

/// A connection. Its user holds the lock, so that it can be lent and come back without being moved.
type Shared = Arc<sync::Mutex<sqlx::PgConnection>>;
type Lent = OwnedMutexGuard<sqlx::PgConnection>;

#[derive(Default)]
struct Idle {
    /// The latest last, with when it came back.
    connections: Vec<(Shared, Instant)>,
    /// Whether a task closes those that stay.
    is_reaped: bool,
}

impl HandlerConnections {
    /// At most so many connections to a database.
    pub(crate) fn new(database: &Database, most: usize) -> Arc<Self> {
        let most = most.max(1);
        let options = PgConnectOptions::clone(&database.pool().connect_options());
        Arc::new(Self {
            // Whose transaction holds others up is to be seen.
            options: match database.is_lent {
                true => options,
                false => options.application_name(APPLICATION_NAME),
            },
            database: database.clone(),
            most,
            permits: Arc::new(Semaphore::new(most)),
            idle: Mutex::default(),
        })
    }

    pub(crate) fn database(&self) -> &Database {
        &self.database
    }

    /// Begins a transaction, within five seconds.
    ///
    /// # Errors
    /// As every use of the database. The error contains `tried`, after "cannot".
    pub(crate) async fn begin(self: &Arc<Self>, tried: &str) -> Result<HandlerTransaction, Error> {
        let lending = self.lend(ACQUIRE_LIMIT, tried, |connection| {
            PgTransactionManager::begin(connection, None).boxed()
        });
        let (connection, permit, ()) = lending.await?;
        Ok(HandlerTransaction {
            connection,
            permit: Some(permit),
            pool: self.clone(),
            state: State::Open,
        })
    }

    /// Runs a statement on a connection, within `limit` including the time to connect.
    ///
    /// # Errors
    /// As every use of the database. The error contains `tried`, after "cannot".
    pub(crate) async fn within<T>(
        self: &Arc<Self>,
        limit: Duration,
        tried: &str,
        work: impl for<'c> Fn(PgConnection<'c>) -> BoxFuture<'c, Result<T, sqlx::Error>>,
    ) -> Result<T, Error> {
        let begin = self.database.pool().begin_statement(None);
        let lending = self.lend(limit, tried, |connection| {
            work(PgConnection::new(connection, begin.clone()))
        });
        let (connection, _permit, answer) = lending.await?;
        self.keep(&connection);
        Ok(answer)
    }

    /// A connection on which `first` was done: an idle one if it still answers, else a new one.
    async fn lend<T>(
        &self,
        limit: Duration,
        tried: &str,
        first: impl for<'c> Fn(&'c mut sqlx::PgConnection) -> BoxFuture<'c, Result<T, sqlx::Error>>,
    ) -> Result<(Lent, OwnedSemaphorePermit, T), Error> {
        let deadline = Instant::now() + limit;
        let permit = timeout_at(deadline, self.permits.clone().acquire_owned()).await;
        let Ok(Ok(permit)) = permit else {
            let most = self.most;
            let cause =
                format!("all {most} connections of the group's handlers were in use for {limit:?}");
            return Err(self.unreachable(tried, &cause));
        };
        if let Some(connection) = self.take_idle() {
            let mut connection = connection.lock_owned().await;
            match timeout(IDLE_ANSWER.min(limit / 2), first(&mut connection)).await {
                Ok(Ok(answer)) => return Ok((connection, permit, answer)),
                // The others came from the same server.
                _ => self.idle().connections.clear(),
            }
        }
        let opening = async {
            let mut connection = self.connect().await?;
            let answer = first(&mut connection).await?;
            Ok((connection, answer))
        };
        match timeout_at(deadline, opening).await {
            Ok(Ok((connection, answer))) => {
                let connection = Shared::new(connection.into()).lock_owned().await;
                Ok((connection, permit, answer))
            }
            Ok(Err(error)) => Err(self.database.failed(tried, error)),
            Err(_) => Err(self.unreachable(tried, &format!("no answer within {limit:?}"))),
        }
    }

    async fn connect(&self) -> Result<sqlx::PgConnection, sqlx::Error> {
        self.database.pool().refuse_pooler().await?;
        let mut connection = self.options.connect().await?;
        if !self.database.is_behind_pooler() {
            connection.execute(SETUP).await?;
        }
        Ok(connection)
    }

    fn unreachable(&self, tried: &str, cause: &str) -> Error {
        Error::Database(DatabaseError::Unreachable {
            tried: self.database.tried(tried),
            cause: cause.into(),
            source: None,
        })
    }

    fn take_idle(&self) -> Option<Shared> {
        let latest = self.idle().connections.pop();
        latest.map(|(connection, _)| connection)
    }

    /// Lends the connection to others, as soon as it is unlocked.
    fn keep(self: &Arc<Self>, connection: &Lent) {
        let mut idle = self.idle();
        let connection = OwnedMutexGuard::mutex(connection).clone();
        idle.connections.push((connection, Instant::now()));
        if !idle.is_reaped
            && let Ok(runtime) = Runtime::try_current()
        {
            idle.is_reaped = true;
            runtime.spawn(close_idle(Arc::downgrade(self)));
        }
    }

    fn idle(&self) -> MutexGuard<'_, Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves nothing on a server connection that a transaction pooler gives to other clients next: a handler's statements
    /// have names.
    async fn forget_statements(
        &self,
        connection: &mut sqlx::PgConnection,
    ) -> Result<(), sqlx::Error> {
        match self.database.is_behind_pooler() {
            true => connection.clear_cached_statements().await,
            false => Ok(()),
        }
    }

    async fn roll_back(&self, connection: &mut sqlx::PgConnection) -> Result<(), sqlx::Error> {
        self.forget_statements(connection).await?;
        // A handler may have left savepoints.
        while PgTransactionManager::get_transaction_depth(connection) > 0 {
            PgTransactionManager::rollback(connection).await?;
        }
        Ok(())
    }
}

/// Closes connections that nobody uses, until there is none.
async fn close_idle(pool: Weak<HandlerConnections>) {
    loop {
        sleep(IDLE_FOR).await;
        let Some(pool) = pool.upgrade() else {
            return;
        };
        let mut idle = pool.idle();
        idle.connections
            .retain(|(_, since)| since.elapsed() < IDLE_FOR);
        if idle.connections.is_empty() {
            idle.is_reaped = false;
            return;
        }
    }
}

impl fmt::Debug for HandlerConnections {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("HandlerConnections")
            .field("database", &self.database)
            .field("most", &self.most)
            .finish_non_exhaustive()
    }
}

/// A transaction on one of the connections. Dropped, it is rolled back.
pub(crate) struct HandlerTransaction {
    connection: Lent,
    permit: Option<OwnedSemaphorePermit>,
    pool: Arc<HandlerConnections>,
    state: State,
}

enum State {
    Open,
    /// It is being committed or rolled back, or that failed: nobody knows what the connection is good for.
    Ending,
    Ended,
}

impl HandlerTransaction {
    /// How many transactions are open, with those within it, which are savepoints. sqlx rolls everything back where the
    /// begin of one was dropped: then it is 0.
    pub(crate) fn depth(&self) -> usize {
        PgTransactionManager::get_transaction_depth(&self.connection)
    }

    pub(crate) async fn commit(mut self) -> Result<(), sqlx::Error> {
        self.state = State::Ending;
        self.pool.forget_statements(&mut self.connection).await?;
        PgTransactionManager::commit(&mut self.connection).await?;
        self.state = State::Ended;
        Ok(())
    }

    pub(crate) async fn rollback(mut self) -> Result<(), sqlx::Error> {
        self.state = State::Ending;
        self.pool.roll_back(&mut self.connection).await?;
        self.state = State::Ended;
        Ok(())
    }
}

impl Deref for HandlerTransaction {
    type Target = sqlx::PgConnection;

    fn deref(&self) -> &sqlx::PgConnection {
        &self.connection
    }
}

impl DerefMut for HandlerTransaction {
    fn deref_mut(&mut self) -> &mut sqlx::PgConnection {
        &mut self.connection
    }
}

impl Drop for HandlerTransaction {
    fn drop(&mut self) {
        match self.state {
            State::Ended => self.pool.keep(&self.connection),
            // Without a runtime, and in this state, the connection is closed, which rolls back as well.
            State::Ending => {}
            State::Open => {
                let Ok(runtime) = Runtime::try_current() else {
                    return;
                };
                let connection = OwnedMutexGuard::mutex(&self.connection).clone();
                let (pool, permit) = (self.pool.clone(), self.permit.take());
                runtime.spawn(async move {
                    let mut connection = connection.lock_owned().await;
                    let rolling_back = pool.roll_back(&mut connection);
                    if let Ok(Ok(())) = timeout(ROLLBACK_LIMIT, rolling_back).await {
                        pool.keep(&connection);
                    }
                    drop(permit);
                });
            }
        }
    }
}
