//! A broker of three nodes on one machine.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use super::node::{Family, Node, Plugins};
use super::pool::Pool;
use super::release::Release;
use super::vhost::Vhost;
use crate::process::until;

const FORM_LIMIT: Duration = Duration::from_secs(60);

static POOL: Pool<[Node; 3]> = Pool::new();

/// A private cluster of three nodes. Each can be steered by itself.
#[derive(Debug)]
pub struct Cluster {
    nodes: Arc<[Node; 3]>,
    is_pooled: bool,
}

impl Cluster {
    /// A cluster for this test alone, with the management API: one that an earlier test of this process has
    /// left, else a new one. See [`Broker::start`](super::Broker::start) for what the test may do to it.
    pub async fn start() -> Result<Cluster> {
        while let Some(nodes) = POOL.take() {
            if are_well(&nodes).await {
                return Ok(Cluster {
                    nodes,
                    is_pooled: true,
                });
            }
        }
        let mut cluster = Cluster::start_new().await?;
        cluster.is_pooled = true;
        Ok(cluster)
    }

    /// Starts three nodes of the release that is at hand, with the management API. Takes some 30 s.
    pub async fn start_new() -> Result<Cluster> {
        let family = Family::start(Release::find()?)?;
        let plugins = Plugins::management();
        let first = Node::prepare(&family, "a", plugins, None)?;
        let second = Node::prepare(&family, "b", plugins, Some(&first))?;
        let third = Node::prepare(&family, "c", plugins, Some(&first))?;
        first.start().await?;
        // One after the other: nodes that join at the same moment wait for each other's locks.
        second.start().await?;
        third.start().await?;
        until("three nodes in one cluster", FORM_LIMIT, async || {
            Ok(running(&first).await? == 3)
        })
        .await?;
        Ok(Cluster {
            nodes: Arc::new([first, second, third]),
            is_pooled: false,
        })
    }

    /// The three nodes.
    pub fn nodes(&self) -> &[Node; 3] {
        &self.nodes
    }

    /// The URLs of all nodes, as a client that fails over wants them.
    pub fn amqp_urls(&self) -> Vec<String> {
        self.nodes.iter().map(Node::amqp_url).collect()
    }

    /// A new virtual host, seen through the first node, removed when it is dropped.
    pub async fn vhost(&self) -> Result<Vhost> {
        Vhost::create(self.nodes[0].management()?, &self.nodes[0].amqp_url()).await
    }

    /// The node that leads a quorum queue, as `witness` sees it: it must be running.
    pub async fn leader(&self, witness: &Node, vhost: &str, queue: &str) -> Result<&Node> {
        let text = witness
            .rabbitmqctl(&[
                "list_queues",
                "--vhost",
                vhost,
                "--formatter",
                "json",
                "name",
                "leader",
            ])
            .await?;
        let queues: Vec<Value> = serde_json::from_str(&text)?;
        let leader = queues
            .iter()
            .find(|found| found["name"] == queue)
            .and_then(|found| found["leader"].as_str())
            .with_context(|| format!("queue {queue} has no leader in {text}"))?;
        self.nodes
            .iter()
            .find(|node| node.name() == leader)
            .with_context(|| format!("the leader {leader} is none of the three nodes"))
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if self.is_pooled {
            POOL.leave(&self.nodes);
        }
    }
}

/// Whether another test can use these nodes: each is well and sees the others.
async fn are_well(nodes: &[Node; 3]) -> bool {
    for node in nodes {
        if !node.is_well().await || !running(node).await.is_ok_and(|running| running == 3) {
            return false;
        }
    }
    true
}

/// How many nodes of its cluster run, as a node sees it.
async fn running(node: &Node) -> Result<usize> {
    let nodes = node.management()?.get("nodes").await?;
    let nodes = nodes.as_array().into_iter().flatten();
    Ok(nodes.filter(|node| node["running"] == true).count())
}
