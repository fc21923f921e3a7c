//! In which order a group starts the tasks of its tiers, by counting starts.
//!
//! These tests run on one thread, so that handlers start in the order in which the group gave them their slots.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use lapin::ConnectionProperties;
use lapin::options::QueueDeclareOptions;
use lapin::types::FieldTable;
use serde::{Deserialize, Serialize};
use tierline::observe::Event;
use tierline::task::PublishRequest;
use tierline::{Registry, Task, Tierline, Topology};
use tierline_testbed::{Vhost, vhost};
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::PATIENCE;

const SLOTS: usize = 4;

/// Serves the first tier of the list before the second, or three times as often.
fn map(queue: &str, order: &str, prefetch: usize) -> String {
    format!(
        r#"
        app = "hotel"
        [tiers.critical]
        queue = "{queue}"
        weight = 3
        [tiers.high]
        queue = "{queue}"
        weight = 1
        [groups.all]
        tiers = ["critical", "high"]
        order = "{order}"
        concurrency = {SLOTS}
        prefetch = {prefetch}
        [tasks]
        "hotel.critical" = "critical"
        "hotel.high" = "high"
        "#
    )
}

#[derive(Clone, Serialize, Deserialize)]
struct Critical(usize);

impl Task for Critical {
    const NAME: &'static str = "hotel.critical";
}

#[derive(Clone, Serialize, Deserialize)]
struct High(usize);

impl Task for High {
    const NAME: &'static str = "hotel.high";
}

/// The strict order promises no start of a lower tier while the tier above has a backlog, unless the broker is
/// silent: a slot is held for at most 300 ms for a message that does not come. Such a silence lets one task start
/// in each slot.
const LONGEST_HOLD: Duration = Duration::from_millis(300);

async fn strict_order_starts_no_high_task_before_the_last_critical_one(queue: &str) {
    const BACKLOG: usize = 300;
    let hotel = Hotel::open(&map(queue, "strict", 1)).await;
    hotel.publish((0..BACKLOG).map(High)).await;
    hotel.publish((0..BACKLOG).map(Critical)).await;
    hotel.gate.add_permits(2 * BACKLOG);
    let working = hotel.work();
    hotel.starts.until(2 * BACKLOG).await;
    working.end().await;

    let starts = hotel.starts.all();
    let last_critical = starts.iter().rposition(|start| start.is_critical).unwrap();
    let early = starts[..last_critical]
        .iter()
        .filter(|start| !start.is_critical)
        .count();
    let silences = starts
        .windows(2)
        .filter(|pair| pair[1].at - pair[0].at >= LONGEST_HOLD)
        .count();
    assert!(
        early <= silences * SLOTS,
        "{early} high tasks started early, with {silences} silences of the broker"
    );
}

#[tokio::test]
async fn strict_order_holds_in_classic_queues() {
    strict_order_starts_no_high_task_before_the_last_critical_one("classic").await;
}

#[tokio::test]
async fn strict_order_holds_in_quorum_queues() {
    strict_order_starts_no_high_task_before_the_last_critical_one("quorum").await;
}

/// Smooth weighted round-robin: while both tiers have a message in the worker, each one's starts are within one
/// of its share since the beginning, and so within two over any stretch.
fn assert_shares(starts: &[Start]) {
    let mut critical = 0.0;
    for (number, start) in (1_u32..).zip(starts) {
        critical += f64::from(u8::from(start.is_critical));
        let share = 0.75 * f64::from(number);
        assert!(
            (critical - share).abs() < 2.0,
            "{critical} critical starts of {number}"
        );
    }
}

/// Twice as many messages as slots: both tiers then always have one that waits for its turn.
const PREFETCH: usize = 2;

