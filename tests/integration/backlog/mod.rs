//! Tiers in Postgres, against a real database.

mod aging;
mod alone;
mod beside;
mod doctor;
mod escalate;
mod expire;
mod faults;
mod idempotency;
mod inspect;
mod keep;
mod keys_within;
mod late;
mod leases;
mod outcomes;
mod pooler;
mod publish;
mod stale;
mod unique;
mod within;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use tierline::{Registry, Task, Tierline, Topology};
use tierline_testbed::{Database, Proxy, database};
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinHandle;

use crate::worker::Heard;

/// A map that needs no broker.
const MAP: &str = r#"
    app = "shop"
    [tiers.normal]
    queue = "postgres"
    lease = "2s"
    [groups.all]
    tiers = ["normal"]
    concurrency = 2
    prefetch = 4
    [tasks]
    "order.ship" = "normal"
"#;

#[derive(Debug, Serialize, Deserialize)]
struct Ship {
    order: u32,
}

impl Task for Ship {
    const NAME: &'static str = "order.ship";
}

/// The numbers of the orders that were shipped, in order.
#[derive(Debug, Clone, Default)]
struct Shipped(Arc<Mutex<Vec<u32>>>);

impl Shipped {
    fn add(&self, order: u32) {
        self.0.lock().unwrap().push(order);
    }

    fn orders(&self) -> Vec<u32> {
        self.0.lock().unwrap().clone()
    }
}

/// Handlers that note the orders that they ship.
fn shipping() -> (Registry, Shipped) {
    let shipped = Shipped::default();
    let mut registry = Registry::new();
    let noted = shipped.clone();
    registry
        .register::<Ship, _>(move |ship: Ship| {
            noted.add(ship.order);
            async {}
        })
        .unwrap();
    (registry, shipped)
}

/// Handlers that wait for a permit each.
fn gated() -> (Registry, Arc<Semaphore>) {
    let open = Arc::new(Semaphore::new(0));
    let mut registry = Registry::new();
    let gate = open.clone();
    registry
        .register::<Ship, _>(move |_: Ship| {
            let gate = gate.clone();
            async move { gate.acquire().await.unwrap().forget() }
        })
        .unwrap();
    (registry, open)
}

/// An app on a database of its own.
struct Shop {
    database: Arc<Database>,
    app: Tierline,
    heard: Heard,
}

/// A worker of an app.
struct Working {
    stop: oneshot::Sender<()>,
    ended: JoinHandle<Result<(), tierline::Error>>,
}

impl Shop {
    async fn open(map: &str, registry: Registry) -> Self {
        let database = database().await;
        Self::open_on(database, map, registry).await
    }

    async fn open_on(database: Database, map: &str, registry: Registry) -> Self {
        let url = database.url().to_owned();
        Self::open_at(&url, database, map, registry).await
    }

    /// An app that reaches its database by another way than its tests do.
    async fn open_at(url: &str, database: Database, map: &str, registry: Registry) -> Self {
        Self::open_sharing(url, Arc::new(database), map, registry).await
    }

    /// Another process of the app, on the same database.
    async fn open_beside(other: &Self, map: &str, registry: Registry) -> Self {
        Self::open_beside_at(other, other.database.url(), map, registry).await
    }

    /// Another process, which reaches the database by another way.
    async fn open_beside_at(other: &Self, url: &str, map: &str, registry: Registry) -> Self {
        Self::open_sharing(url, other.database.clone(), map, registry).await
    }

    async fn open_sharing(
        url: &str,
        database: Arc<Database>,
        map: &str,
        registry: Registry,
    ) -> Self {
        let heard = Heard::default();
        let app = Tierline::builder(Topology::parse(map).unwrap())
            .postgres(url)
            .registry(registry)
            .observe(heard.ear())
            .connect()
            .await
            .unwrap();
        Self {
            database,
            app,
            heard,
        }
    }

    fn work(&self) -> Working {
        work(&self.app)
    }

    async fn pool(&self) -> PgPool {
        PgPool::connect(self.database.url()).await.unwrap()
    }

    /// How many rows each table has: scheduled, ready, running.
    async fn rows(&self) -> [i64; 3] {
        rows(&self.pool().await).await
    }
}

/// How many rows each table has: scheduled, ready, running.
pub(crate) async fn rows(pool: &PgPool) -> [i64; 3] {
    let mut rows = [0; 3];
    for (index, table) in ["scheduled", "ready", "running"].iter().enumerate() {
        let count = format!("SELECT count(*) FROM tierline.{table}");
        rows[index] = sqlx::query_scalar(sqlx::AssertSqlSafe(count))
            .fetch_one(pool)
            .await
            .unwrap();
    }
    rows
}

/// The URL that leads to the same database through a proxy.
fn through(proxy: &Proxy, url: &str) -> String {
    let (server, path) = url.rsplit_once('/').unwrap();
    let (host, _) = server.rsplit_once(':').unwrap();
    format!("{host}:{}/{path}", proxy.port())
}

/// A proxy before the server of a URL, and the URL that leads through it.
pub(crate) async fn behind_a_proxy(url: &str) -> (Proxy, String) {
    let (server, _) = url.rsplit_once('/').unwrap();
    let (_, port) = server.rsplit_once(':').unwrap();
    let proxy = Proxy::start(port.parse().unwrap()).await.unwrap();
    let url = through(&proxy, url);
    (proxy, url)
}

/// Works in all groups of an app.
fn work(app: &Tierline) -> Working {
    let groups = app.topology().groups().iter();
    work_in(app, groups.map(|it| it.name.clone()))
}

/// Works in these groups of an app.
fn work_in(app: &Tierline, groups: impl IntoIterator<Item = impl Into<String>>) -> Working {
    let (stop, stopped) = oneshot::channel();
    let worker = app.work(groups).grace(Duration::from_secs(5));
    let ended = tokio::spawn(worker.until(async {
        let _ = stopped.await;
    }));
    Working { stop, ended }
}

impl Working {
    async fn end(self) {
        self.stop.send(()).unwrap();
        self.ended.await.unwrap().unwrap();
    }
}
