//! The mistakes of a topology file, with their positions.

use std::fmt;

use serde::Serialize;

/// One mistake in a topology file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Problem {
    /// The file, as it was named when it was read; `<text>` for text without a name.
    pub file: String,
    /// The line, from 1.
    pub line: usize,
    /// The column, from 1, counted in characters.
    pub column: usize,
    /// What is wrong, in one sentence.
    pub message: String,
    /// What to write instead, where that is known.
    pub help: Option<String>,
}

/// `file:line:column: message`, and the help on a line of its own.
impl fmt::Display for Problem {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Problem {
            file,
            line,
            column,
            message,
            help,
        } = self;
        write!(out, "{file}:{line}:{column}: {message}")?;
        match help {
            Some(help) => write!(out, "\n    help: {help}"),
            None => Ok(()),
        }
    }
}

/// All the mistakes of one topology file, in the order of the file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub struct InvalidTopology {
    problems: Vec<Problem>,
}

impl InvalidTopology {
    pub(super) fn new(problems: Vec<Problem>) -> Self {
        Self { problems }
    }

    /// Every mistake, in the order of the file; never empty.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }
}

impl fmt::Display for InvalidTopology {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        for problem in &self.problems {
            writeln!(out, "{problem}")?;
        }
        match self.problems.as_slice() {
            [_] => write!(out, "1 problem in the topology"),
            problems => write!(out, "{} problems in the topology", problems.len()),
        }
    }
}
