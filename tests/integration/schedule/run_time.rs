//! Schedules at run time, and what survives a restart.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tierline::error::{DatabaseError, TopologyError};
use tierline::schedule::Origin;
use tierline::topology::{Missed, Schedule, Timing};
use tierline::{Error, Task};

use super::{World, map, take};

#[derive(Serialize, Deserialize)]
struct Build {
    all: bool,
}

impl Task for Build {
    const NAME: &'static str = "report.build";
}

const NIGHTLY: &str = r#"
    [schedules.nightly]
    task = "report.build"
    cron = "0 2 * * *"
    timezone = "Europe/Rome"
    payload = { all = true }
    expires = "4h"
"#;

fn weekly() -> Schedule {
    let timing = Timing::cron("0 9 * * MON", "UTC").unwrap();
    Schedule::new("weekly", timing, "1h", &Build { all: false }).unwrap()
}

#[tokio::test]
async fn a_pause_survives_restarts_and_a_resume_goes_on_with_the_next_run() {
    let world = World::new().await;
    let mut app = world.app(map(NIGHTLY)).await;
    let running = app.start();
    app.leads(true).await;
    let schedules = app.app.schedules().unwrap().by("ada");
    let before = schedules.get("nightly").await.unwrap();
    assert_eq!((before.origin, before.is_changed), (Origin::File, false));
    let paused = schedules.pause("nightly").await.unwrap();
    assert_eq!(paused.paused.as_ref().unwrap().by, "ada");
    assert_eq!(paused.next_due, None);
    running.stop().await;

    let running = app.start();
    app.leads(true).await;
    let still = schedules.get("nightly").await.unwrap();
    assert_eq!(still.paused, paused.paused);
    assert_eq!(
        schedules.by("bob").pause("nightly").await.unwrap().paused,
        paused.paused
    );
    let schedules = app.app.schedules().unwrap().by("bob");
    let resumed = schedules.resume("nightly").await.unwrap();
    assert_eq!((resumed.next_due, resumed.paused), (before.next_due, None));
    running.stop().await;

    let history = schedules.history("nightly", 10).await.unwrap();
    let history = history
        .iter()
        .map(|change| (change.mark.by.as_str(), change.what.as_str()));
    assert_eq!(
        history.collect::<Vec<_>>(),
        [
            ("bob", "resumed"),
            ("ada", "paused"),
            ("tierline shop", "added")
        ]
    );
}

