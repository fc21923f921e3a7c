//! A database for one test.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};

const LIMIT: Duration = Duration::from_secs(30);

/// A database of its own, removed when this value is dropped.
#[derive(Debug)]
pub struct Database {
    name: String,
    url: String,
    server: String,
}

impl Database {
    /// Creates a database on the server of the URL `server`, whose user must be allowed to.
    pub(crate) async fn create(server: &str) -> Result<Database> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("tierline_test_{}_{number}", std::process::id());
        // A copy of template0 by files is several times faster than by the log.
        execute(
            server,
            format!("CREATE DATABASE {name} TEMPLATE template0 STRATEGY file_copy"),
        )
        .await
        .with_context(|| format!("could not create the database {name}"))?;
        Ok(Database {
            url: crate::url::with_path(server, &name),
            name,
            server: server.to_owned(),
        })
    }

    /// The URL that leads clients to this database.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Cuts every connection to this database.
    pub async fn kill_connections(&self) -> Result<()> {
        let statement = format!(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{}'",
            self.name
        );
        execute(&self.server, statement).await
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        let statement = format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.name);
        let server = self.server.clone();
        // A destructor cannot wait for a future on the test's own runtime.
        let removal = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?;
            runtime.block_on(execute(&server, statement))
        });
        // A test may have stopped its server: then there is nothing to remove.
        let _ = removal.join();
    }
}

async fn execute(server: &str, statement: String) -> Result<()> {
    let mut connection = connect(server).await?;
    connection.execute(AssertSqlSafe(statement)).await?;
    connection.close().await?;
    Ok(())
}

/// Connects, at most [`LIMIT`]: a server that is frozen, or a host that drops packets, says nothing.
pub(crate) async fn connect(server: &str) -> Result<PgConnection> {
    match tokio::time::timeout(LIMIT, PgConnection::connect(server)).await {
        Ok(connected) => Ok(connected?),
        Err(_) => bail!("Postgres did not answer within {LIMIT:?}"),
    }
}
