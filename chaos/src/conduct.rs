//! A run from its beginning to its verdict.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tierline::Database;
use tierline_testbed::target;
use tokio::time::sleep;

use crate::crew::{Crew, Surroundings};
use crate::fault::{self, Happened};
use crate::ledger::{self, Fact, Millis, now};
use crate::plan::Plan;
use crate::progress::{rate, recovery};
use crate::report::Report;
use crate::verdict::{Deletion, Evidence, Verdict, judge};
use crate::world::World;

/// How long the system may take to run its first tasks.
const START_LIMIT: Duration = Duration::from_secs(120);
/// How many processes may end by themselves before the first fault.
const FALSE_STARTS: u32 = 5;
/// How long it works undisturbed before the first fault, to measure its throughput, and after the last
/// one. In a short run it is less.
const UNDISTURBED: Duration = Duration::from_secs(5);
/// How soon the system must reach its former throughput after a node's return; the run waits no longer.
pub(crate) const RECOVERY_LIMIT: Duration = Duration::from_secs(10);
/// How long all tasks may take to end after the last fault.
const DRAIN_LIMIT: Duration = Duration::from_secs(600);
/// If queues are empty, tasks are missing, and nothing changes for this long, they are lost. RabbitMQ
/// retries after three minutes to forward a delayed message that it could not.
const SILENCE: Duration = Duration::from_secs(240);

/// How old the broker's numbers may be.
const NUMBERS_LIMIT: Duration = Duration::from_secs(30);

/// The parameters of a run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Order {
    pub(crate) seed: u64,
    pub(crate) nodes: usize,
    pub(crate) length: Duration,
    pub(crate) rate: u64,
}

/// A run in progress.
struct Run {
    order: Order,
    world: World,
    crew: Crew,
    folder: PathBuf,
    deletions: Vec<Deletion>,
}

/// Runs a plan, and returns its report.
pub(crate) async fn conduct(order: Order, plan: &Plan) -> Result<Report> {
    let folder = folder(&order)?;
    let world = World::start(order.nodes).await?;
    let version = world.node(0).version().to_owned();
    println!(
        "RabbitMQ {version}, ledgers and logs in {}",
        folder.display()
    );
    Database::new(world.direct_database_url()?)?
        .migrate()
        .await?;
    let crew = Crew::start(&Surroundings {
        amqp: world.amqp_urls(),
        postgres: world.database_url()?,
        folder: folder.clone(),
        rate: order.rate,
    });
    let mut run = Run {
        order,
        world,
        crew,
        folder,
        deletions: Vec::new(),
    };
    let mut report = Report::new(order, version);
    let begin = Instant::now();
    report.former = run.warm_up().await?;
    run.attack(plan, &mut report).await?;
    report.end = now();
    report.length = begin.elapsed();
    report.is_drained = run.drain().await?;
    report.verdict = run.judge().await?;
    report.times = run.times()?;
    report.unasked_ends = run.crew.unasked_ends();
    Ok(report)
}

impl Run {
    /// Waits until everything works, and returns the throughput.
    async fn warm_up(&self) -> Result<f64> {
        let begin = Instant::now();
        while self.times()?.len() < self.order.rate as usize {
            if begin.elapsed() > START_LIMIT || self.crew.unasked_ends() > FALSE_STARTS {
                let folder = self.folder.display();
                bail!("the system did not begin to work: its logs are in {folder}");
            }
            sleep(Duration::from_millis(200)).await;
        }
        self.world.flush_declarations().await?;
        let from = now();
        sleep(self.undisturbed()).await;
        Ok(rate(&self.times()?, from, now()))
    }

    fn undisturbed(&self) -> Duration {
        UNDISTURBED.min(self.order.length / 6)
    }

