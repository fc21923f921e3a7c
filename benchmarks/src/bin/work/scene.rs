//! A worker, the tasks it runs, and a record of who started when.

use std::process::Stdio;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use futures_util::{StreamExt, stream};
use serde::{Deserialize, Serialize};
use tierline::observe::Event;
use tierline::task::PublishRequest;
use tierline::{Registry, Task, Tierline, Topology};
use tierline_testbed::Vhost;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

/// Tasks that do nothing for a while, each named like the tier that it is mapped to.
macro_rules! naps {
    ($($type:ident $name:literal)*) => {
        $(
            #[derive(Serialize, Deserialize)]
            struct $type {
                milliseconds: u64,
            }

            impl Task for $type {
                const NAME: &'static str = $name;
            }
        )*

        fn registry() -> Result<Registry> {
            let mut registry = Registry::new();
            $(registry.register::<$type, _>(|it: $type| nap(it.milliseconds))?;)*
            Ok(registry)
        }
    };
}

naps! {
    Critical "critical" High "high" Calls "calls" Bulk "bulk"
    Note "hotel.send_a_note.classic"
    One "one" Two "two" Three "three" Four "four" Five "five"
}

async fn nap(milliseconds: u64) {
    Counter::add();
    if milliseconds > 0 {
        tokio::time::sleep(Duration::from_millis(milliseconds)).await;
    }
}

/// How many naps were taken by this process, for rounds without a record.
pub(crate) struct Counter;

static NAPS: AtomicUsize = AtomicUsize::new(0);
static FIRST: Mutex<Option<Instant>> = Mutex::new(None);

impl Counter {
    pub(crate) fn reset() -> Self {
        NAPS.store(0, Ordering::Relaxed);
        Self
    }

    fn add() {
        if NAPS.fetch_add(1, Ordering::Relaxed) == 0
            && let Ok(mut first) = FIRST.lock()
        {
            *first = Some(Instant::now());
        }
    }

    /// Waits until so many naps were taken; how long ago the first was.
    pub(crate) async fn until(&self, count: usize, limit: Duration) -> Result<Duration> {
        let begin = Instant::now();
        while NAPS.load(Ordering::Relaxed) < count {
            let taken = NAPS.load(Ordering::Relaxed);
            ensure!(begin.elapsed() < limit, "{taken} of {count} tasks ran");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let first = FIRST.lock().map_or(None, |first| *first);
        Ok(first.context("a nap was taken")?.elapsed())
    }
}

/// A start: of which tier and task, and when.
#[derive(Debug, Clone)]
pub(crate) struct Start {
    pub(crate) tier: String,
    pub(crate) id: String,
    pub(crate) at: Instant,
}

/// Who started, in order.
#[derive(Clone)]
pub(crate) struct Record {
    starts: Arc<Mutex<Vec<Start>>>,
    count: Arc<watch::Sender<usize>>,
}

impl Record {
    fn new() -> Self {
        Self {
            starts: Arc::default(),
            count: Arc::new(watch::channel(0).0),
        }
    }

