//! Dead letters as text.

use std::fmt::Write;
use std::time::SystemTime;

use serde_json::{Value, json};
use tierline::dead::{Assessment, DeadLetter, FailureGroup, Listed, Operation, TierCount};

use crate::table::{plain, table};

pub(crate) fn list(listed: &Listed) -> String {
    if listed.letters.is_empty() {
        return "no dead letters".to_owned();
    }
    let rows: Vec<Vec<String>> = listed
        .letters
        .iter()
        .map(|letter| {
            vec![
                letter.id.to_string(),
                ago(letter.died_at),
                letter.tier.clone(),
                letter.task.clone().unwrap_or_else(|| "?".to_owned()),
                letter.reason.to_string(),
                letter.state.to_string(),
                letter.fingerprint.clone(),
                letter.error.clone().unwrap_or_default(),
            ]
        })
        .collect();
    let head = [
        "ID", "DIED", "TIER", "TASK", "REASON", "STATE", "GROUP", "ERROR",
    ];
    let mut text = table(&head, &rows);
    if let Some(next) = &listed.next {
        let _ = write!(text, "more: --after {next}");
    }
    text
}

pub(crate) fn groups(groups: &[FailureGroup]) -> String {
    if groups.is_empty() {
        return "no dead letters".to_owned();
    }
    let rows: Vec<Vec<String>> = groups
        .iter()
        .map(|group| {
            let word = |value: &Value| value.as_str().unwrap_or_default().replace('_', " ");
            let sample = &group.sample;
            vec![
                group.count.to_string(),
                group.fingerprint.clone(),
                ago(group.first_seen),
                ago(group.last_seen),
                sample.task.clone().unwrap_or_else(|| "?".to_owned()),
                word(&json!(group.assessment.root_cause)),
                word(&json!(group.assessment.advice)),
                sample.error.clone().unwrap_or_default(),
            ]
        })
        .collect();
    let head = [
        "COUNT", "GROUP", "FIRST", "LAST", "TASK", "CAUSE", "ADVICE", "ERROR",
    ];
    let mut text = table(&head, &rows);
    for group in groups {
        let because = plain(&group.assessment.because);
        let _ = writeln!(text, "{}: {because}", group.fingerprint);
    }
    text
}

pub(crate) fn tiers(tiers: &[TierCount]) -> String {
    let rows: Vec<Vec<String>> = tiers
        .iter()
        .map(|tier| {
            vec![
                tier.tier.clone(),
                tier.dead.to_string(),
                tier.redriving.to_string(),
                tier.redriven.to_string(),
                tier.discarded.to_string(),
            ]
        })
        .collect();
    table(
        &["TIER", "DEAD", "REDRIVING", "REDRIVEN", "DISCARDED"],
        &rows,
    )
}

/// All fields, a line for each.
pub(crate) fn letter(letter: &DeadLetter, assessment: &Assessment) -> String {
    let mut text = String::new();
    let mut shown = json!(letter);
    shown["assessment"] = json!(assessment.because);
    if let Value::Object(fields) = shown {
        for (name, value) in fields {
            let value = match value {
                Value::Null => continue,
                Value::String(text) => text,
                other => other.to_string(),
            };
            let _ = writeln!(text, "{name:<15} {}", plain(&value));
        }
    }
    text
}

pub(crate) fn operation(operation: &Operation) -> String {
    let state = json!(operation.state);
    let state = state.as_str().unwrap_or_default();
    let mut text = format!(
        "operation {} is {state}: {} of {} done",
        operation.id, operation.done, operation.total
    );
    if operation.failed + operation.refused > 0 {
        let (failed, refused) = (operation.failed, operation.refused);
        let _ = write!(text, ", {failed} failed, {refused} refused");
    }
    if !operation.note.is_empty() {
        let _ = write!(text, " ({})", plain(&operation.note));
    }
    text
}

/// The time since then, in its largest unit.
fn ago(time: SystemTime) -> String {
    let seconds = SystemTime::now()
        .duration_since(time)
        .unwrap_or_default()
        .as_secs();
    match seconds {
        0..60 => format!("{seconds}s ago"),
        60..3_600 => format!("{}m ago", seconds / 60),
        3_600..86_400 => format!("{}h ago", seconds / 3_600),
        _ => format!("{}d ago", seconds / 86_400),
    }
}
