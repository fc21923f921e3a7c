//! Installs what a machine lacks, where it may: as root on Debian or Ubuntu.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::process;

/// The services that the packages we install would start and enable on an ordinary Debian.
const SERVICES: [&str; 4] = [
    "rabbitmq-server.service",
    "postgresql.service",
    "epmd.service",
    "epmd.socket",
];

const POLICY: &str = "/usr/sbin/policy-rc.d";

/// Whether this process may install packages and switch users.
pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Whether a program of that name can be run.
pub(crate) fn on_path(program: &str) -> bool {
    std::env::var_os("PATH").is_some_and(|path| {
        std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
    })
}

/// Installs packages with apt, and leaves no service running or enabled that was not before.
pub(crate) async fn packages(names: &[&str]) -> Result<()> {
    let names_shown = names.join(" and ");
    if !on_path("apt-get") || !is_root() {
        bail!(
            "this machine lacks {names_shown}, and installing from here needs root on Debian or \
             Ubuntu: install with the system's package manager, or start Docker, or set AMQP_URL \
             and DATABASE_URL to servers that are running"
        );
    }
    eprintln!("installing {names_shown} with apt-get (no service is started or enabled)");
    let enabled_before: Vec<bool> = SERVICES.iter().map(|name| is_enabled(name)).collect();
    let policy = NoStart::begin()?;

    let installed = match install(names).await {
        Ok(()) => Ok(()),
        // The lists of packages may be missing, or older than what the servers have.
        Err(_) => match apt(&["update"]).await {
            Ok(()) => install(names).await,
            Err(error) => Err(error),
        },
    };

    for (name, was_enabled) in SERVICES.iter().zip(enabled_before) {
        if !was_enabled && is_enabled(name) {
            let mut command = Command::new("systemctl");
            command.args(["disable", "--now", name]);
            // Without systemd running there is nothing to stop, and disabling still works.
            if let Err(error) = process::run(command, Duration::from_secs(60)).await {
                eprintln!("could not disable {name}: {error:#}");
            }
        }
    }
    drop(policy);
    installed.with_context(|| format!("could not install {names_shown}"))
}

async fn install(names: &[&str]) -> Result<()> {
    let mut arguments = vec!["install", "--yes", "--no-install-recommends"];
    arguments.extend(names);
    apt(&arguments).await
}

async fn apt(arguments: &[&str]) -> Result<()> {
    let mut command = Command::new("apt-get");
    command
        .args(["-o", "DPkg::Lock::Timeout=120"])
        .args(arguments)
        .env("DEBIAN_FRONTEND", "noninteractive");
    process::run(command, Duration::from_secs(600))
        .await
        .map(|_| ())
}

fn is_enabled(service: &str) -> bool {
    Command::new("systemctl")
        .args(["is-enabled", "--quiet", service])
        .output()
        .is_ok_and(|output| output.status.success())
}

/// While it lives, packages do not start their services: Debian's own switch for that is a script
/// that forbids it. A policy that the machine already has stays in force.
struct NoStart {
    ours: Option<PathBuf>,
}

impl NoStart {
    fn begin() -> Result<NoStart> {
        let path = Path::new(POLICY);
        if path.exists() {
            return Ok(NoStart { ours: None });
        }
        fs::write(path, "#!/bin/sh\nexit 101\n")
            .and_then(|()| fs::set_permissions(path, fs::Permissions::from_mode(0o755)))
            .with_context(|| format!("could not write {POLICY}"))?;
        Ok(NoStart {
            ours: Some(path.to_owned()),
        })
    }
}

impl Drop for NoStart {
    fn drop(&mut self) {
        if let Some(path) = &self.ours {
            let _ = fs::remove_file(path);
        }
    }
}
