//! Durations and sizes as people write them.

use std::time::Duration;

/// A duration in the file, in whole milliseconds, because that is what the broker counts in.
pub(super) fn parse_milliseconds(text: &str) -> Result<Duration, String> {
    let duration = parse_duration(text)?;
    if duration.subsec_nanos() % 1_000_000 != 0 {
        return Err("the broker counts in milliseconds; round it to 1ms".to_owned());
    }
    Ok(duration)
}

/// What [`parse_duration`] reads, as a regular expression for JSON Schema. It also matches numbers that are too
/// large for it.
#[cfg(feature = "admin")]
pub(crate) const DURATION_PATTERN: &str = "^\\s*([0-9]+(\\.[0-9]+)?\\s*(ns|nsec|nanos|us|usec|µs|ms|msec|millis\
    |s|sec|secs|second|seconds|m|min|mins|minute|minutes|h|hr|hrs|hour|hours|d|day|days|w|wk|wks|week|weeks)\\s*)+$";

/// The one grammar of durations: numbers, whole or with a fraction, each with a unit from `ns` to `w` or its
/// word, such as `"100ms"`, `"1h 30m"`, `"1.5h"` or `"5 sec"`.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    // "5 0s" would be 50 seconds.
    if has_gap(text) {
        return Err(
            "there is a space within a number; close it, or give both parts a unit".to_owned(),
        );
    }
    // "5M" would be five months, and nobody who writes it here means that.
    let mut units = text.split(|c: char| !c.is_alphabetic());
    if units.any(|unit| unit == "M" || unit.starts_with("mon") || unit.starts_with('y')) {
        return Err(
            "months and years have no fixed length; write m for minutes, d for days".to_owned(),
        );
    }
    // humantime reads it as no time at all.
    if text == "0" {
        return Err("the unit is missing; write \"0s\"".to_owned());
    }
    humantime::parse_duration(text).map_err(|error| match error {
        humantime::DurationError::UnknownUnit { unit, value, .. } if !unit.is_empty() => {
            format!("{unit:?} is no unit; write {value} with ms, s, m, h or d")
        }
        humantime::DurationError::UnknownUnit { value, .. } => {
            format!("the unit is missing; write \"{value}ms\", \"{value}s\", \"{value}m\", \"{value}h\" or \"{value}d\"")
        }
        _ => "write numbers with units, such as \"100ms\", \"5s\", \"1h30m\" or \"30d\"".to_owned(),
    })
}

/// Whether a space divides a number.
fn has_gap(text: &str) -> bool {
    let is_number = |c: char| c.is_ascii_digit() || c == '.';
    let words: Vec<&str> = text.split_whitespace().collect();
    let mut pairs = words.windows(2);
    pairs.any(|pair| pair[0].ends_with(is_number) && pair[1].starts_with(is_number))
}

/// A duration as the file would write it.
pub(crate) fn show_duration(duration: Duration) -> String {
    const UNITS: [(u128, &str); 4] = [
        (86_400_000, "d"),
        (3_600_000, "h"),
        (60_000, "m"),
        (1_000, "s"),
    ];
    let mut rest = duration.as_millis();
    let mut text = String::new();
    for (length, unit) in UNITS {
        if rest >= length {
            text.push_str(&format!("{}{unit}", rest / length));
            rest %= length;
        }
    }
    if rest > 0 || text.is_empty() {
        text.push_str(&format!("{rest}ms"));
    }
    text
}

/// A size in the file: one number and one unit, `"512KiB"` or `"16MiB"`.
pub(super) fn parse_size(text: &str) -> Result<u64, String> {
    const UNITS: [(&str, u64); 4] = [
        ("GiB", 1 << 30),
        ("MiB", 1 << 20),
        ("KiB", 1 << 10),
        ("B", 1),
    ];
    UNITS
        .iter()
        .find_map(|(unit, length)| {
            let number: u64 = text.strip_suffix(unit)?.trim().parse().ok()?;
            number.checked_mul(*length)
        })
        .ok_or_else(|| "write one number and B, KiB, MiB or GiB, such as \"16MiB\"".to_owned())
}

