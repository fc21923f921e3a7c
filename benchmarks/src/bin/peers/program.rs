//! A program that is measured: one process that publishes, another that works.
//!
//! All of them, in whatever language, know the same commands; `peers/peer.py` says which.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tierline_testbed::{AMQP_URL, Vhost, vhost};
use tokio::process::{Child, Command};
use tokio::time::{Instant, sleep, timeout};

/// Where a worker's tasks leave their lines.
pub(crate) const NOTES: &str = "NOTES";
/// One in so many tasks that do nothing leaves a line.
pub(crate) const NOTES_EVERY: usize = 100;
/// How long a command may take, and how long a worker may be without a note that is waited for.
const LIMIT: Duration = Duration::from_secs(180);

/// A contender: its name, and the words that its command line begins with.
#[derive(Clone)]
pub(crate) struct Program {
    pub(crate) name: &'static str,
    words: Vec<OsString>,
}

impl Program {
    pub(crate) fn new(name: &'static str, words: &[&dyn AsRef<std::ffi::OsStr>]) -> Self {
        let words = words.iter().map(|word| word.as_ref().to_owned()).collect();
        Self { name, words }
    }

    /// Tasks a second, published one by one, or as its command `how` does it.
    pub(crate) async fn publish(&self, how: &str, count: usize) -> Result<f64> {
        let stage = Stage::set(self).await?;
        let seconds = stage.call(&[how, "noop", &count.to_string()]).await?;
        let seconds: f64 = seconds.trim().parse().context(seconds)?;
        Ok(count as f64 / seconds)
    }

    /// Tasks a second that do nothing, from the first to the last.
    pub(crate) async fn drain(&self, count: usize) -> Result<f64> {
        let stage = Stage::set(self).await?;
        stage.fill("noop", count).await?;
        let worker = stage.work("drain")?;
        let times = stage.notes("noop", count / NOTES_EVERY).await?;
        drop(worker);
        let first = times.iter().copied().fold(f64::INFINITY, f64::min);
        let last = times.iter().copied().fold(0.0, f64::max);
        Ok(((times.len() - 1) * NOTES_EVERY) as f64 / (last - first))
    }

    /// How long critical tasks wait that come one by one while others keep all slots busy, and the
    /// memory of the worker in MiB.
    pub(crate) async fn urgent(
        &self,
        layout: &str,
        arrivals: usize,
    ) -> Result<(Vec<Duration>, f64)> {
        let stage = Stage::set(self).await?;
        stage.fill("high", 2_000.max(arrivals * 30)).await?;
        let worker = stage.work(layout)?;
        stage.notes("high", 1).await?;
        stage.call(&["arrive", &arrivals.to_string()]).await?;
        let waits = stage.notes("critical", arrivals).await?;
        let memory = worker.memory()?;
        Ok((
            waits.into_iter().map(Duration::from_secs_f64).collect(),
            memory,
        ))
    }
}

/// A virtual host and a file for notes, for one turn of a program.
struct Stage<'a> {
    program: &'a Program,
    vhost: Vhost,
    notes: PathBuf,
}

impl<'a> Stage<'a> {
    async fn set(program: &'a Program) -> Result<Self> {
        let vhost = vhost().await;
        let notes = format!("tierline-peers-{}", std::process::id());
        let notes = std::env::temp_dir().join(notes);
        std::fs::write(&notes, "")?;
        Ok(Self {
            program,
            vhost,
            notes,
        })
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let (program, words) = self.program.words.split_at(1);
        let mut command = Command::new(program.first().cloned().unwrap_or_default());
        command
            .args(words)
            .args(arguments)
            .env(AMQP_URL, self.vhost.amqp_url())
            .env(NOTES, &self.notes)
            .stdin(Stdio::null())
            .kill_on_drop(true);
        command
    }

    /// Runs a command to its end; what it printed.
    async fn call(&self, arguments: &[&str]) -> Result<String> {
        let what = format!("{} {}", self.program.name, arguments.join(" "));
        let ended = timeout(LIMIT, self.command(arguments).output()).await;
        let output = ended.with_context(|| format!("{what} took too long"))??;
        if !output.status.success() {
            bail!("{what}: {}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(String::from_utf8(output.stdout)?)
    }

    async fn fill(&self, task: &str, count: usize) -> Result<()> {
        self.call(&["fill", task, &count.to_string()]).await?;
        Ok(())
    }

    /// Begins to work, until the worker is dropped.
    fn work(&self, layout: &str) -> Result<Worker> {
        let mut command = self.command(&["work", layout]);
        let quiet = command.stdout(Stdio::null()).stderr(Stdio::null());
        // A group of its own, so that all of its processes can be ended.
        Ok(Worker(quiet.process_group(0).spawn()?))
    }

    /// Waits for so many notes of a task; their figures.
    async fn notes(&self, task: &str, count: usize) -> Result<Vec<f64>> {
        let begin = Instant::now();
        loop {
            let figures = figures(&self.notes, task)?;
            if figures.len() >= count {
                return Ok(figures);
            }
            let (name, found) = (self.program.name, figures.len());
            let waited = begin.elapsed();
            ensure!(waited < LIMIT, "{name}: {found} of {count} notes of {task}");
            sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Drop for Stage<'_> {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.notes);
    }
}

/// The figures behind a task's name; 0 where there is none. A line that is still being written is
/// left for the next time.
fn figures(notes: &Path, task: &str) -> Result<Vec<f64>> {
    let text = std::fs::read_to_string(notes)?;
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let of_task = whole.lines().filter_map(|line| {
        let mut words = line.split(' ');
        (words.next() == Some(task)).then(|| words.next().unwrap_or("0"))
    });
    of_task
        .map(|figure| figure.parse().with_context(|| figure.to_owned()))
        .collect()
}

/// A worker and all processes that it has started, ended when dropped.
struct Worker(Child);

impl Worker {
    /// The memory of all its processes in MiB; what several share counts once.
    fn memory(&self) -> Result<f64> {
        let group = self.0.id().context("the worker has ended")?;
        let mut kibibytes = 0.0;
        for process in std::fs::read_dir("/proc")? {
            let folder = process?.path();
            if group_of(&folder) != Some(group) {
                continue;
            }
            let sizes = std::fs::read_to_string(folder.join("smaps_rollup"))?;
            let line = sizes.lines().find(|line| line.starts_with("Pss:"));
            let size = line.and_then(|line| line.split_whitespace().nth(1));
            kibibytes += size.context("a process has a size")?.parse::<f64>()?;
        }
        Ok(kibibytes / 1024.0)
    }
}

fn group_of(process: &Path) -> Option<u32> {
    let stat = std::fs::read_to_string(process.join("stat")).ok()?;
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(2)?.parse().ok()
}

impl Drop for Worker {
    fn drop(&mut self) {
        if let Some(group) = self.0.id() {
            let group = format!("-{group}");
            let mut kill = std::process::Command::new("kill");
            let _ = kill.args(["-KILL", "--", &group]).status();
        }
    }
}
