//! Servers, an app on them, and its processes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use futures_util::{StreamExt, stream};
use sqlx::PgPool;
use tierline::Builder;
use tierline::task::PublishRequest;
use tierline::{Registry, Tierline, Topology};
use tierline_benchmarks::folder;
use tierline_testbed::{Broker, Database, Postgres, Proxy, Vhost};
use tokio::time::{Instant, sleep};

use crate::child::{Order, Process, Stream};
use crate::log::{Line, Log, What};

/// Where a tier may live.
const HOMES: [&str; 3] = ["quorum", "classic", "postgres"];
const LIMIT: Duration = Duration::from_secs(60);

/// Those that were asked for with `--home=NAME`; all unless one was.
pub(crate) fn homes() -> Vec<&'static str> {
    let is_wanted = |home: &&str| std::env::args().any(|it| it == format!("--home={home}"));
    let wanted: Vec<_> = HOMES.into_iter().filter(|home| is_wanted(home)).collect();
    match wanted.is_empty() {
        true => HOMES.to_vec(),
        false => wanted,
    }
}
/// The broker's statistics are this old at most.
const STATISTICS: Duration = Duration::from_secs(6);

/// A broker and a database server for this program alone.
pub(crate) struct Servers {
    pub(crate) broker: Broker,
    pub(crate) postgres: Postgres,
}

impl Servers {
    pub(crate) async fn start() -> Result<Self> {
        Ok(Self {
            broker: Broker::start_new().await?,
            postgres: Postgres::start_new().await?,
        })
    }
}

/// An app on a virtual host and a database of its own.
pub(crate) struct Scene {
    pub(crate) app: Tierline,
    pub(crate) pool: PgPool,
    pub(crate) log: Log,
    pub(crate) order: Order,
    pub(crate) vhost: Vhost,
    _database: Database,
}

impl Scene {
    pub(crate) async fn set(servers: &Servers, map: &str) -> Result<Self> {
        Self::set_behind(servers, map, None).await
    }

