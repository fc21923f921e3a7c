//! A private Postgres server.

use std::fs;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use tokio::sync::Mutex;

use super::database::{Database, connect};
use crate::folder::Folder;
use crate::guard::End;
use crate::ports::Port;
use crate::process::{self, Process, until};
use crate::provide::is_root;

const LIMIT: Duration = Duration::from_secs(60);

/// The superuser of private servers; they trust everyone on 127.0.0.1.
const USER: &str = "tierline";

/// A private Postgres on 127.0.0.1. Dropped, it is ended and its data removed.
#[derive(Debug)]
pub struct Postgres {
    programs: PathBuf,
    run_as: Option<(u32, u32)>,
    port: Port,
    process: Mutex<Option<Process>>,
    /// Settings that the server is started with, beside those of all private servers: `name=value`.
    settings: Vec<String>,
    folder: Folder,
}

impl Postgres {
    /// Starts a new, empty server from the programs on this machine. Takes 2 to 5 s.
    pub async fn start_new() -> Result<Postgres> {
        Self::start_with(&[]).await
    }

    /// Starts a new, empty server with these settings (`name=value`).
    pub async fn start_with(settings: &[&str]) -> Result<Postgres> {
        let server = Self::prepare(settings)?;
        let mut command = server.command("initdb");
        command
            .args(["--username", USER, "--auth", "trust", "--encoding", "UTF8"])
            .args(["--locale", "C", "--no-sync", "--pgdata"])
            .arg(server.data());
        process::run(command, LIMIT).await?;
        server.start().await?;
        Ok(server)
    }

    /// Starts a standby of this server. From then on a commit here waits until the standby has it.
    pub async fn start_standby(&self) -> Result<Postgres> {
        let standby = Self::prepare(&[])?;
        let mut command = standby.command("pg_basebackup");
        command
            .args(["--checkpoint", "fast", "--no-sync", "--write-recovery-conf"])
            .args(["--dbname", &self.url(), "--pgdata"])
            .arg(standby.data());
        process::run(command, LIMIT).await?;
        standby.start().await?;
        let mut connection = connect(&self.url()).await?;
        for statement in [
            "ALTER SYSTEM SET synchronous_standby_names = '*'",
            "SELECT pg_reload_conf()",
        ] {
            sqlx::query(statement).execute(&mut connection).await?;
        }
        let followed = until("a synchronous standby", LIMIT, async || {
            let is_followed = sqlx::query_scalar(
                "SELECT EXISTS (SELECT FROM pg_stat_replication WHERE sync_state = 'sync')",
            );
            Ok(is_followed.fetch_one(&mut connection).await?)
        });
        followed.await?;
        Ok(standby)
    }

    /// Makes a standby a server of its own, which takes writes.
    pub async fn promote(&self) -> Result<()> {
        let mut connection = connect(&self.url()).await?;
        let promoting = sqlx::query_scalar("SELECT pg_promote()");
        let is_promoted: bool = promoting.fetch_one(&mut connection).await?;
        ensure!(is_promoted, "a standby was not promoted in time");
        Ok(())
    }

    /// A server that has a folder and a port, and is not started.
    fn prepare(settings: &[&str]) -> Result<Postgres> {
        let run_as = is_root().then(other_user).transpose()?;
        let folder = match run_as {
            None => Folder::create("postgres")?,
            Some(_) => Folder::create_reachable("postgres")?,
        };
        if let Some((user, group)) = run_as {
            chown(folder.path(), Some(user), Some(group))?;
        }
        Ok(Postgres {
            programs: programs()?,
            run_as,
            port: Port::reserve()?,
            process: Mutex::new(None),
            settings: settings.iter().map(|it| (*it).to_owned()).collect(),
            folder,
        })
    }

    /// Whether Postgres' programs are not on this machine.
    pub(crate) fn is_missing() -> bool {
        programs().is_err()
    }

    /// Starts the server again after [`Postgres::stop`] or [`Postgres::kill`].
    pub async fn start(&self) -> Result<()> {
        let mut process = self.process.lock().await;
        if process.is_some() {
            return Ok(());
        }
        let mut command = self.command("postgres");
        command.arg("-D").arg(self.data());
        let settings = [
            format!("port={}", self.port.number()),
            "listen_addresses=127.0.0.1".to_owned(),
            "unix_socket_directories=".to_owned(),
            "max_connections=300".to_owned(),
            // The data need not outlive the machine, only the server's own crashes.
            "fsync=off".to_owned(),
            "full_page_writes=off".to_owned(),
            // After a crash the old connections' locks and memory go at once.
            "restart_after_crash=on".to_owned(),
        ];
        for setting in settings.iter().chain(&self.settings) {
            command.args(["-c", setting]);
        }
        let mut started = Process::spawn("Postgres", command, &self.output(), End::Quit)?;
        let waited = until("accepting connections", LIMIT, async || {
            started.check()?;
            Ok(connect(&self.url()).await.is_ok())
        });
        waited.await.context("Postgres did not start")?;
        *process = Some(started);
        Ok(())
    }

