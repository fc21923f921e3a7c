//! `cargo run --example hello`: a task is defined, mapped, published and run.
//!
//! Takes the broker from `AMQP_URL`, else `amqp://localhost`; `cargo xtask services` starts one.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tierline::{Context, TaskError, Tierline, Topology, task};
use tokio::sync::Notify;

/// Usually a file of its own: `Topology::load("topology.toml")`.
const MAP: &str = r#"
    app = "hello"

    [tiers.default]
    queue = "quorum"

    [groups.all]
    tiers = ["default"]
    concurrency = 4

    [tasks]
    "greet" = "default"
"#;

#[derive(Serialize, Deserialize)]
struct Greet {
    name: String,
}

#[task(name = "greet")]
async fn greet(greeting: Greet, cx: Context) -> Result<(), TaskError> {
    println!("Hello, {}!", greeting.name);
    cx.data::<Arc<Notify>>().notify_one();
    Ok(())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let url = std::env::var("AMQP_URL").unwrap_or_else(|_| "amqp://localhost".to_owned());
    let greeted = Arc::new(Notify::new());
    let app = Tierline::builder(Topology::parse(MAP)?)
        .amqp(url)
        .data(greeted.clone())
        .connect()
        .await?;

    let name = "world".to_owned();
    let receipt = app.publish(Greet { name }).await?;
    println!("the broker has it, in the tier {}", receipt.tier);

    // A worker of your own would run `.until_terminated()`.
    app.work(["all"]).until(greeted.notified()).await?;
    Ok(())
}