    async fn attack(&mut self, plan: &Plan, report: &mut Report) -> Result<()> {
        for (number, step) in plan.steps.iter().enumerate() {
            sleep(step.quiet).await;
            println!("{:>4}. {}", number + 1, step.fault);
            let happened = fault::happen(&self.world, &self.crew, step).await;
            if let Some(error) = &happened.failed {
                println!("      failed: {error:#}");
                self.world.heal().await?;
            }
            for note in &happened.notes {
                println!("      {note}");
            }
            self.deletions.extend(happened.deletions.iter().cloned());
            self.until_recovered(&happened, report.former).await?;
            report.add(step, happened);
        }
        self.world.heal().await?;
        // The last fault has a quiet time after it, too.
        sleep(self.undisturbed()).await;
        Ok(())
    }

    /// After the return of a node the next fault waits until the throughput is as before.
    async fn until_recovered(&self, happened: &Happened, former: f64) -> Result<()> {
        let Some(accepted) = happened.accepted.last() else {
            return Ok(());
        };
        let limit = accepted + RECOVERY_LIMIT.as_millis() as Millis;
        while now() < limit && recovery(&self.times()?, *accepted, now(), former).is_none() {
            sleep(Duration::from_millis(300)).await;
        }
        Ok(())
    }

    /// Stops the publishers, waits until all tasks have ended, and stops the workers. Returns whether all queues are empty.
    async fn drain(&mut self) -> Result<bool> {
        self.crew.end_publishing().await?;
        let begin = Instant::now();
        let mut news = (0, Instant::now());
        loop {
            let waiting = self.world.waiting().await;
            let verdict = self.judge().await?;
            let accounted = verdict.executed + verdict.dead + verdict.expired + verdict.too_many;
            if accounted != news.0 {
                news = (accounted, Instant::now());
            }
            let is_empty = waiting.as_ref().is_ok_and(Vec::is_empty);
            if is_empty && (verdict.lost.is_empty() || news.1.elapsed() > SILENCE) {
                break;
            }
            if begin.elapsed() > DRAIN_LIMIT {
                println!("not drained after {DRAIN_LIMIT:?}: {waiting:?}");
                return Ok(false);
            }
            sleep(Duration::from_millis(500)).await;
        }
        println!(
            "drained {:.1} s after the last fault",
            begin.elapsed().as_secs_f64()
        );
        // A worker's unacknowledged messages show when it returns them.
        self.crew.end_working().await?;
        self.until_empty().await
    }

    /// Whether the queues are empty, as soon as the broker's numbers are current.
    async fn until_empty(&self) -> Result<bool> {
        let begin = Instant::now();
        loop {
            let left = self.world.waiting().await?;
            if left.is_empty() {
                return Ok(true);
            }
            if begin.elapsed() > NUMBERS_LIMIT {
                println!("left in the queues: {left:?}");
                return Ok(false);
            }
            sleep(Duration::from_millis(500)).await;
        }
    }

    async fn judge(&self) -> Result<Verdict> {
        let evidence = Evidence {
            entries: ledger::read(&self.folder)?,
            letters: self.world.letters().await?,
            deletions: self.deletions.clone(),
        };
        Ok(judge(&evidence))
    }

    /// When tasks ended, sorted.
    fn times(&self) -> Result<Vec<Millis>> {
        let entries = ledger::read(&self.folder)?;
        let ran = |entry: &ledger::Entry| matches!(entry.fact, Fact::Ran { .. });
        Ok(entries
            .iter()
            .filter(|it| ran(it))
            .map(|it| it.at)
            .collect())
    }
}

/// A new folder for this run. Those of earlier ones stay, until `target` is cleaned.
fn folder(order: &Order) -> Result<PathBuf> {
    let Order { seed, nodes, .. } = order;
    let name = format!("seed-{seed}-nodes-{nodes}-{}", std::process::id());
    let folder = target().join("chaos").join(name);
    fs::create_dir_all(&folder)
        .with_context(|| format!("could not create {}", folder.display()))?;
    Ok(folder)
}