    /// Shuts the server down, cutting its connections (Postgres' "fast" mode).
    pub async fn stop(&self) -> Result<()> {
        self.end(Signal::INT).await
    }

    /// Crashes the server: it does not write what it has in memory, and recovers when started.
    pub async fn kill(&self) -> Result<()> {
        self.end(Signal::QUIT).await
    }

    /// Kills all processes of the server with SIGKILL: none of them does anything any more. It recovers when started.
    pub async fn kill_hard(&self) -> Result<()> {
        let mut process = self.process.lock().await;
        let Some(running) = process.as_mut() else {
            return Ok(());
        };
        // Frozen, it starts no more processes. Those that it has are not in its process group.
        running.freeze().await?;
        let children = running.children()?;
        running.signal(Signal::KILL)?;
        for child in &children {
            // One may have ended by itself.
            let _ = rustix::process::kill_process(*child, Signal::KILL);
        }
        running.ended(LIMIT).await?;
        *process = None;
        let gone = until("the end of all processes", LIMIT, async || {
            Ok(children.iter().all(|child| !process::is_running(*child)))
        });
        gone.await
    }

    async fn end(&self, signal: Signal) -> Result<()> {
        let mut process = self.process.lock().await;
        if let Some(running) = process.as_mut() {
            running.signal(signal)?;
            running.ended(LIMIT).await?;
            *process = None;
        }
        Ok(())
    }

    /// Cuts every client connection of the server.
    pub async fn kill_connections(&self) -> Result<()> {
        let mut connection = connect(&self.url()).await?;
        sqlx::query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
             WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()",
        )
        .execute(&mut connection)
        .await?;
        Ok(())
    }

    /// What the server has written into its log.
    pub fn log(&self) -> Result<String> {
        let log = fs::read(self.output()).context("could not read the server's log")?;
        Ok(String::from_utf8_lossy(&log).into_owned())
    }

    /// A new, empty database, removed when it is dropped.
    pub async fn database(&self) -> Result<Database> {
        Database::create(&self.url()).await
    }

    /// The URL of the server, with its `postgres` database.
    pub fn url(&self) -> String {
        format!(
            "postgres://{USER}@127.0.0.1:{}/postgres",
            self.port.number()
        )
    }

    /// Its port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port.number()
    }

    fn output(&self) -> PathBuf {
        self.folder.path().join("output.log")
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.programs.join(program));
        command.current_dir(self.folder.path()).env("LC_ALL", "C");
        if let Some((user, group)) = self.run_as {
            command.uid(user).gid(group);
        }
        command
    }
}

/// The folder of `postgres` and `initdb`, newest version first.
fn programs() -> Result<PathBuf> {
    let mut installed: Vec<PathBuf> = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flat_map(|entries| entries.flatten())
        .map(|entry| entry.path().join("bin"))
        .collect();
    installed.sort_by_key(|folder| {
        let version = folder
            .parent()
            .and_then(Path::file_name)
            .and_then(|name| name.to_str());
        std::cmp::Reverse(version.and_then(|version| version.parse::<u32>().ok()))
    });
    let path = std::env::var_os("PATH").unwrap_or_default();
    installed
        .into_iter()
        .chain(std::env::split_paths(&path))
        .find(|folder| folder.join("postgres").is_file() && folder.join("initdb").is_file())
        .context(
            "Postgres is not on this machine: run `cargo xtask test`, which installs it where it \
             may, or install the package postgresql",
        )
}

/// A user that Postgres and PgBouncer can run as: they refuse root.
pub(super) fn other_user() -> Result<(u32, u32)> {
    let users = fs::read_to_string("/etc/passwd").context("could not read /etc/passwd")?;
    ["postgres", "nobody"]
        .iter()
        .find_map(|wanted| {
            users.lines().find_map(|line| {
                let fields: Vec<&str> = line.split(':').collect();
                let (user, group) = (fields.get(2)?.parse().ok()?, fields.get(3)?.parse().ok()?);
                (fields[0] == *wanted).then_some((user, group))
            })
        })
        .context("Postgres refuses to run as root, and there is no user postgres or nobody")
}
