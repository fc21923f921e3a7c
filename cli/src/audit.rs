//! The audit log: what operators did.

use serde_json::json;
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
                entry.subject.to_string(),
                entry.why.clone(),
            ]
        })
        .collect();
    let text = match rows.is_empty() {
        true => "there are no entries".to_owned(),
        false => table(&["NUMBER", "AT", "WHO", "WHAT", "OF", "WHY"], &rows),
    };
    Output::well(text, json!({ "entries": entries }))
}
