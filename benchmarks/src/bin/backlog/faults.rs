//! Tasks that are published and run while connections are cut, Postgres is killed, away and replaced by its standby, and
//! workers are killed and stalled.

use std::collections::HashSet;
use std::time::Duration;

use anyhow::{Context, Result};
use sqlx::PgPool;
use tierline::{Tierline, Topology};
use tierline_benchmarks::{Figures, Report};
use tierline_testbed::{Postgres, Proxy};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::fault_worker::{FaultWorker, Line, Step};

const WORKERS: usize = 3;
const PUBLISHERS: usize = 8;
const LIMIT: Duration = Duration::from_secs(300);

struct Amounts {
    tasks: usize,
    lease: u64,
    outage: Duration,
}

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    let amounts = match is_quick {
        true => Amounts {
            tasks: 4_000,
            lease: 3,
            outage: Duration::from_secs(6),
        },
        false => Amounts {
            tasks: 20_000,
            lease: 30,
            outage: Duration::from_secs(60),
        },
    };
    let map = format!(
        r#"
        app = "faults"
        [tiers.bulk]
        queue = "postgres"
        lease = "{}s"
        [groups.all]
        tiers = ["bulk"]
        concurrency = 8
        prefetch = 2
        [tasks]
        step = "bulk"
        "#,
        amounts.lease
    );
    let primary = Postgres::start_new().await?;
    let database = primary.database().await?;
    let standby = primary.start_standby().await?;
    let proxy = Proxy::start(primary.port()).await?;
    let port = format!(":{}/", primary.port());
    let url = database
        .url()
        .replace(&port, &format!(":{}/", proxy.port()));
    let app = Tierline::builder(Topology::parse(&map)?)
        .postgres(&url)
        .connect()
        .await?;
    let mut log = Log::new();
    let mut workers = Vec::new();
    for _ in 0..WORKERS {
        workers.push(log.worker(&map, &url).await?);
    }
    let share = |percent: usize| amounts.tasks * percent / 100;
    let (allowed, may_publish) = watch::channel(share(16));
    let mut publishers = publish(&app, &amounts, &may_publish);
    let mut phases = Vec::new();
    log.until_started(share(10)).await?;
    for percent in [12, 14, 16] {
        primary.kill_connections().await?;
        log.until_started(share(percent)).await?;
    }
    phases.push(log.phase("connections cut, three times"));
    allowed.send_replace(share(28));
    for percent in [20, 24] {
        log.until_started(share(percent)).await?;
        primary.kill_hard().await?;
        primary.start().await?;
    }
    log.until_started(share(28)).await?;
    phases.push(log.phase("Postgres killed, twice"));
    allowed.send_replace(share(42));
    log.until_started(share(32)).await?;
    primary.stop().await?;
    sleep(amounts.outage).await;
    primary.start().await?;
    log.until_started(share(42)).await?;
    phases.push(log.phase("Postgres away, for longer than a lease"));
    allowed.send_replace(share(55));
    log.until_started(share(46)).await?;
    primary.kill_hard().await?;
    standby.promote().await?;
    proxy.switch_to(standby.port());
    log.until_started(share(55)).await?;
    // Whoever is wrongly taken for dead is so within two leases.
    sleep(Duration::from_secs(2 * amounts.lease)).await;
    phases.push(log.phase("a standby promoted, the address switched"));
    let blamed_for_outages = log.suspected;
    allowed.send_replace(share(80));
    for percent in [60, 66, 72] {
        log.until_started(share(percent)).await?;
        workers.remove(0).kill().await?;
        workers.push(log.worker(&map, &url).await?);
    }
    log.until_started(share(80)).await?;
    phases.push(log.phase("workers killed, three times"));
    allowed.send_replace(amounts.tasks);
    log.until_started(share(85)).await?;
    let stalled = &workers[0];
    stalled.signal("-STOP").await?;
    sleep(Duration::from_secs(2 * amounts.lease)).await;
    stalled.signal("-CONT").await?;
    phases.push(log.phase("a worker stalled for two leases"));

    while let Some(ended) = publishers.join_next().await {
        ended??;
    }
    let pool = PgPool::connect(&url).await?;
    let left = log.until_all_ran(&pool, amounts.tasks).await?;
    phases.push(log.phase("the rest"));
    for worker in workers {
        worker.end().await?;
    }
    app.close().await;

    let columns = ["starts", "run twice", "suspected", "leases lost"];
    let mut figures = Figures::new(format!("{} tasks through faults", amounts.tasks), &columns);
    for (name, counts) in &phases {
        figures = figures.row(*name, counts);
    }
    report.add(figures);
    let lost = amounts.tasks - log.distinct.len();
    report.check(
        format!("{} tasks through faults: none lost", amounts.tasks),
        format!("{lost} lost, {} run twice", log.starts - log.distinct.len()),
        lost == 0,
    );
    report.check(
        "faults: none stuck, none dead",
        format!("{left} left, {} dead", log.dead),
        left == 0 && log.dead == 0,
    );
    report.check(
        "faults: no crash count from outages of the database",
        format!("{blamed_for_outages}"),
        blamed_for_outages == 0,
    );
    Ok(())
}

