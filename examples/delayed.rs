//! `cargo run --example delayed`: tasks for later, and tasks that are too late.
//!
//! Takes the broker from `AMQP_URL`, else `amqp://localhost`; `cargo xtask services` starts one.

use serde::{Deserialize, Serialize};
use tierline::observe::Event;
use tierline::{Context, TaskError, Tierline, Topology, task};
use tokio::sync::mpsc;

const MAP: &str = r#"
    app = "delayed"

    [tiers.default]
    queue = "quorum"

    [groups.all]
    tiers = ["default"]
    concurrency = 4

    [tasks]
    "guest.remind" = "default"
"#;

#[derive(Serialize, Deserialize)]
struct Remind {
    of: String,
}

#[task(name = "guest.remind")]
async fn remind(reminder: Remind, cx: Context) -> Result<(), TaskError> {
    let since = cx.enqueued_at().elapsed()?;
    println!(
        "{} (asked for {:.1} s ago)",
        reminder.of,
        since.as_secs_f64()
    );
    Ok(())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let url = std::env::var("AMQP_URL").unwrap_or_else(|_| "amqp://localhost".to_owned());
    let (settled, mut all_settled) = mpsc::unbounded_channel();
    let app = Tierline::builder(Topology::parse(MAP)?)
        .amqp(url)
        .observe(move |event| {
            if let Event::Expired { task, .. } = event {
                println!("{} {} came too late and was skipped", task.name, task.id);
            }
            if matches!(event, Event::Done { .. } | Event::Expired { .. }) {
                let _ = settled.send(());
            }
        })
        .connect()
        .await?;

    let remind = |of: &str| app.publish(Remind { of: of.to_owned() });
    // Any delay from 100 ms on, in steps of 100 ms: up to 30 days in the broker, and any longer one if the app has a
    // database. No worker need run meanwhile.
    remind("check out").delay("2s").await?;
    remind("breakfast").delay("1s").await?;
    remind("welcome").await?;
    // Not worth running half a second from now, and due in one: it is skipped, and that is told.
    remind("happy hour")
        .delay("1s")
        .expires("500ms")
        .id("late")
        .await?;

    let all = async {
        for _ in 0..4 {
            all_settled.recv().await;
        }
    };
    app.work(["all"]).until(all).await?;
    Ok(())
}
