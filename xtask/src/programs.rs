//! The programs that hold the tests: built by cargo, run side by side.
//!
//! `cargo test` runs one program after another, so at the end of each the slowest test keeps all
//! cores waiting. Here a second program runs beside it.
//!
//! A few tests that failed run once more, by themselves, when nothing else runs. One that passes then
//! is flaky: it does not fail the run, and is named at its end, because it is to be mended.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::cargo::{cargo, output};

const BUILD: [&str; 4] = ["test", "--workspace", "--all-features", "--no-run"];

/// Where more tests than this failed, none of them is run again: they did not fail by chance.
const FLAKY_LIMIT: usize = 5;

/// A program of tests, with how many of them are to run.
pub(crate) struct Program {
    name: String,
    command: Command,
    tests: usize,
}

/// A program that failed, with the tests that did, if it named them.
struct Failed {
    program: Program,
    tests: Vec<String>,
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
pub(crate) async fn run(programs: Vec<Program>, variables: &[(&str, &str)]) -> Result<Outcome> {
    let queue = Mutex::new(VecDeque::from(programs));
    let next = || {
        let mut queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.pop_front()
    };
    let one_after_another = async || {
        let mut failed = Vec::new();
        while let Some(mut program) = next() {
            program.command.envs(variables.iter().copied());
            let (passed, printed) = run_one(&program.name, again(&program.command)).await?;
            if !passed {
                let tests = failed_tests(&printed);
                failed.push(Failed { program, tests });
            }
        }
        anyhow::Ok(failed)
    };
    let (mut failed, others) = tokio::try_join!(one_after_another(), one_after_another())?;
    failed.extend(others);
    Ok(Outcome { failed })
}

/// What is left of a run of programs: those that failed.
pub(crate) struct Outcome {
    failed: Vec<Failed>,
}

impl Outcome {
    /// Runs the tests that failed once more, one at a time, and fails if one of them does. To be called
    /// when nothing else runs.
    pub(crate) async fn or_flaky(self) -> Result<()> {
        let count: usize = self.failed.iter().map(|failed| failed.tests.len()).sum();
        let mut failed = Vec::new();
        let mut flaky = Vec::new();
        for Failed { program, tests } in self.failed {
            if tests.is_empty() || count > FLAKY_LIMIT {
                failed.push(program.name);
                continue;
            }
            let (is_well, printed) =
                run_one(&program.name, alone(&program.command, &tests)).await?;
            // A name that matches no test runs none, which is well too.
            let have_run = printed.contains(&format!("{} passed", tests.len()));
            match is_well && have_run {
                true => flaky.extend(tests),
                false => failed.push(program.name),
            }
        }
        for test in flaky {
            println!("── FLAKY, to be mended: {test} failed beside others, and passed by itself");
        }
        passed(&failed)
    }

    /// Fails if a program failed.
    pub(crate) fn without_flaky(self) -> Result<()> {
        let failed = self.failed.into_iter().map(|it| it.program.name);
        passed(&failed.collect::<Vec<_>>())
    }
}

fn passed(failed: &[String]) -> Result<()> {
    if !failed.is_empty() {
        bail!("tests failed in {}", failed.join(", "));
    }
    Ok(())
}

/// Whether all tests of a program passed, and what it printed. Each test is told as it ends, the rest
/// in one piece, so that no other program's lines are between them.
async fn run_one(name: &str, command: Command) -> Result<(bool, String)> {
    let begin = Instant::now();
    let (status, rest) = output(command, is_one_test).await?;
    println!(
        "── {name}: {:.1} s\n{}",
        begin.elapsed().as_secs_f64(),
        rest.trim()
    );
    Ok((status.success(), rest))
}

/// The same command once more.
fn again(command: &Command) -> Command {
    let mut again = Command::new(command.get_program());
    again.args(command.get_args());
    if let Some(folder) = command.get_current_dir() {
        again.current_dir(folder);
    }
    let variables = command.get_envs();
    again.envs(variables.filter_map(|(name, value)| Some((name, value?))));
    again
}

/// A program of tests with only these, one at a time.
fn alone(command: &Command, tests: &[String]) -> Command {
    let mut alone = again(command);
    alone.arg("--exact").args(tests);
    alone.env("RUST_TEST_THREADS", "1");
    alone
}

/// The tests that a program names at its end, behind the last line that says `failures:`.
fn failed_tests(printed: &str) -> Vec<String> {
    let Some((_, names)) = printed.rsplit_once("\nfailures:\n") else {
        return Vec::new();
    };
    let names = names.lines().take_while(|line| line.starts_with("    "));
    names.map(|name| name.trim().to_owned()).collect()
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
        let outcome = run(scripts.map(shell).into(), &variables).await.unwrap();
        let failed = outcome.or_flaky().await;
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

    /// Fails with these names the first time, and succeeds after that if it is told to.
    async fn failing(names: &str, then: &str) -> Result<()> {
        let file = std::env::temp_dir().join(format!("tierline-{}-{then}", std::process::id()));
        let script = format!(
            "if [ -e '{0}' ]; then rm '{0}'; {then}; fi; touch '{0}'; printf '\nfailures:\n{names}\n'; exit 1",
            file.display()
        );
        let outcome = run(vec![shell(&script)], &[]).await.unwrap();
        let ended = outcome.or_flaky().await;
        let _ = std::fs::remove_file(file);
        ended
    }

    #[tokio::test]
    async fn a_test_that_passes_by_itself_is_flaky() {
        failing("    a::b\\n    a::c\\n", "echo 2 passed; exit 0")
            .await
            .unwrap();
        failing("    a::b\\n", "echo 0 passed; exit 0")
            .await
            .unwrap_err();
        failing("    a::b\\n", "exit 3").await.unwrap_err();
    }

    #[tokio::test]
    async fn a_failure_without_a_name_and_one_of_many_tests_stay() {
        failing("", "exit 00").await.unwrap_err();
        let many = "    a::b\\n".repeat(FLAKY_LIMIT + 1);
        failing(&many, "exit 000").await.unwrap_err();
    }

    #[test]
    fn the_tests_that_failed_are_those_behind_the_last_heading() {
        let printed = "x\n\nfailures:\n\n---- a::b stdout ----\nno\n\nfailures:\n    a::b\n    c\n\ntest result: FAILED\n";
        assert_eq!(failed_tests(printed), ["a::b", "c"]);
        assert!(failed_tests("killed\n").is_empty());
    }

    #[test]
    fn a_package_is_named_by_its_id_or_by_its_folder() {
        let name = |id: &str| package_name(&Value::from(id)).unwrap().to_owned();
        let macros = "path+file:///home/ada/tierline/macros#tierline-macros@0.1.0";
        assert_eq!(name(macros), "tierline-macros");
        assert_eq!(name("path+file:///home/ada/first_app#0.1.0"), "first_app");
    }
}
