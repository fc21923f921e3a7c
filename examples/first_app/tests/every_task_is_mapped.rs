//! No task of the app escapes the map.

#![allow(clippy::unwrap_used)] // a test that cannot go on should stop

// Without this line the app would not be linked into the test, and its handlers not be found.
use first_app as _;
use tierline::task::Sentinel;
use tierline::{Registry, Topology};

const MAP: &str = include_str!("../topology.toml");

#[test]
fn every_task_is_mapped() {
    tierline::assert_every_task_is_mapped("topology.toml");
}

#[test]
fn every_mapped_task_has_a_handler() {
    tierline::assert_every_task_is_mapped_strictly("topology.toml");
}

#[test]
fn the_handlers_of_both_crates_are_found() {
    let registry = Registry::collected().unwrap();
    let file = |task| registry.get(task).unwrap().place().file();
    assert!(file("room.book").ends_with("first_app/src/lib.rs"));
    assert!(file("billing.charge").ends_with("first_app/billing/src/lib.rs"));
}

#[test]
fn a_line_taken_out_of_the_map_is_missed_with_the_handler_s_place_and_the_line_to_add() {
    let removed = "\"billing.charge\" = { tier = \"high\", priority = 9 }\n";
    assert!(MAP.contains(removed));
    let topology = Topology::parse(MAP.replace(removed, "")).unwrap();
    let line = Registry::collected()
        .unwrap()
        .get("billing.charge")
        .unwrap()
        .place()
        .line();
    let report = Sentinel::collected().check(&topology);
    assert!(!report.passes());
    assert_eq!(
        report.to_string(),
        format!(
            "error: 1 task is not mapped to a tier:\n  \
             billing.charge, handled at examples/first_app/billing/src/lib.rs:{line}\n\
             Add to [tasks] in the map (the tiers are high, normal):\n  \
             \"billing.charge\" = \"TIER\"\n"
        )
    );
}
