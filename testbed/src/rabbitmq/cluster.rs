//! A broker of three nodes on one machine.

use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::Value;

use super::node::{Family, Node, Plugins};
use super::release::Release;
use super::vhost::Vhost;
use crate::process::until;

const FORM_LIMIT: Duration = Duration::from_secs(60);

/// A private cluster of three nodes. Each can be steered by itself.
#[derive(Debug)]
pub struct Cluster {
    nodes: [Node; 3],
}

impl Cluster {
    /// Starts three nodes of the release that is at hand, with the management API. Takes some 30 s.
    pub async fn start() -> Result<Cluster> {
        let family = Family::start(Release::find()?)?;
        let plugins = Plugins::management();
        let first = Node::prepare(&family, "a", plugins, None)?;
        let second = Node::prepare(&family, "b", plugins, Some(&first))?;
        let third = Node::prepare(&family, "c", plugins, Some(&first))?;
        first.start().await?;
        // One after the other: nodes that join at the same moment wait for each other's locks.
        second.start().await?;
        third.start().await?;
        let cluster = Cluster {
            nodes: [first, second, third],
        };
        until("three nodes in one cluster", FORM_LIMIT, async || {
            let nodes = cluster.nodes[0].management()?.get("nodes").await?;
            let running = |node: &&Value| node["running"] == Value::Bool(true);
            Ok(nodes
                .as_array()
                .is_some_and(|nodes| nodes.iter().filter(running).count() == 3))
        })
        .await?;
        Ok(cluster)
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
