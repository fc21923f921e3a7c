//! The database: a pool of connections to Postgres, and tierline's schema in it.
//!
//! All our tables are in the schema `tierline`, including the list of applied migrations. So tierline can
//! share a database with an app that uses sqlx and its own migrations.

mod address;
mod audit;
mod connection;
mod dedicated_connection;
pub(crate) mod error;
mod handler_connections;
mod migrate;
mod pooler;
pub(crate) mod time;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use sqlx::ConnectOptions;
use sqlx::postgres::{PgConnectOptions, PgDatabaseError, PgPool, PgPoolOptions, PgSeverity};
use tokio::time::timeout;

use crate::Error;
use crate::error::{Cause, DatabaseError};
pub use audit::AuditEntry;
pub(crate) use audit::{Action, record};
pub(crate) use connection::{PgConnection, Pool};
pub(crate) use dedicated_connection::DedicatedConnection;
pub(crate) use handler_connections::{HandlerConnections, HandlerTransaction};
pub use migrate::Migrated;
pub(crate) use migrate::MigrationState;
use pooler::TransactionPooler;
pub(crate) use time::Time;

/// How long to wait for a free connection, including the time to connect and log in.
pub(crate) const ACQUIRE_LIMIT: Duration = Duration::from_secs(5);
/// The default limit of a statement or transaction.
pub(crate) const STATEMENT_LIMIT: Duration = Duration::from_secs(30);
/// How long the database may take to answer a question about its health.
const CHECK_LIMIT: Duration = Duration::from_secs(2);
/// The largest number of connections of a process: it works on a few batches at a time.
pub(crate) const MAX_CONNECTIONS: u32 = 8;

/// The database that tierline stores its tables in. Cheap to clone; all clones share one pool of
/// connections.
///
/// It connects when it is first used, and reconnects when necessary. Postgres may be down when this is
/// created, and later. While it is down, every call fails within a bounded time with
/// [`DatabaseError::Unreachable`].
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
    pool: Pool,
    address: Arc<str>,
    /// Whether the pool is the app's, which goes on with it when tierline is closed.
    is_lent: bool,
}

impl Database {
    /// A database at this URL, `postgres://user:password@host:port/database`. The parameters
    /// `sslmode` (default `prefer`), `sslrootcert`, `sslcert`, `sslkey` and `options` are those
    /// of `psql`. Missing parts come from the same places as for `psql` (`PGUSER`,
    /// `PGPASSWORD`, `.pgpass` …).
    ///
    /// Must be called on a Tokio runtime.
    ///
    /// # Errors
    /// [`DatabaseError::InvalidUrl`].
    pub fn new(url: &str) -> Result<Self, Error> {
        Self::with_connections(url, MAX_CONNECTIONS)
    }

    /// The same with at most so many connections.
    pub(crate) fn with_connections(url: &str, most: u32) -> Result<Self, Error> {
        address::check(url)?;
        let options = PgConnectOptions::from_str(url).map_err(|_| {
            // The parser's message may repeat a part of the URL.
            address::invalid("a part of it cannot be parsed")
        })?;
        let address = address::shown(&options).into();
        // Floats come in binary. PgBouncer refuses the parameter unless it is told to ignore it.
        let options = options
            .application_name("tierline")
            .extra_float_digits(None)
            .disable_statement_logging();
        let pool = PgPoolOptions::new()
            .max_connections(most.max(1))
            .acquire_timeout(ACQUIRE_LIMIT)
            .connect_lazy_with(options);
        Ok(Self {
            pool: Pool::new(pool),
            address,
            is_lent: false,
        })
    }

    /// A database over a pool that the app has already. Its size and its timeouts are the app's to choose: an app
    /// whose own statements take all connections keeps tierline waiting, and the other way round.
    ///
    /// The scheduler has two connections of its own beside the pool, made with the pool's `connect_options`; what
    /// `after_connect` of the pool does is not done on those.
    pub fn from_pool(pool: PgPool) -> Self {
        let address = address::shown(&pool.connect_options()).into();
        Self {
            pool: Pool::new(pool),
            address,
            is_lent: true,
        }
    }

    /// The same database behind a transaction pooler, such as PgBouncer with `pool_mode = transaction`. Every statement
    /// then runs in a transaction of its own and is prepared anew, nothing is left on a connection, and workers look
    /// for new tasks every second instead of listening for them. The guide's page
    /// [tiers in Postgres](crate::guide::tiers_in_postgres) says what this costs and what the pooler needs.
    ///
    /// The connect options of a pool [of the app's own](Self::from_pool) need `.extra_float_digits(None)`, unless the pooler
    /// ignores that parameter.
    ///
    /// Without it, the first use of the database finds a transaction pooler and fails with
    /// [`DatabaseError::TransactionPooler`]. A pooler that keeps a server connection for each session needs nothing.
    pub fn behind_pooler(self, is_behind_pooler: bool) -> Self {
        Self {
            pool: self.pool.behind_pooler(is_behind_pooler),
            ..self
        }
    }

    /// Closes the connections, after what is under way on them, within five seconds. Those of a
    /// [pool of the app's own](Self::from_pool) stay.
    pub async fn close(&self) {
        if !self.is_lent {
            // They are gone either way.
            let _ = timeout(ACQUIRE_LIMIT, self.pool.close()).await;
        }
    }

    /// The pool, for statements. Run them inside [`within`](Self::within).
    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Whether a transaction pooler is between the app and Postgres.
    pub(crate) fn is_behind_pooler(&self) -> bool {
        self.pool.is_behind_pooler()
    }

