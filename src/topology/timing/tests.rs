use super::*;

/// Expression, time zone, from when on, and the runs after that: in local time with its offset.
const CASES: &[(&str, &str, &str, &[&str])] = &[
    // Rome, 29 March 2026: 02:00 becomes 03:00.
    (
        "30 2 * * *",
        "Europe/Rome",
        "2026-03-28T02:30+01:00",
        &["2026-03-29T03:00+02:00", "2026-03-30T02:30+02:00"],
    ),
    (
        "*/30 * * * *",
        "Europe/Rome",
        "2026-03-29T01:00+01:00",
        &[
            "2026-03-29T01:30+01:00",
            "2026-03-29T03:00+02:00",
            "2026-03-29T03:30+02:00",
        ],
    ),
    (
        "0 * * * *",
        "Europe/Rome",
        "2026-03-29T01:00+01:00",
        &["2026-03-29T03:00+02:00", "2026-03-29T04:00+02:00"],
    ),
    // Two fixed runs that fall into the gap are one.
    (
        "15,45 2 * * *",
        "Europe/Rome",
        "2026-03-29T00:00+01:00",
        &["2026-03-29T03:00+02:00", "2026-03-30T02:15+02:00"],
    ),
    // Rome, 25 October 2026: 03:00 becomes 02:00.
    (
        "30 2 * * *",
        "Europe/Rome",
        "2026-10-24T02:30+02:00",
        &["2026-10-25T02:30+02:00", "2026-10-26T02:30+01:00"],
    ),
    (
        "*/30 * * * *",
        "Europe/Rome",
        "2026-10-25T01:30+02:00",
        &[
            "2026-10-25T02:00+02:00",
            "2026-10-25T02:30+02:00",
            "2026-10-25T02:00+01:00",
            "2026-10-25T02:30+01:00",
            "2026-10-25T03:00+01:00",
        ],
    ),
    (
        "0 3 * * *",
        "Europe/Rome",
        "2026-10-24T12:00+02:00",
        &["2026-10-25T03:00+01:00"],
    ),
    // Several fixed times a day are fixed times too: none is lost, none repeated.
    (
        "30 2,14 * * *",
        "Europe/Rome",
        "2026-03-28T14:30+01:00",
        &["2026-03-29T03:00+02:00", "2026-03-29T14:30+02:00"],
    ),
    (
        "30 2,14 * * *",
        "Europe/Rome",
        "2026-10-24T14:30+02:00",
        &["2026-10-25T02:30+02:00", "2026-10-25T14:30+01:00"],
    ),
    // From within the repeated hour.
    (
        "30 2 * * *",
        "Europe/Rome",
        "2026-10-25T02:10+01:00",
        &["2026-10-26T02:30+01:00"],
    ),
    // New York, 8 March and 1 November 2026.
    (
        "0 2 * * *",
        "America/New_York",
        "2026-03-07T02:00-05:00",
        &["2026-03-08T03:00-04:00", "2026-03-09T02:00-04:00"],
    ),
    (
        "30 1 * * *",
        "America/New_York",
        "2026-10-31T01:30-04:00",
        &["2026-11-01T01:30-04:00", "2026-11-02T01:30-05:00"],
    ),
    // Lord Howe moves by half an hour.
    (
        "15 2 * * *",
        "Australia/Lord_Howe",
        "2026-10-03T02:15+10:30",
        &["2026-10-04T02:30+11:00", "2026-10-05T02:15+11:00"],
    ),
    (
        "*/15 * * * *",
        "Australia/Lord_Howe",
        "2026-04-05T01:30+11:00",
        &[
            "2026-04-05T01:45+11:00",
            "2026-04-05T01:30+10:30",
            "2026-04-05T01:45+10:30",
        ],
    ),
    // São Paulo skipped midnight, and Samoa a whole day.
    (
        "0 0 * * *",
        "America/Sao_Paulo",
        "2018-11-03T00:00-03:00",
        &["2018-11-04T01:00-02:00", "2018-11-05T00:00-02:00"],
    ),
    (
        "0 12 * * *",
        "Pacific/Apia",
        "2011-12-29T12:00-10:00",
        &["2011-12-31T00:00+14:00", "2011-12-31T12:00+14:00"],
    ),
    // Without summer time, and with a zone of half an hour.
    (
        "0 9 * * MON-FRI",
        "Asia/Kolkata",
        "2026-11-13T09:00+05:30",
        &["2026-11-16T09:00+05:30"],
    ),
    // Leap days, also through a century that has none.
    (
        "0 0 29 2 *",
        "UTC",
        "2026-01-01T00:00Z",
        &["2028-02-29T00:00Z", "2032-02-29T00:00Z"],
    ),
    (
        "0 0 29 2 *",
        "UTC",
        "2096-03-01T00:00Z",
        &["2104-02-29T00:00Z"],
    ),
    // Ends of months.
    (
        "0 0 31 * *",
        "UTC",
        "2026-01-31T00:00Z",
        &["2026-03-31T00:00Z", "2026-05-31T00:00Z"],
    ),
    (
        "0 0 L * *",
        "UTC",
        "2028-01-31T00:00Z",
        &["2028-02-29T00:00Z", "2028-03-31T00:00Z"],
    ),
    // Day of month or day of week, as cron has it; Sunday is 0 and 7.
    (
        "0 0 13 * 5",
        "UTC",
        "2026-11-10T00:00Z",
        &["2026-11-13T00:00Z", "2026-11-20T00:00Z"],
    ),
    (
        "0 0 * * 7",
        "UTC",
        "2026-11-16T00:00Z",
        &["2026-11-22T00:00Z"],
    ),
    (
        "0 0 * * 0",
        "UTC",
        "2026-11-16T00:00Z",
        &["2026-11-22T00:00Z"],
    ),
    // With seconds, from a moment between two of them.
    (
        "*/20 * * * * *",
        "UTC",
        "2026-12-31T23:59:39.999Z",
        &["2026-12-31T23:59:40Z", "2027-01-01T00:00:00Z"],
    ),
    (
        "0 0 * * *",
        "UTC",
        "2026-12-31T00:00:00.001Z",
        &["2027-01-01T00:00Z"],
    ),
];

