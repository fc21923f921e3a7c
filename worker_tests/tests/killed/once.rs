//! Handlers that commit their writes together with their task, while their workers are killed.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use futures_util::{StreamExt, stream};
use sqlx::PgPool;
use tierline::task::PublishRequest;
use tierline::{Tierline, Topology};
use tierline_testbed::{Database, Vhost, database, vhost};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

use crate::deployment::{PATIENCE, Worker};

const TASKS: i64 = 300;
/// How many tasks are done between two kills.
const STEP: i64 = 25;

/// A tier whose tasks each add 1 to their account.
struct Accounts {
    database: Database,
    vhost: Option<Vhost>,
    map: String,
    app: Tierline,
    pool: PgPool,
    ledger: PathBuf,
}

impl Accounts {
    async fn build(queue: &str) -> Self {
        let map = format!(
            r#"
            app = "deployment"
            [tiers.normal]
            queue = "{queue}"
            [groups.all]
            tiers = ["normal"]
            concurrency = 4
            prefetch = 2
            [tasks]
            add = "normal"
            "#
        );
        let map = map.replace("\"postgres\"", "\"postgres\"\nlease = \"2s\"");
        let database = database().await;
        let pool = PgPool::connect(database.url()).await.unwrap();
        let accounts = format!(
            "CREATE TABLE accounts AS SELECT id, 0 AS value FROM generate_series(0, {}) AS id; \
             ALTER TABLE accounts ADD PRIMARY KEY (id)",
            TASKS - 1
        );
        let accounts = sqlx::raw_sql(sqlx::AssertSqlSafe(accounts));
        accounts.execute(&pool).await.unwrap();
        let migrating = tierline::Database::new(database.url()).unwrap();
        migrating.migrate().await.unwrap();
        let mut builder =
            Tierline::builder(Topology::parse(&map).unwrap()).postgres(database.url());
        let vhost = match queue {
            "postgres" => None,
            _ => Some(vhost().await),
        };
        if let Some(vhost) = &vhost {
            builder = builder.amqp(vhost.amqp_url());
        }
        let name = format!("accounts-{queue}-{}", std::process::id());
        Self {
            app: builder.connect().await.unwrap(),
            database,
            vhost,
            map,
            pool,
            ledger: Path::new(env!("CARGO_TARGET_TMPDIR")).join(name),
        }
    }

    async fn worker(&self) -> Worker {
        let mut command = Command::new(env!("CARGO_BIN_EXE_worker"));
        command.env_remove("AMQP_URL");
        if let Some(vhost) = &self.vhost {
            command.env("AMQP_URL", vhost.amqp_url());
        }
        let mut process = command
            .env("DATABASE_URL", self.database.url())
            .env("MAP", &self.map)
            .env("LEDGER", &self.ledger)
            .env("GRACE", "5000")
            // These workers are killed from outside, and no task is to blame.
            .env("CRASH_BUDGET", "1000")
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let mut worker = Worker { process, lines };
        worker.until("consuming normal").await;
        worker
    }

    async fn publish_all(&self) {
        let requests = (0..TASKS).map(|number| {
            let payload = format!(r#"{{"number":{number},"milliseconds":4}}"#);
            PublishRequest::named("add", payload.into_bytes())
        });
        let outcomes = self.app.publish_many(stream::iter(requests));
        outcomes
            .for_each(async |outcome| drop(outcome.unwrap()))
            .await;
    }

    /// How many accounts have got something.
    async fn added(&self) -> i64 {
        let added = sqlx::query_scalar("SELECT count(*) FROM accounts WHERE value > 0");
        added.fetch_one(&self.pool).await.unwrap()
    }

    async fn until_added(&self, count: i64) {
        let waiting = async {
            while self.added().await < count {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let waited = tokio::time::timeout(PATIENCE, waiting).await;
        assert!(
            waited.is_ok(),
            "{} accounts have got something",
            self.added().await
        );
    }

    /// Whether nothing waits anywhere. Meant for when no worker is left.
    async fn is_drained(&self) -> bool {
        let rows = "SELECT (SELECT count(*) FROM tierline.ready) + (SELECT count(*) FROM tierline.scheduled) \
             + (SELECT count(*) FROM tierline.running)";
        let rows: i64 = sqlx::query_scalar(rows)
            .fetch_one(&self.pool)
            .await
            .unwrap();
        let messages = match &self.vhost {
            Some(vhost) => vhost.queues().await.unwrap(),
            None => Vec::new(),
        };
        rows == 0 && messages.iter().all(|queue| queue.depth == 0)
    }

    /// The runs that were begun.
    fn runs(&self) -> usize {
        let ledger = std::fs::read_to_string(&self.ledger).unwrap_or_default();
        ledger
            .lines()
            .filter(|line| line.starts_with("start "))
            .count()
    }
}

impl Drop for Accounts {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.ledger);
    }
}

async fn adds_exactly_once(queue: &str) {
    let accounts = Accounts::build(queue).await;
    accounts.publish_all().await;
    let mut workers = [accounts.worker().await, accounts.worker().await];
    let mut kills = 0;
    for target in (STEP..TASKS).step_by(STEP as usize) {
        accounts.until_added(target).await;
        let victim = kills % workers.len();
        workers[victim].kill().await;
        workers[victim] = accounts.worker().await;
        kills += 1;
    }
    accounts.until_added(TASKS).await;
    for mut worker in workers {
        worker.kill().await;
        kills += 1;
    }
    // What the last ones held comes again.
    let draining = async {
        while !accounts.is_drained().await {
            let mut worker = accounts.worker().await;
            tokio::time::sleep(Duration::from_millis(500)).await;
            worker.terminate().await;
        }
    };
    tokio::time::timeout(PATIENCE, draining).await.unwrap();
    let runs = accounts.runs();
    println!("{TASKS} tasks, {kills} kills, {runs} runs");
    let wrong: Vec<(i32, i32)> = sqlx::query_as("SELECT id, value FROM accounts WHERE value <> 1")
        .fetch_all(&accounts.pool)
        .await
        .unwrap();
    assert!(wrong.is_empty(), "accounts and their values: {wrong:?}");
    let dead: i64 = sqlx::query_scalar("SELECT count(*) FROM tierline.dead_letters")
        .fetch_one(&accounts.pool)
        .await
        .unwrap();
    assert_eq!(dead, 0);
}

#[tokio::test]
async fn every_account_gets_exactly_one_though_workers_of_rows_are_killed() {
    adds_exactly_once("postgres").await;
}

#[tokio::test]
async fn every_account_gets_exactly_one_though_workers_of_a_quorum_queue_are_killed() {
    adds_exactly_once("quorum").await;
}

#[tokio::test]
async fn every_account_gets_exactly_one_though_workers_of_a_classic_queue_are_killed() {
    adds_exactly_once("classic").await;
}
