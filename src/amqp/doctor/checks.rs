//! The checks of exchanges, queues, bindings, tiers and the broker's version.

use std::collections::BTreeSet;

use super::snapshot::{FoundBinding, FoundQueue, Snapshot};
use super::{Finding, Severity, cluster, delays, moves};
use crate::Topology;
use crate::amqp::difference::{ArgumentDifference, Difference, ObjectKind};
use crate::topology::Version;
use crate::topology::plan::{DestinationType, Plan};
use crate::topology::{QueueType, Tier};

/// All but the policies and the version.
pub(super) fn all(topology: &Topology, plan: &Plan, snapshot: &Snapshot) -> Vec<Finding> {
    let mut findings = missing(plan, snapshot);
    findings.extend(differences(plan, snapshot).iter().map(different));
    findings.extend(bindings(topology, plan, snapshot));
    findings.extend(leftovers(topology, plan, snapshot));
    findings.extend(classic_in_cluster(topology, snapshot));
    findings.extend(cluster::check(topology, plan, snapshot));
    findings.extend(idle_tiers(topology, snapshot));
    findings.extend(moves::ended(topology, snapshot));
    findings
}

/// The known traps of the broker's version.
pub(super) fn traps(broker: Version) -> impl Iterator<Item = Finding> {
    let object = format!("RabbitMQ {broker}");
    broker.traps().into_iter().map(move |trap| Finding {
        severity: Severity::Note,
        object: object.clone(),
        what: trap.to_owned(),
        help: String::new(),
    })
}

/// Everything that exists with other arguments than the plan's.
pub(in crate::amqp) fn differences(plan: &Plan, snapshot: &Snapshot) -> Vec<Difference> {
    let durable = |file: bool, broker: bool| {
        ArgumentDifference::if_any("durable", Some(file.to_string()), Some(broker.to_string()))
    };
    let exchanges = plan.exchanges.iter().filter_map(|exchange| {
        let found = snapshot.exchanges.get(&exchange.name)?.as_ref()?;
        let kind = exchange.kind.as_str().to_owned();
        let mut changes = ArgumentDifference::between(&exchange.arguments, &found.arguments);
        changes.extend(ArgumentDifference::if_any(
            "type",
            Some(kind),
            Some(found.kind.clone()),
        ));
        changes.extend(durable(exchange.durable, found.durable));
        Some((ObjectKind::Exchange, &exchange.name, changes))
    });
    let queues = plan.queues.iter().filter_map(|queue| {
        let found = snapshot.queues.get(&queue.name)?.details.as_ref()?;
        let mut changes = ArgumentDifference::between(&queue.arguments, &found.arguments);
        changes.extend(durable(queue.durable, found.durable));
        Some((ObjectKind::Queue, &queue.name, changes))
    });
    exchanges
        .chain(queues)
        .filter(|(_, _, changes)| !changes.is_empty())
        .map(|(kind, name, changes)| Difference::new(plan, kind, name, changes))
        .collect()
}

fn different(difference: &Difference) -> Finding {
    let changes: Vec<_> = difference.changes.iter().map(ToString::to_string).collect();
    Finding {
        severity: Severity::Error,
        object: format!("{} {}", difference.kind, difference.name),
        what: format!("has other arguments: {}", changes.join("; ")),
        help: difference.help.clone(),
    }
}

fn missing(plan: &Plan, snapshot: &Snapshot) -> Vec<Finding> {
    if is_absent(plan, snapshot) {
        return vec![Finding {
            severity: Severity::Error,
            object: format!("app {}", plan.app),
            what: "nothing of it is on the broker".to_owned(),
            help: "apply the file; or is this another virtual host?".to_owned(),
        }];
    }
    let exchanges = plan.exchanges.iter().map(|exchange| &exchange.name);
    let exchanges = exchanges.filter(|name| !snapshot.exchanges.contains_key(*name));
    let queues = plan.queues.iter().map(|queue| &queue.name);
    let queues = queues.filter(|name| !snapshot.queues.contains_key(*name));
    exchanges
        .map(|name| (ObjectKind::Exchange, name))
        .chain(queues.map(|name| (ObjectKind::Queue, name)))
        .map(|(kind, name)| {
            let (what, help) = match snapshot.unreachable.get(name) {
                Some(down) if down.is_empty() => (
                    "cannot be reached: its node is down, or it has no leader".to_owned(),
                    START_ITS_NODES,
                ),
                Some(down) => (
                    format!("cannot be reached: {} down", is_or_are(down)),
                    START_ITS_NODES,
                ),
                None => (
                    "is in the file and not on the broker".to_owned(),
                    "apply the file",
                ),
            };
            Finding {
                severity: Severity::Error,
                object: format!("{kind} {name}"),
                what,
                help: help.to_owned(),
            }
        })
        .collect()
}

