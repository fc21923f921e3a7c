//! `cargo xtask bench`: a benchmark in release mode, on real servers.

use anyhow::Result;
use tierline_testbed::{AMQP_URL, DATABASE_URL, MANAGEMENT_URL, Servers};

use crate::cargo::{cargo, step};
use crate::root;

pub(crate) async fn run(name: &str, is_quick: bool) -> Result<()> {
    let compose_file = root()?.join("docker-compose.yml");
    let servers = Servers::provide(&compose_file).await?;
    let package = "--package=tierline-benchmarks";
    // Built before the time is taken, and not while servers are measured.
    let build = cargo(&["build", "--release", package, "--bin", name])?;
    step("build", build).await?;
    let mut benchmark = cargo(&["run", "--quiet", "--release", package, "--bin", name])?;
    if is_quick {
        benchmark.args(["--", "--quick"]);
    }
    benchmark
        .env(AMQP_URL, servers.amqp_url())
        .env(MANAGEMENT_URL, servers.management_url())
        .env(DATABASE_URL, servers.database_url());
    step(name, benchmark).await
}
