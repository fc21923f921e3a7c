//! When a message was enqueued: in a header, or in the id that its publish drew.

use std::time::{Duration, SystemTime};

use lapin::BasicProperties;
use lapin::types::FieldTable;

use super::fields::{integer, milliseconds, time};
use super::version;
use crate::message::identity;
use crate::task::TaskId;

pub(super) const ENQUEUED_AT: &str = "tierline-enqueued-at";

/// How far the clock of a publisher may be ahead of ours. A time beyond that is no time of a publish: anybody can
/// write an id of the year 10889.
const AHEAD: Duration = Duration::from_secs(24 * 60 * 60);

/// When the publisher of a message that arrived at `now` says that it enqueued it, if it does.
pub(crate) fn stated_enqueued_at(
    properties: &BasicProperties,
    now: SystemTime,
) -> Option<SystemTime> {
    let empty = FieldTable::default();
    let headers = properties.headers().as_ref().unwrap_or(&empty).inner();
    match headers.get(ENQUEUED_AT) {
        Some(header) => integer(Some(header)).map(time),
        // An id of version 1 is a text like any other.
        None if version(headers) == 1 => None,
        None => {
            let drawn = identity::id(properties).and_then(TaskId::drawn_time)?;
            (drawn <= now.checked_add(AHEAD)?).then_some(drawn)
        }
    }
}

/// Whether a reader finds this time in an id, to the millisecond.
pub(super) fn has_time(id: &TaskId, time: SystemTime) -> bool {
    let drawn = TaskId::drawn_time(id.as_str());
    drawn.is_some_and(|drawn| milliseconds(drawn) == milliseconds(time))
}
