//! The arguments that name servers: the broker, its management API, the database.

use clap::Args;
use clap::builder::FalseyValueParser;

use crate::secret::Secret;

/// The broker of the map's tiers.
#[derive(Debug, Args)]
pub(crate) struct MapBroker {
    /// The broker: amqp://user:password@host:5672/virtual-host, or amqps:// for TLS; not needed, and not connected
    /// to, if all tiers of the file are in Postgres
    #[arg(long, value_name = "URL", env = "AMQP_URL", hide_env_values = true)]
    pub(crate) amqp: Option<Secret>,
}

#[derive(Debug, Args)]
pub(crate) struct Nodes {
    /// The broker: amqp://user:password@host:5672/virtual-host, or amqps:// for TLS; once for each node of a cluster
    #[arg(long, value_name = "URL", env = "AMQP_URL", hide_env_values = true)]
    pub(crate) amqp: Vec<Secret>,
}

#[derive(Debug, Args)]
pub(crate) struct OptionalBroker {
    /// The broker: amqp://user:password@host:5672/virtual-host, or amqps:// for TLS
    #[arg(long, value_name = "URL", env = "AMQP_URL", hide_env_values = true)]
    pub(crate) amqp: Option<Secret>,
}

#[derive(Debug, Args)]
pub(crate) struct Management {
    /// The broker's management API: http://user:password@host:15672, or https://
    #[arg(
        long,
        value_name = "URL",
        env = "MANAGEMENT_URL",
        hide_env_values = true
    )]
    pub(crate) management: Option<Secret>,
}

#[derive(Debug, Clone, Args)]
pub(crate) struct Database {
    /// The database: postgres://user:password@host:5432/database
    #[arg(long, value_name = "URL", env = "DATABASE_URL", hide_env_values = true)]
    pub(crate) postgres: Secret,
    #[command(flatten)]
    pub(crate) pooler: Pooler,
}

impl Database {
    pub(crate) fn open(&self) -> Result<tierline::Database, tierline::Error> {
        self.pooler.open(&self.postgres)
    }
}

#[derive(Debug, Clone, Args)]
pub(crate) struct Pooler {
    /// The database is behind a transaction pooler, such as PgBouncer with pool_mode = transaction
    #[arg(long = "pooler", env = "TIERLINE_POOLER", value_parser = FalseyValueParser::new())]
    pub(crate) is_there: bool,
}

impl Pooler {
    pub(crate) fn open(&self, url: &Secret) -> Result<tierline::Database, tierline::Error> {
        Ok(tierline::Database::new(url.expose())?.behind_pooler(self.is_there))
    }
}

#[derive(Debug, Args)]
pub(crate) struct OptionalDatabase {
    /// The database: postgres://user:password@host:5432/database
    #[arg(long, value_name = "URL", env = "DATABASE_URL", hide_env_values = true)]
    postgres: Option<Secret>,
    #[command(flatten)]
    pooler: Pooler,
}

impl OptionalDatabase {
    /// Whether the app has a database, as far as the command knows.
    pub(crate) fn is_given(&self) -> bool {
        self.postgres.is_some()
    }

    pub(crate) fn open(&self) -> Result<Option<tierline::Database>, tierline::Error> {
        let url = self.postgres.as_ref();
        url.map(|url| self.pooler.open(url)).transpose()
    }
}
