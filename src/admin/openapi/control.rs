//! The description of what operators change while the app runs.

use serde_json::{Value, json};

use super::{listed, object, operation, reference};
use crate::dead::Page;
use crate::topology::DURATION_PATTERN;
use crate::topology::limit::COUNTS;

/// As in the map. The number may be too large or too small.
const RATE_PATTERN: &str = "^\\s*[0-9]+(\\.[0-9]{1,3})?\\s*/.+$";
/// Postgres cannot keep NUL.
const NAME_PATTERN: &str = "^[^\\u0000]*$";

pub(super) fn paths() -> Value {
    let change = |summary, body, examples, answer| {
        let body = Some((body, examples, true));
        json!({ "post": operation(summary, json!([]), body, 200, answer) })
    };
    let read = |summary, parameters, answer| json!({ "get": operation(summary, parameters, None, 200, answer) });
    json!({
        "/control": read("The changes that are in force", json!([]), "Controls"),
        "/control/pause": change(
            "Pauses a tier, a group or a task: nothing of it starts", "Pause", pause_examples(), "Changed",
        ),
        "/control/resume": change("Ends a pause", "Resume", resume_examples(), "Changed"),
        "/control/limit": change(
            "Limits a tier or a task in place of the limit of the map", "SetLimit", limit_examples(), "Changed",
        ),
        "/control/unlimit": change(
            "Ends a limit that was set at run time; that of the map is in force again", "Unlimit",
            unlimit_examples(), "Changed",
        ),
        "/control/override": change(
            "Gives tasks another tier or priority. Moves the rows that wait before it answers, which takes seconds, and \
             two minutes at most",
            "SetOverride", override_examples(), "Overridden",
        ),
        "/control/end-override": change(
            "Ends an override; what was moved stays where it is", "EndOverride", end_override_examples(), "Changed",
        ),
        "/control/processes": read("The live workers and relays, the oldest first", json!([]), "Processes"),
        "/control/audit": read("What operators did, the latest first", audit_parameters(), "Audit"),
        "/control/scaling": read(
            "How many slots and processes each group wants, for autoscalers", json!([]), "Scaling",
        ),
    })
}

fn audit_parameters() -> Value {
    json!([
        {
            "name": "limit", "in": "query",
            "schema": { "type": "integer", "minimum": 1, "maximum": Page::LARGEST, "examples": [20] },
        },
        {
            "name": "before", "in": "query",
            "schema": { "type": "integer", "format": "int64", "minimum": i64::MIN, "maximum": i64::MAX, "examples": [4711] },
            "description": "the `id` of the last entry of the previous page",
        },
    ])
}

fn pause_examples() -> Value {
    json!({
        "a tier for an hour": { "value": {
            "target": "tier", "name": "bulk", "for": "1h", "by": "ada", "because": "the provider is down",
        } },
        "a task until it is resumed": { "value": { "target": "task", "name": "report.export" } },
    })
}

fn resume_examples() -> Value {
    json!({
        "a tier": { "value": { "target": "tier", "name": "bulk", "by": "ada", "because": "it is back" } },
        "a group": { "value": { "target": "group", "name": "deferred" } },
    })
}

fn limit_examples() -> Value {
    json!({
        "fewer e-mails": { "value": {
            "target": "tier", "name": "mail", "rate": "50/m", "burst": 5, "for": "2h", "by": "ada",
            "because": "the provider asks for it",
        } },
        "four exports at a time": { "value": { "target": "task", "name": "report.export", "running": 4 } },
        "as if the map had no limit": { "value": { "target": "tier", "name": "mail", "none": true, "for": "1h" } },
    })
}

fn unlimit_examples() -> Value {
    json!({ "a tier": { "value": { "target": "tier", "name": "mail", "by": "ada" } } })
}

fn override_examples() -> Value {
    json!({
        "two tasks for a week": { "value": {
            "target": "task", "names": ["report.export", "report.send"], "tier": "low", "for": "7d", "by": "ada",
            "because": "the quarter's reports",
        } },
        "all tasks of a prefix": { "value": { "target": "prefix", "names": ["calendar."], "tier": "high", "priority": 9 } },
    })
}

fn end_override_examples() -> Value {
    json!({ "of a prefix": { "value": { "target": "prefix", "name": "calendar.", "by": "ada" } } })
}

