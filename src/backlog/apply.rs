//! Prepares a database for the tiers of a map: the tables, and a number for each tier.

use std::fmt;

use serde::Serialize;

use super::add_backlogs;
use super::tasks::{remove_other_tasks, store_tasks};
use crate::Error;
use crate::error::DatabaseError;
use crate::postgres::{Database, Migrated, STATEMENT_LIMIT};
use crate::topology::{Promotion, Topology};

/// What a database lacks for the tiers of a map in Postgres.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DatabasePlan {
    /// The descriptions of the migrations to apply, in order.
    pub migrations: Vec<String>,
    /// The map's tiers in Postgres.
    pub tiers: Vec<PlannedTier>,
}

/// A tier in Postgres.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PlannedTier {
    /// Its name.
    pub tier: String,
    /// The number by which rows name it (`tierline.backlogs`). `None`: it will get one.
    pub number: Option<i32>,
    /// Where its tasks go that have waited for too long.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub promote: Option<Promotion>,
}

/// What [`apply`] did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct DatabaseApplied {
    /// The descriptions of the migrations applied now, in order.
    pub migrations: Vec<String>,
    /// The tiers that got a number now.
    pub new_tiers: Vec<String>,
    /// All tiers of the map in Postgres.
    pub tiers: Vec<String>,
}

/// Says what [`apply`] would do. Changes nothing.
///
/// # Errors
/// As every use of the database.
pub async fn plan(database: &Database, topology: &Topology) -> Result<DatabasePlan, Error> {
    let migrations = database.migration_state().await?.pending;
    let known = known_tiers(database, topology.app()).await?;
    let tiers = topology.postgres_tiers().map(|tier| PlannedTier {
        tier: tier.name.clone(),
        number: known
            .iter()
            .find_map(|(number, name)| (*name == tier.name).then_some(*number)),
        promote: tier.promote.clone(),
    });
    Ok(DatabasePlan {
        migrations,
        tiers: tiers.collect(),
    })
}

/// Brings the tables up to date, gives every tier its number, and stores which tier each task has, for producers that
/// publish with the SQL function `tierline.publish`. It deletes no task that waits, and many processes may apply at once.
///
/// ```no_run
/// # async fn example() -> Result<(), tierline::Error> {
/// use tierline::{Database, Topology, backlog};
///
/// let topology = Topology::load("topology.toml")?;
/// let database = Database::new("postgres://localhost/shop")?;
/// println!("{}", backlog::apply(&database, &topology).await?);
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`Database::migrate`].
pub async fn apply(database: &Database, topology: &Topology) -> Result<DatabaseApplied, Error> {
    let migrations = database.migrate().await?.applied;
    let tiers: Vec<&str> = topology
        .postgres_tiers()
        .map(|it| it.name.as_str())
        .collect();
    let adding = async {
        let mut connection = database.pool().acquire().await?;
        add_backlogs(&mut connection, topology.app(), &tiers).await
    };
    let tried = "add tiers";
    let new_tiers = database.within(STATEMENT_LIMIT, tried, adding).await?;
    store_tasks(database, topology).await?;
    remove_other_tasks(database, topology).await?;
    Ok(DatabaseApplied {
        migrations,
        new_tiers,
        tiers: tiers.into_iter().map(str::to_owned).collect(),
    })
}

/// The tiers of an app that have numbers; none if their table does not exist.
pub(super) async fn known_tiers(
    database: &Database,
    app: &str,
) -> Result<Vec<(i32, String)>, Error> {
    let reading =
        sqlx::query_as("SELECT id, tier FROM tierline.backlogs WHERE app = $1 ORDER BY id")
            .bind(app)
            .fetch_all(database.pool());
    let tried = "read the tiers of an app";
    match database.within(STATEMENT_LIMIT, tried, reading).await {
        Err(Error::Database(DatabaseError::NotMigrated { .. })) => Ok(Vec::new()),
        read => read,
    }
}

impl fmt::Display for DatabasePlan {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "{} migrations to apply", self.migrations.len())?;
        for migration in &self.migrations {
            writeln!(out, "  {migration}")?;
        }
        if self.tiers.is_empty() {
            return Ok(());
        }
        writeln!(out, "\n{} tiers in Postgres", self.tiers.len())?;
        let names = self.tiers.iter().map(|it| it.tier.len());
        let width = names.chain(["tier".len()]).max().unwrap_or_default();
        writeln!(out, "  {:width$}  number", "tier")?;
        for planned in &self.tiers {
            let (tier, number) = (&planned.tier, planned.number);
            let number = number.map_or_else(|| "to add".to_owned(), |it| it.to_string());
            match &planned.promote {
                Some(rule) => writeln!(out, "  {tier:width$}  {number:6}  promotes {rule}")?,
                None => writeln!(out, "  {tier:width$}  {number}")?,
            }
        }
        Ok(())
    }
}

impl fmt::Display for DatabaseApplied {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let migrated = Migrated {
            applied: self.migrations.clone(),
        };
        let tiers = match self.tiers.len() {
            0 => "the tasks of the map are stored".to_owned(),
            1 => "1 tier in Postgres is there".to_owned(),
            count => format!("{count} tiers in Postgres are there"),
        };
        write!(out, "{migrated}; {tiers}")?;
        match self.new_tiers.as_slice() {
            [] => Ok(()),
            new => write!(out, ", new: {}", new.join(", ")),
        }
    }
}
