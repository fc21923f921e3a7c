//! Injects faults into a running system of a producer, workers, a collector and a scheduler. A ledger
//! outside of it records the end of every confirmed task.
//!
//! `cargo xtask chaos [--seed N] [--nodes 1|3] [--minutes M] [--record]`

mod conduct;
mod crew;
mod fault;
mod ledger;
mod plan;
mod progress;
mod random;
mod record;
mod report;
mod roles;
mod verdict;
mod world;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, bail};
use clap::Parser;

use conduct::Order;
use plan::Plan;

/// A bounded, seeded run of faults. Exits with 1 if a confirmed task was lost, or did not
/// end.
#[derive(Debug, Parser)]
#[command(args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(flatten)]
    run: Run,
    #[command(subcommand)]
    part: Option<Part>,
}

#[derive(Debug, clap::Args)]
struct Run {
    /// Decides the faults, their order and their times
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// A single node (1) or a cluster (3) [default: both, one after the other]
    #[arg(long)]
    nodes: Option<usize>,
    /// The duration of a run, about. From two minutes on it has every kind of fault
    #[arg(long, default_value_t = 2.0)]
    minutes: f64,
    /// Run only the steps of the plan whose text contains this
    #[arg(long)]
    only: Option<String>,
    /// Only print the plan
    #[arg(long)]
    plan: bool,
    /// How many tasks a second the producer publishes
    #[arg(long, default_value_t = 100)]
    rate: u64,
    /// A file with a table of runs, to which this run is added
    #[arg(long)]
    record: Option<PathBuf>,
    /// A file with marks, between which the totals of that table are written
    #[arg(long, requires = "record")]
    summary: Option<PathBuf>,
}

#[derive(Debug, clap::Subcommand)]
enum Part {
    /// Play a role in the system under test
    #[command(hide = true)]
    Play(roles::Part),
}

fn main() -> Result<ExitCode> {
    let arguments = Arguments::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    match arguments.part {
        Some(Part::Play(part)) => {
            runtime.block_on(roles::play(part))?;
            Ok(ExitCode::SUCCESS)
        }
        None => runtime.block_on(run(arguments.run)),
    }
}

async fn run(run: Run) -> Result<ExitCode> {
    if !(run.minutes > 0.0 && run.minutes < 24.0 * 60.0) {
        bail!(
            "--minutes {}: more than none, and less than a day",
            run.minutes
        );
    }
    let all = match run.nodes {
        Some(nodes) => vec![nodes],
        None => vec![1, 3],
    };
    let mut are_well = true;
    for nodes in all {
        let order = Order {
            seed: run.seed,
            nodes,
            length: Duration::from_secs_f64(run.minutes * 60.0),
            rate: run.rate,
        };
        println!("seed {}, {nodes} node(s), the plan:", run.seed);
        let plan = Plan::new(order.seed, nodes, order.length);
        let plan = plan.only(run.only.as_deref().unwrap_or_default());
        println!("{plan}");
        if run.plan {
            continue;
        }
        let report = conduct::conduct(order, &plan).await?;
        print!("{report}");
        if let Some(path) = &run.record {
            record::record(path, run.summary.as_deref(), &report)?;
        }
        are_well &= report.is_well();
    }
    Ok(match are_well {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}
