//! The database: a pool of connections to Postgres, and our own schema in it.
//!
//! Everything of ours is in the schema `tierline`, the list of applied migrations included, so that
//! it shares a database with an app that uses sqlx and migrations of its own.

mod address;
mod migrate;
mod time;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use sqlx::ConnectOptions;
use sqlx::postgres::{PgConnectOptions, PgDatabaseError, PgPool, PgPoolOptions, PgSeverity};
use tokio::time::timeout;

use crate::Error;
pub use migrate::Migrated;
pub(crate) use time::Time;

/// How long it may take until a connection is free, connecting and logging in included.
const ACQUIRE_LIMIT: Duration = Duration::from_secs(5);
/// How long one statement or transaction may take unless it says otherwise.
pub(crate) const STATEMENT_LIMIT: Duration = Duration::from_secs(30);
/// How many connections a process has at most: its work is a few batches at a time.
const MAX_CONNECTIONS: u32 = 8;

/// A database that tierline keeps things in. Cheap to clone; all clones share one pool of
/// connections.
///
/// It connects when it is first used, and again whenever it has to. Postgres may be down when it is
/// made and come and go later: what is tried meanwhile fails in bounded time with
/// [`Error::DatabaseUnreachable`].
///
/// ```no_run
/// # async fn example() -> Result<(), tierline::Error> {
/// use tierline::Database;
///
/// let database = Database::new("postgres://localhost/hotel")?;
/// let migrated = database.migrate().await?;
/// println!("{migrated}");
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Database {
    pool: PgPool,
    address: Arc<str>,
}

impl Database {
    /// A database at this URL, `postgres://user:password@host:port/database`. The parameters
    /// `sslmode` (`prefer` unless given), `sslrootcert`, `sslcert`, `sslkey` and `options` are those
    /// of Postgres' own programs; what is left out comes from where those look for it (`PGUSER`,
    /// `PGPASSWORD`, `.pgpass` …).
    ///
    /// Must be called on a Tokio runtime.
    ///
    /// # Errors
    /// [`Error::InvalidDatabaseUrl`].
    pub fn new(url: &str) -> Result<Self, Error> {
        address::check(url)?;
        let options = PgConnectOptions::from_str(url).map_err(|_| {
            // What the parser says may repeat a part of the URL.
            address::invalid("it has a part that is not understood")
        })?;
        let address = address::shown(&options).into();
        let options = options
            .application_name("tierline")
            .disable_statement_logging();
        let pool = PgPoolOptions::new()
            .max_connections(MAX_CONNECTIONS)
            .acquire_timeout(ACQUIRE_LIMIT)
            .connect_lazy_with(options);
        Ok(Self { pool, address })
    }

    /// Closes the connections, after what is under way on them, within five seconds.
    pub async fn close(&self) {
        // They are gone either way.
        let _ = timeout(ACQUIRE_LIMIT, self.pool.close()).await;
    }

    /// The connections, for statements. Run them inside [`within`](Self::within).
    pub(crate) fn pool(&self) -> &PgPool {
        &self.pool
    }

    /// Does something on the database, at most for so long. `tried` is told in the error, after
    /// "cannot".
    pub(crate) async fn within<T>(
        &self,
        limit: Duration,
        tried: &str,
        work: impl Future<Output = Result<T, sqlx::Error>>,
    ) -> Result<T, Error> {
        match timeout(limit, work).await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => Err(self.failed(tried, &error)),
            Err(_) => Err(Error::DatabaseFailed {
                tried: self.tried(tried),
                cause: format!("no answer within {} s", limit.as_secs()).into(),
            }),
        }
    }

    /// The error for something that was tried on this database.
    pub(crate) fn failed(&self, tried: &str, error: &sqlx::Error) -> Error {
        let unreachable = |cause: &str| Error::DatabaseUnreachable {
            tried: self.tried(tried),
            cause: cause.into(),
        };
        match error {
            sqlx::Error::PoolTimedOut => unreachable(&format!(
                "none was made or free within {} s",
                ACQUIRE_LIMIT.as_secs()
            )),
            sqlx::Error::PoolClosed => unreachable("it was closed"),
            sqlx::Error::Tls(cause) => unreachable(&cause.to_string()),
            sqlx::Error::Io(cause) if cause.kind() == std::io::ErrorKind::ConnectionRefused => {
                unreachable(&cause.to_string())
            }
            sqlx::Error::Database(said) => self.said(tried, said.as_ref()),
            sqlx::Error::Io(_) | sqlx::Error::Protocol(_) | sqlx::Error::BeginFailed => {
                Error::DatabaseFailed {
                    tried: self.tried(tried),
                    cause: error.to_string().into(),
                }
            }
            other => Error::DatabaseRefused {
                tried: self.tried(tried),
                cause: other.to_string().into(),
            },
        }
    }

    /// The error for what Postgres said, by the class of its code.
    fn said(&self, tried: &str, said: &dyn sqlx::error::DatabaseError) -> Error {
        let code = said.code().unwrap_or_default();
        let (tried, cause) = (self.tried(tried), Box::from(said.message()));
        // What is fatal ends the connection. A statement that may not do something is not.
        let is_fatal = said
            .try_downcast_ref::<PgDatabaseError>()
            .is_some_and(|said| said.severity() == PgSeverity::Fatal);
        match code.as_ref() {
            // No such role, a wrong password, no entry in pg_hba.conf, no such database, and a role that
            // may not connect to it.
            code if code.starts_with("28") || code == "3D000" || (code == "42501" && is_fatal) => {
                Error::DatabaseLoginRefused { tried, cause }
            }
            // No such schema, table, column or function.
            "3F000" | "42P01" | "42703" | "42883" => Error::NotMigrated { tried, cause },
            // A lock that was not free in time.
            "55P03" => Error::DatabaseFailed { tried, cause },
            // Lost connections, conflicts between transactions, no room, an operator's doing.
            _ if ["08", "40", "53", "57", "58"]
                .iter()
                .any(|class| code.starts_with(class)) =>
            {
                Error::DatabaseFailed { tried, cause }
            }
            _ => Error::DatabaseRefused { tried, cause },
        }
    }

    fn tried(&self, tried: &str) -> Box<str> {
        format!("{tried} in {}", self.address).into()
    }
}

impl fmt::Debug for Database {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Database({})", self.address)
    }
}
