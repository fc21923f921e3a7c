//! Messages that have no id, or share one: none is taken for another.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use futures_util::future::join_all;
use lapin::options::{BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions};
use lapin::{BasicProperties, Channel, ConnectionProperties};
use serde::{Deserialize, Serialize};
use tierline::{Registry, Task, Tierline, Topology};
use tierline_testbed::{Broker, Vhost};
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::task::JoinHandle;

use super::{Heard, PATIENCE, Working};

const MAP: &str = r#"
    app = "yard"
    [tiers.first]
    queue = "classic"
    [tiers.second]
    queue = "quorum"
    [groups.first]
    tiers = ["first"]
    concurrency = 8
    prefetch = 2
    [groups.second]
    tiers = ["second"]
    concurrency = 8
    prefetch = 2
    [tasks]
    dig = "first"
    haul = "first"
    fill = "second"
    pour = "second"
    "hold.first" = "first"
    "hold.second" = "second"
"#;
/// What a group runs at once.
const SLOTS: usize = 8;
const TIERS: [&str; 2] = ["first", "second"];

/// The tasks of a tier.
fn tasks(tier: &str) -> [&'static str; 2] {
    match tier {
        "first" => ["dig", "haul"],
        _ => ["fill", "pour"],
    }
}

/// What a task is told apart by: its name and its number.
type Name = (String, u32);

/// How often each task of a tier was begun, how many have ended, and what lets them end.
#[derive(Clone)]
struct Site {
    begun: Arc<Mutex<BTreeMap<Name, u32>>>,
    /// How many handlers were begun, and how many have ended.
    counts: Arc<watch::Sender<(usize, usize)>>,
    may_end: Arc<Semaphore>,
    /// How many handlers of the tasks `hold` run, and what lets them end.
    holding: Arc<watch::Sender<usize>>,
    may_leave: Arc<Semaphore>,
}

impl Site {
    fn new() -> Self {
        Self {
            begun: Arc::default(),
            counts: Arc::new(watch::channel((0, 0)).0),
            may_end: Arc::new(Semaphore::new(0)),
            holding: Arc::new(watch::channel(0).0),
            may_leave: Arc::new(Semaphore::new(0)),
        }
    }

    async fn work(self, task: &'static str, number: u32) {
        let name = (task.to_owned(), number);
        *self.begun.lock().unwrap().entry(name).or_default() += 1;
        self.counts.send_modify(|(begun, _)| *begun += 1);
        self.may_end.acquire().await.unwrap().forget();
        self.counts.send_modify(|(_, ended)| *ended += 1);
    }

    async fn hold(self) {
        self.holding.send_modify(|count| *count += 1);
        drop(self.may_leave.acquire().await);
        self.holding.send_modify(|count| *count -= 1);
    }

    /// Lets so many handlers end.
    fn let_end(&self, count: usize) {
        self.may_end.add_permits(count);
    }

    fn begun(&self) -> BTreeMap<Name, u32> {
        self.begun.lock().unwrap().clone()
    }

    async fn until(&self, what: &str, is_so: impl Fn(usize, usize) -> bool) {
        let mut counts = self.counts.subscribe();
        let reached = counts.wait_for(|(begun, ended)| is_so(*begun, *ended));
        let is_reached = tokio::time::timeout(PATIENCE, reached).await.is_ok();
        assert!(is_reached, "{what}: {:?}", self.counts.borrow());
    }

    async fn until_holding(&self, count: usize) {
        let mut holding = self.holding.subscribe();
        let reached = holding.wait_for(|now| *now == count);
        let is_reached = tokio::time::timeout(PATIENCE, reached).await.is_ok();
        assert!(is_reached, "{} of {count} slots", *self.holding.borrow());
    }

    fn register<T: Task + Into<u32>>(&self, registry: &mut Registry) {
        let site = self.clone();
        registry
            .register::<T, _>(move |task: T| site.clone().work(T::NAME, task.into()))
            .unwrap();
    }

    fn register_hold<T: Task>(&self, registry: &mut Registry) {
        let site = self.clone();
        registry
            .register::<T, _>(move |_: T| site.clone().hold())
            .unwrap();
    }
}

