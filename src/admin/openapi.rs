//! The description of the API, for people and for programs that make clients or try it out.

use serde_json::{Value, json};

use crate::dead::{Page, Reason, RedriveOutcome, State};

/// The API as OpenAPI 3.1. The sets of words are those of the code, and a test compares the paths
/// with the router's.
pub fn description() -> Value {
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "tierline admin API",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Dead letters: read, grouped, redriven, discarded.",
        },
        "servers": [{ "url": "/admin" }],
        "security": [{ "token": [] }],
        "paths": paths(),
        "components": {
            "securitySchemes": { "token": { "type": "http", "scheme": "bearer" } },
            "schemas": schemas(),
        },
    })
}

/// A span of time, or that or a point in time, or a text, as a regular expression.
const SPAN: &str = "^[1-9][0-9]{0,3}(ms|s|m|h|d)$";
const TIME: &str =
    "^[1-9][0-9]{0,3}(ms|s|m|h|d)$|^20[0-9]{2}-0[1-9]-[01][1-9]T[01][0-9]:[0-5][0-9]:[0-5][0-9]Z$";
const TEXT: &str = "^[^\\u0000]+$";

fn paths() -> Value {
    let filter = filter_parameters();
    let with = |more: Value| Value::Array([list(&filter), list(&more)].concat());
    json!({
        "/dlq/by-tier": {
            "get": operation("How many rows each tier has", json!([]), None, 200, "Tiers"),
        },
        "/dlq": {
            "get": operation(
                "Rows, those that died last first",
                with(json!([limit(), {
                    "name": "after", "in": "query",
                    "schema": { "type": "string", "pattern": "^[0-9]{1,15}-[0-9]{1,15}$" },
                    "description": "`next` of the page before",
                }])),
                None, 200, "List",
            ),
        },
        "/dlq/groups": {
            "get": operation(
                "Failures that are the same, of the last 24 hours unless `since` is given",
                with(json!([limit()])), None, 200, "Groups",
            ),
        },
        "/dlq/redrive": {
            "post": operation(
                "Redrives all dead rows that a filter means, in the background",
                json!([]), Some(("Bulk", true)), 202, "Operation",
            ),
        },
        "/dlq/operations": {
            "get": operation("What was done to many rows at once", json!([limit()]), None, 200, "Operations"),
        },
        "/dlq/operations/{id}": {
            "get": operation("An operation, and how far it is", json!([id()]), None, 200, "Operation"),
        },
        "/dlq/operations/{id}/stop": {
            "post": operation("Tells a redrive to stop", json!([id()]), Some(("By", false)), 200, "Operation"),
        },
        "/dlq/operations/{id}/resume": {
            "post": operation(
                "Goes on with a redrive that was stopped", json!([id()]),
                Some(("By", false)), 202, "Operation",
            ),
        },
        "/dlq/{id}": {
            "get": operation("A row with all that is known of it", json!([id()]), None, 200, "DeadLetter"),
            "delete": operation(
                "Discards a dead row: it stays until its retention ends",
                json!([id(), text("by"), text("because")]), None, 204, "",
            ),
        },
        "/dlq/{id}/redrive": {
            "post": operation("Publishes a row again", json!([id()]), Some(("By", false)), 200, "Redriven"),
        },
        "/openapi.json": {
            "get": operation("This description", json!([]), None, 200, "Description"),
        },
    })
}

fn operation(
    summary: &str,
    parameters: Value,
    body: Option<(&str, bool)>,
    status: u16,
    answer: &str,
) -> Value {
    let mut responses = json!({});
    responses[status.to_string()] = match answer {
        "" => json!({ "description": "done" }),
        answer => json!({
            "description": "done",
            "content": { "application/json": { "schema": reference(answer) } },
        }),
    };
    for (status, description) in [
        ("400", "the request is not what it should be"),
        ("401", "the token is missing or wrong"),
        ("404", "there is no such row"),
        ("409", "it cannot be done to this row"),
        ("413", "the body is too large"),
        ("429", "too many bulk redrives run already"),
        ("503", "the database or the broker does not answer"),
    ] {
        responses[status] = json!({
            "description": description,
            "content": { "application/problem+json": { "schema": reference("Problem") } },
        });
    }
    let mut operation = json!({
        "summary": summary,
        "parameters": parameters,
        "responses": responses,
    });
    if let Some((schema, required)) = body {
        operation["requestBody"] = json!({
            "required": required,
            "content": { "application/json": { "schema": reference(schema) } },
        });
    }
    operation
}

fn list(value: &Value) -> Vec<Value> {
    value.as_array().cloned().unwrap_or_default()
}

fn reference(schema: &str) -> Value {
    json!({ "$ref": format!("#/components/schemas/{schema}") })
}

fn id() -> Value {
    json!({
        "name": "id", "in": "path", "required": true,
        "schema": { "type": "integer", "format": "int64", "minimum": 0 },
    })
}

fn limit() -> Value {
    json!({
        "name": "limit", "in": "query",
        "schema": { "type": "integer", "minimum": 1, "maximum": Page::LARGEST },
    })
}

