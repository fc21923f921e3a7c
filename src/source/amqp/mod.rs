//! Sources on the broker: the queue of a tier, and the quarantine of a group.
//!
//! Read in this order: `queue` is a tier's queue as a source, `subscription` its consumer, `subscribe` how that is made, `acks` its acknowledgements, `outlook` whether more is to be expected, `redelivery` why a message is delivered again, `successor` how what
//! follows on a delivery is stored, `redeclare` what is done about queues that are gone, `unrouted` what is done about
//! delayed messages that found no queue, `former` the queue that a tier had before it moved, `quarantine` where tasks run that may kill their worker, and `consumer_connection` the connection of a tier.

mod acks;
mod consumer_connection;
mod former;
mod outlook;
mod quarantine;
mod queue;
mod redeclare;
mod redelivery;
mod subscribe;
mod subscription;
mod successor;
mod unrouted;

use std::sync::Arc;
use std::time::Duration;

use super::{ParkedTasks, Source, Suspects};
use crate::control::{KnownControls, Limits};
use crate::observe::Observers;
#[cfg(feature = "postgres")]
use crate::postgres::Database;
use crate::publish::Publisher;
#[cfg(feature = "postgres")]
use crate::rollup::Recorder;
use crate::route;
use crate::secret::Secret;
use crate::topology::{self, Tier, Topology};

use consumer_connection::ConsumerConnection;
use former::FormerQueue;
use quarantine::Quarantine;
use queue::Queue;
pub(crate) use redeclare::Redeclared;
pub(crate) use unrouted::reroute;

/// What all sources of a worker share.
pub(crate) struct ConsumerSettings {
    pub(crate) topology: Topology,
    pub(crate) urls: Vec<Secret>,
    pub(crate) connection_name: String,
    pub(crate) publisher: Publisher,
    /// For dead letters of tiers that have moved to Postgres.
    #[cfg(feature = "postgres")]
    pub(crate) database: Option<Database>,
    /// Counts what runs.
    #[cfg(feature = "postgres")]
    pub(crate) recorder: Option<Recorder>,
    pub(crate) observers: Observers,
    /// Host and process, and the version of the program, for dead letters.
    pub(crate) worker: String,
    pub(crate) version: String,
    /// The tasks that this process has handlers for, and how long each may run.
    #[cfg_attr(
        not(feature = "postgres"),
        expect(dead_code, reason = "processes are listed in Postgres")
    )]
    pub(crate) handlers: Vec<(&'static str, Duration)>,
    /// Whether a queue that is gone may be declared again.
    pub(crate) may_declare: bool,
    /// The crash count at which a task is a dead letter.
    pub(crate) dead_at_crashes: u32,
    pub(crate) suspects: Arc<Suspects>,
    pub(crate) controls: KnownControls,
    pub(crate) limits: Limits,
    pub(crate) parked_tasks: Arc<ParkedTasks>,
    pub(crate) redeclared: Redeclared,
}

impl ConsumerSettings {
    /// The tier that a task goes to now. `None`: the map does not have the task.
    pub(crate) fn goes_to(&self, task: &str) -> Option<&Tier> {
        let overridden = self.controls.override_of(task);
        route::tier_of(&self.topology, overridden.as_deref(), task)
    }
}

/// The sources of a group on the broker: its quarantine, then for each of its tiers the queue that it has there, and the
/// one that it had before it moved. Each has a connection of its own, so that neither a node nor a large message of one
/// tier holds up the deliveries of another.
pub(crate) fn sources(
    settings: &Arc<ConsumerSettings>,
    group: &topology::Group,
) -> Vec<Box<dyn Source>> {
    let mut sources: Vec<Box<dyn Source>> = Vec::new();
    for (index, name) in group.tiers.iter().enumerate() {
        let Some(tier) = settings.topology.tier(name) else {
            continue;
        };
        if !tier.uses_broker() {
            continue;
        }
        let connection = match sources.is_empty() || tier.home.is_on_broker() {
            true => Some(ConsumerConnection::keep(
                settings.clone(),
                &group.name,
                name,
            )),
            false => None,
        };
        if sources.is_empty()
            && let Some(connection) = &connection
        {
            let quarantine = Quarantine::new(settings, group, connection.clone());
            sources.push(Box::new(quarantine));
        }
        if let Some(connection) = connection
            && tier.home.is_on_broker()
        {
            let queue = Queue::new(settings, group, index, tier, connection);
            sources.push(Box::new(queue));
        }
        if let Some(former) = settings.topology.names().former_queue(tier) {
            let former = FormerQueue::new(settings, group, index, tier, former);
            sources.push(Box::new(former));
        }
    }
    sources
}