async fn weighted_order_shares_starts_by_weight(queue: &str) {
    const STEPS: usize = 100;
    let hotel = Hotel::open(&map(queue, "weighted", PREFETCH)).await;
    hotel.publish((0..STEPS).map(Critical)).await;
    hotel.publish((0..STEPS).map(High)).await;
    let working = hotel.work();
    hotel.starts.until(SLOTS).await;
    for ended in 0..STEPS {
        hotel.until_prefetched(STEPS, STEPS, ended).await;
        hotel.end_one(ended).await;
    }
    // The first slots go to the tier whose messages are the first to come.
    assert_shares(&hotel.starts.all()[SLOTS..]);
    hotel.gate.add_permits(2 * STEPS);
    working.end().await;
}

#[tokio::test]
async fn weighted_order_shares_starts_by_weight_in_classic_queues() {
    weighted_order_shares_starts_by_weight("classic").await;
}

#[tokio::test]
async fn weighted_order_shares_starts_by_weight_in_quorum_queues() {
    weighted_order_shares_starts_by_weight("quorum").await;
}

async fn an_idle_tier_leaves_its_share_to_the_other_and_saves_nothing_up(queue: &str) {
    const ALONE: usize = 40;
    const STEPS: usize = 60;
    let hotel = Hotel::open(&map(queue, "weighted", PREFETCH)).await;
    hotel.publish((0..ALONE + STEPS).map(High)).await;
    let working = hotel.work();
    // All slots, and not only the quarter that its weight would give it.
    hotel.starts.until(SLOTS).await;
    for ended in 0..ALONE {
        hotel.end_one(ended).await;
    }
    hotel.publish((0..STEPS).map(Critical)).await;
    for ended in ALONE..ALONE + STEPS {
        hotel.until_prefetched(STEPS, ALONE + STEPS, ended).await;
        hotel.end_one(ended).await;
    }
    let starts = hotel.starts.all();
    assert!(
        starts[..ALONE + SLOTS]
            .iter()
            .all(|start| !start.is_critical)
    );
    assert_shares(&starts[ALONE + SLOTS..]);
    hotel.gate.add_permits(ALONE + 2 * STEPS);
    working.end().await;
}

#[tokio::test]
async fn an_idle_tier_leaves_its_share_to_the_other_in_classic_queues() {
    an_idle_tier_leaves_its_share_to_the_other_and_saves_nothing_up("classic").await;
}

#[tokio::test]
async fn an_idle_tier_leaves_its_share_to_the_other_in_quorum_queues() {
    an_idle_tier_leaves_its_share_to_the_other_and_saves_nothing_up("quorum").await;
}

/// An app whose handlers end when the gate lets them, in the order of their starts.
struct Hotel {
    _vhost: Vhost,
    app: Tierline,
    starts: Starts,
    gate: Arc<Semaphore>,
    /// For questions to the broker.
    channel: lapin::Channel,
    _connection: lapin::Connection,
}

impl Hotel {
    async fn open(map: &str) -> Self {
        let vhost = vhost().await;
        let (starts, gate) = (Starts::default(), Arc::new(Semaphore::new(0)));
        let (critical, high) = (gate.clone(), gate.clone());
        let mut registry = Registry::new();
        registry
            .register(move |task: Critical| pass(critical.clone(), task.0))
            .unwrap();
        registry
            .register(move |task: High| pass(high.clone(), task.0))
            .unwrap();
        let app = Tierline::builder(Topology::parse(map).unwrap())
            .amqp(vhost.amqp_url())
            .registry(registry)
            .observe(starts.observer())
            .connect()
            .await
            .unwrap();
        let properties = ConnectionProperties::default();
        let connection = lapin::Connection::connect(vhost.amqp_url(), properties);
        let connection = connection.await.unwrap();
        let channel = connection.create_channel().await.unwrap();
        Self {
            _vhost: vhost,
            app,
            starts,
            gate,
            channel,
            _connection: connection,
        }
    }

