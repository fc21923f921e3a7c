//! Unique keys: exactly one task of each key runs, and what a publish with a key costs beside one without.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use futures_util::future::try_join_all;
use futures_util::{StreamExt, stream};
use serde::{Deserialize, Serialize};
use tierline::task::PublishRequest;
use tierline::{Registry, Task, Tierline, Topology};
use tierline_benchmarks::{Comparison, Figures, Report};
use tierline_testbed::{database, vhost};
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep, timeout};

use crate::scene::{Noop, Scene};

const LIMIT: Duration = Duration::from_secs(180);
/// How many tasks publish the same key at once, over how many processes.
const PUBLISHERS: usize = 64;
const PROCESSES: usize = 4;
const PLAIN: &str = "rows without keys";
const KEYED: &str = "rows with keys";

/// Counts its key.
#[derive(Serialize, Deserialize)]
struct Once {
    key: usize,
}

impl Task for Once {
    const NAME: &'static str = "once";
}

pub(crate) async fn measure(report: &mut Report, is_quick: bool) -> Result<()> {
    let keys = if is_quick { 200 } else { 1_000 };
    let columns = ["keys", "publishes/s", "runs", "keys that ran once"];
    let title = format!("{PUBLISHERS} tasks publish each key at once");
    let mut figures = Figures::new(title, &columns);
    for home in ["postgres", "quorum"] {
        let outcome = one_runs(home, keys).await?;
        figures = figures.row(home, &outcome.figures(keys));
        report.check(
            format!("{home}: of {PUBLISHERS} publishes of each of {keys} keys, one runs"),
            format!("{} of {keys}", outcome.once),
            outcome.once == keys && outcome.runs == keys,
        );
        report.check(
            format!("{home}: after it is done, each key is free"),
            format!("{} of {keys}", outcome.free),
            outcome.free == keys,
        );
    }
    report.add(figures);
    rate(report, is_quick).await
}

struct Outcome {
    rate: f64,
    runs: usize,
    once: usize,
    free: usize,
}

impl Outcome {
    fn figures(&self, keys: usize) -> [f64; 4] {
        [
            keys as f64,
            self.rate.round(),
            self.runs as f64,
            self.once as f64,
        ]
    }
}

/// How often each key ran, while handlers wait for the gate.
#[derive(Clone)]
struct Runs {
    keys: Arc<Mutex<HashMap<usize, usize>>>,
    done: Arc<AtomicUsize>,
    is_open: watch::Receiver<bool>,
}

impl Runs {
    async fn run(self, key: usize) {
        let count = |keys: &mut HashMap<usize, usize>| *keys.entry(key).or_default() += 1;
        count(&mut self.keys.lock().unwrap_or_else(PoisonError::into_inner));
        let mut is_open = self.is_open.clone();
        let _ = is_open.wait_for(|is_open| *is_open).await;
        self.done.fetch_add(1, Ordering::SeqCst);
    }

    async fn until(&self, count: usize) -> Result<()> {
        let enough = async {
            while self.done.load(Ordering::SeqCst) < count {
                sleep(Duration::from_millis(5)).await;
            }
        };
        let waited = timeout(LIMIT, enough).await;
        waited.with_context(|| format!("{count} tasks did not run within {LIMIT:?}"))
    }
}

async fn one_runs(home: &str, keys: usize) -> Result<Outcome> {
    let topology = Topology::parse(format!(
        "app = \"bench\"\n[tiers.normal]\nqueue = \"{home}\"\n[groups.all]\ntiers = [\"normal\"]\nconcurrency = 16\n\
         [tasks]\nonce = \"normal\"\n"
    ))?;
    let (vhost, database) = (vhost().await, database().await);
    let open = async |registry| -> Result<Tierline> {
        let builder = Tierline::builder(topology.clone()).postgres(database.url());
        let builder = builder.amqp(vhost.amqp_url()).registry(registry);
        let app = builder.connect().await?;
        app.database()?.migrate().await?;
        Ok(app)
    };
    let (gate, is_open) = watch::channel(false);
    let runs = Runs {
        keys: Arc::default(),
        done: Arc::default(),
        is_open,
    };
    let mut registry = Registry::new();
    let counted = runs.clone();
    registry.register::<Once, _>(move |once: Once| counted.clone().run(once.key))?;
    let worker = open(registry).await?;
    let (stop, stopped) = oneshot::channel::<()>();
    let working = worker.work(["all"]).without_collector();
    let working = tokio::spawn(working.until(async { drop(stopped.await) }));
    let mut apps = Vec::new();
    for _ in 0..PROCESSES {
        apps.push(open(Registry::new()).await?);
    }
    let begin = Instant::now();
    let publishers = (0..PUBLISHERS).map(|number| {
        let app = apps[number % PROCESSES].clone();
        tokio::spawn(async move {
            for key in 0..keys {
                let publish = app.publish(Once { key }).unique(format!("once:{key}"));
                publish.deadline(LIMIT).await?;
            }
            anyhow::Ok(())
        })
    });
    for published in try_join_all(publishers).await? {
        published?;
    }
    let rate = (keys * PUBLISHERS) as f64 / begin.elapsed().as_secs_f64();
    gate.send_replace(true);
    runs.until(keys).await?;
    let ran = runs
        .keys
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clone();
    // The last runs may not be settled yet.
    let mut free = 0;
    for key in 0..keys {
        let is_free = async {
            while apps[0]
                .publish(Once { key })
                .unique(format!("once:{key}"))
                .deadline(LIMIT)
                .await?
                .is_duplicate
            {}
            anyhow::Ok(())
        };
        timeout(LIMIT, is_free).await??;
        free += 1;
    }
    runs.until(2 * keys).await?;
    let _ = stop.send(());
    working.await??;
    for app in apps.iter().chain([&worker]) {
        app.close().await;
    }
    Ok(Outcome {
        rate,
        runs: ran.values().sum(),
        once: ran.values().filter(|it| **it == 1).count(),
        free,
    })
}

/// The rate of publishes with a key each, beside those without.
async fn rate(report: &mut Report, is_quick: bool) -> Result<()> {
    let (rounds, count) = if is_quick { (3, 10_000) } else { (5, 40_000) };
    let scene = &Scene::set(8, 16).await?;
    let app = &scene.app(Registry::new()).await?;
    let published = async |round: Option<usize>| {
        let requests = (0..count).map(|number| {
            let mut request = PublishRequest::new(&Noop::new())?;
            request.unique = round.map(|round| format!("{round}:{number}").into());
            Ok(request)
        });
        let requests: Vec<_> = requests.collect::<Result<_, tierline::Error>>()?;
        let begin = Instant::now();
        let mut outcomes = std::pin::pin!(app.publish_many(stream::iter(requests)));
        while let Some(outcome) = outcomes.next().await {
            anyhow::ensure!(!outcome?.is_duplicate, "a key of its own was held");
        }
        let rate = count as f64 / begin.elapsed().as_secs_f64();
        sqlx::query("TRUNCATE tierline.ready")
            .execute(&scene.pool)
            .await?;
        Ok(rate)
    };
    let mut round = 0;
    let measured = Comparison::new("publish_many into a tier in Postgres", "tasks/s")
        .contender(PLAIN, async || published(None).await)
        .contender(KEYED, async || {
            round += 1;
            published(Some(round)).await
        })
        .run(rounds)
        .await?;
    if let Some(ratio) = measured.ratio(KEYED, PLAIN) {
        println!("\nrows with keys are published at {ratio:.2} of the rate of those without");
    }
    report.add(measured);
    Ok(())
}
