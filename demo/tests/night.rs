//! The demo as its users run it, without a terminal, on a virtual host and a database of its own.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use tierline::Database;
use tierline_testbed::{AMQP_URL, DATABASE_URL, depth};

const TIERS: [&str; 6] = ["critical", "high", "normal", "low", "bulk", "calls"];

fn demo(arguments: &[&str]) -> Command {
    for variable in [AMQP_URL, DATABASE_URL] {
        assert!(
            std::env::var_os(variable).is_some(),
            "this test needs servers: run `cargo xtask test`, or set {variable}"
        );
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_tierline-demo"));
    command.args(arguments);
    command
}

#[test]
fn a_night_through_one_queue_and_one_with_tiers_lose_nothing() {
    let output = demo(&["--seconds", "5", "--flat"]).output().unwrap();
    let Output { status, stdout, .. } = &output;
    let text = String::from_utf8_lossy(stdout);
    assert!(status.success(), "{output:?}");
    assert!(!text.contains('\x1b'), "no terminal, no colours: {text}");

    let nights: Vec<_> = text.matches("nothing lost: ").collect();
    assert_eq!(nights.len(), 2, "{text}");
    let epitaph = "dead: documents.extract_text, retries exhausted after 5 attempts";
    assert_eq!(text.matches(epitaph).count(), 2, "{text}");
    assert!(text.contains("redriven: "), "{text}");

    let (nights, comparison) = text.split_once("side by side").unwrap();
    let summary = nights.rsplit_once("redriven\n").unwrap().1;
    for tier in TIERS {
        let has_line = |text: &str| text.lines().any(|line| line.starts_with(tier));
        assert!(has_line(summary), "{tier} in {summary}");
        assert!(has_line(comparison), "{tier} in {comparison}");
    }
    let critical = comparison.lines().find(|it| it.starts_with("critical"));
    let words: Vec<_> = critical.unwrap().split_whitespace().collect();
    let figures = words.iter().filter(|word| ["ms", "s"].contains(word));
    assert_eq!(figures.count(), 3, "the SLO and two figures: {words:?}");
}

#[test]
fn a_night_in_postgres_needs_no_broker_and_loses_nothing() {
    let mut command = demo(&["--seconds", "5", "--postgres", "--flat"]);
    let output = command.env_remove(AMQP_URL).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    let committed = text.lines().filter(|line| {
        line.starts_with("nothing lost: ") && line.contains(" committed in Postgres = ")
    });
    assert_eq!(committed.count(), 2, "{text}");
    assert_eq!(text.matches(", 0 rows are left in").count(), 2, "{text}");
    assert!(!text.contains("broker"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_night_that_is_interrupted_leaves_nothing_on_the_servers() {
    let mut command = demo(&["--seconds", "60"]);
    let mut night = Night(command.stdout(Stdio::piped()).spawn().unwrap());
    let lines = BufReader::new(night.0.stdout.take().unwrap()).lines();
    let mut printed = lines.map_while(Result::ok);
    assert!(printed.any(|line| line.contains("somebody exports")));

    let id = night.0.id();
    let broker = on_server(AMQP_URL, &format!("main-{id}-0"));
    let database = on_server(DATABASE_URL, &format!("tierline_test_{id}_0"));
    let database = Database::new(&database).unwrap();
    depth(&broker, "hotel.critical").await.unwrap();
    database.migrate().await.unwrap();

    let process = Pid::from_raw(i32::try_from(id).unwrap()).unwrap();
    kill_process(process, Signal::INT).unwrap();
    // Read to its end, so that a full pipe does not hold it up.
    printed.for_each(drop);
    assert_eq!(night.0.wait().unwrap().code(), Some(130));
    depth(&broker, "hotel.critical").await.unwrap_err();
    database.migrate().await.unwrap_err();
}

#[test]
fn without_servers_it_says_how_to_start_them() {
    let mut command = demo(&[]);
    let output = command.env_remove(AMQP_URL).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(error.contains("cargo xtask demo"), "{error}");
}

#[test]
fn a_night_of_no_length_is_refused() {
    for seconds in ["0", "4", "3601", "-1", "soon"] {
        let output = demo(&["--seconds", seconds]).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
    }
}

/// A demo that ends with the test.
struct Night(Child);

impl Drop for Night {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The URL of a virtual host or database on the server that a variable names.
fn on_server(variable: &str, name: &str) -> String {
    let url = std::env::var(variable).unwrap();
    let (scheme, rest) = url.split_once("://").unwrap();
    let (address, query) = match rest.split_once('?') {
        Some((address, query)) => (address, format!("?{query}")),
        None => (rest, String::new()),
    };
    let host = address.split('/').next().unwrap();
    format!("{scheme}://{host}/{name}{query}")
}
