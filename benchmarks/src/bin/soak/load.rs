//! Tasks of all kinds, published and worked on by this process, and a count of what became of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use anyhow::{Result, ensure};
use futures_util::{Stream, StreamExt, stream};
use serde::{Deserialize, Serialize};
use tierline::observe::Event;
use tierline::task::PublishRequest;
use tierline::{Context, Registry, Task, TaskError, TaskId, TaskOptions, Tierline, Topology};
use tokio::time::{Instant, sleep, sleep_until};

/// How many tasks run at once.
pub(crate) const SLOTS: usize = 16;

/// Each has a task of its name; the last one's fail now and then.
const TIERS: [&str; 3] = ["urgent", "normal", "shaky"];

fn map() -> String {
    format!(
        r#"
        app = "soak"
        [tiers.urgent]
        queue = "classic"
        weight = 4
        [tiers.normal]
        queue = "quorum"
        weight = 2
        [tiers.shaky]
        queue = "quorum"
        weight = 1
        [groups.all]
        tiers = ["urgent", "normal", "shaky"]
        order = "weighted"
        concurrency = {SLOTS}
        prefetch = 16
        [tasks]
        urgent = "urgent"
        normal = "normal"
        shaky = "shaky"
        "#
    )
}

#[derive(Serialize, Deserialize)]
struct Job<const TIER: usize> {
    number: u64,
}

impl<const TIER: usize> Task for Job<TIER> {
    const NAME: &'static str = TIERS[TIER];
}

async fn work<const TIER: usize>(job: Job<TIER>, context: Context) -> Result<(), TaskError> {
    let is_hopeless = job.number % 1_000 == 999;
    let fails_once = TIERS[TIER] == "shaky" && job.number.is_multiple_of(4);
    if is_hopeless {
        return Err(TaskError::permanent("one in a thousand"));
    }
    if fails_once && context.attempt() == 1 {
        return Err("the first attempt of every fourth".into());
    }
    Ok(())
}

fn request(number: u64) -> PublishRequest {
    let tier = TIERS[number as usize % TIERS.len()];
    let payload = format!(r#"{{"number":{number}}}"#);
    let mut request = PublishRequest::named(tier, payload.into_bytes());
    request.id = Some(number.to_string().into());
    if tier == "urgent" {
        request.priority = Some((number % 10) as u8);
    }
    if number % 20 == 7 {
        request.delay = Some(Duration::from_secs(1));
    }
    request
}

/// How many tasks, and the sum of their numbers: one lost and another settled twice does not look
/// like all is well, and nothing is kept for each.
#[derive(Default)]
struct Tally {
    count: AtomicU64,
    sum: AtomicU64,
}

impl Tally {
    fn add(&self, id: &TaskId) {
        self.count.fetch_add(1, Relaxed);
        self.sum
            .fetch_add(id.as_str().parse().unwrap_or(0), Relaxed);
    }

    fn read(&self) -> (u64, u64) {
        (self.count.load(Relaxed), self.sum.load(Relaxed))
    }
}

#[derive(Default)]
struct Ledger {
    published: AtomicU64,
    refused: AtomicU64,
    retried: AtomicU64,
    dead: AtomicU64,
    confirmed: Tally,
    /// Done or dead.
    settled: Tally,
}

impl Ledger {
    fn note(&self, event: &Event<'_>) {
        match event {
            Event::Done { task, .. } => self.settled.add(task.id),
            Event::Dead { task, .. } => {
                self.dead.fetch_add(1, Relaxed);
                self.settled.add(task.id);
            }
            Event::Retried { .. } => {
                self.retried.fetch_add(1, Relaxed);
            }
            _ => {}
        }
    }
}

/// An app, and what became of its tasks. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Load {
    pub(crate) app: Tierline,
    ledger: Arc<Ledger>,
}

