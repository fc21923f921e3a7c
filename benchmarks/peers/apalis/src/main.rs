//! apalis-amqp, with the commands of `../../peer.py`. It knows no order between queues, so there is
//! no layout `one`.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow, bail};
use apalis::prelude::*;
use apalis_amqp::{AmqpBackend, Config};
use apalis_core::task::builder::TaskBuilder;
use apalis_core::task::metadata::MetadataStore;

#[tokio::main]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["fill", task, count] => {
            let count: i64 = count.parse()?;
            let mut backend = backend(task, 8)?;
            push(&mut backend, -1.0).await?;
            let begin = Instant::now();
            for number in 0..count {
                push(&mut backend, number as f64).await?;
            }
            println!("{}", begin.elapsed().as_secs_f64());
            Ok(())
        }
        ["arrive", count] => {
            let mut backend = backend("critical", 8)?;
            for number in 0..count.parse()? {
                let jitter: u64 = number * 7 % 21;
                tokio::time::sleep(Duration::from_millis(40 + jitter)).await;
                push(&mut backend, now()).await?;
            }
            Ok(())
        }
        ["work", "drain"] => work("noop", 8, 64).await,
        ["work", "own"] => {
            tokio::try_join!(work("critical", 2, 2), work("high", 6, 6))?;
            Ok(())
        }
        _ => bail!("fill TASK COUNT, arrive COUNT, work drain or work own"),
    }
}

fn backend(queue: &str, prefetch: u16) -> Result<AmqpBackend<f64>> {
    let url = std::env::var("AMQP_URL")?;
    let mut config = Config::default().queue(queue).prefetch_count(prefetch);
    config.declare_options.durable = true;
    let backend = AmqpBackend::new_from_addr(&url).map_err(|error| anyhow!("{error}"))?;
    Ok(backend.with_config(config))
}

async fn push(backend: &mut AmqpBackend<f64>, argument: f64) -> Result<()> {
    // Else a message is gone with its broker, and cheaper for it.
    let persistent = HashMap::from([("delivery_mode".to_owned(), "2".to_owned())]);
    let task = TaskBuilder::new(argument)
        .with_metadata(MetadataStore::from_map(persistent))
        .build();
    let pushed = backend.push_task(task).await;
    pushed.map_err(|error| anyhow!("{error}"))
}

async fn work(queue: &'static str, slots: usize, prefetch: u16) -> Result<()> {
    let mut backend = backend(queue, prefetch)?;
    // Version 1.0.0 panics where a worker has not published anything before.
    push(&mut backend, -1.0).await?;
    let handler = move |argument: f64| run(queue, argument);
    let worker = WorkerBuilder::new(queue)
        .backend(backend)
        .concurrency(slots)
        .build(handler);
    worker.run().await.context("the worker ended")
}

async fn run(queue: &'static str, argument: f64) -> Result<(), BoxDynError> {
    let number = argument as i64;
    match queue {
        _ if number < 0 => {}
        "noop" if number % 100 == 0 => note(&format!("noop {}", now()))?,
        "high" => {
            if number == 100 {
                note("high")?;
            }
            let milliseconds = 10 + (number as u64) * 7 % 21;
            tokio::time::sleep(Duration::from_millis(milliseconds)).await;
        }
        "critical" => note(&format!("critical {}", now() - argument))?,
        _ => {}
    }
    Ok(())
}

fn note(line: &str) -> std::io::Result<()> {
    let path = std::env::var_os("NOTES").unwrap_or_default();
    let mut notes = OpenOptions::new().create(true).append(true).open(path)?;
    notes.write_all(format!("{line}\n").as_bytes())
}

fn now() -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default().as_secs_f64()
}
