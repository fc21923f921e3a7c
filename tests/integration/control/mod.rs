//! What operators change at run time, against real servers, for tiers on the broker and in Postgres.

mod held_back;
#[cfg(feature = "admin")]
mod http;
mod limits;
mod overrides;
mod parked;
mod pauses;
mod processes;
mod rollups;
mod scaling;
mod waiting;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::{StreamExt, stream};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use tierline::task::PublishRequest;
use tierline::{Registry, Task, Tierline, Topology};
use tierline_testbed::{Database, Vhost, database, vhost};
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use crate::worker::{Heard, PATIENCE};

#[derive(Debug, Serialize, Deserialize)]
struct Ship {
    order: u32,
    #[serde(default)]
    customer: String,
}

impl Task for Ship {
    const NAME: &'static str = "order.ship";
}

#[derive(Debug, Serialize, Deserialize)]
struct Notify {
    order: u32,
}

impl Task for Notify {
    const NAME: &'static str = "order.notify";
}

/// Where a tier lives in a test.
const HOMES: [&str; 3] = ["quorum", "classic", "postgres"];

/// What started, in order, and a permit for each handler if they wait for it.
#[derive(Debug, Clone)]
struct Runs {
    started: Arc<Mutex<Vec<(&'static str, u32)>>>,
    /// How many of each customer run now, and the most that ran at once.
    running: Arc<Mutex<BTreeMap<String, (u32, u32)>>>,
    open: Arc<Semaphore>,
}

impl Runs {
    /// Handlers that end at once.
    fn free() -> Self {
        let runs = Self::held();
        runs.open.close();
        runs
    }

    /// Handlers that wait for a permit each.
    fn held() -> Self {
        Self {
            started: Arc::default(),
            running: Arc::default(),
            open: Arc::new(Semaphore::new(0)),
        }
    }

    fn registry(&self) -> Registry {
        let mut registry = Registry::new();
        let runs = self.clone();
        registry
            .register::<Ship, _>(move |ship: Ship| {
                let runs = runs.clone();
                async move { runs.run("ship", ship.order, &ship.customer).await }
            })
            .unwrap();
        let runs = self.clone();
        registry
            .register::<Notify, _>(move |notify: Notify| {
                let runs = runs.clone();
                async move { runs.run("notify", notify.order, "of notify").await }
            })
            .unwrap();
        registry
    }

    async fn run(&self, task: &'static str, order: u32, customer: &str) {
        self.started.lock().unwrap().push((task, order));
        {
            let mut running = self.running.lock().unwrap();
            let (now, most) = running.entry(customer.to_owned()).or_default();
            *now += 1;
            *most = (*most).max(*now);
        }
        if let Ok(permit) = self.open.acquire().await {
            permit.forget();
        }
        tokio::task::yield_now().await;
        let mut running = self.running.lock().unwrap();
        running.entry(customer.to_owned()).or_default().0 -= 1;
    }

    /// The numbers of a task's runs, in the order in which they started.
    fn of(&self, task: &str) -> Vec<u32> {
        let started = self.started.lock().unwrap();
        let of_task = started.iter().filter(|(name, _)| *name == task);
        of_task.map(|(_, order)| *order).collect()
    }

    fn count(&self, task: &str) -> usize {
        self.of(task).len()
    }

    async fn until(&self, task: &str, count: usize) {
        until(async || self.count(task) >= count).await;
    }

    /// The most runs of one customer at a time.
    fn most_at_once(&self, customer: &str) -> u32 {
        let running = self.running.lock().unwrap();
        running.get(customer).map_or(0, |(_, most)| *most)
    }
}

/// A worker of an app.
struct Working {
    stop: oneshot::Sender<()>,
    ended: JoinHandle<Result<(), tierline::Error>>,
}

impl Working {
    async fn end(self) {
        self.stop.send(()).unwrap();
        self.ended.await.unwrap().unwrap();
    }

    /// Ends it as a crash would: it says nothing to anybody.
    async fn kill(self) {
        self.ended.abort();
        let _ = self.ended.await;
    }
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

/// Looks until it is so.
async fn until(mut is_so: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so().await {
        assert!(Instant::now() < deadline, "it did not come to be");
        sleep(Duration::from_millis(20)).await;
    }
}

/// Servers of a test, and what its processes are made of.
struct Servers {
    vhost: Vhost,
    database: Arc<Database>,
    map: String,
}

impl Servers {
    async fn start(map: impl Into<String>) -> Self {
        Self {
            vhost: vhost().await,
            database: Arc::new(database().await),
            map: map.into(),
        }
    }

    /// One more process of the app.
    async fn process(&self, runs: &Runs) -> Process {
        self.process_of(runs.registry()).await
    }

    async fn process_of(&self, registry: Registry) -> Process {
        self.process_at(self.database.url(), registry).await
    }

    /// One that reaches the database by another way.
    async fn process_at(&self, database: &str, registry: Registry) -> Process {
        let amqp = self.vhost.amqp_url();
        self.process_over(amqp, database, registry).await
    }

    /// One that reaches both servers by another way.
    async fn process_over(&self, amqp: &str, database: &str, registry: Registry) -> Process {
        let heard = Heard::default();
        let app = Tierline::builder(Topology::parse(&self.map).unwrap())
            .amqp(amqp)
            .postgres(database)
            .registry(registry)
            .observe(heard.ear())
            .connect()
            .await
            .unwrap();
        Process {
            app,
            heard,
            working: None,
        }
    }

    /// One more process, which works in all groups.
    async fn worker(&self, runs: &Runs) -> Process {
        let mut process = self.process(runs).await;
        process.work();
        process
    }

    async fn pool(&self) -> PgPool {
        PgPool::connect(self.database.url()).await.unwrap()
    }

    async fn count(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql)
            .fetch_one(&self.pool().await)
            .await
            .unwrap()
    }

    /// Returns how many rows a statement changed.
    async fn execute(&self, sql: &'static str) -> u64 {
        let pool = self.pool().await;
        sqlx::query(sql)
            .execute(&pool)
            .await
            .unwrap()
            .rows_affected()
    }

    /// How many rows are parked.
    async fn parked(&self) -> i64 {
        self.count("SELECT count(*) FROM tierline.parked").await
    }

    /// How many dead letters there are.
    async fn dead(&self) -> i64 {
        self.count("SELECT count(*) FROM tierline.dead_letters")
            .await
    }
}

struct Process {
    app: Tierline,
    heard: Heard,
    working: Option<Working>,
}

impl Process {
    /// The same at work.
    fn working(mut self) -> Self {
        self.work();
        self
    }

    fn work(&mut self) {
        let groups: Vec<_> = self
            .app
            .topology()
            .groups()
            .iter()
            .map(|it| it.name.clone())
            .collect();
        self.working = Some(work_in(&self.app, groups));
    }

    async fn publish_ships(&self, orders: std::ops::Range<u32>) {
        let requests = orders.map(|order| {
            let customer = String::new();
            PublishRequest::new(&Ship { order, customer }).unwrap()
        });
        let published = self.app.publish_many(stream::iter(requests));
        published.for_each(async |it| drop(it.unwrap())).await;
    }

    async fn publish_notifies(&self, orders: std::ops::Range<u32>) {
        let requests = orders.map(|order| PublishRequest::new(&Notify { order }).unwrap());
        let published = self.app.publish_many(stream::iter(requests));
        published.for_each(async |it| drop(it.unwrap())).await;
    }

    /// Waits until this process follows what is in force now.
    async fn end(self) {
        if let Some(working) = self.working {
            working.end().await;
        }
        self.app.close().await;
    }
}
