//! The failed attempts of a message, in one header.

use lapin::types::AMQPValue;
use serde::{Deserialize, Serialize};

use super::dead::{MAX_IN_LIST, json_list, that_fit};
use super::fields::{cut, long, milliseconds, text, time};
use crate::message::{FailedAttempt, FailureKind};

#[derive(Serialize, Deserialize)]
struct HistoryEntry {
    attempt: u32,
    at: i64,
    kind: String,
    error: String,
}

/// The latest attempts, as many as fit.
pub(super) fn history_text(history: &[FailedAttempt]) -> AMQPValue {
    let latest_first = history.iter().rev().map(|failed| HistoryEntry {
        attempt: failed.attempt,
        at: milliseconds(failed.at),
        kind: failed.kind.as_str().to_owned(),
        error: cut(&failed.error, MAX_IN_LIST).to_owned(),
    });
    let mut entries = that_fit(latest_first);
    entries.reverse();
    long(&json_list(&entries))
}

pub(super) fn history(value: Option<&AMQPValue>) -> Vec<FailedAttempt> {
    let entries: Option<Vec<HistoryEntry>> = value
        .and_then(text)
        .and_then(|text| serde_json::from_str(&text).ok());
    let read = |entry: HistoryEntry| FailedAttempt {
        attempt: entry.attempt,
        at: time(entry.at),
        kind: FailureKind::parse(&entry.kind).unwrap_or(FailureKind::Error),
        error: entry.error,
    };
    entries.unwrap_or_default().into_iter().map(read).collect()
}