#[tokio::test]
async fn a_run_can_be_asked_for_and_changes_nothing_else() {
    let world = World::new().await;
    let app = world.app(map("")).await;
    let schedules = app.app.schedules().unwrap().by("ada");
    let added = schedules.add(&weekly()).await.unwrap();
    let receipt = schedules.run_now("weekly").await.unwrap();
    let run = take(&world.vhost, 1).await.remove(0);
    assert_eq!(
        (run.id, run.payload),
        (receipt.id, br#"{"all":false}"#.to_vec())
    );
    assert_eq!(schedules.get("weekly").await.unwrap(), added);
    assert_eq!(schedules.history("weekly", 1).await.unwrap()[0].what, "run");
}

#[tokio::test]
async fn what_is_changed_at_run_time_stays_until_the_file_says_something_new() {
    let world = World::new().await;
    let mut app = world.app(map(NIGHTLY)).await;
    let running = app.start();
    app.leads(true).await;
    let schedules = app.app.schedules().unwrap().by("ada");
    let mut nightly = schedules.get("nightly").await.unwrap().schedule;
    nightly.timing = Timing::every(Duration::from_secs(86_400)).unwrap();
    nightly.missed = Missed::Once;
    let changed = schedules.change(&nightly).await.unwrap();
    assert_eq!((&changed.schedule, changed.is_changed), (&nightly, true));
    running.stop().await;

    let running = app.start();
    app.leads(true).await;
    assert_eq!(schedules.get("nightly").await.unwrap(), changed);
    running.stop().await;

    let mut app = world.app(map(&NIGHTLY.replace("4h", "3h"))).await;
    let running = app.start();
    app.leads(true).await;
    let state = schedules.get("nightly").await.unwrap();
    assert!(!state.is_changed, "{state:?}");
    assert_eq!(state.schedule.expires, Duration::from_secs(3 * 3_600));
    assert_eq!(state.schedule.missed, Missed::Skip);
    running.stop().await;
}

#[tokio::test]
async fn a_schedule_that_is_gone_from_the_file_stops_and_comes_back_with_it() {
    let world = World::new().await;
    let mut app = world.app(map(NIGHTLY)).await;
    let running = app.start();
    app.leads(true).await;
    let schedules = app.app.schedules().unwrap();
    let before = schedules.get("nightly").await.unwrap();
    schedules.add(&weekly()).await.unwrap();
    assert!(matches!(
        schedules.remove("nightly").await,
        Err(Error::Topology(TopologyError::InvalidSchedule { .. }))
    ));
    running.stop().await;

    let mut without = world.app(map("")).await;
    let running = without.start();
    without.leads(true).await;
    let gone = schedules.get("nightly").await.unwrap();
    assert!(gone.gone.is_some() && gone.next_due.is_none(), "{gone:?}");
    assert!(schedules.get("weekly").await.unwrap().next_due.is_some());
    running.stop().await;

    let running = app.start();
    app.leads(true).await;
    let back = schedules.get("nightly").await.unwrap();
    assert_eq!((back.gone, back.next_due), (None, before.next_due));
    running.stop().await;
}

#[tokio::test]
async fn code_adds_its_schedules_at_every_start_and_removes_them() {
    let world = World::new().await;
    let mut app = world.app(map(NIGHTLY)).await;
    let running = app.start();
    app.leads(true).await;
    running.stop().await;
    let schedules = app.app.schedules().unwrap();
    let added = schedules.add(&weekly()).await.unwrap();
    assert_eq!(schedules.add(&weekly()).await.unwrap(), added);
    assert_eq!(added.origin, Origin::Code);

    let mut taken = weekly();
    taken.name = "nightly".to_owned();
    let error = schedules.add(&taken).await.unwrap_err().to_string();
    assert!(error.contains("it is in the topology file"), "{error}");
    assert_eq!(schedules.list().await.unwrap().len(), 2);

    schedules.remove("weekly").await.unwrap();
    let error = schedules.get("weekyl").await.unwrap_err().to_string();
    assert_eq!(error, "there is no schedule \"weekyl\"");
    let error = schedules.pause("nihgtly").await.unwrap_err().to_string();
    assert_eq!(
        error,
        "there is no schedule \"nihgtly\"; did you mean \"nightly\"?"
    );
}

#[tokio::test]
async fn what_the_file_would_be_refused_for_is_refused_in_code_too() {
    let world = World::new().await;
    let app = world.app(map("")).await;
    let schedules = app.app.schedules().unwrap();
    let wrong = |change: fn(&mut Schedule)| {
        let mut schedule = weekly();
        change(&mut schedule);
        schedule
    };
    for (schedule, expected) in [
        (
            wrong(|s| s.name = "two words".to_owned()),
            "letters, digits",
        ),
        (
            wrong(|s| s.task = "report.biuld".to_owned()),
            "did you mean \"report.build\"?",
        ),
        (
            wrong(|s| s.expires = Duration::from_secs(8 * 86_400)),
            "at most 7d",
        ),
        (wrong(|s| s.expires = Duration::ZERO), "it may be 1s to 7d"),
    ] {
        let error = schedules.add(&schedule).await.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    assert_eq!(schedules.list().await.unwrap(), []);
}

#[tokio::test]
async fn a_database_that_is_not_migrated_is_said_to_be_at_once() {
    let database = tierline_testbed::database().await;
    let vhost = tierline_testbed::vhost().await;
    let app = super::App::connect(map(""), vhost.amqp_url(), database.url()).await;
    let ended = app
        .app
        .scheduler()
        .unwrap()
        .until(std::future::pending())
        .await;
    assert!(
        matches!(
            ended,
            Err(Error::Database(DatabaseError::NotMigrated { .. }))
        ),
        "{ended:?}"
    );
}