/// Publishes tasks as far as it is allowed to. Most are short; fifty take as long as a lease.
fn publish(
    app: &Tierline,
    amounts: &Amounts,
    allowed: &watch::Receiver<usize>,
) -> JoinSet<Result<()>> {
    const PAUSE: Duration = Duration::from_millis(20);
    let Amounts { tasks, lease, .. } = *amounts;
    let mut publishers = JoinSet::new();
    for publisher in 0..PUBLISHERS {
        let (app, mut allowed) = (app.clone(), allowed.clone());
        publishers.spawn(async move {
            for number in (publisher..tasks).step_by(PUBLISHERS) {
                allowed.wait_for(|allowed| number < *allowed).await?;
                let milliseconds = match number % (tasks / 50) {
                    0 => lease * 1_000,
                    _ => 20,
                };
                let step = Step {
                    number,
                    milliseconds,
                };
                app.publish(step).deadline("5m").await?;
                sleep(PAUSE).await;
            }
            Ok(())
        });
    }
    publishers
}

/// What the workers have printed.
struct Log {
    lines: mpsc::UnboundedReceiver<Line>,
    sender: mpsc::UnboundedSender<Line>,
    distinct: HashSet<usize>,
    starts: usize,
    suspected: usize,
    leases_lost: usize,
    dead: usize,
    consuming: usize,
    /// At the end of the last phase.
    before: [usize; 4],
}

impl Log {
    fn new() -> Self {
        let (sender, lines) = mpsc::unbounded_channel();
        Self {
            lines,
            sender,
            distinct: HashSet::new(),
            starts: 0,
            suspected: 0,
            leases_lost: 0,
            dead: 0,
            consuming: 0,
            before: [0; 4],
        }
    }

    async fn worker(&mut self, map: &str, url: &str) -> Result<FaultWorker> {
        let worker = FaultWorker::start(map, url, self.sender.clone())?;
        let before = self.consuming;
        self.until("a worker consumes", |log| log.consuming > before)
            .await?;
        Ok(worker)
    }

    async fn until_started(&mut self, count: usize) -> Result<()> {
        let what = format!("{count} tasks start");
        self.until(&what, |log| log.distinct.len() >= count).await
    }

    async fn until(&mut self, what: &str, is_so: impl Fn(&Self) -> bool) -> Result<()> {
        let waiting = async {
            while !is_so(self) {
                let line = self.lines.recv().await;
                self.add(line.context("no worker is left")?);
            }
            anyhow::Ok(())
        };
        let waited = timeout(LIMIT, waiting).await;
        waited.with_context(|| format!("{what}: not within {LIMIT:?}"))?
    }

    /// Waits until all have run and nothing is left in the database; how much is left if that takes too long.
    async fn until_all_ran(&mut self, pool: &PgPool, tasks: usize) -> Result<i64> {
        // Rather a figure than an error.
        let _ = self.until_started(tasks).await;
        let mut left = i64::MAX;
        for _ in 0..3_000 {
            left = sqlx::query_scalar(
                "SELECT (SELECT count(*) FROM tierline.ready) + (SELECT count(*) FROM tierline.scheduled) \
                 + (SELECT count(*) FROM tierline.running)",
            )
            .fetch_one(pool)
            .await?;
            if left == 0 {
                break;
            }
            sleep(Duration::from_millis(100)).await;
        }
        Ok(left)
    }

    fn add(&mut self, line: Line) {
        match line {
            Line::Consuming => self.consuming += 1,
            Line::Start(number) => {
                self.starts += 1;
                self.distinct.insert(number);
            }
            Line::Suspected => self.suspected += 1,
            Line::LeaseLost => self.leases_lost += 1,
            Line::Mail(..) | Line::AlreadyDone => {}
            Line::Dead(reason) => {
                eprintln!("a task is a dead letter: {reason}");
                self.dead += 1;
            }
        }
    }

    /// What happened since the last phase.
    fn phase(&mut self, name: &'static str) -> (&'static str, [f64; 4]) {
        while let Ok(line) = self.lines.try_recv() {
            self.add(line);
        }
        let again = self.starts - self.distinct.len();
        let now = [self.starts, again, self.suspected, self.leases_lost];
        let mut counts = [0.0; 4];
        for (index, count) in counts.iter_mut().enumerate() {
            *count = (now[index] - self.before[index]) as f64;
        }
        self.before = now;
        eprintln!("{name}: {counts:?}");
        (name, counts)
    }
}
