//! A server that counts what its statements read, and shows their plans.

use std::time::Duration;

use anyhow::{Context, Result};
use sqlx::{AssertSqlSafe, Executor, PgPool};
use tierline_testbed::{Database, Postgres};
use tokio::time::sleep;

/// How the text of each statement begins.
pub(crate) const CLAIM: &str = "WITH done AS";
pub(crate) const LOOK: &str = "SELECT of.tier";

const SETTINGS: [&str; 8] = [
    "shared_preload_libraries=pg_stat_statements,auto_explain",
    "pg_stat_statements.track=top",
    "auto_explain.log_analyze=on",
    "auto_explain.log_buffers=on",
    "auto_explain.log_timing=off",
    "shared_buffers=1GB",
    "max_wal_size=8GB",
    // Nobody gathers statistics, unless a benchmark says so.
    "autovacuum=off",
];

pub(crate) struct CountingServer {
    server: Postgres,
    admin: PgPool,
}

/// What a statement has read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reads {
    /// Buffers of each call.
    pub(crate) buffers: f64,
    /// Rows of each call.
    pub(crate) rows: f64,
    /// Milliseconds of each call.
    pub(crate) milliseconds: f64,
}

impl CountingServer {
    /// A server on which nothing but the benchmark itself vacuums and analyses.
    pub(crate) async fn start() -> Result<Self> {
        Self::start_with(&SETTINGS).await
    }

    /// A server that vacuums as every other one does.
    pub(crate) async fn start_with_autovacuum() -> Result<Self> {
        Self::start_with(&SETTINGS[..SETTINGS.len() - 1]).await
    }

    async fn start_with(settings: &[&str]) -> Result<Self> {
        let server = Postgres::start_with(settings).await?;
        let admin = PgPool::connect(&server.url()).await?;
        admin.execute("CREATE EXTENSION pg_stat_statements").await?;
        Ok(Self { server, admin })
    }

    pub(crate) async fn database(&self) -> Result<Database> {
        self.server.database().await
    }

    /// Forgets what was read so far.
    pub(crate) async fn reset(&self) -> Result<()> {
        self.admin
            .execute("SELECT pg_stat_statements_reset()")
            .await?;
        Ok(())
    }

    /// What the statement that begins so has read in a database since the last reset.
    pub(crate) async fn reads(&self, database: &Database, beginning: &str) -> Result<Reads> {
        let name = database.url().rsplit('/').next().unwrap_or_default();
        let found: Option<(f64, f64, f64)> = sqlx::query_as(
            "SELECT (sum(shared_blks_hit + shared_blks_read) / sum(calls))::float8, \
                 (sum(rows) / sum(calls))::float8, sum(total_exec_time) / sum(calls) \
             FROM pg_stat_statements JOIN pg_database ON pg_database.oid = dbid \
             WHERE datname = $1 AND starts_with(query, $2) HAVING sum(calls) > 0",
        )
        .bind(name)
        .bind(beginning)
        .fetch_optional(&self.admin)
        .await?;
        let (buffers, rows, milliseconds) =
            found.with_context(|| format!("no statement begins with {beginning:?}"))?;
        Ok(Reads {
            buffers,
            rows,
            milliseconds,
        })
    }

    /// The longest run of the statement that begins so, in a database since the last reset.
    pub(crate) async fn longest(&self, database: &Database, beginning: &str) -> Result<Duration> {
        let name = database.url().rsplit('/').next().unwrap_or_default();
        let found: Option<f64> = sqlx::query_scalar(
            "SELECT max(max_exec_time) FROM pg_stat_statements JOIN pg_database ON pg_database.oid = dbid \
             WHERE datname = $1 AND starts_with(query, $2)",
        )
        .bind(name)
        .bind(beginning)
        .fetch_one(&self.admin)
        .await?;
        let milliseconds =
            found.with_context(|| format!("no statement begins with {beginning:?}"))?;
        Ok(Duration::from_secs_f64(milliseconds / 1e3))
    }

    /// The last plan of the statement that begins so, of those that run meanwhile.
    pub(crate) async fn plan_while<T>(
        &self,
        beginning: &str,
        work: impl Future<Output = Result<T>>,
    ) -> Result<String> {
        let before = self.server.log()?.len();
        self.log_plans("0").await?;
        let worked = work.await;
        self.log_plans("-1").await?;
        worked?;
        let log = self.server.log()?;
        let query = format!("Query Text: {beginning}");
        let mut entries = log[before..].rsplit("LOG:");
        let plan =
            entries.find(|entry| entry.contains(&query) && !entry.contains("Tuples Inserted: 0\n"));
        let plan = plan.context("no plan was logged")?;
        // The plan is indented; the text of the query before it is long, and the next entry begins after it.
        let lines = plan
            .lines()
            .skip(2)
            .take_while(|line| line.starts_with('\t'));
        Ok(lines.collect::<Vec<_>>().join("\n"))
    }

    async fn log_plans(&self, minimum: &str) -> Result<()> {
        let setting = format!("ALTER SYSTEM SET auto_explain.log_min_duration = '{minimum}'");
        self.admin.execute(AssertSqlSafe(setting)).await?;
        self.admin.execute("SELECT pg_reload_conf()").await?;
        // Each session reads it before its next statement, after the server has told it to.
        sleep(Duration::from_millis(300)).await;
        Ok(())
    }
}
