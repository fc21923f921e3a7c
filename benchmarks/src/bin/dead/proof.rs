//! Two proofs, with processes that are killed and a database that is stopped.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use futures_util::stream::{self, StreamExt};
use serde::{Deserialize, Serialize};
use sqlx::{Connection, PgConnection, Row};
use tierline::dead::{Filter, OperationState, State};
use tierline::task::PublishRequest;
use tierline::{Context, Registry, Task, TaskError, TaskOptions, Tierline};
use tierline_benchmarks::Report;
use tierline_testbed::{Database, Postgres, Vhost, depth, vhost};

use crate::shop::{self, Role, until};

#[derive(Serialize, Deserialize)]
struct Ship {
    order: usize,
}

impl Task for Ship {
    const NAME: &'static str = "order.ship";
}

#[derive(Serialize, Deserialize)]
struct Pay {
    order: usize,
}

impl Task for Pay {
    const NAME: &'static str = "order.pay";
}

/// How long claims of a killed process are left alone.
const LEASE: Duration = Duration::from_secs(3);

fn count(is_quick: bool) -> usize {
    if is_quick { 4_000 } else { 10_000 }
}

/// A process that plays its part until it is killed.
pub(crate) async fn play(role: &Role) -> Result<()> {
    let app = shop::builder(&role.amqp, &role.postgres)?.connect().await?;
    match role.name.as_str() {
        "collector" => app.collector()?.await?,
        operator => {
            let letters = app.dead_letters()?.by(operator).lease(LEASE);
            letters.redrive_all(Filter::default()).run().await?;
        }
    }
    Ok(())
}

/// Tasks that fail for good while Postgres is stopped and started twice, and the collector is killed.
pub(crate) async fn collect(report: &mut Report, is_quick: bool) -> Result<()> {
    let count = count(is_quick);
    let postgres = Postgres::start_new().await?;
    let (vhost, database) = (vhost().await, postgres.database().await?);
    let (amqp, url) = (vhost.amqp_url(), database.url());
    let app = failing(amqp, url).await?;
    let mut collector = Role::start("collector", amqp, url)?;
    let worker = work(&app);
    let begin = Instant::now();
    let steps = async {
        for step in 1..=4 {
            until("some to be dead", async || {
                Ok(published_share(count)? >= step * 20)
            })
            .await?;
            match step {
                1 | 3 => postgres.stop().await?,
                _ => postgres.start().await?,
            }
            if step == 2 {
                until("some rows", async || rows(url).await.map(|rows| rows > 0)).await?;
                collector.kill().await?;
                collector = Role::start("collector", amqp, url)?;
            }
        }
        anyhow::Ok(())
    };
    tokio::try_join!(publish(&app, count), steps)?;
    until("all rows", async || Ok(rows(url).await? >= count)).await?;
    until("empty queues", async || {
        let critical = depth(amqp, "shop.critical.dlq").await?;
        Ok(critical + depth(amqp, "shop.normal.dlq").await? == 0)
    })
    .await?;
    let took = begin.elapsed();
    collector.kill().await?;
    worker.abort();
    let mut connection = PgConnection::connect(url).await?;
    let right: i64 = sqlx::query(
        "SELECT count(*) FROM tierline.dead_letters WHERE reason = 'retries exhausted' \
         AND attempts = 2 AND jsonb_array_length(history) >= 1 \
         AND error = 'order ' || (payload_json ->> 'order') || ' is lost' \
         AND tier = CASE task WHEN 'order.pay' THEN 'critical' ELSE 'normal' END",
    )
    .fetch_one(&mut connection)
    .await?
    .get(0);
    let logged = rows(url).await?;
    report.check(
        format!("{count} dead tasks, Postgres stopped twice, collector killed -9: {count} rows"),
        format!("{logged} rows, {right} right, in {took:.1?}"),
        logged == count && usize::try_from(right)? == count,
    );
    Ok(())
}

/// A worker that runs until it is aborted.
fn work(app: &Tierline) -> tokio::task::JoinHandle<()> {
    let working = app.work(["all"]).until(std::future::pending::<()>());
    tokio::spawn(async move {
        if let Err(error) = working.await {
            eprintln!("the worker ended: {error}");
        }
    })
}

/// How much of the proof's tasks were published so far, in percent.
fn published_share(count: usize) -> Result<usize> {
    Ok(PUBLISHED.load(std::sync::atomic::Ordering::Relaxed) * 100 / count)
}

static PUBLISHED: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

