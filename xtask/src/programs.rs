//! The programs that hold the tests: built by cargo, run side by side.
//!
//! `cargo test` runs one program after another, so at the end of each the slowest test keeps all
//! cores waiting. Here a second program runs beside it.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::cargo::{cargo, output};

const BUILD: [&str; 4] = ["test", "--workspace", "--all-features", "--no-run"];

/// A program of tests, with how many of them are to run.
pub(crate) struct Program {
    name: String,
    command: Command,
    tests: usize,
}

impl Program {
    /// A program whose tests are not counted before it runs.
    pub(crate) fn uncounted(name: &str, command: Command) -> Self {
        Self {
            name: name.to_owned(),
            command,
            tests: 0,
        }
    }
}

/// Builds the programs of the workspace, and gives those that have a test whose name contains `name`.
pub(crate) async fn built(name: Option<&str>) -> Result<Vec<Program>> {
    let mut build = cargo(&BUILD)?;
    build.arg("--message-format=json-render-diagnostics");
    let (status, messages) = output(build, |_| false).await?;
    if !status.success() {
        bail!("the build of the tests failed ({status})");
    }
    let artifacts = messages
        .lines()
        .map(serde_json::from_str::<Value>)
        .filter(|message| {
            let is_test =
                |it: &Value| it["profile"]["test"] == true && it["executable"].is_string();
            message.as_ref().map_or(true, is_test)
        });
    let mut programs = Vec::new();
    for artifact in artifacts {
        let program = of_artifact(&artifact?, name)?;
        programs.extend((program.tests > 0).then_some(program));
    }
    // The largest takes longest: the others run beside it.
    programs.sort_by_key(|program| std::cmp::Reverse(program.tests));
    Ok(programs)
}

/// The program that one of cargo's messages tells of, run as cargo would run it.
fn of_artifact(artifact: &Value, name: Option<&str>) -> Result<Program> {
    let text = |value: &Value| value.as_str().map(PathBuf::from);
    let executable = text(&artifact["executable"]).context("a program without a path")?;
    let manifest = text(&artifact["manifest_path"]).context("a program without a manifest")?;
    let package = manifest.parent().context("a manifest in no folder")?;
    let mut command = Command::new(&executable);
    command
        .args(name)
        .current_dir(package)
        .env("CARGO_MANIFEST_DIR", package)
        .env("CARGO_MANIFEST_PATH", &manifest)
        .env("CARGO_PKG_NAME", package_name(&artifact["package_id"])?);
    let source = text(&artifact["target"]["src_path"]).context("a program without source")?;
    let workspace = crate::root()?;
    let source = source.strip_prefix(&workspace).unwrap_or(&source);
    Ok(Program {
        name: source.display().to_string(),
        tests: count(&executable, package, name)?,
        command,
    })
}

/// The package of an id such as `path+file:///home/ada/tierline/macros#tierline-macros@0.1.0`, or
/// `…/first_app#0.1.0` where the folder has the package's name.
fn package_name(id: &Value) -> Result<&str> {
    let id = id.as_str().context("a program of no package")?;
    let (place, package) = id.rsplit_once('#').context("a package without a version")?;
    match package.rsplit_once('@') {
        Some((name, _)) => Ok(name),
        None => Ok(place.rsplit('/').next().unwrap_or(place)),
    }
}

/// How many tests of a program have a name that contains `name`.
fn count(executable: &Path, package: &Path, name: Option<&str>) -> Result<usize> {
    let mut list = Command::new(executable);
    list.args(name).arg("--list").current_dir(package);
    let output = list.output()?;
    if !output.status.success() {
        bail!("{list:?} failed ({})", output.status);
    }
    let lines = String::from_utf8(output.stdout)?;
    Ok(lines
        .lines()
        .filter(|line| line.ends_with(": test"))
        .count())
}

/// Runs programs, two at a time, each with the same variables in its environment. All run, also
/// after one has failed.
pub(crate) async fn run(programs: Vec<Program>, variables: &[(&str, &str)]) -> Result<()> {
    let queue = Mutex::new(VecDeque::from(programs));
    let next = || {
        let mut queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.pop_front()
    };
    let one_after_another = async || {
        let mut failed = Vec::new();
        while let Some(mut program) = next() {
            program.command.envs(variables.iter().copied());
            if !run_one(&program.name, program.command).await? {
                failed.push(program.name);
            }
        }
        anyhow::Ok(failed)
    };
    let (failed, others) = tokio::try_join!(one_after_another(), one_after_another())?;
    let failed = [failed, others].concat();
    if !failed.is_empty() {
        bail!("tests failed in {}", failed.join(", "));
    }
    Ok(())
}

/// Whether all tests of a program passed. Each is told as it ends, the rest of what the program
/// prints in one piece, so that no other program's lines are between them.
async fn run_one(name: &str, command: Command) -> Result<bool> {
    let begin = Instant::now();
    let (status, rest) = output(command, is_one_test).await?;
    println!(
        "── {name}: {:.1} s\n{}",
        begin.elapsed().as_secs_f64(),
        rest.trim()
    );
    Ok(status.success())
}

fn is_one_test(line: &str) -> bool {
    line.starts_with("test ") && !line.starts_with("test result")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Program {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Program::uncounted(script, command)
    }

    #[tokio::test]
    async fn every_program_runs_and_those_that_failed_are_named() {
        let folder = std::env::temp_dir().join(format!("tierline-programs-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let scripts = [
            "exit 1",
            "touch \"$FOLDER/second\"",
            "exit 2",
            "touch \"$FOLDER/last\"",
        ];
        let variables = [("FOLDER", folder.to_str().unwrap())];
        let failed = run(scripts.map(shell).into(), &variables).await;
        let ran = ["second", "last"].map(|file| folder.join(file).exists());
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(ran, [true, true]);
        let mut failed = failed.unwrap_err().to_string();
        failed = failed.replace("exit 2, exit 1", "exit 1, exit 2");
        assert_eq!(failed, "tests failed in exit 1, exit 2");
    }

    #[tokio::test]
    async fn what_a_program_prints_besides_its_tests_is_kept_together() {
        let Program { command, .. } =
            shell("echo running 1 test; echo test a ... ok; echo; echo test result: ok. 1 passed");
        let (status, rest) = output(command, is_one_test).await.unwrap();
        assert!(status.success());
        assert_eq!(rest, "running 1 test\n\ntest result: ok. 1 passed\n");
    }

    #[test]
    fn a_package_is_named_by_its_id_or_by_its_folder() {
        let name = |id: &str| package_name(&Value::from(id)).unwrap().to_owned();
        let macros = "path+file:///home/ada/tierline/macros#tierline-macros@0.1.0";
        assert_eq!(name(macros), "tierline-macros");
        assert_eq!(name("path+file:///home/ada/first_app#0.1.0"), "first_app");
    }
}
