//! apalis-postgres: `drain COUNT BATCH` fills the database of `DATABASE_URL`, works it off, and prints the seconds from the
//! first task to the last.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use anyhow::{Result, anyhow, bail};
use apalis::prelude::*;
use apalis_postgres::{Config, PostgresStorage};
use futures_util::stream;
use sqlx::postgres::PgPoolOptions;

#[derive(Clone, Default)]
struct Progress(Arc<Counted>);

#[derive(Default)]
struct Counted {
    ran: AtomicUsize,
    wanted: usize,
    first: OnceLock<Instant>,
}

#[tokio::main]
async fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [command, count, batch] = &words[..] else {
        bail!("not a command: {words:?}");
    };
    anyhow::ensure!(command == "drain", "not a command: {words:?}");
    let (count, batch): (usize, usize) = (count.parse()?, batch.parse()?);
    let url = std::env::var("DATABASE_URL")?;
    let pool = PgPoolOptions::new().max_connections(10).connect(&url).await?;
    PostgresStorage::setup(&pool).await.map_err(|error| anyhow!("{error:?}"))?;
    let config = Config::default().batch_size(batch);
    let mut backend = PostgresStorage::new(&pool).with_config(config);
    let payload = "x".repeat(240);
    let tasks = (0..count).map(|_| TaskBuilder::new(payload.clone()).build());
    let mut tasks = stream::iter(tasks.collect::<Vec<_>>());
    backend.push_all(&mut tasks).await.map_err(|error| anyhow!("{error:?}"))?;
    let progress = Progress(Arc::new(Counted {
        wanted: count,
        ..Counted::default()
    }));
    let worker = WorkerBuilder::new("peer")
        .backend(backend)
        .concurrency(8)
        .data(progress)
        .build(noop);
    worker.run().await.map_err(|error| anyhow!("{error:?}"))?;
    Ok(())
}

async fn noop(_: String, progress: Data<Progress>) -> Result<(), BoxDynError> {
    let counted = &progress.0.0;
    let first = *counted.first.get_or_init(Instant::now);
    if counted.ran.fetch_add(1, Ordering::Relaxed) + 1 == counted.wanted {
        println!("{}", first.elapsed().as_secs_f64());
        std::process::exit(0);
    }
    Ok(())
}
