//! A worker or a relay in a process of its own, which prints what happens, a line each.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use tierline::observe::Event;
use tierline::{Registry, Task, TaskError, Tierline, Topology};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;

const MAP: &str = "TIERLINE_BACKLOG_MAP";
const URL: &str = "TIERLINE_BACKLOG_URL";
const AMQP: &str = "TIERLINE_BACKLOG_AMQP";
const RELAY: &str = "TIERLINE_BACKLOG_RELAY";
const CRASH_BUDGET: &str = "TIERLINE_BACKLOG_CRASH_BUDGET";

/// A task that takes a while.
#[derive(Serialize, Deserialize)]
pub(crate) struct Step {
    pub(crate) number: usize,
    pub(crate) milliseconds: u64,
}

impl Task for Step {
    const NAME: &'static str = "step";
}

/// A task that adds 1 to the account of its number, in the transaction that completes it.
#[derive(Serialize, Deserialize)]
pub(crate) struct Add {
    pub(crate) number: i64,
    pub(crate) milliseconds: u64,
}

impl Task for Add {
    const NAME: &'static str = "add";
}

/// A task that only says that it ran, and under which id.
#[derive(Serialize, Deserialize)]
pub(crate) struct Mail {
    pub(crate) number: i64,
}

impl Task for Mail {
    const NAME: &'static str = "mail";
}

/// What a worker has printed.
#[derive(Debug)]
pub(crate) enum Line {
    Consuming,
    Start(usize),
    /// A [`Mail`], with the id of its task.
    Mail(i64, String),
    Suspected,
    LeaseLost,
    AlreadyDone,
    Dead(String),
}

/// A worker, dropped with its process.
pub(crate) struct FaultWorker {
    process: Child,
}

impl FaultWorker {
    /// Starts a worker. What it prints goes to `lines`.
    pub(crate) fn start(map: &str, url: &str, lines: mpsc::UnboundedSender<Line>) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.env(MAP, map).env(URL, url);
        Self::run(command, lines)
    }

    /// Starts a worker that is killed from outside however often: no task is to blame.
    pub(crate) fn start_to_kill(
        map: &str,
        url: &str,
        amqp: Option<&str>,
        lines: mpsc::UnboundedSender<Line>,
    ) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .env(MAP, map)
            .env(URL, url)
            .env(CRASH_BUDGET, "1000");
        command.envs(amqp.map(|amqp| (AMQP, amqp)));
        Self::run(command, lines)
    }

    /// Starts a process that has these servers: a relay, or a worker that is killed from outside however often.
    pub(crate) fn start_with(
        map: &str,
        database: Option<&str>,
        amqp: &str,
        is_relay: bool,
        lines: mpsc::UnboundedSender<Line>,
    ) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.env(MAP, map).env(AMQP, amqp);
        command.env(CRASH_BUDGET, "1000");
        command.envs(database.map(|url| (URL, url)));
        command.envs(is_relay.then_some((RELAY, "yes")));
        Self::run(command, lines)
    }

    fn run(mut command: Command, lines: mpsc::UnboundedSender<Line>) -> Result<Self> {
        let mut process = command
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
            "mail" => {
                let (number, id) = about.split_once(' ')?;
                Some(Self::Mail(number.parse().ok()?, id.to_owned()))
            }
            "start" => about.parse().ok().map(Self::Start),
            "suspected" => Some(Self::Suspected),
            "lost" => Some(Self::LeaseLost),
            "already" => Some(Self::AlreadyDone),
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
    registry.register::<Add, _>(add)?;
    registry.register::<Mail, _>(async |mail: Mail, cx: tierline::Context| {
        println!("mail {} {}", mail.number, cx.id());
    })?;
    let mut builder = Tierline::builder(topology);
    if let Ok(amqp) = std::env::var(AMQP) {
        builder = builder.amqp(amqp);
    }
    if let Ok(url) = std::env::var(URL) {
        builder = builder.postgres(url);
    }
    let app = builder
        .registry(registry)
        .observe(|event| match event {
            Event::Consuming { .. } => println!("consuming"),
            Event::Suspected { .. } => println!("suspected"),
            Event::LeaseLost { .. } => println!("lost"),
            Event::AlreadyDone { .. } => println!("already done"),
            Event::Dead { reason, .. } => println!("dead {reason}"),
            _ => {}
        })
        .connect()
        .await?;
    let mut input = BufReader::new(tokio::io::stdin()).lines();
    let ended = async move { while let Ok(Some(_)) = input.next_line().await {} };
    if std::env::var_os(RELAY).is_some() {
        println!("consuming");
        return Ok(app.relay()?.until(ended).await?);
    }
    let mut worker = app.work(["all"]).grace(Duration::from_secs(5));
    if let Ok(budget) = std::env::var(CRASH_BUDGET) {
        worker = worker.crash_budget(budget.parse()?);
    }
    Ok(worker.until(ended).await?)
}

async fn add(add: Add, cx: tierline::Context) -> Result<(), TaskError> {
    println!("start {}", add.number);
    let pause = Duration::from_millis(add.milliseconds);
    let mut transaction = cx.transaction().await?;
    sqlx::query("UPDATE accounts SET value = value + 1 WHERE id = $1")
        .bind(add.number)
        .execute(&mut *transaction)
        .await?;
    tokio::time::sleep(pause).await;
    transaction.commit().await?;
    // Here a worker that is killed leaves a task that is done and not settled.
    tokio::time::sleep(pause).await;
    Ok(())
}
