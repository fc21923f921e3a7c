//! `cargo xtask demo`: a night at the hotel, on real servers.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::Args;
use tierline_testbed::{
    AMQP_URL, DATABASE_URL, DatabaseServer, Foreground, MANAGEMENT_URL, Servers,
};

use crate::cargo::{cargo, step};
use crate::root;

const PACKAGE: &str = "tierline-demo";

#[derive(Args)]
pub(crate) struct Options {
    /// How long the night takes, about, in seconds: 5 to 3600.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(5..=3600))]
    seconds: u32,
    /// First the same night through one queue with one pool, as before tiers; then both side by side.
    #[arg(long)]
    flat: bool,
    /// Every tier in Postgres: no broker is started.
    #[arg(long)]
    postgres: bool,
    /// The same seed gives the same night.
    #[arg(long, default_value_t = 2)]
    seed: u64,
}

pub(crate) async fn run(options: &Options) -> Result<()> {
    // First, so that what is missing is said at once, and not beside a compiler that takes all cores.
    let servers = match options.postgres {
        true => Provided::Postgres(DatabaseServer::provide(&compose_file()?).await?),
        false => Provided::Both(Servers::provide(&compose_file()?).await?),
    };
    // Unoptimised: the demo waits more than it computes, and is there minutes sooner.
    step("build", cargo(&["build", "--package", PACKAGE])?).await?;
    let mut demo = Command::new(program()?);
    demo.args(["--seconds", &options.seconds.to_string()])
        .args(["--seed", &options.seed.to_string()])
        .args(options.flat.then_some("--flat"))
        .args(options.postgres.then_some("--postgres"));
    servers.name_to(&mut demo);
    // Not through cargo, which would not wait for what the demo cleans up.
    let status = Foreground::start_polite(demo)?.ended().await?;
    if !status.success() {
        bail!("the demo failed ({status})");
    }
    Ok(())
}

/// The servers of a night.
enum Provided {
    Both(Servers),
    Postgres(DatabaseServer),
}

impl Provided {
    fn name_to(&self, demo: &mut Command) {
        match self {
            Provided::Both(servers) => demo
                .env(AMQP_URL, servers.amqp_url())
                .env(MANAGEMENT_URL, servers.management_url())
                .env(DATABASE_URL, servers.database_url()),
            Provided::Postgres(server) => demo
                .env_remove(AMQP_URL)
                .env_remove(MANAGEMENT_URL)
                .env(DATABASE_URL, server.url()),
        };
    }
}

fn compose_file() -> Result<PathBuf> {
    Ok(root()?.join("docker-compose.yml"))
}

/// The demo is built into the folder that this program is in.
fn program() -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let folder = own.parent().context("this program is in no folder")?;
    Ok(folder.join(PACKAGE))
}