/// A size as the file would write it.
pub(super) fn show_size(bytes: u64) -> String {
    match bytes {
        bytes if bytes > 0 && bytes % (1 << 20) == 0 => format!("{}MiB", bytes >> 20),
        bytes if bytes > 0 && bytes % (1 << 10) == 0 => format!("{}KiB", bytes >> 10),
        bytes => format!("{bytes}B"),
    }
}

/// The texts that every parser of durations is tested with, and how many milliseconds each is; `None`: it is
/// refused.
#[cfg(test)]
pub(crate) fn durations() -> impl Iterator<Item = (&'static str, Option<u64>)> {
    let lines = include_str!("../../tests/durations.txt").lines();
    let lines = lines.filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| line.split_once(' '))
        .map(|(milliseconds, text)| {
            // The second column begins where the first is full.
            (text.trim_start_matches(' '), milliseconds.parse().ok())
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_as_people_write_them() {
        for (text, milliseconds) in durations() {
            let expected = milliseconds.map(Duration::from_millis);
            assert_eq!(parse_duration(text).ok(), expected, "{text:?}");
        }
    }

    #[cfg(feature = "admin")]
    #[test]
    fn the_pattern_matches_what_is_read() {
        let pattern = regex::Regex::new(DURATION_PATTERN).unwrap();
        for (text, milliseconds) in durations() {
            let is_too_large = text.starts_with("999");
            let expected = milliseconds.is_some() || is_too_large;
            assert_eq!(pattern.is_match(text), expected, "{text:?}");
        }
        let units = "ns|usec|ms|s|sec|seconds|m|mins|h|hours|d|days|w|week|M|y|x";
        let text = format!("( ?[0-9.]{{0,3}} ?({units})?){{0,3}}");
        proptest::proptest!(|(text in text.as_str())| {
            if parse_duration(&text).is_ok() {
                proptest::prop_assert!(pattern.is_match(&text), "{text:?}");
            }
        });
    }

    #[test]
    fn a_duration_without_a_unit_says_how_to_write_it() {
        assert_eq!(
            parse_duration("5").unwrap_err(),
            r#"the unit is missing; write "5ms", "5s", "5m", "5h" or "5d""#
        );
        assert_eq!(
            parse_duration("5 parsecs").unwrap_err(),
            r#""parsecs" is no unit; write 5 with ms, s, m, h or d"#
        );
        for junk in ["", "s", "-5s", "five", "99999999999999999999d"] {
            assert!(
                parse_duration(junk).unwrap_err().contains("\"1h30m\""),
                "{junk}"
            );
        }
    }

    #[test]
    fn months_and_years_are_refused() {
        for text in ["5M", "1month", "1y", "2years 1d"] {
            assert!(
                parse_duration(text)
                    .unwrap_err()
                    .contains("no fixed length"),
                "{text}"
            );
        }
    }

    #[test]
    fn a_part_of_a_millisecond_is_refused() {
        assert!(
            parse_milliseconds("1500us")
                .unwrap_err()
                .contains("milliseconds")
        );
    }

    #[test]
    fn durations_are_shown_as_they_are_written() {
        for text in ["0ms", "100ms", "5s", "1h30m", "30d", "49d17h2m47s295ms"] {
            assert_eq!(show_duration(parse_duration(text).unwrap()), text);
        }
    }

    #[test]
    fn sizes_read_as_people_write_them() {
        for (text, bytes) in [
            ("100B", 100),
            ("512KiB", 524_288),
            ("16MiB", 16_777_216),
            ("1 GiB", 1 << 30),
        ] {
            assert_eq!(parse_size(text), Ok(bytes));
        }
        for junk in [
            "",
            "16",
            "MiB",
            "16MB",
            "-1B",
            "99999999999999999999B",
            "18446744073709551615GiB",
        ] {
            assert!(parse_size(junk).is_err(), "{junk}");
        }
        assert_eq!(
            [show_size(16 << 20), show_size(1536), show_size(1)],
            ["16MiB", "1536B", "1B"].map(String::from)
        );
    }
}
