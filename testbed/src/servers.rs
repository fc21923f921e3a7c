//! The servers that a command works on, wherever they come from.

use std::path::Path;

use anyhow::Result;

use crate::compose::Compose;
use crate::postgres::Postgres;
use crate::provide;
use crate::rabbitmq::{Broker, Plugins, Release};
use crate::shared::{
    AMQP_URL, DATABASE_URL, check_database, check_management, given, management_url,
};

/// A broker and a Postgres: those of `AMQP_URL` and `DATABASE_URL` where they are set, else private
/// ones that end with this value.
#[derive(Debug)]
pub struct Servers {
    amqp_url: String,
    management_url: String,
    database_url: String,
    // Held, not used: the servers end with them.
    _broker: Source<Broker>,
    _postgres: Source<Postgres>,
}

/// Where a server comes from.
#[derive(Debug)]
enum Source<Server> {
    Given,
    Private { _server: Server },
    Compose { _services: Compose },
}

/// A Postgres alone, for apps that need no broker: that of `DATABASE_URL` where it is set, else a private one that ends
/// with this value.
#[derive(Debug)]
pub struct DatabaseServer {
    url: String,
    // Held, not used: the server ends with it.
    _postgres: Source<Postgres>,
}

impl DatabaseServer {
    /// Provides it as [`Servers::provide`] does, and starts no broker.
    pub async fn provide(compose_file: &Path) -> Result<DatabaseServer> {
        let given = given(DATABASE_URL);
        if given.is_none() && Postgres::is_missing() {
            install(&["postgresql"]).await?;
        }
        let (url, postgres) = provide_postgres(given, compose_file).await?;
        Ok(DatabaseServer {
            url,
            _postgres: postgres,
        })
    }

    /// Its URL.
    pub fn url(&self) -> &str {
        &self.url
    }
}

impl Servers {
    /// Takes the servers that the environment names; else starts private ones from the programs of
    /// this machine, which are installed first where they are missing and that is allowed; else
    /// starts the services of `compose_file`. Says on standard error what it does.
    pub async fn provide(compose_file: &Path) -> Result<Servers> {
        let given_amqp = given(AMQP_URL);
        let given_database = given(DATABASE_URL);
        let mut missing = Vec::new();
        if given_amqp.is_none() && Release::is_missing()? {
            missing.push("rabbitmq-server");
        }
        if given_database.is_none() && Postgres::is_missing() {
            missing.push("postgresql");
        }
        install(&missing).await?;

        let (broker, postgres) = tokio::try_join!(
            provide_broker(given_amqp, compose_file),
            provide_postgres(given_database, compose_file)
        )?;
        let (amqp_url, management_url, broker) = broker;
        let (database_url, postgres) = postgres;
        Ok(Servers {
            amqp_url,
            management_url,
            database_url,
            _broker: broker,
            _postgres: postgres,
        })
    }

    /// The broker's URL.
    pub fn amqp_url(&self) -> &str {
        &self.amqp_url
    }

    /// The URL of the broker's management API, with its credentials.
    pub fn management_url(&self) -> &str {
        &self.management_url
    }

    /// The database server's URL.
    pub fn database_url(&self) -> &str {
        &self.database_url
    }
}

/// Installs packages. Where that fails, docker compose may do.
async fn install(packages: &[&str]) -> Result<()> {
    if packages.is_empty() {
        return Ok(());
    }
    match provide::packages(packages).await {
        Err(error) if !Compose::is_there().await => Err(error),
        _ => Ok(()),
    }
}

async fn provide_broker(
    given: Option<String>,
    compose_file: &Path,
) -> Result<(String, String, Source<Broker>)> {
    if let Some(url) = given {
        check_management(&url).await?;
        let management = management_url(&url);
        return Ok((url, management, Source::Given));
    }
    if Release::is_missing()? {
        let services = Compose::start(compose_file, "rabbitmq").await?;
        let amqp = format!("amqp://guest:guest@127.0.0.1:{}", services.port());
        let management = format!(
            "http://guest:guest@127.0.0.1:{}",
            services.management_port()
        );
        return Ok((
            amqp,
            management,
            Source::Compose {
                _services: services,
            },
        ));
    }
    let release = Release::provide().await?;
    eprintln!("starting RabbitMQ {}", release.version());
    let broker = Broker::start_with(release, Plugins::management()).await?;
    let management = broker.management_url().unwrap_or_default();
    Ok((
        broker.amqp_url(),
        management,
        Source::Private { _server: broker },
    ))
}

async fn provide_postgres(
    given: Option<String>,
    compose_file: &Path,
) -> Result<(String, Source<Postgres>)> {
    if let Some(url) = given {
        check_database(&url).await?;
        return Ok((url, Source::Given));
    }
    if Postgres::is_missing() {
        let services = Compose::start(compose_file, "postgres").await?;
        let url = format!(
            "postgres://tierline:tierline@127.0.0.1:{}/tierline",
            services.port()
        );
        return Ok((
            url,
            Source::Compose {
                _services: services,
            },
        ));
    }
    let postgres = Postgres::start_new().await?;
    Ok((postgres.url(), Source::Private { _server: postgres }))
}
