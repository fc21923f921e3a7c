//! A group with one tier on the broker and one in Postgres: its order, and its rate while one of the servers is away.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result};
use futures_util::{StreamExt, stream};
use serde::{Deserialize, Serialize};
use tierline::task::PublishRequest;
use tierline::{Registry, Task, Tierline, Topology};
use tierline_benchmarks::{Figures, Report};
use tierline_testbed::{Broker, Database, Network, Postgres, Proxy, Vhost};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Instant, Sleep, sleep};

const LIMIT: Duration = Duration::from_secs(180);
const SLOTS: usize = 8;
/// Which home the higher and the lower tier have.
const HOMES: [[&str; 2]; 2] = [["postgres", "quorum"], ["quorum", "postgres"]];

macro_rules! tasks {
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
    };
}

tasks! { High "high" Low "low" }

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    let broker = Broker::start_new().await?;
    let postgres = Postgres::start_new().await?;
    let count = if is_quick { 1_000 } else { 4_000 };
    for homes in HOMES {
        for milliseconds in [1, 5, 20] {
            strict(report, &broker, &postgres, homes, milliseconds, count).await?;
        }
        weighted(report, &broker, &postgres, homes, count).await?;
    }
    let (before, outage) = match is_quick {
        true => (Duration::from_secs(5), Duration::from_secs(8)),
        false => (Duration::from_secs(20), Duration::from_secs(60)),
    };
    let columns = ["before, tasks/s", "meanwhile, tasks/s", "ratio"];
    let mut figures = Figures::new(
        format!("The lower tier while the other server is away for {outage:?}"),
        &columns,
    );
    for homes in HOMES {
        for away in [Away::Stopped, Away::Silent] {
            let rates = while_away(&broker, &postgres, homes, away, before, outage).await?;
            let ratio = rates[1] / rates[0];
            let server = if homes[0] == "postgres" {
                "Postgres"
            } else {
                "the broker"
            };
            let name = format!("{server} {away:?} for {outage:?}");
            figures = figures.row(&name, &[rates[0], rates[1], ratio]);
            report.check(
                format!("{name}: the tier on the other server keeps its rate"),
                format!("{ratio:.2}"),
                ratio >= 0.95,
            );
        }
    }
    report.add(figures);
    Ok(())
}

/// Strict order: how many lower tasks start while higher ones wait.
async fn strict(
    report: &mut Report,
    broker: &Broker,
    postgres: &Postgres,
    homes: [&str; 2],
    milliseconds: u64,
    count: usize,
) -> Result<()> {
    let pair = Pair::set(broker, postgres, homes, "strict").await?;
    pair.publish::<Low>(milliseconds, count).await?;
    pair.publish::<High>(milliseconds, count).await?;
    let working = pair.work().await?;
    pair.starts.until(2 * count).await?;
    working.end().await?;
    let starts = pair.starts.all();
    let (mut high, mut low) = (0, 0);
    for start in &starts {
        // What is then left may all be running, which is no backlog.
        if high + SLOTS >= count {
            break;
        }
        match start.is_high {
            true => high += 1,
            false => low += 1,
        }
    }
    let share = low as f64 / (high + low).max(1) as f64;
    let [higher, lower] = homes;
    let what =
        format!("strict, {higher} before {lower}, {milliseconds} ms: at most 0.5 % out of order");
    println!("{what}: {:.2} %", share * 100.0);
    report.check(what, format!("{:.2} %", share * 100.0), share <= 0.005);
    Ok(())
}

/// Weighted order: how many starts go to the wrong tier while both have a backlog.
async fn weighted(
    report: &mut Report,
    broker: &Broker,
    postgres: &Postgres,
    homes: [&str; 2],
    count: usize,
) -> Result<()> {
    let pair = Pair::set(broker, postgres, homes, "weighted").await?;
    pair.publish::<Low>(5, count / 2).await?;
    pair.publish::<High>(5, count).await?;
    let working = pair.work().await?;
    pair.starts.until(count).await?;
    working.end().await?;
    let starts = pair.starts.all();
    let high = starts[..count].iter().filter(|it| it.is_high).count();
    let share = high as f64 / count as f64;
    let wrong = (share - 0.75).abs();
    let [higher, lower] = homes;
    let what = format!("weighted 3 to 1, {higher} and {lower}: at most 0.5 % beyond a share");
    let found = format!("{:.2} % ({:.1} % of 75 %)", wrong * 100.0, share * 100.0);
    println!("{what}: {found}");
    report.check(what, found, wrong <= 0.005);
    Ok(())
}