fn time(text: &str) -> Timestamp {
    text.parse()
        .unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn cron(expression: &str, timezone: &str) -> Timing {
    Timing::cron(expression, timezone).unwrap()
}

#[test]
fn runs_follow_the_clock_on_the_wall_through_every_oddity_of_it() {
    for (expression, timezone, from, expected) in CASES {
        let timing = cron(expression, timezone);
        let mut at = time(from);
        for expected in *expected {
            let next = timing.next_after(at, "").unwrap();
            assert_eq!(
                next,
                time(expected),
                "{expression} in {timezone} after {at}"
            );
            at = next;
        }
    }
}

#[test]
fn the_latest_run_is_the_same_looking_back_as_the_next_was_looking_forward() {
    for (expression, timezone, _, expected) in CASES {
        let timing = cron(expression, timezone);
        for run in expected.iter().map(|run| time(run)) {
            let later = run + jiff::SignedDuration::from_millis(700);
            for at in [run, later] {
                let latest = timing.latest_until(at, "");
                assert_eq!(latest, Some(run), "{expression} in {timezone} until {at}");
            }
        }
    }
}

proptest::proptest! {
    #[test]
    fn looking_back_finds_what_looking_forward_found(
        pattern in 0..PATTERNS.len(), zone in 0..ZONES.len(), at in 1_262_304_000_i64..1_893_456_000,
    ) {
        let timing = cron(PATTERNS[pattern], ZONES[zone]);
        let at = Timestamp::from_second(at).unwrap();
        let next = timing.next_after(at, "").unwrap();
        proptest::prop_assert!(next > at);
        let just_before = next - Duration::from_nanos(1);
        let latest = timing.latest_until(just_before, "").unwrap();
        proptest::prop_assert!(latest <= at, "{latest} lies between {at} and {next}");
        proptest::prop_assert_eq!(timing.latest_until(next, ""), Some(next));
        proptest::prop_assert_eq!(timing.next_after(latest, ""), Some(next));
    }
}

const PATTERNS: [&str; 9] = [
    "*/7 * * * * *",
    "*/13 * * * *",
    "0 * * * *",
    "30 2 * * *",
    "15,45 1-3 * * *",
    "*/20 2 * * *",
    "0 0 * * SUN",
    "59 23 L * *",
    "0 12 31 * 1",
];

const ZONES: [&str; 8] = [
    "UTC",
    "Europe/Rome",
    "America/New_York",
    "Australia/Lord_Howe",
    "America/Sao_Paulo",
    "Pacific/Apia",
    "Africa/Casablanca",
    "Asia/Kathmandu",
];

#[test]
fn a_steady_beat_goes_on_through_restarts_and_is_spread_by_the_name() {
    let timing = Timing::every(Duration::from_secs(90)).unwrap();
    let start = time("2026-11-16T12:00Z");
    let first = timing.next_after(start, "a").unwrap();
    let second = timing.next_after(first, "a").unwrap();
    assert_eq!(second.duration_since(first).as_secs(), 90);
    assert_eq!(
        timing.next_after(second - Duration::from_millis(1), "a"),
        Some(second)
    );
    assert_eq!(timing.latest_until(second, "a"), Some(second));
    assert_eq!(
        timing.latest_until(second - Duration::from_millis(1), "a"),
        Some(first)
    );
    assert_ne!(timing.next_after(start, "b"), Some(first));

    let names: Vec<String> = (0..1_000)
        .map(|number| format!("tenant-{number}"))
        .collect();
    let hourly = Timing::every(Duration::from_secs(3_600)).unwrap();
    let in_first_minute = names
        .iter()
        .filter_map(|name| hourly.next_after(start, name))
        .filter(|due| due.duration_since(start).as_secs() < 60)
        .count();
    assert!(
        in_first_minute < 50,
        "{in_first_minute} of 1,000 in one minute"
    );
}

#[test]
fn runs_are_counted_to_a_limit() {
    let first = time("2026-11-16T12:00Z");
    let last = time("2026-11-16T18:00Z");
    assert_eq!(cron("0 * * * *", "UTC").count(first, last, "", 1_000), 7);
    assert_eq!(cron("* * * * *", "UTC").count(first, last, "", 100), 100);
    let every = Timing::every(Duration::from_secs(60)).unwrap();
    assert_eq!(every.count(first, last, "", 1_000), 361);
    assert_eq!(every.count(first, first, "", 1_000), 1);
}

#[test]
fn the_shortest_time_between_two_runs_is_found() {
    for (expression, seconds) in [
        ("* * * * * *", 1),
        ("*/7 * * * *", 4 * 60),
        ("0 */5 * * *", 4 * 3_600),
        ("0 9,10 * * *", 3_600),
        ("0 2 * * *", 86_400),
        ("0 0 1 * *", 28 * 86_400),
        ("0 0 28,29 2 *", 86_400),
        ("0 0 1 1 *", 365 * 86_400),
        ("0 0 29 2 *", 366 * 86_400),
    ] {
        let timing = cron(expression, "Europe/Rome");
        assert_eq!(timing.shortest_pause().as_secs(), seconds, "{expression}");
    }
}
