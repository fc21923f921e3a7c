//! Looks for what is wrong with the tables of tiers in Postgres, and gives advice for each finding.
//!
//! Every query has a limit in time that the server keeps, and a limit in rows. None scans a table whose size is not
//! known: those of tasks are read in the order of an index.

mod schema;
mod sessions;
mod tables;
mod tasks;

use std::time::Duration;

use sqlx::Executor;

use super::apply::known_tiers;
use crate::Error;
use crate::amqp::{Finding, Report, Severity};
use crate::error::DatabaseError;
use crate::postgres::{Database, PgConnection};
use crate::topology::Topology;

/// How long a transaction may be open before [`doctor`] reports it, unless you say otherwise.
pub const LONG_TRANSACTION: Duration = Duration::from_secs(60);

/// How long the queries of one check may take, including the time to connect. The server ends each query after 5 s.
const LIMIT: Duration = Duration::from_secs(20);
/// Applies to the queries of one check.
const SETUP: &str = "SET TRANSACTION READ ONLY; SET LOCAL statement_timeout = '5s'; SET LOCAL lock_timeout = '1s'; \
                     SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off";

/// Compares the database with the map's tiers in Postgres: migrations, indexes and autovacuum, transactions that keep
/// Postgres from removing finished rows, and tasks that no worker takes. Transactions are reported when they have been
/// open for `long_transaction`.
///
/// ```no_run
/// # async fn example() -> Result<(), tierline::Error> {
/// use tierline::{Database, Topology, backlog};
///
/// let topology = Topology::load("topology.toml")?;
/// let database = Database::new("postgres://localhost/shop")?;
/// let report = backlog::doctor(&database, &topology, backlog::LONG_TRANSACTION).await?;
/// println!("{report}");
/// # Ok(()) }
/// ```
///
/// # Errors
/// [`DatabaseError::Unreachable`], [`DatabaseError::LoginRefused`]; as every use of the database if it cannot read which
/// migrations were applied. A later check that fails is among those that were [not made](Report::not_checked).
pub async fn doctor(
    database: &Database,
    topology: &Topology,
    long_transaction: Duration,
) -> Result<Report, Error> {
    let mut report = Report::default();
    let migrations = database.migration_state().await?;
    let has_tiers = topology.tiers_using_postgres().next().is_some();
    let has_tables = has_tables(database).await?;
    // A tier on the broker may have rows, too.
    if has_tiers || has_tables {
        report.findings.extend(schema::check(&migrations));
    }
    if !has_tables {
        return Ok(report);
    }
    let indexes = read(database, "check the indexes", schema::indexes).await;
    report.add("the indexes", indexes)?;
    let vacuum = read(database, "check autovacuum", tables::check).await;
    report.add("autovacuum and dead rows", vacuum)?;
    let open = async |connection: &mut PgConnection<'_>| {
        sessions::check(connection, long_transaction).await
    };
    let sessions = read(database, "look for open transactions", open).await;
    match sessions {
        Ok((findings, not_checked)) => {
            report.findings.extend(findings);
            report.not_checked.extend(not_checked);
        }
        Err(error) => report.add("open transactions", Err(error))?,
    }
    let known = known_tiers(database, topology.app()).await?;
    let waiting =
        async |connection: &mut PgConnection<'_>| tasks::check(connection, topology, &known).await;
    let waiting = read(database, "look for tasks that wait", waiting).await;
    report.add("tasks that nobody takes", waiting)?;
    Ok(report.sorted())
}

impl Report {
    /// Adds the findings of a check, or that it was not possible.
    fn add(&mut self, what: &str, checked: Result<Vec<Finding>, Error>) -> Result<(), Error> {
        match checked {
            Ok(findings) => self.findings.extend(findings),
            Err(
                error @ Error::Database(
                    DatabaseError::Unreachable { .. } | DatabaseError::LoginRefused { .. },
                ),
            ) => return Err(error),
            Err(error) => self.not_checked.push(format!("{what}: {error}")),
        }
        Ok(())
    }
}

async fn has_tables(database: &Database) -> Result<bool, Error> {
    let asking = async |connection: &mut PgConnection<'_>| {
        let tables = "SELECT to_regclass('tierline.ready') IS NOT NULL";
        sqlx::query_scalar(tables).fetch_one(connection).await
    };
    read(database, "look for the tables", asking).await
}

/// Runs the queries of a check.
async fn read<T>(
    database: &Database,
    tried: &str,
    check: impl AsyncFnOnce(&mut PgConnection<'_>) -> Result<T, sqlx::Error>,
) -> Result<T, Error> {
    let reading = async {
        let mut transaction = database.pool().begin().await?;
        transaction.execute(sqlx::raw_sql(SETUP)).await?;
        let found = check(&mut transaction).await?;
        transaction.commit().await?;
        Ok(found)
    };
    database.within(LIMIT, tried, reading).await
}

fn finding(severity: Severity, object: String, what: String, help: impl Into<String>) -> Finding {
    Finding {
        severity,
        object,
        what,
        help: help.into(),
    }
}

/// A span of time in whole seconds.
fn shown(seconds: f64) -> String {
    let span = Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or_default();
    humantime::format_duration(Duration::from_secs(span.as_secs())).to_string()
}
