//! The app of a command that publishes.

use tierline::{Builder, OnConnect, Tierline, Topology};

use crate::arguments::{Database, MapBroker};
use crate::output::Failure;

/// The connection name that the management UI shows.
pub(crate) const NAME: &str = "tierline command";

/// An app of this map that changes neither the broker nor the database, because deployments do that. Without tiers on
/// the broker it has no address of one, whatever the environment says.
pub(crate) fn builder(
    topology: Topology,
    broker: &MapBroker,
    database: &Database,
) -> Result<Builder, Failure> {
    let amqp = match (&broker.amqp, needs_broker(&topology)) {
        (_, false) => None,
        (Some(url), true) => Some(url.expose()),
        (None, true) => return Err(no_broker(&topology)),
    };
    let app = Tierline::builder(topology)
        .postgres(database.postgres.expose())
        .postgres_pooler(database.pooler.is_there)
        .connection_name(NAME)
        .on_connect(OnConnect::Nothing);
    Ok(match amqp {
        Some(url) => app.amqp(url),
        None => app,
    })
}

pub(crate) fn needs_broker(topology: &Topology) -> bool {
    topology.tiers_using_broker().next().is_some()
}

pub(crate) fn no_broker(topology: &Topology) -> Failure {
    let tiers = topology.tiers_using_broker().map(|tier| tier.name.as_str());
    let tiers = tiers.collect::<Vec<_>>().join(", ");
    Failure::Misused(format!(
        "the file has tiers that are or were on RabbitMQ ({tiers}): give the broker's address with --amqp or AMQP_URL"
    ))
}
