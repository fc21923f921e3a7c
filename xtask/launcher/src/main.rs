//! `cargo xtask`: builds xtask together with the workspace, and becomes it.
//!
//! Built by itself (`cargo run --package xtask`), xtask would have dependencies with fewer features than the
//! tests have, and eighty of them would be compiled twice.

use std::io::Error;
use std::os::unix::process::CommandExt;
use std::process::{Command, exit};

fn main() -> Result<(), Error> {
    let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    build.args(["build", "--workspace", "--all-features", "--bin", "xtask"]);
    // Features of dev-dependencies count only where a test is built.
    build.args(["--test", "services"]);
    // As in the testbed's `cargo()`: build scripts would run again when these change.
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("CARGO_MANIFEST_") || name.starts_with("CARGO_PKG_") {
            build.env_remove(&*name);
        }
    }
    let status = build.current_dir(env!("CARGO_MANIFEST_DIR")).status()?;
    if !status.success() {
        exit(status.code().unwrap_or(1));
    }
    let xtask = std::env::current_exe()?.with_file_name("xtask");
    Err(Command::new(xtask).args(std::env::args_os().skip(1)).exec())
}
