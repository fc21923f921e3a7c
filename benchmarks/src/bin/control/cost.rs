//! What limits that never bite, rollups, and metrics cost a drain.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use sqlx::Executor;
use tierline::{Builder, Registry};
use tierline_benchmarks::{Comparison, Report};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};

use crate::child::{Limited, Order, Process, Work};
use crate::scene::{Scene, Servers, homes, print_load};

const LIMIT: Duration = Duration::from_secs(180);
const SLOTS: usize = 8;
/// The highest rate that there is.
const RATE: &str = "rate = \"1000000/s\", burst = 1000000";
const RUNNING: &str = "running = 1000000";
/// How much of its processor time a drain has left for its work beside rollups: they may have 2 %.
const LEFT: f64 = 0.98;
/// How much of its rate a drain has left beside metrics.
const BESIDE_METRICS: f64 = 0.95;

pub(crate) async fn measure(report: &mut Report, servers: &Servers, is_quick: bool) -> Result<()> {
    print_load("cost");
    let (rounds, count) = if is_quick { (3, 20_000) } else { (7, 60_000) };
    for home in homes() {
        let without = &Scene::set(servers, &map(home, "", "")).await?;
        let tier_rate = &Scene::set(servers, &map(home, RATE, "")).await?;
        let tier_running = &Scene::set(servers, &map(home, RUNNING, "")).await?;
        let task_rate = &Scene::set(servers, &map(home, "", RATE)).await?;
        let task_running = &Scene::set(servers, &map(home, "", RUNNING)).await?;
        let title = format!("No-op tasks, {home}, a limit that never bites");
        let measured = Comparison::new(title, "tasks/s")
            .contender("without", async || drain(without, count).await)
            .contender("rate of the tier", async || drain(tier_rate, count).await)
            .at_least(0.9, "without")
            .contender("running of the tier", async || {
                drain(tier_running, count).await
            })
            .at_least(0.9, "without")
            .contender("rate of the task", async || drain(task_rate, count).await)
            .at_least(0.9, "without")
            .contender("running of the task", async || {
                drain(task_running, count).await
            })
            .at_least(0.9, "without")
            .run(rounds)
            .await?;
        report.add(measured);
    }
    Ok(())
}

/// Without a database there are no rollups, and no polls for controls either: what is found is more than rollups cost.
///
/// On a machine that does other things too, processor time says little. With `TIERLINE_CONTROL_PROFILER` the processes run
/// under a profiler, such as `valgrind --tool=callgrind`, which tells how many of their instructions rollups are.
pub(crate) async fn rollups(report: &mut Report, servers: &Servers, is_quick: bool) -> Result<()> {
    print_load("rollups");
    let count = if is_quick { 20_000 } else { 60_000 };
    for home in homes() {
        if home == "postgres" {
            continue;
        }
        let scene = &Scene::set(servers, &map(home, "", "")).await?;
        let rounds = if is_quick { 5 } else { 15 };
        let title = format!("No-op tasks, {home}, in a second of processor time");
        let measured = Comparison::new(title, "tasks")
            .contender("without a database", async || {
                work_for(scene, count, false).await
            })
            .contender("with rollups", async || work_for(scene, count, true).await)
            .at_least(LEFT, "without a database")
            .run(rounds)
            .await?;
        report.add(measured);
    }
    Ok(())
}

/// A drain with the metrics of its process beside one without: the same database, rollups in both.
pub(crate) async fn metrics(report: &mut Report, servers: &Servers, is_quick: bool) -> Result<()> {
    print_load("metrics");
    let (rounds, count) = if is_quick { (3, 20_000) } else { (15, 60_000) };
    for home in homes() {
        let scene = &Scene::set(servers, &map(home, "", "")).await?;
        let title = format!("No-op tasks, {home}, metrics for Prometheus");
        let measured = Comparison::new(title, "tasks/s")
            .contender("without", async || drain(scene, count).await)
            .contender("with metrics", async || {
                fill(scene, count).await?;
                let took = run(scene.builder()?.metrics(), count).await?;
                Ok(count as f64 / took.as_secs_f64())
            })
            .at_least(BESIDE_METRICS, "without")
            .run(rounds)
            .await?;
        report.add(measured);
    }
    Ok(())
}

