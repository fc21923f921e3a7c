use std::time::Duration;

use super::*;
use crate::TaskId;
use crate::control::Snapshot;
use crate::error::ErrorKind;
use crate::message::{DeadReason, Failure, FailureKind};
use crate::observe::{PublishResult, Purpose, TaskRef};

const MAP: &str = r#"
    app = "shop"
    [tiers.mail]
    queue = "postgres"
    slo = "7s"
    [tiers.bulk]
    queue = "postgres"
    [groups.all]
    tiers = ["mail", "bulk"]
    concurrency = 2
    [tasks]
    "mail.send" = "mail"
    "report.export" = "bulk"
"#;

const SECOND: Duration = Duration::from_secs(1);

fn observed() -> (Metrics, impl Fn(&Event<'_>)) {
    let topology = Topology::parse(MAP).unwrap();
    let controls = KnownControls::fixed(Snapshot::default());
    EventCounter::default().start(&topology, controls)
}

fn task<'a>(name: &'a str, tier: &'a str, id: &'a TaskId) -> TaskRef<'a> {
    TaskRef {
        name,
        id,
        tier,
        attempt: 1,
        life: 0,
        redriven_from: None,
    }
}

/// The value of a series.
fn value(text: &str, series: &str) -> Option<f64> {
    let mut lines = text.lines();
    let found = lines.find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    found.map(|value| value.parse().unwrap())
}

/// How many series there are.
fn series(text: &str) -> usize {
    text.lines().filter(|line| !line.starts_with('#')).count()
}

