//! The pool and its connections. Every statement of tierline runs on one of these types, which know how statements
//! have to run behind a transaction pooler.
//!
//! Such a pooler gives a client a server connection for the length of a transaction, and the next one may be another.
//! So nothing may be left on a connection and counted on later: no prepared statement, no setting, no `LISTEN`. sqlx
//! sends a statement in two steps, to prepare and to execute it, and outside of a transaction even these two may reach
//! different server connections. Behind a pooler, therefore, a statement is prepared without a name, and a statement
//! outside of a transaction gets one of its own.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, OnceLock};

use futures_util::future::BoxFuture;
use futures_util::stream::{self, BoxStream};
use futures_util::{FutureExt, StreamExt, TryFutureExt, TryStreamExt};
use sqlx::error::BoxDynError;
use sqlx::pool::PoolConnection;
use sqlx::postgres::{
    PgArguments, PgConnectOptions, PgPool, PgPoolOptions, PgQueryResult, PgRow, PgStatement,
    PgTransactionManager, PgTypeInfo,
};
use sqlx::{AssertSqlSafe, Connection, Either, Execute, Executor, Postgres, SqlSafeStr, SqlStr};
use sqlx_core::transaction::TransactionManager;

use super::pooler;

/// sqlx's pool, and whether a transaction pooler is between it and Postgres.
#[derive(Clone)]
pub(crate) struct Pool {
    pool: PgPool,
    is_behind_pooler: bool,
    /// Set when the server was found to be no transaction pooler.
    checked: Arc<OnceLock<()>>,
}

impl Pool {
    pub(super) fn new(pool: PgPool) -> Self {
        Self {
            pool,
            is_behind_pooler: false,
            checked: Arc::default(),
        }
    }

    pub(super) fn behind_pooler(self, is_behind_pooler: bool) -> Self {
        Self {
            is_behind_pooler,
            ..self
        }
    }

    pub(crate) fn is_behind_pooler(&self) -> bool {
        self.is_behind_pooler
    }

    pub(crate) fn connect_options(&self) -> Arc<PgConnectOptions> {
        self.pool.connect_options()
    }

    pub(super) fn options(&self) -> &PgPoolOptions {
        self.pool.options()
    }

    pub(super) async fn close(&self) {
        self.pool.close().await;
    }

    pub(crate) async fn acquire(&self) -> Result<PgConnection<'static>, sqlx::Error> {
        self.refuse_pooler().await?;
        Ok(PgConnection {
            inner: Inner::Pool(self.pool.acquire().await?),
            begin: self.begin_statement(None),
        })
    }

    pub(crate) async fn begin(&self) -> Result<Transaction<'static>, sqlx::Error> {
        self.refuse_pooler().await?;
        let begin = self.begin_statement(None);
        let transaction = match begin.clone() {
            Some(statement) => self.pool.begin_with(statement).await?,
            None => self.pool.begin().await?,
        };
        Ok(Transaction::new(transaction, begin))
    }

    /// Fails if the server turns out to be a transaction pooler and the app did not say so.
    pub(super) async fn refuse_pooler(&self) -> Result<(), sqlx::Error> {
        if self.is_behind_pooler {
            return Ok(());
        }
        // Each caller asks by itself until one is answered: none waits for another tier's attempt.
        if self.checked.get().is_none() {
            pooler::refuse(&self.pool.connect_options()).await?;
            let _ = self.checked.set(());
        }
        Ok(())
    }

    /// How a transaction begins behind a pooler: with settings that end with it. `setup` has the settings, as
    /// statements `SET …`.
    pub(super) fn begin_statement(&self, setup: Option<&str>) -> Option<SqlStr> {
        self.is_behind_pooler.then(|| match setup {
            None => "BEGIN".into_sql_str(),
            Some(setup) => {
                let settings = setup.replace("SET ", "SET LOCAL ");
                AssertSqlSafe(format!("BEGIN; {settings}")).into_sql_str()
            }
        })
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Pool")
            .field("is_behind_pooler", &self.is_behind_pooler)
            .finish_non_exhaustive()
    }
}

