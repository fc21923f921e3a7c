//! Migrations: create and update tierline's tables.

use std::fmt;
use std::time::Duration;

use sqlx::migrate::{Migrate, MigrateError, Migration, MigrationType, Migrator};
use sqlx::{Connection, PgConnection, SqlSafeStr};

use super::Database;
use crate::Error;

/// The schema of all our tables, and the table of applied migrations.
const SCHEMA: &str = "tierline";
const TABLE: &str = "tierline.migrations";
/// The advisory lock of migrations. The number is ours alone: sqlx's own migrations use another one, so an
/// app that migrates at the same time does not wait for us.
const LOCK: i64 = 0x7469_6572_6c69_6e65;
/// How long to wait for another process that migrates, and how long to migrate.
const LIMIT: Duration = Duration::from_secs(120);

/// All migrations. Each module has its own range of numbers (dead letters from 1, schedules from 101), so
/// that they can be added independently. Missing ones are applied in any order of releases.
const MIGRATIONS: [(i64, &str, &str); 4] = [
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
        self.run(&migrator(&MIGRATIONS)).await
    }

    async fn run(&self, migrator: &Migrator) -> Result<Migrated, Error> {
        const TRIED: &str = "migrate the schema tierline";
        self.within(LIMIT, TRIED, async {
            let mut connection = self.pool().acquire().await?;
            if is_prepared(&mut connection).await?
                && missing(&mut connection, migrator).await?.is_empty()
            {
                return Ok(Migrated {
                    applied: Vec::new(),
                });
            }
            let mut transaction = connection.begin().await?;
            sqlx::query("SELECT pg_advisory_xact_lock($1)")
                .bind(LOCK)
                .execute(&mut *transaction)
                .await?;
            // Another process may have migrated while we waited. A check whether the table exists would not do:
            // within a transaction Postgres may remember that it did not.
            let preparing = async {
                transaction.create_schema_if_not_exists(SCHEMA).await?;
                transaction.ensure_migrations_table(TABLE).await
            };
            preparing.await.map_err(plain)?;
            let applied = missing(&mut transaction, migrator).await?;
            let migrating = migrator.run_direct(None, &mut *transaction, false).await;
            migrating.map_err(plain)?;
            transaction.commit().await?;
            Ok(Migrated { applied })
        })
        .await
    }
}

fn migrator(migrations: &[(i64, &'static str, &'static str)]) -> Migrator {
    let migrations = migrations.iter().map(|&(version, description, sql)| {
        let sql = sql.into_sql_str();
        Migration::new(
            version,
            description.into(),
            MigrationType::Simple,
            sql,
            false,
        )
    });
    let mut migrator = Migrator::with_migrations(migrations.collect());
    migrator.dangerous_set_table_name(TABLE);
    migrator.create_schema(SCHEMA);
    // A newer release may have migrated first, as in every rolling deployment.
    migrator.set_ignore_missing(true);
    // sqlx's own lock has no time limit, and is kept after an error.
    migrator.set_locking(false);
    migrator
}

/// Whether the table of applied migrations exists.
async fn is_prepared(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar("SELECT to_regclass($1) IS NOT NULL")
        .bind(TABLE)
        .fetch_one(connection)
        .await
}

/// The descriptions of missing migrations.
async fn missing(
    connection: &mut PgConnection,
    migrator: &Migrator,
) -> Result<Vec<String>, sqlx::Error> {
    let applied = connection.list_applied_migrations(TABLE).await;
    let applied = applied.map_err(plain)?;
    let is_applied = |version| applied.iter().any(|applied| applied.version == version);
    let missing = migrator
        .iter()
        .filter(|migration| !is_applied(migration.version));
    Ok(missing
        .map(|migration| migration.description.to_string())
        .collect())
}

/// The database's message, without sqlx's prefix.
fn plain(error: MigrateError) -> sqlx::Error {
    match error {
        MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _) => error,
        other => sqlx::Error::Migrate(Box::new(other)),
    }
}
