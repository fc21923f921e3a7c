//! Times in JSON: RFC 3339 in UTC, to the millisecond.

use std::time::SystemTime;

use serde::{Deserialize, Deserializer, Serializer, de};

use crate::task::IntoDuration;

/// The latest that is written; what is later is written as this.
const LATEST: u64 = 253_402_300_799;

fn text(time: SystemTime) -> String {
    let latest = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(LATEST);
    let time = time.clamp(SystemTime::UNIX_EPOCH, latest);
    humantime::format_rfc3339_millis(time).to_string()
}

fn parse(text: &str) -> Result<SystemTime, String> {
    let parsed = humantime::parse_rfc3339_weak(text).ok();
    // Postgres' calendar begins and ends elsewhere, and nobody asks for those days.
    let parsed = parsed.filter(|time| *time >= SystemTime::UNIX_EPOCH);
    parsed.ok_or_else(|| format!("{text:?} is no time such as 2026-01-31T10:00:00Z"))
}

/// A point in time as people write it: `24h` for so long before `now`, or `2026-01-31T10:00:00Z`.
///
/// ```
/// use std::time::{Duration, SystemTime};
/// use tierline::dead::parse_time;
///
/// let now = SystemTime::now();
/// assert_eq!(parse_time("24h", now), Ok(now - Duration::from_secs(86_400)));
/// assert!(parse_time("2026-01-31T10:00:00Z", now).is_ok());
/// assert!(parse_time("yesterday", now).is_err());
/// ```
///
/// # Errors
/// What is wrong, in words.
pub fn parse_time(text: &str, now: SystemTime) -> Result<SystemTime, String> {
    if let Ok(before) = text.into_duration() {
        return Ok(now
            .checked_sub(before)
            .map_or(SystemTime::UNIX_EPOCH, |time| {
                time.max(SystemTime::UNIX_EPOCH)
            }));
    }
    parse(text).map_err(|problem| format!("{problem}, nor a span such as 24h"))
}

pub(super) fn serialize<S: Serializer>(time: &SystemTime, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_str(&text(*time))
}

pub(super) mod optional {
    use super::*;

    pub(in crate::dead) fn serialize<S: Serializer>(
        time: &Option<SystemTime>,
        out: S,
    ) -> Result<S::Ok, S::Error> {
        match time {
            Some(time) => super::serialize(time, out),
            None => out.serialize_none(),
        }
    }

    pub(in crate::dead) fn deserialize<'de, D: Deserializer<'de>>(
        input: D,
    ) -> Result<Option<SystemTime>, D::Error> {
        let text = Option::<String>::deserialize(input)?;
        let time = text.map(|text| super::parse(&text)).transpose();
        time.map_err(de::Error::custom)
    }
}