/// The handlers of both tiers.
fn registry([first, second]: &[Site; 2]) -> Registry {
    let mut registry = Registry::new();
    first.register::<Dig>(&mut registry);
    first.register::<Haul>(&mut registry);
    first.register_hold::<HoldFirst>(&mut registry);
    second.register::<Fill>(&mut registry);
    second.register::<Pour>(&mut registry);
    second.register_hold::<HoldSecond>(&mut registry);
    registry
}

macro_rules! numbered {
    ($($task:ident $name:literal),*) => {$(
        #[derive(Serialize, Deserialize)]
        struct $task {
            number: u32,
        }

        impl Task for $task {
            const NAME: &'static str = $name;
        }

        impl From<$task> for u32 {
            fn from(task: $task) -> u32 {
                task.number
            }
        }
    )*};
}

numbered!(Dig "dig", Haul "haul", Fill "fill", Pour "pour");
numbered!(HoldFirst "hold.first", HoldSecond "hold.second");

/// A message as a program without tierline would send it.
struct Foreign {
    id: Option<String>,
    name: Name,
}

impl Foreign {
    fn new(id: Option<&str>, task: &str, number: u32) -> Self {
        Self {
            id: id.map(str::to_owned),
            name: (task.to_owned(), number),
        }
    }
}

