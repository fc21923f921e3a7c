//! The system under test: its map, its tasks, and its processes.

mod handlers;
mod producer;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, ValueEnum};
use tierline::observe::Event;
use tierline::{Builder, Tierline, Topology};
use tokio::signal::unix::{SignalKind, signal};

use crate::ledger::{Fact, Ledger, millis, now};

/// The tiers, whose queues are `chaos.TIER`.
pub(crate) const TIERS: [&str; 4] = ["critical", "high", "normal", "low"];

const MAP: &str = r#"
    app = "chaos"
    [tiers.critical]
    queue = "classic"
    [tiers.high]
    queue = "classic"
    [tiers.normal]
    queue = "quorum"
    weight = 3
    [tiers.low]
    queue = "quorum"
    weight = 1
    [groups.urgent]
    tiers = ["critical", "high"]
    order = "strict"
    concurrency = 4
    prefetch = 1
    [groups.deferred]
    tiers = ["normal", "low"]
    order = "weighted"
    concurrency = 4
    prefetch = 4
    [tasks]
    "urgent" = "critical"
    "flaky" = "high"
    "usual" = "normal"
    "doomed" = "normal"
    "tick" = "normal"
    "slow" = "low"
    "parent" = "low"
    "child" = "critical"
    [schedules.tick]
    task = "tick"
    payload = {}
    every = "1s"
    expires = "20s"
"#;

/// The role of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Role {
    /// Publishes, and records confirms.
    Producer,
    /// Runs tasks, and records their ends.
    Worker,
    /// Runs tasks, and also collects dead letters.
    CollectingWorker,
    /// Collects dead letters into Postgres.
    Collector,
    /// Publishes due runs.
    Scheduler,
}

/// The arguments of a process.
#[derive(Debug, Clone, Args)]
pub(crate) struct Part {
    /// The role.
    pub(crate) role: Role,
    /// The address of each node.
    #[arg(long)]
    pub(crate) amqp: Vec<String>,
    /// The address of the database.
    #[arg(long)]
    pub(crate) postgres: String,
    /// The ledger file.
    #[arg(long)]
    pub(crate) ledger: PathBuf,
    /// How many tasks a second the producer publishes.
    #[arg(long, default_value_t = 100)]
    pub(crate) rate: u64,
}

/// Plays a role until the process receives a shutdown signal.
pub(crate) async fn play(part: Part) -> Result<()> {
    let builder = || -> Result<Builder> {
        let builder = Tierline::builder(Topology::parse(MAP)?);
        Ok(part
            .amqp
            .iter()
            .fold(builder, |builder, url| builder.amqp(url)))
    };
    match part.role {
        Role::Producer => {
            let app = builder()?.connect().await?;
            let ledger = Ledger::open(&part.ledger)?;
            producer::publish(&app, ledger, part.rate, terminated()).await
        }
        Role::Worker | Role::CollectingWorker => {
            let (ledger, expired) = (Ledger::open(&part.ledger)?, Ledger::open(&part.ledger)?);
            let mut builder = builder()?
                .registry(handlers::registry()?)
                .data(ledger)
                .observe(move |event| note_expired(&expired, event));
            if part.role == Role::CollectingWorker {
                builder = builder.postgres(&part.postgres);
            }
            let app = builder.connect().await?;
            Ok(app.work(["urgent", "deferred"]).until_terminated().await?)
        }
        Role::Collector => {
            let app = builder()?.postgres(&part.postgres).connect().await?;
            Ok(app.collector()?.until_terminated().await?)
        }
        Role::Scheduler => {
            let ledger = Ledger::open(&part.ledger)?;
            let app = builder()?
                .postgres(&part.postgres)
                .observe(move |event| note_scheduled(&ledger, event))
                .connect()
                .await?;
            Ok(app.scheduler()?.until_terminated().await?)
        }
    }
}

/// If the ledger cannot be written, the process ends: a run without it proves nothing, and an observer
/// cannot return an error.
fn note(ledger: &Ledger, id: impl ToString, fact: Fact) {
    if let Err(error) = ledger.note(id, fact) {
        eprintln!("the ledger cannot be written: {error}");
        std::process::exit(1);
    }
}

fn note_expired(ledger: &Ledger, event: &Event<'_>) {
    match event {
        Event::Expired { task, .. } => note(ledger, task.id, Fact::Expired),
        Event::Done { .. } | Event::Started { .. } => {}
        other => eprintln!("{} {other:?}", now()),
    }
}

fn note_scheduled(ledger: &Ledger, event: &Event<'_>) {
    match event {
        Event::SchedulePublished { id, due, .. } => {
            // The event does not say when it was sent: not before it was due.
            let (tier, sent) = ("normal".to_owned(), millis(*due));
            note(ledger, id, Fact::Confirmed { tier, sent });
        }
        other => eprintln!("{} {other:?}", now()),
    }
}

/// Completes when this process receives a shutdown signal.
async fn terminated() {
    match signal(SignalKind::terminate()) {
        Ok(mut terminate) => drop(terminate.recv().await),
        Err(error) => eprintln!("cannot handle SIGTERM: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_map_names_every_task_and_every_tier() -> Result<()> {
        let topology = Topology::parse(MAP)?;
        assert!(TIERS.iter().all(|tier| topology.tier(tier).is_some()));
        let registry = handlers::registry()?;
        for task in registry.iter().map(|it| it.name()) {
            assert!(topology.task(task).is_some(), "{task}");
        }
        Ok(())
    }
}
