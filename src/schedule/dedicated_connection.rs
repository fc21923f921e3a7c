//! A connection to the database for one thing that must not wait for others.

use std::fmt;
use std::time::Duration;

use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions, PgConnection};
use tokio::time::timeout;

use crate::Error;
use crate::postgres::Database;

/// A connection of its own, made when it is needed and dropped when it does not answer.
///
/// A pool would not do here. It tests a connection that comes back, without a limit: on one that is
/// half open, each statement that was given up would take a place in the pool for minutes.
pub(super) struct Line {
    database: Database,
    options: PgConnectOptions,
    connection: Option<PgConnection>,
}

impl Line {
    pub(super) fn to(database: &Database) -> Self {
        Self {
            options: PgConnectOptions::clone(&database.pool().connect_options()),
            database: database.clone(),
            connection: None,
        }
    }

    /// Does something on the connection, at most for so long, connecting included. Dropped while it
    /// is under way, it takes the connection with it.
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
            Ok(Err(error)) => Err(self.failed(tried, &error)),
            Err(_) => {
                let silent = sqlx::Error::Protocol(format!("no answer within {limit:?}"));
                Err(self.failed(tried, &silent))
            }
        }
    }

    /// The error for something that was tried on the database.
    pub(super) fn failed(&self, tried: &str, error: &sqlx::Error) -> Error {
        self.database.failed(tried, error)
    }
}

/// Without the options, which have the password.
impl fmt::Debug for Line {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Line")
            .field("database", &self.database)
            .field("is_connected", &self.connection.is_some())
            .finish_non_exhaustive()
    }
}
