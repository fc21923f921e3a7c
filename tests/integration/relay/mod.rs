//! The relay, on a real broker and a real database.

mod long_delays;
mod moved;
mod refused;
mod relayed;

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use lapin::options::BasicGetOptions;
use lapin::{BasicProperties, Channel, ConnectionProperties};
use serde::{Deserialize, Serialize};
use sqlx::{Executor, PgPool};
use tierline::message::Message;
use tierline::relay::Relay;
use tierline::{Registry, Task, Tierline, Topology};
use tierline_testbed::{Database, Vhost, database, vhost};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::amqp::until;
use crate::worker::Heard;

/// Two tiers that share nothing.
const MAP: &str = r#"
    app = "shop"
    [tiers.critical]
    queue = "quorum"
    [tiers.bulk]
    queue = "classic"
    [groups.urgent]
    tiers = ["critical"]
    concurrency = 2
    [groups.slow]
    tiers = ["bulk"]
    concurrency = 2
    [tasks]
    "order.pay" = "critical"
    "order.ship" = "bulk"
"#;

#[derive(Debug, Serialize, Deserialize)]
struct Pay {
    order: u32,
}

impl Task for Pay {
    const NAME: &'static str = "order.pay";
}

#[derive(Debug, Serialize, Deserialize)]
struct Ship {
    order: u32,
}

impl Task for Ship {
    const NAME: &'static str = "order.ship";
}

/// The same app with its tiers in Postgres: what it publishes are rows of the tiers.
fn map_of_rows() -> String {
    MAP.replace("\"classic\"", "\"postgres\"")
        .replace("\"quorum\"", "\"postgres\"")
}

/// The servers of an app, and a process that publishes rows.
struct Shop {
    vhost: Vhost,
    database: Database,
    pool: PgPool,
    rows: Tierline,
}

impl Shop {
    async fn open() -> Self {
        let (vhost, database) = (vhost().await, database().await);
        let rows = Tierline::builder(Topology::parse(map_of_rows()).unwrap())
            .postgres(database.url())
            .connect()
            .await
            .unwrap();
        Self {
            pool: PgPool::connect(database.url()).await.unwrap(),
            vhost,
            database,
            rows,
        }
    }

    /// A process with both servers.
    async fn app(&self, map: &str, registry: Registry, heard: &Heard) -> Tierline {
        Tierline::builder(Topology::parse(map).unwrap())
            .amqp(self.vhost.amqp_url())
            .postgres(self.database.url())
            .registry(registry)
            .observe(heard.ear())
            .connect()
            .await
            .unwrap()
    }

    /// A process of a relay.
    async fn relay(&self, map: &str) -> Relaying {
        let heard = Heard::default();
        let app = self.app(map, Registry::new(), &heard).await;
        Relaying::begin(app.relay().unwrap(), heard)
    }

    /// How many rows each table has: scheduled, ready, running.
    async fn count(&self) -> [i64; 3] {
        crate::backlog::rows(&self.pool).await
    }

    async fn until_no_rows(&self) {
        until("no row is left", async || self.count().await == [0; 3]).await;
    }

    async fn execute(&self, statement: &'static str) {
        self.pool.execute(statement).await.unwrap();
    }

    /// A channel of a client that knows nothing of tierline. Its connection is never closed.
    async fn channel(&self) -> Channel {
        let properties = ConnectionProperties::default();
        let connection = lapin::Connection::connect(self.vhost.amqp_url(), properties);
        connection.await.unwrap().create_channel().await.unwrap()
    }

    /// Takes so many messages out of a queue, as they come.
    async fn take(&self, queue: &str, number: usize) -> Vec<Taken> {
        let channel = self.channel().await;
        let mut taken = Vec::new();
        until("the messages are there", async || {
            while taken.len() < number
                && let Some(next) = get(&channel, queue).await
            {
                taken.push(next);
            }
            taken.len() == number
        })
        .await;
        taken
    }
}

/// A message as it was in a queue.
#[derive(Debug)]
struct Taken {
    properties: BasicProperties,
    message: Message,
}

async fn get(channel: &Channel, queue: &str) -> Option<Taken> {
    let options = BasicGetOptions { no_ack: true };
    let got = channel.basic_get(queue.into(), options).await.unwrap()?;
    let (properties, payload) = (got.properties.clone(), got.data.clone());
    let message = Message::from_wire(&properties, payload, "bulk", SystemTime::now());
    Some(Taken {
        message: message.unwrap(),
        properties,
    })
}

/// How often each id is among the messages.
fn ids(taken: &[Taken]) -> BTreeMap<String, usize> {
    let mut ids = BTreeMap::new();
    for it in taken {
        *ids.entry(it.message.id.to_string()).or_default() += 1;
    }
    ids
}

/// A relay that runs.
struct Relaying {
    heard: Heard,
    stop: oneshot::Sender<()>,
    ended: JoinHandle<Result<(), tierline::Error>>,
}

impl Relaying {
    fn begin(relay: Relay, heard: Heard) -> Self {
        let (stop, stopped) = oneshot::channel();
        let ended = tokio::spawn(relay.until(async {
            let _ = stopped.await;
        }));
        Self { heard, stop, ended }
    }

    async fn end(self) {
        self.stop.send(()).unwrap();
        self.ended.await.unwrap().unwrap();
    }
}

/// In whole milliseconds since 1970, as messages carry times.
fn milliseconds(time: SystemTime) -> u128 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH);
    since.unwrap().as_millis()
}

/// Publishes rows of the tier `bulk`, and returns their ids.
async fn ship_all(shop: &Shop, orders: std::ops::Range<u32>) -> Vec<String> {
    use futures_util::{StreamExt, stream};
    use tierline::task::PublishRequest;
    let requests = orders.map(|order| PublishRequest::new(&Ship { order }).unwrap());
    let receipts = shop.rows.publish_many(stream::iter(requests));
    let ids = receipts.map(|receipt| receipt.unwrap().id.to_string());
    let mut ids: Vec<String> = ids.collect().await;
    ids.sort();
    ids
}

/// A delay that no test waits for.
const HOUR: Duration = Duration::from_secs(3_600);