    fn ear(&self) -> impl Fn(&Event<'_>) + Send + Sync + 'static {
        let record = self.clone();
        move |event| {
            if let Event::Started { task, .. } = event {
                record.add(task.tier, task.id.as_str());
            }
        }
    }

    pub(crate) fn add(&self, tier: &str, id: &str) {
        let start = Start {
            tier: tier.to_owned(),
            id: id.to_owned(),
            at: Instant::now(),
        };
        let mut starts = self.lock();
        starts.push(start);
        let count = starts.len();
        drop(starts);
        self.count.send_replace(count);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Start>> {
        self.starts
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn starts(&self) -> Vec<Start> {
        self.lock().clone()
    }

    /// Waits until so many have started.
    pub(crate) async fn until(&self, count: usize) -> Result<()> {
        let mut changes = self.count.subscribe();
        let enough = changes.wait_for(|started| *started >= count);
        let waited = tokio::time::timeout(Duration::from_secs(300), enough).await;
        let started = *self.count.borrow();
        waited.with_context(|| format!("{started} of {count} tasks started"))??;
        Ok(())
    }
}

/// An app on a virtual host of its own.
pub(crate) struct Scene {
    pub(crate) vhost: Vhost,
    pub(crate) app: Tierline,
    pub(crate) record: Record,
    map: String,
}

/// A worker that ends when it is told to.
pub(crate) struct Working {
    stop: oneshot::Sender<()>,
    ended: JoinHandle<Result<(), tierline::Error>>,
}

impl Scene {
    pub(crate) async fn set(map: &str) -> Result<Self> {
        Self::with(map, Record::new(), true).await
    }

    /// A scene whose worker keeps no record: nothing but the work is measured.
    pub(crate) async fn unobserved(map: &str) -> Result<Self> {
        Self::with(map, Record::new(), false).await
    }

    async fn with(map: &str, record: Record, is_observed: bool) -> Result<Self> {
        let vhost = tierline_testbed::vhost().await;
        let app = connect(map, vhost.amqp_url(), is_observed.then_some(&record)).await?;
        Ok(Self {
            vhost,
            app,
            record,
            map: map.to_owned(),
        })
    }

    /// Begins to work.
    pub(crate) fn work(&self) -> Working {
        let groups: Vec<_> = self
            .app
            .topology()
            .groups()
            .iter()
            .map(|it| it.name.clone())
            .collect();
        let (stop, stopped) = oneshot::channel();
        let worker = self.app.work(groups).grace(Duration::from_secs(1));
        let ended = tokio::spawn(worker.until(async {
            let _ = stopped.await;
        }));
        Working { stop, ended }
    }

    /// A worker in another process, which competes with this one's and writes down its starts.
    pub(crate) async fn rival(&self) -> Result<Child> {
        let mut rival = spawn_rival(&self.map, self.vhost.amqp_url())?;
        let record = self.record.clone();
        let out = rival.stdout.take().context("a rival has an output")?;
        let mut lines = BufReader::new(out).lines();
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                let mut words = line.splitn(3, ' ');
                let (kind, tier, id) = (words.next(), words.next(), words.next());
                if let (Some("started"), Some(tier), Some(id)) = (kind, tier, id) {
                    record.add(tier, id);
                }
            }
        });
        Ok(rival)
    }

    /// Publishes naps of these lengths, in order.
    pub(crate) async fn publish(
        &self,
        task: &'static str,
        naps: impl Iterator<Item = u64>,
    ) -> Result<()> {
        let requests = naps
            .enumerate()
            .map(|(number, milliseconds)| request(task, &format!("{task}-{number}"), milliseconds));
        let mut outcomes = std::pin::pin!(self.app.publish_many(stream::iter(requests)));
        while let Some(outcome) = outcomes.next().await {
            outcome?;
        }
        Ok(())
    }
}

impl Working {
    pub(crate) async fn end(self) -> Result<()> {
        let _ = self.stop.send(());
        self.ended.await??;
        Ok(())
    }
}

pub(crate) fn request(task: &str, id: &str, milliseconds: u64) -> PublishRequest {
    let payload = format!(r#"{{"milliseconds":{milliseconds}}}"#);
    let mut request = PublishRequest::named(task, payload.into_bytes());
    request.id = Some(id.into());
    request
}

async fn connect(map: &str, url: &str, record: Option<&Record>) -> Result<Tierline> {
    let topology = Topology::parse(map)?;
    let mut builder = Tierline::builder(topology).amqp(url).registry(registry()?);
    if let Some(record) = record {
        builder = builder.observe(record.ear());
    }
    Ok(builder.connect().await?)
}

const RIVAL: &str = "TIERLINE_RIVAL";
const RIVAL_URL: &str = "TIERLINE_RIVAL_URL";

/// A worker in a process of its own, whose output tells what it does.
pub(crate) fn spawn_rival(map: &str, url: &str) -> Result<Child> {
    Ok(Command::new(std::env::current_exe()?)
        .env(RIVAL, map)
        .env(RIVAL_URL, url)
        .stdout(Stdio::piped())
        .stdin(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?)
}

/// Whether this process was started to compete with another.
pub(crate) fn is_rival() -> bool {
    std::env::var_os(RIVAL).is_some()
}

/// Works until its input ends, and prints every start.
pub(crate) async fn rival() -> Result<()> {
    let topology = Topology::parse(std::env::var(RIVAL)?)?;
    let groups: Vec<_> = topology.groups().iter().map(|it| it.name.clone()).collect();
    let app = Tierline::builder(topology)
        .amqp(std::env::var(RIVAL_URL)?)
        .registry(registry()?)
        .observe(|event| match event {
            Event::Started { task, .. } => println!("started {} {}", task.tier, task.id),
            Event::Done { task, .. } => println!("done {} {}", task.tier, task.id),
            Event::Redeclared { tier } => println!("redeclared {tier} -"),
            _ => {}
        })
        .connect()
        .await?;
    let mut input = BufReader::new(tokio::io::stdin()).lines();
    app.work(groups)
        .grace(Duration::from_secs(1))
        .until(async move { while let Ok(Some(_)) = input.next_line().await {} })
        .await?;
    Ok(())
}
