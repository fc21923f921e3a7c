//! The record outside of the system: a file for each process, a line for each fact.
//!
//! A line is one write to a file opened for appending. After the call the kernel has it, so it
//! survives the `kill -9` of its writer.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};

/// Milliseconds since 1970.
pub(crate) type Millis = u64;

pub(crate) fn now() -> Millis {
    millis(SystemTime::now())
}

pub(crate) fn millis(time: SystemTime) -> Millis {
    let since = time.duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_millis() as Millis)
}

/// A fact.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fact {
    /// A publish that began at `sent`, or later, was confirmed. Written after the confirm.
    Confirmed { tier: String, sent: Millis },
    /// A publish ended in an error.
    Refused { why: String },
    /// A handler did its work. Written before the handler returns.
    Ran { tier: String },
    /// A handler failed on purpose.
    Failed,
    /// A worker found that it had expired.
    Expired,
}

/// A fact about a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) at: Millis,
    pub(crate) id: String,
    pub(crate) fact: Fact,
}

/// The ledger file of a process.
#[derive(Debug)]
pub(crate) struct Ledger(File);

impl Ledger {
    pub(crate) fn open(path: &Path) -> Result<Ledger> {
        let file = OpenOptions::new().append(true).create(true).open(path);
        let file = file.with_context(|| format!("could not open {}", path.display()))?;
        Ok(Ledger(file))
    }

    pub(crate) fn note(&self, id: impl ToString, fact: Fact) -> io::Result<()> {
        let entry = Entry {
            at: now(),
            id: id.to_string(),
            fact,
        };
        (&self.0).write_all(entry.to_line().as_bytes())
    }
}

/// All entries of the files in a folder whose names end with `.ledger`, in order of time.
pub(crate) fn read(folder: &Path) -> Result<Vec<Entry>> {
    let mut entries = Vec::new();
    for file in fs::read_dir(folder)? {
        let path = file?.path();
        if path.extension().is_some_and(|it| it == "ledger") {
            let text = fs::read_to_string(&path)?;
            for line in text.lines() {
                let entry = Entry::from_line(line);
                entries.push(entry.with_context(|| format!("{}: {line}", path.display()))?);
            }
        }
    }
    entries.sort_by_key(|entry| entry.at);
    Ok(entries)
}

impl Entry {
    fn to_line(&self) -> String {
        let Self { at, id, fact } = self;
        match fact {
            Fact::Confirmed { tier, sent } => format!("{at} {id} confirmed {tier} {sent}\n"),
            Fact::Refused { why } => format!("{at} {id} refused {why}\n"),
            Fact::Ran { tier } => format!("{at} {id} ran {tier}\n"),
            Fact::Failed => format!("{at} {id} failed\n"),
            Fact::Expired => format!("{at} {id} expired\n"),
        }
    }

    fn from_line(line: &str) -> Option<Entry> {
        let mut words = line.split(' ');
        let mut word = || words.next().map(str::to_owned);
        let at = word()?.parse().ok()?;
        let id = word()?;
        let fact = match word()?.as_str() {
            "confirmed" => Fact::Confirmed {
                tier: word()?,
                sent: word()?.parse().ok()?,
            },
            "refused" => Fact::Refused { why: word()? },
            "ran" => Fact::Ran { tier: word()? },
            "failed" => Fact::Failed,
            "expired" => Fact::Expired,
            _ => return None,
        };
        Some(Entry { at, id, fact })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_as_it_was_written() {
        let facts = [
            Fact::Confirmed {
                tier: "normal".into(),
                sent: 12,
            },
            Fact::Refused {
                why: "Blocked".into(),
            },
            Fact::Ran {
                tier: "critical".into(),
            },
            Fact::Failed,
            Fact::Expired,
        ];
        for fact in facts {
            let entry = Entry {
                at: 34,
                id: "producer.1-2".into(),
                fact,
            };
            let line = entry.to_line();
            assert_eq!(Entry::from_line(line.trim_end()), Some(entry));
        }
        assert_eq!(Entry::from_line("34 producer.1-2 conf"), None);
    }
}
