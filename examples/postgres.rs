//! `cargo run --example postgres`: an app that needs no broker. Its tasks are rows, which can be looked through.
//!
//! Takes the database from `DATABASE_URL`, else `postgres://localhost/postgres`; `cargo xtask services` starts one.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tierline::backlog::{TaskFilter, TaskState};
use tierline::{Context, TaskError, Tierline, Topology, task};
use tokio::sync::Notify;

const MAP: &str = r#"
    app = "postgres"

    [tiers.reports]
    queue = "postgres"

    [groups.all]
    tiers = ["reports"]
    concurrency = 2

    [tasks]
    "report.write" = "reports"
"#;

#[derive(Serialize, Deserialize)]
struct WriteReport {
    year: u32,
}

/// It may run for hours: no broker takes it back.
#[task(name = "report.write", timeout = "6h")]
async fn write_report(report: WriteReport, cx: Context) -> Result<(), TaskError> {
    println!("the report of {} is written", report.year);
    cx.data::<Arc<Notify>>().notify_one();
    Ok(())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let url = std::env::var("DATABASE_URL");
    let url = url.unwrap_or_else(|_| "postgres://localhost/postgres".to_owned());
    let written = Arc::new(Notify::new());
    let app = Tierline::builder(Topology::parse(MAP)?)
        .postgres(url)
        .data(written.clone())
        .connect() // makes its tables, in the schema `tierline`
        .await?;

    let receipt = app.publish(WriteReport { year: 2025 }).await?;
    println!("Postgres has it, in the tier {}", receipt.tier);
    app.publish(WriteReport { year: 2026 })
        .delay("365d")
        .await?;

    let backlog = app.backlog()?.by("ada").because("nobody reads it");
    let next_year = TaskFilter::default().state(TaskState::Scheduled);
    for task in backlog.list(&next_year, None, 50).await?.tasks {
        println!("{} is {}", task.task, task.state);
    }
    let cancelled = backlog.cancel_all(&next_year).await?;
    println!("{cancelled} cancelled");

    // A worker of your own would run `.until_terminated()`.
    app.work(["all"]).until(written.notified()).await?;
    app.close().await;
    Ok(())
}
