//! `cargo run --example middleware`: code around every handler: a span, a timeout and a permission check.
//!
//! Takes the broker from `AMQP_URL`, else `amqp://localhost`; `cargo xtask services` starts one.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tierline::observe::Event;
use tierline::task::{Attempt, Next};
use tierline::{Outcome, Tierline, Topology, task};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tracing::Instrument;

const MAP: &str = r#"
    app = "middleware"

    [tiers.default]
    queue = "quorum"

    [groups.all]
    tiers = ["default"]
    concurrency = 1

    [tasks]
    "invoice.delete" = "default"
    "report.export" = "default"
"#;

#[derive(Serialize, Deserialize)]
struct DeleteInvoice {
    number: u32,
}

#[task(name = "invoice.delete")]
async fn delete_invoice(invoice: DeleteInvoice) {
    println!("invoice {} is deleted", invoice.number);
}

#[derive(Serialize, Deserialize)]
struct Export;

/// A report that is never ready.
#[task(name = "report.export", timeout = "10m")]
async fn export(_: Export) {
    std::future::pending().await
}

/// For the app: a span around every attempt, and a line when it has ended.
async fn trace(attempt: Attempt, next: Next) -> Outcome {
    let cx = attempt.context().clone();
    let user = cx.header("user").unwrap_or("nobody");
    let span = tracing::info_span!("on_behalf_of", user);
    let outcome = next.run(attempt).instrument(span).await;
    println!("{} for {user}: {outcome:?}", cx.task());
    outcome
}

/// For a group: no task of it runs for longer than this, whatever its own timeout is. It is not worth a retry.
async fn limit(attempt: Attempt, next: Next) -> Outcome {
    match timeout(Duration::from_millis(200), next.run(attempt)).await {
        Ok(outcome) => outcome,
        Err(_) => Outcome::discard("longer than 200 ms"),
    }
}

/// For a task: a permission check, before the payload is decoded.
async fn only_managers(attempt: Attempt, next: Next) -> Outcome {
    match attempt.context().header("user") {
        Some("ada") => next.run(attempt).await,
        _ => Outcome::dead("only managers delete invoices"),
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let url = std::env::var("AMQP_URL").unwrap_or_else(|_| "amqp://localhost".to_owned());
    let (settled, mut all_settled) = mpsc::unbounded_channel();
    let app = Tierline::builder(Topology::parse(MAP)?)
        .amqp(url)
        .middleware(trace)
        .group_middleware("all", limit)
        .task_middleware("invoice.delete", only_managers)
        .observe(move |event| {
            let is_settled = matches!(
                event,
                Event::Done { .. } | Event::Dead { .. } | Event::Discarded { .. }
            );
            if is_settled {
                let _ = settled.send(());
            }
        })
        .connect()
        .await?;
    for user in ["ada", "bob"] {
        let delete = app.publish(DeleteInvoice { number: 1007 });
        delete.header("user", user).await?;
    }
    app.publish(Export).header("user", "ada").await?;
    let all = async {
        for _ in 0..3 {
            all_settled.recv().await;
        }
    };
    app.work(["all"]).until(all).await?;
    Ok(())
}
