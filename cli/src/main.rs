//! The `tierline` command.

mod arguments;
mod output;
mod topology;

use std::process::ExitCode;

use clap::Parser;

use arguments::{Arguments, Command};

fn main() -> ExitCode {
    let Command::Topology(command) = Arguments::parse().command;
    let json = command.input().json;
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
    match runtime.block_on(topology::run(command)) {
        Ok(result) => output::print(&result, json),
        Err(error) => output::fail(&error, json),
    }
}