/// How a server is away.
#[derive(Debug, Clone, Copy)]
enum Away {
    /// It refuses connections.
    Stopped,
    /// It answers nothing, and closes nothing.
    Silent,
}

/// The rate of the lower tier before the server of the higher one is away, and meanwhile. The lower tier has a backlog;
/// a higher task comes every 50 ms.
async fn while_away(
    broker: &Broker,
    postgres: &Postgres,
    homes: [&str; 2],
    away: Away,
    before: Duration,
    outage: Duration,
) -> Result<[f64; 2]> {
    const TASK: u64 = 20;
    let pair = Pair::set(broker, postgres, homes, "strict").await?;
    let most =
        (before + outage + Duration::from_secs(15)).as_millis() as usize / TASK as usize * SLOTS;
    pair.publish::<Low>(TASK, most).await?;
    let working = pair.work().await?;
    let app = working.app.clone();
    let publishing = tokio::spawn(async move {
        loop {
            // It fails while its server is away.
            let _ = app
                .publish(High { milliseconds: TASK })
                .deadline("1s")
                .await;
            sleep(Duration::from_millis(50)).await;
        }
    });
    pair.starts.until(200).await?;
    let rate = async |length: Duration| {
        let (begin, from) = (Instant::now(), pair.starts.low());
        sleep(length).await;
        (pair.starts.low() - from) as f64 / begin.elapsed().as_secs_f64()
    };
    let rate_before = rate(before).await;
    let is_postgres = homes[0] == "postgres";
    match (away, is_postgres) {
        (Away::Stopped, true) => postgres.stop().await?,
        (Away::Stopped, false) => broker.stop().await?,
        (Away::Silent, true) => pair.to_postgres.set(Network::Silent),
        (Away::Silent, false) => pair.to_broker.set(Network::Silent),
    }
    let meanwhile = rate(outage).await;
    match (away, is_postgres) {
        (Away::Stopped, true) => postgres.start().await?,
        (Away::Stopped, false) => broker.start().await?,
        (Away::Silent, true) => pair.to_postgres.set(Network::Good),
        (Away::Silent, false) => pair.to_broker.set(Network::Good),
    }
    // The higher tier runs again.
    let high = pair.starts.high();
    let again = async {
        while pair.starts.high() < high + 5 {
            sleep(Duration::from_millis(20)).await;
        }
    };
    let again = tokio::time::timeout(LIMIT, again).await;
    again.context("the higher tier does not run again")?;
    publishing.abort();
    working.end().await?;
    println!("{homes:?} {away:?}: {rate_before:.0} tasks/s before, {meanwhile:.0} meanwhile");
    Ok([rate_before, meanwhile])
}

/// An app with a tier on either server, each behind a proxy.
struct Pair {
    _vhost: Vhost,
    _database: Database,
    to_broker: Proxy,
    to_postgres: Proxy,
    topology: Topology,
    urls: [String; 2],
    starts: Starts,
}

struct Working {
    app: Tierline,
    stop: oneshot::Sender<()>,
    ended: JoinHandle<Result<(), tierline::Error>>,
}

