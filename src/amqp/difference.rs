//! Objects whose arguments on the broker differ from the file's.

use std::collections::BTreeSet;
use std::fmt;

use serde::Serialize;
use serde_json::Value;

use super::apply::Applied;
use super::doctor::snapshot::shown;
use crate::topology::plan::{Arguments, Plan};

/// Objects that exist on the broker with other arguments than the file's. The broker cannot change them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Mismatch {
    /// Each object that differs.
    pub differences: Vec<Difference>,
    /// The objects that were declared.
    pub applied: Applied,
}

/// An exchange or queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ObjectKind {
    /// An exchange.
    Exchange,
    /// A queue.
    Queue,
}

/// An object that exists with other arguments.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Difference {
    /// What it is.
    pub kind: ObjectKind,
    /// Its name.
    pub name: String,
    /// What differs. The broker names one argument; the management API all.
    pub changes: Vec<ArgumentDifference>,
    /// What to do about it.
    pub help: String,
}

/// One argument that differs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ArgumentDifference {
    /// Its name, or `type` or `durable`.
    pub argument: String,
    /// What the file says; `None`: nothing.
    pub file: Option<String>,
    /// What the broker has; `None`: nothing.
    pub broker: Option<String>,
}

impl Difference {
    pub(super) fn new(
        plan: &Plan,
        kind: ObjectKind,
        name: &str,
        changes: Vec<ArgumentDifference>,
    ) -> Self {
        Self {
            kind,
            name: name.to_owned(),
            changes,
            help: help(plan, kind, name),
        }
    }

    /// The difference that the broker names when it refuses a declaration, if that is its reason.
    pub(super) fn refused(plan: &Plan, kind: ObjectKind, name: &str, text: &str) -> Option<Self> {
        let change = ArgumentDifference::from_refusal(text)?;
        Some(Self::new(plan, kind, name, vec![change]))
    }
}

impl ArgumentDifference {
    /// What differs between the arguments of a declaration and those that the broker has.
    pub(super) fn between(file: &Arguments, broker: &serde_json::Map<String, Value>) -> Vec<Self> {
        let names: BTreeSet<&String> = file.keys().chain(broker.keys()).collect();
        names
            .into_iter()
            .filter_map(|name| {
                let file = file.get(name).map(ToString::to_string);
                let broker = broker.get(name).map(shown);
                Self::if_any(name, file, broker)
            })
            .collect()
    }

    pub(super) fn if_any(
        argument: &str,
        file: Option<String>,
        broker: Option<String>,
    ) -> Option<Self> {
        (file != broker).then(|| Self {
            argument: argument.to_owned(),
            file,
            broker,
        })
    }

    /// Reads `inequivalent arg 'A' for queue 'Q' in vhost 'V': received R but current is C`.
    fn from_refusal(text: &str) -> Option<Self> {
        let (_, rest) = text.split_once("inequivalent arg '")?;
        let (argument, rest) = rest.split_once('\'')?;
        // The broker cuts an answer off at 255 bytes, and long names leave no room for values.
        let cut_off = ("'…'", "'…'");
        let values = rest.rsplit_once(": received ");
        let values = values.and_then(|(_, values)| values.split_once(" but current is "));
        let (received, current) = values.unwrap_or(cut_off);
        Some(Self {
            argument: argument.to_owned(),
            file: value(received),
            broker: value(current),
        })
    }
}

/// The value in `the value '10' of type 'long'`, `'topic'` or `none`.
fn value(text: &str) -> Option<String> {
    let text = text.trim();
    if text == "none" {
        return None;
    }
    let quoted = text.split_once('\'').and_then(|(_, rest)| {
        let (value, _) = rest.split_once("' of type '").or(rest.rsplit_once('\''))?;
        Some(value)
    });
    Some(quoted.unwrap_or(text).to_owned())
}

