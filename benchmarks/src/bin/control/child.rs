//! Workers and publishers in processes of their own.

use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use tierline::Builder;
use tierline::observe::{Event, TaskRef};
use tierline::task::PublishRequest;
use tierline::{Context, Registry, Task, Tierline, Topology};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::cost::drain_in_child;
use crate::log::{Line, Log, What, Writer};
use crate::warnings;

const ORDER: &str = "TIERLINE_CONTROL_CHILD";
/// A program with arguments under which drains run.
const PROFILER: &str = "TIERLINE_CONTROL_PROFILER";

/// What a process is to do.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Order {
    pub(crate) map: String,
    pub(crate) amqp: Option<String>,
    pub(crate) postgres: Option<String>,
    pub(crate) log: String,
    /// It publishes, and does not work.
    pub(crate) publish: Option<Stream>,
    /// It works on so many tasks, and writes down none of them.
    pub(crate) drain: Option<usize>,
}

impl Order {
    /// An app on these servers.
    pub(crate) fn builder(&self) -> Result<Builder> {
        let mut builder = Tierline::builder(Topology::parse(&self.map)?);
        if let Some(postgres) = &self.postgres {
            builder = builder.postgres(postgres);
        }
        if let Some(amqp) = &self.amqp {
            builder = builder.amqp(amqp);
        }
        Ok(builder)
    }
}

/// What a process publishes, one task after another.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Stream {
    pub(crate) tasks: Vec<String>,
    /// The first number, the same for each of the tasks.
    pub(crate) first: usize,
    pub(crate) each_second: u32,
    pub(crate) milliseconds: u64,
}

/// The payload of all tasks.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Work {
    pub(crate) number: usize,
    pub(crate) milliseconds: u64,
    #[serde(default)]
    pub(crate) customer: String,
}

impl Work {
    pub(crate) fn request(&self, task: &str) -> Result<PublishRequest> {
        let mut request = PublishRequest::named(task, serde_json::to_vec(self)?);
        request.id = Some(format!("{task}-{}", self.number).into());
        Ok(request)
    }
}

/// Tasks that all do the same.
macro_rules! tasks {
    ($($type:ident $name:literal)*) => {
        $(
            #[derive(Serialize, Deserialize)]
            pub(crate) struct $type(Work);

            impl Task for $type {
                const NAME: &'static str = $name;
            }
        )*

        fn registry(log: &Arc<Writer>) -> Result<Registry> {
            let mut registry = Registry::new();
            $(
                let writer = log.clone();
                registry.register::<$type, _>(move |it: $type, context: Context| {
                    run(writer.clone(), context, it.0)
                })?;
            )*
            Ok(registry)
        }
    };
}

tasks! {
    Limited "limited" Other "other" Paused "paused" Keyed "keyed" Running "running" Row "row"
    Moved "calendar.sync"
}

async fn run(log: Arc<Writer>, context: Context, work: Work) {
    let Work {
        number,
        milliseconds,
        customer,
    } = &work;
    let line = |what| Line::new(what, context.task(), *number, context.tier(), customer);
    log.write(&line(What::Start));
    if *milliseconds > 0 {
        sleep(Duration::from_millis(*milliseconds)).await;
    }
    log.write(&line(What::End));
}

/// A process, which ends with this value.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    pub(crate) id: u32,
}

impl Process {
    pub(crate) fn start(order: &Order) -> Result<Self> {
        let program = std::env::current_exe()?;
        let mut command = match std::env::var(PROFILER) {
            Ok(profiler) if order.drain.is_some() => {
                let mut words = profiler.split_whitespace();
                let mut command = Command::new(words.next().context("a profiler without a name")?);
                command.args(words).arg(program);
                command
            }
            _ => Command::new(program),
        };
        let child = command
            .env(ORDER, serde_json::to_string(order)?)
            .stdin(Stdio::piped())
            .stdout(match order.drain {
                Some(_) => Stdio::piped(),
                None => Stdio::inherit(),
            })
            .kill_on_drop(true)
            .spawn()?;
        let id = child.id().context("a process that has just begun")?;
        Ok(Self { child, id })
    }

