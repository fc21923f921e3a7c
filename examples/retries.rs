//! `cargo run --example retries`: a task that fails is tried again, or not, as its error says.
//!
//! Takes the broker from `AMQP_URL`, else `amqp://localhost`; `cargo xtask services` starts one.

use serde::{Deserialize, Serialize};
use tierline::observe::Event;
use tierline::{Context, TaskError, Tierline, Topology, task};
use tokio::sync::mpsc;

const MAP: &str = r#"
    app = "retries"

    [tiers.default]
    queue = "quorum"

    [groups.all]
    tiers = ["default"]
    concurrency = 4

    [tasks]
    "card.charge" = "default"
"#;

#[derive(Serialize, Deserialize)]
struct Charge {
    card: String,
}

/// Tried again after 0.2 s and 0.4 s, a little less with jitter. While it waits it is in the broker,
/// and no slot is held for it.
#[task(name = "card.charge", retries = 2, backoff = "200ms", timeout = "10s")]
async fn charge(charge: Charge, cx: Context) -> Result<(), TaskError> {
    if charge.card.is_empty() {
        // Trying again would not help: a dead letter at once.
        return Err(TaskError::permanent("there is no card number"));
    }
    if cx.attempt() < 3 {
        // Anything that `?` takes is tried again while retries are left.
        return Err("the bank does not answer".into());
    }
    println!("charged in attempt {}", cx.attempt());
    Ok(())
}

/// What the worker tells of its tasks.
fn print(event: &Event<'_>) {
    match event {
        Event::Retried { task, failure, .. } => {
            println!("attempt {} failed, to be retried: {failure}", task.attempt);
        }
        Event::Dead {
            reason, failure, ..
        } => println!("dead letter ({reason}): {failure}"),
        _ => {}
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let url = std::env::var("AMQP_URL").unwrap_or_else(|_| "amqp://localhost".to_owned());
    let (settled, mut all_settled) = mpsc::unbounded_channel();
    let app = Tierline::builder(Topology::parse(MAP)?)
        .amqp(url)
        .observe(print)
        .observe(move |event| {
            if matches!(event, Event::Done { .. } | Event::Dead { .. }) {
                let _ = settled.send(());
            }
        })
        .connect()
        .await?;
    for card in ["4242", ""] {
        let card = card.to_owned();
        app.publish(Charge { card }).await?;
    }
    let both = async {
        all_settled.recv().await;
        all_settled.recv().await;
    };
    app.work(["all"]).until(both).await?;
    Ok(())
}