impl Pair {
    async fn set(
        broker: &Broker,
        postgres: &Postgres,
        homes: [&str; 2],
        order: &str,
    ) -> Result<Self> {
        let (vhost, database) = (broker.vhost().await?, postgres.database().await?);
        let to_broker = Proxy::start(broker.amqp_port()).await?;
        let to_postgres = Proxy::start(postgres.port()).await?;
        let through = |url: &str, port: u16, proxy: &Proxy| {
            url.replace(&format!(":{port}/"), &format!(":{}/", proxy.port()))
        };
        let urls = [
            through(vhost.amqp_url(), broker.amqp_port(), &to_broker),
            through(database.url(), postgres.port(), &to_postgres),
        ];
        let [high, low] = homes;
        // A share needs tasks that are there when a slot frees.
        let (weights, prefetch) = match order {
            "weighted" => (["weight = 3.0", "weight = 1.0"], 4),
            _ => ([""; 2], 1),
        };
        let topology = Topology::parse(format!(
            r#"
            app = "mixed"
            [tiers.high]
            queue = "{high}"
            {}
            [tiers.low]
            queue = "{low}"
            {}
            [groups.all]
            tiers = ["high", "low"]
            order = "{order}"
            concurrency = {SLOTS}
            prefetch = {prefetch}
            [tasks]
            high = "high"
            low = "low"
            "#,
            weights[0], weights[1]
        ))?;
        let pair = Self {
            _vhost: vhost,
            _database: database,
            to_broker,
            to_postgres,
            topology,
            urls,
            starts: Starts::default(),
        };
        pair.app(Registry::new()).await?.close().await;
        // A quorum queue that was declared a moment ago does not survive a stop.
        broker.flush_declarations().await?;
        Ok(pair)
    }

    async fn app(&self, registry: Registry) -> Result<Tierline> {
        let [amqp, postgres] = &self.urls;
        let builder = Tierline::builder(self.topology.clone()).amqp(amqp.as_str());
        let builder = builder.postgres(postgres).registry(registry);
        Ok(builder.connect().await?)
    }

    async fn publish<T: Task + Serialize + From<u64>>(
        &self,
        milliseconds: u64,
        count: usize,
    ) -> Result<()> {
        let app = self.app(Registry::new()).await?;
        let requests = (0..count).map(|_| PublishRequest::new(&T::from(milliseconds)));
        let requests: Vec<_> = requests.collect::<Result<_, _>>()?;
        let mut published = std::pin::pin!(app.publish_many(stream::iter(requests)));
        while let Some(outcome) = published.next().await {
            outcome?;
        }
        app.close().await;
        Ok(())
    }

    async fn work(&self) -> Result<Working> {
        let mut registry = Registry::new();
        let starts = self.starts.clone();
        registry.register::<High, _>(move |it: High| starts.run(true, it.milliseconds))?;
        let starts = self.starts.clone();
        registry.register::<Low, _>(move |it: Low| starts.run(false, it.milliseconds))?;
        let app = self.app(registry).await?;
        let (stop, stopped) = oneshot::channel();
        let worker = app.work(["all"]).without_collector();
        let ended = tokio::spawn(worker.until(async {
            let _ = stopped.await;
        }));
        Ok(Working { app, stop, ended })
    }
}

impl Working {
    async fn end(self) -> Result<()> {
        let _ = self.stop.send(());
        self.ended.await??;
        self.app.close().await;
        Ok(())
    }
}

impl From<u64> for High {
    fn from(milliseconds: u64) -> Self {
        Self { milliseconds }
    }
}

impl From<u64> for Low {
    fn from(milliseconds: u64) -> Self {
        Self { milliseconds }
    }
}

#[derive(Debug, Clone, Copy)]
struct Start {
    is_high: bool,
}

/// What has started, in order.
#[derive(Clone, Default)]
struct Starts(Arc<Mutex<Vec<Start>>>);

impl Starts {
    fn run(&self, is_high: bool, milliseconds: u64) -> Sleep {
        if let Ok(mut starts) = self.0.lock() {
            starts.push(Start { is_high });
        }
        sleep(Duration::from_millis(milliseconds))
    }

    fn all(&self) -> Vec<Start> {
        self.0
            .lock()
            .map(|starts| starts.clone())
            .unwrap_or_default()
    }

    fn high(&self) -> usize {
        self.all().iter().filter(|it| it.is_high).count()
    }

    fn low(&self) -> usize {
        self.all().iter().filter(|it| !it.is_high).count()
    }

    async fn until(&self, count: usize) -> Result<()> {
        let enough = async {
            while self.all().len() < count {
                sleep(Duration::from_millis(5)).await;
            }
        };
        let waited = tokio::time::timeout(LIMIT, enough).await;
        waited.with_context(|| format!("{count} tasks did not start within {LIMIT:?}"))
    }
}
