//! The servers, and the disturbed network between them and their clients.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use lapin::options::{QueueDeclareOptions, QueueDeleteOptions};
use lapin::types::FieldTable;
use lapin::{Channel, Connection, ConnectionProperties};
use serde_json::Value;
use sqlx::{Connection as _, PgConnection, Row};
use tierline_testbed::{Broker, Cluster, Database, Network, Node, Postgres, Proxy};
use tokio::time::timeout;

use crate::plan::Way;
use crate::roles::TIERS;
use crate::verdict::Letter;

/// How long a server may take to answer a query.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);

/// The targets of faults.
#[derive(Debug)]
pub(crate) struct World {
    brokers: Brokers,
    /// The proxy before each node.
    proxies: Vec<Proxy>,
    pub(crate) postgres: Postgres,
    database: Option<Database>,
    database_proxy: Proxy,
}

#[derive(Debug)]
enum Brokers {
    One(Box<Broker>),
    Three(Box<Cluster>),
}

impl World {
    pub(crate) async fn start(nodes: usize) -> Result<World> {
        let brokers = async {
            match nodes {
                1 => Ok(Brokers::One(Box::new(Broker::start_new().await?))),
                3 => Ok(Brokers::Three(Box::new(Cluster::start_new().await?))),
                other => bail!("there can be 1 node or 3, not {other}"),
            }
        };
        let (brokers, postgres) = tokio::try_join!(brokers, Postgres::start_new())?;
        let database = postgres.database().await?;
        let database_proxy = Proxy::start(postgres.port()).await?;
        let mut world = World {
            brokers,
            proxies: Vec::new(),
            postgres,
            database: Some(database),
            database_proxy,
        };
        for node in 0..nodes {
            let proxy = Proxy::start(world.node(node).amqp_port()).await?;
            world.proxies.push(proxy);
        }
        Ok(world)
    }

    pub(crate) fn nodes(&self) -> &[Node] {
        match &self.brokers {
            Brokers::One(broker) => std::slice::from_ref(broker),
            Brokers::Three(cluster) => cluster.nodes(),
        }
    }

    pub(crate) fn node(&self, number: usize) -> &Node {
        &self.nodes()[number]
    }

    /// The node that leads the queue of a tier.
    pub(crate) async fn leader(&self, tier: &str) -> Result<&Node> {
        match &self.brokers {
            Brokers::One(broker) => Ok(broker),
            Brokers::Three(cluster) => {
                let witness = &cluster.nodes()[0];
                cluster.leader(witness, "/", &queue(tier)).await
            }
        }
    }

    /// The tiers whose queue is on this node alone, and how many messages are in each.
    pub(crate) async fn only_on(&self, node: usize) -> Result<Vec<(&'static str, u64)>> {
        let node = self.node(node);
        // In JSON the name of a process lacks its node.
        let list = ["list_queues", "name", "type", "pid", "messages"];
        let listed = node.rabbitmqctl(&list).await?;
        let held = |tier: &str| {
            let name = queue(tier);
            let rows = listed.lines().map(|line| line.split('\t').collect());
            let mut found = rows.filter(|row: &Vec<&str>| row.first() == Some(&name.as_str()));
            match found.next()?[..] {
                [_, "classic", pid, messages] if pid.contains(node.name()) => messages.parse().ok(),
                _ => None,
            }
        };
        let tiers = TIERS.into_iter();
        let held = tiers.filter_map(|tier| Some((tier, held(tier)?)));
        Ok(held.collect())
    }

    /// The addresses of the nodes for clients.
    pub(crate) fn amqp_urls(&self) -> Vec<String> {
        let url = |proxy: &Proxy| format!("amqp://guest:guest@127.0.0.1:{}", proxy.port());
        self.proxies.iter().map(url).collect()
    }

    /// The address of the database for clients.
    pub(crate) fn database_url(&self) -> Result<String> {
        let direct = self.direct_database_url()?;
        let (old, new) = (self.postgres.port(), self.database_proxy.port());
        Ok(direct.replacen(&format!(":{old}/"), &format!(":{new}/"), 1))
    }

    /// The address of the database past the proxy.
    pub(crate) fn direct_database_url(&self) -> Result<&str> {
        let database = self.database.as_ref();
        Ok(database.context("the database is there")?.url())
    }

