//! A broker of one node.

use std::ops::Deref;
use std::sync::Arc;

use anyhow::Result;

use super::node::{Family, Node, Plugins};
use super::pool::Pool;
use super::release::Release;
use super::vhost::Vhost;

static POOL: Pool<Node> = Pool::new();

/// A private broker of a single node; see [`Node`] for what can be done to it.
#[derive(Debug)]
pub struct Broker {
    node: Arc<Node>,
    is_pooled: bool,
}

impl Broker {
    /// A broker for this test alone, with the management API: one that an earlier test of this process has
    /// left, else a new one. The test uses a [virtual host](Broker::vhost) of its own. One that changes
    /// users, settings or anything else that outlives the virtual host needs [`Broker::start_new`].
    pub async fn start() -> Result<Broker> {
        while let Some(node) = POOL.take() {
            if node.is_well().await {
                return Ok(Broker {
                    node,
                    is_pooled: true,
                });
            }
        }
        let mut broker = Broker::start_new().await?;
        broker.is_pooled = true;
        Ok(broker)
    }

    /// Starts the release that is at hand, with the management API. Takes 5 to 15 s.
    pub async fn start_new() -> Result<Broker> {
        Broker::start_with(Release::find()?, Plugins::management()).await
    }

    /// Starts a given release with given plugins.
    pub async fn start_with(release: Release, plugins: Plugins) -> Result<Broker> {
        let family = Family::start(release)?;
        let node = Node::prepare(&family, "a", plugins, None)?;
        node.start().await?;
        Ok(Broker {
            node: Arc::new(node),
            is_pooled: false,
        })
    }

    /// A new virtual host on this broker, removed when it is dropped.
    pub async fn vhost(&self) -> Result<Vhost> {
        Vhost::create(self.node.management()?, &self.node.amqp_url()).await
    }
}

impl Deref for Broker {
    type Target = Node;

    fn deref(&self) -> &Node {
        &self.node
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        if self.is_pooled {
            POOL.leave(&self.node);
        }
    }
}