fn map(home: &str, of_tier: &str, of_task: &str) -> String {
    let limit = |text: &str| match text {
        "" => String::new(),
        text => format!("limit = {{ {text} }}"),
    };
    let (prefetch, priorities) = match home {
        "postgres" => (16, ""),
        "classic" => (128, "max_priority = 0"),
        _ => (128, ""),
    };
    let task = match limit(of_task).as_str() {
        "" => "\"all\"".to_owned(),
        limit => format!("{{ tier = \"all\", {limit} }}"),
    };
    format!(
        r#"
        app = "cost"
        [tiers.all]
        queue = "{home}"
        {priorities}
        {}
        [groups.all]
        tiers = ["all"]
        concurrency = {SLOTS}
        prefetch = {prefetch}
        {}
        [tasks]
        limited = {task}
        "#,
        limit(of_tier),
        // The last of so many in a slot may wait long, by the timeout of a task.
        if home == "postgres" {
            ""
        } else {
            "[broker]\nack_timeout = \"365d\""
        }
    )
}

async fn fill(scene: &Scene, count: usize) -> Result<()> {
    let requests = (0..count).map(|number| {
        let work = Work {
            number,
            milliseconds: 0,
            customer: "x".repeat(200),
        };
        work.request("limited")
    });
    scene.publish(requests).await?;
    // Vacuum of the last round's rows must not run in this one.
    for statement in ["VACUUM", "CHECKPOINT"] {
        scene.pool.execute(statement).await?;
    }
    Ok(())
}

/// How many tasks run in a second.
async fn drain(scene: &Scene, count: usize) -> Result<f64> {
    fill(scene, count).await?;
    let took = run(scene.builder()?, count).await?;
    Ok(count as f64 / took.as_secs_f64())
}

/// How many tasks run in a second of the processor time of a process of their own.
async fn work_for(scene: &Scene, count: usize, has_database: bool) -> Result<f64> {
    fill(scene, count).await?;
    let mut order = scene.order.clone();
    order.drain = Some(count);
    if !has_database {
        order.postgres = None;
    }
    let used = timeout(LIMIT, Process::start(&order)?.answer()).await;
    let used: f64 = used.context("a drain did not end in time")??.parse()?;
    Ok(count as f64 / used)
}

/// Drains, and prints how many seconds of processor time that took, with the end of the app.
pub(crate) async fn drain_in_child(order: &Order, count: usize) -> Result<()> {
    run(order.builder()?, count).await?;
    let used = tierline_benchmarks::processor_time("self")?;
    println!("{}", used.as_secs_f64());
    Ok(())
}

/// Works until so many tasks have run. How long that took from the first one's start on.
async fn run(builder: Builder, count: usize) -> Result<Duration> {
    let counter = Arc::new(Counter::default());
    let app = builder.registry(counter.registry(count)?).connect().await?;
    let (stop, stopped) = oneshot::channel();
    let worker = app.work(["all"]).without_collector();
    let mut ended = tokio::spawn(worker.until(async {
        let _ = stopped.await;
    }));
    let took = tokio::select! {
        took = counter.until_all() => took?,
        ended = &mut ended => {
            ended??;
            bail!("the worker has ended before the tasks");
        }
    };
    let _ = stop.send(());
    ended.await??;
    app.close().await;
    Ok(took)
}

/// Counts runs.
#[derive(Default)]
struct Counter {
    ran: AtomicUsize,
    first: std::sync::OnceLock<Instant>,
    all: tokio::sync::Notify,
}

impl Counter {
    fn registry(self: &Arc<Self>, count: usize) -> Result<Registry> {
        let mut registry = Registry::new();
        let counter = self.clone();
        registry.register::<Limited, _>(move |_: Limited| {
            counter.first.get_or_init(Instant::now);
            if counter.ran.fetch_add(1, Ordering::Relaxed) + 1 == count {
                counter.all.notify_one();
            }
            async {}
        })?;
        Ok(registry)
    }

    /// How long all took from the first one's start on.
    async fn until_all(&self) -> Result<Duration> {
        let all = timeout(LIMIT, self.all.notified()).await;
        all.with_context(|| format!("{:?} tasks ran within {LIMIT:?}", self.ran))?;
        Ok(self.first.get().context("none ran")?.elapsed())
    }
}