const START_ITS_NODES: &str = "start its nodes; if one never comes back, have the others forget it (rabbitmqctl \
                               forget_cluster_node) and apply the file";

/// The names of nodes and the verb that follows them.
pub(super) fn is_or_are(nodes: &[String]) -> String {
    let verb = if nodes.len() == 1 { "is" } else { "are" };
    format!("{} {verb}", nodes.join(", "))
}

fn is_absent(plan: &Plan, snapshot: &Snapshot) -> bool {
    let mut exchanges = plan.exchanges.iter().map(|exchange| &exchange.name);
    let mut queues = plan.queues.iter().map(|queue| &queue.name);
    !exchanges.any(|name| snapshot.exchanges.contains_key(name))
        && !queues.any(|name| snapshot.queues.contains_key(name))
}

fn bindings(topology: &Topology, plan: &Plan, snapshot: &Snapshot) -> Vec<Finding> {
    let Some(found) = &snapshot.bindings else {
        return Vec::new();
    };
    let planned: BTreeSet<FoundBinding> = plan.bindings.iter().map(FoundBinding::from).collect();
    let sources: BTreeSet<&str> = plan
        .exchanges
        .iter()
        .map(|exchange| exchange.name.as_str())
        .collect();
    // With its queue or exchange goes the binding: that is one finding, not two.
    let is_there = |binding: &&FoundBinding| {
        let destination = match binding.destination_type {
            DestinationType::Queue => snapshot.queues.contains_key(&binding.destination),
            DestinationType::Exchange => snapshot.exchanges.contains_key(&binding.destination),
        };
        destination && snapshot.exchanges.contains_key(&binding.source)
    };
    let missing = planned.difference(found).filter(is_there);
    let missing = missing.map(|binding| Finding {
        severity: Severity::Error,
        object: shown(binding),
        what: "is in the file and not on the broker".to_owned(),
        help: "apply the file".to_owned(),
    });
    // Tasks that were delayed before the tier had delays = false reach it by its old levels, which are leftovers.
    let tiers = topology.broker_tiers().filter(|tier| !tier.delays);
    let old_levels: Vec<_> = tiers
        .map(|tier| format!("{}.delay.{}.", plan.app, tier.name))
        .collect();
    let is_old_level = |name: &str| old_levels.iter().any(|levels| name.starts_with(levels));
    let is_of_earlier_home = |binding: &FoundBinding| moves::is_own(topology, binding);
    let extra = found
        .difference(&planned)
        .filter(|binding| sources.contains(binding.source.as_str()))
        .filter(|binding| !is_old_level(&binding.destination) && !is_of_earlier_home(binding))
        .map(|binding| Finding {
            severity: Severity::Error,
            object: shown(binding),
            what: "is on the broker and not in the file, so messages are copied or go astray"
                .to_owned(),
            help: "unbind it by hand".to_owned(),
        });
    missing.chain(extra).collect()
}

fn shown(binding: &FoundBinding) -> String {
    let FoundBinding {
        source,
        destination,
        routing_key,
        ..
    } = binding;
    format!("binding of {destination} to {source} with the key {routing_key:?}")
}

/// Objects of the app that the file no longer has.
fn leftovers(topology: &Topology, plan: &Plan, snapshot: &Snapshot) -> Vec<Finding> {
    // App names have no dots: no other app has names that begin so.
    let prefix = format!("{}.", plan.app);
    let exchanges: BTreeSet<&String> = plan
        .exchanges
        .iter()
        .map(|exchange| &exchange.name)
        .collect();
    let queues: BTreeSet<&String> = plan.queues.iter().map(|queue| &queue.name).collect();
    let is_of_delays = |name: &str| delays::is_long_delay(topology, name);
    let (of_delays, exchanges): (Vec<_>, Vec<_>) = snapshot
        .exchanges
        .keys()
        .filter(|name| name.starts_with(&prefix) && !exchanges.contains(name))
        .partition(|name| is_of_delays(name));
    let (queues_of_delays, queues): (Vec<_>, Vec<_>) = snapshot
        .queues
        .iter()
        .filter(|(name, _)| name.starts_with(&prefix) && !queues.contains(name))
        .partition(|(name, _)| is_of_delays(name));
    let queues_of_delays: Vec<_> = queues_of_delays.iter().map(|(_, queue)| *queue).collect();
    let of_delays = delays::leftovers(topology, of_delays.len(), &queues_of_delays);
    let exchanges = exchanges.into_iter().map(|name| {
        let known = moves::leftover_exchange(topology, name);
        known.unwrap_or_else(|| Finding {
            severity: Severity::Warning,
            object: format!("exchange {name}"),
            what: "is no longer in the file".to_owned(),
            help: "make sure that nothing publishes to it, and delete it by hand".to_owned(),
        })
    });
    let queues = queues
        .into_iter()
        .map(|(name, queue)| leftover_queue(topology, name, queue));
    exchanges.chain(queues).chain(of_delays).collect()
}

