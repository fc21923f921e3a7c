//! The servers that all tests of a run share: started once by `cargo xtask test`, told to the
//! tests by three variables.

use anyhow::{Context, Result};

use crate::postgres::{Database, connect};
use crate::rabbitmq::{Management, Vhost};
use crate::url::with_path;

/// The broker's URL, as the README tells users to set it.
pub const AMQP_URL: &str = "AMQP_URL";
/// The database server's URL, likewise.
pub const DATABASE_URL: &str = "DATABASE_URL";
/// The URL of the broker's management API; unless set, port 15672 of the host of [`AMQP_URL`] with
/// the same user.
pub const MANAGEMENT_URL: &str = "MANAGEMENT_URL";

/// A virtual host for this test on the shared broker.
///
/// # Panics
/// In one line that names `cargo xtask test`, where there is no shared broker.
pub async fn vhost() -> Vhost {
    let amqp = url_of("RabbitMQ", AMQP_URL);
    let management = Management::at(&management_url(&amqp));
    match Vhost::create(management, &amqp).await {
        Ok(vhost) => vhost,
        Err(error) => panic!("no virtual host on the broker of {AMQP_URL}: {error:#}"),
    }
}

/// A database for this test on the shared server.
///
/// # Panics
/// In one line that names `cargo xtask test`, where there is no shared server.
pub async fn database() -> Database {
    match Database::create(&url_of("Postgres", DATABASE_URL)).await {
        Ok(database) => database,
        Err(error) => panic!("no database on the server of {DATABASE_URL}: {error:#}"),
    }
}

/// The version of the shared broker, such as `3.10.8`.
pub async fn rabbitmq_version() -> Result<String> {
    let management = management_url(&url_of("RabbitMQ", AMQP_URL));
    let overview = Management::at(&management).get("overview").await?;
    let version = overview["rabbitmq_version"].as_str();
    Ok(version
        .context("the broker does not tell its version")?
        .to_owned())
}

/// The bytes that the processes of all connections and channels of the shared broker use.
pub async fn connection_memory() -> Result<u64> {
    let management = Management::at(&management_url(&url_of("RabbitMQ", AMQP_URL)));
    let overview = management.get("overview").await?;
    let node = overview["node"].as_str().context("the broker has a name")?;
    let memory = management.get(&format!("nodes/{node}/memory")).await?;
    let parts = ["readers", "writers", "channels", "other"].map(|part| {
        let bytes = memory["memory"][format!("connection_{part}")].as_u64();
        bytes.with_context(|| format!("the broker does not tell the memory of connection {part}"))
    });
    parts.into_iter().sum()
}

/// Whether the management API belonging to a broker's URL answers: tests need it.
pub async fn check_management(amqp_url: &str) -> Result<()> {
    let overview = Management::at(&management_url(amqp_url))
        .get("overview")
        .await;
    overview.map(|_| ()).with_context(|| {
        format!(
            "the broker of {AMQP_URL} must be running, with the management plugin for tests; set \
             {MANAGEMENT_URL} (http://user:password@host:port) if that is not on port 15672, or unset \
             {AMQP_URL} for a private broker"
        )
    })
}

/// Whether the database server of a URL answers.
pub(crate) async fn check_database(url: &str) -> Result<()> {
    connect(url).await.map(drop).with_context(|| {
        format!(
            "the server of {DATABASE_URL} must be running; unset {DATABASE_URL} for a private one"
        )
    })
}

/// The value of a variable; one that is set to nothing is not set.
pub(crate) fn given(variable: &str) -> Option<String> {
    std::env::var(variable).ok().filter(|url| !url.is_empty())
}

/// The URL of the management API: as set, or where RabbitMQ has it by default.
pub fn management_url(amqp_url: &str) -> String {
    if let Some(url) = given(MANAGEMENT_URL) {
        return url;
    }
    let address = with_path(amqp_url, "");
    let authority = address
        .split_once("://")
        .map_or(address.as_str(), |(_, rest)| rest)
        .trim_end_matches('/')
        .split('?')
        .next()
        .unwrap_or_default();
    let (credentials, host) = authority
        .rsplit_once('@')
        .unwrap_or(("guest:guest", authority));
    let host = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    format!("http://{credentials}@{host}:15672")
}

fn url_of(server: &str, variable: &str) -> String {
    match given(variable) {
        Some(url) => url,
        None => panic!("this test needs {server}: run `cargo xtask test`, or set {variable}"),
    }
}
