//! `cargo run --example redrive`: what failed for good is logged, understood and brought back.
//!
//! Takes the broker from `AMQP_URL`, else `amqp://localhost`, and the database from `DATABASE_URL`,
//! else `postgres://localhost/postgres`; `cargo xtask services` starts both. What it keeps in the
//! database is in the schema `tierline`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};
use tierline::dead::{Filter, State};
use tierline::observe::Event;
use tierline::{Context, TaskError, Tierline, Topology, task};
use tokio::sync::Notify;

const MAP: &str = r#"
    app = "redrive"

    [tiers.default]
    queue = "quorum"

    [groups.all]
    tiers = ["default"]
    concurrency = 4

    [tasks]
    "invoice.send" = "default"
"#;

/// Somebody else's service, which is down at first.
#[derive(Clone, Default)]
struct Provider(Arc<AtomicBool>);

#[derive(Serialize, Deserialize)]
struct SendInvoice {
    number: u64,
}

#[task(name = "invoice.send", retries = 0, timeout = "10s")]
async fn send_invoice(invoice: SendInvoice, cx: Context) -> Result<(), TaskError> {
    if !cx.data::<Provider>().0.load(Ordering::Relaxed) {
        return Err("connection refused".into());
    }
    println!("invoice {} is sent", invoice.number);
    Ok(())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let variable = |name: &str, or: &str| std::env::var(name).unwrap_or_else(|_| or.to_owned());
    let provider = Provider::default();
    let (collected, done) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (tell_collected, tell_done) = (collected.clone(), done.clone());
    let app = Tierline::builder(Topology::parse(MAP)?)
        .amqp(variable("AMQP_URL", "amqp://localhost"))
        .postgres(variable("DATABASE_URL", "postgres://localhost/postgres"))
        .data(provider.clone())
        .observe(move |event| match event {
            Event::Collected { .. } => tell_collected.notify_one(),
            Event::Done { .. } => tell_done.notify_one(),
            _ => {}
        })
        .connect()
        .await?;
    // Once per release, here or with `tierline migrate`.
    app.database()?.migrate().await?;

    app.publish(SendInvoice { number: 7 }).await?;
    let worker = app.work(["all"]);
    let operator = async {
        collected.notified().await;
        provider.0.store(true, Ordering::Relaxed);
        let letters = app
            .dead_letters()?
            .by("ada")
            .because("the provider is back");
        for group in letters
            .groups(&Filter::default().state(State::Dead), 10)
            .await?
        {
            let error = group.sample.error.unwrap_or_default();
            println!(
                "{} dead: {error} ({})",
                group.count, group.assessment.because
            );
            letters.redrive(group.sample.id).await?;
        }
        done.notified().await;
        anyhow::Ok(())
    };
    let mut ended = Ok(());
    worker.until(async { ended = operator.await }).await?;
    ended
}
