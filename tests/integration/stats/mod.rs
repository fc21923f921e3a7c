//! Statistics of an app, from both of its servers.

mod away;
mod known;

use std::time::Duration;

use futures_util::{StreamExt, stream};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use tierline::stats::{Count, Stats, TierStats};
use tierline::task::PublishRequest;
use tierline::{Builder, Context, Outcome, Registry, Task, Tierline, Topology};
use tierline_testbed::{Database, Vhost, database, vhost};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use crate::worker::PATIENCE;

const MAP: &str = r#"
    app = "shop"
    [tiers.urgent]
    queue = "classic"
    slo = "1h"
    [tiers.normal]
    queue = "quorum"
    [tiers.mail]
    queue = "postgres"
    slo = "1h"
    limit = { rate = "100/s" }
    [groups.fast]
    tiers = ["urgent", "normal"]
    concurrency = 2
    [groups.slow]
    tiers = ["mail"]
    concurrency = 3
    [tasks]
    "order.ship" = "urgent"
    "order.count" = "normal"
    "mail.send" = "mail"
"#;

/// What its handler is to do.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
enum Ship {
    Succeed,
    Wait,
    Die,
}

impl Task for Ship {
    const NAME: &'static str = "order.ship";
}

#[derive(Debug, Serialize, Deserialize)]
struct CountOrders {}

impl Task for CountOrders {
    const NAME: &'static str = "order.count";
}

#[derive(Debug, Serialize, Deserialize)]
struct Mail {}

impl Task for Mail {
    const NAME: &'static str = "mail.send";
}

fn handlers() -> Registry {
    let mut registry = Registry::new();
    registry
        .register::<Ship, _>(async |ship: Ship, cx: Context| match ship {
            Ship::Succeed => Outcome::Done,
            Ship::Die => Outcome::dead("it cannot be shipped"),
            Ship::Wait => {
                cx.cancelled().await;
                Outcome::Done
            }
        })
        .unwrap();
    registry
        .register::<CountOrders, _>(async |_: CountOrders| Outcome::Done)
        .unwrap();
    registry
        .register::<Mail, _>(async |_: Mail| Outcome::Done)
        .unwrap();
    registry
}

/// The servers of a test.
struct Shop {
    vhost: Vhost,
    database: Database,
    app: Tierline,
}

impl Shop {
    async fn open() -> Self {
        let (vhost, database) = tokio::join!(vhost(), database());
        let app = builder(vhost.amqp_url(), database.url())
            .connect()
            .await
            .unwrap();
        Self {
            vhost,
            database,
            app,
        }
    }

    async fn stats(&self) -> Stats {
        self.app.stats().await.unwrap()
    }

    /// The statistics of a tier, when they are as they should be.
    async fn tier_when(&self, name: &str, is_so: impl Fn(&TierStats) -> bool) -> TierStats {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let stats = self.stats().await;
            let found = tier(&stats, name);
            if is_so(found) {
                return found.clone();
            }
            assert!(Instant::now() < deadline, "{:?} {found:#?}", stats.problems);
            sleep(Duration::from_millis(50)).await;
        }
    }

    async fn publish<T: Task>(&self, number: usize, task: impl Fn() -> T) {
        let requests = (0..number).map(|_| PublishRequest::new(&task()).unwrap());
        let requests: Vec<_> = requests.collect();
        let published = self.app.publish_many(stream::iter(requests));
        published.for_each(async |it| drop(it.unwrap())).await;
    }

    async fn pool(&self) -> PgPool {
        PgPool::connect(self.database.url()).await.unwrap()
    }

    fn work(&self) -> Working {
        let (stop, stopped) = oneshot::channel();
        let worker = self.app.work(["fast", "slow"]).grace("0s");
        let ended = tokio::spawn(worker.until(async {
            let _ = stopped.await;
        }));
        Working { stop, ended }
    }
}

fn builder(amqp: &str, database: &str) -> Builder {
    Tierline::builder(Topology::parse(MAP).unwrap())
        .amqp(amqp)
        .postgres(database)
        .registry(handlers())
}

fn tier<'s>(stats: &'s Stats, name: &str) -> &'s TierStats {
    stats.tiers.iter().find(|tier| tier.tier == name).unwrap()
}

fn shown(count: Option<Count>) -> String {
    count.map_or("unknown".to_owned(), |count| count.to_string())
}

struct Working {
    stop: oneshot::Sender<()>,
    ended: JoinHandle<Result<(), tierline::Error>>,
}

impl Working {
    async fn end(self) {
        self.stop.send(()).unwrap();
        self.ended.await.unwrap().unwrap();
    }
}
