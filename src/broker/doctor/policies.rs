//! Policies that make a queue behave otherwise than its arguments say.
//!
//! At most one policy and one operator policy apply to a queue; the broker reports what they say
//! together. Limits and times combine with the arguments to the smaller value, a policy's
//! `overflow` beats the argument of a quorum queue, and for the rest an argument wins.

use serde_json::Value;

use super::snapshot::{QueueDetails, Snapshot, shown};
use super::{Finding, Severity};
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

/// What a policy's setting does to the queue, if it does anything.
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
    let is_quorum =
        queue.arguments.get("x-queue-type") == Some(&Argument::Text("quorum".to_owned()));
    match queue.arguments.get("x-overflow") {
        Some(Argument::Text(file)) => is_quorum && policy.as_str() != Some(file),
        // What has no limit never overflows.
        _ => false,
    }
}
