use super::*;
use crate::TaskId;
use crate::control::Snapshot;
use crate::error::ErrorKind;
use crate::message::{DeadReason, Failure, FailureKind};
use crate::observe::TaskRef;

const MAP: &str = r#"
    app = "shop"
    [tiers.mail]
    queue = "postgres"
    slo = "10s"
    [tiers.bulk]
    queue = "postgres"
    [groups.all]
    tiers = ["mail", "bulk"]
    concurrency = 2
    [tasks]
    "mail.send" = "mail"
    "report.export" = "bulk"
"#;

fn counters(snapshot: Snapshot) -> Counters {
    let topology = Topology::parse(MAP).unwrap();
    Counters::new(&topology, KnownControls::fixed(snapshot))
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

/// All that was counted, by tier and task.
fn taken(counters: &Counters) -> HashMap<(String, String), RollupTotals> {
    let mut all: HashMap<_, RollupTotals> = HashMap::new();
    counters.take(|(task, tier), totals| {
        let names = counters.names();
        let names = (names.tier(tier).to_owned(), names.task(task).to_owned());
        all.entry(names).or_default().merge(&totals);
    });
    all
}

fn of(all: &HashMap<(String, String), RollupTotals>, tier: &str, task: &str) -> RollupTotals {
    let totals = all.get(&(tier.to_owned(), task.to_owned()));
    totals.cloned().unwrap_or_default()
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn every_outcome_is_counted_where_it_belongs() {
    let counters = counters(Snapshot::default());
    let id = TaskId::random();
    let failure = &Failure::new(FailureKind::Error, "no");
    let task = task("mail.send", "mail", &id);
    let (ran, after) = (Some(SECOND), SECOND);
    let publish = |result, delay| Event::Published {
        name: "mail.send",
        id: None,
        tier: Some("mail"),
        result,
        delay,
        took: SECOND,
    };
    let dead = |reason, ran| Event::Dead {
        task,
        reason,
        failure,
        ran,
    };
    let events = [
        publish(PublishResult::Stored, Duration::ZERO),
        publish(PublishResult::Stored, SECOND),
        publish(PublishResult::Duplicate, SECOND),
        publish(PublishResult::Replaced, Duration::ZERO),
        publish(PublishResult::Failed(ErrorKind::Overloaded), SECOND),
        Event::Started {
            task,
            waited: SECOND,
        },
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
            tier: "mail",
            has_expired: true,
            count: 5,
        },
        Event::DeadByBroker {
            name: "mail.send",
            tier: "mail",
            has_expired: false,
            count: 7,
        },
        Event::GivenBack {
            task,
            why: "",
            ran: None,
        },
        Event::AlreadyDone { task },
    ];
    for event in &events {
        counters.handle(event);
    }
    let all = taken(&counters);
    assert_eq!(all.len(), 1, "{all:?}");
    let totals = of(&all, "mail", "mail.send");
    assert_eq!(
        totals.counts(),
        // The last two: one start met the SLO; of what had expired nothing did.
        [2, 1, 2, 1, 1, 1, 1, 1, 1, 1, 14, 1, 1, 8]
    );
    assert_eq!((totals.wait.count(), totals.run.count()), (1, 5));
    assert!(taken(&counters).is_empty(), "they are taken once");
}

#[test]
fn a_tier_without_slo_counts_none_and_a_late_start_does_not_meet_it() {
    let counters = counters(Snapshot::default());
    let id = TaskId::random();
    for (name, tier) in [("mail.send", "mail"), ("report.export", "bulk")] {
        let task = task(name, tier, &id);
        for waited in [SECOND * 10, SECOND * 11] {
            counters.handle(&Event::Started { task, waited });
        }
        counters.handle(&Event::Expired { task, late: SECOND });
    }
    let all = taken(&counters);
    let mail = of(&all, "mail", "mail.send");
    assert_eq!((mail.slo_met, mail.slo_counted), (1, 3));
    let bulk = of(&all, "bulk", "report.export");
    assert_eq!((bulk.slo_met, bulk.slo_counted, bulk.expired), (0, 0, 1));
}

#[test]
fn the_time_of_a_pause_is_no_time_of_waiting() {
    let now = SystemTime::now();
    let (from, to) = (now - SECOND * 100, now - SECOND * 5);
    let counters = counters(Snapshot::of_pauses("bulk", "mail", from, to));
    let id = TaskId::random();
    let task = task("mail.send", "mail", &id);
    for waited in [SECOND * 103, SECOND * 120] {
        counters.handle(&Event::Started { task, waited });
    }
    let mail = of(&taken(&counters), "mail", "mail.send");
    assert_eq!((mail.slo_met, mail.slo_counted), (1, 2));
    assert!(counters.is_paused((0, 1), now), "it is paused now");
    assert!(counters.is_paused((0, 0), now - SECOND * 10), "it was");
    assert!(!counters.is_paused((0, 0), now - SECOND), "it is no more");
}

#[test]
fn what_the_map_does_not_have_is_counted_as_one() {
    let counters = counters(Snapshot::default());
    let id = TaskId::random();
    for number in 0..100 {
        let name = format!("unknown.{number}");
        let task = task(&name, "nowhere", &id);
        counters.handle(&Event::Started {
            task,
            waited: SECOND,
        });
    }
    // Promoted, say.
    let task = task("mail.send", "bulk", &id);
    counters.handle(&Event::Done { task, ran: SECOND });
    let all = taken(&counters);
    assert_eq!(all.len(), 2, "{all:?}");
    assert_eq!(of(&all, UNKNOWN, UNKNOWN).started, 100);
    assert_eq!(of(&all, "bulk", "mail.send").done, 1);
}

#[test]
fn a_task_may_have_the_name_under_which_the_unknown_ones_are_counted() {
    let map = MAP.replace("report.export", UNKNOWN);
    let topology = Topology::parse(map).unwrap();
    let counters = Counters::new(&topology, KnownControls::fixed(Snapshot::default()));
    let id = TaskId::random();
    for (name, tier) in [(UNKNOWN, "bulk"), ("unknown.1", "bulk"), (UNKNOWN, "mail")] {
        let task = task(name, tier, &id);
        counters.handle(&Event::Done { task, ran: SECOND });
    }
    let mut cells: HashMap<Cell, u64> = HashMap::new();
    counters.take(|cell, totals| *cells.entry(cell).or_default() += totals.done);
    let names = counters.names();
    let mut named: Vec<_> = cells
        .iter()
        .map(|((task, tier), done)| (names.tier(*tier), names.task(*task), *done))
        .collect();
    named.sort_unstable();
    assert_eq!(named, [("bulk", UNKNOWN, 2), ("mail", UNKNOWN, 1)]);
}

#[test]
fn no_event_is_lost_between_threads_that_count_and_one_that_takes() {
    let counters = counters(Snapshot::default());
    let (mut total, each, threads) = (0, 20_000, 4);
    std::thread::scope(|scope| {
        let counting: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    let id = TaskId::random();
                    let task = task("mail.send", "mail", &id);
                    for _ in 0..each {
                        counters.handle(&Event::Done { task, ran: SECOND });
                    }
                })
            })
            .collect();
        while !counting.iter().all(|thread| thread.is_finished()) {
            counters.take(|_, totals| total += totals.done);
        }
    });
    counters.take(|_, totals| total += totals.done);
    assert_eq!(total, each * threads);
}
