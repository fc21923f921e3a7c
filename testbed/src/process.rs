//! One server process, in a process group of its own.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::guard::{self, End};

/// How long a dropped process may take to end by itself. A package manager that is cut off leaves
/// the machine worse than it was.
const DROP_LIMIT: Duration = Duration::from_secs(60);

/// How long the threads of a process may take to stop.
const FREEZE_LIMIT: Duration = Duration::from_secs(10);

/// A running server. Dropped, it is killed.
#[derive(Debug)]
pub(crate) struct Process {
    name: String,
    child: Child,
    output: PathBuf,
    end: End,
}

impl Process {
    /// Starts `command` with its output in the file `output`.
    pub(crate) fn spawn(
        name: &str,
        mut command: Command,
        output: &Path,
        end: End,
    ) -> Result<Process> {
        let log = File::options()
            .create(true)
            .append(true)
            .open(output)
            .with_context(|| format!("could not open {}", output.display()))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(0)
            .spawn()
            .with_context(|| format!("could not start {name}: {command:?}"))?;
        let process = Process {
            name: name.to_owned(),
            child,
            output: output.to_owned(),
            end,
        };
        guard::watch(process.child.id(), end)?;
        Ok(process)
    }

    /// Sends a signal to the server and all processes of its group.
    pub(crate) fn signal(&self, signal: Signal) -> Result<()> {
        let group = i32::try_from(self.child.id())
            .ok()
            .and_then(Pid::from_raw)
            .context("a process id of zero")?;
        kill_process_group(group, signal)
            .with_context(|| format!("could not send {signal:?} to {}", self.name))
    }

