//! The file into which all processes of a run write what they do, a line each.
//!
//! Each line is one write at the end of the file, so the lines of all processes are in one order: what a handler wrote before
//! another one began is above the other's line.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    /// A process takes tasks of a tier.
    Ready,
    /// A handler began, and ended.
    Start,
    End,
    /// A task was settled as done.
    Done,
    /// A task was suspected, dead-lettered, retried, or lost its lease.
    Fault,
    /// A publish was confirmed. The time of the line is when it began.
    Sent,
    /// A publish failed.
    NotSent,
    /// A process warned.
    Warning,
    /// The process was killed, as the one that did it knows.
    Killed,
}

const NAMES: [(What, &str); 9] = [
    (What::Ready, "ready"),
    (What::Start, "start"),
    (What::End, "end"),
    (What::Done, "done"),
    (What::Fault, "fault"),
    (What::Sent, "sent"),
    (What::NotSent, "not-sent"),
    (What::Warning, "warning"),
    (What::Killed, "killed"),
];
/// Stands for a field that a line does not have.
const NOTHING: &str = "-";

#[derive(Debug, Clone)]
pub(crate) struct Line {
    /// The time since 1970, by the clock of the machine.
    pub(crate) at: Duration,
    pub(crate) process: u32,
    pub(crate) what: What,
    pub(crate) task: String,
    pub(crate) number: usize,
    pub(crate) tier: String,
    /// The customer of a task, the kind of a fault, or the text of a warning.
    pub(crate) about: String,
}

/// The time since 1970.
pub(crate) fn now() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

impl Line {
    /// One of this process, at this moment.
    pub(crate) fn new(what: What, task: &str, number: usize, tier: &str, about: &str) -> Self {
        Self {
            at: now(),
            process: std::process::id(),
            what,
            task: task.to_owned(),
            number,
            tier: tier.to_owned(),
            about: about.to_owned(),
        }
    }

    fn to_text(&self) -> String {
        let names = NAMES.iter().find(|(what, _)| *what == self.what);
        let what = names.map_or(NOTHING, |(_, name)| name);
        let or_nothing = |text: &str| match text {
            "" => NOTHING.to_owned(),
            text => text.replace(['\n', '\r'], " "),
        };
        format!(
            "{} {} {what} {} {} {} {}\n",
            self.at.as_micros(),
            self.process,
            or_nothing(&self.task),
            self.number,
            or_nothing(&self.tier),
            or_nothing(&self.about),
        )
    }

    fn read(text: &str) -> Option<Self> {
        let mut words = text.splitn(7, ' ');
        let mut word = || words.next();
        let at = Duration::from_micros(word()?.parse().ok()?);
        let process = word()?.parse().ok()?;
        let name = word()?;
        let (what, _) = NAMES.iter().find(|(_, it)| *it == name)?;
        let field = |text: &str| match text {
            NOTHING => String::new(),
            text => text.to_owned(),
        };
        Some(Self {
            at,
            process,
            what: *what,
            task: field(word()?),
            number: word()?.parse().ok()?,
            tier: field(word()?),
            about: field(word()?),
        })
    }
}

/// Where a process writes its lines.
#[derive(Debug)]
pub(crate) struct Writer(File);

impl Writer {
    pub(crate) fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let opened = OpenOptions::new().append(true).create(true).open(path);
        let file = opened.with_context(|| format!("cannot open {}", path.display()))?;
        Ok(Self(file))
    }

    /// Writes a line. One that cannot be written ends the process: without it the promises could not be checked.
    pub(crate) fn write(&self, line: &Line) {
        let text = line.to_text();
        match (&self.0).write(text.as_bytes()) {
            Ok(written) if written == text.len() => {}
            result => {
                eprintln!("could not write a line: {result:?}");
                std::process::exit(1);
            }
        }
    }
}

/// The lines of a run, as they come.
#[derive(Debug)]
pub(crate) struct Log {
    path: PathBuf,
    file: File,
    writer: Writer,
    /// The beginning of a line whose rest has not been read.
    rest: Vec<u8>,
    lines: Vec<Line>,
}

impl Log {
    /// A new file. It is removed with this value.
    pub(crate) fn create(path: PathBuf) -> Result<Self> {
        let writer = Writer::open(&path)?;
        let file = File::open(&path)?;
        Ok(Self {
            path,
            file,
            writer,
            rest: Vec::new(),
            lines: Vec::new(),
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Adds a line of this process.
    pub(crate) fn add(&self, line: &Line) {
        self.writer.write(line);
    }

    /// All lines that there are by now.
    pub(crate) fn read(&mut self) -> Result<&[Line]> {
        self.file.read_to_end(&mut self.rest)?;
        let complete = self.rest.iter().rposition(|byte| *byte == b'\n');
        let complete = complete.map_or(0, |last| last + 1);
        let rest = self.rest.split_off(complete);
        let text = std::mem::replace(&mut self.rest, rest);
        for text in std::str::from_utf8(&text)?.lines() {
            let Some(line) = Line::read(text) else {
                bail!("{} has the unreadable line {text:?}", self.path.display());
            };
            self.lines.push(line);
        }
        Ok(&self.lines)
    }

    /// How many lines of a kind a task has by now.
    pub(crate) fn count(&mut self, what: What, task: &str) -> Result<usize> {
        let lines = self.read()?.iter();
        Ok(lines
            .filter(|it| it.what == what && it.task == task)
            .count())
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        if std::env::var_os(tierline_testbed::KEEP).is_none() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// The most of these times that lie within one second, wherever it begins.
pub(crate) fn most_in_a_second(times: &mut [Duration]) -> usize {
    times.sort_unstable();
    let (mut first, mut most) = (0, 0);
    for (index, time) in times.iter().enumerate() {
        while *time - times[first] >= Duration::from_secs(1) {
            first += 1;
        }
        most = most.max(index - first + 1);
    }
    most
}
