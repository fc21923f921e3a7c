//! Runs that came due while nobody was there to publish them.

use std::sync::Arc;
use std::time::SystemTime;

use tierline::testing::RecordingPublisher;

use super::{App, FakeClock, Heard, Running, World, map, until};

const SCHEDULES: &str = r#"
    [schedules.hourly-skip]
    task = "report.build"
    cron = "0 * * * *"
    expires = "1h"
    [schedules.hourly-once]
    task = "report.build"
    cron = "0 * * * *"
    expires = "1h"
    missed = "once"
    [schedules.seconds-skip]
    task = "sync.pull"
    cron = "* * * * * *"
    expires = "1m"
    [schedules.seconds-once]
    task = "sync.pull"
    cron = "* * * * * *"
    expires = "1m"
    missed = "once"
    [schedules.nightly-once]
    task = "report.build"
    cron = "0 2 * * *"
    expires = "4h"
    missed = "once"
    [schedules.expired-once]
    task = "report.build"
    cron = "0 2 * * *"
    expires = "1h"
    missed = "once"
"#;

/// Runs a scheduler on a clock that stands still until nothing is due, and gives what it published.
async fn look(app: &mut App, clock: &FakeClock) -> Vec<String> {
    let now = (clock.reader())();
    look_until(app, clock, |next_due| next_due > now).await
}

async fn look_until(
    app: &mut App,
    clock: &FakeClock,
    is_settled: impl Fn(SystemTime) -> bool,
) -> Vec<String> {
    let publisher = Arc::new(RecordingPublisher::new());
    let scheduler = app.app.scheduler().unwrap().clock(clock.reader());
    let running = Running::start(scheduler.publisher(publisher.clone()));
    app.leads(true).await;
    until(async || {
        let states = app.app.schedules().unwrap().list().await.unwrap();
        let mut next_due = states.iter().map(|state| state.next_due);
        next_due
            .all(|due| due.is_some_and(&is_settled))
            .then_some(())
    })
    .await;
    running.stop().await;
    let ids = publisher
        .published()
        .into_iter()
        .map(|run| run.message.id.to_string());
    let mut ids: Vec<String> = ids.collect();
    ids.sort();
    ids
}

#[tokio::test]
async fn after_six_hours_down_skip_publishes_nothing_and_once_one_run_per_schedule() {
    let world = World::new().await;
    let mut app = world.app(map(SCHEDULES)).await;
    let clock = FakeClock::at("2026-11-16T00:00:00.5Z");
    assert_eq!(look(&mut app, &clock).await, Vec::<String>::new());

    clock.set("2026-11-16T06:00:00.5Z");
    app.heard_so_far();
    let published = look(&mut app, &clock).await;
    assert_eq!(
        published,
        [
            "schedule:hourly-once:2026-11-16T06:00:00Z",
            "schedule:seconds-once:2026-11-16T06:00:00Z",
        ],
        "the newest run of each, if it has not expired: four hours after two o'clock it has"
    );
    let states = app.app.schedules().unwrap().list().await.unwrap();
    let missed = states
        .iter()
        .map(|state| (state.schedule.name.as_str(), state.missed));
    assert_eq!(
        missed.collect::<Vec<_>>(),
        [
            ("expired-once", 1),
            ("hourly-once", 5),
            ("hourly-skip", 6),
            ("nightly-once", 1),
            ("seconds-once", 21_599),
            ("seconds-skip", 21_600),
        ]
    );
    let told = app
        .heard_so_far()
        .into_iter()
        .filter_map(|heard| match heard {
            Heard::Missed { count, .. } => Some(count),
            _ => None,
        });
    assert_eq!(told.sum::<u64>(), 1 + 5 + 6 + 1 + 21_599 + 21_600);
}

#[tokio::test]
async fn a_nightly_run_is_made_up_for_in_the_morning() {
    let world = World::new().await;
    let mut app = world.app(map(SCHEDULES)).await;
    let clock = FakeClock::at("2026-11-16T00:00:00.5Z");
    look(&mut app, &clock).await;
    clock.set("2026-11-16T05:59:59Z");
    let published = look(&mut app, &clock).await;
    assert!(
        published.contains(&"schedule:nightly-once:2026-11-16T02:00:00Z".to_owned()),
        "{published:?}"
    );
}

#[tokio::test]
async fn a_restart_within_a_minute_is_no_absence() {
    let world = World::new().await;
    let mut app = world.app(map(SCHEDULES)).await;
    let clock = FakeClock::at("2026-11-16T01:59:30.5Z");
    look(&mut app, &clock).await;
    clock.set("2026-11-16T02:00:10.5Z");
    let published = look(&mut app, &clock).await;
    assert_eq!(
        published,
        [
            "schedule:expired-once:2026-11-16T02:00:00Z",
            "schedule:hourly-once:2026-11-16T02:00:00Z",
            "schedule:hourly-skip:2026-11-16T02:00:00Z",
            "schedule:nightly-once:2026-11-16T02:00:00Z",
            "schedule:seconds-once:2026-11-16T02:00:10Z",
            "schedule:seconds-skip:2026-11-16T02:00:10Z",
        ]
    );
}

#[tokio::test]
async fn no_run_comes_twice_when_the_clock_steps_back() {
    let world = World::new().await;
    let mut app = world.app(map(SCHEDULES)).await;
    let clock = FakeClock::at("2026-11-16T11:59:30Z");
    look(&mut app, &clock).await;
    clock.set("2026-11-16T12:00:10Z");
    assert_eq!(look(&mut app, &clock).await.len(), 4);
    for earlier in [
        "2026-11-16T11:59:59Z",
        "2026-11-16T11:30:00Z",
        "2026-11-16T12:00:10Z",
    ] {
        clock.set(earlier);
        assert_eq!(
            look(&mut app, &clock).await,
            Vec::<String>::new(),
            "{earlier}"
        );
    }
}

#[tokio::test]
async fn a_clock_that_was_a_year_ahead_does_not_stop_a_schedule_for_a_year() {
    let world = World::new().await;
    let mut app = world.app(map(SCHEDULES)).await;
    let clock = FakeClock::at("2026-11-16T11:59:30Z");
    look(&mut app, &clock).await;
    clock.set("2027-11-16T12:00:10Z");
    look(&mut app, &clock).await;
    clock.set("2026-11-16T12:00:10Z");
    let mended = look_until(&mut app, &clock, |due| {
        due < super::time("2026-11-18T00:00Z")
    });
    assert_eq!(mended.await, Vec::<String>::new());
    clock.set("2026-11-16T13:00:05Z");
    let hourly = "schedule:hourly-once:2026-11-16T13:00:00Z".to_owned();
    let published = look(&mut app, &clock).await;
    assert!(published.contains(&hourly), "{published:?}");
}
