//! Prints results, and chooses the exit code.

use std::io::{self, Write};
use std::process::ExitCode;

use serde_json::{Value, json};
use tierline::error::{BrokerError, TopologyError};
use tierline::{Error, ErrorKind};

use crate::secret::without_credentials;

/// The file has mistakes, or the broker or the database does not fit it.
pub(crate) const WRONG: u8 = 1;
/// The command line is wrong, or a confirmation is missing.
pub(crate) const MISUSED: u8 = 2;
/// The broker or the database cannot be reached.
pub(crate) const BROKEN: u8 = 3;
/// A named item does not exist.
const NOT_FOUND: u8 = 4;

/// The result of a command, in both forms.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) text: String,
    pub(crate) json: Value,
    pub(crate) is_well: bool,
}

impl Output {
    pub(crate) fn well(text: String, json: Value) -> Self {
        Self {
            text,
            json,
            is_well: true,
        }
    }
}

pub(crate) fn print(output: &Output, json: bool) -> ExitCode {
    let printed = match json {
        true => write_json(&output.json),
        false => writeln!(io::stdout(), "{}", output.text.trim_end()),
    };
    match printed {
        // A reader that has seen enough, such as `head`, closes the pipe.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            eprintln!("tierline: cannot print the result: {error}");
            ExitCode::from(WRONG)
        }
        _ if output.is_well => ExitCode::SUCCESS,
        _ => ExitCode::from(WRONG),
    }
}

/// Why a command failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The library's error.
    Failed(Error),
    /// The library's error, after a part of the work.
    Partly(Box<Partial>),
    /// The command was used wrongly.
    Misused(String),
}

/// What a command did before it failed.
#[derive(Debug)]
pub(crate) struct Partial {
    pub(crate) done: Output,
    pub(crate) error: Error,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// Prints clap's output: the requested help, or the error of the command line.
pub(crate) fn misused(error: &clap::Error) -> ExitCode {
    let text = error.render().to_string();
    // A failed write is ignored: the exit code says the same.
    if !error.use_stderr() {
        let _ = write!(io::stdout(), "{text}");
        return ExitCode::SUCCESS;
    }
    let _ = write!(io::stderr(), "{}", without_credentials(&text));
    ExitCode::from(MISUSED)
}

pub(crate) fn fail(failure: &Failure, json: bool) -> ExitCode {
    let (mut description, text, code) = match failure {
        Failure::Failed(error) => (describe(error), error.to_string(), code(error)),
        Failure::Partly(partial) => {
            let Partial { done, error } = &**partial;
            let mut description = describe(error);
            description["done"] = done.json.clone();
            if !json {
                // The error is still to be printed, and matters more than a failed write.
                let _ = writeln!(io::stdout(), "{}", done.text.trim_end());
            }
            (description, error.to_string(), code(error))
        }
        Failure::Misused(problem) => (json!({}), problem.clone(), MISUSED),
    };
    let text = without_credentials(&text);
    description["error"] = json!(text);
    if json {
        // The error is also on standard error and in the exit code.
        let _ = write_json(&description);
    }
    eprintln!("{text}");
    ExitCode::from(code)
}

/// The fields of an error for programs, beside its text.
fn describe(error: &Error) -> Value {
    match error {
        Error::Topology(TopologyError::Invalid(invalid)) => {
            json!({ "problems": invalid.problems() })
        }
        Error::Broker(BrokerError::Mismatch(mismatch)) => json!({ "mismatch": mismatch }),
        _ => json!({}),
    }
}

fn code(error: &Error) -> u8 {
    match error.kind() {
        // A dead letter that cannot be published is wrong; the command line is not.
        ErrorKind::Invalid if error.stored().is_none() => MISUSED,
        ErrorKind::NotFound => NOT_FOUND,
        ErrorKind::Connection | ErrorKind::Overloaded => BROKEN,
        // The user was let in, and the topology needs more than the user may do.
        _ if matches!(error, Error::Broker(BrokerError::AccessRefused { .. })) => WRONG,
        ErrorKind::Permission => BROKEN,
        _ => WRONG,
    }
}

/// A number and its noun: "1 tier", "6 tiers".
pub(crate) fn count(number: impl TryInto<u64>, thing: &str) -> String {
    match number.try_into().unwrap_or(u64::MAX) {
        1 => format!("1 {thing}"),
        number => format!("{number} {thing}s"),
    }
}

fn write_json(value: &Value) -> io::Result<()> {
    writeln!(io::stdout(), "{value:#}")
}
