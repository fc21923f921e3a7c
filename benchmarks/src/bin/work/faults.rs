//! Tasks through a worker while everything around it is killed: nothing is missing.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use futures_util::{StreamExt, stream};
use tierline::{Tierline, Topology};
use tierline_benchmarks::Report;
use tierline_testbed::{Broker, Vhost};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Child;

use crate::scene::{request, spawn_rival};

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    let (count, drained) = if is_quick {
        (4_000, 4_000)
    } else {
        (20_000, 20_000)
    };
    let broker = Broker::start_new().await?;
    let vhost = broker.vhost().await?;
    let mut yard = Yard::open(vhost).await?;
    yard.drain("warm-up", drained / 4).await?;
    let before = yard.drain_often("before", drained).await?;
    broker.flush_declarations().await?;

    let published = {
        let app = yard.app.clone();
        tokio::spawn(async move { publish(&app, "fault", count, 2).await })
    };
    for round in 1..=3 {
        yard.until("done", "fault", count * round / 8).await?;
        println!("  round {round}: the broker is killed");
        broker.kill().await?;
        broker.start().await?;
        yard.until("done", "fault", count * (2 * round + 1) / 16)
            .await?;
        println!("  round {round}: all connections are closed");
        broker.close_all_connections().await?;
        println!("  round {round}: the worker is killed");
        yard.restart_worker().await?;
    }
    let errors = published.await??;
    yard.until("done", "fault", count - errors).await?;
    println!("  all {count} ran ({errors} were refused to the publisher)");
    let after = yard.drain_often("after", drained).await?;

    let again = |tier: &str| {
        let runs = yard.ledger.count("started", tier, "fault");
        runs.values().filter(|runs| **runs > 1).count()
    };
    // A classic queue that is killed forgets acknowledgements that it has not written yet.
    let (classic, quorum) = (again("critical"), again("high"));
    println!(
        "  started more than once: {classic} of the classic tier, {quorum} of the quorum tier"
    );
    let done = yard.ledger.count("done", "", "fault").len();
    let missing = (count - errors).saturating_sub(done);
    report.check(
        "faults: none is missing",
        format!("{missing} missing"),
        missing == 0,
    );
    let ratio = after / before;
    let found = format!("{ratio:.2} ({after:.0} of {before:.0} tasks/s)");
    report.check(
        "faults: at least 0.9 of the throughput afterwards",
        found,
        ratio >= 0.9,
    );
    yard.delete_queue(report).await
}

/// A worker in a process of its own, and what it has said in all its lives.
struct Yard {
    vhost: Vhost,
    app: Tierline,
    ledger: Ledger,
    worker: Child,
}

#[derive(Clone, Default)]
struct Ledger(Arc<Mutex<HashMap<String, usize>>>);

impl Ledger {
    fn add(&self, line: &str) {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *lines.entry(line.to_owned()).or_default() += 1;
    }

    /// How often each id of this kind was told, by the beginnings of tier and id.
    fn count(&self, kind: &str, tier: &str, beginning: &str) -> HashMap<String, usize> {
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut found = HashMap::new();
        for (line, times) in lines.iter() {
            if let Some((it, rest)) = line.split_once(' ')
                && let Some((its_tier, id)) = rest.split_once(' ')
                && it == kind
                && its_tier.starts_with(tier)
                && id.starts_with(beginning)
            {
                *found.entry(id.to_owned()).or_default() += times;
            }
        }
        found
    }
}

impl Yard {
    async fn open(vhost: Vhost) -> Result<Self> {
        let app = Tierline::builder(Topology::parse(MAP)?)
            .amqp(vhost.amqp_url())
            .connect()
            .await?;
        let ledger = Ledger::default();
        let worker = worker(&vhost, &ledger)?;
        Ok(Self {
            vhost,
            app,
            ledger,
            worker,
        })
    }

    async fn restart_worker(&mut self) -> Result<()> {
        self.worker.kill().await?;
        self.worker = worker(&self.vhost, &self.ledger)?;
        Ok(())
    }

    async fn until(&mut self, kind: &str, beginning: &str, count: usize) -> Result<()> {
        let begin = Instant::now();
        loop {
            // One that begins while the broker is away ends with an error. Whoever looks after it
            // starts it again.
            if self.worker.try_wait()?.is_some() {
                self.worker = worker(&self.vhost, &self.ledger)?;
            }
            let found = self.ledger.count(kind, "", beginning).len();
            if found >= count {
                return Ok(());
            }
            anyhow::ensure!(
                begin.elapsed() < Duration::from_secs(180),
                "{found} of {count} {beginning} are {kind}"
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Tasks a second, of no-op tasks that wait already.
    async fn drain(&mut self, name: &str, count: usize) -> Result<f64> {
        let begin = Instant::now();
        publish(&self.app, name, count, 0).await?;
        self.until("done", name, count).await?;
        Ok(count as f64 / begin.elapsed().as_secs_f64())
    }

    /// The median of three times.
    async fn drain_often(&mut self, name: &str, count: usize) -> Result<f64> {
        let mut rates = Vec::new();
        for round in 1..=3 {
            let rate = self.drain(&format!("{name}{round}"), count).await?;
            println!("  {name}: {rate:.0} tasks/s");
            rates.push(rate);
        }
        rates.sort_by(f64::total_cmp);
        Ok(rates[1])
    }

    async fn delete_queue(&mut self, report: &mut Report) -> Result<()> {
        publish(&self.app, "sitting", 1_000, 20).await?;
        self.until("started", "sitting", 10).await?;
        self.vhost.delete_queue("bench.critical").await?;
        self.until("redeclared", "-", 1).await?;
        publish(&self.app, "later", 1_000, 0).await?;
        self.until("done", "later", 1_000).await?;
        let lost = 1_000 - self.ledger.count("started", "", "sitting").len();
        println!("  a queue was deleted with {lost} tasks in it; all 1,000 after that ran");
        let what = "faults: all that was confirmed after a queue was declared again runs";
        report.check(what, format!("{lost} sat in the deleted queue"), true);
        Ok(())
    }
}

fn worker(vhost: &Vhost, ledger: &Ledger) -> Result<Child> {
    let mut worker = spawn_rival(MAP, vhost.amqp_url())?;
    let out = worker.stdout.take().context("a worker has an output")?;
    let ledger = ledger.clone();
    tokio::spawn(async move {
        let mut lines = BufReader::new(out).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            ledger.add(&line);
        }
    });
    Ok(worker)
}

/// Publishes tasks to both tiers in turn; how many were refused.
async fn publish(app: &Tierline, name: &str, count: usize, milliseconds: u64) -> Result<usize> {
    let requests = (0..count).map(|number| {
        let task = ["critical", "high"][number % 2];
        let mut request = request(task, &format!("{name}-{number}"), milliseconds);
        request.deadline = Some(Duration::from_secs(120));
        request
    });
    let outcomes = app.publish_many(stream::iter(requests));
    Ok(outcomes
        .filter(|outcome| std::future::ready(outcome.is_err()))
        .count()
        .await)
}

const MAP: &str = r#"
    app = "bench"
    [tiers.critical]
    queue = "classic"
    [tiers.high]
    queue = "quorum"
    [groups.urgent]
    tiers = ["critical", "high"]
    order = "strict"
    concurrency = 8
    prefetch = 2
    [tasks]
    critical = "critical"
    high = "high"
"#;
