//! Tasks that each add 1 to their account, in the transaction that completes them, while workers are killed all the time.

use std::time::Duration;

use anyhow::{Context, Result};
use futures_util::{StreamExt, stream};
use sqlx::PgPool;
use tierline::task::PublishRequest;
use tierline::{Tierline, Topology};
use tierline_benchmarks::{Figures, Report};
use tierline_testbed::{Broker, Postgres, Vhost};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};

use crate::fault_worker::{Add, FaultWorker, Line};

const WORKERS: usize = 3;
/// A worker is killed so often. Each lives for longer than a lease: only such a process takes over what dead ones held.
const PAUSE: Duration = Duration::from_secs(1);
/// How long a handler takes before its commit, and after it.
const MILLISECONDS: u64 = 50;
const LIMIT: Duration = Duration::from_secs(600);

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    let tasks = if is_quick { 500 } else { 5_000 };
    let (broker, postgres) = (Broker::start_new().await?, Postgres::start_new().await?);
    let columns = ["kills", "runs", "run again", "not run again", "seconds"];
    let name = format!("{tasks} tasks that add 1, while workers are killed");
    let mut figures = Figures::new(name, &columns);
    for queue in ["postgres", "quorum", "classic"] {
        let vhost = match queue {
            "postgres" => None,
            _ => Some(broker.vhost().await?),
        };
        let counts = Accounts::new(queue, &postgres, vhost, tasks)
            .await?
            .run()
            .await?;
        let again = counts.runs - (tasks as usize).min(counts.runs);
        let row = [
            counts.kills as f64,
            counts.runs as f64,
            again as f64,
            counts.already_done as f64,
            counts.took.as_secs_f64(),
        ];
        figures = figures.row(queue, &row);
        report.check(
            format!(
                "{tasks} tasks add 1 while workers are killed, {queue}: every row is exactly 1"
            ),
            format!(
                "{} are not, {} dead ({} kills, {} runs)",
                counts.wrong, counts.dead, counts.kills, counts.runs
            ),
            counts.wrong == 0 && counts.dead == 0 && counts.kills > 0,
        );
    }
    report.add(figures);
    Ok(())
}

/// A tier, its accounts and its workers.
struct Accounts {
    map: String,
    url: String,
    vhost: Option<Vhost>,
    pool: PgPool,
    tasks: i64,
    sender: mpsc::UnboundedSender<Line>,
    lines: mpsc::UnboundedReceiver<Line>,
    counts: Counts,
    consuming: usize,
    _database: tierline_testbed::Database,
}

#[derive(Default)]
struct Counts {
    kills: usize,
    runs: usize,
    already_done: usize,
    dead: usize,
    wrong: i64,
    took: Duration,
}

impl Accounts {
    async fn new(
        queue: &str,
        postgres: &Postgres,
        vhost: Option<Vhost>,
        tasks: i64,
    ) -> Result<Self> {
        let lease = if queue == "postgres" {
            "lease = \"2s\""
        } else {
            ""
        };
        let map = format!(
            r#"
            app = "once"
            [tiers.bulk]
            queue = "{queue}"
            {lease}
            [groups.all]
            tiers = ["bulk"]
            concurrency = 8
            prefetch = 2
            [tasks]
            add = "bulk"
            "#
        );
        let database = postgres.database().await?;
        let pool = PgPool::connect(database.url()).await?;
        let accounts = format!(
            "CREATE TABLE accounts AS SELECT id::bigint, 0 AS value FROM generate_series(0, {}) AS id; \
             ALTER TABLE accounts ADD PRIMARY KEY (id)",
            tasks - 1
        );
        sqlx::raw_sql(sqlx::AssertSqlSafe(accounts))
            .execute(&pool)
            .await?;
        tierline::Database::new(database.url())?.migrate().await?;
        let (sender, lines) = mpsc::unbounded_channel();
        Ok(Self {
            map,
            url: database.url().to_owned(),
            vhost,
            pool,
            tasks,
            sender,
            lines,
            counts: Counts::default(),
            consuming: 0,
            _database: database,
        })
    }

