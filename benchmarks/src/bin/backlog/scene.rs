//! An app whose tiers are all in Postgres.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use futures_util::{StreamExt, stream};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use tierline::task::PublishRequest;
use tierline::{Registry, Task, Tierline, Topology};
use tierline_testbed::{Database, PgBouncer, PoolMode, database};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

const LIMIT: Duration = Duration::from_secs(180);

/// A task with a payload of about 256 bytes.
#[derive(Serialize, Deserialize)]
pub(crate) struct Noop {
    pub(crate) text: String,
}

impl Task for Noop {
    const NAME: &'static str = "noop";
}

impl Noop {
    pub(crate) fn new() -> Self {
        Self {
            text: "x".repeat(240),
        }
    }
}

/// Counts runs, and remembers when the first one began.
#[derive(Default)]
pub(crate) struct Counter {
    ran: AtomicUsize,
    wanted: AtomicUsize,
    first: std::sync::OnceLock<Instant>,
    reached: Notify,
}

impl Counter {
    fn count(&self) {
        self.first.get_or_init(Instant::now);
        if self.ran.fetch_add(1, Ordering::Relaxed) + 1 == self.wanted.load(Ordering::Relaxed) {
            self.reached.notify_one();
        }
    }
}

pub(crate) struct Scene {
    pub(crate) database: Database,
    pub(crate) pool: PgPool,
    topology: Topology,
    pooler: Option<PgBouncer>,
}

impl Scene {
    pub(crate) async fn set(concurrency: u16, prefetch: u16) -> Result<Self> {
        let database = database().await;
        let topology = Topology::parse(format!(
            r#"
            app = "bench"
            [tiers.bulk]
            queue = "postgres"
            [groups.all]
            tiers = ["bulk"]
            concurrency = {concurrency}
            prefetch = {prefetch}
            [tasks]
            noop = "bulk"
            "#
        ))?;
        Self::set_on(database, topology).await
    }

    /// The same with another map, on this database.
    pub(crate) async fn set_on(database: Database, topology: Topology) -> Result<Self> {
        let pool = PgPool::connect(database.url()).await?;
        let scene = Self {
            database,
            pool,
            topology,
            pooler: None,
        };
        scene.app(Registry::new()).await?.close().await;
        Ok(scene)
    }

    /// The same, with a PgBouncer in transaction mode between the app and the database.
    pub(crate) async fn behind_pooler(self, connections: u32) -> Result<Self> {
        let pooler = PgBouncer::start(&self.database, PoolMode::Transaction, connections).await?;
        Ok(Self {
            pooler: Some(pooler),
            ..self
        })
    }

    pub(crate) async fn app(&self, registry: Registry) -> Result<Tierline> {
        let app = Tierline::builder(self.topology.clone())
            .postgres(
                self.pooler
                    .as_ref()
                    .map_or(self.database.url(), PgBouncer::url),
            )
            .postgres_pooler(self.pooler.is_some())
            .registry(registry)
            .connect()
            .await?;
        Ok(app)
    }

    pub(crate) async fn fill(&self, count: usize) -> Result<()> {
        let app = self.app(Registry::new()).await?;
        let requests = (0..count).map(|_| PublishRequest::new(&Noop::new()));
        let requests: Result<Vec<_>, _> = requests.collect();
        let mut published = std::pin::pin!(app.publish_many(stream::iter(requests?)));
        while let Some(outcome) = published.next().await {
            outcome?;
        }
        app.close().await;
        Ok(())
    }

    /// Works until so many tasks have run; how long that took from the first one's start on.
    pub(crate) async fn work(&self, count: usize) -> Result<Duration> {
        let counter = Arc::new(Counter::default());
        counter.wanted.store(count, Ordering::Relaxed);
        let mut registry = Registry::new();
        let counted = counter.clone();
        registry.register::<Noop, _>(move |_: Noop| {
            counted.count();
            async {}
        })?;
        let working = self.begin(registry).await?;
        let reached = timeout(LIMIT, counter.reached.notified()).await;
        reached.context("the tasks did not run in time")?;
        let took = counter.first.get().context("none ran")?.elapsed();
        working.end().await?;
        Ok(took)
    }

    /// A worker that tells when each task began.
    pub(crate) async fn starts(&self) -> Result<(Working, mpsc::UnboundedReceiver<SystemTime>)> {
        let (sender, starts) = mpsc::unbounded_channel();
        let mut registry = Registry::new();
        registry.register::<Noop, _>(move |_: Noop| {
            let _ = sender.send(SystemTime::now());
            async {}
        })?;
        Ok((self.begin(registry).await?, starts))
    }

    pub(crate) async fn begin(&self, registry: Registry) -> Result<Working> {
        let app = self.app(registry).await?;
        let (stop, stopped) = oneshot::channel();
        let worker = app.work(["all"]).without_collector();
        let ended = tokio::spawn(worker.until(async {
            let _ = stopped.await;
        }));
        Ok(Working { app, stop, ended })
    }
}

pub(crate) struct Working {
    pub(crate) app: Tierline,
    stop: oneshot::Sender<()>,
    ended: JoinHandle<Result<(), tierline::Error>>,
}

impl Working {
    pub(crate) async fn end(self) -> Result<()> {
        let _ = self.stop.send(());
        self.ended.await??;
        self.app.close().await;
        Ok(())
    }
}
