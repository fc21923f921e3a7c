//! The relay: its rate beside `publish_many`, and a critical row beside a backlog and a queue that refuses.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use futures_util::{StreamExt, stream};
use serde::{Deserialize, Serialize};
use sqlx::{Executor, PgPool};
use tierline::observe::Event;
use tierline::task::PublishRequest;
use tierline::{Registry, Task, Tierline, Topology};
use tierline_benchmarks::{Comparison, Distribution, Distributions, Report};
use tierline_testbed::{Database, Vhost, database, vhost};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

use crate::scene::Noop;

const LIMIT: Duration = Duration::from_secs(600);
const PLAIN: &str = "publish_many";

/// The task of the critical tier.
#[derive(Serialize, Deserialize)]
struct Urgent {}

impl Task for Urgent {
    const NAME: &'static str = "urgent";
}

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    rate(report, is_quick).await?;
    isolation(report, is_quick).await
}

/// Messages a second into a quorum queue: from rows, and straight from a publisher.
async fn rate(report: &mut Report, is_quick: bool) -> Result<()> {
    let (rounds, count) = if is_quick { (3, 30_000) } else { (5, 100_000) };
    let outbox = &Outbox::build("").await?;
    let measured = Comparison::new("The relay, into a quorum queue", "messages/s")
        .contender(PLAIN, async || {
            let app = outbox.app(Registry::new()).await?;
            let begin = Instant::now();
            publish_all(&app, count).await?;
            let rate = count as f64 / begin.elapsed().as_secs_f64();
            app.close().await;
            outbox.empty().await?;
            Ok(rate)
        })
        .contender("the relay", async || {
            outbox.fill(count).await?;
            let took = outbox.relay_all(count).await?;
            outbox.empty().await?;
            Ok(count as f64 / took.as_secs_f64())
        })
        .at_least(0.5, PLAIN)
        .run(rounds)
        .await?;
    report.add(measured);
    Ok(())
}

/// From the commit of a critical row to its start in a worker without the database: alone, beside a backlog of bulk rows
/// that is being relayed, and beside bulk rows that the broker refuses.
async fn isolation(report: &mut Report, is_quick: bool) -> Result<()> {
    let (count, backlog) = match is_quick {
        true => (300, 100_000),
        false => (2_000, 1_000_000),
    };
    let idle = Outbox::build("").await?.critical_waits(count).await?;
    let behind = Outbox::build("").await?;
    behind.fill(backlog).await?;
    let behind = behind.critical_waits(count).await?;
    let flooded = Outbox::build("").await?;
    let flood = flooded.flood().await?;
    let flooded = flooded.critical_waits(count).await?;
    flood.abort();
    let refusing = Outbox::build("max_length = 100").await?;
    refusing.fill(20_000).await?;
    let refusing = refusing.critical_waits(count).await?;
    let p50 = idle.quantile(0.5);
    let [alone, beside, refused] = [&idle, &behind, &refusing].map(|it| it.quantile(0.99));
    report.check(
        "commit to start through the relay: p50 at most 30 ms",
        format!("{p50:.2?}"),
        p50 <= Duration::from_millis(30),
    );
    report.check(
        format!(
            "a critical row beside {backlog} bulk rows: p99 at most 2 times that of an idle relay"
        ),
        format!("{beside:.2?} and {alone:.2?}"),
        beside <= alone * 2,
    );
    report.check(
        "a critical row beside a queue that refuses bulk: p99 at most 1.25 times that of an idle relay",
        format!("{refused:.2?} and {alone:.2?}"),
        refused <= alone.mul_f64(1.25),
    );
    report.add(
        Distributions::new("A critical row, from its commit to its start through the relay")
            .row("idle", idle)
            .row(format!("beside {backlog} bulk rows"), behind)
            .row("beside a publisher that floods bulk", flooded)
            .row("beside a bulk queue that refuses", refusing),
    );
    Ok(())
}

/// Two tiers on the broker, each in a group of its own, and rows of them.
struct Outbox {
    vhost: Vhost,
    database: Database,
    pool: PgPool,
    map: String,
}

impl Outbox {
    async fn build(bulk: &str) -> Result<Self> {
        let (vhost, database) = (vhost().await, database().await);
        let map = format!(
            r#"
            app = "bench"
            [tiers.critical]
            queue = "quorum"
            [tiers.bulk]
            queue = "quorum"
            {bulk}
            [groups.urgent]
            tiers = ["critical"]
            concurrency = 8
            [groups.slow]
            tiers = ["bulk"]
            concurrency = 8
            [tasks]
            urgent = "critical"
            noop = "bulk"
            "#
        );
        let outbox = Self {
            pool: PgPool::connect(database.url()).await?,
            vhost,
            database,
            map,
        };
        outbox.rows().await?.close().await;
        Ok(outbox)
    }

    /// An app with both servers.
    async fn app(&self, registry: Registry) -> Result<Tierline> {
        let app = Tierline::builder(Topology::parse(&self.map)?)
            .amqp(self.vhost.amqp_url())
            .postgres(self.database.url())
            .registry(registry);
        Ok(app.connect().await?)
    }

