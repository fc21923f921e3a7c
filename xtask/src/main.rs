//! The commands of this repository, each on real servers that it finds, installs or starts.

mod bench;
mod cargo;
mod chaos;
mod demo;
mod programs;
mod services;
mod test;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use tierline_testbed::wait_until_clean;
use tokio::signal::unix::{SignalKind, signal};

/// What can be done with this repository, on real servers that are started for it.
///
/// Servers come from AMQP_URL and DATABASE_URL if set; else private ones are started from the
/// programs of this machine, which are installed first where they are missing (root on Debian or
/// Ubuntu); else docker compose is used. TIERLINE_RABBITMQ=newest takes RabbitMQ 4.3 or later.
/// TIERLINE_KEEP=1 keeps the servers' folders and logs under target/testbed.
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
enum Command {
    /// A night at the hotel of 75 tasks, live in this terminal: a minute, and a summary at the end.
    Demo(demo::Options),
    /// Everything that CI checks; with NAME only the tests whose name contains it.
    Test {
        /// A part of the names of the tests to run.
        name: Option<String>,
    },
    /// Measures, in release mode: all or one benchmark, with a table of what was promised and JSON.
    Bench(bench::Options),
    /// Breaks servers, networks and processes under a system that works, and shows that nothing is lost.
    Chaos(chaos::Chaos),
    /// Starts the servers, prints their URLs and keeps them until Ctrl-C.
    Services,
}

#[tokio::main]
async fn main() -> ExitCode {
    let command = Command::parse();
    let work = async {
        match command {
            Command::Demo(options) => demo::run(&options).await,
            Command::Test { name } => test::run(name.as_deref()).await,
            Command::Bench(options) => bench::run(&options).await,
            Command::Chaos(chaos) => chaos::run(&chaos).await,
            Command::Services => services::run().await,
        }
    };
    // Dropping the work ends its servers and whatever it runs.
    let ended = tokio::select! {
        result = work => Some(result),
        _ = interrupted() => None,
    };
    match ended {
        Some(Ok(())) => ExitCode::SUCCESS,
        Some(Err(error)) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
        None => {
            wait_until_clean();
            ExitCode::from(130)
        }
    }
}

/// Completes when this process is asked to end.
async fn interrupted() -> Result<()> {
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hangup = signal(SignalKind::hangup())?;
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
        _ = hangup.recv() => {}
    }
    Ok(())
}

/// The root of the repository.
fn root() -> Result<PathBuf> {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .map(Path::to_path_buf)
        .context("xtask is not inside a workspace")
}
