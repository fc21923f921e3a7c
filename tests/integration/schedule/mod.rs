//! The schedule room, against real servers.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test may panic")]

mod broker_down;
mod half_open;
mod late;
mod leaders;
mod missed;
mod run_time;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::StreamExt;
use lapin::options::BasicConsumeOptions;
use lapin::types::FieldTable;
use lapin::{Connection, ConnectionProperties};
use sqlx::{AssertSqlSafe, Executor, PgConnection};
use tierline::message::Message;
use tierline::observe::Event;
use tierline::schedule::Scheduler;
use tierline::{Tierline, Topology};
use tierline_testbed::{Database, Vhost, database, vhost};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::timeout;

const LIMIT: Duration = Duration::from_secs(60);
const QUEUE: &str = "shop.main";

/// A map with these schedules.
fn map(schedules: &str) -> Topology {
    let rest = r#"
        app = "shop"
        [tiers.main]
        queue = "quorum"
        [groups.all]
        tiers = ["main"]
        concurrency = 4
        [tasks]
        "report.build" = "main"
        "sync.pull" = "main"
    "#;
    Topology::parse(format!("{rest}\n{schedules}")).unwrap()
}

/// A broker and a database of one test, ready for use.
struct World {
    vhost: Vhost,
    database: Database,
}

impl World {
    async fn new() -> Self {
        let world = Self {
            vhost: vhost().await,
            database: database().await,
        };
        world.migrate().await;
        world
    }

    async fn migrate(&self) {
        let database = tierline::Database::new(self.database.url()).unwrap();
        database.migrate().await.unwrap();
    }

    async fn app(&self, map: Topology) -> App {
        App::connect(map, self.vhost.amqp_url(), self.database.url()).await
    }

    async fn execute(&self, statement: &str) {
        use sqlx::Connection as _;
        let mut connection = PgConnection::connect(self.database.url()).await.unwrap();
        let statement = AssertSqlSafe(statement.to_owned());
        connection.execute(statement).await.unwrap();
    }
}

/// What an observer heard.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Heard {
    Published { schedule: String, id: String },
    Missed { schedule: String, count: u64 },
    Leads(bool),
    Restarted { service: String, cause: String },
}

/// An app, and what it tells.
struct App {
    app: Tierline,
    heard: UnboundedReceiver<Heard>,
}

impl App {
    async fn connect(map: Topology, amqp: &str, postgres: &str) -> Self {
        let (tell, heard) = unbounded_channel();
        let observer = move |event: &Event<'_>| {
            let heard = match event {
                Event::SchedulePublished { schedule, id, .. } => Heard::Published {
                    schedule: (*schedule).to_owned(),
                    id: id.to_string(),
                },
                Event::ScheduleMissed {
                    schedule, count, ..
                } => Heard::Missed {
                    schedule: (*schedule).to_owned(),
                    count: *count,
                },
                Event::LeaderChanged { leads, .. } => Heard::Leads(*leads),
                Event::Restarted { service, cause, .. } => Heard::Restarted {
                    service: (*service).to_owned(),
                    cause: (*cause).to_owned(),
                },
                _ => return,
            };
            let _ = tell.send(heard);
        };
        let app = Tierline::builder(map).amqp(amqp).postgres(postgres);
        let app = app.observe(observer).connect().await.unwrap();
        Self { app, heard }
    }

    /// The next news that is wanted.
    async fn hears<T>(&mut self, wanted: impl Fn(Heard) -> Option<T>) -> T {
        let search = async {
            loop {
                let heard = self.heard.recv().await.unwrap();
                if let Some(found) = wanted(heard) {
                    return found;
                }
            }
        };
        timeout(LIMIT, search).await.expect("it was never told")
    }

    async fn hears_published(&mut self) -> (String, String) {
        self.hears(|heard| match heard {
            Heard::Published { schedule, id } => Some((schedule, id)),
            _ => None,
        })
        .await
    }

    async fn leads(&mut self, leads: bool) {
        self.hears(|heard| (heard == Heard::Leads(leads)).then_some(()))
            .await;
    }

    /// Everything that was told so far and not asked for.
    fn heard_so_far(&mut self) -> Vec<Heard> {
        std::iter::from_fn(|| self.heard.try_recv().ok()).collect()
    }

    fn start(&self) -> Running {
        Running::start(self.app.scheduler().unwrap())
    }
}

/// A scheduler under way.
struct Running {
    task: JoinHandle<()>,
    stop: oneshot::Sender<()>,
}

impl Running {
    fn start(scheduler: Scheduler) -> Self {
        let (stop, stopped) = oneshot::channel::<()>();
        let shutdown = async {
            let _ = stopped.await;
        };
        let task = tokio::spawn(async { scheduler.until(shutdown).await.unwrap() });
        Self { task, stop }
    }

    /// Ends in order.
    async fn stop(self) {
        self.stop.send(()).unwrap();
        timeout(LIMIT, self.task).await.unwrap().unwrap();
    }

    /// Ends as in a crash: without a word to anybody.
    async fn kill(self) {
        self.task.abort();
        let _ = self.task.await;
    }
}

/// Takes as many runs out of a queue, waiting for them.
async fn take(vhost: &Vhost, count: usize) -> Vec<Message> {
    let properties = ConnectionProperties::default();
    let url = vhost.amqp_url();
    let connection = Connection::connect(url, properties).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    let options = BasicConsumeOptions {
        no_ack: true,
        ..BasicConsumeOptions::default()
    };
    let consumer = channel
        .basic_consume(QUEUE.into(), "".into(), options, FieldTable::default())
        .await
        .unwrap();
    let read = async |delivery: lapin::Result<lapin::message::Delivery>| {
        let delivery = delivery.unwrap();
        let now = SystemTime::now();
        Message::from_wire(&delivery.properties, delivery.data, "main", now).unwrap()
    };
    let taken = consumer.take(count).then(read).collect();
    timeout(LIMIT, taken).await.expect("the runs never came")
}

/// Asks again until the answer is the wanted one.
async fn until<T>(mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let asking = async {
        loop {
            if let Some(answer) = ask().await {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(LIMIT, asking).await.expect("it never came true")
}

/// A clock that goes when it is told to.
#[derive(Clone)]
struct FakeClock(Arc<std::sync::Mutex<SystemTime>>);

impl FakeClock {
    fn at(text: &str) -> Self {
        Self(Arc::new(std::sync::Mutex::new(time(text))))
    }

    fn set(&self, text: &str) {
        *self.0.lock().unwrap() = time(text);
    }

    fn reader(&self) -> impl Fn() -> SystemTime + Send + Sync + 'static {
        let time = self.0.clone();
        move || *time.lock().unwrap()
    }
}

fn time(text: &str) -> SystemTime {
    text.parse::<jiff::Timestamp>().unwrap().into()
}