async fn publish(app: &Tierline, count: usize) -> Result<()> {
    let requests = stream::iter(0..count).map(|order| {
        let made = match order % 2 {
            0 => PublishRequest::new(&Pay { order }),
            _ => PublishRequest::new(&Ship { order }),
        };
        made.map(|mut request| {
            request.id = Some(format!("order-{order}").into());
            request
        })
    });
    let requests: Vec<PublishRequest> = requests
        .collect::<Vec<_>>()
        .await
        .into_iter()
        .collect::<Result<_, _>>()?;
    // A little at a time, so that the servers' troubles fall into it.
    for some in requests.chunks(count / 100) {
        let mut outcomes = std::pin::pin!(app.publish_many(stream::iter(some.to_vec())));
        while let Some(outcome) = outcomes.next().await {
            outcome?;
            PUBLISHED.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok(())
}

async fn rows(url: &str) -> Result<usize> {
    let Ok(mut connection) = PgConnection::connect(url).await else {
        return Ok(0);
    };
    let row = sqlx::query("SELECT count(*) FROM tierline.dead_letters").fetch_one(&mut connection);
    let count: i64 = row.await?.get(0);
    Ok(usize::try_from(count)?)
}

/// An app whose tasks fail in both of their attempts.
async fn failing(amqp: &str, postgres: &str) -> Result<Tierline> {
    let options = || {
        TaskOptions::new()
            .retries(1)
            .backoff(Duration::from_millis(100))
    };
    let mut registry = Registry::new();
    registry.register_with::<Pay, _>(
        |pay: Pay| async move { Err::<(), _>(TaskError::from(format!("order {} is lost", pay.order))) },
        options(),
    )?;
    registry.register_with::<Ship, _>(
        |ship: Ship| async move {
            Err::<(), _>(TaskError::from(format!("order {} is lost", ship.order)))
        },
        options(),
    )?;
    let app = shop::builder(amqp, postgres)?
        .registry(registry)
        .connect()
        .await?;
    app.database()?.migrate().await?;
    Ok(app)
}

/// Tasks that two operators redrive at once; one of them is killed in the middle and started again.
pub(crate) async fn redrive(report: &mut Report, is_quick: bool) -> Result<()> {
    let count = count(is_quick);
    let (vhost, database) = tokio::join!(vhost(), tierline_testbed::database());
    let (amqp, url) = (vhost.amqp_url(), database.url());
    let runs = Arc::new(Mutex::new(HashMap::<String, usize>::new()));
    let app = counting(&vhost, &database, &runs).await?;
    let (_connection, channel) = shop::channel(amqp).await?;
    let messages =
        (0..count).map(|number| (shop::payload(number), shop::dead(&number.to_string())));
    shop::publish(&channel, "shop.normal.dlx", "", messages).await?;
    let collecting = tokio::spawn(app.collector()?.into_future());
    until("the rows", async || Ok(rows(url).await? == count)).await?;
    let worker = work(&app);
    let begin = Instant::now();
    let letters = app.dead_letters()?.lease(LEASE);
    let redriven = Filter::default().state(State::Redriven);
    let mut ada = Role::start("ada", amqp, url)?;
    let mut bob = Role::start("bob", amqp, url)?;
    until("a third to be redriven", async || {
        Ok(letters.count(&redriven).await? as usize > count / 3)
    })
    .await?;
    ada.kill().await?;
    // Killed with rows in hand, or it proves nothing; else its operation is over.
    let operations = letters.operations(10).await?;
    let killed = operations.iter().find(|operation| operation.who == "ada");
    let killed = killed.context("ada had not begun")?;
    let (id, done) = (killed.id, killed.done);
    if killed.state != OperationState::Running {
        bail!("ada was done before she was killed");
    }
    let resumed = until("ada's redrive to be resumed", async || {
        match letters.resume(id).await {
            Ok(operation) => Ok(operation.state == OperationState::Done),
            Err(_) => {
                tokio::time::sleep(Duration::from_millis(200)).await;
                Ok(false)
            }
        }
    });
    resumed.await?;
    bob.wait().await?;
    // What is claimed when the last one looks is stale a little later.
    until("all to be marked", async || {
        let marked = letters.count(&redriven).await? as usize;
        if marked < count {
            letters.redrive_all(Filter::default()).run().await?;
        }
        Ok(marked == count)
    })
    .await?;
    until("all to have run", async || {
        Ok(
            runs.lock().map(|runs| runs.len()).unwrap_or_default() == count
                && depth(amqp, "shop.normal").await? == 0,
        )
    })
    .await?;
    let took = begin.elapsed();
    worker.abort();
    collecting.abort();
    let total: usize = runs
        .lock()
        .map(|runs| runs.values().sum())
        .unwrap_or_default();
    let most = runs
        .lock()
        .map(|runs| runs.values().copied().max())
        .ok()
        .flatten();
    report.check(
        format!("{count} redriven by two at once, one killed -9 after {done}: all ran, all marked"),
        format!(
            "{} duplicates, at most {} runs of one, in {took:.1?}",
            total - count,
            most.unwrap_or_default()
        ),
        most.is_some_and(|most| most <= 2),
    );
    Ok(())
}

/// An app whose worker counts how often each message runs.
async fn counting(
    vhost: &Vhost,
    database: &Database,
    runs: &Arc<Mutex<HashMap<String, usize>>>,
) -> Result<Tierline> {
    let runs = Arc::clone(runs);
    let mut registry = Registry::new();
    registry.register::<Ship, _>(move |_: Ship, cx: Context| {
        if let Ok(mut runs) = runs.lock() {
            *runs.entry(cx.id().to_string()).or_default() += 1;
        }
        async { Ok::<(), TaskError>(()) }
    })?;
    let builder = shop::builder(vhost.amqp_url(), database.url())?;
    let app = builder.registry(registry).connect().await?;
    app.database()?.migrate().await?;
    Ok(app)
}