    async fn publish<T: Task>(&self, tasks: impl Iterator<Item = T>) {
        let requests = tasks.map(|task| PublishRequest::new(&task).unwrap());
        let receipts: Vec<_> = self
            .app
            .publish_many(stream::iter(requests))
            .collect()
            .await;
        assert!(receipts.iter().all(Result::is_ok), "{receipts:?}");
    }

    /// Starts a worker, which finds what was published before.
    fn work(&self) -> Working {
        let (stop, stopped) = oneshot::channel();
        let ended = tokio::spawn(self.app.work(["all"]).until(async {
            let _ = stopped.await;
        }));
        Working { stop, ended }
    }

    /// Lets the task end that has run for longest, of which `ended` have ended before, and waits for the
    /// next start.
    async fn end_one(&self, ended: usize) {
        self.gate.add_permits(1);
        self.starts.until(SLOTS + ended + 1).await;
    }

    /// Waits until the worker has as many messages of each tier as its prefetch allows, after so many tasks
    /// have ended. The numbers are of the tasks that were published.
    async fn until_prefetched(&self, critical: usize, high: usize, ended: usize) {
        let starts = self.starts.all();
        let of_critical = starts[..ended].iter().filter(|it| it.is_critical).count();
        let tiers = [
            ("hotel.critical", critical - of_critical),
            ("hotel.high", high - (ended - of_critical)),
        ];
        for (queue, left) in tiers {
            let expected = left.saturating_sub(SLOTS * PREFETCH);
            let waiting = async { while self.ready(queue).await != expected {} };
            let waited = timeout(PATIENCE, waiting).await;
            assert!(
                waited.is_ok(),
                "{expected} messages never waited in {queue}"
            );
        }
    }

    /// How many messages wait in a queue.
    async fn ready(&self, queue: &str) -> usize {
        let passive = QueueDeclareOptions {
            passive: true,
            ..QueueDeclareOptions::default()
        };
        let arguments = FieldTable::default();
        let declare = self.channel.queue_declare(queue.into(), passive, arguments);
        declare.await.unwrap().message_count() as usize
    }
}

/// Waits for the gate, and then takes some turns of the runtime: different numbers of them, so that slots become
/// free one at a time as well as together.
async fn pass(gate: Arc<Semaphore>, number: usize) {
    gate.acquire().await.unwrap().forget();
    for _ in 0..number % 8 {
        tokio::task::yield_now().await;
    }
}

struct Working {
    stop: oneshot::Sender<()>,
    ended: JoinHandle<Result<(), tierline::Error>>,
}

impl Working {
    async fn end(self) {
        self.stop.send(()).unwrap();
        self.ended.await.unwrap().unwrap();
    }
}

#[derive(Debug, Clone, Copy)]
struct Start {
    is_critical: bool,
    at: Instant,
}

/// The starts of tasks, in their order.
#[derive(Clone)]
struct Starts {
    list: Arc<Mutex<Vec<Start>>>,
    count: Arc<watch::Sender<usize>>,
}

impl Default for Starts {
    fn default() -> Self {
        Self {
            list: Arc::default(),
            count: Arc::new(watch::channel(0).0),
        }
    }
}

impl Starts {
    fn observer(&self) -> impl Fn(&Event<'_>) + Send + Sync + 'static {
        let starts = self.clone();
        move |event| {
            if let Event::Started { task, .. } = event {
                let is_critical = task.tier == "critical";
                let at = Instant::now();
                starts.list.lock().unwrap().push(Start { is_critical, at });
                starts.count.send_modify(|count| *count += 1);
            }
        }
    }

    fn all(&self) -> Vec<Start> {
        self.list.lock().unwrap().clone()
    }

    /// Waits until so many tasks have started.
    async fn until(&self, count: usize) {
        let mut changes = self.count.subscribe();
        let waited = timeout(PATIENCE, changes.wait_for(|started| *started >= count)).await;
        let started = *self.count.borrow();
        assert!(waited.is_ok(), "{started} of {count} tasks have started");
    }
}
