//! One change that an operator has made.

use std::fmt;
use std::time::SystemTime;

use serde::Serialize;
use serde_json::{Value, json};

use crate::topology::Limit;

/// A change that is in force, or was.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ControlEntry {
    /// What it is about.
    #[serde(flatten)]
    pub target: Target,
    /// What it does to it.
    #[serde(flatten)]
    pub setting: Setting,
    /// The operator.
    pub who: String,
    /// The operator's reason; may be empty.
    pub why: String,
    /// When it was made.
    #[serde(serialize_with = "crate::postgres::time::serialize")]
    pub since: SystemTime,
    /// When it ends by itself. `None`: it does not.
    #[serde(serialize_with = "crate::postgres::time::serialize_some")]
    pub until: Option<SystemTime>,
}

/// What a change is about.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
#[serde(tag = "target", content = "name", rename_all = "lowercase")]
#[non_exhaustive]
pub enum Target {
    /// All tasks of this tier.
    Tier(String),
    /// All tiers of this group.
    Group(String),
    /// The task of this name.
    Task(String),
    /// All tasks whose names begin like this, such as `calendar.`.
    Prefix(String),
}

/// What a change does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
#[non_exhaustive]
pub enum Setting {
    /// Nothing of it starts.
    Pause,
    /// So often it starts, and so many of it run, in place of the limit of the map. One that limits nothing lifts that.
    Limit(Limit),
    /// Its tasks go to another tier, or have another priority, than the map says.
    Override {
        /// The tier. `None`: that of the map.
        tier: Option<String>,
        /// The priority. `None`: that of the map, as far as the tier has it.
        priority: Option<u8>,
    },
}

impl Target {
    /// Its name in the map, or the beginning of the names.
    pub fn name(&self) -> &str {
        match self {
            Target::Tier(name)
            | Target::Group(name)
            | Target::Task(name)
            | Target::Prefix(name) => name,
        }
    }

    /// `tier`, `group`, `task` or `prefix`.
    pub fn kind(&self) -> &'static str {
        match self {
            Target::Tier(_) => "tier",
            Target::Group(_) => "group",
            Target::Task(_) => "task",
            Target::Prefix(_) => "prefix",
        }
    }

    /// Whether it is about this task by its name.
    pub(super) fn has(&self, task: &str) -> bool {
        match self {
            Target::Task(name) => name == task,
            Target::Prefix(prefix) => task.starts_with(prefix.as_str()),
            Target::Tier(_) | Target::Group(_) => false,
        }
    }

    pub(super) fn new(kind: &str, name: String) -> Option<Self> {
        match kind {
            "tier" => Some(Target::Tier(name)),
            "group" => Some(Target::Group(name)),
            "task" => Some(Target::Task(name)),
            "prefix" => Some(Target::Prefix(name)),
            _ => None,
        }
    }
}

/// `tier bulk`, `tasks calendar.*`.
impl fmt::Display for Target {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Prefix(prefix) => write!(out, "tasks {prefix}*"),
            other => write!(out, "{} {}", other.kind(), other.name()),
        }
    }
}

impl Setting {
    /// `pause`, `limit`, `override`.
    pub fn kind(&self) -> &'static str {
        match self {
            Setting::Pause => "pause",
            Setting::Limit(_) => "limit",
            Setting::Override { .. } => "override",
        }
    }

    /// As it is stored, beside its kind.
    pub(super) fn to_json(&self) -> Value {
        match self {
            Setting::Pause => json!({}),
            Setting::Limit(limit) => json!(limit),
            Setting::Override { tier, priority } => json!({ "tier": tier, "priority": priority }),
        }
    }

    /// `None`: a newer release has written what this one does not know.
    pub(super) fn from_json(kind: &str, stored: &Value) -> Option<Self> {
        match kind {
            "pause" => Some(Setting::Pause),
            "limit" => Limit::from_json(stored).map(Setting::Limit),
            "override" => {
                let priority = stored.get("priority").and_then(Value::as_u64);
                Some(Setting::Override {
                    tier: stored.get("tier")?.as_str().map(str::to_owned),
                    priority: priority.and_then(|it| u8::try_from(it).ok()),
                })
            }
            _ => None,
        }
    }
}