/// What helps: a queue's and an exchange's arguments cannot change.
fn help(plan: &Plan, kind: ObjectKind, name: &str) -> String {
    let tasks_exchange = format!("{}.tasks", plan.app);
    let tier = plan
        .bindings
        .iter()
        .find(|binding| binding.source == tasks_exchange && binding.destination == name)
        .and_then(|binding| binding.routing_key.split(':').next());
    match (kind, tier) {
        (ObjectKind::Queue, Some(tier)) => {
            let now = generation(plan, tier, name);
            let next = now + 1;
            format!(
                "take the change back, or set generation = {next} in [tiers.{tier}] and formerly = {{ queue = …, \
                 generation = {now} }} with the type that {name} has, and apply: new messages then go to \
                 {}.{tier}.g{next}, workers take from both, and `tierline topology move` deletes {name} in the end",
                plan.app
            )
        }
        (ObjectKind::Queue, None) => format!(
            "take the change back; or, once {name} is empty, delete it by hand and apply at once"
        ),
        (ObjectKind::Exchange, _) => format!(
            "take the change back; or stop what publishes to {name}, delete it by hand and apply at \
             once"
        ),
    }
}

fn generation(plan: &Plan, tier: &str, queue: &str) -> u32 {
    queue
        .strip_prefix(&format!("{}.{tier}.g", plan.app))
        .and_then(|number| number.parse().ok())
        .unwrap_or(1)
}

impl fmt::Display for Mismatch {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.differences.len() {
            1 => writeln!(out, "1 object exists on the broker with other arguments:")?,
            many => writeln!(
                out,
                "{many} objects exist on the broker with other arguments:"
            )?,
        }
        for difference in &self.differences {
            writeln!(out, "{difference}")?;
        }
        write!(out, "nothing was deleted; {}", self.applied)
    }
}

/// A line for the object, one for each change, and the help.
impl fmt::Display for Difference {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(out, "{} {}", self.kind, self.name)?;
        for change in &self.changes {
            writeln!(out, "    {change}")?;
        }
        write!(out, "    help: {}", self.help)
    }
}

impl fmt::Display for ArgumentDifference {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |value: &Option<String>| value.clone().unwrap_or_else(|| "nothing".to_owned());
        let (file, broker) = (shown(&self.file), shown(&self.broker));
        write!(
            out,
            "{}: the file says {file}, the broker has {broker}",
            self.argument
        )
    }
}

impl fmt::Display for ObjectKind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            ObjectKind::Exchange => "exchange",
            ObjectKind::Queue => "queue",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_read_as_brokers_of_all_versions_write_it() {
        for (text, argument, file, broker) in [
            (
                "PRECONDITION_FAILED - inequivalent arg 'x-max-priority' for queue 'hotel.critical' \
                 in vhost '/': received the value '5' of type 'long' but current is the value '10' \
                 of type 'long'",
                "x-max-priority",
                Some("5"),
                Some("10"),
            ),
            (
                "PRECONDITION_FAILED - inequivalent arg 'x-message-ttl' for queue 'hotel.high' in \
                 vhost 'a': received none but current is the value '60000' of type 'signedint'",
                "x-message-ttl",
                None,
                Some("60000"),
            ),
            (
                "PRECONDITION_FAILED - inequivalent arg 'type' for exchange 'hotel.tasks' in vhost \
                 'it's: received ': received 'direct' but current is 'topic'",
                "type",
                Some("direct"),
                Some("topic"),
            ),
            (
                "PRECONDITION_FAILED - inequivalent arg 'x-overflow' for queue 'hotel.a-very-lon...",
                "x-overflow",
                Some("…"),
                Some("…"),
            ),
        ] {
            let change = ArgumentDifference::from_refusal(text).unwrap();
            assert_eq!(change.argument, argument);
            assert_eq!(change.file.as_deref(), file);
            assert_eq!(change.broker.as_deref(), broker);
        }
        assert_eq!(
            ArgumentDifference::from_refusal(
                "PRECONDITION_FAILED - invalid arg 'x-max-priority' for queue 'q'"
            ),
            None
        );
    }
}
