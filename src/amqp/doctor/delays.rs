//! The check of queues for long delays that the file does not need any more.

use super::snapshot::FoundQueue;
use super::{Finding, Severity};
use crate::Topology;

const WHAT: &str =
    "is for delays of more than 27 minutes, which are rows where the app has a database";
const UNLESS: &str =
    "unless processes without a database use it: then write long_delays = true in [broker]";

/// A queue of long delays. What is in it reaches its tier as ever.
pub(super) fn leftover_queue(
    topology: &Topology,
    name: &str,
    queue: &FoundQueue,
) -> Option<Finding> {
    let (holds, help) = match queue.messages {
        0 => ("", format!("nothing waits in it: delete it, {UNLESS}")),
        _ => (
            ", and holds messages",
            format!("delete it when they have reached their tiers, {UNLESS}"),
        ),
    };
    let (object, what) = (format!("queue {name}"), format!("{WHAT}{holds}"));
    is_long_delay(topology, name).then(|| note(object, what, help))
}

/// An exchange of long delays.
pub(super) fn leftover_exchange(topology: &Topology, name: &str) -> Option<Finding> {
    let help = format!(
        "delete it after the queues of {}*, {UNLESS}",
        topology.names().long_delays()
    );
    let (object, what) = (format!("exchange {name}"), WHAT.to_owned());
    is_long_delay(topology, name).then(|| note(object, what, help))
}

fn is_long_delay(topology: &Topology, name: &str) -> bool {
    name.starts_with(&topology.names().long_delays())
}

/// A note alone: processes without a database may be right to have them.
fn note(object: String, what: String, help: String) -> Finding {
    Finding {
        severity: Severity::Note,
        object,
        what,
        help,
    }
}
