//! The OpenAPI description, for people and for client generators.

mod control;
mod stats;

use serde_json::{Value, json};

use crate::dead::{Filter, Page, Reason, RedriveOutcome, State, TIME_PATTERN, UNROUTED};
use crate::topology::DURATION_PATTERN;

/// The API as OpenAPI 3.1. Enumerations and time patterns are those of the code. Tests compare the paths with
/// the router's, send every example to it, and validate its responses against the schemas.
pub fn description() -> Value {
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "tierline admin API",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "Read, group, redrive and discard dead letters; escalate tasks in Postgres; pause, limit and override tiers and tasks while the app runs; see how each tier is doing.",
        },
        "servers": [{ "url": "/admin" }],
        "security": [{ "token": [] }],
        "paths": joined(joined(joined(paths(), control::paths()), metrics()), stats::paths()),
        "components": {
            "securitySchemes": { "token": { "type": "http", "scheme": "bearer" } },
            "schemas": joined(joined(schemas(), control::schemas()), stats::schemas()),
        },
    })
}

/// An object with the fields of both.
fn joined(mut object: Value, other: Value) -> Value {
    if let (Some(object), Value::Object(other)) = (object.as_object_mut(), other) {
        object.extend(other);
    }
    object
}

/// A text that Postgres can store.
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
                "Rows, the latest death first",
                with(json!([limit(), {
                    "name": "after", "in": "query",
                    "schema": {
                        "type": "string", "pattern": "^[0-9]{1,20}-[0-9]{1,19}$",
                        "examples": ["1769853600000000-4711"],
                    },
                    "description": "`next` of the previous page",
                }])),
                None, 200, "List",
            ),
        },
        "/dlq/groups": {
            "get": operation(
                "Groups of equal failures of the 24 hours before now or `until`, unless `since` is given",
                with(json!([limit()])), None, 200, "Groups",
            ),
        },
        "/dlq/redrive": {
            "post": operation(
                "Redrives all dead rows that a filter selects, in the background",
                json!([]), Some(("Bulk", bulk_examples(), true)), 202, "Operation",
            ),
        },
        "/dlq/operations": {
            "get": operation("Operations on many rows", json!([limit()]), None, 200, "Operations"),
        },
        "/dlq/operations/{id}": {
            "get": operation("An operation and its progress", json!([id()]), None, 200, "Operation"),
        },
        "/dlq/operations/{id}/stop": {
            "post": operation("Stops a redrive after its batch", json!([id()]), Some(("By", by_examples(), false)), 200, "Operation"),
        },
        "/dlq/operations/{id}/resume": {
            "post": operation(
                "Resumes a redrive that was stopped", json!([id()]),
                Some(("By", by_examples(), false)), 202, "Operation",
            ),
        },
        "/dlq/{id}": {
            "get": operation("A row with all its fields", json!([id()]), None, 200, "DeadLetter"),
            "delete": operation(
                "Discards a dead row, which stays until its retention ends",
                json!([id(), note("by", "ada"), note("because", "the order was cancelled")]),
                None, 204, "",
            ),
        },
        "/dlq/{id}/redrive": {
            "post": operation("Publishes a row again", json!([id()]), Some(("By", by_examples(), false)), 200, "Redriven"),
        },
        "/tasks/{id}/escalate": {
            "post": operation(
                "Moves a task that waits in Postgres to another tier", json!([task_id()]),
                Some(("Escalate", escalate_examples(), true)), 200, "Escalated",
            ),
        },
        "/openapi.json": {
            "get": operation("This description", json!([]), None, 200, "Description"),
        },
    })
}

/// The one answer that is no JSON.
#[cfg(feature = "prometheus")]
fn metrics() -> Value {
    let mut scrape = operation(
        "The metrics of this process, for Prometheus",
        json!([]),
        None,
        200,
        "",
    );
    scrape["responses"]["200"]["content"][crate::metrics::Metrics::CONTENT_TYPE] =
        json!({ "schema": { "type": "string" } });
    json!({ "/metrics": { "get": scrape } })
}

#[cfg(not(feature = "prometheus"))]
fn metrics() -> Value {
    json!({})
}

