//! What the workers have printed.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Child;
use tokio::sync::watch;

/// A line of a worker.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    /// The worker's number.
    pub(crate) worker: usize,
    /// Such as `started`.
    pub(crate) what: String,
    /// The id of the task, or the name of the tier.
    pub(crate) about: String,
    /// The time since 1970.
    pub(crate) at: Duration,
}

/// What all workers of a run have printed. Critical tasks are apart: they are many, and nobody waits for one of
/// them.
#[derive(Clone)]
pub(crate) struct Log {
    critical: Arc<watch::Sender<Vec<Entry>>>,
    others: Arc<watch::Sender<Vec<Entry>>>,
}

impl Log {
    pub(crate) fn new() -> Self {
        Self {
            critical: Arc::new(watch::channel(Vec::new()).0),
            others: Arc::new(watch::channel(Vec::new()).0),
        }
    }

    /// Keeps what this worker prints from now on.
    pub(crate) fn follow(&self, worker: usize, process: &mut Child) -> Result<()> {
        let output = process.stdout.take().context("a worker has an output")?;
        let mut lines = BufReader::new(output).lines();
        let log = self.clone();
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                if let Some(entry) = parse(worker, &line) {
                    log.add(entry);
                }
            }
        });
        Ok(())
    }

    fn add(&self, entry: Entry) {
        let is_critical = entry.about.starts_with("critical-");
        let entries = if is_critical {
            &self.critical
        } else {
            &self.others
        };
        entries.send_modify(|entries| entries.push(entry));
    }

    /// What was printed of critical tasks.
    pub(crate) fn critical(&self) -> Vec<Entry> {
        self.critical.borrow().clone()
    }

    /// What was printed of anything else.
    pub(crate) fn others(&self) -> Vec<Entry> {
        self.others.borrow().clone()
    }

    /// Waits for so many lines of this kind about a task that is not critical, or about a tier. The last of them.
    pub(crate) async fn until(
        &self,
        what: &str,
        about: &str,
        count: usize,
        limit: Duration,
    ) -> Result<Entry> {
        let found = |entries: &Vec<Entry>| {
            let mut matching = entries
                .iter()
                .filter(|it| it.what == what && it.about == about);
            matching.nth(count - 1).cloned()
        };
        let mut changes = self.others.subscribe();
        let waiting = changes.wait_for(|entries| found(entries).is_some());
        let waited = tokio::time::timeout(limit, waiting).await;
        let problem = || format!("no {count} workers printed \"{what} {about}\" within {limit:?}");
        let entries = waited.with_context(problem)??;
        found(&entries).with_context(problem)
    }

    /// Waits until so many critical tasks are done, or none was for a while.
    pub(crate) async fn until_critical_done(&self, count: usize, patience: Duration) {
        let mut changes = self.critical.subscribe();
        let is_over = |entries: &Vec<Entry>| {
            let done = entries.iter().filter(|it| it.what == "done");
            done.map(|it| &it.about).collect::<HashSet<_>>().len() >= count
        };
        while !is_over(&changes.borrow_and_update()) {
            let changed = tokio::time::timeout(patience, changes.changed()).await;
            if !matches!(changed, Ok(Ok(()))) {
                return;
            }
        }
    }
}

fn parse(worker: usize, line: &str) -> Option<Entry> {
    let mut words = line.split(' ');
    let (what, about, at) = (words.next()?, words.next()?, words.next()?);
    Some(Entry {
        worker,
        what: what.to_owned(),
        about: about.to_owned(),
        at: Duration::from_nanos(at.parse().ok()?),
    })
}
