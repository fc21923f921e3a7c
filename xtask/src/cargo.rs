//! Running cargo, a step at a time.

use std::process::Command;
use std::time::Instant;

use anyhow::{Result, bail};
use tierline_testbed::Foreground;

use crate::root;

/// Cargo with these arguments, in the root of the repository.
pub(crate) fn cargo(arguments: &[&str]) -> Result<Command> {
    let mut command = tierline_testbed::cargo();
    command.current_dir(root()?).args(arguments);
    Ok(command)
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