    /// Kills it with SIGKILL.
    pub(crate) async fn kill(mut self, log: &Log) -> Result<()> {
        self.child.kill().await?;
        let killed = Line {
            process: self.id,
            ..Line::new(What::Killed, "", 0, "", "")
        };
        log.add(&killed);
        Ok(())
    }

    /// Whether it has ended by itself.
    pub(crate) fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// What it prints until it ends by itself.
    pub(crate) async fn answer(mut self) -> Result<String> {
        let mut answer = String::new();
        let out = self.child.stdout.as_mut().context("no output")?;
        out.read_to_string(&mut answer).await?;
        self.end().await?;
        Ok(answer.trim().to_owned())
    }

    /// Lets it shut down.
    pub(crate) async fn end(mut self) -> Result<()> {
        drop(self.child.stdin.take());
        let status = self.child.wait().await?;
        ensure!(status.success(), "a process ended with {status}");
        Ok(())
    }
}

/// Lets all of them shut down.
pub(crate) async fn end_all(processes: Vec<Process>) -> Result<()> {
    for process in processes {
        process.end().await?;
    }
    Ok(())
}

/// Whether this process is such a one.
pub(crate) fn is_child() -> bool {
    std::env::var_os(ORDER).is_some()
}

/// Does what was ordered until the input ends.
pub(crate) async fn run_order() -> Result<()> {
    let order: Order = serde_json::from_str(&std::env::var(ORDER)?)?;
    if let Some(count) = order.drain {
        return drain_in_child(&order, count).await;
    }
    let log = Arc::new(Writer::open(Path::new(&order.log))?);
    warnings::write_to(&log)?;
    let builder = order.builder()?;
    let ear = log.clone();
    let app = builder
        .registry(registry(&log)?)
        .observe(move |event| hear(&ear, event))
        .connect()
        .await?;
    let groups: Vec<_> = app
        .topology()
        .groups()
        .iter()
        .map(|it| it.name.clone())
        .collect();
    let mut input = BufReader::new(tokio::io::stdin()).lines();
    let ended = async move { while let Ok(Some(_)) = input.next_line().await {} };
    match order.publish {
        Some(stream) => publish(&app, &log, &stream, ended).await?,
        // Whoever kills it from outside means no task.
        None => {
            let worker = app.work(groups).grace(Duration::from_secs(5));
            worker.crash_budget(1_000).until(ended).await?;
        }
    }
    app.close().await;
    Ok(())
}

fn hear(log: &Writer, event: &Event<'_>) {
    let settled = |what, task: &TaskRef<'_>, about: &str| {
        let number = task.id.as_str().rsplit('-').next();
        let number = number.and_then(|it| it.parse().ok()).unwrap_or(usize::MAX);
        log.write(&Line::new(what, task.name, number, task.tier, about));
    };
    match event {
        Event::Consuming { tier, .. } => log.write(&Line::new(What::Ready, "", 0, tier, "")),
        Event::Done { task, .. } => settled(What::Done, task, ""),
        Event::Suspected { task, .. } => settled(What::Fault, task, "suspected"),
        Event::Dead { task, .. } => settled(What::Fault, task, "dead"),
        Event::Retried { task, .. } => settled(What::Fault, task, "retried"),
        Event::LeaseLost { task } => settled(What::Fault, task, "lease lost"),
        _ => {}
    }
}

async fn publish(
    app: &Tierline,
    log: &Writer,
    stream: &Stream,
    ended: impl Future<Output = ()>,
) -> Result<()> {
    let mut ended = std::pin::pin!(ended);
    let mut ticks = interval(Duration::from_secs(1) / stream.each_second);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut number = stream.first;
    loop {
        tokio::select! {
            () = &mut ended => return Ok(()),
            _ = ticks.tick() => {}
        }
        for task in &stream.tasks {
            let work = Work {
                number,
                milliseconds: stream.milliseconds,
                customer: String::new(),
            };
            let begun = Line::new(What::Sent, task, number, "", "");
            let payload = serde_json::to_value(&work)?;
            let published = app
                .publish_named(task, &payload)
                .id(format!("{task}-{number}"))
                .await;
            log.write(&match published {
                Ok(receipt) => Line {
                    tier: receipt.tier,
                    ..begun
                },
                Err(error) => Line {
                    what: What::NotSent,
                    about: error.to_string(),
                    ..begun
                },
            });
        }
        number += 1;
    }
}
