//! Brokers that die, connections that are cut, queues that vanish: the worker goes on.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::{StreamExt, stream};
use lapin::ConnectionProperties;
use lapin::options::{BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions};
use serde::{Deserialize, Serialize};
use tierline::task::PublishRequest;
use tierline::{Context, Registry, Task, TaskError};
use tierline_testbed::{Broker, Cluster, Vhost, vhost};
use tokio::sync::Semaphore;

use super::{PATIENCE, Working};

const MAP: &str = r#"
    app = "yard"
    [tiers.first]
    queue = "classic"
    [tiers.second]
    queue = "quorum"
    [groups.all]
    tiers = ["first", "second"]
    concurrency = 4
    prefetch = 3
    [tasks]
    dig = "first"
    fill = "second"
"#;

#[derive(Serialize, Deserialize)]
struct Dig {
    number: u32,
}

impl Task for Dig {
    const NAME: &'static str = "dig";
}

#[derive(Serialize, Deserialize)]
struct Fill {
    number: u32,
}

impl Task for Fill {
    const NAME: &'static str = "fill";
}

/// How often each task ran, and a gate that holds handlers back.
#[derive(Clone)]
struct Yard {
    runs: Arc<Mutex<BTreeMap<String, u32>>>,
    open: Arc<Semaphore>,
}

impl Yard {
    fn open() -> Self {
        Self {
            runs: Arc::default(),
            open: Arc::new(Semaphore::new(Semaphore::MAX_PERMITS)),
        }
    }

    fn closed() -> Self {
        Self {
            open: Arc::new(Semaphore::new(0)),
            ..Self::open()
        }
    }

    async fn work(self, name: String) {
        *self.runs.lock().unwrap().entry(name).or_default() += 1;
        drop(self.open.acquire().await);
    }

    fn runs(&self) -> BTreeMap<String, u32> {
        self.runs.lock().unwrap().clone()
    }

    /// Handlers whose first attempt fails.
    fn failing_at_first(&self) -> Registry {
        async fn run(yard: Yard, name: String, attempt: u32) -> Result<(), TaskError> {
            yard.work(format!("{name}, attempt {attempt}")).await;
            match attempt {
                1 => Err(TaskError::retry_after("10ms", "it rains")),
                _ => Ok(()),
            }
        }
        let mut registry = Registry::new();
        let (dig, fill) = (self.clone(), self.clone());
        registry
            .register::<Dig, _>(move |task: Dig, cx: Context| {
                run(dig.clone(), format!("dig {}", task.number), cx.attempt())
            })
            .unwrap();
        registry
            .register::<Fill, _>(move |task: Fill, cx: Context| {
                run(fill.clone(), format!("fill {}", task.number), cx.attempt())
            })
            .unwrap();
        registry
    }

    fn registry(&self) -> Registry {
        let mut registry = Registry::new();
        let (dig, fill) = (self.clone(), self.clone());
        registry
            .register::<Dig, _>(move |task: Dig| dig.clone().work(format!("dig {}", task.number)))
            .unwrap();
        registry
            .register::<Fill, _>(move |task: Fill| {
                fill.clone().work(format!("fill {}", task.number))
            })
            .unwrap();
        registry
    }
}