    /// The same app with its tiers in Postgres: what it publishes are rows of the tiers.
    async fn rows(&self) -> Result<Tierline> {
        let map = self.map.replace("\"quorum\"", "\"postgres\"");
        let map = map.replace("max_length = 100", "");
        let app = Tierline::builder(Topology::parse(map)?).postgres(self.database.url());
        Ok(app.connect().await?)
    }

    async fn fill(&self, count: usize) -> Result<()> {
        let app = self.rows().await?;
        publish_all(&app, count).await?;
        app.close().await;
        // Vacuum of the last round's rows must not run in this one.
        for statement in ["VACUUM tierline.ready, tierline.running", "CHECKPOINT"] {
            self.pool.execute(statement).await?;
        }
        Ok(())
    }

    /// How long it takes to relay so many rows, from the first one on.
    async fn relay_all(&self, count: usize) -> Result<Duration> {
        let (relayed, all) = (Arc::new(AtomicUsize::new(0)), Arc::new(Notify::new()));
        let begin = Arc::new(std::sync::OnceLock::new());
        let app = Tierline::builder(Topology::parse(&self.map)?)
            .amqp(self.vhost.amqp_url())
            .postgres(self.database.url())
            .observe({
                let (relayed, all, begin) = (relayed.clone(), all.clone(), begin.clone());
                move |event| {
                    if let Event::Relayed { .. } = event {
                        begin.get_or_init(Instant::now);
                        if relayed.fetch_add(1, Ordering::Relaxed) + 1 == count {
                            all.notify_one();
                        }
                    }
                }
            });
        let app = app.connect().await?;
        let relaying = Running::begin(app.relay()?);
        timeout(LIMIT, all.notified())
            .await
            .context("not all rows were relayed in time")?;
        let took = begin.get().context("none was relayed")?.elapsed();
        relaying.end().await?;
        app.close().await;
        Ok(took)
    }

    /// How long critical rows take from their commit to their start, one after another.
    async fn critical_waits(&self, count: u64) -> Result<Distribution> {
        let (sender, mut starts) = mpsc::unbounded_channel();
        let mut registry = Registry::new();
        registry.register::<Urgent, _>(move |_: Urgent| {
            let _ = sender.send(SystemTime::now());
            async {}
        })?;
        let worker = Tierline::builder(Topology::parse(&self.map)?)
            .amqp(self.vhost.amqp_url())
            .registry(registry)
            .connect()
            .await?;
        let relay = self.app(Registry::new()).await?;
        let relaying = Running::begin(relay.relay()?);
        let working = worker.work(["urgent"]);
        let (stop, stopped) = oneshot::channel::<()>();
        let working = tokio::spawn(working.until(async { drop(stopped.await) }));
        let publisher = self.rows().await?;
        let mut waits = Vec::new();
        for number in 0..count {
            publisher.publish(Urgent {}).await?;
            let committed = SystemTime::now();
            let start = timeout(LIMIT, starts.recv()).await?;
            let start = start.context("the worker ended")?;
            // The first ones open connections.
            if number >= 10 {
                waits.push(start.duration_since(committed).unwrap_or_default());
            }
            sleep(Duration::from_micros(5_000 + (number * 7_919) % 10_000)).await;
        }
        drop(stop);
        working.await??;
        relaying.end().await?;
        for app in [publisher, relay, worker] {
            app.close().await;
        }
        Ok(Distribution::of(waits))
    }

    /// Publishes to the bulk queue for as long as it is not aborted, without the relay: what the machine does to a
    /// critical row while the broker is as busy.
    async fn flood(&self) -> Result<JoinHandle<Result<()>>> {
        let app = self.app(Registry::new()).await?;
        Ok(tokio::spawn(async move {
            loop {
                publish_all(&app, 10_000).await?;
            }
        }))
    }

    async fn empty(&self) -> Result<()> {
        // The next app that connects declares it again.
        self.vhost.delete_queue("bench.bulk").await
    }
}

async fn publish_all(app: &Tierline, count: usize) -> Result<()> {
    let payload = serde_json::to_vec(&Noop::new())?;
    let requests = (0..count).map(|_| PublishRequest::named(Noop::NAME, payload.clone()));
    let mut published = pin!(app.publish_many(stream::iter(requests)));
    while let Some(outcome) = published.next().await {
        outcome?;
    }
    Ok(())
}

/// A service that runs until it is ended.
struct Running {
    stop: oneshot::Sender<()>,
    ended: JoinHandle<Result<(), tierline::Error>>,
}

impl Running {
    fn begin(relay: tierline::relay::Relay) -> Self {
        let (stop, stopped) = oneshot::channel();
        let ended = tokio::spawn(relay.until(async {
            let _ = stopped.await;
        }));
        Self { stop, ended }
    }

    async fn end(self) -> Result<()> {
        let _ = self.stop.send(());
        Ok(self.ended.await??)
    }
}
