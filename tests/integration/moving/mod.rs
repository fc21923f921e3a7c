//! Tiers that move between homes and generations, on a real broker and a real database.

mod deleted;
mod taken;
mod under_load;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use lapin::{Channel, ConnectionProperties};
use serde::{Deserialize, Serialize};
use tierline::amqp::Connection;
use tierline::moving::{Mover, TierMove};
use tierline::{Registry, Task, TaskError, TaskOptions, Tierline, Topology};
use tierline_testbed::{Database, Vhost, database, vhost};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use crate::worker::{Heard, PATIENCE};

const QUORUM: &str = "queue = \"quorum\"";
const POSTGRES: &str = "queue = \"postgres\"";
const TO_POSTGRES: &str = "queue = \"postgres\"\nformerly = \"quorum\"";
const FROM_POSTGRES: &str = "queue = \"quorum\"\nformerly = \"postgres\"";
const SECOND: &str =
    "queue = \"quorum\"\ngeneration = 2\nformerly = { queue = \"quorum\", generation = 1 }";

/// A map whose tier `normal` has these lines.
fn map(tier: &str) -> Topology {
    let map = format!(
        "app = \"shop\"\n[tiers.normal]\n{tier}\n[tiers.low]\nqueue = \"quorum\"\n[groups.all]\n\
         tiers = [\"normal\", \"low\"]\nconcurrency = 4\nprefetch = 4\n[tasks]\n\"order.ship\" = \"normal\"\n\
         \"order.count\" = \"low\"\n"
    );
    Topology::parse(map).unwrap()
}

#[derive(Debug, Serialize, Deserialize)]
struct Ship {
    order: u32,
}

impl Task for Ship {
    const NAME: &'static str = "order.ship";
}

#[derive(Debug, Serialize, Deserialize)]
struct Count {}

impl Task for Count {
    const NAME: &'static str = "order.count";
}

/// How often each order was shipped.
#[derive(Debug, Clone, Default)]
struct Shipped(Arc<Mutex<BTreeMap<u32, u32>>>);

impl Shipped {
    fn orders(&self) -> BTreeMap<u32, u32> {
        self.0.lock().unwrap().clone()
    }

    fn number(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    /// Handlers that note each order. Those from 1,000,000 on fail at their first attempt, and those from 2,000,000 on
    /// at every one.
    fn registry(&self) -> Registry {
        let mut registry = Registry::new();
        let noted = self.clone();
        let ship = move |Ship { order }: Ship| {
            let times = {
                let mut shipped = noted.0.lock().unwrap();
                let times = shipped.entry(order).or_default();
                *times += 1;
                *times
            };
            async move {
                match order {
                    2_000_000.. => Err(TaskError::from("never")),
                    1_000_000.. if times == 1 => Err(TaskError::from("not yet")),
                    _ => Ok(()),
                }
            }
        };
        let options = TaskOptions::new().retries(1).backoff("100ms");
        registry.register_with::<Ship, _>(ship, options).unwrap();
        registry.register::<Count, _>(|_: Count| async {}).unwrap();
        registry
    }
}

/// The servers of a test.
struct Servers {
    vhost: Vhost,
    database: Database,
}

struct Worker {
    stop: oneshot::Sender<()>,
    ended: JoinHandle<Result<(), tierline::Error>>,
}

/// A process of the app: one map, and perhaps a worker.
struct Process {
    app: Tierline,
    heard: Heard,
    worker: Option<Worker>,
}

impl Servers {
    async fn new() -> Self {
        let (vhost, database) = (vhost().await, database().await);
        Self { vhost, database }
    }

    /// A process that publishes. It has a database only if its map needs one.
    async fn publisher(&self, tier: &str, shipped: &Shipped) -> Process {
        let heard = Heard::default();
        let mut builder = Tierline::builder(map(tier))
            .amqp(self.vhost.amqp_url())
            .registry(shipped.registry())
            .observe(heard.ear());
        if tier.contains("postgres") {
            builder = builder.postgres(self.database.url());
        }
        let app = builder.connect().await.unwrap();
        let worker = None;
        Process { app, heard, worker }
    }

    /// A process that publishes and works.
    async fn worker(&self, tier: &str, shipped: &Shipped) -> Process {
        let mut process = self.publisher(tier, shipped).await;
        let (stop, stopped) = oneshot::channel();
        let worker = process.app.work(["all"]).grace(Duration::from_secs(5));
        let ended = tokio::spawn(worker.until(async {
            let _ = stopped.await;
        }));
        process.worker = Some(Worker { stop, ended });
        process
    }

    async fn connection(&self) -> Connection {
        Connection::open(self.vhost.amqp_url(), "move")
            .await
            .unwrap()
    }

    /// A channel of a client that knows nothing of tierline, with its connection.
    async fn stranger(&self) -> (lapin::Connection, Channel) {
        let url = self.vhost.amqp_url();
        let connecting = lapin::Connection::connect(url, ConnectionProperties::default());
        let connection = connecting.await.unwrap();
        let channel = connection.create_channel().await.unwrap();
        (connection, channel)
    }

    /// Runs the move of the tier, or only looks.
    async fn moved(&self, tier: &str, is_dry: bool) -> TierMove {
        let connection = self.connection().await;
        let database = tierline::Database::new(self.database.url()).unwrap();
        let topology = map(tier);
        let mover = Mover::new(&topology)
            .assume_acknowledged()
            .broker(&connection)
            .database(&database);
        let moved = match is_dry {
            true => mover.dry_run("normal").await,
            false => mover.run("normal").await,
        };
        connection.close().await;
        moved.unwrap()
    }

    /// Moves until the move is over.
    async fn move_on(&self, tier: &str) -> TierMove {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let moved = self.moved(tier, false).await;
            if moved.is_over() {
                return moved;
            }
            assert!(Instant::now() < deadline, "{moved}");
            sleep(Duration::from_millis(100)).await;
        }
    }

    async fn has_queue(&self, queue: &str) -> bool {
        let queues = self.vhost.queue_names().await.unwrap();
        queues.iter().any(|it| it == queue)
    }

    async fn until_depth(&self, queue: &str, depth: u32) {
        let deadline = Instant::now() + PATIENCE;
        while self.vhost.depth(queue).await.unwrap() != depth {
            assert!(Instant::now() < deadline, "{queue} has not {depth}");
            sleep(Duration::from_millis(50)).await;
        }
    }
}

impl Process {
    async fn ship(&self, orders: std::ops::Range<u32>) {
        for order in orders {
            self.app.publish(Ship { order }).await.unwrap();
        }
    }

    async fn end(self) {
        if let Some(Worker { stop, ended }) = self.worker {
            stop.send(()).unwrap();
            ended.await.unwrap().unwrap();
        }
        self.app.close().await;
    }
}