fn leftover_queue(topology: &Topology, name: &str, queue: &FoundQueue) -> Finding {
    let known = moves::leftover_queue(topology, name, queue);
    if let Some(finding) = known {
        return finding;
    }
    let what = "is no longer in the file";
    let help = match queue.messages {
        0 => "nothing waits in it: delete it by hand",
        _ => "let its messages be worked off, then delete it by hand",
    };
    Finding {
        severity: Severity::Warning,
        object: format!("queue {name}"),
        what: match queue.messages {
            1 => format!("{what} and holds 1 message"),
            messages => format!("{what} and holds {messages} messages"),
        },
        help: help.to_owned(),
    }
}

fn classic_in_cluster(topology: &Topology, snapshot: &Snapshot) -> Vec<Finding> {
    let nodes = snapshot.nodes.as_ref().map_or(1, Vec::len);
    let is_on_one_node = |queue: QueueType| !queue.is_replicated() && nodes > 1;
    let on_one_node = |tier: &&Tier| tier.home.queue_type().is_some_and(is_on_one_node);
    let tiers = topology.tiers().iter().filter(on_one_node);
    tiers
        .map(|tier| Finding {
            severity: Severity::Warning,
            object: format!("tier {}", tier.name),
            what: format!("is a classic queue, on one of the cluster's {nodes} nodes only: it stops when that node does"),
            help: "accept that, or give the tier queue = \"quorum\" and its next generation".to_owned(),
        })
        .collect()
}

