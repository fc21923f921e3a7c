//! `cargo xtask chaos`: faults against a whole system, on servers of its own.

use anyhow::Result;
use clap::Args;

use crate::cargo::{cargo, step};
use crate::root;

/// Where recorded runs are listed, and where their sum is.
const RECORD: &str = "docs/chaos.md";
const SUMMARY: &str = "README.md";

/// A run of faults.
#[derive(Debug, Args)]
pub(crate) struct Chaos {
    /// Decides the faults, their order and their moments: the same seed repeats the run.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// A single node (1) or a cluster (3). Both, one after the other, unless said.
    #[arg(long)]
    nodes: Option<u8>,
    /// How long a run lasts, about; starting the servers and draining come on top.
    #[arg(long, default_value_t = 2.0)]
    minutes: f64,
    /// How many tasks a second are published.
    #[arg(long, default_value_t = 100)]
    rate: u64,
    /// Keeps only the steps of the plan whose text contains this, to look into one kind of fault.
    #[arg(long, conflicts_with = "record")]
    only: Option<String>,
    /// Only prints the plan.
    #[arg(long)]
    plan: bool,
    /// Writes the outcome into docs/chaos.md, and the sum of all into README.md.
    #[arg(long)]
    record: bool,
}

pub(crate) async fn run(chaos: &Chaos) -> Result<()> {
    tierline_testbed::programs().await?;
    let package = "--package=tierline-chaos";
    step("build", cargo(&["build", package])?).await?;
    let mut run = cargo(&["run", "--quiet", package, "--"])?;
    run.args(["--seed", &chaos.seed.to_string()])
        .args(["--minutes", &chaos.minutes.to_string()])
        .args(["--rate", &chaos.rate.to_string()]);
    if let Some(nodes) = chaos.nodes {
        run.args(["--nodes", &nodes.to_string()]);
    }
    if let Some(only) = &chaos.only {
        run.args(["--only", only]);
    }
    run.args(chaos.plan.then_some("--plan"));
    if chaos.record {
        run.arg("--record").arg(root()?.join(RECORD));
        run.arg("--summary").arg(root()?.join(SUMMARY));
    }
    step("chaos", run).await
}
