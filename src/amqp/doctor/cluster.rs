//! The checks of a cluster: which node leads the queues of the tiers, and what a node that is down stops.

use std::collections::BTreeMap;

use super::checks::is_or_are;
use super::snapshot::{QueueDetails, Snapshot};
use super::{Finding, Severity};
use crate::Topology;
use crate::topology::plan::Plan;
use crate::topology::{QueueType, Tier};

pub(super) fn check(topology: &Topology, plan: &Plan, snapshot: &Snapshot) -> Vec<Finding> {
    let nodes = snapshot.nodes.iter().flatten();
    if nodes.clone().count() < 2 {
        return Vec::new();
    }
    let running = nodes.filter(|it| it.is_running);
    let names = topology.names();
    let tiers = topology.broker_tiers();
    let tiers: Vec<_> = tiers
        .filter_map(|tier| {
            let found = snapshot.queues.get(&names.queue(tier))?;
            Some((tier, found.details.as_ref()?))
        })
        .collect();
    let mut leads: BTreeMap<&str, Vec<&Tier>> = BTreeMap::new();
    for node in running {
        leads.entry(&node.name).or_default();
    }
    for (tier, queue) in &tiers {
        let leader = queue.leader.as_deref();
        if let Some(led) = leader.and_then(|leader| leads.get_mut(leader)) {
            led.push(tier);
        }
    }
    let without_leader = tiers
        .iter()
        .filter_map(|(tier, queue)| without_leader(&names.queue(tier), queue, snapshot));
    without_leader
        .chain(spread(&leads))
        .chain(delays_in_transfer(plan, snapshot))
        .collect()
}

/// A queue whose leader is down. Over AMQP it looks well: the broker answers for a quorum queue that has no leader.
fn without_leader(name: &str, queue: &QueueDetails, snapshot: &Snapshot) -> Option<Finding> {
    let members = queue.members.iter().cloned();
    let down: Vec<String> = members.filter(|it| snapshot.is_down(it)).collect();
    let of_all = queue.members.len();
    let leader = queue.leader.as_ref().filter(|it| down.contains(it));
    let has_majority = down.is_empty() || 2 * down.len() < of_all;
    let (severity, what, help) = match leader {
        _ if !has_majority => (
            Severity::Error,
            format!(
                "stands still without a leader: {} down, of its {of_all} nodes",
                is_or_are(&down)
            ),
            "start them again",
        ),
        // The answer of the management API may be older than the election.
        Some(leader) => (
            Severity::Warning,
            format!("its leader {leader} is down, and the other nodes elect a new one"),
            "look again in some seconds",
        ),
        None => return None,
    };
    Some(Finding {
        severity,
        object: format!("queue {name}"),
        what,
        help: help.to_owned(),
    })
}

/// Delayed messages that are due and on their way to the next queue. Under load some always are. On RabbitMQ 3.10 they may
/// also stay there for as long as a node is away (docs/facts.md). One look cannot tell the two apart.
fn delays_in_transfer(plan: &Plan, snapshot: &Snapshot) -> Option<Finding> {
    let delays = format!("{}.delay.", plan.app);
    let levels = plan.queues.iter().filter(|it| it.name.starts_with(&delays));
    let found = levels.filter_map(|it| snapshot.queues.get(&it.name)?.details.as_ref());
    let messages: u64 = found.map(|it| it.in_transfer).sum();
    let is_node_down = snapshot.nodes.iter().flatten().any(|it| !it.is_running);
    (messages > 0).then(|| Finding {
        severity: match is_node_down {
            true => Severity::Warning,
            false => Severity::Note,
        },
        object: "delay queues".to_owned(),
        what: format!("{messages} messages are due, and were not forwarded some seconds ago"),
        help: "if the number does not fall within a minute, and a node was lost, move the leaders of the delay queues: the \
               command is in the guide, page running_on_a_cluster, under \"A node that never comes back\""
            .to_owned(),
    })
}

/// How many of the tiers' queues each node leads; a warning if one node leads nearly all.
fn spread(leads: &BTreeMap<&str, Vec<&Tier>>) -> Option<Finding> {
    let of_all: usize = leads.values().map(Vec::len).sum();
    let (busiest, led) = leads.iter().max_by_key(|(_, led)| led.len())?;
    if of_all == 0 {
        return None;
    }
    let counts = leads.iter();
    let counts = counts.map(|(node, led)| format!("{node} {}", led.len()));
    let counts = counts.collect::<Vec<_>>().join(", ");
    let nearly_all = leads.len() > 1 && of_all > 1 && led.len() * 5 >= of_all * 4;
    Some(match nearly_all {
        false => Finding {
            severity: Severity::Note,
            object: "cluster".to_owned(),
            what: format!("of {of_all} queues of tiers, the nodes lead: {counts}"),
            help: String::new(),
        },
        true => Finding {
            severity: Severity::Warning,
            object: format!("node {busiest}"),
            what: format!(
                "leads {} of {of_all} queues of tiers ({counts}): if it hangs, they stop until the others notice",
                led.len()
            ),
            help: how_to_move(led),
        },
    })
}