    async fn run(mut self) -> Result<Counts> {
        self.publish_all().await?;
        let begin = Instant::now();
        let mut workers = Vec::new();
        for _ in 0..WORKERS {
            workers.push(self.worker().await?);
        }
        while self.missing().await? > 0 {
            anyhow::ensure!(begin.elapsed() < LIMIT, "the tasks did not run in time");
            sleep(PAUSE).await;
            workers.remove(0).kill().await?;
            self.counts.kills += 1;
            workers.push(self.worker().await?);
        }
        self.counts.took = begin.elapsed();
        for worker in workers {
            worker.kill().await?;
            self.counts.kills += 1;
        }
        // What the last ones held comes again.
        while !self.is_drained().await? {
            anyhow::ensure!(
                begin.elapsed() < LIMIT,
                "the tasks were not settled in time"
            );
            let worker = self.worker().await?;
            sleep(Duration::from_secs(1)).await;
            worker.end().await?;
        }
        self.read_lines();
        let wrong = sqlx::query_scalar("SELECT count(*) FROM accounts WHERE value <> 1");
        self.counts.wrong = wrong.fetch_one(&self.pool).await?;
        Ok(self.counts)
    }

    async fn publish_all(&self) -> Result<()> {
        let mut builder = Tierline::builder(Topology::parse(&self.map)?).postgres(&self.url);
        if let Some(vhost) = &self.vhost {
            builder = builder.amqp(vhost.amqp_url());
        }
        let app = builder.connect().await?;
        let requests = (0..self.tasks).map(|number| {
            let milliseconds = MILLISECONDS;
            PublishRequest::new(&Add {
                number,
                milliseconds,
            })
        });
        let requests: Result<Vec<_>, _> = requests.collect();
        let mut published = std::pin::pin!(app.publish_many(stream::iter(requests?)));
        while let Some(outcome) = published.next().await {
            outcome?;
        }
        app.close().await;
        Ok(())
    }

    /// A worker that consumes.
    async fn worker(&mut self) -> Result<FaultWorker> {
        let amqp = self.vhost.as_ref().map(Vhost::amqp_url);
        let worker = FaultWorker::start_to_kill(&self.map, &self.url, amqp, self.sender.clone())?;
        let before = self.consuming;
        let consuming = async {
            while self.consuming == before {
                let line = self.lines.recv().await;
                self.add(line.context("no worker is left")?);
            }
            anyhow::Ok(())
        };
        timeout(LIMIT, consuming)
            .await
            .context("no worker consumes")??;
        Ok(worker)
    }

    fn read_lines(&mut self) {
        while let Ok(line) = self.lines.try_recv() {
            self.add(line);
        }
    }

    fn add(&mut self, line: Line) {
        match line {
            Line::Consuming => self.consuming += 1,
            Line::Start(_) => self.counts.runs += 1,
            Line::AlreadyDone => self.counts.already_done += 1,
            Line::Dead(_) => self.counts.dead += 1,
            Line::Mail(..) | Line::Suspected | Line::LeaseLost => {}
        }
    }

    /// How many accounts have got nothing yet.
    async fn missing(&self) -> Result<i64> {
        let missing = sqlx::query_scalar("SELECT count(*) FROM accounts WHERE value = 0");
        Ok(missing.fetch_one(&self.pool).await?)
    }

    /// Whether nothing waits anywhere. Meant for when no worker is left.
    async fn is_drained(&self) -> Result<bool> {
        let rows = "SELECT (SELECT count(*) FROM tierline.ready) + (SELECT count(*) FROM tierline.scheduled) \
             + (SELECT count(*) FROM tierline.running)";
        let rows: i64 = sqlx::query_scalar(rows).fetch_one(&self.pool).await?;
        let queues = match &self.vhost {
            Some(vhost) => vhost.queues().await?,
            None => Vec::new(),
        };
        Ok(rows == 0 && queues.iter().all(|queue| queue.depth == 0))
    }
}
