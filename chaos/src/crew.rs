//! The processes of the system, restarted whenever they end, as an init system would.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use clap::ValueEnum;
use tierline_testbed::Foreground;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::plan::{Member, WORKERS};
use crate::roles::Role;

/// The pause before a process that ended by itself is started again.
const RESTART_PAUSE: Duration = Duration::from_millis(300);
/// How long a process may take to shut down. A worker's own limit is 32 s.
const END_LIMIT: Duration = Duration::from_secs(60);

/// The addresses and folders of the processes.
#[derive(Debug, Clone)]
pub(crate) struct Surroundings {
    pub(crate) amqp: Vec<String>,
    pub(crate) postgres: String,
    pub(crate) folder: PathBuf,
    pub(crate) rate: u64,
}

/// All processes.
#[derive(Debug)]
pub(crate) struct Crew {
    producer: Keeper,
    workers: Vec<Keeper>,
    collector: Keeper,
    scheduler: Keeper,
}

impl Crew {
    pub(crate) fn start(surroundings: &Surroundings) -> Crew {
        let keep = |name: &str, role| Keeper::start(name, role, surroundings.clone());
        let worker = |number: usize| match number {
            0 => keep("worker-1", Role::CollectingWorker),
            _ => keep(&format!("worker-{}", number + 1), Role::Worker),
        };
        Crew {
            producer: keep("producer", Role::Producer),
            workers: (0..WORKERS).map(worker).collect(),
            collector: keep("collector", Role::Collector),
            scheduler: keep("scheduler", Role::Scheduler),
        }
    }

    /// `kill -9`.
    pub(crate) fn kill(&self, member: Member) {
        let keeper = match member {
            Member::Worker(number) => &self.workers[number],
            Member::Collector => &self.collector,
            Member::Scheduler => &self.scheduler,
            Member::Producer => &self.producer,
        };
        let _ = keeper.orders.send(Order::Kill);
    }

    /// `SIGSTOP`, and after a while `SIGCONT`.
    pub(crate) fn pause(&self, worker: usize, length: Duration) {
        let _ = self.workers[worker].orders.send(Order::Pause(length));
    }

    /// Stops the publishers.
    pub(crate) async fn end_publishing(&mut self) -> Result<()> {
        self.producer.end().await?;
        self.scheduler.end().await
    }

    /// Stops the workers, which return what they have prefetched.
    pub(crate) async fn end_working(&mut self) -> Result<()> {
        for worker in &mut self.workers {
            worker.end().await?;
        }
        Ok(())
    }

    /// How often a process ended without being stopped.
    pub(crate) fn unasked_ends(&self) -> u32 {
        let others = [&self.producer, &self.collector, &self.scheduler];
        let all = self.workers.iter().chain(others);
        all.map(|keeper| keeper.unasked.load(Ordering::Relaxed))
            .sum()
    }
}

#[derive(Debug, Clone, Copy)]
enum Order {
    Kill,
    Pause(Duration),
    End,
}

/// Keeps one process running.
#[derive(Debug)]
struct Keeper {
    name: String,
    orders: mpsc::UnboundedSender<Order>,
    keeping: Option<JoinHandle<Result<()>>>,
    unasked: Arc<AtomicU32>,
}

impl Keeper {
    fn start(name: &str, role: Role, surroundings: Surroundings) -> Keeper {
        let (orders, received) = mpsc::unbounded_channel();
        let unasked = Arc::new(AtomicU32::new(0));
        let keeping = keep(
            name.to_owned(),
            role,
            surroundings,
            received,
            Arc::clone(&unasked),
        );
        Keeper {
            name: name.to_owned(),
            orders,
            keeping: Some(tokio::spawn(keeping)),
            unasked,
        }
    }

    async fn end(&mut self) -> Result<()> {
        let Some(keeping) = self.keeping.take() else {
            return Ok(());
        };
        let _ = self.orders.send(Order::End);
        let ended = timeout(2 * END_LIMIT, keeping).await;
        let ended = ended.with_context(|| format!("{} did not end", self.name))?;
        ended?.with_context(|| format!("{} could not be kept running", self.name))
    }
}

async fn keep(
    name: String,
    role: Role,
    surroundings: Surroundings,
    mut orders: mpsc::UnboundedReceiver<Order>,
    unasked: Arc<AtomicU32>,
) -> Result<()> {
    loop {
        let mut process = Foreground::start(command(&name, role, &surroundings)?)?;
        let mut paused_until = None;
        loop {
            let wakes_up = async {
                match paused_until {
                    Some(until) => sleep_until(until).await,
                    None => std::future::pending().await,
                }
            };
            let order = tokio::select! {
                () = wakes_up => {
                    process.resume()?;
                    paused_until = None;
                    continue;
                }
                ended = process.ended() => {
                    ended?;
                    unasked.fetch_add(1, Ordering::Relaxed);
                    sleep(RESTART_PAUSE).await;
                    break;
                }
                order = orders.recv() => order,
            };
            match order {
                Some(Order::Pause(length)) => {
                    process.pause().await?;
                    paused_until = Some(Instant::now() + length);
                }
                Some(Order::Kill) => {
                    process.kill()?;
                    process.ended().await?;
                    break;
                }
                Some(Order::End) | None => {
                    process.terminate()?;
                    // A frozen process handles no signal.
                    process.resume()?;
                    // Dropped, it is killed.
                    let ended = timeout(END_LIMIT, process.ended()).await;
                    return ended.map(drop).context("it had to be killed");
                }
            }
        }
    }
}

fn command(name: &str, role: Role, surroundings: &Surroundings) -> Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    let role = role.to_possible_value().context("a role has a name")?;
    command.env("RUST_BACKTRACE", "0");
    command.args(["play", role.get_name()]);
    for url in &surroundings.amqp {
        command.args(["--amqp", url]);
    }
    command
        .args(["--postgres", &surroundings.postgres])
        .args(["--rate", &surroundings.rate.to_string()])
        .arg("--ledger")
        .arg(surroundings.folder.join(format!("{name}.ledger")));
    let log = open_log(&surroundings.folder.join(format!("{name}.log")))?;
    command.stdout(log.try_clone()?).stderr(log);
    Ok(command)
}

fn open_log(path: &Path) -> Result<File> {
    let log = File::options().append(true).create(true).open(path);
    log.with_context(|| format!("could not open {}", path.display()))
}
