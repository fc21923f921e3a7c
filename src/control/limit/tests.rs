//! Many processes, one limit: what they start in any time, whatever is late or lost.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod world;

use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use proptest::prelude::*;
use tokio::time::Instant;

use world::World;

use super::local::{Ended, Local, Start};
use super::share::{LimitParts, Pool};
use super::{Gate, Shared, Signals, Snapshot};
use crate::topology::{Limit, LimitScope, Rate, Topology};

fn limit(rate: Option<&str>, burst: u32, running: Option<u32>) -> Limit {
    let rate = rate.map(|rate| rate.parse::<Rate>().unwrap().with_burst(burst));
    Limit {
        rate,
        running,
        ..Limit::NONE
    }
}

#[test]
fn processes_that_all_want_it_reach_the_rate_and_never_more() {
    for (rate, burst, processes) in [
        ("100/s", 10, 1),
        ("100/s", 10, 3),
        ("100/s", 100, 8),
        ("20/s", 1, 3),
        ("10/s", 2, 5),
        ("50/s", 7, 20),
        ("30/m", 1, 4),
    ] {
        let limit = limit(Some(rate), burst, None);
        let mut world = World::new(limit, processes);
        world.run(Duration::from_secs(60));
        world.check_rate();
        let wanted = world.limit.rate.unwrap().per_second() * 60.0;
        let started = world.starts.len() as f64;
        assert!(
            started >= wanted * 0.95,
            "{rate}, {burst}, {processes} processes: {started} of {wanted}"
        );
        let fewest = world.started.iter().min().copied().unwrap();
        assert!(
            fewest as f64 >= wanted / processes as f64 * 0.5,
            "{rate}, {burst}: {:?}",
            world.started
        );
    }
}

#[test]
fn one_an_hour_is_one_an_hour_whoever_has_the_share() {
    let mut world = World::new(limit(Some("1/h"), 1, None), 3);
    world.step = Duration::from_millis(50);
    world.run(Duration::from_secs(3 * 3_600 + 60));
    world.check_rate();
    assert!((3..=4).contains(&world.starts.len()), "{:?}", world.starts);
}

#[test]
fn what_one_process_does_not_want_the_others_have() {
    let mut world = World::new(limit(Some("100/s"), 10, None), 3);
    world.run(Duration::from_secs(5));
    world.processes[0].is_busy = false;
    world.processes[1].is_busy = false;
    world.run(Duration::from_secs(3));
    world.starts.clear();
    world.run(Duration::from_secs(20));
    assert!(world.starts.len() >= 1_900, "{}", world.starts.len());
}

#[test]
fn running_tasks_are_shared_and_taken_over_when_a_process_dies() {
    for (running, processes) in [(4, 2), (1, 3), (2, 5), (10, 3)] {
        let mut world = World::new(limit(None, 0, Some(running)), processes);
        world.run(Duration::from_secs(30));
        assert_eq!(world.most_running, running as usize);
        let started = world.starts.len() as f64;
        let possible = f64::from(running) * 30.0 / 0.05;
        assert!(
            started > possible * 0.85,
            "{running} of {processes}: {started} of {possible}"
        );
        for index in 1..processes {
            world.processes[index].is_dead = true;
            world.processes[index].running.clear();
        }
        world.run(Duration::from_secs(45));
        world.starts.clear();
        world.run(Duration::from_secs(10));
        let possible = f64::from(running) * 10.0 / 0.05;
        assert!(
            world.starts.len() as f64 > possible * 0.85,
            "{}",
            world.starts.len()
        );
        assert_eq!(world.most_running, running as usize);
    }
}

#[test]
fn a_share_of_the_rate_outlives_the_database_and_places_do_not() {
    let mut world = World::new(limit(Some("100/s"), 10, None), 3);
    world.run(Duration::from_secs(5));
    world.is_away = true;
    world.starts.clear();
    world.run(Duration::from_secs(60));
    assert!(world.starts.len() > 5_700, "{}", world.starts.len());
    world.is_away = false;
    world.run(Duration::from_secs(5));
    assert_eq!(world.pool.holders.len(), 3, "nobody was taken for dead");
    world.check_rate();

    let mut world = World::new(limit(None, 0, Some(4)), 2);
    world.run(Duration::from_secs(5));
    world.is_away = true;
    world.run(Duration::from_secs(21));
    world.starts.clear();
    world.run(Duration::from_secs(10));
    assert_eq!(world.starts.len(), 0);
    world.is_away = false;
    world.run(Duration::from_secs(5));
    assert!(world.starts.len() > 300, "{}", world.starts.len());
}

