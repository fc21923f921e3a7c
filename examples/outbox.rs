//! `cargo run --example outbox`: a web app that stores an order and publishes its receipt in one transaction.
//!
//! ```sh
//! curl -i localhost:3000/orders -H 'content-type: application/json' -d '{"guest": "Ada"}'
//! curl -i localhost:3000/orders -H 'content-type: application/json' -d '{"guest": ""}'
//! ```
//!
//! The second order is refused after its receipt was published, and both are gone with the transaction. Kill the process
//! at any time: each order that was stored has its receipt, as soon as a worker runs. `WORK=no` starts the web app alone.
//!
//! Takes the database from `DATABASE_URL`, else `postgres://localhost/postgres`; `cargo xtask services` starts one. It
//! makes the table `public.outbox_orders` there. Listens on `LISTEN`, else `127.0.0.1:3000`, until it is killed.

use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use sqlx::{Executor, PgPool};
use tierline::{TaskError, Tierline, Topology, task};
use tokio::net::TcpListener;

const MAP: &str = r#"
    app = "outbox"

    [tiers.default]
    queue = "postgres"

    [groups.all]
    tiers = ["default"]
    concurrency = 4

    [tasks]
    "email.send_receipt" = "default"
"#;

#[derive(Deserialize)]
struct Order {
    guest: String,
}

#[derive(Serialize, Deserialize)]
struct SendReceipt {
    order: i64,
}

#[task(name = "email.send_receipt", retries = 5)]
async fn send_receipt(receipt: SendReceipt) -> Result<(), TaskError> {
    println!("the receipt of order {} is sent", receipt.order);
    Ok(())
}

#[derive(Clone)]
struct Shop {
    app: Tierline,
    pool: PgPool,
}

/// Answers 201 when the order and its receipt are stored.
async fn order(
    State(shop): State<Shop>,
    Json(order): Json<Order>,
) -> Result<(StatusCode, String), (StatusCode, String)> {
    match shop.store(&order).await {
        Ok(Some(id)) => Ok((StatusCode::CREATED, format!("order {id}"))),
        Ok(None) => Err((StatusCode::UNPROCESSABLE_ENTITY, "who orders?".to_owned())),
        Err(error) => Err((StatusCode::SERVICE_UNAVAILABLE, error.to_string())),
    }
}

impl Shop {
    /// Stores an order and publishes its receipt, or does neither.
    async fn store(&self, order: &Order) -> anyhow::Result<Option<i64>> {
        let mut tx = self.pool.begin().await?;
        let id =
            sqlx::query_scalar("INSERT INTO public.outbox_orders (guest) VALUES ($1) RETURNING id")
                .bind(&order.guest)
                .fetch_one(&mut *tx)
                .await?;
        let receipt = SendReceipt { order: id };
        self.app.publish(receipt).within(&mut tx).await?;
        if order.guest.is_empty() {
            // Dropped, the transaction is rolled back, and the receipt with it.
            return Ok(None);
        }
        tx.commit().await?;
        Ok(Some(id))
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let variable = |name: &str, or: &str| std::env::var(name).unwrap_or_else(|_| or.to_owned());
    let pool = PgPool::connect(&variable("DATABASE_URL", "postgres://localhost/postgres")).await?;
    pool.execute(
        "CREATE TABLE IF NOT EXISTS public.outbox_orders (id bigint GENERATED ALWAYS AS IDENTITY, guest text)",
    )
    .await?;
    // tierline uses the pool that the app has anyway.
    let app = Tierline::builder(Topology::parse(MAP)?)
        .postgres_pool(pool.clone())
        .connect()
        .await?;
    let worker = app.work(["all"]);
    let router = Router::new()
        .route("/orders", post(order))
        .with_state(Shop { app, pool });
    let listener = TcpListener::bind(variable("LISTEN", "127.0.0.1:3000")).await?;
    println!("listening on http://{}", listener.local_addr()?);
    let server = async { anyhow::Ok(axum::serve(listener, router).await?) };
    match variable("WORK", "yes").as_str() {
        "no" => server.await,
        _ => tokio::try_join!(server, async { Ok(worker.await?) }).map(drop),
    }
}