async fn publish(working: &Working, numbers: std::ops::Range<u32>) {
    let requests = numbers.flat_map(|number| {
        let payload = format!(r#"{{"number":{number}}}"#).into_bytes();
        ["dig", "fill"].map(|task| {
            let mut request = PublishRequest::named(task, payload.clone());
            request.deadline = Some(Duration::from_secs(60));
            request
        })
    });
    let outcomes = working.app.publish_many(stream::iter(requests));
    outcomes
        .for_each(async |outcome| drop(outcome.unwrap()))
        .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_broker_costs_no_task_and_the_worker_is_as_strong_as_before() {
    let broker = Broker::start().await.unwrap();
    let yard = Yard::open();
    let working = Working::begin_on(broker.vhost().await.unwrap(), MAP, yard.registry()).await;
    working.heard.until("consuming", 2).await;
    publish(&working, 0..100).await;
    broker.flush_declarations().await.unwrap();
    broker.kill().await.unwrap();
    broker.start().await.unwrap();
    publish(&working, 100..200).await;
    broker.close_all_connections().await.unwrap();
    publish(&working, 200..300).await;
    broker.restart().await.unwrap();
    publish(&working, 300..400).await;
    let ran = async {
        while yard.runs().len() < 800 {
            working.heard.next().await;
        }
    };
    let ran = tokio::time::timeout(super::PATIENCE, ran).await;
    assert!(ran.is_ok(), "{} of 800 ran", yard.runs().len());
    let again = yard.runs().values().filter(|runs| **runs > 1).count();
    println!("{again} of 800 tasks ran more than once");

    let vhost = working.vhost.name();
    let listed = [
        "list_consumers",
        "-p",
        vhost,
        "queue_name",
        "prefetch_count",
    ];
    let consumers = broker.rabbitmqctl(&listed).await.unwrap();
    for queue in ["yard.first\t12", "yard.second\t12"] {
        assert_eq!(consumers.matches(queue).count(), 1, "{consumers}");
    }
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_outlives_its_connection_is_not_run_again_by_its_own_worker() {
    let broker = Broker::start().await.unwrap();
    let yard = Yard::closed();
    let working = Working::begin_on(broker.vhost().await.unwrap(), MAP, yard.registry()).await;
    publish(&working, 0..6).await;
    working.heard.until("started", 4).await;
    broker.close_all_connections().await.unwrap();
    working.heard.until("consuming", 4).await;
    yard.open.add_permits(1_000);
    working.heard.until("done", 12).await;
    let vhost = working.end().await;
    assert_eq!(vhost.depth("yard.first").await.unwrap(), 0);
    assert_eq!(vhost.depth("yard.second").await.unwrap(), 0);
    let runs = yard.runs();
    assert!(runs.values().all(|runs| *runs == 1), "{runs:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_fails_after_its_connection_was_lost_is_retried_once() {
    let yard = Yard::closed();
    let working = Working::begin(MAP, yard.failing_at_first()).await;
    publish(&working, 0..2).await;
    working.heard.until("started", 4).await;
    for tier in [" all first", " all second"] {
        let closing = async { while working.vhost.close_connections(tier).await.unwrap() == 0 {} };
        tokio::time::timeout(PATIENCE, closing).await.unwrap();
    }
    working.heard.until("disconnected Work", 2).await;
    // The publishers are connected: the retries are stored before there is a consumer again.
    yard.open.add_permits(1_000);
    working.heard.until("done", 4).await;
    working.heard.until("consuming", 4).await;
    let vhost = working.end().await;
    assert_eq!(vhost.depth("yard.first").await.unwrap(), 0);
    assert_eq!(vhost.depth("yard.second").await.unwrap(), 0);
    let runs = yard.runs();
    assert!(runs.values().all(|runs| *runs == 1), "{runs:?}");
    assert_eq!(runs.len(), 8, "two attempts of each: {runs:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_deleted_behind_our_back_is_declared_again_and_the_other_tier_does_not_notice() {
    let yard = Yard::open();
    let working = Working::begin(MAP, yard.registry()).await;
    working.heard.until("consuming", 2).await;
    for queue in ["yard.first", "yard.second"] {
        working.vhost.delete_queue(queue).await.unwrap();
    }
    working.heard.until("redeclared first", 1).await;
    working.heard.until("redeclared second", 1).await;
    working.heard.until("consuming", 4).await;
    publish(&working, 0..10).await;
    working.heard.until("done", 20).await;
    let lines = working.heard.lines();
    let is_cut = lines.iter().any(|line| line.starts_with("disconnected"));
    assert!(!is_cut, "{lines:#?}");
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_starts_while_the_node_of_one_tier_is_down_serves_the_others() {
    let cluster = Cluster::start().await.unwrap();
    let [first, second, _] = cluster.nodes();
    let yard = Yard::open();
    let working = Working::begin_on(cluster.vhost().await.unwrap(), MAP, yard.registry()).await;
    let vhost = working.end().await;
    for node in cluster.nodes() {
        node.flush_declarations().await.unwrap();
    }
    // The queue of the tier `first` was declared there, and is classic.
    first.kill().await.unwrap();

    let url = format!("{}/{}", second.amqp_url(), vhost.name());
    let working = Working::begin_at(&url, vhost, MAP, yard.registry()).await;
    let fill = working.app.publish(Fill { number: 1 });
    fill.deadline(super::PATIENCE).await.unwrap();
    working.heard.until("done fill", 1).await;
    let dig = || working.app.publish(Dig { number: 1 });
    assert!(dig().deadline(Duration::from_secs(1)).await.is_err());
    first.start().await.unwrap();
    working.heard.until("consuming first", 1).await;
    dig().deadline(super::PATIENCE).await.unwrap();
    working.heard.until("done dig", 1).await;
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ack_timeout_is_survived_and_the_task_runs_once() {
    let broker = Broker::start_new().await.unwrap();
    // The broker loses patience long before the map says that it would.
    let set = async |setting: &str| {
        let command = format!("application:set_env(rabbit, {setting}).");
        broker.rabbitmqctl(&["eval", &command]).await.unwrap();
    };
    set("consumer_timeout, 1000").await;
    set("channel_tick_interval, 500").await;
    let yard = Yard::closed();
    let working = Working::begin_on(broker.vhost().await.unwrap(), MAP, yard.registry()).await;
    let request = working.app.publish(Fill { number: 1 });
    request.await.unwrap();
    working.heard.until("started fill", 1).await;
    working.heard.until("interrupted second", 1).await;
    set("consumer_timeout, 3600000").await;
    working
        .heard
        .until_latest("interrupted second", "consuming second")
        .await;
    yard.open.add_permits(1_000);
    working.heard.until("done fill", 1).await;
    let vhost = working.end().await;
    assert_eq!(vhost.depth("yard.second").await.unwrap(), 0);
    assert_eq!(yard.runs()["fill 1"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_ends_in_time_although_the_broker_is_gone() {
    let broker = Broker::start().await.unwrap();
    let yard = Yard::closed();
    let working = Working::begin_on(broker.vhost().await.unwrap(), MAP, yard.registry()).await;
    publish(&working, 0..4).await;
    working.heard.until("started", 4).await;
    broker.pause().await.unwrap();
    let (stop, ended) = (working.stop, working.ended);
    stop.send(()).unwrap();
    let ended = tokio::time::timeout(super::PATIENCE, ended).await;
    broker.resume().await.unwrap();
    ended.unwrap().unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_settled_under_an_alarm_goes_back_and_is_settled_later() {
    let broker = Broker::start().await.unwrap();
    let mut registry = Registry::new();
    registry
        .register::<Fill, _>(|_: Fill| async { Err::<(), _>("no sand") })
        .unwrap();
    let working = Working::begin_on(broker.vhost().await.unwrap(), MAP, registry).await;
    working.app.publish(Fill { number: 1 }).await.unwrap();
    working.heard.until("retried fill 1", 1).await;
    broker.raise_memory_alarm().await.unwrap();
    working.heard.until("given back fill", 1).await;
    broker.clear_memory_alarm().await.unwrap();
    working.heard.until("retried fill 2", 1).await;
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_suspect_does_not_run_again_before_its_crash_is_counted() {
    let broker = Broker::start().await.unwrap();
    let yard = Yard::open();
    let working = Working::begin_on(broker.vhost().await.unwrap(), MAP, yard.registry()).await;
    let app = working.app.clone();
    let vhost = working.end().await;
    // A loaded machine may refuse the first message of a channel for a while.
    let publishing = app.publish(Fill { number: 1 }).deadline("30s");
    publishing.await.unwrap();
    die_with_it_twice(&vhost, "yard.second").await;
    broker.raise_memory_alarm().await.unwrap();
    let working = Working::begin_on(vhost, MAP, yard.registry()).await;
    working.heard.until("given back fill", 2).await;
    assert_eq!(working.heard.count("started"), 0);
    broker.clear_memory_alarm().await.unwrap();
    working.heard.until("suspected fill 2", 1).await;
    working.heard.until("done fill", 1).await;
    working.end().await;
}

/// Leaves the one message of a queue as two workers would that died with it: the second death is not
/// counted yet.
async fn die_with_it_twice(vhost: &Vhost, queue: &str) {
    let properties = ConnectionProperties::default();
    let connection = lapin::Connection::connect(vhost.amqp_url(), properties);
    let connection = connection.await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    let get = async |no_ack| {
        let options = BasicGetOptions { no_ack };
        let got = channel.basic_get(queue.into(), options).await.unwrap();
        got.unwrap().delivery
    };
    let first = get(true).await;
    let mut headers = first.properties.headers().clone().unwrap();
    headers.insert("tierline-crashes".into(), 1_i64.into());
    let properties = first.properties.with_headers(headers);
    let confirm = ConfirmSelectOptions::default();
    channel.confirm_select(confirm).await.unwrap();
    let options = BasicPublishOptions::default();
    channel
        .basic_publish("".into(), queue.into(), options, &first.data, properties)
        .await
        .unwrap()
        .await
        .unwrap();
    get(false).await;
    connection.close(200, "".into()).await.unwrap();
}

#[tokio::test]
async fn limits_that_cannot_hold_and_groups_that_do_not_exist_are_refused_at_the_start() {
    let vhost = vhost().await;
    let map = MAP.replace(
        "[tiers.first]",
        "[broker]\nack_timeout = \"10m\"\n[tiers.first]",
    );
    let topology = tierline::Topology::parse(&map).unwrap();
    let app = tierline::Tierline::builder(topology)
        .amqp(vhost.amqp_url())
        .registry(Yard::open().registry())
        .connect()
        .await
        .unwrap();
    let error = app.work(["all"]).until(async {}).await.unwrap_err();
    let error = error.to_string();
    for part in ["`dig`", "\"all\"", "18m", "ack_timeout 10m"] {
        assert!(error.contains(part), "{error}");
    }
    let error = app.work(["al"]).until(async {}).await.unwrap_err();
    assert!(error.to_string().contains("its groups are all"), "{error}");
}