fn operation(
    summary: &str,
    parameters: Value,
    body: Option<(&str, Value, bool)>,
    status: u16,
    answer: &str,
) -> Value {
    let mut responses = json!({});
    responses[status.to_string()] = match answer {
        "" => json!({ "description": "success" }),
        answer => json!({
            "description": "success",
            "content": { "application/json": { "schema": reference(answer) } },
        }),
    };
    for (status, description) in [
        ("400", "the request is invalid"),
        ("401", "the token is missing or wrong"),
        ("404", "nothing has this id or name"),
        (
            "409",
            "the state of the row, the task or the app does not allow this",
        ),
        ("413", "the body is too large"),
        ("429", "the limit of concurrent bulk redrives is reached"),
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
    if let Some((schema, examples, required)) = body {
        let content = json!({ "schema": reference(schema), "examples": examples });
        operation["requestBody"] = json!({
            "required": required,
            "content": { "application/json": content },
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
        "schema": {
            "type": "integer", "format": "int64", "minimum": 0, "maximum": i64::MAX, "examples": [4711],
        },
    })
}

fn task_id() -> Value {
    json!({
        "name": "id", "in": "path", "required": true,
        "schema": { "type": "string", "minLength": 1, "examples": ["81K65HRZ9TF9FB1H4JY5Q0HMXQ"] },
    })
}

fn limit() -> Value {
    json!({
        "name": "limit", "in": "query",
        "schema": { "type": "integer", "minimum": 1, "maximum": Page::LARGEST, "examples": [20] },
    })
}

/// The operator, or the reason. The log keeps it, shortened if it is too long.
fn note(name: &str, example: &str) -> Value {
    json!({ "name": name, "in": "query", "schema": { "type": "string", "examples": [example] } })
}

/// The fields of a filter, each with its schema and description. The same in a query and in the body of a bulk
/// redrive.
fn filter_fields() -> [(&'static str, Value, &'static str); 8] {
    let text = |example: &str| {
        json!({
            "type": "string", "minLength": 1, "maxLength": Filter::LONGEST, "pattern": TEXT,
            "examples": [example],
        })
    };
    let time = || {
        json!({
            "type": "string", "pattern": format!("{DURATION_PATTERN}|{TIME_PATTERN}"),
            "examples": ["24h", "90 min", "2026-01-31T10:00:00Z", "2026-10-20T23:05:09.250+02:00"],
        })
    };
    let died = "a duration before now, such as 24h, or a time with its offset, such as 2026-01-31T10:00:00Z";
    [
        (
            "tier",
            text(UNROUTED),
            "a tier of the map, or one that has rows",
        ),
        ("task", text("email.send_otp"), ""),
        ("reason", reasons(), ""),
        (
            "fingerprint",
            text("696d4bea8bd92d42"),
            "the fingerprint of a group of failures",
        ),
        ("state", states(), ""),
        ("since", time(), died),
        ("until", time(), died),
        (
            "text",
            text("connection refused"),
            "in the error, id or payload, ignoring case; needs `since` too",
        ),
    ]
}

fn filter_parameters() -> Value {
    let fields = filter_fields().into_iter();
    let parameter = |(name, schema, description)| match description {
        "" => json!({ "name": name, "in": "query", "schema": schema }),
        about => json!({ "name": name, "in": "query", "schema": schema, "description": about }),
    };
    fields.map(parameter).collect()
}

fn by_examples() -> Value {
    json!({
        "with an operator": { "value": { "by": "ada", "because": "the provider is back" } },
        "as the admin API": { "value": {} },
    })
}

fn escalate_examples() -> Value {
    json!({
        "with an operator": { "value": {
            "to": "normal", "by": "ada", "because": "the customer waits",
        } },
        "at once, though it is due later": { "value": { "to": "normal", "now": true } },
    })
}

fn bulk_examples() -> Value {
    json!({
        "all dead rows": { "value": { "filter": {} } },
        "the last day, at a rate": { "value": {
            "filter": { "reason": "retries exhausted", "since": "24h" },
            "rate": 50, "by": "ada", "because": "the provider is back",
        } },
        "with a canary": { "value": {
            "filter": { "text": "connection refused", "since": "2026-01-31T10:00:00Z" },
            "canary": { "count": 10, "success": 0.9, "wait": "10m" },
        } },
    })
}

fn reasons() -> Value {
    json!({ "type": "string", "enum": Reason::ALL })
}

fn states() -> Value {
    json!({ "type": "string", "enum": State::ALL })
}

/// An object with these properties; nullable ones may also be missing.
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
    let summary = json!({
        "id": number(), "message_id": maybe("string"), "task": maybe("string"), "tier": string(),
        "reason": reasons(), "error": maybe("string"), "error_type": maybe("string"),
        "error_kind": maybe("string"), "attempts": count(), "life": count(),
        "enqueued_at": maybe("string"), "died_at": time(), "fingerprint": string(),
        "state": states(), "redriven_from": maybe("integer"), "redriven_at": maybe("string"),
        "outcome": { "type": ["string", "null"], "enum": outcomes() },
    });
    let rows = ["id", "tier", "reason", "died_at", "fingerprint", "state"];
    let or_null = |schema: Value| json!({ "anyOf": [schema, { "type": "null" }] });
    let mut filter = json!({});
    for (name, schema, _) in filter_fields() {
        filter[name] = or_null(schema);
    }
    // Only dead rows can be redriven.
    filter["state"] = or_null(json!({ "type": "string", "enum": [State::Dead] }));
    let by = json!({ "by": maybe("string"), "because": maybe("string") });
    let canary = object(
        json!({
            "count": { "type": "integer", "minimum": 1, "maximum": u32::MAX },
            "success": { "type": ["number", "null"], "minimum": 0, "maximum": 1 },
            "wait": {
                "type": ["string", "null"], "pattern": DURATION_PATTERN, "examples": ["10m", "90 sec"],
            },
        }),
        &["count"],
        true,
    );
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
        "By": object(by.clone(), &[], true),
        "Filter": object(filter, &[], true),
        "Bulk": object(json!({
            "filter": reference("Filter"),
            "rate": { "type": ["integer", "null"], "minimum": 1, "maximum": u32::MAX },
            "canary": or_null(canary),
            "by": by["by"], "because": by["because"],
        }), &["filter"], true),
        "Escalate": object(json!({
            "to": { "type": "string", "description": "a tier of the map" },
            "now": { "type": "boolean", "description": "whether a task that is due later is due now" },
            "by": by["by"], "because": by["because"],
        }), &["to"], true),
        "Escalated": object(json!({
            "before": reference("Task"), "after": reference("Task"),
        }), &["before", "after"], true),
        "Task": object(json!({
            "id": string(), "task": string(), "tier": string(), "first_tier": string(),
            "state": { "type": "string", "enum": ["ready", "parked", "scheduled"] },
            "is_quarantined": { "type": "boolean" }, "priority": count(), "attempt": count(),
            "crashes": count(), "enqueued_at": time(), "due_at": time(), "worker": maybe("string"),
            "size": count(),
        }), &["id", "task", "tier", "state", "priority", "attempt", "enqueued_at", "due_at"], false),
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
