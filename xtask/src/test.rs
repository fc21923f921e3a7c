//! `cargo xtask test`: all of CI in one command.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use tierline_testbed::{AMQP_URL, DATABASE_URL, MANAGEMENT_URL, Servers};

use crate::cargo::{cargo, step};
use crate::root;

/// Tests wait for servers more than they compute, so more of them than cores.
const TEST_THREADS: &str = "4";

pub(crate) async fn run(name: Option<&str>) -> Result<()> {
    let compose_file = root()?.join("docker-compose.yml");
    // The servers start while the compiler works.
    let (servers, ()) = tokio::try_join!(Servers::provide(&compose_file), checks(name))?;

    let mut tests = cargo(&["test", "--workspace", "--all-features"])?;
    tests.args(name);
    tests
        .env(AMQP_URL, servers.amqp_url())
        .env(MANAGEMENT_URL, servers.management_url())
        .env(DATABASE_URL, servers.database_url())
        .env("RUST_TEST_THREADS", TEST_THREADS);
    step("tests", tests).await
}

/// What needs no server. With a name only the tests are built, so that they are there when the
/// servers are.
async fn checks(name: Option<&str>) -> Result<()> {
    if name.is_none() {
        step("format", cargo(&["fmt", "--all", "--check"])?).await?;
        let mut clippy = cargo(&["clippy", "--workspace", "--all-targets", "--all-features"])?;
        clippy.args(["--", "--deny", "warnings"]);
        step("clippy", clippy).await?;
        let mut documentation = cargo(&["doc", "--workspace", "--all-features", "--no-deps"])?;
        documentation.env("RUSTDOCFLAGS", "--deny warnings");
        step("documentation", documentation).await?;
        for features in each_feature_alone()? {
            let mut check = cargo(&["clippy", "--package", "tierline", "--no-default-features"])?;
            check.args(["--features", &features, "--", "--deny", "warnings"]);
            step(&format!("features [{features}]"), check).await?;
        }
        // As their users build them: here other packages ask for features that these forgot.
        for package in ["tierline-macros", "tierline-cli"] {
            let mut check = cargo(&["clippy", "--package", package])?;
            check.args(["--", "--deny", "warnings"]);
            step(&format!("{package} by itself"), check).await?;
        }
    }
    let build = cargo(&["test", "--workspace", "--all-features", "--no-run"])?;
    step("build of the tests", build).await?;
    match name {
        Some(name) => check_that_one_matches(name),
        None => Ok(()),
    }
}

/// A slip in the name would else run no test and look like success.
fn check_that_one_matches(name: &str) -> Result<()> {
    let mut list = cargo(&["test", "--workspace", "--all-features", "--quiet"])?;
    let output = list.args([name, "--", "--list"]).output()?;
    let found = String::from_utf8_lossy(&output.stdout)
        .lines()
        .any(|line| line.ends_with(": test"));
    if !found {
        bail!("there is no test whose name contains {name:?}");
    }
    Ok(())
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
