//! Decides what to do about a schedule that is due. Pure.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use crate::topology::{Missed, Schedule};

/// The largest number of runs that are counted as missed at once. A schedule of every second that no
/// scheduler served for years must not delay the others.
const MOST_COUNTED: u64 = 100_000;

/// If the clock steps back by less than this, runs wait until it has caught up. After a longer step, for
/// example after it was a year ahead, runs follow the new time, even if their ids repeat.
const LONGEST_STEP_BACK: SignedDuration = SignedDuration::from_hours(1);

/// The decision about a schedule that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Decision {
    /// The run to publish, if any: always the newest.
    pub(super) publish: Option<Timestamp>,
    /// The newest run that is due.
    pub(super) newest: Timestamp,
    /// How many runs are skipped.
    pub(super) missed: u64,
    /// When the schedule is due again.
    pub(super) next: Option<Timestamp>,
}

impl Decision {
    /// The part of the decision that holds even if the newest run could not be published: that run stays due.
    pub(super) fn older_only(self, schedule: &Schedule) -> Option<Self> {
        let before = self.newest - SignedDuration::from_nanos(1);
        let older = schedule.timing.latest_until(before, &schedule.name)?;
        (self.missed > 0).then_some(Self {
            publish: None,
            newest: older,
            next: Some(self.newest),
            ..self
        })
    }
}

/// Decides at `now` about a schedule whose first pending run is `next_due`. A scheduler has been running
/// since `led_since`. `None`: it is not due.
pub(super) fn decide(
    schedule: &Schedule,
    next_due: Timestamp,
    now: Timestamp,
    led_since: Timestamp,
) -> Option<Decision> {
    if next_due > now {
        return None;
    }
    let Schedule { name, timing, .. } = schedule;
    let newest = timing
        .latest_until(now, name)
        .map_or(next_due, |latest| latest.max(next_due));
    let due = timing.count(next_due, newest, name, MOST_COUNTED).max(1);
    let came_while_led = newest >= led_since;
    let is_wanted = came_while_led || schedule.missed == Missed::Once;
    let publish = (is_wanted && now < expiry(schedule, newest)).then_some(newest);
    Some(Decision {
        publish,
        newest,
        missed: due - u64::from(publish.is_some()),
        next: timing.next_after(newest, name),
    })
}

/// The corrected due time of a waiting schedule, if its stored `next_due` comes from another clock or another
/// edition of the time zones. `None`: it is correct.
pub(super) fn corrected(
    schedule: &Schedule,
    next_due: Timestamp,
    last_due: Option<Timestamp>,
    now: Timestamp,
) -> Option<Option<Timestamp>> {
    if next_due <= now {
        return None;
    }
    let done = last_due.filter(|last| last.duration_since(now) < LONGEST_STEP_BACK);
    let after = done.map_or(now, |done| done.max(now));
    let expected = schedule.timing.next_after(after, &schedule.name);
    (expected != Some(next_due)).then_some(expected)
}

/// Whether the clock stepped back so far that all due times must be checked again.
pub(super) fn is_step_back(before: Timestamp, now: Timestamp) -> bool {
    before.duration_since(now) >= LONGEST_STEP_BACK
}

/// When a run expires.
pub(super) fn expiry(schedule: &Schedule, due: Timestamp) -> Timestamp {
    due.checked_add(schedule.expires).unwrap_or(Timestamp::MAX)
}