    /// Disturbs a part of the network.
    pub(crate) fn disturb(&self, way: Way, network: Network) {
        match way {
            Way::AllNodes => self.proxies.iter().for_each(|proxy| proxy.set(network)),
            Way::Node(node) => self.proxies[node].set(network),
            Way::Postgres => self.database_proxy.set(network),
        }
    }

    /// Heals everything that a fault may have left behind.
    pub(crate) async fn heal(&self) -> Result<()> {
        self.disturb(Way::AllNodes, Network::Good);
        self.disturb(Way::Postgres, Network::Good);
        for node in self.nodes() {
            node.start().await?;
            node.resume().await?;
            node.clear_memory_alarm().await?;
        }
        self.postgres.start().await
    }

    /// Makes the nodes persist which quorum queues they have.
    pub(crate) async fn flush_declarations(&self) -> Result<()> {
        for node in self.nodes() {
            node.flush_declarations().await?;
        }
        Ok(())
    }

    /// Deletes a tier's queue through any node that answers. Returns how many messages it had.
    pub(crate) async fn delete_queue(&self, tier: &str) -> Result<u64> {
        let (_connection, channel) = self.channel().await?;
        let deleting = channel.queue_delete(queue(tier).into(), QueueDeleteOptions::default());
        Ok(timeout(ANSWER_LIMIT, deleting).await??.into())
    }

    /// Whether a tier's queue exists.
    pub(crate) async fn has_queue(&self, tier: &str) -> Result<bool> {
        let (_connection, channel) = self.channel().await?;
        Ok(depth(&channel, &queue(tier)).await.is_ok())
    }

    /// The queues that have messages, and how many, including unacknowledged ones and those in flight. The
    /// broker's numbers for quorum queues are some seconds old.
    pub(crate) async fn waiting(&self) -> Result<Vec<(String, u64)>> {
        let list = ["list_queues", "--formatter", "json", "name", "messages"];
        let listed = self.node(0).rabbitmqctl(&list).await?;
        let queues: Vec<Value> = serde_json::from_str(&listed)?;
        let waiting = queues.iter().filter_map(|queue| {
            let name = queue["name"].as_str()?.to_owned();
            // A queue whose node does not answer has no number, and does not count as empty.
            let messages = queue["messages"].as_u64().unwrap_or(u64::MAX);
            (messages > 0).then_some((name, messages))
        });
        Ok(waiting.collect())
    }

    /// The log of dead letters.
    pub(crate) async fn letters(&self) -> Result<Vec<Letter>> {
        let mut connection = PgConnection::connect(self.direct_database_url()?).await?;
        let select = "SELECT coalesce(message_id, identity), coalesce(task, ''), reason \
                      FROM tierline.dead_letters";
        let rows = sqlx::query(select).fetch_all(&mut connection).await?;
        let letter = |row: &sqlx::postgres::PgRow| Letter {
            id: row.get(0),
            task: row.get(1),
            reason: row.get(2),
        };
        Ok(rows.iter().map(letter).collect())
    }

    /// A channel past the proxy, to the first node that answers.
    async fn channel(&self) -> Result<(Connection, Channel)> {
        let mut refused = None;
        for node in self.nodes() {
            let connecting = async {
                let url = node.amqp_url();
                let connection = Connection::connect(&url, ConnectionProperties::default()).await?;
                let channel = connection.create_channel().await?;
                lapin::Result::Ok((connection, channel))
            };
            match timeout(ANSWER_LIMIT / 4, connecting).await {
                Ok(Ok(connected)) => return Ok(connected),
                Ok(Err(error)) => refused = Some(anyhow::Error::from(error)),
                Err(_) => refused = Some(anyhow::anyhow!("node {} does not answer", node.name())),
            }
        }
        Err(refused.context("no node")?)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // Dropped before its server.
        self.database = None;
    }
}

fn queue(tier: &str) -> String {
    format!("chaos.{tier}")
}

async fn depth(channel: &Channel, queue: &str) -> Result<u32> {
    let passive = QueueDeclareOptions {
        passive: true,
        ..QueueDeclareOptions::default()
    };
    let asking = channel.queue_declare(queue.into(), passive, FieldTable::default());
    Ok(timeout(ANSWER_LIMIT, asking).await??.message_count())
}
