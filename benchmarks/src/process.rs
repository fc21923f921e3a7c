//! What the kernel says of a process.

use std::fmt::Display;
use std::time::Duration;

use anyhow::{Context, Result};

/// A figure of `/proc/PROCESS/status`, such as `VmRSS`, which is in KiB, or `Threads`. The process is
/// a number or `self`.
///
/// # Errors
/// A process or a field that is not there.
pub fn status(process: impl Display, field: &str) -> Result<u64> {
    let file = format!("/proc/{process}/status");
    let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {file}"))?;
    let lines = text.lines().filter_map(|line| line.split_once(':'));
    let figure = lines
        .filter(|(name, _)| *name == field)
        .find_map(|(_, rest)| rest.split_whitespace().next()?.parse().ok());
    figure.with_context(|| format!("no {field} in {file}"))
}

/// The processor time that a process has used, with that of its threads. The process is a number or `self`.
///
/// # Errors
/// A process that is not there.
pub fn processor_time(process: impl Display) -> Result<Duration> {
    /// The kernel tells the time in these, on every machine.
    const TICKS: f64 = 100.0;
    let file = format!("/proc/{process}/stat");
    let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {file}"))?;
    // The name of the program may have spaces, and is in brackets.
    let fields = text.rsplit(')').next().unwrap_or_default();
    let mut fields = fields.split_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<f64>().ok();
    let used = ticks().zip(ticks());
    let (user, system) = used.with_context(|| format!("no times in {file}"))?;
    Ok(Duration::from_secs_f64((user + system) / TICKS))
}
