//! Workers, against a real broker.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod delays;
mod dropped;
mod faults;
mod frozen;
mod identity;
mod leaderless;
pub(crate) mod logs;
mod middleware;
mod order;
mod outcomes;
mod quarantine;
mod reconnect;
mod shutdown;
mod tasks;
mod unrouted;
mod versions;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use lapin::options::{BasicAckOptions, BasicGetOptions};
use lapin::{BasicProperties, ConnectionProperties};
use tierline::message::{Death, Message};
use tierline::observe::Event;
use tierline::{Registry, Tierline, Topology};
use tierline_testbed::{Proxy, Vhost, vhost};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

/// How long a test waits for something that must happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(180);

/// A worker under test, on a virtual host of its own.
struct Working {
    vhost: Vhost,
    app: Tierline,
    heard: Heard,
    stop: oneshot::Sender<()>,
    ended: JoinHandle<Result<(), tierline::Error>>,
}

impl Working {
    /// A worker of all groups of a map, with these handlers.
    async fn begin(map: &str, registry: Registry) -> Self {
        Self::begin_on(vhost().await, map, registry).await
    }

    async fn begin_on(vhost: Vhost, map: &str, registry: Registry) -> Self {
        let url = vhost.amqp_url().to_owned();
        Self::begin_at(&url, vhost, map, registry).await
    }

    /// A worker that reaches its virtual host by another way than its tests do.
    async fn begin_at(url: &str, vhost: Vhost, map: &str, registry: Registry) -> Self {
        let heard = Heard::default();
        let topology = Topology::parse(map).unwrap();
        let groups: Vec<_> = topology.groups().iter().map(|it| it.name.clone()).collect();
        let app = Tierline::builder(topology)
            .amqp(url)
            .registry(registry)
            .version("1.2.3")
            .observe(heard.ear())
            .connect()
            .await
            .unwrap();
        let (stop, stopped) = oneshot::channel();
        let worker = app.work(groups).grace(Duration::from_secs(5));
        let ended = tokio::spawn(worker.until(async {
            let _ = stopped.await;
        }));
        Self {
            vhost,
            app,
            heard,
            stop,
            ended,
        }
    }

    /// Shuts the worker down.
    async fn end(self) -> Vhost {
        self.stop.send(()).unwrap();
        self.ended.await.unwrap().unwrap();
        self.vhost
    }
}

/// What a worker told, a line for each event.
#[derive(Clone)]
pub(crate) struct Heard {
    lines: Arc<Mutex<Vec<String>>>,
    count: Arc<watch::Sender<usize>>,
}

impl Default for Heard {
    fn default() -> Self {
        Self {
            lines: Arc::default(),
            count: Arc::new(watch::channel(0).0),
        }
    }
}