impl Load {
    pub(crate) async fn connect(url: &str) -> Result<Self> {
        let mut registry = Registry::new();
        // Short enough for what a slot has in hand: 16 of them within the broker's patience.
        let options = TaskOptions::new()
            .timeout(Duration::from_secs(10))
            .backoff(Duration::from_millis(200));
        registry
            .register_with::<Job<0>, _>(work::<0>, options.clone())?
            .register_with::<Job<1>, _>(work::<1>, options.clone())?
            .register_with::<Job<2>, _>(work::<2>, options)?;
        let ledger = Arc::new(Ledger::default());
        let noting = Arc::clone(&ledger);
        let app = Tierline::builder(Topology::parse(map())?)
            .amqp(url)
            .registry(registry)
            .observe(move |event| noting.note(event))
            .connect()
            .await?;
        Ok(Self { app, ledger })
    }

    /// How many are done or dead.
    pub(crate) fn settled(&self) -> u64 {
        self.ledger.settled.count.load(Relaxed)
    }

    /// How many are published and neither done nor dead.
    pub(crate) fn waiting(&self) -> u64 {
        let published = self.ledger.published.load(Relaxed);
        published.saturating_sub(self.settled())
    }

    /// As many as get done, so that the queues are never empty and never long.
    pub(crate) async fn publish_at_the_limit(self, lasts: Duration) {
        const MOST_WAITING: u64 = 5_000;
        let end = Instant::now() + lasts;
        let numbers = stream::unfold((), |()| async {
            while self.waiting() >= MOST_WAITING {
                sleep(Duration::from_millis(1)).await;
            }
            (Instant::now() < end).then(|| (self.ledger.published.fetch_add(1, Relaxed), ()))
        });
        self.publish(numbers).await;
    }

    /// So many a second, whatever becomes of them.
    pub(crate) async fn publish_paced(self, rate: f64, lasts: Duration) {
        let begin = Instant::now();
        let total = (rate * lasts.as_secs_f64()) as u64;
        let numbers = stream::iter(0..total).then(|sent| {
            let due = begin + Duration::from_secs_f64(sent as f64 / rate);
            let ledger = &self.ledger;
            async move {
                if due > Instant::now() {
                    sleep_until(due).await;
                }
                ledger.published.fetch_add(1, Relaxed)
            }
        });
        self.publish(numbers).await;
    }

    async fn publish(&self, numbers: impl Stream<Item = u64>) {
        let mut outcomes = std::pin::pin!(self.app.publish_many(numbers.map(request)));
        while let Some(outcome) = outcomes.next().await {
            match outcome {
                Ok(receipt) => self.ledger.confirmed.add(&receipt.id),
                Err(error) => {
                    eprintln!("refused: {error}");
                    self.ledger.refused.fetch_add(1, Relaxed);
                }
            }
        }
    }

    /// Waits until all that was confirmed is done or dead.
    pub(crate) async fn until_settled(&self) -> Result<()> {
        let begin = Instant::now();
        loop {
            let (confirmed, _) = self.ledger.confirmed.read();
            let settled = self.settled();
            if settled >= confirmed {
                return Ok(());
            }
            ensure!(
                begin.elapsed() < Duration::from_secs(120),
                "{settled} of {confirmed} tasks are done or dead, two minutes after the last publish"
            );
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// What became of all, and whether that is as promised.
    pub(crate) fn outcome(&self) -> (String, bool) {
        let ledger = &self.ledger;
        let ((confirmed, _), dead) = (ledger.confirmed.read(), ledger.dead.load(Relaxed));
        let found = format!(
            "{confirmed} confirmed, {} refused; {} done, {dead} dead, {} retried",
            ledger.refused.load(Relaxed),
            self.settled() - dead,
            ledger.retried.load(Relaxed),
        );
        let all_confirmed = confirmed == ledger.published.load(Relaxed);
        let all_settled = ledger.confirmed.read() == ledger.settled.read();
        (found, all_confirmed && all_settled)
    }
}
