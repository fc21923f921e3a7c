//! A database connection for one purpose that must not wait for others.

use std::fmt;
use std::time::Duration;

use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions, Executor, SqlStr};
use tokio::time::timeout;

use super::{Database, PgConnection};
use crate::Error;

/// A dedicated connection, opened when it is needed and dropped when it does not answer.
///
/// A pool would not do here. It tests a returned connection without a time limit: if the connection is
/// half open, each abandoned statement would occupy a place in the pool for minutes.
pub(crate) struct DedicatedConnection {
    database: Database,
    options: PgConnectOptions,
    /// What is run once on each new connection. Behind a transaction pooler it would change the settings of other
    /// clients, so there it is a part of `begin`.
    setup: Option<&'static str>,
    /// Behind a pooler: how a transaction begins.
    begin: Option<SqlStr>,
    connection: Option<sqlx::PgConnection>,
}

impl DedicatedConnection {
    pub(crate) fn to(database: &Database) -> Self {
        Self {
            options: PgConnectOptions::clone(&database.pool().connect_options()),
            database: database.clone(),
            setup: None,
            begin: database.pool().begin_statement(None),
            connection: None,
        }
    }

    /// The same, with settings for its statements, as statements `SET …`.
    pub(crate) fn with_setup(database: &Database, setup: &'static str) -> Self {
        Self {
            setup: Some(setup).filter(|_| !database.is_behind_pooler()),
            begin: database.pool().begin_statement(Some(setup)),
            ..Self::to(database)
        }
    }

    /// Runs a statement on the connection, within `limit` including the time to connect. If this future is
    /// dropped, the connection is closed.
    pub(crate) async fn within<T>(
        &mut self,
        limit: Duration,
        tried: &str,
        work: impl AsyncFnOnce(&mut PgConnection<'_>) -> Result<T, sqlx::Error>,
    ) -> Result<T, Error> {
        let mut is_connected = false;
        let attempt = async {
            let mut connection = match self.connection.take() {
                Some(connection) => connection,
                None => self.connect().await?,
            };
            is_connected = true;
            let begin = self.begin.clone();
            let done = work(&mut PgConnection::new(&mut connection, begin)).await?;
            self.connection = Some(connection);
            Ok(done)
        };
        match timeout(limit, attempt).await {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(error)) => Err(self.failed(tried, error)),
            Err(_) if is_connected => {
                let silent = format!("no answer within {limit:?}").into();
                Err(self.database.interrupted(tried, silent))
            }
            // Nothing was sent.
            Err(_) => Err(self.failed(tried, sqlx::Error::PoolTimedOut)),
        }
    }

    async fn connect(&self) -> Result<sqlx::PgConnection, sqlx::Error> {
        self.database.pool().refuse_pooler().await?;
        let mut connection = self.options.connect().await?;
        if let Some(setup) = self.setup {
            connection.execute(setup).await?;
        }
        Ok(connection)
    }

    /// The error of an operation on the database.
    pub(crate) fn failed(&self, tried: &str, error: sqlx::Error) -> Error {
        self.database.failed(tried, error)
    }
}

/// Without the options, which contain the password.
impl fmt::Debug for DedicatedConnection {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("DedicatedConnection")
            .field("database", &self.database)
            .field("is_connected", &self.connection.is_some())
            .finish_non_exhaustive()
    }
}
