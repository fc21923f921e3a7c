//! Migrations: create and update tierline's tables.

use std::fmt;
use std::time::{Duration, Instant};

use sqlx::migrate::{MigrateError, Migration, MigrationType};
use sqlx::{Executor, SqlSafeStr};

use super::{Database, DedicatedConnection, PgConnection, STATEMENT_LIMIT};
use crate::Error;

/// The advisory lock of migrations. The number is ours alone: sqlx's own migrations use another one, so an
/// app that migrates at the same time does not wait for us.
const LOCK: i64 = 0x7469_6572_6c69_6e65;
/// How long to wait for another process that migrates, and how long to migrate.
const LIMIT: Duration = Duration::from_secs(120);
const TRIED: &str = "migrate the schema tierline";

/// All migrations. Each module has its own range of numbers (dead letters from 1, schedules from 101, the backlog from 201, control from 301), so
/// that they can be added independently. Missing ones are applied in any order of releases.
const MIGRATIONS: [(i64, &str, &str); 15] = [
    (
        1,
        "dead letters",
        include_str!("../../migrations/0001_dead_letters.sql"),
    ),
    (
        2,
        "dead letter claims",
        include_str!("../../migrations/0002_dead_letter_claims.sql"),
    ),
    (
        3,
        "raw properties of dead letters",
        include_str!("../../migrations/0003_raw_properties.sql"),
    ),
    (
        101,
        "schedules",
        include_str!("../../migrations/0101_schedules.sql"),
    ),
    (
        201,
        "backlog",
        include_str!("../../migrations/0201_backlog.sql"),
    ),
    (
        202,
        "audit log",
        include_str!("../../migrations/0202_audit_log.sql"),
    ),
    (
        203,
        "finished tasks",
        include_str!("../../migrations/0203_finished.sql"),
    ),
    (
        204,
        "publishing by SQL",
        include_str!("../../migrations/0204_publish.sql"),
    ),
    (205, "keys", include_str!("../../migrations/0205_keys.sql")),
    (
        206,
        "completed tasks",
        include_str!("../../migrations/0206_completed.sql"),
    ),
    (
        301,
        "control",
        include_str!("../../migrations/0301_control.sql"),
    ),
    (
        302,
        "rollups",
        include_str!("../../migrations/0302_rollups.sql"),
    ),
    (
        303,
        "parked tasks",
        include_str!("../../migrations/0303_parked.sql"),
    ),
    (
        304,
        "keys of parked tasks",
        include_str!("../../migrations/0304_keys_of_parked.sql"),
    ),
    (
        305,
        "reports of tiers",
        include_str!("../../migrations/0305_tier_reports.sql"),
    ),
];

/// The result of a migration.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Migrated {
    /// The descriptions of the migrations applied now, in order; empty if none was missing.
    pub applied: Vec<String>,
}

impl fmt::Display for Migrated {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.applied.as_slice() {
            [] => write!(out, "the database schema is up to date"),
            applied => write!(out, "applied to the database: {}", applied.join(", ")),
        }
    }
}

/// Which migrations a database has.
pub(crate) struct MigrationState {
    /// The descriptions of those that it lacks, in order.
    pub(crate) pending: Vec<String>,
    /// The numbers of those that it has and this release does not know.
    pub(crate) unknown: Vec<i64>,
}

impl Database {
    /// Brings the schema `tierline` up to date for this release, and creates it if it is missing.
    ///
    /// Many processes may do this at once: one migrates, the others wait for it. Everything runs in one
    /// transaction, so it is applied in whole or not at all. A database that a newer release has
    /// migrated does not change. If nothing is missing, the right to read is enough. Otherwise
    /// the user needs the right to create a schema in the database, once.
    ///
    /// # Errors
    /// [`DatabaseError::Unreachable`](crate::error::DatabaseError::Unreachable), [`DatabaseError::Failed`](crate::error::DatabaseError::Failed) and [`DatabaseError::Refused`](crate::error::DatabaseError::Refused).
    pub async fn migrate(&self) -> Result<Migrated, Error> {
        let migrating = async {
            let mut connection = self.pool().acquire().await?;
            apply_missing(&mut connection).await
        };
        self.within(LIMIT, TRIED, migrating).await
    }

    /// The same on a connection of our own.
    pub(crate) async fn migrate_on(
        connection: &mut DedicatedConnection,
    ) -> Result<Migrated, Error> {
        connection.within(LIMIT, TRIED, apply_missing).await
    }