fn idle_tiers(topology: &Topology, snapshot: &Snapshot) -> Vec<Finding> {
    let names = topology.names();
    let idle = |tier: &Tier| {
        let queue = snapshot.queues.get(&names.queue(tier))?;
        let (severity, waiting) = match queue.messages {
            0 => (Severity::Note, String::new()),
            1 => (Severity::Warning, ", and 1 message waits".to_owned()),
            messages => (Severity::Warning, format!(", and {messages} messages wait")),
        };
        (queue.consumers == 0).then(|| Finding {
            severity,
            object: format!("tier {}", tier.name),
            what: format!("nobody works on it{waiting}"),
            help: "start workers of its group".to_owned(),
        })
    };
    topology.broker_tiers().filter_map(idle).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::super::snapshot::{ExchangeDetails, QueueDetails};
    use super::super::tests::nodes;
    use super::*;

    fn hotel() -> (Topology, Plan) {
        let topology = Topology::load("topology/hotel.toml").unwrap();
        let plan = Plan::new(&topology, "4.3.6".parse().unwrap(), false).unwrap();
        (topology, plan)
    }

    /// A broker that is just as the plan says, with workers.
    fn healthy(plan: &Plan) -> Snapshot {
        let arguments = |arguments| match json!(arguments) {
            serde_json::Value::Object(arguments) => arguments,
            other => panic!("{other}"),
        };
        let exchanges = plan.exchanges.iter().map(|exchange| {
            let details = ExchangeDetails {
                kind: exchange.kind.as_str().to_owned(),
                durable: true,
                arguments: arguments(&exchange.arguments),
            };
            (exchange.name.clone(), Some(details))
        });
        let queues = plan.queues.iter().map(|queue| {
            let details = QueueDetails {
                durable: true,
                arguments: arguments(&queue.arguments),
                ..QueueDetails::default()
            };
            let queue_found = FoundQueue {
                consumers: 1,
                details: Some(details),
                ..FoundQueue::default()
            };
            (queue.name.clone(), queue_found)
        });
        Snapshot {
            exchanges: exchanges.collect(),
            queues: queues.collect(),
            unreachable: BTreeMap::new(),
            bindings: Some(plan.bindings.iter().map(FoundBinding::from).collect()),
            nodes: Some(nodes(1)),
        }
    }

    #[test]
    fn a_broker_that_is_as_the_plan_says_gives_no_finding() {
        let (topology, plan) = hotel();
        assert_eq!(all(&topology, &plan, &healthy(&plan)), []);
    }

    #[test]
    fn the_delay_queues_of_a_tier_that_has_none_any_more_are_leftovers_and_no_error() {
        let (_, with_delays) = hotel();
        let map = std::fs::read_to_string("topology/hotel.toml").unwrap();
        let map = map.replace("[tiers.bulk]", "[tiers.bulk]\ndelays = false");
        let topology = Topology::parse(map).unwrap();
        let plan = Plan::new(&topology, "4.3.6".parse().unwrap(), false).unwrap();
        let found = all(&topology, &plan, &healthy(&with_delays));
        assert_eq!(found.len(), 15 + 14);
        for finding in found {
            assert_eq!(finding.severity, Severity::Warning, "{finding:?}");
            assert!(finding.object.contains(" hotel.delay.bulk."), "{finding:?}");
        }
    }

    #[test]
    fn a_classic_tier_in_a_cluster_is_a_warning() {
        let (topology, plan) = hotel();
        let mut snapshot = healthy(&plan);
        snapshot.nodes = Some(nodes(3));
        let found = all(&topology, &plan, &snapshot);
        let found: Vec<_> = found
            .iter()
            .map(|finding| finding.object.as_str())
            .collect();
        assert_eq!(found, ["tier critical", "tier high", "tier calls"]);
    }

    #[test]
    fn a_queue_that_cannot_be_reached_is_not_said_to_be_missing() {
        let (topology, plan) = hotel();
        let mut snapshot = healthy(&plan);
        snapshot.queues.remove("hotel.high");
        snapshot
            .unreachable
            .insert("hotel.high".to_owned(), Vec::new());
        let found = all(&topology, &plan, &snapshot);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].object, "queue hotel.high");
        assert!(found[0].what.contains("cannot be reached"), "{found:?}");
    }

    #[test]
    fn a_queue_that_is_not_durable_differs() {
        let (topology, plan) = hotel();
        let mut snapshot = healthy(&plan);
        let queue = snapshot.queues.get_mut("hotel.high").unwrap();
        queue.details.as_mut().unwrap().durable = false;
        let found = all(&topology, &plan, &snapshot);
        let expected = "has other arguments: durable: the file says true, the broker has false";
        assert_eq!(found[0].what, expected);
    }

    #[test]
    fn a_tier_that_moves_is_no_problem_and_one_that_has_moved_is_a_note() {
        let (_, before) = hotel();
        let file = std::fs::read_to_string("topology/hotel.toml").unwrap();
        let tier = "[tiers.low]\nqueue = \"quorum\"";
        assert!(file.contains(tier));
        for now in [
            "[tiers.low]\ngeneration = 2\nformerly = { queue = \"quorum\", generation = 1 }\nqueue = \"quorum\"",
            "[tiers.low]\nformerly = \"quorum\"\nqueue = \"postgres\"",
        ] {
            let topology = Topology::parse(file.replace(tier, now)).unwrap();
            let plan = Plan::new(&topology, "4.3.6".parse().unwrap(), false).unwrap();
            let (old, mut both) = (healthy(&before), healthy(&plan));
            both.queues.extend(old.queues);
            both.exchanges.extend(old.exchanges);
            both.bindings
                .as_mut()
                .unwrap()
                .extend(old.bindings.unwrap());
            let found = all(&topology, &plan, &both);
            let is_note = |finding: &Finding| finding.severity == Severity::Note;
            assert!(found.iter().all(is_note), "{found:#?}");
            let old_queue = found.iter().find(|it| it.object == "queue hotel.low");
            assert!(old_queue.unwrap().what.contains("before it moved"));

            let over = all(&topology, &plan, &healthy(&plan));
            assert_eq!(over.len(), 1, "{over:#?}");
            assert!(is_note(&over[0]) && over[0].help.contains("remove formerly"));
        }
    }

    #[test]
    fn another_generation_without_formerly_is_a_warning_with_what_to_write() {
        let (_, before) = hotel();
        let file = std::fs::read_to_string("topology/hotel.toml").unwrap();
        let file = file.replace("[tiers.low]", "[tiers.low]\ngeneration = 2");
        let topology = Topology::parse(file).unwrap();
        let plan = Plan::new(&topology, "4.3.6".parse().unwrap(), false).unwrap();
        let mut snapshot = healthy(&plan);
        snapshot.queues.extend(healthy(&before).queues);
        let found = all(&topology, &plan, &snapshot);
        assert_eq!(found.len(), 1, "{found:#?}");
        assert_eq!(found[0].severity, Severity::Warning);
        let written = "formerly = { queue = \"quorum\", generation = 1 } in [tiers.low]";
        assert!(found[0].help.contains(written), "{found:?}");
    }
}
