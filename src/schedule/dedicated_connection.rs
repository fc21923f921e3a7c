//! A database connection for one purpose that must not wait for others.

use std::fmt;
use std::time::Duration;

use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions, PgConnection};
use tokio::time::timeout;

use crate::Error;
use crate::postgres::Database;

/// A dedicated connection, opened when it is needed and dropped when it does not answer.
///
/// A pool would not do here. It tests a returned connection without a time limit: if the connection is
/// half open, each abandoned statement would occupy a place in the pool for minutes.
pub(super) struct DedicatedConnection {
    database: Database,
    options: PgConnectOptions,
    connection: Option<PgConnection>,
}

impl DedicatedConnection {
    pub(super) fn to(database: &Database) -> Self {
        Self {
            options: PgConnectOptions::clone(&database.pool().connect_options()),
            database: database.clone(),
            connection: None,
        }
    }

    /// Runs a statement on the connection, within `limit` including the time to connect. If this future is
    /// dropped, the connection is closed.
    pub(super) async fn within<T>(
        &mut self,
        limit: Duration,
        tried: &str,
        work: impl AsyncFnOnce(&mut PgConnection) -> Result<T, sqlx::Error>,
    ) -> Result<T, Error> {
        let attempt = async {
            let mut connection = match self.connection.take() {
                Some(connection) => connection,
                None => self.options.connect().await?,
            };
            let done = work(&mut connection).await?;
            self.connection = Some(connection);
            Ok(done)
        };
        match timeout(limit, attempt).await {
            Ok(Ok(done)) => Ok(done),
            Ok(Err(error)) => Err(self.failed(tried, error)),
            Err(_) => {
                let silent = format!("no answer within {limit:?}").into();
                Err(self.database.interrupted(tried, silent))
            }
        }
    }

    /// The error of an operation on the database.
    pub(super) fn failed(&self, tried: &str, error: sqlx::Error) -> Error {
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
