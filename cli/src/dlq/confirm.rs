//! Asks for confirmation before many rows change, and shows progress.

use std::io::{IsTerminal, Write, stderr, stdin};

use crate::arguments::Operator;
use crate::output::{self, Failure};

/// Asks whether this many rows should change, unless --yes is given.
pub(crate) fn confirm(operator: &Operator, what: &str, count: u64) -> Result<(), Failure> {
    match count {
        0 => Ok(()),
        _ => confirm_change(operator, what, &output::count(count, "dead letter")),
    }
}

/// Asks whether these things should change, unless --yes is given.
pub(crate) fn confirm_change(operator: &Operator, what: &str, things: &str) -> Result<(), Failure> {
    if operator.yes {
        return Ok(());
    }
    let missing = || Failure::Misused(format!("this would {what} {things}; confirm with --yes"));
    if !stdin().is_terminal() {
        return Err(missing());
    }
    eprint!("{what} {things}? [y/N] ");
    let mut answer = String::new();
    match stdin().read_line(&mut answer) {
        Ok(_) if matches!(answer.trim(), "y" | "Y" | "yes") => Ok(()),
        _ => Err(missing()),
    }
}

/// A progress bar on a terminal.
pub(crate) struct Bar {
    total: u64,
    is_shown: bool,
}

impl Bar {
    pub(crate) fn new(total: u64, json: bool) -> Self {
        Self {
            total,
            is_shown: !json && stderr().is_terminal(),
        }
    }

    pub(crate) fn show(&self, done: u64) {
        if !self.is_shown {
            return;
        }
        const WIDTH: u64 = 30;
        let filled = (done * WIDTH / self.total.max(1)).min(WIDTH);
        let bar = "#".repeat(filled as usize) + &"-".repeat((WIDTH - filled) as usize);
        let end = if done >= self.total { "\n" } else { "" };
        // Progress is optional output, so a failed write is ignored.
        let _ = write!(stderr(), "\r[{bar}] {done}/{}{end}", self.total);
        let _ = stderr().flush();
    }
}