/// sqlx's connection, in or outside of a transaction, and how statements have to run on it.
pub(crate) struct PgConnection<'c> {
    inner: Inner<'c>,
    /// Behind a pooler: how a transaction begins.
    begin: Option<SqlStr>,
}

enum Inner<'c> {
    Own(&'c mut sqlx::PgConnection),
    /// A connection of the app's own, most likely in a transaction.
    Caller(&'c mut sqlx::PgConnection),
    Pool(PoolConnection<Postgres>),
    Transaction(sqlx::Transaction<'c, Postgres>),
}

impl<'c> PgConnection<'c> {
    pub(super) fn new(connection: &'c mut sqlx::PgConnection, begin: Option<SqlStr>) -> Self {
        Self {
            inner: Inner::Own(connection),
            begin,
        }
    }

    /// A connection that the app lends us, within its own transaction.
    pub(crate) fn of_caller(connection: &'c mut sqlx::PgConnection, pool: &Pool) -> Self {
        Self {
            inner: Inner::Caller(connection),
            begin: pool.begin_statement(None),
        }
    }

    /// Whether a transaction is open that was begun by sqlx. Of one that was begun by a plain statement it does not know.
    pub(crate) fn is_in_sqlx_transaction(&mut self) -> bool {
        PgTransactionManager::get_transaction_depth(self.raw()) > 0
    }

    /// Begins a transaction, or within one a savepoint.
    pub(crate) async fn begin(&mut self) -> Result<Transaction<'_>, sqlx::Error> {
        let begin = self.begin.clone();
        let statement = begin.clone().filter(|_| !self.is_in_transaction());
        let transaction = match statement {
            Some(statement) => self.raw().begin_with(statement).await?,
            None => self.raw().begin().await?,
        };
        Ok(Transaction::new(transaction, begin))
    }

    /// Frees the memory that large values have taken.
    pub(crate) fn shrink_buffers(&mut self) {
        self.raw().shrink_buffers();
    }

    fn is_in_transaction(&self) -> bool {
        matches!(self.inner, Inner::Transaction(_) | Inner::Caller(_))
    }

    fn raw(&mut self) -> &mut sqlx::PgConnection {
        match &mut self.inner {
            Inner::Own(connection) | Inner::Caller(connection) => connection,
            Inner::Pool(connection) => connection,
            Inner::Transaction(transaction) => transaction,
        }
    }

    /// Runs a statement behind a pooler.
    async fn run_pooled<'q>(&mut self, query: impl Execute<'q, Postgres> + 'q) -> Results {
        let query = Unnamed(query);
        if self.is_in_transaction() {
            return self.raw().fetch_many(query).try_collect().await;
        }
        let mut transaction = self.begin().await?;
        let results = transaction.raw().fetch_many(query).try_collect().await?;
        transaction.commit().await?;
        Ok(results)
    }
}

impl fmt::Debug for PgConnection<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("PgConnection").finish_non_exhaustive()
    }
}

/// A transaction. Dropped, it is rolled back.
#[derive(Debug)]
pub(crate) struct Transaction<'c>(PgConnection<'c>);

impl<'c> Transaction<'c> {
    fn new(transaction: sqlx::Transaction<'c, Postgres>, begin: Option<SqlStr>) -> Self {
        Self(PgConnection {
            inner: Inner::Transaction(transaction),
            begin,
        })
    }

    pub(crate) async fn commit(self) -> Result<(), sqlx::Error> {
        match self.0.inner {
            Inner::Transaction(transaction) => transaction.commit().await,
            Inner::Own(_) | Inner::Caller(_) | Inner::Pool(_) => Ok(()),
        }
    }
}

impl<'c> Deref for Transaction<'c> {
    type Target = PgConnection<'c>;

    fn deref(&self) -> &PgConnection<'c> {
        &self.0
    }
}

impl<'c> DerefMut for Transaction<'c> {
    fn deref_mut(&mut self) -> &mut PgConnection<'c> {
        &mut self.0
    }
}

type Step = Either<PgQueryResult, PgRow>;
type Results = Result<Vec<Step>, sqlx::Error>;

impl<'c> Executor<'c> for &'c mut PgConnection<'_> {
    type Database = Postgres;

