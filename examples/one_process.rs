//! `cargo run --example one_process`: worker, collector and scheduler in one process, ended by one signal.
//!
//! Takes the broker from `AMQP_URL`, else `amqp://localhost`, and the database from `DATABASE_URL`,
//! else `postgres://localhost/postgres`; `cargo xtask services` starts both. Runs until Ctrl-C or SIGTERM.

use serde::{Deserialize, Serialize};
use tierline::observe::Event;
use tierline::task::Cancellation;
use tierline::{Context, Outcome, TaskError, Tierline, Topology, task};
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::{Duration, sleep};

const MAP: &str = r#"
    app = "one_process"

    [tiers.default]
    queue = "quorum"

    [groups.all]
    tiers = ["default"]
    concurrency = 4

    [tasks]
    "rooms.count_free" = "default"
    "contacts.export" = "default"
    "invoice.send" = "default"

    [schedules.free-rooms]
    task = "rooms.count_free"
    every = "1s"
    payload = { floor = 2 }
    expires = "30s"
"#;

#[derive(Serialize, Deserialize)]
struct CountFreeRooms {
    floor: u32,
}

#[task(name = "rooms.count_free")]
async fn count_free_rooms(count: CountFreeRooms) -> Result<(), TaskError> {
    println!(
        "scheduled: the free rooms of floor {} are counted",
        count.floor
    );
    Ok(())
}

#[derive(Serialize, Deserialize)]
struct ExportContacts {
    pages: u32,
}

/// A long task. It does not wait for the end of the grace period: when the shutdown begins it gives way, and
/// the next process goes on with it.
#[task(name = "contacts.export", timeout = "25m")]
async fn export_contacts(export: ExportContacts, cx: Context) -> Result<Outcome, TaskError> {
    println!("long: the export begins");
    for page in 0..export.pages {
        if cx.is_shutting_down() {
            // A handler of your own saves the number in a table, under `cx.id()`, and begins there.
            println!("long: the export gives way before page {page}");
            return Ok(Outcome::snooze("0s"));
        }
        sleep(Duration::from_millis(200)).await;
    }
    Ok(Outcome::Done)
}

#[derive(Serialize, Deserialize)]
struct SendInvoice {
    number: u64,
}

#[task(name = "invoice.send", retries = 0)]
async fn send_invoice(_: SendInvoice) -> Result<(), TaskError> {
    Err(TaskError::permanent("there is no address"))
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let variable = |name: &str, or: &str| std::env::var(name).unwrap_or_else(|_| or.to_owned());
    let app = Tierline::builder(Topology::parse(MAP)?)
        .amqp(variable("AMQP_URL", "amqp://localhost"))
        .postgres(variable("DATABASE_URL", "postgres://localhost/postgres"))
        .observe(|event| {
            if let Event::Collected { count, .. } = event {
                println!("collected: {count} into the log of dead letters");
            }
        })
        .connect()
        .await?;
    app.database()?.migrate().await?;
    app.publish(ExportContacts { pages: 10_000 }).await?;
    app.publish(SendInvoice { number: 7 }).await?;

    // One signal for all three. Each ends by itself, so the slowest decides how long it takes.
    let shutdown = Cancellation::new();
    let worker = app
        .work(["all"])
        .without_collector() // it has one of its own inside, with the defaults
        .until(shutdown.cancelled());
    let collector = app.collector()?.retention("14d");
    let collector = collector.until(shutdown.cancelled());
    let scheduler = app.scheduler()?.until(shutdown.cancelled());
    let signals = async {
        let asked = asked_to_end().await;
        shutdown.cancel();
        asked.map_err(|cause| tierline::Error::NoSignals { cause })
    };
    // If one of them fails, the others are dropped and the program ends with its error.
    tokio::try_join!(worker, collector, scheduler, signals)?;
    app.close().await;
    println!("bye: all three have ended");
    Ok(())
}

/// Completes on Ctrl-C, or on the SIGTERM of an orchestrator.
async fn asked_to_end() -> std::io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        interrupted = tokio::signal::ctrl_c() => interrupted,
        _ = terminate.recv() => Ok(()),
    }
}