    /// Compares the migrations of the database with those of this release. Changes nothing.
    pub(crate) async fn migration_state(&self) -> Result<MigrationState, Error> {
        let migrations = migrations();
        let reading = async {
            let mut connection = self.pool().acquire().await?;
            let applied = match is_prepared(&mut connection).await? {
                true => applied_versions(&mut connection).await?,
                false => Vec::new(),
            };
            let pending = migrations
                .iter()
                .filter(|migration| !applied.contains(&migration.version));
            let is_known = |version: &i64| migrations.iter().any(|known| known.version == *version);
            Ok(MigrationState {
                pending: pending.map(|it| it.description.to_string()).collect(),
                unknown: applied.iter().copied().filter(|it| !is_known(it)).collect(),
            })
        };
        self.within(STATEMENT_LIMIT, "read the applied migrations", reading)
            .await
    }
}

async fn apply_missing(connection: &mut PgConnection<'_>) -> Result<Migrated, sqlx::Error> {
    let migrations = migrations();
    if is_prepared(connection).await? && missing(connection, &migrations).await?.is_empty() {
        return Ok(Migrated {
            applied: Vec::new(),
        });
    }
    let mut transaction = connection.begin().await?;
    // A lock of the transaction: one of the session would stay behind a transaction pooler, on a server
    // connection of other clients.
    sqlx::query("SELECT pg_advisory_xact_lock($1)")
        .bind(LOCK)
        .execute(&mut *transaction)
        .await?;
    // Another process may have migrated while we waited. A check whether the table exists would not do:
    // within a transaction Postgres may remember that it did not.
    transaction.execute(sqlx::raw_sql(PREPARE)).await?;
    let missing = missing(&mut transaction, &migrations).await?;
    for migration in &missing {
        apply(&mut transaction, migration).await?;
    }
    transaction.commit().await?;
    let applied = missing.iter().map(|it| it.description.to_string());
    Ok(Migrated {
        applied: applied.collect(),
    })
}

/// The table is as sqlx's migrator makes it, which earlier releases used. It prepares statements with names, which a
/// transaction pooler does not keep.
const PREPARE: &str = "CREATE SCHEMA IF NOT EXISTS tierline; \
    CREATE TABLE IF NOT EXISTS tierline.migrations ( \
        version bigint PRIMARY KEY, description text NOT NULL, installed_on timestamptz NOT NULL DEFAULT now(), \
        success boolean NOT NULL, checksum bytea NOT NULL, execution_time bigint NOT NULL)";

/// With sqlx's checksums.
fn migrations() -> Vec<Migration> {
    let migrations = MIGRATIONS.iter().map(|&(version, description, sql)| {
        let sql = sql.into_sql_str();
        let kind = MigrationType::Simple;
        Migration::new(version, description.into(), kind, sql, false)
    });
    migrations.collect()
}

/// Whether the table of applied migrations exists.
async fn is_prepared(connection: &mut PgConnection<'_>) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar("SELECT to_regclass('tierline.migrations') IS NOT NULL")
        .fetch_one(connection)
        .await
}

async fn applied_versions(connection: &mut PgConnection<'_>) -> Result<Vec<i64>, sqlx::Error> {
    sqlx::query_scalar("SELECT version FROM tierline.migrations ORDER BY version")
        .fetch_all(connection)
        .await
}

/// Those that are not applied. A newer release may have applied others before, as in every rolling deployment.
async fn missing<'m>(
    connection: &mut PgConnection<'_>,
    migrations: &'m [Migration],
) -> Result<Vec<&'m Migration>, sqlx::Error> {
    let applied: Vec<(i64, Vec<u8>)> =
        sqlx::query_as("SELECT version, checksum FROM tierline.migrations")
            .fetch_all(connection)
            .await?;
    let mut missing = Vec::new();
    for migration in migrations {
        match applied.iter().find(|(it, _)| *it == migration.version) {
            None => missing.push(migration),
            Some((_, checksum)) if **checksum == *migration.checksum => {}
            Some((version, _)) => {
                return Err(MigrateError::VersionMismatch(*version).into());
            }
        }
    }
    Ok(missing)
}

async fn apply(
    connection: &mut PgConnection<'_>,
    migration: &Migration,
) -> Result<(), sqlx::Error> {
    let begin = Instant::now();
    connection
        .execute(sqlx::raw_sql(migration.sql.clone()))
        .await?;
    let took = i64::try_from(begin.elapsed().as_nanos()).unwrap_or(i64::MAX);
    sqlx::query(
        "INSERT INTO tierline.migrations (version, description, success, checksum, execution_time) \
         VALUES ($1, $2, true, $3, $4)",
    )
    .bind(migration.version)
    .bind(&*migration.description)
    .bind(&*migration.checksum)
    .bind(took)
    .execute(connection)
    .await?;
    Ok(())
}
