//! A worker in a process of its own, which prints what happens, a line each.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use tierline::observe::Event;
use tierline::{Registry, Task, Tierline, Topology};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;

const MAP: &str = "TIERLINE_BACKLOG_MAP";
const URL: &str = "TIERLINE_BACKLOG_URL";

/// A task that takes a while.
#[derive(Serialize, Deserialize)]
pub(crate) struct Step {
    pub(crate) number: usize,
    pub(crate) milliseconds: u64,
}

impl Task for Step {
    const NAME: &'static str = "step";
}

/// What a worker has printed.
#[derive(Debug)]
pub(crate) enum Line {
    Consuming,
    Start(usize),
    Suspected,
    LeaseLost,
    Dead(String),
}

/// A worker, dropped with its process.
pub(crate) struct FaultWorker {
    process: Child,
}

impl FaultWorker {
    /// Starts a worker. What it prints goes to `lines`.
    pub(crate) fn start(map: &str, url: &str, lines: mpsc::UnboundedSender<Line>) -> Result<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .env(MAP, map)
            .env(URL, url)
            .stdout(Stdio::piped())
            .stdin(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let output = process.stdout.take().context("no output")?;
        tokio::spawn(async move {
            let mut printed = BufReader::new(output).lines();
            while let Ok(Some(line)) = printed.next_line().await {
                if let Some(line) = Line::read(&line) {
                    let _ = lines.send(line);
                }
            }
        });
        Ok(Self { process })
    }

    /// Kills it with SIGKILL.
    pub(crate) async fn kill(mut self) -> Result<()> {
        Ok(self.process.kill().await?)
    }

    /// Sends it a signal by its name.
    pub(crate) async fn signal(&self, name: &str) -> Result<()> {
        let id = self.process.id().context("the worker has ended")?;
        let sent = Command::new("kill").args([name, &id.to_string()]).status();
        anyhow::ensure!(sent.await?.success(), "could not send {name} to a worker");
        Ok(())
    }

    /// Lets it shut down.
    pub(crate) async fn end(mut self) -> Result<()> {
        drop(self.process.stdin.take());
        let status = self.process.wait().await?;
        anyhow::ensure!(status.success(), "a worker ended with {status}");
        Ok(())
    }
}

impl Line {
    fn read(line: &str) -> Option<Self> {
        let (what, about) = line.split_once(' ').unwrap_or((line, ""));
        match what {
            "consuming" => Some(Self::Consuming),
            "start" => about.parse().ok().map(Self::Start),
            "suspected" => Some(Self::Suspected),
            "lost" => Some(Self::LeaseLost),
            "dead" => Some(Self::Dead(about.to_owned())),
            _ => None,
        }
    }
}

/// Whether this process was started as a worker.
pub(crate) fn is_worker() -> bool {
    std::env::var_os(MAP).is_some()
}

/// Works until the input ends.
pub(crate) async fn work() -> Result<()> {
    let topology = Topology::parse(std::env::var(MAP)?)?;
    let mut registry = Registry::new();
    registry.register::<Step, _>(async |step: Step| {
        println!("start {}", step.number);
        tokio::time::sleep(Duration::from_millis(step.milliseconds)).await;
    })?;
    let app = Tierline::builder(topology)
        .postgres(std::env::var(URL)?)
        .registry(registry)
        .observe(|event| match event {
            Event::Consuming { .. } => println!("consuming"),
            Event::Suspected { .. } => println!("suspected"),
            Event::LeaseLost { .. } => println!("lost"),
            Event::Dead { reason, .. } => println!("dead {reason}"),
            _ => {}
        })
        .connect()
        .await?;
    let mut input = BufReader::new(tokio::io::stdin()).lines();
    app.work(["all"])
        .grace(Duration::from_secs(5))
        .until(async move { while let Ok(Some(_)) = input.next_line().await {} })
        .await?;
    Ok(())
}