/// Publishes to a tier, and waits until all are confirmed.
async fn send(vhost: &Vhost, tier: &str, messages: &[Foreign]) {
    let channel = channel(vhost).await;
    let confirms = ConfirmSelectOptions::default();
    channel.confirm_select(confirms).await.unwrap();
    let mut sent = Vec::new();
    for Foreign { id, name } in messages {
        let mut properties = BasicProperties::default()
            .with_delivery_mode(2)
            .with_type(name.0.as_str().into());
        if let Some(id) = id {
            properties = properties.with_message_id(id.as_str().into());
        }
        let payload = format!(r#"{{"number":{}}}"#, name.1).into_bytes();
        let options = BasicPublishOptions::default();
        let confirm = channel
            .basic_publish(
                "yard.tasks".into(),
                tier.into(),
                options,
                &payload,
                properties,
            )
            .await;
        sent.push(confirm.unwrap());
    }
    for confirm in join_all(sent).await {
        assert!(confirm.unwrap().is_ack());
    }
}

async fn channel(vhost: &Vhost) -> Channel {
    let properties = ConnectionProperties::default();
    let connection = lapin::Connection::connect(vhost.amqp_url(), properties);
    connection.await.unwrap().create_channel().await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_without_an_id_or_with_the_same_one_are_not_taken_for_each_other() {
    let broker = Broker::start().await.unwrap();
    none_is_lost(&broker, |tier, number| {
        let id = number.is_multiple_of(2).then_some("");
        Foreign::new(id, tasks(tier)[0], number)
    })
    .await;
    let same_id = |tier: &str, number| Foreign::new(Some("same"), tasks(tier)[0], number);
    none_is_lost(&broker, same_id).await;
    none_is_lost(&broker, |tier, number| {
        let id = format!("pair-{}", number / 2);
        Foreign::new(Some(&id), tasks(tier)[number as usize % 2], number / 2)
    })
    .await;
}

/// Has a worker run messages of which some are done, some run and some wait when its connections are
/// lost. All of them are run.
async fn none_is_lost(broker: &Broker, message: impl Fn(&str, u32) -> Foreign) {
    const MESSAGES: u32 = 40;
    // What waits in the queue while each slot has one that runs and one that waits.
    const LEFT: u32 = MESSAGES - 3 * SLOTS as u32;
    let sites = [Site::new(), Site::new()];
    let vhost = broker.vhost().await.unwrap();
    let working = Working::begin_on(vhost, MAP, registry(&sites)).await;
    let mut names = [BTreeSet::new(), BTreeSet::new()];
    for (tier, names) in TIERS.into_iter().zip(&mut names) {
        let messages: Vec<_> = (0..MESSAGES).map(|number| message(tier, number)).collect();
        send(&working.vhost, tier, &messages).await;
        names.extend(messages.into_iter().map(|message| message.name));
    }
    for site in &sites {
        site.until("all slots are in use", |begun, _| begun == SLOTS)
            .await;
        site.let_end(SLOTS);
        site.until("some have ended, and others were begun", |begun, ended| {
            ended == SLOTS && begun == 2 * SLOTS
        })
        .await;
    }
    broker.close_all_connections().await.unwrap();
    working.heard.until("consuming", 4).await;
    for ((tier, site), names) in TIERS.into_iter().zip(&sites).zip(&names) {
        // What was lost with the connection has come again while its handlers still run.
        until_depth(&working.vhost, tier, LEFT).await;
        site.let_end(Semaphore::MAX_PERMITS / 2);
        let all_ran = || names.iter().all(|name| site.begun().contains_key(name));
        site.until("all have ended", |begun, ended| begun == ended && all_ran())
            .await;
    }
    let vhost = working.end().await;
    for tier in TIERS {
        assert_eq!(vhost.depth(&format!("yard.{tier}.dlq")).await.unwrap(), 0);
    }
}

/// Waits until no more than so many messages of a tier wait in its queue.
async fn until_depth(vhost: &Vhost, tier: &str, depth: u32) {
    let queue = format!("yard.{tier}");
    let waiting = async { while vhost.depth(&queue).await.unwrap() > depth {} };
    tokio::time::timeout(PATIENCE, waiting).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn of_equal_messages_that_outlive_their_connection_each_is_acknowledged_and_none_runs_again()
{
    let broker = Broker::start().await.unwrap();
    let sites = [Site::new(), Site::new()];
    let vhost = broker.vhost().await.unwrap();
    let working = Working::begin_on(vhost, MAP, registry(&sites)).await;
    for (tier, site) in TIERS.into_iter().zip(&sites) {
        let equal = || Foreign::new(Some("twin"), tasks(tier)[0], 1);
        let messages: Vec<_> = (0..SLOTS).map(|_| equal()).collect();
        send(&working.vhost, tier, &messages).await;
        site.until("all run", |begun, _| begun == SLOTS).await;
    }
    broker.close_all_connections().await.unwrap();
    working.heard.until("consuming", 4).await;
    for site in &sites {
        site.let_end(SLOTS);
        site.until("all have ended", |_, ended| ended == SLOTS)
            .await;
    }
    until_nothing_is_left(&broker, &working.vhost).await;
    let vhost = working.end().await;
    for (tier, site) in TIERS.into_iter().zip(&sites) {
        let begun: u32 = site.begun().values().sum();
        assert_eq!(begun as usize, SLOTS);
        assert_eq!(vhost.depth(&format!("yard.{tier}")).await.unwrap(), 0);
    }
}

/// Of the messages of a tier a third has no id, a third shares ids in groups and differs in its payload,
/// and a third shares id and payload in pairs of different tasks.
fn mixed(tier: &str, count: u32) -> Vec<Foreign> {
    let [task, other] = tasks(tier);
    let one = |index: u32| match index % 3 {
        0 => Foreign::new(index.is_multiple_of(2).then_some(""), task, index),
        1 => Foreign::new(Some(&format!("group-{}", index / 30)), task, index),
        _ => {
            let (pair, is_other) = (index / 6, index.is_multiple_of(2));
            let task = if is_other { other } else { task };
            Foreign::new(Some(&format!("pair-{pair}")), task, 10_000 + pair)
        }
    };
    (0..count).map(one).collect()
}

/// One of the workers.
struct Worker {
    stop: oneshot::Sender<()>,
    ended: JoinHandle<Result<(), tierline::Error>>,
}

impl Worker {
    async fn begin(vhost: &Vhost, sites: &[Site; 2]) -> Self {
        let heard = Heard::default();
        let app = Tierline::builder(Topology::parse(MAP).unwrap())
            .amqp(vhost.amqp_url())
            .registry(registry(sites))
            .observe(heard.ear())
            .connect()
            .await
            .unwrap();
        let (stop, stopped) = oneshot::channel();
        let ended = tokio::spawn(app.work(TIERS).until(async {
            let _ = stopped.await;
        }));
        heard.until("consuming", 2).await;
        Self { stop, ended }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_message_runs_and_every_slot_is_free_however_ids_repeat_and_the_broker_fails() {
    const MESSAGES: u32 = 2_000;
    const STEP: usize = 250;
    let broker = Broker::start().await.unwrap();
    let vhost = broker.vhost().await.unwrap();
    let sites = [Site::new(), Site::new()];
    let workers = [
        Worker::begin(&vhost, &sites).await,
        Worker::begin(&vhost, &sites).await,
    ];
    broker.flush_declarations().await.unwrap();
    let mut names = BTreeSet::new();
    for tier in TIERS {
        let messages = mixed(tier, MESSAGES);
        send(&vhost, tier, &messages).await;
        names.extend(messages.into_iter().map(|message| message.name));
    }
    assert_eq!(names.len(), 2 * MESSAGES as usize);

    for (fault, is_kill) in [false, true, false, false, true, false, false]
        .into_iter()
        .enumerate()
    {
        let reached = (fault + 1) * STEP;
        sites.iter().for_each(|site| site.let_end(STEP));
        for site in &sites {
            site.until("all slots of both workers are in use", |begun, ended| {
                ended == reached && begun == ended + 2 * SLOTS
            })
            .await;
        }
        match is_kill {
            false => broker.close_all_connections().await.unwrap(),
            true => {
                broker.kill().await.unwrap();
                broker.start().await.unwrap();
            }
        }
    }
    for site in &sites {
        site.let_end(Semaphore::MAX_PERMITS / 2);
    }
    let all_begun = || {
        let begun = sites.iter().flat_map(Site::begun);
        begun.collect::<BTreeMap<_, _>>()
    };
    let mut dead = BTreeSet::new();
    let channel = channel(&vhost).await;
    let all_ran_or_dead = async {
        loop {
            for tier in TIERS {
                dead.extend(take_dead(&channel, tier).await);
            }
            let begun = all_begun();
            let missing = names.iter().filter(|name| !begun.contains_key(*name));
            if missing.filter(|name| !dead.contains(*name)).count() == 0 {
                return;
            }
        }
    };
    let is_over = tokio::time::timeout(PATIENCE, all_ran_or_dead).await;
    let begun = all_begun();
    let missing: Vec<_> = names.iter().filter(|it| !begun.contains_key(*it)).collect();
    assert!(
        is_over.is_ok(),
        "{} did not run: {missing:?}",
        missing.len()
    );
    let again = begun.values().filter(|runs| **runs > 1).count();
    println!(
        "{again} of {} tasks ran more than once, {} are dead",
        names.len(),
        dead.len()
    );

    for site in &sites {
        site.until("no handler runs", |begun, ended| begun == ended)
            .await;
    }
    until_nothing_is_left(&broker, &vhost).await;
    // As many as the windows of both workers hold, so that every slot has one.
    for (tier, site) in TIERS.into_iter().zip(&sites) {
        let hold = |number| Foreign::new(None, &format!("hold.{tier}"), number);
        let messages: Vec<_> = (0..4 * SLOTS as u32).map(hold).collect();
        send(&vhost, tier, &messages).await;
        site.until_holding(2 * SLOTS).await;
        site.may_leave.add_permits(Semaphore::MAX_PERMITS / 2);
    }
    until_nothing_is_left(&broker, &vhost).await;
    for Worker { stop, ended } in workers {
        stop.send(()).unwrap();
        ended.await.unwrap().unwrap();
    }
}

/// The dead letters of a tier that are there now.
async fn take_dead(channel: &Channel, tier: &str) -> Vec<Name> {
    let queue = format!("yard.{tier}.dlq");
    let mut names = Vec::new();
    let options = BasicGetOptions { no_ack: true };
    let get = async || channel.basic_get(queue.as_str().into(), options).await;
    while let Some(got) = get().await.unwrap() {
        let task = got.properties.kind().as_ref().unwrap().to_string();
        let payload: Dig = serde_json::from_slice(&got.data).unwrap();
        names.push((task, payload.number));
    }
    names
}

/// Waits until no tier has a message, be it ready or handed out.
async fn until_nothing_is_left(broker: &Broker, vhost: &Vhost) {
    let listed = ["list_queues", "-p", vhost.name(), "name", "messages"];
    let mut queues = String::new();
    let waiting = async {
        loop {
            queues = broker.rabbitmqctl(&listed).await.unwrap();
            let is_empty = |tier| queues.contains(&format!("yard.{tier}\t0\n"));
            if TIERS.into_iter().all(is_empty) {
                return;
            }
        }
    };
    let is_over = tokio::time::timeout(PATIENCE, waiting).await.is_ok();
    assert!(is_over, "{queues}");
}