/// What moves the queues of these tiers to other nodes.
fn how_to_move(tiers: &[&Tier]) -> String {
    let (quorum, classic): (Vec<&Tier>, Vec<&Tier>) = tiers
        .iter()
        .copied()
        .partition(|tier| tier.home.queue_type().is_some_and(QueueType::is_replicated));
    let mut steps = Vec::new();
    if !quorum.is_empty() {
        steps.push("`rabbitmq-queues rebalance all` moves leaders of quorum queues".to_owned());
    }
    if !classic.is_empty() {
        let names: Vec<_> = classic.iter().map(|tier| tier.name.as_str()).collect();
        let names = names.join(", ");
        steps.push(format!(
            "a classic queue stays on its node: give some of these tiers their next generation: {names}"
        ));
    }
    steps.push(
        "new queues are spread if the app has the addresses of all nodes, or the broker `queue_leader_locator = \
         balanced`"
            .to_owned(),
    );
    steps.join("; ")
}

#[cfg(test)]
mod tests {
    use super::super::snapshot::{FoundQueue, QueueDetails};
    use super::super::tests::nodes;
    use super::*;

    const MAP: &str = r#"
        app = "shop"
        [tiers]
        one = { queue = "quorum" }
        two = { queue = "quorum" }
        three = { queue = "classic" }
        [groups.all]
        tiers = ["one", "two", "three"]
        concurrency = 1
        [tasks]
        pay = "one"
        ship = "two"
        sweep = "three"
    "#;

    /// A cluster of three nodes; the node that leads each tier.
    fn snapshot(leaders: [(&str, u32); 3]) -> Snapshot {
        let queues = leaders.map(|(tier, leader)| {
            let leader = format!("rabbit@{leader}");
            let members = match tier {
                "three" => vec![leader.clone()],
                _ => (1..=3).map(|it| format!("rabbit@{it}")).collect(),
            };
            let details = QueueDetails {
                leader: Some(leader),
                members,
                ..QueueDetails::default()
            };
            let queue = FoundQueue {
                details: Some(details),
                ..FoundQueue::default()
            };
            (format!("shop.{tier}"), queue)
        });
        Snapshot {
            queues: queues.into(),
            nodes: Some(nodes(3)),
            ..Snapshot::default()
        }
    }

    fn found(snapshot: &Snapshot) -> Vec<Finding> {
        let topology = Topology::parse(MAP).unwrap();
        let plan = Plan::new(&topology, "3.10.8".parse().unwrap(), false).unwrap();
        check(&topology, &plan, snapshot)
    }

    #[test]
    fn leaders_that_are_spread_are_noted() {
        let found = found(&snapshot([("one", 1), ("two", 2), ("three", 3)]));
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].severity, Severity::Note);
        let what = "of 3 queues of tiers, the nodes lead: rabbit@1 1, rabbit@2 1, rabbit@3 1";
        assert_eq!(found[0].what, what);
    }

    #[test]
    fn a_node_that_leads_all_tiers_is_a_warning_with_the_way_out() {
        let found = found(&snapshot([("one", 2), ("two", 2), ("three", 2)]));
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].severity, Severity::Warning);
        assert_eq!(found[0].object, "node rabbit@2");
        assert!(found[0].what.starts_with("leads 3 of 3"), "{found:?}");
        for part in ["rabbitmq-queues rebalance all", "generation: three"] {
            assert!(found[0].help.contains(part), "{found:?}");
        }
    }

    #[test]
    fn a_broker_of_one_node_has_nothing_to_spread() {
        let mut snapshot = snapshot([("one", 1), ("two", 1), ("three", 1)]);
        snapshot.nodes = Some(nodes(1));
        assert_eq!(found(&snapshot), []);
        snapshot.nodes = None;
        assert_eq!(found(&snapshot), []);
    }

    #[test]
    fn a_quorum_queue_that_lost_its_majority_is_an_error_that_names_the_nodes() {
        let mut snapshot = snapshot([("one", 1), ("two", 2), ("three", 3)]);
        for node in &mut snapshot.nodes.as_mut().unwrap()[..2] {
            node.is_running = false;
        }
        let found = found(&snapshot);
        for queue in ["queue shop.one", "queue shop.two"] {
            let finding = found.iter().find(|it| it.object == queue).unwrap();
            assert_eq!(finding.severity, Severity::Error);
            assert!(
                finding.what.contains("rabbit@1, rabbit@2 are down"),
                "{finding:?}"
            );
        }
        assert!(
            found.iter().all(|it| it.object != "queue shop.three"),
            "{found:?}"
        );
    }

    #[test]
    fn delays_that_are_not_forwarded_are_a_warning_while_a_node_is_down() {
        let mut snapshot = snapshot([("one", 1), ("two", 2), ("three", 3)]);
        let details = QueueDetails {
            in_transfer: 7,
            ..QueueDetails::default()
        };
        let level = FoundQueue {
            details: Some(details),
            ..FoundQueue::default()
        };
        let levels = ["shop.delay.one.03", "shop.delay.long.14"];
        let levels = levels.map(|name| (name.to_owned(), level.clone()));
        snapshot.queues.extend(levels);
        let severity = |snapshot: &Snapshot| {
            let found = found(snapshot);
            let finding = found.iter().find(|it| it.object == "delay queues");
            let finding = finding.expect("a finding");
            assert!(finding.what.starts_with("14 messages"), "{finding:?}");
            finding.severity
        };
        assert_eq!(severity(&snapshot), Severity::Note);
        snapshot.nodes.as_mut().unwrap()[2].is_running = false;
        assert_eq!(severity(&snapshot), Severity::Warning);
    }
}