    /// Whether the database answers, within two seconds.
    ///
    /// # Errors
    /// As every use of the database.
    pub(crate) async fn check(&self) -> Result<(), Error> {
        let asking = sqlx::query("SELECT 1").execute(&self.pool);
        self.within(CHECK_LIMIT, "ask the database whether it is there", asking)
            .await
            .map(drop)
    }

    /// Whether the tables of tiers in Postgres are there.
    ///
    /// # Errors
    /// [`DatabaseError::NotMigrated`], and as every use of the database.
    pub(crate) async fn check_backlog(&self) -> Result<(), Error> {
        let asking =
            sqlx::query("SELECT FROM tierline.ready, tierline.parked, tierline.workers, tierline.finished, tierline.unique_keys, tierline.controls \
             LIMIT 0")
                .execute(&self.pool);
        self.within(STATEMENT_LIMIT, "use tiers in Postgres", asking)
            .await
            .map(drop)
    }

    /// Runs an operation on the database within `limit`. The error contains `tried`, after
    /// "cannot".
    pub(crate) async fn within<T>(
        &self,
        limit: Duration,
        tried: &str,
        work: impl Future<Output = Result<T, sqlx::Error>>,
    ) -> Result<T, Error> {
        match timeout(limit, work).await {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => Err(self.failed(tried, error)),
            Err(_) => {
                let limit = limit.as_secs();
                Err(self.interrupted(tried, format!("no answer within {limit} s").into()))
            }
        }
    }

    /// The error of an operation on this database.
    pub(crate) fn failed(&self, tried: &str, error: sqlx::Error) -> Error {
        let unreachable = |cause: Cause| {
            Error::Database(DatabaseError::Unreachable {
                tried: self.tried(tried),
                cause: cause.text,
                source: cause.source,
            })
        };
        match error {
            sqlx::Error::PoolTimedOut => {
                let limit = self.pool.options().get_acquire_timeout().as_secs();
                let cause = format!("no connection was opened or free within {limit} s");
                unreachable(cause.into())
            }
            sqlx::Error::PoolClosed => unreachable("its pool is closed".into()),
            sqlx::Error::Tls(cause) => unreachable(Cause::new("the TLS handshake failed", cause)),
            sqlx::Error::Io(cause) if cause.kind() == std::io::ErrorKind::ConnectionRefused => {
                unreachable(Cause::from(&cause))
            }
            sqlx::Error::Database(said) => self.said(tried, said.as_ref()),
            sqlx::Error::Io(cause) => self.interrupted(tried, Cause::from(&cause)),
            sqlx::Error::Configuration(cause) if cause.is::<TransactionPooler>() => {
                Error::Database(DatabaseError::TransactionPooler {
                    tried: self.tried(tried),
                    cause: cause.to_string().into(),
                })
            }
            sqlx::Error::Protocol(_) | sqlx::Error::BeginFailed => {
                self.interrupted(tried, error.to_string().into())
            }
            other => Error::Database(DatabaseError::Refused {
                tried: self.tried(tried),
                cause: other.to_string().into(),
            }),
        }
    }

    /// The error of an operation that may have been done or not.
    pub(crate) fn interrupted(&self, tried: &str, cause: Cause) -> Error {
        Error::Database(DatabaseError::Failed {
            tried: self.tried(tried),
            cause: cause.text,
            source: cause.source,
        })
    }

    /// The error for a message of Postgres, by the class of its code.
    fn said(&self, tried: &str, said: &dyn sqlx::error::DatabaseError) -> Error {
        let code = said.code().unwrap_or_default();
        let (tried, cause) = (self.tried(tried), Box::from(said.message()));
        // FATAL ends the connection. A statement without permission is an ERROR.
        let is_fatal = said
            .try_downcast_ref::<PgDatabaseError>()
            .is_some_and(|said| said.severity() == PgSeverity::Fatal);
        match code.as_ref() {
            // No such role, a wrong password, no entry in pg_hba.conf, no such database, or a role that may not
            // connect to it.
            code if code.starts_with("28") || code == "3D000" || (code == "42501" && is_fatal) => {
                Error::Database(DatabaseError::LoginRefused { tried, cause })
            }
            // A statement that was prepared is not there, or another client's is there: the server connection is
            // another one.
            "26000" | "42P05" if !self.is_behind_pooler() => {
                Error::Database(DatabaseError::TransactionPooler { tried, cause })
            }
            // PgBouncer alone says this, and it does not pass.
            "08P01" if said.message().starts_with("unsupported startup parameter") => {
                let cause = format!("{cause}; add it to ignore_startup_parameters of PgBouncer");
                Error::Database(DatabaseError::Refused {
                    tried,
                    cause: cause.into(),
                })
            }
            // No such schema, table, column or function.
            "3F000" | "42P01" | "42703" | "42883" => {
                Error::Database(DatabaseError::NotMigrated { tried, cause })
            }
            // A lock that was not free in time, and a server that is a standby for now.
            "55P03" | "25006" => Error::Database(DatabaseError::Failed {
                tried,
                cause,
                source: None,
            }),
            // Lost connections, transaction conflicts, a full disk, an operator's intervention.
            _ if ["08", "40", "53", "57", "58"]
                .iter()
                .any(|class| code.starts_with(class)) =>
            {
                Error::Database(DatabaseError::Failed {
                    tried,
                    cause,
                    source: None,
                })
            }
            _ => Error::Database(DatabaseError::Refused { tried, cause }),
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
