//! The description of statistics.

use serde_json::{Value, json};

use super::{object, operation, reference};

pub(super) fn paths() -> Value {
    json!({
        "/stats": { "get": operation(
            "How the app is doing, tier by tier. Answers within two seconds; what a server did not say is null, and in `problems`",
            json!([]), None, 200, "Stats",
        ) },
    })
}

pub(super) fn schemas() -> Value {
    let string = || json!({ "type": "string" });
    let flag = || json!({ "type": "boolean" });
    let count = || json!({ "type": "integer", "minimum": 0 });
    let number = || json!({ "type": "number", "minimum": 0 });
    let time = || json!({ "type": "string", "format": "date-time" });
    let maybe = |kind: &str| json!({ "type": [kind, "null"] });
    let some = |schema: &str| json!({ "type": "array", "items": reference(schema) });
    let or_null = |schema: Value| json!({ "anyOf": [schema, { "type": "null" }] });
    let maybe_count = || or_null(reference("Count"));
    json!({
        "Stats": object(json!({
            "app": string(), "at": time(), "took_seconds": number(), "tiers": some("TierStats"),
            "groups": some("GroupStats"), "paused_tasks": { "type": ["array", "null"], "items": string() },
            "relays": maybe("integer"), "schedules": or_null(reference("ScheduleStats")),
            "problems": some("StatsProblem"),
        }), &["app", "at", "took_seconds", "tiers", "groups", "paused_tasks", "relays", "schedules", "problems"], false),
        "Count": object(json!({
            "count": count(),
            "or_more": { "type": "boolean", "description": "whether counting has ended there, and there may be more" },
        }), &["count", "or_more"], false),
        "TierStats": object(json!({
            "tier": string(), "group": string(), "home": { "type": "string", "enum": ["classic", "quorum", "postgres"] },
            "waiting": maybe_count(), "messages": maybe("integer"), "rows": maybe_count(),
            "by_priority": { "type": ["array", "null"], "items": reference("PriorityDepth") },
            "quarantined": maybe_count(), "oldest": or_null(reference("OldestWait")), "in_flight": maybe_count(),
            "running": maybe("integer"), "consumers": maybe("integer"), "processes": maybe("integer"),
            "in_per_second": maybe("number"), "out_per_second": maybe("number"),
            "wait_p50_seconds": maybe("number"), "wait_p99_seconds": maybe("number"),
            "slo": or_null(reference("SloStats")), "dead": or_null(reference("DeadLetterStats")),
            "relay_waiting": maybe_count(), "scheduled": maybe_count(), "delayed_messages": maybe("integer"),
            "parked": maybe_count(), "paused": or_null(reference("PauseStats")), "limit": or_null(reference("LimitStats")),
        }), &[
            "tier", "group", "home", "waiting", "messages", "rows", "by_priority", "quarantined", "oldest", "in_flight",
            "running", "consumers", "processes", "in_per_second", "out_per_second", "wait_p50_seconds", "wait_p99_seconds", "slo",
            "dead", "relay_waiting", "scheduled", "delayed_messages", "parked", "paused", "limit",
        ], false),
        "PriorityDepth": object(json!({ "priority": count(), "rows": reference("Count") }), &["priority", "rows"], false),
        "OldestWait": object(json!({
            "seconds": number(),
            "is_estimate": { "type": "boolean", "description": "RabbitMQ does not say how old a message is" },
        }), &["seconds", "is_estimate"], false),
        "SloStats": object(json!({
            "start_seconds": number(), "objective": number(), "met_last_hour": maybe("number"),
            "budget_left": { "type": ["number", "null"], "description": "of the last 24 hours: 1 is all of it" },
        }), &["start_seconds", "objective", "met_last_hour", "budget_left"], false),
        "DeadLetterStats": object(json!({
            "dead": count(), "redriving": count(), "redriven": count(), "discarded": count(),
            "uncollected": maybe("integer"), "last_five_minutes": maybe("integer"), "last_hour": maybe("integer"),
        }), &["dead", "redriving", "redriven", "discarded", "uncollected", "last_five_minutes", "last_hour"], false),
        "PauseStats": object(json!({
            "of_group": flag(), "who": string(), "why": string(), "since": time(), "until": maybe("string"),
        }), &["of_group", "who", "why", "since", "until"], false),
        "LimitStats": object(json!({
            "limit": string(), "is_saturated": maybe("boolean"),
        }), &["limit", "is_saturated"], false),
        "GroupStats": object(json!({
            "group": string(), "processes": maybe("integer"), "slots": maybe("integer"), "running": maybe("integer"),
        }), &["group", "processes", "slots", "running"], false),
        "ScheduleStats": object(json!({
            "count": count(), "paused": count(), "has_leader": flag(), "next_due": maybe("string"),
        }), &["count", "paused", "has_leader", "next_due"], false),
        "StatsProblem": object(json!({
            "server": { "type": "string", "enum": ["broker", "management", "database"] }, "problem": string(),
        }), &["server", "problem"], false),
    })
}
