//! The connections for publishing, apart for each worker group.
//!
//! A queue that makes the broker slow a publisher down slows the whole connection down. Tiers that share a worker
//! group share connections, and no two groups do, so a flood into a bulk tier does not hold up a critical one.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use futures_util::future::join_all;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use super::PublisherStatus;
use super::connection::{Connections, Settings};
use super::pool::{NoChannel, Pool};
use crate::amqp::Connection;
use crate::observe::Observers;
use crate::topology::{Group, Topology, Version};

/// A pool for each worker group. It is opened by the first publish to a tier of the group.
#[derive(Debug)]
pub(super) struct Pools {
    settings: Arc<Settings>,
    /// How many connections each pool has.
    size: usize,
    /// The pool of each tier, by its name.
    of_tier: HashMap<String, usize>,
    pools: Vec<OnceLock<Pool>>,
    /// The address that each pool connects to first: the node that leads the queue of the group's first tier.
    first_addresses: Vec<usize>,
}

/// What is known of the broker.
#[derive(Debug, Clone)]
pub(super) enum Broker {
    /// Its queues are not known to be there. Why, as far as that is known.
    NotReady(Arc<str>),
    /// The app's queues are there. The version is that of the latest connection, so that a message for a broker
    /// that is away right now is addressed for its version too.
    Ready(Version),
}

impl Pools {
    pub(super) fn new(
        topology: &Topology,
        from: Connections,
        size: usize,
        observers: Observers,
    ) -> Self {
        let mut of_tier = HashMap::new();
        for (index, group) in topology.groups().iter().enumerate() {
            of_tier.extend(group.tiers.iter().map(|tier| (tier.clone(), index)));
        }
        let first_address = |group: &Group| {
            let first = group.tiers.first();
            first.map_or(0, |tier| topology.share_of(tier))
        };
        let not_yet = Broker::NotReady("the connection is being made".into());
        let (broker, _) = watch::channel(not_yet);
        Self {
            settings: Arc::new(Settings {
                from,
                observers,
                broker,
            }),
            size,
            of_tier,
            pools: topology.groups().iter().map(|_| OnceLock::new()).collect(),
            first_addresses: topology.groups().iter().map(first_address).collect(),
        }
    }

    /// The app's queues are there. The connection is the first of the first group's.
    pub(super) fn ready(&self, connection: Connection) {
        let broker = Broker::Ready(connection.version());
        if let Some(first) = self.pools.first() {
            first.get_or_init(|| self.open(0, Some(connection)));
        }
        self.settings.broker.send_replace(broker);
    }

    /// The app's queues are still not there.
    pub(super) fn not_ready(&self, cause: &str) {
        let broker = Broker::NotReady(cause.into());
        self.settings.broker.send_replace(broker);
    }

    /// The pool of a tier's group.
    pub(super) fn of(&self, tier: &str) -> &Pool {
        // Every tier of a map is in a group.
        let index = self.of_tier.get(tier).copied().unwrap_or_default();
        self.pools[index].get_or_init(|| self.open(index, None))
    }

    fn open(&self, index: usize, first: Option<Connection>) -> Pool {
        let address = self.first_addresses[index];
        Pool::open(&self.settings, self.size, address, first)
    }

    pub(super) fn broker(&self) -> Broker {
        self.settings.broker.borrow().clone()
    }

    /// Waits until the app's queues are there.
    ///
    /// # Errors
    /// Why they are not, at the deadline.
    pub(super) async fn until_ready(&self, deadline: Instant) -> Result<Version, Arc<str>> {
        if let Broker::Ready(version) = &*self.settings.broker.borrow() {
            return Ok(*version);
        }
        let mut broker = self.settings.broker.subscribe();
        let is_ready = |broker: &Broker| matches!(broker, Broker::Ready(_));
        let _ = timeout_at(deadline, broker.wait_for(is_ready)).await;
        match self.broker() {
            Broker::Ready(version) => Ok(version),
            Broker::NotReady(cause) => Err(cause),
        }
    }

    /// The worst of the pools that are open: each group's tiers need their own.
    pub(super) fn status(&self) -> PublisherStatus {
        let mut status = PublisherStatus::Up;
        for pool in self.opened() {
            match (pool.status(), &status) {
                (Ok(()), _) | (Err(NoChannel::Blocked), PublisherStatus::Down(_)) => {}
                (Err(NoChannel::Blocked), _) => status = PublisherStatus::Blocked,
                (Err(NoChannel::Down(cause)), _) => status = PublisherStatus::Down(cause),
            }
        }
        status
    }

    /// The pools that are open.
    fn opened(&self) -> impl Iterator<Item = &Pool> {
        self.pools.iter().filter_map(OnceLock::get)
    }

    /// Closes all connections, within five seconds, or gives them back to the app's pool.
    pub(super) async fn close(&self) {
        join_all(self.opened().map(Pool::close)).await;
    }
}
