//! Running cargo, a step at a time.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tierline_testbed::Foreground;

use crate::root;

/// Cargo with these arguments, in the root of the repository.
pub(crate) fn cargo(arguments: &[&str]) -> Result<Command> {
    let mut command = tierline_testbed::cargo();
    command.current_dir(root()?).args(arguments);
    Ok(command)
}

/// The same command, which leaves the processor to others that want it.
pub(crate) fn patient(command: Command) -> Command {
    let mut nice = Command::new("nice");
    nice.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => nice.env(name, value),
            None => nice.env_remove(name),
        };
    }
    nice.current_dir(command.get_current_dir().unwrap_or(Path::new(".")));
    nice
}

/// Runs a command, and says how long it took.
pub(crate) async fn step(name: &str, command: Command) -> Result<()> {
    let begin = Instant::now();
    eprintln!("── {name}");
    let status = Foreground::start(command)?.ended().await?;
    eprintln!("── {name}: {:.1} s", begin.elapsed().as_secs_f64());
    if !status.success() {
        bail!("{name} failed ({status})");
    }
    Ok(())
}

/// How long a command's output is awaited after its end: a program that it left behind may hold on
/// to it.
const REST_OF_THE_OUTPUT: Duration = Duration::from_secs(5);

/// Runs a command and gives what it printed, but for the lines that are `shown` at once.
pub(crate) async fn output(
    mut command: Command,
    shown: fn(&str) -> bool,
) -> Result<(ExitStatus, String)> {
    command.stdout(Stdio::piped());
    let mut running = Foreground::start(command)?;
    let pipe = running.output().context("the output is not piped")?;
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || read(pipe, shown, &sender));
    let status = running.ended().await?;
    let mut rest = String::new();
    while let Ok(line) = lines.recv_timeout(REST_OF_THE_OUTPUT) {
        rest.push_str(&line);
    }
    Ok((status, rest))
}

fn read(pipe: ChildStdout, shown: fn(&str) -> bool, rest: &mpsc::Sender<String>) {
    let mut pipe = BufReader::new(pipe);
    let mut bytes = Vec::new();
    while pipe
        .read_until(b'\n', &mut bytes)
        .is_ok_and(|count| count > 0)
    {
        let line = String::from_utf8_lossy(&bytes).into_owned();
        if shown(&line) {
            print!("{line}");
        } else if rest.send(line).is_err() {
            return;
        }
        bytes.clear();
    }
}
