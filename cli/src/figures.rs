//! Figures in few characters.

use std::time::Duration;

use tierline::stats::{Count, OldestWait, TierStats};

/// What is not known.
pub(crate) const UNKNOWN: &str = "-";

/// `7 ms`, `4.2 s`, `95 s`, `12 min`, `3.5 h`, `2 d`.
pub(crate) fn duration(time: Duration) -> String {
    match time.as_secs_f64() {
        0.0 => "0 s".to_owned(),
        seconds if seconds < 0.001 => "<1 ms".to_owned(),
        seconds if seconds < 0.9995 => format!("{:.0} ms", seconds * 1_000.0),
        seconds if seconds < 9.95 && time.subsec_millis() > 0 => format!("{seconds:.1} s"),
        seconds if seconds < 120.0 => format!("{seconds:.0} s"),
        seconds if seconds < 7_200.0 => format!("{:.0} min", seconds / 60.0),
        seconds if seconds < 36_000.0 => format!("{:.1} h", seconds / 3_600.0),
        seconds if seconds < 172_800.0 => format!("{:.0} h", seconds / 3_600.0),
        seconds => format!("{:.0} d", seconds / 86_400.0),
    }
}

pub(crate) fn some_duration(time: Option<Duration>) -> String {
    time.map_or(UNKNOWN.to_owned(), duration)
}

/// `≈ 12 s`: an estimate.
pub(crate) fn oldest(oldest: Option<OldestWait>) -> String {
    match oldest {
        Some(oldest) if oldest.is_estimate => format!("≈ {}", duration(oldest.age)),
        Some(oldest) => duration(oldest.age),
        None => UNKNOWN.to_owned(),
    }
}

pub(crate) fn count(count: Option<Count>) -> String {
    count.map_or(UNKNOWN.to_owned(), |count| count.to_string())
}

pub(crate) fn number(number: Option<u64>) -> String {
    number.map_or(UNKNOWN.to_owned(), |number| thousands(number).to_string())
}

/// `12,345`.
pub(crate) fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Of tasks in a second.
pub(crate) fn rate(rate: Option<f64>) -> String {
    match rate {
        None => UNKNOWN.to_owned(),
        Some(rate) if rate >= 99.5 => thousands(rate.round() as u64),
        Some(rate) if rate >= 9.95 => format!("{rate:.0}"),
        Some(rate) if rate >= 0.095 || rate == 0.0 => format!("{rate:.1}"),
        Some(rate) => format!("{rate:.2}"),
    }
}

/// `87%`, `99.95%`.
pub(crate) fn share(share: Option<f64>) -> String {
    match share.map(|share| share * 100.0) {
        None => UNKNOWN.to_owned(),
        Some(percent) if percent > 99.0 && percent < 100.0 => {
            // What is not all is never shown as all.
            format!("{:.2}%", (percent * 100.0).floor() / 100.0)
        }
        Some(percent) if percent < -999.0 => "<-999%".to_owned(),
        Some(percent) => format!("{percent:.0}%"),
    }
}

/// Whether the 99th percentile of waits is within the SLO of the tier; `None` where either is missing.
pub(crate) fn keeps_slo(tier: &TierStats) -> Option<bool> {
    Some(tier.wait_p99? <= tier.slo?.start)
}

/// What is out of the ordinary about a tier, the most urgent first.
pub(crate) fn notes(tier: &TierStats) -> Vec<String> {
    let mut notes = Vec::new();
    let some = |count: Option<Count>| count.filter(|count| count.count > 0);
    if let Some(pause) = &tier.paused {
        let what = if pause.of_group {
            "group paused"
        } else {
            "paused"
        };
        notes.push(match pause.who.as_str() {
            "" => what.to_owned(),
            who => format!("{what} by {who}"),
        });
    } else if tier.consumers == Some(0) {
        notes.push("no consumers".to_owned());
    }
    if let Some(rows) = some(tier.relay_waiting) {
        notes.push(format!("{rows} rows wait for a relay"));
    }
    if let Some(limit) = &tier.limit {
        let full = match limit.is_saturated {
            Some(true) => "at its limit",
            _ => "limit",
        };
        notes.push(format!("{full} {}", limit.limit));
    }
    if let Some(rows) = some(tier.quarantined) {
        notes.push(format!("{rows} in quarantine"));
    }
    if let Some(rows) = some(tier.parked) {
        notes.push(format!("{rows} parked"));
    }
    let delayed = tier.delayed_messages.filter(|messages| *messages > 0);
    match (some(tier.scheduled), delayed) {
        (None, None) => {}
        (Some(rows), None) => notes.push(format!("{rows} scheduled")),
        (None, Some(messages)) => notes.push(format!("{} delayed", thousands(messages))),
        (Some(rows), Some(messages)) => {
            notes.push(format!("{rows} scheduled, {} delayed", thousands(messages)));
        }
    }
    if let Some(dead) = &tier.dead {
        let uncollected = dead.uncollected.unwrap_or_default();
        if uncollected > 0 {
            notes.push(format!(
                "{} dead letters not collected",
                thousands(uncollected)
            ));
        }
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_short() {
        let shown = |millis| duration(Duration::from_millis(millis));
        assert_eq!(shown(0), "0 s");
        assert_eq!(shown(7), "7 ms");
        assert_eq!(shown(999), "999 ms");
        assert_eq!(shown(4_200), "4.2 s");
        assert_eq!(shown(5_000), "5 s");
        assert_eq!(shown(95_000), "95 s");
        assert_eq!(shown(720_000), "12 min");
        assert_eq!(shown(12_600_000), "3.5 h");
        assert_eq!(shown(259_200_000), "3 d");
    }

    #[test]
    fn rates_and_shares_have_the_digits_that_matter() {
        let rates = [0.0, 0.03, 0.5, 12.3, 1_234.5].map(|it| rate(Some(it)));
        assert_eq!(rates, ["0.0", "0.03", "0.5", "12", "1,235"]);
        assert_eq!(rate(None), "-");
        let shares = [1.0, 0.999_99, 0.87, 0.0, -0.5, -30.0].map(|it| share(Some(it)));
        assert_eq!(shares, ["100%", "99.99%", "87%", "0%", "-50%", "<-999%"]);
    }
}