impl Heard {
    pub(crate) fn ear(&self) -> impl Fn(&Event<'_>) + Send + Sync + 'static {
        let heard = self.clone();
        move |event| {
            heard.lines.lock().unwrap().push(line(event));
            heard.count.send_modify(|count| *count += 1);
        }
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap().clone()
    }

    pub(crate) fn count(&self, wanted: &str) -> usize {
        let lines = self.lines.lock().unwrap();
        lines.iter().filter(|line| line.starts_with(wanted)).count()
    }

    /// Waits for the next line, or a moment: one may have come while nobody listened.
    async fn next(&self) {
        let mut changes = self.count.subscribe();
        let _ = tokio::time::timeout(Duration::from_millis(100), changes.changed()).await;
    }

    /// Waits until as many lines begin like `mended` as like `broken`, and one more.
    async fn until_latest(&self, broken: &str, mended: &str) {
        let waiting = async {
            while self.count(mended) <= self.count(broken) {
                self.next().await;
            }
        };
        let waited = tokio::time::timeout(PATIENCE, waiting).await;
        assert!(waited.is_ok(), "{:#?}", self.lines());
    }

    /// Waits until so many lines begin like this.
    pub(crate) async fn until(&self, wanted: &str, count: usize) {
        let mut changes = self.count.subscribe();
        let enough = changes.wait_for(|_| self.count(wanted) >= count);
        if tokio::time::timeout(PATIENCE, enough).await.is_err() {
            let lines = self.lines();
            let last = &lines[lines.len().saturating_sub(30)..];
            panic!("{wanted:?} was not heard {count} times; the last lines: {last:#?}");
        }
    }
}

/// An event in a few words, the kind first.
fn line(event: &Event<'_>) -> String {
    match event {
        Event::Published { name, result, .. } => format!("published {name}: {result:?}"),
        Event::Started { task, .. } => format!("started {} {}", task.name, task.attempt),
        Event::Done { task, .. } => format!("done {} {}", task.name, task.attempt),
        Event::AlreadyDone { task } => format!("already done {}", task.name),
        Event::Retried { task, failure, .. } => {
            format!("retried {} {}: {failure}", task.name, task.attempt)
        }
        Event::Snoozed { task, .. } => format!("snoozed {} {}", task.name, task.attempt),
        Event::Discarded { task, reason, .. } => format!("discarded {}: {reason}", task.name),
        Event::Expired { task, .. } => format!("expired {}", task.name),
        Event::Dead { task, reason, .. } => format!("dead {}: {reason}", task.name),
        Event::GivenBack { task, why, .. } => format!("given back {}: {why}", task.name),
        Event::Suspected { task, crashes } => format!("suspected {} {crashes}", task.name),
        Event::LeaseLost { task } => format!("lease lost {}", task.name),
        Event::Relayed { task } => format!("relayed {}", task.name),
        Event::Strayed { task, mapped } => format!("strayed {} {mapped}", task.name),
        Event::Promoted { from, to, count } => format!("promoted {from} {to} {count}"),
        Event::Consuming { tier, .. } => format!("consuming {tier}"),
        Event::Interrupted { tier, cause, .. } => format!("interrupted {tier}: {cause}"),
        Event::Redeclared { tier } => format!("redeclared {tier}"),
        Event::Connected { purpose, .. } => format!("connected {purpose:?}"),
        Event::Disconnected { purpose, cause } => format!("disconnected {purpose:?}: {cause}"),
        other => format!("{other:?}"),
    }
}

/// The way to a virtual host through a proxy.
pub(crate) async fn behind_a_proxy(vhost: &Vhost) -> (String, Proxy) {
    let url = vhost.amqp_url();
    let (server, path) = url.rsplit_once('/').unwrap();
    let (host, port) = server.rsplit_once(':').unwrap();
    let proxy = Proxy::start(port.parse().unwrap()).await.unwrap();
    (format!("{host}:{}/{path}", proxy.port()), proxy)
}

/// Takes one message out of a queue, waiting for it.
async fn take_one(vhost: &Vhost, queue: &str) -> (Vec<u8>, BasicProperties) {
    let properties = ConnectionProperties::default();
    let connection = lapin::Connection::connect(vhost.amqp_url(), properties)
        .await
        .unwrap();
    let channel = connection.create_channel().await.unwrap();
    let got = async {
        loop {
            let options = BasicGetOptions::default();
            if let Some(got) = channel.basic_get(queue.into(), options).await.unwrap() {
                return got;
            }
        }
    };
    let got = tokio::time::timeout(PATIENCE, got).await.unwrap();
    got.ack(BasicAckOptions::default()).await.unwrap();
    (got.data.clone(), got.properties.clone())
}

/// Takes one dead letter out of a tier's dead-letter queue, waiting for it.
async fn take_dead(vhost: &Vhost, queue: &str) -> (Option<Message>, Death) {
    let (payload, properties) = take_one(vhost, queue).await;
    let now = std::time::SystemTime::now();
    let death = Death::from_wire(&properties).unwrap();
    let message = Message::from_wire(&properties, payload, "normal", now);
    (message.ok(), death)
}