/// How long from `now` until a run expires.
pub(super) fn remaining(schedule: &Schedule, due: Timestamp, now: Timestamp) -> Duration {
    let remaining = expiry(schedule, due).duration_since(now);
    Duration::try_from(remaining).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::topology::Timing;

    fn time(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    fn schedule(cron: &str, expires: u64, missed: Missed) -> Schedule {
        let timing = Timing::cron(cron, "UTC").unwrap();
        let expires = Duration::from_secs(expires);
        let mut schedule = Schedule::of("s", "t", Value::Null, timing, expires);
        schedule.missed = missed;
        schedule
    }

    /// Cron, expiry in seconds, missed; next due, now, led since; published, missed, next.
    type Case = (
        (&'static str, u64, Missed),
        (&'static str, &'static str, &'static str),
        (Option<&'static str>, u64, &'static str),
    );

    #[rustfmt::skip]
    const CASES: &[Case] = &[
        // On time, and a little late.
        (("0 * * * *", 600, Missed::Skip),
         ("2026-11-16T12:00Z", "2026-11-16T12:00Z", "2026-11-16T00:00Z"),
         (Some("2026-11-16T12:00Z"), 0, "2026-11-16T13:00Z")),
        (("0 * * * *", 600, Missed::Skip),
         ("2026-11-16T12:00Z", "2026-11-16T12:09:59Z", "2026-11-16T00:00Z"),
         (Some("2026-11-16T12:00Z"), 0, "2026-11-16T13:00Z")),
        // The broker was away until the run had expired.
        (("0 * * * *", 600, Missed::Once),
         ("2026-11-16T12:00Z", "2026-11-16T12:10Z", "2026-11-16T00:00Z"),
         (None, 1, "2026-11-16T13:00Z")),
        // Several are due: the newest, and the others are counted.
        (("* * * * * *", 10, Missed::Skip),
         ("2026-11-16T12:00:00Z", "2026-11-16T12:00:03.4Z", "2026-11-16T00:00Z"),
         (Some("2026-11-16T12:00:03Z"), 3, "2026-11-16T12:00:04Z")),
        // Down for six hours.
        (("0 * * * *", 3600, Missed::Skip),
         ("2026-11-16T06:00Z", "2026-11-16T12:00:30Z", "2026-11-16T12:00:30Z"),
         (None, 7, "2026-11-16T13:00Z")),
        (("0 * * * *", 3600, Missed::Once),
         ("2026-11-16T06:00Z", "2026-11-16T12:00:30Z", "2026-11-16T12:00:30Z"),
         (Some("2026-11-16T12:00Z"), 6, "2026-11-16T13:00Z")),
        (("0 2 * * *", 3600, Missed::Once),
         ("2026-11-16T02:00Z", "2026-11-16T08:00Z", "2026-11-16T08:00Z"),
         (None, 1, "2026-11-17T02:00Z")),
        // A clock that jumps a day ahead.
        (("0 * * * *", 600, Missed::Skip),
         ("2026-11-16T12:00Z", "2026-11-17T12:05Z", "2026-11-16T00:00Z"),
         (Some("2026-11-17T12:00Z"), 24, "2026-11-17T13:00Z")),
    ];

    #[test]
    fn the_newest_run_is_published_if_it_is_wanted_and_the_others_are_counted() {
        for ((cron, expires, policy), (next_due, now, led_since), expected) in CASES {
            let (publish, missed, next) = expected;
            let schedule = schedule(cron, *expires, *policy);
            let decision = decide(&schedule, time(next_due), time(now), time(led_since)).unwrap();
            let context = format!("{cron} {policy:?} due {next_due} at {now}");
            assert_eq!(decision.publish, publish.map(time), "{context}");
            assert_eq!(decision.missed, *missed, "{context}");
            assert_eq!(decision.next, Some(time(next)), "{context}");
        }
    }

    #[test]
    fn what_is_not_due_is_left_alone_also_after_a_step_back() {
        let schedule = schedule("0 * * * *", 600, Missed::Skip);
        let (due, before) = (time("2026-11-16T13:00Z"), time("2026-11-16T12:30Z"));
        assert_eq!(decide(&schedule, due, before, before), None);
        let done = Some(time("2026-11-16T12:00Z"));
        assert_eq!(
            corrected(&schedule, due, done, time("2026-11-16T11:30Z")),
            None
        );
    }

    #[test]
    fn a_clock_that_was_a_year_ahead_does_not_stop_the_schedule_for_a_year() {
        let schedule = schedule("0 * * * *", 600, Missed::Skip);
        let (due, done) = (time("2027-11-16T13:00Z"), time("2027-11-16T12:00Z"));
        let settled = corrected(&schedule, due, Some(done), time("2026-11-16T12:30Z"));
        assert_eq!(settled, Some(Some(time("2026-11-16T13:00Z"))));
    }

    #[test]
    fn years_of_seconds_are_settled_at_once() {
        let schedule = schedule("* * * * * *", 10, Missed::Once);
        let now = time("2026-11-16T12:00Z");
        let decision = decide(&schedule, time("2020-01-01T00:00Z"), now, now).unwrap();
        assert_eq!(decision.missed, MOST_COUNTED - 1);
        assert_eq!(decision.publish, Some(now));
    }
}