#[test]
fn nobody_asks_while_nothing_is_to_be_started() {
    let mut world = World::new(limit(Some("100/s"), 10, None), 2);
    world.run(Duration::from_secs(5));
    for process in &mut world.processes {
        process.is_busy = false;
    }
    world.run(Duration::from_secs(5));
    assert_eq!(world.pool.holders, []);
    let version = world.version;
    world.run(Duration::from_secs(5));
    assert_eq!(world.version, version);
    assert!(
        world
            .processes
            .iter()
            .all(|it| it.local.pause(world.now).is_none())
    );
}

#[test]
fn a_changed_limit_is_followed_by_those_who_hold_shares() {
    let mut world = World::new(limit(Some("100/s"), 10, Some(50)), 3);
    world.run(Duration::from_secs(5));
    let lower = limit(Some("20/s"), 5, Some(3));
    world.limit = lower.clone();
    for process in &mut world.processes {
        process.local.set_limit(Some(&lower), world.now);
    }
    world.run(Duration::from_secs(2));
    (world.starts, world.most_running) = (Vec::new(), 0);
    world.run(Duration::from_secs(20));
    world.check_rate();
    assert!(world.starts.len() >= 380, "{}", world.starts.len());
    assert!(world.most_running <= 3);
}

#[test]
fn a_limit_that_ends_and_comes_back_is_there_at_once() {
    let limit = limit(Some("50/s"), 10, Some(4));
    let mut world = World::new(limit.clone(), 3);
    world.run(Duration::from_secs(5));
    for process in &mut world.processes {
        process.is_busy = false;
        process.local.set_limit(None, world.now);
    }
    world.run(Duration::from_secs(1));
    assert_eq!(world.pool.holders, []);
    world.run(Duration::from_secs(60));
    for process in &mut world.processes {
        process.is_busy = true;
        process.local.set_limit(Some(&limit), world.now);
    }
    world.starts.clear();
    world.run(Duration::from_secs(2));
    world.check_rate();
    assert!(world.starts.len() >= 95, "{}", world.starts.len());
}

#[test]
fn what_runs_while_there_is_no_limit_counts_when_it_comes_back() {
    let limit = limit(None, 0, Some(4));
    let mut world = World::new(limit.clone(), 2);
    world.run = Duration::from_secs(30);
    world.run(Duration::from_secs(5));
    assert_eq!(world.starts.len(), 4);
    for process in &mut world.processes {
        process.is_busy = false;
        process.local.set_limit(None, world.now);
    }
    world.run(Duration::from_secs(5));
    for process in &mut world.processes {
        process.is_busy = true;
        process.local.set_limit(Some(&limit), world.now);
    }
    world.run(Duration::from_secs(60));
    assert_eq!(world.most_running, 4);
    assert!(world.starts.len() >= 8, "{}", world.starts.len());
}

#[tokio::test(start_paused = true)]
async fn a_token_that_comes_between_two_questions_wakes_whoever_was_refused() {
    let alone = Limit {
        scope: LimitScope::Process,
        ..limit(Some("10/s"), 1, None)
    };
    let signals = Arc::new(Signals::new());
    let gate = Arc::new(Gate::new(&alone, &signals));
    drop(gate.try_start());
    assert_eq!(gate.startable(true), 0);
    let opened = signals.opened();
    tokio::time::advance(Duration::from_millis(100)).await;
    assert_eq!(gate.next_at(), None);
    assert!(opened.has_changed().unwrap());
    // Once: nobody must ask all the time while no slot is free.
    let opened = signals.opened();
    assert_eq!(gate.next_at(), None);
    assert!(!opened.has_changed().unwrap());
}

#[test]
fn a_share_counts_from_the_answer_that_grants_it() {
    let limit = limit(Some("10/s"), 10, None);
    let (begin, parts) = (Instant::now(), LimitParts::of(&limit));
    let mut local = Local::new(&limit, begin, UNIX_EPOCH);
    assert_eq!(local.try_start(begin), Start::No { is_new: true });
    let report = local.report(begin);
    let outcome = Pool::empty(1e9).round(parts, &report, &[], 1e9);
    let later = begin + Duration::from_secs(1);
    assert!(local.answered(outcome.answer.as_ref(), begin, later));
    assert_eq!(local.startable(later), 0);
    assert_eq!(local.startable(later + Duration::from_millis(500)), 5);
}

#[test]
fn a_process_that_stood_still_before_it_read_an_answer_starts_nothing() {
    let limit = limit(Some("10/s"), 10, None);
    let (begin, parts) = (Instant::now(), LimitParts::of(&limit));
    let mut local = Local::new(&limit, begin, UNIX_EPOCH);
    assert_eq!(local.try_start(begin), Start::No { is_new: true });
    let report = local.report(begin);
    let outcome = Pool::empty(1e9).round(parts, &report, &[], 1e9);
    let later = begin + Duration::from_secs(60);
    local.answered(outcome.answer.as_ref(), begin, later);
    // Others may have taken its share meanwhile.
    assert_eq!(local.startable(later + Duration::from_secs(1)), 0);
}

