//! Times in JSON: RFC 3339 in UTC, to the millisecond.

use std::time::SystemTime;

use serde::{Deserialize, Deserializer, Serializer, de};

/// The latest that is written; what is later is written as this.
const LATEST: u64 = 253_402_300_799;

pub(crate) fn text(time: SystemTime) -> String {
    let latest = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(LATEST);
    let time = time.clamp(SystemTime::UNIX_EPOCH, latest);
    humantime::format_rfc3339_millis(time).to_string()
}

pub(crate) fn parse(text: &str) -> Result<SystemTime, String> {
    humantime::parse_rfc3339_weak(text)
        .map_err(|_| format!("{text:?} is no time such as 2026-01-31T10:00:00Z"))
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
