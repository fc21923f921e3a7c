//! Policies that override the arguments of a queue.
//!
//! At most one policy and one operator policy apply to a queue; the broker reports what they say
//! together. Limits and times combine with the arguments to the smaller value, a policy's
//! `overflow` beats the argument of a quorum queue, and for the rest an argument wins.

use serde_json::Value;

use super::snapshot::{QueueDetails, Snapshot, shown};
use super::{Finding, Severity};
use crate::topology::QueueType;
use crate::topology::plan::{Argument, Plan, Queue};

pub(super) fn check(plan: &Plan, snapshot: &Snapshot) -> Vec<Finding> {
    let queues = plan.queues.iter();
    queues
        .filter_map(|queue| {
            let details = snapshot.queues.get(&queue.name)?.details.as_ref()?;
            Some(check_queue(queue, details))
        })
        .flatten()
        .collect()
}

fn check_queue(queue: &Queue, details: &QueueDetails) -> Vec<Finding> {
    let effects = details.policy.iter().filter_map(|(key, value)| {
        let consequence = consequence(queue, key, value)?;
        Some(format!("{key} = {} ({consequence})", shown(value)))
    });
    let effects: Vec<String> = effects.collect();
    if effects.is_empty() {
        return Vec::new();
    }
    let policies: Vec<_> = details
        .policies
        .iter()
        .map(|name| format!("{name:?}"))
        .collect();
    vec![Finding {
        severity: Severity::Error,
        object: format!("queue {}", queue.name),
        what: format!(
            "the policy {} changes what the file says: {}",
            policies.join(" with the operator policy "),
            effects.join("; ")
        ),
        help: format!("take {} out of the policy's pattern", queue.name),
    }]
}

/// The effect of a policy's setting on the queue, if it has any.
fn consequence(queue: &Queue, key: &str, value: &Value) -> Option<&'static str> {
    match key {
        "message-ttl" if lowers(queue, "x-message-ttl", value) => {
            Some("messages expire sooner, and delays end early")
        }
        "expires" => Some("the queue is deleted when nobody uses it"),
        "max-length" if lowers(queue, "x-max-length", value) => Some("fewer messages fit"),
        "max-length-bytes" => Some("fewer messages fit"),
        "overflow" if overflows(queue, value) => Some("a full queue treats messages otherwise"),
        "delivery-limit" if lowers(queue, "x-delivery-limit", value) => {
            Some("messages are given up sooner")
        }
        "dead-letter-exchange" if !queue.arguments.contains_key("x-dead-letter-exchange") => {
            Some("what expires here goes elsewhere")
        }
        "dead-letter-routing-key" => Some("what leaves this queue does not find its way"),
        _ => None,
    }
}

fn lowers(queue: &Queue, argument: &str, policy: &Value) -> bool {
    match (queue.arguments.get(argument), policy.as_i64()) {
        (Some(Argument::Int(file)), Some(policy)) => (0..*file).contains(&policy),
        (_, policy) => policy.is_none_or(|policy| policy >= 0),
    }
}

fn overflows(queue: &Queue, policy: &Value) -> bool {
    let quorum = Argument::Text(QueueType::Quorum.as_str().to_owned());
    let is_quorum = queue.arguments.get("x-queue-type") == Some(&quorum);
    match queue.arguments.get("x-overflow") {
        Some(Argument::Text(file)) => is_quorum && policy.as_str() != Some(file),
        // A queue without a limit never overflows.
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::Topology;

    /// Whether a policy with one setting is found on a queue of the hotel.
    fn is_found(queue: &str, key: &str, value: Value) -> bool {
        let topology = Topology::load("topology/hotel.toml").unwrap();
        let plan = Plan::new(&topology, "4.3.6".parse().unwrap(), false).unwrap();
        let queue = plan
            .queues
            .iter()
            .find(|found| found.name == queue)
            .unwrap();
        let mut details = QueueDetails::default();
        details.policy.insert(key.to_owned(), value);
        !check_queue(queue, &details).is_empty()
    }

    #[test]
    fn a_limit_counts_only_where_it_is_the_smaller_one() {
        assert!(is_found("hotel.critical", "message-ttl", json!(1000)));
        assert!(is_found("hotel.critical.dlq", "message-ttl", json!(1000)));
        assert!(!is_found(
            "hotel.critical.dlq",
            "message-ttl",
            json!(4_000_000_000_u64)
        ));
        assert!(is_found("hotel.delay.low.05", "message-ttl", json!(0)));
        assert!(is_found("hotel.low", "delivery-limit", json!(99)));
        assert!(!is_found("hotel.low", "delivery-limit", json!(100)));
        assert!(!is_found("hotel.low", "delivery-limit", json!(-1)));
        assert!(is_found("hotel.low", "max-length", json!(5)));
    }

    #[test]
    fn overflow_is_the_policys_on_quorum_queues_alone() {
        assert!(is_found("hotel.low", "overflow", json!("drop-head")));
        assert!(!is_found("hotel.low", "overflow", json!("reject-publish")));
        assert!(!is_found("hotel.critical", "overflow", json!("drop-head")));
    }

    #[test]
    fn what_leads_messages_astray_or_deletes_queues_is_found() {
        assert!(is_found(
            "hotel.delay.low.05",
            "dead-letter-routing-key",
            json!("x")
        ));
        assert!(is_found(
            "hotel.low.dlq",
            "dead-letter-exchange",
            json!("x")
        ));
        assert!(!is_found("hotel.low", "dead-letter-exchange", json!("x")));
        assert!(is_found("hotel.low", "expires", json!(1000)));
        assert!(!is_found(
            "hotel.low",
            "queue-leader-locator",
            json!("balanced")
        ));
    }
}
