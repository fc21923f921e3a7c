//! Times in filters and in JSON: RFC 3339 in UTC, to the millisecond.

use std::time::SystemTime;

use jiff::Timestamp;
use serde::{Deserialize, Deserializer, Serializer, de};

use crate::Error;
use crate::error::DeadLetterError;
use crate::task::IntoDuration;

/// The latest time that can be written; a later one is written as this.
const LATEST: u64 = 253_402_300_799;

fn text(time: SystemTime) -> String {
    let latest = SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(LATEST);
    let time = time.clamp(SystemTime::UNIX_EPOCH, latest);
    humantime::format_rfc3339_millis(time).to_string()
}

/// The form that [`parse`] accepts, as a regular expression for JSON Schema. It also matches days that do not exist.
#[cfg(feature = "admin")]
pub(crate) const TIME_PATTERN: &str = "^[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}\
    (\\.[0-9]{1,9})?(Z|[+-][0-9]{2}:[0-9]{2})$";

/// RFC 3339. The offset is required: without one the time zone is unknown.
fn parse(text: &str) -> Result<SystemTime, String> {
    let parsed = has_form(text).then(|| text.parse::<Timestamp>().ok());
    let parsed = parsed.flatten().map(SystemTime::from);
    // Postgres' calendar has other limits. No dead letter is older than 1970.
    let parsed = parsed.filter(|time| *time >= SystemTime::UNIX_EPOCH);
    parsed.ok_or_else(|| format!("{text:?} is not a time such as 2026-01-31T10:00:00Z"))
}

/// Whether a text has the form of RFC 3339; jiff's parser accepts many others.
fn has_form(text: &str) -> bool {
    let is = |text: &str, form: &str| {
        let mut pairs = text.bytes().zip(form.bytes());
        let digit = |(byte, form): (u8, u8)| match form {
            b'0' => byte.is_ascii_digit(),
            form => byte == form,
        };
        text.len() == form.len() && pairs.all(digit)
    };
    let Some((begin, rest)) = text.split_at_checked("2026-01-31T10:00:00".len()) else {
        return false;
    };
    let offset = match rest.strip_prefix('.') {
        Some(fraction) => {
            let offset = fraction.trim_start_matches(|c: char| c.is_ascii_digit());
            match fraction.len() - offset.len() {
                1..=9 => offset,
                _ => return false,
            }
        }
        None => rest,
    };
    (is(begin, "0000-00-00T00:00:00") || is(begin, "0000-00-00 00:00:00"))
        && (offset == "Z" || is(offset, "+00:00") || is(offset, "-00:00"))
}

/// Parses a point in time as people write it: `24h` for 24 hours ago, or `2026-01-31T10:00:00Z`.
pub(super) fn parse_time(text: &str) -> Result<SystemTime, Error> {
    let now = SystemTime::now();
    if let Ok(before) = text.into_duration() {
        return Ok(now
            .checked_sub(before)
            .map_or(SystemTime::UNIX_EPOCH, |time| {
                time.max(SystemTime::UNIX_EPOCH)
            }));
    }
    parse(text).map_err(|problem| {
        Error::DeadLetter(DeadLetterError::InvalidFilter {
            problem: format!("{problem} or a duration such as 24h").into(),
        })
    })
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

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    /// Texts, and how many milliseconds after 1970 each is; `None`: it is refused.
    const TIMES: [(&str, Option<u64>); 17] = [
        ("1970-01-01T00:00:00Z", Some(0)),
        ("2026-01-31T10:00:00Z", Some(1_769_853_600_000)),
        ("2026-01-31 10:00:00Z", Some(1_769_853_600_000)),
        ("2026-10-20T23:59:09.250Z", Some(1_792_540_749_250)),
        ("2026-01-31T10:00:00+02:00", Some(1_769_846_400_000)),
        ("2026-01-31T10:00:00.5-02:00", Some(1_769_860_800_500)),
        ("2026-01-31T10:00:00", None),
        ("2026-01-31T10:00Z", None),
        ("2026-01-31", None),
        ("20260131T100000Z", None),
        ("2026-02-30T10:00:00Z", None),
        ("2026-01-31T10:00:00Zulu", None),
        ("2026-01-31T10:00:00.Z", None),
        ("2026-01-31T10:00:00+02:00[Europe/Rome]", None),
        ("1969-12-31T23:59:59Z", None),
        ("-009999-01-31T10:00:00Z", None),
        ("yesterday", None),
    ];

    #[test]
    fn a_time_is_read_with_its_offset_or_refused() {
        for (text, expected) in TIMES {
            let expected = expected.map(|after| UNIX_EPOCH + Duration::from_millis(after));
            assert_eq!(parse(text).ok(), expected, "{text:?}");
        }
    }

    #[cfg(feature = "admin")]
    #[test]
    fn the_pattern_matches_every_time_that_is_read() {
        let pattern = regex::Regex::new(TIME_PATTERN).unwrap();
        for (text, expected) in TIMES {
            // It knows neither the calendar nor 1970.
            let is_form = text.starts_with("2026-02-30") || text.starts_with("1969");
            assert_eq!(
                pattern.is_match(text),
                expected.is_some() || is_form,
                "{text:?}"
            );
        }
    }
}
