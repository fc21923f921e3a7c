//! The system under attack: its map, its tasks, and the processes that play a part in it.

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

/// What is played by a process of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Role {
    /// Publishes, and writes down what was confirmed.
    Producer,
    /// Works, and writes down what it did.
    Worker,
    /// Works, and collects dead letters beside it.
    CollectingWorker,
    /// Collects dead letters into Postgres.
    Collector,
    /// Publishes what is due.
    Scheduler,
}

/// What a process is told.
#[derive(Debug, Clone, Args)]
pub(crate) struct Part {
    /// The role.
    pub(crate) role: Role,
    /// The way to each node.
    #[arg(long)]
    pub(crate) amqp: Vec<String>,
    /// The way to the database.
    #[arg(long)]
    pub(crate) postgres: String,
    /// The file to write to.
    #[arg(long)]
    pub(crate) ledger: PathBuf,
    /// How many tasks a second are published.
    #[arg(long, default_value_t = 100)]
    pub(crate) rate: u64,
}

/// Plays a part until the process is asked to end.
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
            app.collector()?.until(terminated()).await;
            Ok(())
        }
        Role::Scheduler => {
            let ledger = Ledger::open(&part.ledger)?;
            let app = builder()?
                .postgres(&part.postgres)
                .observe(move |event| note_scheduled(&ledger, event))
                .connect()
                .await?;
            Ok(app.scheduler()?.until(terminated()).await?)
        }
    }
}

/// Observers have nobody to tell of a ledger that cannot be written: without it a run is worth
/// nothing, so the process ends.
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
            // When it was sent is not told; not before it was due.
            let (tier, sent) = ("normal".to_owned(), millis(*due));
            note(ledger, id, Fact::Confirmed { tier, sent });
        }
        other => eprintln!("{} {other:?}", now()),
    }
}

/// Completes when this process is asked to end.
async fn terminated() {
    match signal(SignalKind::terminate()) {
        Ok(mut terminate) => drop(terminate.recv().await),
        Err(error) => eprintln!("SIGTERM cannot be heard: {error}"),
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