#[test]
fn a_process_whose_machine_slept_starts_nothing_until_a_round_is_answered() {
    let mut world = World::new(limit(Some("100/s"), 10, Some(5)), 2);
    world.run(Duration::from_secs(5));
    world.is_away = true;
    let sleeper = &mut world.processes[0].local;
    // The monotonic clock does not show it.
    sleeper.set_wall_clock(UNIX_EPOCH + Duration::from_secs(60));
    let started = world.started.clone();
    world.run(Duration::from_secs(5));
    assert_eq!(world.started[0], started[0]);
    assert!(world.started[1] > started[1]);
    world.is_away = false;
    world.run(Duration::from_secs(5));
    assert!(world.started[0] > started[0]);
    world.check_rate();
}

#[test]
fn a_gate_that_lost_its_limit_counts_what_runs_when_there_is_a_limit_again() {
    let map = |limit: &str| {
        let map = format!(
            "app = 'shop'\n[tiers.normal]\nqueue = 'quorum'\n{limit}\n[groups.all]\ntiers = ['normal']\nconcurrency = 4\n[tasks]\n'a' = 'normal'"
        );
        Snapshot::of(&Topology::parse(map).unwrap())
    };
    let limited = map("limit = { running = 1, scope = 'process' }");
    let shared = Shared::new(&limited);
    let gate = || shared.gates.borrow().tiers.get("normal").cloned();
    let permit = gate().unwrap().try_start().unwrap();
    shared.follow(&map(""));
    assert!(gate().is_none());
    shared.follow(&limited);
    assert!(gate().unwrap().try_start().is_none());
    drop(permit);
    assert!(gate().unwrap().try_start().is_some());
}

#[test]
fn a_limit_of_each_process_needs_nobody_else() {
    let alone = Limit {
        scope: LimitScope::Process,
        ..limit(Some("10/s"), 3, Some(2))
    };
    let begin = Instant::now();
    let mut local = Local::new(&alone, begin, UNIX_EPOCH);
    assert_eq!(local.try_start(begin), Start::Yes);
    assert_eq!(local.try_start(begin), Start::Yes);
    assert_eq!(local.try_start(begin), Start::No { is_new: true });
    assert_eq!(local.next_at(begin), None, "a place is missing");
    assert_eq!(local.end(), Ended::Opened);
    assert_eq!(local.try_start(begin), Start::Yes);
    assert_eq!(local.end(), Ended::Opened);
    assert_eq!(local.try_start(begin), Start::No { is_new: false });
    assert_eq!(
        local.next_at(begin),
        Some(begin + Duration::from_millis(100))
    );
    assert_eq!(local.startable(begin + Duration::from_secs(9)), 1);
    assert_eq!(local.pause(begin), None);
}

#[derive(Debug, Clone)]
enum Fault {
    Crash(usize),
    Join,
    Toggle(usize),
    Away(bool),
    Lose(u32),
    Slow(u64),
}

fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        (0..6_usize).prop_map(Fault::Crash),
        Just(Fault::Join),
        (0..6_usize).prop_map(Fault::Toggle),
        any::<bool>().prop_map(Fault::Away),
        (0..60_u32).prop_map(Fault::Lose),
        (2..400_u64).prop_map(Fault::Slow),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn no_fault_lets_more_start_than_the_limit(
        rate in 1..200_u32,
        burst in 1..30_u32,
        running in prop::option::of(1..20_u32),
        processes in 1..6_usize,
        seed in any::<u64>(),
        faults in prop::collection::vec((fault(), 1..8_u64), 1..12),
    ) {
        let rate = format!("{rate}/s");
        let mut world = World::new(limit(Some(&rate), burst, running), processes);
        world.seed = seed;
        for (fault, seconds) in faults {
            let number = world.processes.len();
            match fault {
                Fault::Crash(index) => {
                    let process = &mut world.processes[index % number];
                    process.is_dead = true;
                    process.running.clear();
                }
                Fault::Join => world.join(),
                Fault::Toggle(index) => {
                    let process = &mut world.processes[index % number];
                    process.is_busy = !process.is_busy;
                }
                Fault::Away(is_away) => world.is_away = is_away,
                Fault::Lose(lost) => world.lost = lost,
                Fault::Slow(latency) => world.latency = Duration::from_millis(latency),
            }
            world.run(Duration::from_secs(seconds));
        }
        let most = world.most_above_rate();
        prop_assert!(most <= f64::from(burst) + 1e-6, "{most} of {burst} at once");
        if let Some(running) = running {
            prop_assert!(world.most_running <= running as usize);
        }
    }
}