pub(super) fn schemas() -> Value {
    let string = || json!({ "type": "string" });
    let flag = || json!({ "type": "boolean" });
    let count = || json!({ "type": "integer", "minimum": 0 });
    let number = || json!({ "type": "number", "minimum": 0 });
    let time = || json!({ "type": "string", "format": "date-time" });
    let maybe = |kind: &str| json!({ "type": [kind, "null"] });
    let one_of = |words: &[&str]| json!({ "type": "string", "enum": words });
    let texts = || json!({ "type": "array", "items": { "type": "string" } });
    let some = |schema: &str| json!({ "type": "array", "items": reference(schema) });
    let or_null = |schema: &str| json!({ "anyOf": [reference(schema), { "type": "null" }] });
    let of_limit = || {
        let mut schema = json!({ "type": ["integer", "null"] });
        schema["minimum"] = json!(COUNTS.start());
        schema["maximum"] = json!(COUNTS.end());
        schema
    };
    let targets = ["tier", "group", "task"];
    let length = json!({
        "type": ["string", "null"], "pattern": DURATION_PATTERN, "examples": ["1h", "90 min", "7d"],
    });
    // The fields of a change: its own, and those that all have.
    let change = |own: Value, required: &[&str]| {
        let mut fields = own;
        fields["by"] = maybe("string");
        fields["because"] = maybe("string");
        object(fields, required, true)
    };
    let name = || json!({ "type": "string", "pattern": NAME_PATTERN });
    let mut limit = change(
        json!({
            "target": one_of(&["tier", "task"]), "name": name(),
            "rate": { "type": ["string", "null"], "pattern": RATE_PATTERN, "examples": ["50/m", "0.5/s", "5/10s"] },
            "burst": of_limit(), "running": of_limit(),
            "none": { "type": "boolean", "description": "lifts the limit of the map" },
            "for": length,
        }),
        &["target", "name"],
    );
    limit["description"] =
        json!("At least one of `rate` and `running`, or `none`. A `burst` needs a `rate`.");
    json!({
        "Controls": listed("controls", "Control"),
        "Control": object(json!({
            "target": one_of(&["tier", "group", "task", "prefix"]), "name": string(),
            "kind": one_of(&["pause", "limit", "override"]),
            "rate": string(), "burst": count(), "running": count(), "per": string(), "scope": string(),
            "tier": maybe("string"), "priority": maybe("integer"),
            "who": string(), "why": string(), "since": time(), "until": maybe("string"),
        }), &["target", "name", "kind", "who", "why", "since", "until"], true),
        "Pause": change(
            json!({ "target": one_of(&targets), "name": name(), "for": length }), &["target", "name"],
        ),
        "Resume": change(json!({ "target": one_of(&targets), "name": name() }), &["target", "name"]),
        "SetLimit": limit,
        "Unlimit": change(
            json!({ "target": one_of(&["tier", "task"]), "name": name() }), &["target", "name"],
        ),
        "SetOverride": change(json!({
            "target": one_of(&["task", "prefix"]),
            "names": {
                "type": "array", "items": name(), "minItems": 1, "maxItems": 500,
                "description": "tasks of the map, or one prefix of their names",
            },
            "tier": maybe("string"),
            "priority": { "type": ["integer", "null"], "minimum": 0, "maximum": u8::MAX },
            "for": length,
        }), &["target", "names"]),
        "EndOverride": change(
            json!({ "target": one_of(&["task", "prefix"]), "name": name() }), &["target", "name"],
        ),
        "Changed": object(json!({
            "before": or_null("Control"), "after": or_null("Control"), "notes": texts(),
        }), &["before", "after", "notes"], true),
        "Overridden": object(json!({
            "before": some("Control"), "after": some("Control"), "moved": count(),
            "waiting": some("WaitingQueue"), "notes": texts(),
        }), &["before", "after", "moved", "waiting", "notes"], true),
        "WaitingQueue": object(json!({
            "tier": string(), "messages": maybe("integer"),
        }), &["tier", "messages"], true),
        "Processes": listed("processes", "Process"),
        "Process": object(json!({
            "id": count(), "name": string(), "version": string(), "groups": some("ProcessGroup"),
            "tasks": { "type": ["array", "null"], "items": string() }, "is_relay": flag(),
            "started_at": time(), "last_heartbeat": time(), "is_alive": flag(),
        }), &["id", "name", "version", "groups", "tasks", "is_relay", "started_at", "last_heartbeat", "is_alive"], false),
        "ProcessGroup": object(json!({
            "name": string(), "slots": count(), "tiers": texts(),
        }), &["name", "slots", "tiers"], false),
        "Audit": listed("entries", "AuditEntry"),
        "AuditEntry": object(json!({
            "id": count(), "at": time(), "who": string(), "why": string(), "action": string(),
            "subject": { "type": "object" }, "before": {}, "after": {},
        }), &["id", "at", "who", "why", "action", "subject", "before", "after"], true),
        "Scaling": listed("groups", "GroupScaling"),
        "GroupScaling": object(json!({
            "group": string(), "slots_wanted": count(), "slots": count(), "processes_wanted": count(),
            "processes": count(), "is_estimate": flag(), "tiers": some("TierScaling"),
        }), &["group", "slots_wanted", "slots", "processes_wanted", "processes", "is_estimate", "tiers"], false),
        "TierScaling": object(json!({
            "tier": string(), "slots_wanted": number(), "backlog": count(), "is_backlog_partial": flag(),
            "arrivals_per_second": number(), "mean_run_seconds": maybe("number"), "slo_seconds": number(),
            "is_paused": flag(), "is_limited": flag(),
        }), &["tier", "slots_wanted", "backlog", "arrivals_per_second", "mean_run_seconds", "slo_seconds", "is_paused", "is_limited"], false),
    })
}
