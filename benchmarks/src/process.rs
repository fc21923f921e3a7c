//! What the kernel says of a process.

use std::fmt::Display;

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