    fn fetch_many<'e, 'q: 'e, E>(self, query: E) -> BoxStream<'e, Result<Step, sqlx::Error>>
    where
        'c: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        match self.begin {
            Some(_) => steps(self.run_pooled(query)),
            None => self.raw().fetch_many(query),
        }
    }

    fn fetch_optional<'e, 'q: 'e, E>(
        self,
        query: E,
    ) -> BoxFuture<'e, Result<Option<PgRow>, sqlx::Error>>
    where
        'c: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        match self.begin {
            Some(_) => self.run_pooled(query).map_ok(first_row).boxed(),
            None => self.raw().fetch_optional(query),
        }
    }

    fn prepare_with<'e>(
        self,
        sql: SqlStr,
        parameters: &'e [PgTypeInfo],
    ) -> BoxFuture<'e, Result<PgStatement, sqlx::Error>>
    where
        'c: 'e,
    {
        match self.begin {
            Some(_) => not_prepared(),
            None => self.raw().prepare_with(sql, parameters),
        }
    }

    /// A part of the trait only with sqlx's feature `macros`. tierline enables the feature, because an app may too.
    fn describe<'e>(
        self,
        sql: SqlStr,
    ) -> BoxFuture<'e, Result<sqlx::Describe<Postgres>, sqlx::Error>>
    where
        'c: 'e,
    {
        match self.begin {
            Some(_) => not_prepared(),
            None => self.raw().describe(sql),
        }
    }
}

/// Each statement runs on a connection of the pool, and is committed.
impl<'p> Executor<'p> for &'p Pool {
    type Database = Postgres;

    fn fetch_many<'e, 'q: 'e, E>(self, query: E) -> BoxStream<'e, Result<Step, sqlx::Error>>
    where
        'p: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        steps(async move {
            let mut connection = self.acquire().await?;
            connection.fetch_many(query).try_collect().await
        })
    }

    fn fetch_optional<'e, 'q: 'e, E>(
        self,
        query: E,
    ) -> BoxFuture<'e, Result<Option<PgRow>, sqlx::Error>>
    where
        'p: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        Box::pin(async move { self.acquire().await?.fetch_optional(query).await })
    }

    fn prepare_with<'e>(
        self,
        sql: SqlStr,
        parameters: &'e [PgTypeInfo],
    ) -> BoxFuture<'e, Result<PgStatement, sqlx::Error>>
    where
        'p: 'e,
    {
        Box::pin(async move { self.acquire().await?.prepare_with(sql, parameters).await })
    }

    fn describe<'e>(
        self,
        sql: SqlStr,
    ) -> BoxFuture<'e, Result<sqlx::Describe<Postgres>, sqlx::Error>>
    where
        'p: 'e,
    {
        Box::pin(async move { self.acquire().await?.describe(sql).await })
    }
}

/// A statement that is prepared without a name.
struct Unnamed<E>(E);

impl<'q, E: Execute<'q, Postgres>> Execute<'q, Postgres> for Unnamed<E> {
    fn sql(self) -> SqlStr {
        self.0.sql()
    }

    fn statement(&self) -> Option<&PgStatement> {
        self.0.statement()
    }

    fn take_arguments(&mut self) -> Result<Option<PgArguments>, BoxDynError> {
        self.0.take_arguments()
    }

    fn persistent(&self) -> bool {
        false
    }
}

/// The results of a statement that has ended, as the stream that sqlx asks for.
fn steps<'e>(
    running: impl Future<Output = Results> + Send + 'e,
) -> BoxStream<'e, Result<Step, sqlx::Error>> {
    let steps = running.map_ok(|results| stream::iter(results.into_iter().map(Ok)));
    steps.try_flatten_stream().boxed()
}

fn first_row(results: Vec<Step>) -> Option<PgRow> {
    results.into_iter().find_map(Either::right)
}

fn not_prepared<'e, T: Send + 'e>() -> BoxFuture<'e, Result<T, sqlx::Error>> {
    let cause = "a transaction pooler keeps no prepared statements";
    Box::pin(async move { Err(sqlx::Error::Protocol(cause.to_owned())) })
}
