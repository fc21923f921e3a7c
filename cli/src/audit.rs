//! The audit log: what operators did.

use serde_json::{Value, json};
use tierline::postgres::AuditEntry;

use crate::output::Output;
use crate::table::table;

/// Entries in both forms, the latest first.
pub(crate) fn audit(entries: &[AuditEntry]) -> Output {
    let rows: Vec<Vec<String>> = entries
        .iter()
        .map(|entry| {
            let at = json!(entry)["at"].as_str().unwrap_or("-").to_owned();
            vec![
                entry.id.to_string(),
                at,
                entry.who.clone(),
                entry.action.clone(),
                fields(&entry.subject),
                entry.after.as_ref().map(setting).unwrap_or_default(),
                entry.why.clone(),
            ]
        })
        .collect();
    let text = match rows.is_empty() {
        true => "there are no entries".to_owned(),
        false => table(&["NUMBER", "AT", "WHO", "WHAT", "OF", "SET", "WHY"], &rows),
    };
    Output::well(text, json!({ "entries": entries }))
}

/// What was set by a change at run time: its fields that the other columns do not have.
fn setting(after: &Value) -> String {
    let shown = [
        "rate", "burst", "running", "per", "tier", "priority", "until",
    ];
    let of_control = after.get("kind").and(after.as_object());
    let shown = of_control
        .into_iter()
        .flatten()
        .filter(|(name, value)| shown.contains(&name.as_str()) && !value.is_null());
    let shown: serde_json::Map<String, Value> = shown
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    match after["kind"].as_str() {
        Some("limit") if shown.is_empty() => "no limit".to_owned(),
        _ => fields(&Value::Object(shown)),
    }
}

/// `task mail.send` of `{"task": "mail.send"}`.
fn fields(value: &Value) -> String {
    let Some(object) = value.as_object() else {
        return value.to_string();
    };
    let fields = object.iter().map(|(name, value)| match value.as_str() {
        Some(text) => format!("{name} {text}"),
        None => format!("{name} {value}"),
    });
    fields.collect::<Vec<_>>().join(", ")
}