fn text(name: &str) -> Value {
    json!({ "name": name, "in": "query", "schema": { "type": "string", "minLength": 1, "maxLength": 250, "pattern": TEXT } })
}

fn filter_parameters() -> Value {
    let words = |name: &str, words: Value| json!({ "name": name, "in": "query", "schema": words });
    let time = |name: &str| {
        json!({
            "name": name, "in": "query", "schema": { "type": "string", "pattern": TIME },
            "description": "24h for so long ago, or 2026-01-31T10:00:00Z",
        })
    };
    json!([
        text("tier"),
        text("task"),
        words("reason", reasons()),
        text("fingerprint"),
        words("state", states()),
        time("since"),
        time("until"),
        text("text"),
    ])
}

fn reasons() -> Value {
    json!({ "type": "string", "enum": Reason::ALL })
}

fn states() -> Value {
    json!({ "type": "string", "enum": State::ALL })
}

/// An object with these properties; those that may be null may also be missing.
fn object(properties: Value, required: &[&str], is_closed: bool) -> Value {
    json!({
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": !is_closed,
    })
}

fn schemas() -> Value {
    let string = || json!({ "type": "string" });
    let count = || json!({ "type": "integer", "minimum": 0 });
    let number = || json!({ "type": "integer", "format": "int64" });
    let time = || json!({ "type": "string", "format": "date-time" });
    let maybe = |kind: &str| json!({ "type": [kind, "null"] });
    let short = || json!({ "type": "string", "minLength": 1, "maxLength": 250, "pattern": TEXT });
    let summary = json!({
        "id": number(), "message_id": maybe("string"), "task": maybe("string"), "tier": string(),
        "reason": reasons(), "error": maybe("string"), "error_type": maybe("string"),
        "error_kind": maybe("string"), "attempts": count(), "life": count(),
        "enqueued_at": maybe("string"), "died_at": time(), "fingerprint": string(),
        "state": states(), "redriven_from": maybe("integer"), "redriven_at": maybe("string"),
        "outcome": { "type": ["string", "null"], "enum": outcomes() },
    });
    let rows = ["id", "tier", "reason", "died_at", "fingerprint", "state"];
    let filter = json!({
        "tier": short(), "task": short(), "reason": reasons(), "fingerprint": short(),
        "state": { "type": "string", "enum": ["dead"] },
        "since": time(), "until": time(), "text": short(),
    });
    json!({
        "Summary": object(summary.clone(), &rows, false),
        "DeadLetter": object(summary, &rows, false),
        "List": object(json!({
            "letters": { "type": "array", "items": reference("Summary") },
            "next": maybe("string"),
        }), &["letters", "next"], true),
        "Tiers": listed("tiers", "Tier"),
        "Tier": object(json!({
            "tier": string(), "dead": count(), "redriving": count(), "redriven": count(),
            "discarded": count(),
        }), &["tier", "dead", "redriving", "redriven", "discarded"], true),
        "Groups": listed("groups", "Group"),
        "Group": object(json!({
            "fingerprint": string(), "count": count(), "first_seen": time(), "last_seen": time(),
            "sample": reference("Summary"), "root_cause": string(), "advice": string(),
            "because": string(),
        }), &["fingerprint", "count", "first_seen", "last_seen", "sample", "advice"], true),
        "Operations": listed("operations", "Operation"),
        "Operation": object(json!({
            "id": number(), "action": { "type": "string", "enum": ["redrive", "discard", "purge"] },
            "who": string(), "why": string(), "filter": { "type": "object" },
            "state": { "type": "string", "enum": ["running", "stopping", "stopped", "done"] },
            "total": count(), "done": count(), "failed": count(), "refused": count(),
            "note": string(), "started_at": time(), "ended_at": maybe("string"),
        }), &["id", "action", "state", "total", "done", "failed", "refused"], true),
        "Redriven": object(json!({
            "id": number(), "message_id": string(), "tier": string(),
        }), &["id", "message_id", "tier"], true),
        "By": object(json!({ "by": string(), "because": string() }), &[], true),
        "Filter": object(filter, &[], true),
        "Bulk": object(json!({
            "filter": reference("Filter"),
            "rate": { "type": "integer", "minimum": 1, "maximum": u32::MAX },
            "canary": object(json!({
                "count": { "type": "integer", "minimum": 1, "maximum": u32::MAX },
                "success": { "type": "number", "minimum": 0, "maximum": 1 },
                "wait": { "type": "string", "pattern": SPAN, "description": "such as 10m" },
            }), &["count"], true),
            "by": string(), "because": string(),
        }), &["filter"], true),
        "Problem": object(json!({
            "type": string(), "title": string(), "status": count(), "detail": string(),
        }), &["type", "title", "status", "detail"], true),
        "Description": { "type": "object" },
    })
}

fn listed(name: &str, schema: &str) -> Value {
    let mut properties = json!({});
    properties[name] = json!({ "type": "array", "items": reference(schema) });
    object(properties, &[name], true)
}

fn outcomes() -> Vec<Value> {
    let words = RedriveOutcome::ALL.iter().map(|outcome| json!(outcome));
    words.chain([Value::Null]).collect()
}
