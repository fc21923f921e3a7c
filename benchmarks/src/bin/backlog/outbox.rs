//! Tasks that are published within transactions: how soon they start, and what becomes of them while everything is killed.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use sqlx::{Executor, PgPool};
use tierline::{Registry, Tierline, Topology};
use tierline_benchmarks::{Distribution, Distributions, Figures, Report};
use tierline_testbed::{Broker, Database, Postgres, Vhost, database, vhost};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::fault_worker::{FaultWorker, Line, Mail};

const MAP: &str = r#"
    app = "outbox"
    [tiers.mail]
    queue = "quorum"
    [groups.all]
    tiers = ["mail"]
    concurrency = 8
    prefetch = 2
    [tasks]
    mail = "mail"
"#;
const WORKERS: usize = 3;
const PUBLISHERS: usize = 8;
const LIMIT: Duration = Duration::from_secs(300);
/// How many rows a process may have sent or started, and not deleted, when it dies.
const BATCH: usize = 512;

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    latency(report, if is_quick { 200 } else { 2_000 }).await?;
    let tasks = if is_quick { 3_000 } else { 20_000 };
    let columns = ["committed", "rolled back", "kills", "run again", "seconds"];
    let title = format!("{tasks} publishes within transactions, while everything is killed");
    let mut figures = Figures::new(title, &columns);
    for is_relayed in [false, true] {
        let counts = Faults::new(is_relayed).await?.run(tasks).await?;
        let way = match is_relayed {
            true => "through the relay",
            false => "workers that share the database",
        };
        let row = [
            counts.committed as f64,
            (tasks - counts.committed) as f64,
            counts.kills as f64,
            counts.again as f64,
            counts.took.as_secs_f64(),
        ];
        figures = figures.row(way, &row);
        report.check(
            format!("{way}: what committed ran, and nothing else did, under its own id"),
            format!(
                "{} lost, {} that rolled back ran, {} under another id, {} dead",
                counts.lost, counts.ghosts, counts.misnamed, counts.dead
            ),
            [counts.lost, counts.ghosts, counts.misnamed, counts.dead] == [0; 4],
        );
        report.check(
            format!("{way}: at most one batch runs again for each kill"),
            format!("{} run again, {} kills", counts.again, counts.kills),
            counts.again <= counts.kills * BATCH,
        );
    }
    report.add(figures);
    Ok(())
}

/// From the commit to the start, in a worker that has the database.
async fn latency(report: &mut Report, count: i64) -> Result<()> {
    let (vhost, database) = (vhost().await, database().await);
    let (sender, mut starts) = mpsc::unbounded_channel();
    let mut registry = Registry::new();
    registry.register::<Mail, _>(move |_: Mail| {
        let _ = sender.send(SystemTime::now());
        async {}
    })?;
    let app = Tierline::builder(Topology::parse(MAP)?)
        .amqp(vhost.amqp_url())
        .postgres(database.url())
        .registry(registry)
        .connect()
        .await?;
    let (stop, stopped) = oneshot::channel::<()>();
    let working = tokio::spawn(app.work(["all"]).until(async { drop(stopped.await) }));
    let pool = PgPool::connect(database.url()).await?;
    let mut waits = Vec::new();
    for number in 0..count {
        let mut tx = pool.begin().await?;
        app.publish(Mail { number }).within(&mut tx).await?;
        tx.commit().await?;
        let committed = SystemTime::now();
        let start = timeout(LIMIT, starts.recv()).await?;
        let start = start.context("the worker ended")?;
        // The first ones open connections.
        if number >= 10 {
            waits.push(start.duration_since(committed).unwrap_or_default());
        }
    }
    drop(stop);
    working.await??;
    app.close().await;
    let waits = Distribution::of(waits);
    let p50 = waits.quantile(0.5);
    report.check(
        "commit to start where publisher and workers share the database: p50 at most 15 ms",
        format!("{p50:.2?}"),
        p50 <= Duration::from_millis(15),
    );
    report.add(
        Distributions::new("A task that is published within a transaction, on an idle system")
            .row("from the commit to its start", waits),
    );
    Ok(())
}

/// What became of the tasks.
struct Counts {
    committed: usize,
    kills: usize,
    lost: usize,
    /// Ran although their transaction did not commit.
    ghosts: usize,
    misnamed: usize,
    again: usize,
    dead: usize,
    took: Duration,
}

/// Servers and processes that are killed.
struct Faults {
    is_relayed: bool,
    broker: Broker,
    postgres: Postgres,
    vhost: Vhost,
    database: Database,
    lines: mpsc::UnboundedReceiver<Line>,
    sender: mpsc::UnboundedSender<Line>,
    /// The ids under which each task ran, and how often.
    ran: HashMap<i64, BTreeMap<String, usize>>,
    dead: usize,
    kills: usize,
}

impl Faults {
    async fn new(is_relayed: bool) -> Result<Self> {
        let (broker, postgres) = (Broker::start_new().await?, Postgres::start_new().await?);
        let (vhost, database) = (broker.vhost().await?, postgres.database().await?);
        let (sender, lines) = mpsc::unbounded_channel();
        Ok(Self {
            is_relayed,
            broker,
            postgres,
            vhost,
            database,
            lines,
            sender,
            ran: HashMap::new(),
            dead: 0,
            kills: 0,
        })
    }

