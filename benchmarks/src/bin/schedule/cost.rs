//! What a tick costs, by how many schedules there are and how many are due.

use std::fmt::Write;
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result};
use sqlx::{Connection, PgConnection};
use tierline::task::{Publish, PublishFuture, PublishRequest, Receipt};
use tierline::{Database, Tierline, Topology};
use tierline_benchmarks::{Comparison, Report};
use tierline_testbed::{database, vhost};
use tokio::sync::oneshot;
use tokio::time::sleep;

/// How long a new leader may take to look at everything once.
const ONCE: Duration = Duration::from_secs(5);

/// A publisher that confirms at once: what is measured is the scheduler and its database.
#[derive(Default)]
struct Counter {
    runs: AtomicU64,
}

impl Publish for Counter {
    fn publish(&self, request: PublishRequest) -> PublishFuture<'_> {
        self.runs.fetch_add(1, Ordering::Relaxed);
        let id = request.id.unwrap_or_else(tierline::TaskId::random);
        Box::pin(async { Ok(Receipt::new(id, "main", SystemTime::now())) })
    }
}

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    let (rounds, seconds) = if is_quick { (2, 5) } else { (5, 10) };
    let round = async |exist, due| measure_one(exist, due, Duration::from_secs(seconds)).await;
    let title = "Runs per second of processor time, scheduler and Postgres together";
    let few = "100 exist, 50 due each second";
    let measured = Comparison::new(title, "runs/s")
        .contender(few, async || round(100, 50).await)
        .contender("10,000 exist, 50 due each second", async || {
            round(10_000, 50).await
        })
        .at_least(0.8, few)
        .contender("10,000 exist, 500 due each second", async || {
            round(10_000, 500).await
        })
        .at_least(1.0, few)
        .run(rounds)
        .await?;
    report.add(measured);
    Ok(())
}

/// Runs per second of processor time where `exist` schedules exist and `due` are due every second.
async fn measure_one(exist: usize, due: usize, time: Duration) -> Result<f64> {
    let (vhost, database) = (vhost().await, database().await);
    Database::new(database.url())?.migrate().await?;
    let start = Instant::now();
    let topology = Topology::parse(map(exist, due)?)?;
    let read = start.elapsed();
    let app = Tierline::builder(topology)
        .amqp(vhost.amqp_url())
        .postgres(database.url())
        .connect()
        .await?;
    let counter = Arc::new(Counter::default());
    let (stop, stopped) = oneshot::channel::<()>();
    let scheduler = app.scheduler()?.publisher(counter.clone());
    let start = Instant::now();
    let running = tokio::spawn(scheduler.until(async {
        let _ = stopped.await;
    }));
    let runs = || counter.runs.load(Ordering::Relaxed);
    while runs() < due as u64 * 2 {
        sleep(Duration::from_millis(50)).await;
    }
    eprintln!(
        "{exist} schedules: read in {read:?}, and in full swing after {:?}",
        start.elapsed()
    );

    // A new leader looks at everything once, a page at a time: that is not what a tick costs.
    sleep(ONCE).await;
    let mut connection = PgConnection::connect(database.url()).await?;
    let before = (runs(), processor_time(&mut connection).await?);
    sleep(time).await;
    let after = (runs(), processor_time(&mut connection).await?);
    let _ = stop.send(());
    running.await??;
    let used = after.1.saturating_sub(before.1);
    Ok((after.0 - before.0) as f64 / used.as_secs_f64())
}

fn map(exist: usize, due: usize) -> Result<String> {
    let mut schedules = String::new();
    for number in 0..exist {
        let (cron, expires) = match number < due {
            true => ("* * * * * *", "10s"),
            false => ("0 0 1 1 *", "1d"),
        };
        writeln!(
            schedules,
            "[schedules.s{number}]\ntask = \"tick\"\ncron = \"{cron}\"\nexpires = \"{expires}\""
        )?;
    }
    Ok(super::map(&schedules))
}

/// The processor time of this process and of its sessions in the database so far.
async fn processor_time(connection: &mut PgConnection) -> Result<Duration> {
    let sessions = "SELECT pid FROM pg_stat_activity \
                    WHERE datname = current_database() AND pid <> pg_backend_pid()";
    let sessions: Vec<i32> = sqlx::query_scalar(sessions).fetch_all(connection).await?;
    let mut total = Duration::ZERO;
    for thread in fs::read_dir("/proc/self/task")? {
        total += time_of(&thread?.path().join("schedstat"))?;
    }
    for session in sessions {
        total += time_of(format!("/proc/{session}/schedstat").as_ref())?;
    }
    Ok(total)
}

fn time_of(schedstat: &std::path::Path) -> Result<Duration> {
    let text = fs::read_to_string(schedstat)
        .with_context(|| format!("{}: is Postgres on another machine?", schedstat.display()))?;
    let nanoseconds = text.split(' ').next().context("an empty schedstat")?;
    Ok(Duration::from_nanos(nanoseconds.parse()?))
}
