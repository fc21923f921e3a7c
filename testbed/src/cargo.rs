//! Cargo, run by a program that cargo runs.

use std::process::Command;

/// What cargo tells a program about the program's own package.
const ABOUT_THE_PACKAGE: [&str; 2] = ["CARGO_MANIFEST_", "CARGO_PKG_"];

/// The cargo that runs this program, or the one on the path, as if it were called from a shell.
///
/// Some build scripts, ring's for one, run again when those variables change, and with them half of
/// all crates is built anew: so the inner cargo must not see them, nor the next outer one differ.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if ABOUT_THE_PACKAGE.iter().any(|it| name.starts_with(it)) {
            command.env_remove(&*name);
        }
    }
    command
}
