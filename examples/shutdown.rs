//! `cargo run --example shutdown`: a worker ends well on Ctrl-C or SIGTERM.
//!
//! Takes the broker from `AMQP_URL`, else `amqp://localhost`; `cargo xtask services` starts one.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tierline::{TaskError, Tierline, Topology, task};

/// Four messages in the hands of one slot, so that there is something to give back.
const MAP: &str = r#"
    app = "shutdown"

    [tiers.default]
    queue = "quorum"

    [groups.all]
    tiers = ["default"]
    concurrency = 1
    prefetch = 4

    [tasks]
    "report.render" = "default"
"#;

#[derive(Serialize, Deserialize)]
struct Render {
    page: u32,
}

#[task(name = "report.render")]
async fn render(render: Render) -> Result<(), TaskError> {
    println!("page {} begins", render.page);
    tokio::time::sleep(Duration::from_secs(2)).await;
    println!("page {} is done", render.page);
    Ok(())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let url = std::env::var("AMQP_URL").unwrap_or_else(|_| "amqp://localhost".to_owned());
    let app = Tierline::builder(Topology::parse(MAP)?)
        .amqp(url)
        .connect()
        .await?;
    for page in 1..=4 {
        app.publish(Render { page }).await?;
    }
    println!("press Ctrl-C: the page that is being rendered will be finished, and no other begun");

    // What runs has ten seconds to end, then it is cancelled and given back. A second Ctrl-C ends
    // the ten seconds. Any other future will do in place of the signals: `.until(shutdown)`.
    app.work(["all"]).grace("10s").until_terminated().await?;
    println!("bye: what was not begun is back in its queue, run this again to see it");
    Ok(())
}
