//! `cargo xtask bench`: benchmarks in release mode, on real servers.

use std::fs;
use std::io::ErrorKind;
use std::process::Command;

use anyhow::{Result, bail};
use clap::Args;
use tierline_testbed::{AMQP_URL, DATABASE_URL, MANAGEMENT_URL, Servers};

use crate::cargo::{cargo, step};
use crate::root;

/// What runs where no benchmark is named.
const ALL: [&str; 9] = [
    "publish",
    "publish-faults",
    "work",
    "suspect",
    "backlog",
    "control",
    "dead",
    "schedule",
    STATS,
];

/// It runs the `tierline` command.
const STATS: &str = "stats";

/// Other frameworks on the same load, which need programs of their own: only when asked for.
const PEERS: &str = "peers";

const PACKAGE: &str = "--package=tierline-benchmarks";

#[derive(Args)]
pub(crate) struct Options {
    /// The benchmark, a program in benchmarks/src/bin: publish, publish-faults, work, suspect, backlog, control,
    /// dead, schedule, stats, peers, soak, frames. Unless named, all but the last three run one after another, and
    /// target/benchmarks/all.json holds what they found.
    name: Option<String>,
    /// The parts of it to run; all unless named.
    parts: Vec<String>,
    /// Fewer rounds and smaller amounts, to see that all works.
    #[arg(long)]
    quick: bool,
    /// All, and then peers, with charts in docs/benchmarks (with --quick in target/benchmarks/charts).
    #[arg(long, conflicts_with = "name")]
    peers: bool,
    /// How long the soak lasts after its warm-up. Default 10; with --quick 1.
    #[arg(long, requires = "name", value_parser = clap::value_parser!(u32).range(1..))]
    minutes: Option<u32>,
}

pub(crate) async fn run(options: &Options) -> Result<()> {
    let servers = Servers::provide(&root()?.join("docker-compose.yml")).await?;
    match &options.name {
        Some(name) => one(name, options, &servers).await,
        None => all(options, &servers).await,
    }
}

async fn one(name: &str, options: &Options, servers: &Servers) -> Result<()> {
    build(&[name]).await?;
    let mut benchmark = program(name, options, servers)?;
    benchmark.args(&options.parts);
    benchmark.args(options.minutes.map(|it| format!("--minutes={it}")));
    step(name, benchmark).await
}

/// One that fails does not stop the others: what they find counts all the same.
async fn all(options: &Options, servers: &Servers) -> Result<()> {
    let names: Vec<&str> = ALL
        .into_iter()
        .chain(options.peers.then_some(PEERS))
        .collect();
    build(&[&names[..], &["summary", "charts"][..]].concat()).await?;
    let mut failed = Vec::new();
    for name in &names {
        forget_earlier_report(name)?;
        if let Err(error) = step(name, program(name, options, servers)?).await {
            eprintln!("{error:#}");
            failed.push(*name);
        }
    }
    let mut summary = program("summary", options, servers)?;
    summary.args(&names);
    step("summary", summary).await?;
    if options.peers
        && let Err(error) = step("charts", program("charts", options, servers)?).await
    {
        eprintln!("{error:#}");
        failed.push("charts");
    }
    if !failed.is_empty() {
        bail!("failed: {}", failed.join(", "));
    }
    Ok(())
}

/// Before the time is taken, and not while servers are measured.
async fn build(names: &[&str]) -> Result<()> {
    let mut build = cargo(&["build", "--release", PACKAGE])?;
    for name in names {
        build.args(["--bin", *name]);
    }
    step("build", build).await?;
    if names.contains(&STATS) {
        let command = cargo(&["build", "--release", "--package=tierline-cli"])?;
        step("build the command", command).await?;
    }
    Ok(())
}

fn program(name: &str, options: &Options, servers: &Servers) -> Result<Command> {
    let mut program = cargo(&["run", "--quiet", "--release", PACKAGE, "--bin", name, "--"])?;
    program
        .args(options.quick.then_some("--quick"))
        .env(AMQP_URL, servers.amqp_url())
        .env(MANAGEMENT_URL, servers.management_url())
        .env(DATABASE_URL, servers.database_url());
    Ok(program)
}

/// A benchmark that breaks off writes none, and the last one's would be taken for it.
fn forget_earlier_report(name: &str) -> Result<()> {
    let report = root()?.join(format!("target/benchmarks/{name}.json"));
    match fs::remove_file(report) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}