    async fn run(mut self, tasks: usize) -> Result<Counts> {
        let begin = tokio::time::Instant::now();
        let app = Tierline::builder(Topology::parse(MAP)?)
            .amqp(self.vhost.amqp_url())
            .postgres(self.database.url())
            .connect()
            .await?;
        let pool = PgPool::connect(self.database.url()).await?;
        let table = "CREATE TABLE public.mails (number bigint PRIMARY KEY, id text NOT NULL)";
        pool.execute(table).await?;
        let mut workers = Vec::new();
        for _ in 0..WORKERS {
            workers.push(self.worker()?);
        }
        let mut relays = Vec::new();
        for _ in 0..if self.is_relayed { 2 } else { 0 } {
            relays.push(self.relay()?);
        }
        let mut publishers = publish(&app, &pool, tasks);
        let mut round = 0;
        while !publishers.is_empty() {
            tokio::select! {
                Some(ended) = publishers.join_next() => ended??,
                () = sleep(Duration::from_secs(2)) => {
                    self.kill(round, &mut workers, &mut relays).await?;
                    round += 1;
                }
            }
        }
        let published: Vec<(i64, String)> = sqlx::query_as("SELECT number, id FROM public.mails")
            .fetch_all(&pool)
            .await?;
        let published: HashMap<i64, String> = published.into_iter().collect();
        self.until_all_ran(&published).await;
        self.until_nothing_is_left(&pool).await?;
        for process in workers.into_iter().chain(relays) {
            process.end().await?;
        }
        app.close().await;
        self.read();
        let lost = published.keys().filter(|it| !self.ran.contains_key(it));
        let ghosts = self.ran.keys().filter(|it| !published.contains_key(it));
        let misnamed = published.iter().filter(|(number, id)| {
            let ids = self.ran.get(number);
            ids.is_some_and(|ids| ids.keys().any(|it| it != *id))
        });
        let runs = self.ran.values().flat_map(BTreeMap::values).sum::<usize>();
        Ok(Counts {
            committed: published.len(),
            kills: self.kills,
            lost: lost.count(),
            ghosts: ghosts.count(),
            misnamed: misnamed.count(),
            again: runs - self.ran.len(),
            dead: self.dead,
            took: begin.elapsed(),
        })
    }

    /// A worker, which has the database only if no relay takes its rows.
    fn worker(&self) -> Result<FaultWorker> {
        let database = (!self.is_relayed).then(|| self.database.url());
        let amqp = self.vhost.amqp_url();
        FaultWorker::start_with(MAP, database, amqp, false, self.sender.clone())
    }

    fn relay(&self) -> Result<FaultWorker> {
        let (database, amqp) = (Some(self.database.url()), self.vhost.amqp_url());
        FaultWorker::start_with(MAP, database, amqp, true, self.sender.clone())
    }

    /// Kills a worker, a relay, the broker or Postgres, in turns, and starts it again.
    async fn kill(
        &mut self,
        round: usize,
        workers: &mut Vec<FaultWorker>,
        relays: &mut Vec<FaultWorker>,
    ) -> Result<()> {
        self.kills += 1;
        match round % 5 {
            1 if self.is_relayed => {
                relays.remove(0).kill().await?;
                relays.push(self.relay()?);
            }
            3 => {
                self.broker.kill().await?;
                self.broker.start().await?;
            }
            4 => {
                self.postgres.kill_hard().await?;
                self.postgres.start().await?;
            }
            _ => {
                workers.remove(0).kill().await?;
                workers.push(self.worker()?);
            }
        }
        Ok(())
    }

    fn read(&mut self) {
        while let Ok(line) = self.lines.try_recv() {
            match line {
                Line::Mail(number, id) => {
                    *self.ran.entry(number).or_default().entry(id).or_default() += 1;
                }
                Line::Dead(reason) => {
                    eprintln!("a task is a dead letter: {reason}");
                    self.dead += 1;
                }
                _ => {}
            }
        }
    }

    /// Rather a figure than an error.
    async fn until_all_ran(&mut self, published: &HashMap<i64, String>) {
        let all = async {
            loop {
                self.read();
                if published.keys().all(|it| self.ran.contains_key(it)) {
                    return;
                }
                sleep(Duration::from_millis(100)).await;
            }
        };
        let _ = timeout(LIMIT, all).await;
    }

    async fn until_nothing_is_left(&self, pool: &PgPool) -> Result<()> {
        let nothing = async {
            loop {
                let rows: i64 = sqlx::query_scalar(
                    "SELECT (SELECT count(*) FROM tierline.ready) + (SELECT count(*) FROM tierline.running)",
                )
                .fetch_one(pool)
                .await?;
                if rows == 0 && self.vhost.depth("outbox.mail").await? == 0 {
                    return Ok(());
                }
                sleep(Duration::from_millis(100)).await;
            }
        };
        timeout(LIMIT, nothing).await.context("tasks are left")?
    }
}

/// Publishes each task in a transaction with a row that says so. A third roll back. What fails because a server is away
/// is not tried again: the row says whether it committed.
fn publish(app: &Tierline, pool: &PgPool, tasks: usize) -> JoinSet<Result<()>> {
    const PAUSE: Duration = Duration::from_millis(10);
    let mut publishers = JoinSet::new();
    for publisher in 0..PUBLISHERS {
        let (app, pool) = (app.clone(), pool.clone());
        publishers.spawn(async move {
            for number in (publisher..tasks).step_by(PUBLISHERS) {
                let number = number as i64;
                let attempt = async {
                    let mut tx = pool.begin().await?;
                    let receipt = app.publish(Mail { number }).within(&mut tx).await?;
                    sqlx::query("INSERT INTO public.mails VALUES ($1, $2)")
                        .bind(number)
                        .bind(receipt.id.as_str())
                        .execute(&mut *tx)
                        .await?;
                    match number % 3 {
                        0 => tx.rollback().await?,
                        _ => tx.commit().await?,
                    }
                    anyhow::Ok(())
                };
                let pause = match attempt.await {
                    Ok(()) => PAUSE,
                    Err(_) => 20 * PAUSE,
                };
                sleep(pause).await;
            }
            Ok(())
        });
    }
    publishers
}
