//! The objects on a broker, as far as they can be queried.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde_json::{Map, Value};
use tokio::time::Instant;

use crate::Error;
use crate::amqp::command::Command;
use crate::amqp::connection::Connection;
#[cfg(feature = "management")]
use crate::amqp::management::Management;
use crate::amqp::run_commands::{self, Refusal};
use crate::error::BrokerError;
use crate::topology::Topology;
use crate::topology::plan::{Binding, DestinationType, Plan};

const LIMIT: Duration = Duration::from_secs(60);

/// The objects on the broker. `None`: they could not be queried.
#[derive(Debug, Clone, Default)]
pub(crate) struct Snapshot {
    pub(crate) exchanges: BTreeMap<String, Option<ExchangeDetails>>,
    pub(crate) queues: BTreeMap<String, FoundQueue>,
    /// Queues that are there and do not answer, each with those of its nodes that are known to be down.
    pub(crate) unreachable: BTreeMap<String, Vec<String>>,
    pub(crate) bindings: Option<BTreeSet<FoundBinding>>,
    pub(crate) nodes: Option<Vec<FoundNode>>,
}

/// A node of the broker's cluster.
#[derive(Debug, Clone)]
pub(crate) struct FoundNode {
    pub(crate) name: String,
    pub(crate) is_running: bool,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct ExchangeDetails {
    pub(crate) kind: String,
    pub(crate) durable: bool,
    pub(crate) arguments: Map<String, Value>,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct FoundQueue {
    pub(crate) messages: u32,
    pub(crate) consumers: u32,
    pub(crate) details: Option<QueueDetails>,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct QueueDetails {
    pub(crate) durable: bool,
    pub(crate) arguments: Map<String, Value>,
    pub(crate) policies: Vec<String>,
    /// The effective settings of all policies.
    pub(crate) policy: Map<String, Value>,
    /// The node that leads it, as of some seconds ago; the only one that has it, if it is classic.
    pub(crate) leader: Option<String>,
    /// The nodes that have a copy of it.
    pub(crate) members: Vec<String>,
    /// Messages that the broker takes from it to their next queue, which has not confirmed them. No depth counts them.
    pub(crate) in_transfer: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct FoundBinding {
    pub(crate) source: String,
    pub(crate) destination: String,
    pub(crate) destination_type: DestinationType,
    pub(crate) routing_key: String,
    pub(crate) arguments: BTreeMap<String, String>,
}

/// A value as text, without the quotes of JSON.
pub(crate) fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

impl From<&Binding> for FoundBinding {
    fn from(binding: &Binding) -> Self {
        Self {
            source: binding.source.clone(),
            destination: binding.destination.clone(),
            destination_type: binding.destination_type,
            routing_key: binding.routing_key.clone(),
            arguments: binding
                .arguments
                .iter()
                .map(|(name, value)| (name.clone(), value.to_string()))
                .collect(),
        }
    }
}

impl Snapshot {
    /// Queries by AMQP alone which of the plan's objects exist, and which of the queues that tiers had before they moved.
    pub(crate) async fn over_amqp(
        connection: &Connection,
        topology: &Topology,
        plan: &Plan,
    ) -> Result<Self, Error> {
        let names = topology.names();
        let tiers = topology.tiers().iter();
        let former: Vec<_> = tiers.filter_map(|tier| names.former_queue(tier)).collect();
        let exchanges = plan.exchanges.iter().map(|exchange| exchange.name.as_str());
        let queues = plan.queues.iter().map(|queue| queue.name.as_str());
        let queues = queues.chain(former.iter().map(String::as_str));
        let mut snapshot = Self::default();
        snapshot
            .find_exchanges(connection, exchanges.collect())
            .await?;
        snapshot.count(connection, queues.collect()).await?;
        Ok(snapshot)
    }

    /// All that is to be seen of the virtual host.
    #[cfg(feature = "management")]
    pub(crate) async fn complete(
        connection: &Connection,
        management: &Management,
    ) -> Result<Self, Error> {
        let mut snapshot = Self::over_management(connection, management).await?;
        snapshot.set_aside_unreachable();
        // The management API knows them as of some seconds ago.
        let names: Vec<String> = snapshot.queues.keys().cloned().collect();
        snapshot
            .count(connection, names.iter().map(String::as_str).collect())
            .await?;
        Ok(snapshot)
    }

    async fn find_exchanges(
        &mut self,
        connection: &Connection,
        names: Vec<&str>,
    ) -> Result<(), Error> {
        let commands: Vec<_> = names
            .iter()
            .map(|name| Command::FindExchange(name))
            .collect();
        let results = run_commands::run(connection, &commands, Instant::now() + LIMIT).await?;
        for ((name, command), answer) in names.iter().zip(&commands).zip(results) {
            match answer {
                Ok(_) => _ = self.exchanges.insert((*name).to_owned(), None),
                Err(refusal) => not_found(connection, command, &refusal)?,
            }
        }
        Ok(())
    }

    /// Counts the messages and consumers of these queues, and drops those that are not there.
    async fn count(&mut self, connection: &Connection, names: Vec<&str>) -> Result<(), Error> {
        let commands: Vec<_> = names.iter().map(|name| Command::FindQueue(name)).collect();
        let results = run_commands::run(connection, &commands, Instant::now() + LIMIT).await?;
        for ((name, command), answer) in names.iter().zip(&commands).zip(results) {
            match answer {
                Ok(counts) => {
                    let queue = self.queues.entry((*name).to_owned()).or_default();
                    queue.messages = counts.messages;
                    queue.consumers = counts.consumers;
                }
                Err(refusal) => {
                    not_found(connection, command, &refusal)?;
                    let details = self.queues.remove(*name).and_then(|it| it.details);
                    if refusal.is_unreachable() {
                        let members = details.map(|it| it.members).unwrap_or_default();
                        let down = members.into_iter().filter(|it| self.is_down(it));
                        let down = down.collect();
                        self.unreachable.insert((*name).to_owned(), down);
                    }
                }
            }
        }
        Ok(())
    }

    /// Takes out the queues whose nodes are all down. RabbitMQ 4.3.6 does not answer a question about a classic one for
    /// more than 20 s.
    #[cfg(feature = "management")]
    fn set_aside_unreachable(&mut self) {
        let queues = self.queues.iter().filter_map(|(name, queue)| {
            let members = &queue.details.as_ref()?.members;
            let are_down = !members.is_empty() && members.iter().all(|it| self.is_down(it));
            are_down.then(|| (name.clone(), members.clone()))
        });
        self.unreachable = queues.collect();
        let unreachable = &self.unreachable;
        self.queues
            .retain(|name, _| !unreachable.contains_key(name));
    }

    /// Whether a node is known not to run.
    pub(crate) fn is_down(&self, node: &str) -> bool {
        let mut nodes = self.nodes.iter().flatten();
        nodes.any(|it| it.name == node && !it.is_running)
    }
}

fn not_found(
    connection: &Connection,
    command: &Command<'_>,
    refusal: &Refusal,
) -> Result<(), Error> {
    match refusal.code {
        Refusal::NOT_FOUND => Ok(()),
        _ => Err(Error::Broker(BrokerError::Refused {
            tried: format!("{command} on {}", connection.address()).into(),
            cause: refusal.text.as_str().into(),
        })),
    }
}

#[cfg(feature = "management")]
mod management {
    use super::*;

    const QUEUE: &str = "name,durable,arguments,policy,operator_policy,effective_policy_definition,exclusive,node,\
                         leader,members,messages_dlx";
    const EXCHANGE: &str = "name,type,durable,arguments";
    const BINDING: &str = "source,destination,destination_type,routing_key,arguments";

    impl Snapshot {
        pub(super) async fn over_management(
            connection: &Connection,
            management: &Management,
        ) -> Result<Self, Error> {
            let virtual_host = connection.address().virtual_host();
            let exchanges = management.list("exchanges", virtual_host, EXCHANGE).await?;
            let queues = management.list("queues", virtual_host, QUEUE).await?;
            let bindings = management.list("bindings", virtual_host, BINDING).await?;
            Ok(Self {
                exchanges: exchanges.iter().map(exchange).collect(),
                queues: queues
                    .iter()
                    // Only its owner may query an exclusive queue, and none is the app's.
                    .filter(|queue| queue["exclusive"] != true)
                    .map(queue)
                    .collect(),
                // Known when its nodes are, and when the others are counted.
                unreachable: BTreeMap::new(),
                bindings: Some(bindings.iter().map(binding).collect()),
                // Seen by users with the tag `monitoring` only.
                nodes: management
                    .nodes()
                    .await
                    .ok()
                    .map(|nodes| nodes.iter().map(node).collect()),
            })
        }
    }

    fn exchange(value: &Value) -> (String, Option<ExchangeDetails>) {
        let details = ExchangeDetails {
            kind: text(&value["type"]),
            durable: value["durable"] == true,
            arguments: map(&value["arguments"]),
        };
        (text(&value["name"]), Some(details))
    }

    fn node(value: &Value) -> FoundNode {
        FoundNode {
            name: text(&value["name"]),
            is_running: value["running"] == true,
        }
    }

    fn queue(value: &Value) -> (String, FoundQueue) {
        // A classic queue has a node in place of a leader and members.
        let mut leader = [&value["leader"], &value["node"]].into_iter().map(text);
        let leader = leader.find(|it| !it.is_empty());
        let members = match value["members"].as_array() {
            Some(members) => members.iter().map(text).collect(),
            None => leader.iter().cloned().collect(),
        };
        let policies = [&value["policy"], &value["operator_policy"]];
        let details = QueueDetails {
            durable: value["durable"] == true,
            arguments: map(&value["arguments"]),
            policies: policies
                .into_iter()
                .map(text)
                .filter(|policy| !policy.is_empty())
                .collect(),
            policy: map(&value["effective_policy_definition"]),
            leader,
            members,
            in_transfer: value["messages_dlx"].as_u64().unwrap_or_default(),
        };
        let queue = FoundQueue {
            details: Some(details),
            ..FoundQueue::default()
        };
        (text(&value["name"]), queue)
    }

    fn binding(value: &Value) -> FoundBinding {
        FoundBinding {
            source: text(&value["source"]),
            destination: text(&value["destination"]),
            destination_type: match value["destination_type"] == "exchange" {
                true => DestinationType::Exchange,
                false => DestinationType::Queue,
            },
            routing_key: text(&value["routing_key"]),
            arguments: map(&value["arguments"])
                .iter()
                .map(|(name, value)| (name.clone(), shown(value)))
                .collect(),
        }
    }

    fn text(value: &Value) -> String {
        value.as_str().unwrap_or_default().to_owned()
    }

    /// RabbitMQ writes an empty object as an empty list here and there.
    fn map(value: &Value) -> Map<String, Value> {
        value.as_object().cloned().unwrap_or_default()
    }
}
