//! A cron pattern on the clock of a time zone.
//!
//! The pattern knows the clock on the wall alone. Between two changes of that clock the offset from
//! UTC is constant; so the search goes from one such stretch to the next, and what a change skips or
//! repeats is decided here, in one place, for changes of any size.

use croner::Cron;
use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::{Offset, TimeZone};

#[derive(Clone)]
pub(crate) struct Wall {
    pattern: Box<Cron>,
    zone: TimeZone,
    /// Whether runs are at fixed times of the day. A fixed run that a change of the clock skips is
    /// due right after it, and one that it repeats is due the first time only. Others follow the
    /// clock.
    is_fixed: bool,
}

/// A change of the clock.
struct Change {
    at: Timestamp,
    /// What the clock would have shown.
    from: DateTime,
    /// What it shows.
    to: DateTime,
}

impl Wall {
    pub(super) fn new(pattern: Cron, expression: &str, zone: TimeZone) -> Self {
        Self {
            pattern: Box::new(pattern),
            zone,
            is_fixed: is_fixed(expression),
        }
    }

    pub(super) fn pattern(&self) -> &Cron {
        &self.pattern
    }

    pub(super) fn zone(&self) -> &TimeZone {
        &self.zone
    }

    /// The first run after `at`.
    pub(super) fn next_after(&self, at: Timestamp) -> Option<Timestamp> {
        let (mut from, mut inclusive) = (at, false);
        loop {
            let offset = self.zone.to_offset(from);
            let mut wall = offset.to_datetime(from);
            if let Some(repeated) = self.repeated_until(from)
                && wall < repeated
            {
                (wall, inclusive) = (repeated, true);
            }
            let run = self.pattern.find_next_occurrence(&wall, inclusive).ok()?;
            let due = offset.to_timestamp(run).ok()?;
            let Some(change) = self
                .change_after(from, offset)
                .filter(|next| due >= next.at)
            else {
                return Some(due);
            };
            if self.is_fixed && run < change.to {
                return Some(change.at);
            }
            (from, inclusive) = (change.at, true);
        }
    }

    /// The latest run at `at` or before.
    #[cfg(any(feature = "postgres", test))]
    pub(super) fn latest_until(&self, at: Timestamp) -> Option<Timestamp> {
        let mut until = at;
        loop {
            let offset = self.zone.to_offset(until);
            let wall = offset.to_datetime(until);
            let run = self.pattern.find_previous_occurrence(&wall, true).ok()?;
            let due = offset.to_timestamp(run).ok()?;
            let Some(change) = self.change_until(until) else {
                return Some(due);
            };
            let is_repeated = self.is_fixed && run < change.from;
            if due >= change.at && !is_repeated {
                return Some(due);
            }
            if self.is_fixed && change.from < change.to {
                let skipped = self.pattern.find_next_occurrence(&change.from, true).ok();
                if skipped.is_some_and(|skipped| skipped < change.to) {
                    return Some(change.at);
                }
            }
            until = change.at - jiff::SignedDuration::from_nanos(1);
        }
    }

    /// Until when the clock shows, at `at`, what it has shown before: fixed runs were due then.
    fn repeated_until(&self, at: Timestamp) -> Option<DateTime> {
        let change = self.is_fixed.then(|| self.change_until(at)).flatten()?;
        (change.to < change.from).then_some(change.from)
    }

    fn change_after(&self, at: Timestamp, offset: Offset) -> Option<Change> {
        let next = self.zone.following(at).next()?;
        Some(Change::new(next.timestamp(), offset, next.offset()))
    }

    fn change_until(&self, at: Timestamp) -> Option<Change> {
        let just_after = at.checked_add(jiff::SignedDuration::from_nanos(1)).ok()?;
        let last = self.zone.preceding(just_after).next()?;
        let just_before = last.timestamp() - jiff::SignedDuration::from_nanos(1);
        let before = self.zone.to_offset(just_before);
        Some(Change::new(last.timestamp(), before, last.offset()))
    }
}

impl Change {
    fn new(at: Timestamp, before: Offset, after: Offset) -> Self {
        Self {
            at,
            from: before.to_datetime(at),
            to: after.to_datetime(at),
        }
    }
}

/// Whether no part for the time of day goes round the clock, as in `*` and `*/5`.
fn is_fixed(expression: &str) -> bool {
    let parts: Vec<&str> = expression.split_whitespace().collect();
    let of_the_day = match parts.as_slice() {
        [nickname] => return !nickname.eq_ignore_ascii_case("@hourly"),
        parts => parts.len().saturating_sub(3),
    };
    !parts.iter().take(of_the_day).any(|part| part.contains('*'))
}
