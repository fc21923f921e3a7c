//! `[schedules.NAME]`: what it says, and what is refused.

use std::time::Duration;

use serde_json::{Value, json};
use tierline::Topology;
use tierline::topology::{Missed, Timing};

use super::{small, the_problem};

fn with(schedules: &str) -> Result<Topology, tierline::Error> {
    small(|text| text + schedules)
}

#[test]
fn a_schedule_says_what_is_due_when_and_for_how_long() {
    let map = with(
        r#"
[schedules.nightly]
task = "mail.send"
cron = "30 2 * * *"
timezone = "Europe/Rome"
expires = "4h"
missed = "once"
payload = { to = "all", copies = 2, share = 0.5, urgent = false, days = [1, 2], on = 2026-01-31 }

[schedules.heartbeat]
task = "mail.send"
every = "90s"
expires = "1m"
"#,
    )
    .unwrap();
    let [nightly, heartbeat] = map.schedules() else {
        panic!("{:?}", map.schedules());
    };
    assert_eq!(nightly.name, "nightly");
    assert_eq!(nightly.task, "mail.send");
    assert_eq!(
        nightly.timing,
        Timing::cron("30 2 * * *", "Europe/Rome").unwrap()
    );
    assert_eq!(nightly.expires, Duration::from_secs(4 * 3_600));
    assert_eq!(nightly.missed, Missed::Once);
    assert_eq!(
        nightly.payload,
        json!({
            "to": "all", "copies": 2, "share": 0.5, "urgent": false, "days": [1, 2],
            "on": "2026-01-31",
        })
    );
    assert_eq!(
        heartbeat.timing,
        Timing::every(Duration::from_secs(90)).unwrap()
    );
    assert_eq!(heartbeat.missed, Missed::Skip);
    assert_eq!(heartbeat.payload, Value::Null);
}

#[test]
fn every_mistake_in_a_schedule_is_explained() {
    let text = include_str!("schedules.toml");
    insta::assert_snapshot!(Topology::parse_named("schedules.toml", text).unwrap_err());
}

#[test]
fn a_schedule_without_an_expiry_is_refused() {
    let problem = the_problem(with(
        "[schedules.nightly]\ntask = \"mail.send\"\ncron = \"0 2 * * *\"\n",
    ));
    assert!(
        problem.starts_with("<text>:9:12: expires is missing in [schedules.nightly]"),
        "{problem}"
    );
}

#[test]
fn an_expiry_may_reach_to_the_next_run_and_no_further() {
    let schedule = |timing: &str, expires: &str| {
        with(&format!(
            "[schedules.s]\ntask = \"mail.send\"\n{timing}\nexpires = \"{expires}\"\n"
        ))
    };
    for (timing, longest, too_long) in [
        ("cron = \"0 * * * *\"", "1h", "61m"),
        ("cron = \"0 9,10 * * *\"", "1h", "2h"),
        ("cron = \"0 0 1 * *\"", "28d", "29d"),
        ("every = \"10m\"", "10m", "11m"),
        ("every = \"1s\"", "1m", "61s"),
        ("cron = \"* * * * * *\"", "1m", "2m"),
    ] {
        assert!(schedule(timing, longest).is_ok(), "{timing} {longest}");
        let problem = the_problem(schedule(timing, too_long));
        assert!(problem.contains(&format!("at most {longest}")), "{problem}");
    }
}

#[test]
fn ten_thousand_schedules_are_read() {
    let schedules: String = (0..10_000)
        .map(|number| {
            format!(
                "[schedules.s{number}]\ntask = \"mail.send\"\nevery = \"1h\"\nexpires = \"10m\"\n"
            )
        })
        .collect();
    assert_eq!(with(&schedules).unwrap().schedules().len(), 10_000);
}
