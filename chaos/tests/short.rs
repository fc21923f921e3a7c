//! A run of a quarter of a minute as part of all tests: every part of the suite works, and nothing
//! is lost.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::process::Command;

#[test]
fn a_short_run_loses_nothing() {
    let run = Command::new(env!("CARGO_BIN_EXE_chaos"))
        .args(["--seed", "2", "--nodes", "1", "--minutes", "0.25"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&run.stdout);
    let errors = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{text}{errors}");
    assert!(text.contains("LOST                      0"), "{text}");
}
