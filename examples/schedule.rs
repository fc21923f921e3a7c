//! `cargo run --example schedule`: a task that comes due by itself.
//!
//! Takes the broker from `AMQP_URL`, else `amqp://localhost`, and the database from `DATABASE_URL`,
//! else `postgres://localhost/postgres`; `cargo xtask services` starts both. What it keeps in the
//! database is in the schema `tierline`.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tierline::{Context, TaskError, Tierline, Topology, task};
use tokio::sync::Semaphore;

const MAP: &str = r#"
    app = "schedule"

    [tiers.default]
    queue = "quorum"

    [groups.all]
    tiers = ["default"]
    concurrency = 4

    [tasks]
    "rooms.count_free" = "default"

    [schedules.free-rooms]
    task = "rooms.count_free"
    every = "1s"                    # or cron = "0 3 * * *" and timezone = "Europe/Rome"
    payload = { floor = 2 }
    expires = "30s"                 # what has not started by then is skipped
"#;

#[derive(Serialize, Deserialize)]
struct CountFreeRooms {
    floor: u32,
}

#[task(name = "rooms.count_free")]
async fn count_free_rooms(count: CountFreeRooms, cx: Context) -> Result<(), TaskError> {
    let due = cx.header("schedule-due-at").unwrap_or("now");
    println!(
        "counting the free rooms of floor {}, due at {due}",
        count.floor
    );
    cx.data::<Arc<Semaphore>>().add_permits(1);
    Ok(())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let variable = |name: &str, or: &str| std::env::var(name).unwrap_or_else(|_| or.to_owned());
    let runs = Arc::new(Semaphore::new(0));
    let app = Tierline::builder(Topology::parse(MAP)?)
        .amqp(variable("AMQP_URL", "amqp://localhost"))
        .postgres(variable("DATABASE_URL", "postgres://localhost/postgres"))
        .data(runs.clone())
        .connect()
        .await?;
    app.database()?.migrate().await?;

    // Any number of processes may run both: one of them leads the schedules.
    let three_runs = || async {
        let _ = runs.acquire_many(3).await;
    };
    tokio::try_join!(
        app.work(["all"]).until(three_runs()),
        app.scheduler()?.until(three_runs()),
    )?;
    Ok(())
}
