//! `cargo run --example tiers`: a one-time password overtakes exports that came before it.
//!
//! Takes the broker from `AMQP_URL`, else `amqp://localhost`; `cargo xtask services` starts one.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tierline::observe::Event;
use tierline::{Context, TaskError, Tierline, Topology, task};
use tokio::sync::mpsc;

/// One slot for both tiers: whatever is more urgent when it frees comes next.
const MAP: &str = r#"
    app = "tiers"

    [tiers.critical]
    queue = "classic"
    slo = "5s"

    [tiers.bulk]
    queue = "quorum"

    [groups.all]
    tiers = ["critical", "bulk"]
    order = "strict"
    concurrency = 1

    [tasks]
    "sms.send_otp" = "critical"
    "contacts.export" = "bulk"
"#;

#[derive(Serialize, Deserialize)]
struct SendOtp {
    phone: String,
}

#[task(name = "sms.send_otp", timeout = "20s")]
async fn send_otp(otp: SendOtp) -> Result<(), TaskError> {
    println!("critical: a password for {}", otp.phone);
    Ok(())
}

#[derive(Serialize, Deserialize)]
struct Export {
    number: u32,
}

#[task(name = "contacts.export")]
async fn export(export: Export, cx: Context) -> Result<(), TaskError> {
    println!("bulk: export {}", export.number);
    if export.number == 1 {
        // Somebody signs in while the first export runs and three more wait.
        let phone = "+39 055 0000".to_owned();
        cx.publish(SendOtp { phone }).expires("60s").await?;
    }
    tokio::time::sleep(Duration::from_millis(500)).await;
    Ok(())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let url = std::env::var("AMQP_URL").unwrap_or_else(|_| "amqp://localhost".to_owned());
    let (done, mut all_done) = mpsc::unbounded_channel();
    let app = Tierline::builder(Topology::parse(MAP)?)
        .amqp(url)
        .observe(move |event| {
            if matches!(event, Event::Done { .. }) {
                let _ = done.send(());
            }
        })
        .connect()
        .await?;
    for number in 1..=4 {
        app.publish(Export { number }).await?;
    }
    let all = async {
        for _ in 0..5 {
            all_done.recv().await;
        }
    };
    app.work(["all"]).until(all).await?;
    Ok(())
}
