//! A worker whose handlers do what they are told: note that they ran, add to an account, abort, or never yield.
//!
//! It takes the broker from `AMQP_URL`, the database from `DATABASE_URL`, the map from `MAP`, the file to note runs in from
//! `LEDGER`, the grace period in milliseconds from `GRACE`, and a crash budget from `CRASH_BUDGET`, if that is set. With `RELAY` it
//! is a relay in place of a worker. With `ABORT_WHEN_HUNG` it may end its process, with
//! `CURRENT_THREAD` it has a runtime of one thread. What happens is printed, a line each.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::time::Duration;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use tierline::observe::Event;
use tierline::{Context, Registry, Task, TaskError, TaskOptions, Tierline, Topology};

/// Notes its number, waits, and notes that it is done.
#[derive(Serialize, Deserialize)]
struct Note {
    number: u64,
    milliseconds: u64,
}

impl Task for Note {
    const NAME: &'static str = "note";
}

/// The same in the other tier.
#[derive(Serialize, Deserialize)]
struct NoteLow(Note);

impl Task for NoteLow {
    const NAME: &'static str = "note_low";
}

/// Adds 1 to the account of its number, with a wait before and after the commit.
#[derive(Serialize, Deserialize)]
struct Add {
    number: i64,
    milliseconds: u64,
}

impl Task for Add {
    const NAME: &'static str = "add";
}

/// Notes its number, waits, and ends the process.
#[derive(Serialize, Deserialize)]
struct Abort {
    #[serde(default)]
    number: u64,
    #[serde(default)]
    milliseconds: u64,
}

impl Task for Abort {
    const NAME: &'static str = "abort";
}

/// The same in the other tier.
#[derive(Serialize, Deserialize)]
struct AbortLow(Abort);

impl Task for AbortLow {
    const NAME: &'static str = "abort_low";
}

/// Never yields.
#[derive(Serialize, Deserialize)]
struct Spin {}

impl Task for Spin {
    const NAME: &'static str = "spin";
}

struct Ledger(File);

impl Ledger {
    /// One write, so that lines of many processes do not mix.
    fn note(&self, line: &str) -> std::io::Result<()> {
        (&self.0).write_all(format!("{line}\n").as_bytes())
    }
}

async fn note(note: Note, cx: Context) -> Result<(), TaskError> {
    let ledger = cx.data::<Ledger>();
    ledger.note(&format!("start {}", note.number))?;
    tokio::time::sleep(Duration::from_millis(note.milliseconds)).await;
    ledger.note(&format!("end {}", note.number))?;
    Ok(())
}

async fn note_low(low: NoteLow, cx: Context) -> Result<(), TaskError> {
    note(low.0, cx).await
}

async fn add(add: Add, cx: Context) -> Result<(), TaskError> {
    let ledger = cx.data::<Ledger>();
    ledger.note(&format!("start {}", add.number))?;
    let pause = Duration::from_millis(add.milliseconds);
    let mut transaction = cx.transaction().await?;
    sqlx::query("UPDATE accounts SET value = value + 1 WHERE id = $1")
        .bind(add.number)
        .execute(&mut *transaction)
        .await?;
    tokio::time::sleep(pause).await;
    transaction.commit().await?;
    ledger.note(&format!("end {}", add.number))?;
    tokio::time::sleep(pause).await;
    Ok(())
}

async fn abort(abort: Abort, cx: Context) -> Result<(), TaskError> {
    let ledger = cx.data::<Ledger>();
    ledger.note(&format!("abort {}", abort.number))?;
    tokio::time::sleep(Duration::from_millis(abort.milliseconds)).await;
    std::process::abort();
}

async fn abort_low(low: AbortLow, cx: Context) -> Result<(), TaskError> {
    abort(low.0, cx).await
}

async fn spin(_: Spin) {
    loop {
        std::hint::spin_loop();
    }
}

fn main() -> Result<()> {
    let mut runtime = match std::env::var("CURRENT_THREAD") {
        Ok(_) => tokio::runtime::Builder::new_current_thread(),
        Err(_) => tokio::runtime::Builder::new_multi_thread(),
    };
    let runtime = runtime.worker_threads(2).enable_all().build()?;
    runtime.block_on(work())
}

async fn work() -> Result<()> {
    let setting = |name: &'static str| std::env::var(name).context(name);
    let topology = Topology::parse(setting("MAP")?)?;
    let ledger = OpenOptions::new()
        .append(true)
        .create(true)
        .open(setting("LEDGER")?)?;
    let mut registry = Registry::new();
    registry.register::<Note, _>(note)?;
    registry.register::<NoteLow, _>(note_low)?;
    registry.register::<Add, _>(add)?;
    registry.register::<Abort, _>(abort)?;
    registry.register::<AbortLow, _>(abort_low)?;
    let limits = TaskOptions::new()
        .soft_timeout(Duration::from_millis(500))
        .timeout(Duration::from_secs(1));
    registry.register_with::<Spin, _>(spin, limits)?;
    let groups: Vec<_> = topology.groups().iter().map(|it| it.name.clone()).collect();
    let mut builder = Tierline::builder(topology);
    if let Ok(url) = std::env::var("AMQP_URL") {
        builder = builder.amqp(url);
    }
    if let Ok(url) = std::env::var("DATABASE_URL") {
        builder = builder.postgres(url);
    }
    let is_relay = std::env::var("RELAY").is_ok();
    let app = builder
        .registry(registry)
        .data(Ledger(ledger))
        .abort_when_hung(std::env::var("ABORT_WHEN_HUNG").is_ok())
        .observe(print)
        .connect()
        .await?;
    if is_relay {
        println!("relays");
        return Ok(app.relay()?.until_terminated().await?);
    }
    let grace = Duration::from_millis(setting("GRACE")?.parse()?);
    let mut worker = app.work(groups).grace(grace);
    if let Ok(budget) = std::env::var("CRASH_BUDGET") {
        worker = worker.crash_budget(budget.parse()?);
    }
    worker.until_terminated().await?;
    Ok(())
}

fn print(event: &Event<'_>) {
    match event {
        Event::Consuming { tier, .. } => println!("consuming {tier}"),
        Event::Suspected { task, crashes } => println!("suspected {} {crashes}", task.name),
        Event::AlreadyDone { task } => println!("already done {}", task.name),
        Event::Dead { task, reason, .. } => println!("dead {}: {reason}", task.name),
        Event::RuntimeHung { aborts, .. } => println!("runtime hung, aborts: {aborts}"),
        Event::LeaseLost { task } => println!("lease lost {}", task.name),
        Event::GivenBack { task, why, .. } => println!("given back {}: {why}", task.name),
        _ => {}
    }
}