#[tokio::test]
async fn every_event_that_counts_is_counted_under_its_labels() {
    let (metrics, handle) = observed();
    let id = TaskId::random();
    let failure = &Failure::new(FailureKind::Error, "no");
    let task = task("mail.send", "mail", &id);
    let (ran, after) = (Some(SECOND), SECOND);
    let publish = |result| Event::Published {
        name: "mail.send",
        id: None,
        tier: Some("mail"),
        result,
        delay: Duration::ZERO,
        took: SECOND,
    };
    let redrive = |result| Event::Redriven {
        dead_letter: 7,
        name: None,
        id: None,
        tier: "mail",
        result,
    };
    let dead = |reason, ran| Event::Dead {
        task,
        reason,
        failure,
        ran,
    };
    let (group, tier, purpose) = ("all", "mail", Purpose::Work);
    for event in [
        publish(PublishResult::Stored),
        publish(PublishResult::Failed(ErrorKind::NotFound)),
        Event::GroupStarted { group, slots: 2 },
        Event::Consuming { group, tier },
        Event::Started {
            task,
            waited: SECOND * 7,
        },
        Event::Started {
            task,
            waited: SECOND * 8,
        },
        Event::Ended { task, ran: SECOND },
        Event::Done { task, ran: SECOND },
        Event::Retried {
            task,
            after,
            failure,
            ran,
        },
        Event::Snoozed { task, after, ran },
        Event::Discarded {
            task,
            reason: "",
            ran,
        },
        Event::Expired { task, late: SECOND },
        dead(DeadReason::Permanent, ran),
        dead(DeadReason::Expired, None),
        Event::DeadByBroker {
            name: "mail.send",
            tier,
            has_expired: false,
            count: 5,
        },
        Event::GivenBack { task, why: "", ran },
        redrive(PublishResult::Stored),
        redrive(PublishResult::Failed(ErrorKind::Refused)),
        Event::Suspected { task, crashes: 1 },
        Event::LeaseLost { task },
        Event::Relayed { task },
        Event::Rerouted { task },
        Event::Promoted {
            from: "bulk",
            to: "mail",
            count: 3,
        },
        Event::Connected {
            purpose,
            address: "",
        },
        Event::ConnectFailed { purpose, cause: "" },
        Event::Restarted {
            service: "group all",
            cause: "",
            after,
        },
        Event::LeaderChanged {
            leads: true,
            epoch: 1,
            gap: SECOND,
        },
    ] {
        handle(&event);
    }
    let text = metrics.render().await;
    for (series, expected) in [
        (
            r#"tierline_published_total{tier="mail",task="mail.send",result="stored"}"#,
            1.0,
        ),
        (
            r#"tierline_published_total{tier="mail",task="mail.send",result="not_found"}"#,
            1.0,
        ),
        (
            r#"tierline_published_total{tier="bulk",task="report.export",result="stored"}"#,
            0.0,
        ),
        (r#"tierline_publish_seconds_count{tier="mail"}"#, 2.0),
        (
            r#"tierline_wait_seconds_bucket{le="7.0",tier="mail",task="mail.send"}"#,
            1.0,
        ),
        (
            r#"tierline_wait_seconds_bucket{le="+Inf",tier="mail",task="mail.send"}"#,
            2.0,
        ),
        (
            r#"tierline_wait_seconds_sum{tier="mail",task="mail.send"}"#,
            15.0,
        ),
        (
            r#"tierline_run_seconds_count{tier="mail",task="mail.send",outcome="done"}"#,
            1.0,
        ),
        (
            r#"tierline_run_seconds_count{tier="mail",task="mail.send",outcome="dead"}"#,
            1.0,
        ),
        (
            r#"tierline_run_seconds_sum{tier="mail",task="mail.send",outcome="given_back"}"#,
            1.0,
        ),
        (
            r#"tierline_tasks_total{tier="mail",task="mail.send",outcome="done"}"#,
            1.0,
        ),
        (
            r#"tierline_tasks_total{tier="mail",task="mail.send",outcome="retried"}"#,
            1.0,
        ),
        (
            r#"tierline_tasks_total{tier="mail",task="mail.send",outcome="snoozed"}"#,
            1.0,
        ),
        (
            r#"tierline_tasks_total{tier="mail",task="mail.send",outcome="discarded"}"#,
            1.0,
        ),
        (
            r#"tierline_tasks_total{tier="mail",task="mail.send",outcome="expired"}"#,
            1.0,
        ),
        (
            r#"tierline_tasks_total{tier="mail",task="mail.send",outcome="dead"}"#,
            7.0,
        ),
        (
            r#"tierline_tasks_total{tier="mail",task="mail.send",outcome="given_back"}"#,
            1.0,
        ),
        (
            r#"tierline_tasks_total{tier="bulk",task="report.export",outcome="dead"}"#,
            0.0,
        ),
        (
            r#"tierline_wait_seconds_count{tier="bulk",task="report.export"}"#,
            0.0,
        ),
        (
            r#"tierline_dead_total{tier="bulk",task="report.export",reason="retries_exhausted"}"#,
            0.0,
        ),
        (r#"tierline_slo_tasks_total{tier="mail",met="true"}"#, 1.0),
        (r#"tierline_slo_tasks_total{tier="mail",met="false"}"#, 3.0),
        (r#"tierline_slo_seconds{tier="mail"}"#, 7.0),
        (
            r#"tierline_dead_total{tier="mail",task="mail.send",reason="permanent_error"}"#,
            1.0,
        ),
        (
            r#"tierline_dead_total{tier="mail",task="mail.send",reason="expired"}"#,
            1.0,
        ),
        (
            r#"tierline_dead_total{tier="mail",task="mail.send",reason="broker"}"#,
            5.0,
        ),
        (
            r#"tierline_redriven_total{tier="mail",result="stored"}"#,
            1.0,
        ),
        (
            r#"tierline_redriven_total{tier="mail",result="refused"}"#,
            1.0,
        ),
        (r#"tierline_suspected_total{tier="mail"}"#, 1.0),
        (r#"tierline_leases_lost_total{tier="mail"}"#, 1.0),
        (r#"tierline_relayed_total{tier="mail"}"#, 1.0),
        (r#"tierline_rerouted_total{tier="mail"}"#, 1.0),
        (r#"tierline_promoted_total{from="bulk",to="mail"}"#, 3.0),
        (r#"tierline_in_progress{group="all",tier="mail"}"#, 1.0),
        (r#"tierline_in_progress{group="all",tier="bulk"}"#, 0.0),
        (r#"tierline_slots{group="all"}"#, 2.0),
        (r#"tierline_consuming{group="all",tier="mail"}"#, 1.0),
        (r#"tierline_consuming{group="all",tier="bulk"}"#, 0.0),
        (r#"tierline_connected{purpose="work"}"#, 1.0),
        (r#"tierline_connect_failures_total{purpose="work"}"#, 1.0),
        (r#"tierline_restarts_total{service="group all"}"#, 1.0),
        ("tierline_leader", 1.0),
    ] {
        assert_eq!(value(&text, series), Some(expected), "{series} in {text}");
    }
    assert!(text.ends_with("# EOF\n"));
    assert!(
        !text.contains(r#"tierline_slo_tasks_total{tier="bulk""#),
        "{text}"
    );
    assert!(!text.contains(UNKNOWN), "{text}");
    let oldest = r#"tierline_oldest_run_seconds{tier="mail",task="mail.send"}"#;
    assert!(value(&text, oldest).is_some(), "{text}");
    handle(&Event::Ended { task, ran: SECOND });
    handle(&Event::GroupEnded { group, slots: 2 });
    let text = metrics.render().await;
    assert!(
        !text.contains("oldest_run") && !text.contains("in_progress"),
        "{text}"
    );
}

#[tokio::test]
async fn names_that_the_map_does_not_have_are_one_series() {
    let (metrics, handle) = observed();
    let happen = |name: &str, tier: &str| {
        let id = TaskId::random();
        let task = task(name, tier, &id);
        handle(&Event::Published {
            name,
            id: Some(&id),
            tier: None,
            result: PublishResult::Failed(ErrorKind::NotFound),
            delay: Duration::ZERO,
            took: SECOND,
        });
        handle(&Event::Dead {
            task,
            reason: DeadReason::UnknownTask,
            failure: &Failure::new(FailureKind::NotStarted, "no"),
            ran: None,
        });
        handle(&Event::ScheduleMissed {
            schedule: name,
            count: 1,
            last_due: std::time::SystemTime::UNIX_EPOCH,
        });
        handle(&Event::Restarted {
            service: "scheduler",
            cause: name,
            after: SECOND,
        });
    };
    happen("bad", "bad");
    let before = series(&metrics.render().await);
    for number in 0..10_000 {
        let name = format!("bad\"\n{number}");
        happen(&name, &name);
    }
    let text = metrics.render().await;
    assert_eq!(series(&text), before, "{text}");
    let unknown = r#"tierline_dead_total{tier="(unknown)",task="(unknown)",reason="unknown_task"}"#;
    assert_eq!(value(&text, unknown), Some(10_001.0), "{text}");
}

#[tokio::test]
async fn an_app_that_did_nothing_shows_no_histogram() {
    let (metrics, _handle) = observed();
    let text = metrics.render().await;
    assert!(!text.contains("_bucket"), "{text}");
    assert!(text.contains(concat!(
        "tierline_build_info{version=\"",
        env!("CARGO_PKG_VERSION")
    )));
}
