//! Installs what a machine lacks, where it may: as root on Debian or Ubuntu.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::guard::End;
use crate::postgres::Postgres;
use crate::process;
use crate::rabbitmq::Release;

/// The units that the packages we install would start and enable on an ordinary Debian.
const UNITS: [&str; 6] = [
    "rabbitmq-server.service",
    "postgresql.service",
    "pgbouncer.service",
    "prometheus.service",
    "epmd.service",
    "epmd.socket",
];

/// The same for a Debian without systemd.
const INIT_SCRIPTS: [&str; 4] = ["rabbitmq-server", "postgresql", "pgbouncer", "prometheus"];

const POLICY: &str = "/usr/sbin/policy-rc.d";

/// Sees to it that private servers can be started: installs what is missing where it may, and unpacks
/// the newest RabbitMQ where that is asked for. Says on standard error what it does.
pub async fn programs() -> Result<()> {
    let mut missing = Vec::new();
    if Release::is_missing()? {
        missing.push("rabbitmq-server");
    }
    if Postgres::is_missing() {
        missing.push("postgresql");
    }
    if !missing.is_empty() {
        packages(&missing).await?;
    }
    Release::provide().await.map(drop)
}

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
    let units_before: Vec<&str> = UNITS.into_iter().filter(|name| is_enabled(name)).collect();
    let scripts_before: Vec<&str> = INIT_SCRIPTS
        .into_iter()
        .filter(|name| has_script(name))
        .collect();
    let policy = NoStart::begin()?;

    let installed = match install(names).await {
        Ok(()) => Ok(()),
        // The lists of packages may be missing, or older than what the servers have.
        Err(_) => match apt(&["update"]).await {
            Ok(()) => install(names).await,
            Err(error) => Err(error),
        },
    };

    for unit in UNITS {
        if !units_before.contains(&unit) && is_enabled(unit) {
            disable("systemctl", &["disable", "--now", unit]).await;
        }
    }
    for script in INIT_SCRIPTS {
        if !scripts_before.contains(&script) && has_script(script) && !on_path("systemctl") {
            disable("update-rc.d", &[script, "disable"]).await;
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
    process::run_ending(command, Duration::from_secs(600), End::Terminate).await?;
    Ok(())
}

fn is_enabled(service: &str) -> bool {
    Command::new("systemctl")
        .args(["is-enabled", "--quiet", service])
        .output()
        .is_ok_and(|output| output.status.success())
}

fn has_script(service: &str) -> bool {
    Path::new("/etc/init.d").join(service).exists()
}

async fn disable(program: &str, arguments: &[&str]) {
    let mut command = Command::new(program);
    command.args(arguments);
    if let Err(error) = process::run(command, Duration::from_secs(60)).await {
        eprintln!("a service that was not there before may be enabled now: {error:#}");
    }
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
