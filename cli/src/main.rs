//! The `tierline` command.

mod arguments;
mod audit;
mod connect;
mod control;
mod dlq;
mod figures;
mod output;
mod schedule;
mod secret;
#[cfg(feature = "admin")]
mod serve;
mod servers;
mod stats;
mod table;
mod tasks;
mod top;
mod topology;

use std::process::ExitCode;

use clap::Parser;

use arguments::{Arguments, Command};

fn main() -> ExitCode {
    let command = match Arguments::try_parse() {
        Ok(arguments) => arguments.command,
        Err(error) => return output::misused(&error),
    };
    let json = match &command {
        Command::Topology(command) => command.input().json,
        Command::Dlq(command) => command.log().input.json,
        Command::Schedule(command) => command.input().json,
        Command::Tasks(command) => command.input().json,
        Command::Control(command) => command.input().json,
        Command::Stats(command) => command.app.log.input.json,
        Command::Top(command) => command.app.log.input.json,
        #[cfg(feature = "admin")]
        Command::Serve { log, .. } => log.input.json,
        Command::Migrate { json, .. } => *json,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("tierline: cannot start: {error}");
            return ExitCode::from(output::BROKEN);
        }
    };
    let running = async {
        match command {
            Command::Topology(command) => topology::run(command).await,
            Command::Schedule(command) => schedule::run(command).await,
            Command::Tasks(command) => tasks::run(*command).await,
            Command::Control(command) => control::run(*command).await,
            Command::Stats(command) => stats::run(*command).await,
            Command::Top(command) => top::run(*command).await,
            Command::Dlq(command) => dlq::run(*command).await,
            #[cfg(feature = "admin")]
            Command::Serve {
                log,
                broker,
                token,
                listen,
                grace,
            } => serve::run(&log, &broker, &token, listen, &grace).await,
            Command::Migrate { database, .. } => dlq::migrate(&database).await,
        }
    };
    match runtime.block_on(running) {
        Ok(result) => output::print(&result, json),
        Err(failure) => output::fail(&failure, json),
    }
}
