//! `cargo run --example web`: a web app that publishes from its handlers, and works beside them.
//!
//! ```sh
//! curl -i localhost:3000/orders -H 'content-type: application/json' -d '{"order": 7}'
//! curl -i localhost:3000/ready
//! ```
//!
//! Takes the broker from `AMQP_URL`, else `amqp://localhost`; `cargo xtask services` starts one.
//! Listens on `LISTEN`, else `127.0.0.1:3000`, until Ctrl-C or SIGTERM: then it finishes the requests and the
//! tasks that are under way.

use std::future::IntoFuture;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use tierline::task::Cancellation;
use tierline::{Error, TaskError, Tierline, Topology, task};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

const MAP: &str = r#"
    app = "web"

    [tiers.default]
    queue = "quorum"

    [groups.all]
    tiers = ["default"]
    concurrency = 4

    [tasks]
    "email.send_receipt" = "default"
"#;

#[derive(Serialize, Deserialize)]
struct SendReceipt {
    order: u64,
}

#[task(name = "email.send_receipt", retries = 5)]
async fn send_receipt(receipt: SendReceipt) -> Result<(), TaskError> {
    println!("the receipt of order {} is sent", receipt.order);
    Ok(())
}

/// Answers 202 only when the broker has stored the task, and 503 where the client may try again.
async fn order(
    State(app): State<Tierline>,
    Json(receipt): Json<SendReceipt>,
) -> Result<(StatusCode, String), (StatusCode, String)> {
    match app.publish(receipt).deadline("5s").await {
        Ok(receipt) => Ok((StatusCode::ACCEPTED, receipt.id.to_string())),
        Err(error) => Err((status_of(&error), error.to_string())),
    }
}

/// For a readiness probe: 503 while the broker is away or takes no messages. Its text says why.
async fn ready(State(app): State<Tierline>) -> (StatusCode, String) {
    let health = app.health().await;
    let status = match health.is_ready() {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    };
    (status, health.to_string())
}

/// For a liveness probe: an answer shows that the runtime is not stuck. A broker that is away is no reason to restart.
async fn live() -> StatusCode {
    StatusCode::OK
}

fn status_of(error: &Error) -> StatusCode {
    match error.is_transient() {
        true => StatusCode::SERVICE_UNAVAILABLE,
        false => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let variable = |name: &str, or: &str| std::env::var(name).unwrap_or_else(|_| or.to_owned());
    let app = Tierline::builder(Topology::parse(MAP)?)
        .amqp(variable("AMQP_URL", "amqp://localhost"))
        // The web app starts whether the broker is there or not, and says so in /ready.
        .connect_lazy()?;
    // One app for the whole process: it is cheap to clone, and all clones share its connections.
    let router = Router::new()
        .route("/orders", post(order))
        .route("/ready", get(ready))
        .route("/live", get(live))
        .with_state(app.clone());
    let listener = TcpListener::bind(variable("LISTEN", "127.0.0.1:3000")).await?;
    println!("listening on http://{}", listener.local_addr()?);

    // A larger app has its workers in a program of their own, with the same map.
    let shutdown = Cancellation::new();
    let server =
        axum::serve(listener, router).with_graceful_shutdown(shutdown.clone().cancelled_owned());
    let server = async {
        tokio::select! {
            served = server.into_future() => Ok(served?),
            // A client that never ends its request must not hold up the end of the process.
            () = after(&shutdown, GRACE) => Ok(()),
        }
    };
    let worker = async {
        let worker = app.work(["all"]).grace(GRACE);
        Ok(worker.until(shutdown.cancelled()).await?)
    };
    tokio::try_join!(server, worker, until_asked_to_end(&shutdown))?;
    println!("bye: every request that was taken is answered");
    Ok(())
}

/// How long requests and tasks that are under way may take when the process is asked to end.
const GRACE: Duration = Duration::from_secs(20);

/// Begins the shutdown on Ctrl-C, or on the SIGTERM of an orchestrator.
async fn until_asked_to_end(shutdown: &Cancellation) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        interrupted = tokio::signal::ctrl_c() => interrupted?,
        _ = terminate.recv() => {}
    }
    shutdown.cancel();
    Ok(())
}

async fn after(shutdown: &Cancellation, grace: Duration) {
    shutdown.cancelled().await;
    tokio::time::sleep(grace).await;
}
