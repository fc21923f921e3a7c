//! `cargo xtask test`: all of CI in one command.

use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::Value;
use tierline_testbed::{AMQP_URL, DATABASE_URL, MANAGEMENT_URL, PgBouncer, Servers};

use crate::cargo::{cargo, patient, step};
use crate::programs::{self, Program};
use crate::root;

/// In each of the two programs that run side by side. Tests wait for servers more than they compute,
/// so more of them than cores.
const TEST_THREADS: &str = "4";

/// For what nobody builds by hand: what a later build could reuse is most of what is written.
const NOT_INCREMENTAL: [(&str, &str); 1] = [("CARGO_INCREMENTAL", "0")];

pub(crate) async fn run(name: Option<&str>) -> Result<()> {
    if name.is_none() {
        step("format", cargo(&["fmt", "--all", "--check"])?).await?;
    }
    let compose_file = root()?.join("docker-compose.yml");
    // The servers start while the compiler works.
    let provide = async {
        let servers = Servers::provide(&compose_file).await?;
        // The tests that need it say so too.
        if let Err(error) = PgBouncer::provide().await {
            eprintln!("tests behind PgBouncer will fail: {error:#}");
        }
        Ok(servers)
    };
    let (servers, programs) = tokio::try_join!(provide, build(name))?;

    let variables = [
        (AMQP_URL, servers.amqp_url()),
        (MANAGEMENT_URL, servers.management_url()),
        (DATABASE_URL, servers.database_url()),
        ("RUST_TEST_THREADS", TEST_THREADS),
    ];
    let begin = Instant::now();
    let tests = async {
        let outcome = programs::run(programs, &variables).await;
        eprintln!("── tests: {:.1} s", begin.elapsed().as_secs_f64());
        outcome
    };
    // One of cargo's commands at a time: they would wait for each other.
    let with_cargo = async {
        let documentation = documentation_tests(name, &variables).await;
        let checked = match name {
            None => checks().await,
            Some(_) => Ok(()),
        };
        (documentation, checked)
    };
    // Tests wait for servers: meanwhile the compiler checks.
    let (ended, (documentation, checked)) = tokio::join!(tests, with_cargo);
    let passed = match ended {
        Ok(outcome) => outcome.or_flaky().await,
        Err(error) => Err(error),
    };
    let failed: Vec<String> = [passed, documentation, checked]
        .into_iter()
        .filter_map(|result| Some(format!("{:#}", result.err()?)))
        .collect();
    if !failed.is_empty() {
        bail!("{}", failed.join("; "));
    }
    Ok(())
}

async fn documentation_tests(name: Option<&str>, variables: &[(&str, &str)]) -> Result<()> {
    let mut command = cargo(&["test", "--doc", "--workspace", "--all-features"])?;
    command.args(name);
    let program = Program::uncounted("documentation tests", command);
    let outcome = programs::run(vec![program], variables).await?;
    outcome.without_flaky()
}

/// Builds the tests whose name contains `name`.
async fn build(name: Option<&str>) -> Result<Vec<Program>> {
    let begin = Instant::now();
    eprintln!("── build of the tests");
    let programs = programs::built(name).await?;
    eprintln!(
        "── build of the tests: {:.1} s",
        begin.elapsed().as_secs_f64()
    );
    if let Some(name) = name
        && programs.is_empty()
        && !is_in_the_documentation(name)?
    {
        // A slip in the name would else run no test and look like success.
        bail!("there is no test whose name contains {name:?}");
    }
    Ok(programs)
}

/// What the compiler says of everything, beside the tests that run.
async fn checks() -> Result<()> {
    let mut clippy = cargo(&["clippy", "--workspace", "--all-targets", "--all-features"])?;
    clippy.args(["--", "--deny", "warnings"]);
    step("clippy", patient(clippy)).await?;
    let mut documentation = cargo(&["doc", "--workspace", "--all-features", "--no-deps"])?;
    // An example brings the dev-dependencies: without them most dependencies have fewer features
    // than for clippy, and are checked once more.
    documentation.args(["--lib", "--bins", "--example", "hello"]);
    documentation.env("RUSTDOCFLAGS", "--deny warnings");
    step("documentation", patient(documentation)).await?;
    for features in each_feature_alone()? {
        let mut check = cargo(&["clippy", "--package", "tierline", "--no-default-features"])?;
        check.args(["--features", &features, "--", "--deny", "warnings"]);
        check.envs(NOT_INCREMENTAL);
        step(&format!("features [{features}]"), patient(check)).await?;
    }
    // As their users build them: here other packages ask for features that these forgot.
    for package in ["tierline-macros", "tierline-cli"] {
        let mut check = cargo(&["clippy", "--package", package])?;
        check.args(["--", "--deny", "warnings"]);
        check.envs(NOT_INCREMENTAL);
        step(&format!("{package} by itself"), patient(check)).await?;
    }
    Ok(())
}

/// Whether a test of the documentation has a name that contains this.
fn is_in_the_documentation(name: &str) -> Result<bool> {
    let mut list = cargo(&["test", "--doc", "--workspace", "--all-features", "--quiet"])?;
    let output = list.args([name, "--", "--list"]).output()?;
    let lines = String::from_utf8_lossy(&output.stdout);
    Ok(lines.lines().any(|line| line.ends_with(": test")))
}

/// The library without features, and with each of them alone.
fn each_feature_alone() -> Result<Vec<String>> {
    let output = cargo(&["metadata", "--no-deps", "--format-version=1"])?.output()?;
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    let packages = metadata["packages"].as_array().context("no packages")?;
    let library = packages
        .iter()
        .find(|package| package["name"] == "tierline");
    let features = library.and_then(|package| package["features"].as_object());
    let names = features.into_iter().flat_map(|features| features.keys());
    let named = names.filter(|name| *name != "default").cloned();
    Ok(std::iter::once(String::new()).chain(named).collect())
}
