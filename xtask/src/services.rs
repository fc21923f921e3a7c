//! `cargo xtask services`: the servers, for working by hand.

use anyhow::Result;
use tierline_testbed::{AMQP_URL, DATABASE_URL, MANAGEMENT_URL, Servers};

use crate::root;

pub(crate) async fn run() -> Result<()> {
    let servers = Servers::provide(&root()?.join("docker-compose.yml")).await?;
    println!("export {AMQP_URL}={}", servers.amqp_url());
    println!("export {MANAGEMENT_URL}={}", servers.management_url());
    println!("export {DATABASE_URL}={}", servers.database_url());
    eprintln!("running until Ctrl-C");
    std::future::pending().await
}