    /// The same with a proxy between the processes and the database.
    pub(crate) async fn set_behind(
        servers: &Servers,
        map: &str,
        proxy: Option<&Proxy>,
    ) -> Result<Self> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let vhost = servers.broker.vhost().await?;
        let database = servers.postgres.database().await?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        std::fs::create_dir_all(folder())?;
        let name = format!("control-{}-{number}.log", std::process::id());
        let log = Log::create(folder().join(name))?;
        let is_on_broker = {
            let topology = Topology::parse(map)?;
            topology.tiers().iter().any(|it| it.home.is_on_broker())
        };
        let url = match proxy {
            Some(proxy) => {
                let direct = format!(":{}/", servers.postgres.port());
                database
                    .url()
                    .replace(&direct, &format!(":{}/", proxy.port()))
            }
            None => database.url().to_owned(),
        };
        let order = Order {
            map: map.to_owned(),
            amqp: is_on_broker.then(|| vhost.amqp_url().to_owned()),
            postgres: Some(url),
            log: log.path().display().to_string(),
            publish: None,
            drain: None,
        };
        let pool = PgPool::connect(database.url()).await?;
        // Controls and parked tasks are rows, whatever the home of the tiers is.
        tierline::Database::new(database.url())?.migrate().await?;
        let app = order.builder()?.registry(Registry::new()).connect().await?;
        Ok(Self {
            app,
            pool,
            log,
            order,
            vhost,
            _database: database,
        })
    }

    /// An app of this scene.
    pub(crate) fn builder(&self) -> Result<Builder> {
        self.order.builder()
    }

    pub(crate) async fn publish(
        &self,
        requests: impl Iterator<Item = Result<PublishRequest>>,
    ) -> Result<()> {
        let requests: Vec<_> = requests.collect::<Result<_>>()?;
        let mut published = std::pin::pin!(self.app.publish_many(stream::iter(requests)));
        while let Some(outcome) = published.next().await {
            outcome?;
        }
        Ok(())
    }

    /// So many workers, each in a process of its own, once they take tasks of all tiers.
    pub(crate) async fn workers(&mut self, count: usize) -> Result<Vec<Process>> {
        let tiers = self.app.topology().tiers().iter();
        let tiers: Vec<String> = tiers.map(|tier| tier.name.clone()).collect();
        let tiers: Vec<&str> = tiers.iter().map(String::as_str).collect();
        self.workers_of(count, &tiers).await
    }

    /// The same, once they take tasks of these tiers.
    pub(crate) async fn workers_of(
        &mut self,
        count: usize,
        tiers: &[&str],
    ) -> Result<Vec<Process>> {
        let workers = (0..count).map(|_| Process::start(&self.order));
        let mut workers: Vec<_> = workers.collect::<Result<_>>()?;
        for worker in &mut workers {
            let ready = async |scene: &mut Self| {
                ensure!(
                    !worker.has_ended(),
                    "a worker has ended; its output says why"
                );
                let lines = scene.log.read()?.iter();
                let ready: BTreeSet<&str> = lines
                    .filter(|it| it.what == What::Ready && it.process == worker.id)
                    .map(|it| it.tier.as_str())
                    .collect();
                Ok(tiers.iter().all(|tier| ready.contains(tier)))
            };
            self.until("a worker takes tasks of all tiers", LIMIT, ready)
                .await?;
        }
        Ok(workers)
    }

    /// A process that publishes.
    pub(crate) fn publisher(&self, stream: Stream) -> Result<Process> {
        Process::start(&Order {
            publish: Some(stream),
            ..self.order.clone()
        })
    }

    /// Looks until it is so.
    pub(crate) async fn until(
        &mut self,
        what: &str,
        limit: Duration,
        mut is_so: impl AsyncFnMut(&mut Self) -> Result<bool>,
    ) -> Result<()> {
        let begin = Instant::now();
        while !is_so(self).await? {
            if begin.elapsed() > limit {
                bail!("{what}: not so within {limit:?}");
            }
            sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }

    /// Waits until so many tasks of a name have started.
    pub(crate) async fn started(
        &mut self,
        task: &str,
        count: usize,
        limit: Duration,
    ) -> Result<()> {
        let what = format!("{count} starts of {task}");
        let is_enough = async |scene: &mut Self| Ok(scene.log.count(What::Start, task)? >= count);
        self.until(&what, limit, is_enough).await
    }

    /// How often the broker has delivered messages of each queue since the virtual host was made, by its own statistics, once
    /// they do not change any more.
    pub(crate) async fn deliveries(&self) -> Result<BTreeMap<String, u64>> {
        let mut before = self.vhost.deliveries().await?;
        for _ in 0..10 {
            sleep(STATISTICS).await;
            let now = self.vhost.deliveries().await?;
            if before == now {
                return Ok(now);
            }
            before = now;
        }
        bail!("the broker still delivers")
    }

    /// What waits anywhere, in messages and rows, and how many dead letters there are.
    pub(crate) async fn left(&self) -> Result<(u64, i64)> {
        let rows = "SELECT (SELECT count(*) FROM tierline.ready) + (SELECT count(*) FROM tierline.scheduled) \
             + (SELECT count(*) FROM tierline.running) + (SELECT count(*) FROM tierline.parked)";
        let rows: i64 = sqlx::query_scalar(rows).fetch_one(&self.pool).await?;
        let dead = "SELECT count(*) FROM tierline.dead_letters";
        let dead: i64 = sqlx::query_scalar(dead).fetch_one(&self.pool).await?;
        let queues = self.vhost.queues().await?;
        let messages: u64 = queues.iter().map(|queue| u64::from(queue.depth)).sum();
        Ok((messages + rows.unsigned_abs(), dead))
    }
}

/// When tasks of a name have started.
pub(crate) fn starts(lines: &[Line], task: &str) -> Vec<Duration> {
    let starts = lines
        .iter()
        .filter(|it| it.what == What::Start && it.task == task);
    starts.map(|it| it.at).collect()
}

/// How many of these times are in this one.
pub(crate) fn within(times: &[Duration], from: Duration, length: Duration) -> usize {
    let times = times.iter();
    times
        .filter(|it| **it >= from && **it < from + length)
        .count()
}

/// What became of the tasks of one name.
#[derive(Debug, Default)]
pub(crate) struct Account {
    /// Never settled.
    pub(crate) lost: usize,
    /// Run more than once, or settled so.
    pub(crate) twice: usize,
    pub(crate) faults: BTreeMap<String, usize>,
}

impl Account {
    /// Of these numbers.
    pub(crate) fn of(lines: &[Line], task: &str, numbers: impl Iterator<Item = usize>) -> Self {
        let mut counts: BTreeMap<usize, (usize, usize)> = numbers.map(|it| (it, (0, 0))).collect();
        let mut faults = BTreeMap::new();
        for line in lines.iter().filter(|it| it.task == task) {
            let (starts, settled) = counts.entry(line.number).or_default();
            match line.what {
                What::Start => *starts += 1,
                What::Done => *settled += 1,
                What::Fault => *faults.entry(line.about.clone()).or_default() += 1,
                _ => {}
            }
        }
        let lost = counts.values().filter(|(_, settled)| *settled == 0);
        let twice = counts
            .values()
            .filter(|(starts, settled)| *starts > 1 || *settled > 1);
        Self {
            lost: lost.count(),
            twice: twice.count(),
            faults,
        }
    }
}

/// How busy the machine is, for whoever reads the figures.
pub(crate) fn print_load(part: &str) {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("{part}: load of the machine {}", load.trim());
}
