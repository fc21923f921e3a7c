//! The check of queues for long delays that the file does not need any more.

use super::snapshot::FoundQueue;
use super::{Finding, Severity};
use crate::Topology;

/// Whether a queue or exchange is for long delays.
pub(super) fn is_long_delay(topology: &Topology, name: &str) -> bool {
    name.starts_with(&topology.names().long_delays())
}

/// Exchanges and queues for long delays that the file does not need. A note alone: processes without a database may be
/// right to have them. What is in the queues reaches its tier as ever.
pub(super) fn leftovers(
    topology: &Topology,
    exchanges: usize,
    queues: &[&FoundQueue],
) -> Option<Finding> {
    if exchanges == 0 && queues.is_empty() {
        return None;
    }
    let messages: u64 = queues.iter().map(|queue| u64::from(queue.messages)).sum();
    let (holds, when) = match messages {
        0 => (
            "nothing waits in them".to_owned(),
            "delete them, the queues first",
        ),
        _ => (
            format!("{messages} messages wait in them"),
            "delete them when these have reached their tiers, the queues first",
        ),
    };
    Some(Finding {
        severity: Severity::Note,
        object: format!("{}*", topology.names().long_delays()),
        what: format!(
            "{} queues and {exchanges} exchanges are for delays of more than 27 minutes, which are rows where the app has \
             a database; {holds}",
            queues.len()
        ),
        help: format!(
            "{when}, unless processes without a database use them: then write long_delays = true in [broker]"
        ),
    })
}
