//! A private PgBouncer in front of a database.

use std::fs;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::Signal;
use tokio::sync::Mutex;

use super::database::Database;
use super::server::other_user;
use crate::folder::Folder;
use crate::guard::End;
use crate::ports::Port;
use crate::process::{Process, until};
use crate::provide::{is_root, packages};
use crate::url::with_path;

const LIMIT: Duration = Duration::from_secs(30);

/// How long a client keeps a server connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolMode {
    /// Until it disconnects.
    Session,
    /// For a transaction.
    Transaction,
}

/// A private PgBouncer on 127.0.0.1 in front of one server. It lets everyone in. Dropped, it is ended.
#[derive(Debug)]
pub struct PgBouncer {
    program: PathBuf,
    run_as: Option<(u32, u32)>,
    port: Port,
    url: String,
    process: Mutex<Option<Process>>,
    folder: Folder,
}

impl PgBouncer {
    /// Installs PgBouncer if it is missing and that is allowed.
    ///
    /// # Errors
    /// Says what to install otherwise.
    pub async fn provide() -> Result<()> {
        match program() {
            Ok(_) => Ok(()),
            Err(_) => packages(&["pgbouncer"]).await,
        }
    }

    /// Starts one in front of a database, with so many server connections at most.
    pub async fn start(database: &Database, mode: PoolMode, connections: u32) -> Result<PgBouncer> {
        let run_as = is_root().then(other_user).transpose()?;
        let folder = match run_as {
            None => Folder::create("pgbouncer")?,
            Some(_) => Folder::create_reachable("pgbouncer")?,
        };
        if let Some((user, group)) = run_as {
            chown(folder.path(), Some(user), Some(group))?;
        }
        let port = Port::reserve()?;
        let server = Server::of(database.url())?;
        let mode = match mode {
            PoolMode::Session => "session",
            PoolMode::Transaction => "transaction",
        };
        let Server {
            user,
            password,
            host,
            port: server_port,
            name,
        } = &server;
        let password = match password {
            Some(password) => format!(" password={password}"),
            None => String::new(),
        };
        let number = port.number();
        // With a user of its own for the server, PgBouncer need not know any of the clients.
        let settings = format!(
            "[databases]\n{name} = host={host} port={server_port} dbname={name} user={user}{password}\n\
             [pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {number}\nunix_socket_dir =\n\
             auth_type = any\npool_mode = {mode}\ndefault_pool_size = {connections}\n\
             max_client_conn = 300\nserver_login_retry = 1\n"
        );
        fs::write(folder.path().join("pgbouncer.ini"), settings)?;
        let pooler = PgBouncer {
            program: program()?,
            run_as,
            url: with_path(&format!("postgres://{user}@127.0.0.1:{number}"), name),
            port,
            process: Mutex::new(None),
            folder,
        };
        pooler.start_again().await?;
        Ok(pooler)
    }

    /// Starts it again after [`PgBouncer::kill`].
    pub async fn start_again(&self) -> Result<()> {
        let mut process = self.process.lock().await;
        if process.is_some() {
            return Ok(());
        }
        let mut command = Command::new(&self.program);
        command.arg(self.folder.path().join("pgbouncer.ini"));
        command.current_dir(self.folder.path()).env("LC_ALL", "C");
        if let Some((user, group)) = self.run_as {
            command.uid(user).gid(group);
        }
        let output = self.folder.path().join("output.log");
        let mut started = Process::spawn("PgBouncer", command, &output, End::Kill)?;
        let waited = until("accepting connections", LIMIT, async || {
            started.check()?;
            let address = ("127.0.0.1", self.port.number());
            Ok(tokio::net::TcpStream::connect(address).await.is_ok())
        });
        waited.await.context("PgBouncer did not start")?;
        *process = Some(started);
        Ok(())
    }

    /// Kills it, and with it all connections through it.
    pub async fn kill(&self) -> Result<()> {
        let mut process = self.process.lock().await;
        if let Some(running) = process.as_mut() {
            running.signal(Signal::KILL)?;
            running.ended(LIMIT).await?;
            *process = None;
        }
        Ok(())
    }

    /// The URL that leads clients through it to the database.
    pub fn url(&self) -> &str {
        &self.url
    }
}

/// The parts of a server's URL.
struct Server {
    user: String,
    password: Option<String>,
    host: String,
    port: u16,
    name: String,
}

impl Server {
    fn of(url: &str) -> Result<Server> {
        let options: sqlx::postgres::PgConnectOptions = url.parse()?;
        let userinfo = url.split_once("://").and_then(|(_, rest)| {
            let (userinfo, _) = rest.split_once('@')?;
            Some(userinfo)
        });
        let password = userinfo.and_then(|it| it.split_once(':'));
        Ok(Server {
            user: options.get_username().to_owned(),
            password: password.map(|(_, password)| password.to_owned()),
            host: options.get_host().to_owned(),
            port: options.get_port(),
            name: options
                .get_database()
                .context("the URL of a database names it")?
                .to_owned(),
        })
    }
}

/// Debian has it where only root looks for programs.
fn program() -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain([PathBuf::from("/usr/sbin")])
        .map(|folder| folder.join("pgbouncer"))
        .find(|program| program.is_file())
        .context(
            "PgBouncer is not on this machine: run `cargo xtask test`, which installs it where it \
             may, or install the package pgbouncer",
        )
}
