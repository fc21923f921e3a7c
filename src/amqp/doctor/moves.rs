//! The checks of tiers that move: what is left of where their messages waited before.

use super::snapshot::{FoundBinding, FoundQueue, Snapshot};
use super::{Finding, Severity};
use crate::Topology;
use crate::topology::{Home, Tier};

const MOVE: &str = "`tierline topology move` deletes it when it is empty and nothing uses it";

/// Whether a binding is that of another generation of a tier, with the routing key of its own. No message for the
/// tier as it is now takes it.
pub(super) fn is_own(topology: &Topology, binding: &FoundBinding) -> bool {
    let names = topology.names();
    topology.tiers().iter().any(|tier| {
        if is_own_object(topology, tier, &binding.destination) {
            return true;
        }
        if names.is_delay_of(&tier.name, &binding.destination) {
            // All generations share the delay queues, each under its own key.
            let key = binding.routing_key.strip_suffix(".#");
            let rest = key.and_then(|key| key.strip_prefix(&*tier.name));
            return rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(":g"));
        }
        let number = names.generation_number(&tier.name, &binding.destination);
        let key = number.map(|number| names.key_of_generation(&tier.name, number));
        key.is_some_and(|key| {
            let rest = binding.routing_key.strip_prefix(&key);
            matches!(rest, Some("" | ".#"))
        })
    })
}

/// A queue of a tier that has moved, or of another generation than the file's.
pub(super) fn leftover_queue(
    topology: &Topology,
    name: &str,
    queue: &FoundQueue,
) -> Option<Finding> {
    let names = topology.names();
    let holds = match queue.messages {
        1 => "holds 1 message".to_owned(),
        messages => format!("holds {messages} messages"),
    };
    let object = format!("queue {name}");
    let mut tiers = topology.tiers().iter();
    if let Some(tier) = tiers.clone().find(|it| is_own_object(topology, it, name)) {
        return Some(Finding {
            severity: Severity::Note,
            object,
            what: format!(
                "is left of the tier {:?}, which moves, and {holds}",
                tier.name
            ),
            help: MOVE.to_owned(),
        });
    }
    let tier = tiers.find(|it| names.generation_number(&it.name, name).is_some())?;
    let number = names.generation_number(&tier.name, name)?;
    if names.former_queue(tier).as_deref() == Some(name) {
        return Some(Finding {
            severity: Severity::Note,
            object,
            what: format!(
                "is the queue that the tier {:?} had before it moved, and {holds}",
                tier.name
            ),
            help: format!("workers with this file take from it too; {MOVE}"),
        });
    }
    let queue_type = queue.details.as_ref().and_then(|details| {
        let word = details.arguments.get("x-queue-type")?;
        word.as_str().map(str::to_owned)
    });
    let queue_type = queue_type.as_deref().unwrap_or(match tier.home {
        Home::Classic { .. } => "classic",
        Home::Quorum { .. } | Home::Postgres { .. } => "quorum",
    });
    Some(Finding {
        severity: Severity::Warning,
        object,
        what: format!(
            "is another generation of the tier {:?} and {holds}",
            tier.name
        ),
        help: format!(
            "write formerly = {{ queue = \"{queue_type}\", generation = {number} }} in [tiers.{}]: workers then take \
             from it too, and {MOVE}",
            tier.name
        ),
    })
}

/// An exchange of a tier that moves to Postgres.
pub(super) fn leftover_exchange(topology: &Topology, name: &str) -> Option<Finding> {
    let mut tiers = topology.tiers().iter();
    let tier = tiers.find(|tier| is_own_object(topology, tier, name))?;
    Some(Finding {
        severity: Severity::Note,
        object: format!("exchange {name}"),
        what: format!("is left of the tier {:?}, which moves", tier.name),
        help: MOVE.to_owned(),
    })
}

/// Tiers whose move is over.
pub(super) fn ended(topology: &Topology, snapshot: &Snapshot) -> Vec<Finding> {
    let names = topology.names();
    let is_gone = |queue: &String| {
        !snapshot.queues.contains_key(queue) && !snapshot.unreachable.contains_key(queue)
    };
    let ended = |tier: &Tier| {
        let queue = names.former_queue(tier).filter(is_gone)?;
        Some(Finding {
            severity: Severity::Note,
            object: format!("tier {}", tier.name),
            what: format!("has formerly, and {queue} is gone"),
            help: "remove formerly when no process has the old file; `tierline topology move` says whether \
                   anything else is left"
                .to_owned(),
        })
    };
    topology.tiers().iter().filter_map(ended).collect()
}

/// Whether an exchange or queue belongs to a tier that was on the broker and is not any more: its delays and dead letters.
fn is_own_object(topology: &Topology, tier: &Tier, name: &str) -> bool {
    let names = topology.names();
    !tier.home.is_on_broker()
        && tier.uses_broker()
        && (name == names.dead_letter_exchange(&tier.name)
            || name == names.dead_letter_queue(&tier.name)
            || names.is_delay_of(&tier.name, name))
}
