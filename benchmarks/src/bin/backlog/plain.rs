//! The best plain loop: each connection completes its last batch and claims the next in one statement.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::Result;
use sqlx::{Connection, Executor, PgConnection, PgPool, Row};
use tokio::task::JoinSet;

const TABLES: &str = "CREATE TABLE IF NOT EXISTS plain_ready (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, \
     priority smallint NOT NULL, due_at timestamptz NOT NULL DEFAULT now(), payload bytea NOT NULL); \
     CREATE INDEX IF NOT EXISTS plain_order ON plain_ready (priority, due_at, id); \
     CREATE TABLE IF NOT EXISTS plain_running (id bigint PRIMARY KEY, priority smallint NOT NULL, \
     due_at timestamptz NOT NULL, payload bytea NOT NULL)";

const CLAIM: &str = "WITH done AS (DELETE FROM plain_running WHERE id = ANY($1)), \
     picked AS MATERIALIZED (SELECT id FROM plain_ready ORDER BY priority, due_at, id LIMIT $2 FOR UPDATE SKIP LOCKED), \
     taken AS (DELETE FROM plain_ready USING picked WHERE plain_ready.id = picked.id RETURNING plain_ready.*) \
     INSERT INTO plain_running SELECT id, priority, due_at, payload FROM taken RETURNING id, priority, due_at, payload";

pub(crate) async fn fill(pool: &PgPool, count: usize) -> Result<()> {
    pool.execute(TABLES).await?;
    sqlx::query(
        "INSERT INTO plain_ready (priority, payload) SELECT 5, convert_to(repeat('x', 256), 'UTF8') \
         FROM generate_series(1, $1)",
    )
    .bind(count as i64)
    .execute(pool)
    .await?;
    Ok(())
}

/// Tasks a second, `batch` at a time on so many connections.
pub(crate) async fn drain(url: &str, connections: usize, batch: i64, count: usize) -> Result<f64> {
    let drained = Arc::new(AtomicUsize::new(0));
    let mut opened = Vec::new();
    for _ in 0..connections {
        opened.push(PgConnection::connect(url).await?);
    }
    let begin = Instant::now();
    let mut loops: JoinSet<Result<()>> = JoinSet::new();
    for mut connection in opened {
        let drained = drained.clone();
        loops.spawn(async move {
            let mut done: Vec<i64> = Vec::new();
            loop {
                let rows = sqlx::query(CLAIM)
                    .bind(&done)
                    .bind(batch)
                    .fetch_all(&mut connection)
                    .await?;
                drained.fetch_add(done.len(), Ordering::Relaxed);
                if rows.is_empty() {
                    return Ok(());
                }
                done = Vec::with_capacity(rows.len());
                for row in rows {
                    // As a handler would read it.
                    let payload: Vec<u8> = row.try_get("payload")?;
                    std::hint::black_box(payload);
                    done.push(row.try_get("id")?);
                }
            }
        });
    }
    while let Some(ended) = loops.join_next().await {
        ended??;
    }
    let took = begin.elapsed();
    anyhow::ensure!(drained.load(Ordering::Relaxed) == count);
    Ok(count as f64 / took.as_secs_f64())
}