    /// Freezes the server and all processes of its group (`SIGSTOP`). When this returns, none of their threads runs: on
    /// a loaded machine some go on for a while after the signal was sent.
    pub(crate) async fn freeze(&self) -> Result<()> {
        self.signal(Signal::STOP)?;
        let group = self.child.id();
        let started = Instant::now();
        while !is_frozen(group) {
            if started.elapsed() > FREEZE_LIMIT {
                bail!("{} did not stop within {FREEZE_LIMIT:?}", self.name);
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(())
    }

    /// The processes that the server has started itself.
    pub(crate) fn children(&self) -> Result<Vec<Pid>> {
        let id = self.child.id();
        let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children"))
            .with_context(|| format!("could not list the processes of {}", self.name))?;
        let children = children.split_whitespace().map(str::parse);
        let children: Vec<i32> = children.collect::<Result<_, _>>()?;
        Ok(children.into_iter().filter_map(Pid::from_raw).collect())
    }

    /// Waits until the server has ended, at most `limit`.
    pub(crate) async fn ended(&mut self, limit: Duration) -> Result<ExitStatus> {
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                guard::forget(self.child.id())?;
                return Ok(status);
            }
            if started.elapsed() > limit {
                bail!("{} did not end within {limit:?}", self.name);
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// An error that tells why the server is not up, if it has ended by itself.
    pub(crate) fn check(&mut self) -> Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => bail!("{} ended with {status}\n{}", self.name, self.output_tail()),
        }
    }

    /// The last lines that the server printed, for error messages.
    pub(crate) fn output_tail(&self) -> String {
        let text = std::fs::read(&self.output).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.signal(self.end.signal());
        let deadline = Instant::now() + DROP_LIMIT;
        while let Ok(None) = self.child.try_wait() {
            if Instant::now() > deadline {
                let _ = self.signal(Signal::KILL);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = guard::forget(self.child.id());
    }
}

/// Whether a process has not ended. One that nobody has waited for yet has.
pub(crate) fn is_running(process: Pid) -> bool {
    let stat = PathBuf::from(format!("/proc/{}/stat", process.as_raw_nonzero()));
    read_stat(&stat).is_some_and(|stat| !stat.has_ended())
}

/// Whether all threads of all processes of a group are stopped.
fn is_frozen(group: u32) -> bool {
    let processes = folders(Path::new("/proc"));
    let of_group = processes.filter(|process| {
        let stat = read_stat(&process.join("stat"));
        stat.is_some_and(|stat| stat.group == group)
    });
    let mut threads = of_group.flat_map(|process| folders(&process.join("task")));
    threads.all(|thread| {
        let stat = read_stat(&thread.join("stat"));
        stat.is_none_or(|stat| stat.state == 'T' || stat.has_ended())
    })
}

fn folders(path: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    entries.map(|entry| entry.path())
}

/// What Linux says of a process or a thread.
struct Stat {
    state: char,
    group: u32,
}

impl Stat {
    fn has_ended(&self) -> bool {
        matches!(self.state, 'Z' | 'X')
    }
}

fn read_stat(path: &Path) -> Option<Stat> {
    let stat = std::fs::read_to_string(path).ok()?;
    // The name of the program comes before, in brackets, and may have spaces.
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split(' ');
    Some(Stat {
        state: fields.next()?.chars().next()?,
        group: fields.nth(1)?.parse().ok()?,
    })
}

/// A command that shares this process' terminal and ends with it: when the value is dropped, or
/// when this process dies, all that the command started ends too.
#[derive(Debug)]
pub struct Foreground(Process);

impl Foreground {
    /// Starts the command.
    pub fn start(command: Command) -> Result<Foreground> {
        Self::start_ending(command, End::Kill)
    }

    /// Starts a command that has something of its own to clean up: it is asked to end (`SIGTERM`),
    /// and killed only if it does not.
    pub fn start_polite(command: Command) -> Result<Foreground> {
        Self::start_ending(command, End::Terminate)
    }

    fn start_ending(mut command: Command, end: End) -> Result<Foreground> {
        let name = format!("{command:?}");
        let child = command
            .stdin(Stdio::null())
            .process_group(0)
            .spawn()
            .with_context(|| format!("could not run {name}"))?;
        let process = Process {
            name,
            child,
            output: PathBuf::new(),
            end,
        };
        guard::watch(process.child.id(), end)?;
        Ok(Foreground(process))
    }

    /// Its standard output, once, if the command was told to pipe it.
    pub fn output(&mut self) -> Option<ChildStdout> {
        self.0.child.stdout.take()
    }

    /// Ends it with `SIGKILL`, at once.
    pub fn kill(&self) -> Result<()> {
        self.0.signal(Signal::KILL)
    }

    /// Freezes it (`SIGSTOP`).
    pub async fn pause(&self) -> Result<()> {
        self.0.freeze().await
    }

    /// Lets it go on (`SIGCONT`).
    pub fn resume(&self) -> Result<()> {
        self.0.signal(Signal::CONT)
    }

    /// Asks it to end (`SIGTERM`).
    pub fn terminate(&self) -> Result<()> {
        self.0.signal(Signal::TERM)
    }

    /// Waits until it has ended.
    pub async fn ended(&mut self) -> Result<ExitStatus> {
        self.0.ended(Duration::MAX).await
    }
}

/// Runs a short command to its end, at most `limit`, and gives its standard output.
pub(crate) async fn run(command: Command, limit: Duration) -> Result<String> {
    run_ending(command, limit, End::Kill).await
}

/// Like [`run`], for a command that must not be killed where it stands.
pub(crate) async fn run_ending(mut command: Command, limit: Duration, end: End) -> Result<String> {
    let shown = format!("{command:?}");
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .with_context(|| format!("could not run {shown}"))?;
    let id = child.id();
    guard::watch(id, end)?;
    // Reading on threads of their own: a full pipe must not stop the command.
    let stdout = child.stdout.take().map(read_all);
    let stderr = child.stderr.take().map(read_all);
    let mut process = Process {
        name: shown.clone(),
        child,
        output: PathBuf::new(),
        end,
    };
    let status = process.ended(limit).await?;
    let (stdout, stderr) = (printed(stdout), printed(stderr));
    if !status.success() {
        bail!(
            "{shown} ended with {status}\n{}{}",
            stdout.trim(),
            stderr.trim()
        );
    }
    Ok(stdout)
}

/// Reads a pipe to its end on a thread of its own.
fn read_all(mut pipe: impl std::io::Read + Send + 'static) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = pipe.read_to_end(&mut bytes);
        let _ = sender.send(String::from_utf8_lossy(&bytes).into_owned());
    });
    receiver
}

/// What was read, unless something that the command left running still holds the pipe.
fn printed(reader: Option<mpsc::Receiver<String>>) -> String {
    reader
        .and_then(|reader| reader.recv_timeout(Duration::from_secs(5)).ok())
        .unwrap_or_default()
}

/// Asks again and again until the answer is yes, or gives up with what was missing.
pub(crate) async fn until<F>(what: &str, limit: Duration, mut ready: F) -> Result<()>
where
    F: AsyncFnMut() -> Result<bool>,
{
    let deadline = Instant::now() + limit;
    loop {
        if ready().await? {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!("{what} did not happen within {limit:?}");
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
