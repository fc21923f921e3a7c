//! What the sentinel says of handlers and maps that do not fit.

#![allow(clippy::unwrap_used)] // a test that cannot go on should stop

use std::panic::{AssertUnwindSafe, catch_unwind};

use serde::{Deserialize, Serialize};
use tierline::task::Sentinel;
use tierline::{Registry, Task, Topology};

#[derive(Serialize, Deserialize)]
struct Greet;

impl Task for Greet {
    const NAME: &'static str = "greet";
}

fn registry() -> Registry {
    let mut registry = Registry::new();
    registry.register::<Greet, _>(|_: Greet| async {}).unwrap();
    registry
}

fn map(tasks: &str) -> Topology {
    Topology::parse(format!(
        "app = \"hotel\"\n[tiers.normal]\nqueue = \"quorum\"\n\
         [groups.all]\ntiers = [\"normal\"]\nconcurrency = 1\n[tasks]\n{tasks}"
    ))
    .unwrap()
}

fn panic_message(run: impl FnOnce()) -> String {
    *catch_unwind(AssertUnwindSafe(run))
        .unwrap_err()
        .downcast::<String>()
        .unwrap()
}

#[test]
fn a_map_that_has_every_task_passes_without_a_word() {
    let report = Sentinel::of(&registry()).check(&map("\"greet\" = \"normal\""));
    assert!(report.passes_strictly());
    assert_eq!(report.to_string(), "");
}

#[test]
fn no_handler_at_all_is_a_failure() {
    let report = Sentinel::of(&Registry::new()).check(&map(""));
    assert!(!report.passes());
    assert!(report.to_string().contains("use my_app as _;"), "{report}");
}

#[test]
fn a_mapped_task_without_a_handler_is_a_warning() {
    let topology = map("\"greet\" = \"normal\"\n\"farewell\" = \"normal\"");
    let report = Sentinel::of(&registry()).check(&topology);
    assert!(report.passes() && !report.passes_strictly());
    assert_eq!(report.unhandled(), ["farewell"]);
    assert!(
        report.to_string().starts_with("warning: 1 task is mapped"),
        "{report}"
    );
}

#[test]
fn the_line_to_add_is_one_that_the_map_reads_whatever_the_name() {
    #[derive(Serialize, Deserialize)]
    struct Odd;
    impl Task for Odd {
        const NAME: &'static str = "\"odd\" \\ \u{200b}ñ";
    }
    let mut registry = Registry::new();
    registry.register::<Odd, _>(|_: Odd| async {}).unwrap();
    let sentinel = Sentinel::of(&registry);
    let report = sentinel.check(&map("")).to_string();
    let line = report.lines().find(|line| line.contains("= \"TIER\""));
    let topology = map(&line.unwrap().replace("TIER", "normal"));
    assert!(sentinel.check(&topology).passes_strictly());
}

#[test]
fn a_map_that_cannot_be_read_is_named_with_the_folder_it_was_looked_for_in() {
    let message = panic_message(|| tierline::assert_every_task_is_mapped("no/such/map.toml"));
    assert!(message.contains("no/such/map.toml"), "{message}");
    assert!(message.contains(env!("CARGO_MANIFEST_DIR")), "{message}");
}

#[cfg(feature = "macros")]
mod two_handlers_of_one_task {
    use super::*;

    #[derive(Serialize, Deserialize, Task)]
    #[task(name = "sentinel.twice")]
    struct Twice;

    #[tierline::task]
    async fn first(_: Twice) {}

    #[tierline::task]
    async fn second(_: Twice) {}

    #[test]
    fn are_reported_with_both_places() {
        let report = Sentinel::collected().check(&map("\"sentinel.twice\" = \"normal\""));
        assert_eq!(report.duplicated(), ["sentinel.twice"]);
        let text = report.to_string();
        assert_eq!(text.matches("tests/sentinel.rs:").count(), 2, "{text}");
        assert!(Registry::collected().is_err());
    }
}
