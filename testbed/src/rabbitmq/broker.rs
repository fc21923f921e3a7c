//! A broker of one node.

use std::ops::Deref;

use anyhow::Result;

use super::node::{Family, Node, Plugins};
use super::release::Release;
use super::vhost::Vhost;

/// A private broker of a single node; see [`Node`] for what can be done to it.
#[derive(Debug)]
pub struct Broker {
    node: Node,
}

impl Broker {
    /// Starts the release that is at hand, with the management API. Takes 5 to 15 s.
    pub async fn start() -> Result<Broker> {
        Broker::start_with(Release::find()?, Plugins::management()).await
    }

    /// Starts a given release with given plugins.
    pub async fn start_with(release: Release, plugins: Plugins) -> Result<Broker> {
        let family = Family::start(release)?;
        let node = Node::prepare(&family, "a", plugins, None)?;
        node.start().await?;
        Ok(Broker { node })
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
