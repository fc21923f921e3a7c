//! Which tasks of a tier may not run as they come, and why. Made anew when what is in force changes.

use std::collections::HashMap;
use std::sync::Arc;

#[cfg(feature = "postgres")]
use serde_json::Value;
#[cfg(feature = "postgres")]
use sha2::{Digest, Sha256};

use super::{Gate, Limits, Snapshot};
use crate::topology::Topology;

#[cfg(feature = "postgres")]
/// The longest key of a task, in bytes. The digest stands for a longer one.
const LONGEST_KEY: usize = 200;

/// Why tasks of one name may not run as they come.
#[derive(Debug, Clone)]
pub(crate) enum Gated {
    /// None of them starts. Those with a limit for each key wait by their key meanwhile.
    Paused { path: Option<Arc<str>> },
    /// As many start as the gate lets through.
    Limited(Arc<Gate>),
    /// As many of each key run as have places, and start as the gate lets through.
    PerKey {
        path: Arc<str>,
        places: u32,
        gate: Option<Arc<Gate>>,
    },
}

/// The tasks of a tier that may not run as they come.
#[derive(Debug, Default)]
pub(crate) struct Gating {
    tasks: HashMap<String, Gated>,
    /// The keys of all tasks of the tier take turns: this field of their payloads.
    fair: Option<Arc<str>>,
}

impl Gating {
    /// What is in force for a tier.
    pub(crate) fn new(
        topology: &Topology,
        tier: &str,
        snapshot: &Snapshot,
        limits: &Limits,
    ) -> Self {
        let mut tasks = HashMap::new();
        for task in topology.tasks() {
            let gate = limits.task(&task.name);
            let limit = snapshot.limit_of_task(&task.name);
            let per_key = limit.and_then(|limit| Some((limit.per.as_deref()?, limit.running?)));
            let gated = match (per_key, gate) {
                (Some((path, places)), gate) => Gated::PerKey {
                    path: path.into(),
                    places,
                    gate,
                },
                (None, Some(gate)) => Gated::Limited(gate),
                (None, None) => continue,
            };
            tasks.insert(task.name.clone(), gated);
        }
        for task in snapshot.paused_tasks() {
            let path = match tasks.get(task) {
                Some(Gated::PerKey { path, .. }) => Some(path.clone()),
                _ => None,
            };
            tasks.insert(task.to_owned(), Gated::Paused { path });
        }
        let fair = topology.tier(tier).and_then(|tier| tier.fair.as_deref());
        Self {
            tasks,
            fair: fair.map(Arc::from),
        }
    }

    /// Whether all tasks run as they come.
    pub(crate) fn is_empty(&self) -> bool {
        self.tasks.is_empty() && self.fair.is_none()
    }

    /// Whether the keys of all tasks take turns.
    pub(crate) fn is_fair(&self) -> bool {
        self.fair.is_some()
    }

    pub(crate) fn of(&self, task: &str) -> Option<&Gated> {
        // Nearly always there is none.
        match self.tasks.is_empty() {
            true => None,
            false => self.tasks.get(task),
        }
    }

    /// The names of the tasks that may not run as they come.
    pub(crate) fn tasks(&self) -> impl Iterator<Item = &str> {
        self.tasks.keys().map(String::as_str)
    }

    /// The field of the payload that has a task's key, if it has one.
    fn path(&self, task: &str) -> Option<&str> {
        match self.of(task) {
            Some(Gated::PerKey { path, .. }) => Some(path),
            Some(Gated::Paused { path }) => path.as_deref(),
            Some(Gated::Limited(_)) => None,
            None => self.fair.as_deref(),
        }
    }

    /// The task of the lanes that a task waits in; empty if it waits among all tasks of the tier.
    pub(crate) fn lane_task<'t>(&self, task: &'t str) -> &'t str {
        match self.of(task) {
            None if self.fair.is_some() => "",
            _ => task,
        }
    }

    #[cfg(feature = "postgres")]
    /// What tells its lane from others of its task: `=` and the key that was given at its publish, else the field of its
    /// payload, which may be missing. Empty if tasks are not told apart by a key.
    pub(crate) fn lane_key(&self, task: &str, given: Option<&str>, payload: &[u8]) -> String {
        match self.path(task) {
            Some(path) => {
                let key = match given {
                    Some(given) => given.to_owned(),
                    None => field(payload, path),
                };
                format!("={}", kept(key))
            }
            None => String::new(),
        }
    }
}

#[cfg(feature = "postgres")]
/// The value at a path into JSON objects, as a text. Empty: there is none.
fn field(payload: &[u8], path: &str) -> String {
    let Ok(payload) = serde_json::from_slice::<Value>(payload) else {
        return String::new();
    };
    let value = path
        .split('.')
        .try_fold(&payload, |value, name| value.get(name));
    match value {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Null) | None => String::new(),
        Some(other) => other.to_string(),
    }
}

#[cfg(feature = "postgres")]
/// A key as Postgres keeps it: without NUL, and not too long for an index.
fn kept(key: String) -> String {
    if key.len() > LONGEST_KEY {
        let digest = Sha256::digest(key.as_bytes());
        return digest.iter().map(|byte| format!("{byte:02x}")).collect();
    }
    match key.contains('\0') {
        true => key.replace('\0', "\u{fffd}"),
        false => key,
    }
}

#[cfg(all(test, feature = "postgres"))]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_a_field_of_the_payload_however_deep() {
        let payload =
            br#"{"customer": "ada", "order": {"customer": 7, "tags": ["a"]}, "none": null}"#;
        for (path, key) in [
            ("customer", "ada"),
            ("order.customer", "7"),
            ("order.tags", r#"["a"]"#),
            ("none", ""),
            ("order.missing", ""),
            ("customer.name", ""),
        ] {
            assert_eq!(field(payload, path), key, "{path}");
        }
        assert_eq!(field(b"not JSON", "customer"), "");
    }

    #[test]
    fn a_key_that_postgres_cannot_keep_is_changed_and_stays_different_from_others() {
        assert_eq!(kept("a\0b".into()), "a\u{fffd}b");
        let long = |last: &str| kept(format!("{}{last}", "x".repeat(1_000)));
        assert_eq!(long("a").len(), 64);
        assert_ne!(long("a"), long("b"));
    }
}
