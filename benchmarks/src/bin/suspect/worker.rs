//! A worker in a process of its own, which prints what happens and when.

use std::fmt::Display;
use std::process::Stdio;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Result;
use serde::{Deserialize, Serialize};
use tierline::observe::Event;
use tierline::{Context, Registry, Task, Tierline, Topology};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

const MAP: &str = "TIERLINE_SUSPECT_MAP";
const URL: &str = "TIERLINE_SUSPECT_URL";

/// The tasks, each of which takes a while. Two are equal but for the type of their queue.
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

tasks! { Critical "critical" CriticalQuorum "critical_quorum" Long "long" Kill "kill" }

fn registry() -> Result<Registry> {
    let mut registry = Registry::new();
    registry.register::<Critical, _>(|it: Critical, cx| pass_time(it.milliseconds, cx))?;
    registry
        .register::<CriticalQuorum, _>(|it: CriticalQuorum, cx| pass_time(it.milliseconds, cx))?;
    registry.register::<Long, _>(|it: Long, cx| pass_time(it.milliseconds, cx))?;
    registry.register::<Kill, _>(kill)?;
    Ok(registry)
}

async fn pass_time(milliseconds: u64, cx: Context) {
    print("started", cx.id());
    tokio::time::sleep(Duration::from_millis(milliseconds)).await;
}

async fn kill(it: Kill, cx: Context) {
    pass_time(it.milliseconds, cx.clone()).await;
    print("killed", cx.id());
    std::process::abort();
}

/// The time since 1970: it means the same in all processes.
pub(crate) fn now() -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default()
}

fn print(what: &str, about: impl Display) {
    println!("{what} {about} {}", now().as_nanos());
}

/// Starts a worker for all groups of the map. It ends when its input does.
pub(crate) fn spawn(map: &str, url: &str) -> Result<Child> {
    Ok(Command::new(std::env::current_exe()?)
        .env(MAP, map)
        .env(URL, url)
        .stdout(Stdio::piped())
        .stdin(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?)
}

/// Whether this process was started as a worker.
pub(crate) fn is_worker() -> bool {
    std::env::var_os(MAP).is_some()
}

/// Works until the input ends.
pub(crate) async fn work() -> Result<()> {
    let topology = Topology::parse(std::env::var(MAP)?)?;
    let groups: Vec<_> = topology.groups().iter().map(|it| it.name.clone()).collect();
    let app = Tierline::builder(topology)
        .amqp(std::env::var(URL)?)
        .registry(registry()?)
        .observe(|event| match event {
            Event::Consuming { tier, .. } => print("consuming", tier),
            Event::Done { task, .. } => print("done", task.id),
            Event::Suspected { task, .. } => print("suspected", task.id),
            Event::Dead { task, .. } => print("dead", task.id),
            _ => {}
        })
        .connect()
        .await?;
    let mut input = BufReader::new(tokio::io::stdin()).lines();
    // The message that kills comes with crash count 2, so its first kill is its last.
    app.work(groups)
        .crash_budget(1)
        .grace(Duration::from_secs(1))
        .until(async move { while let Ok(Some(_)) = input.next_line().await {} })
        .await?;
    Ok(())
}
