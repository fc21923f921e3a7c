//! Messages with properties that no client library would send. RabbitMQ takes them from anybody.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tierline::dead::{DeadLetter, DeadLetters, Filter, Page, Reason};
use tierline::observe::Event;
use tierline::topology::delay;
use tierline::{Context, Registry, Task, TaskError, Tierline, Topology};
use tierline_testbed::{RawProducer, database, vhost};
use tokio_util::sync::CancellationToken;

const MAP: &str = r#"
    app = "shop"
    [broker]
    long_delays = true
    [tiers.critical]
    queue = "classic"
    [tiers.normal]
    queue = "quorum"
    [groups.all]
    tiers = ["critical", "normal"]
    concurrency = 4
    [tasks]
    "critical.ping" = "critical"
    "normal.ping" = "normal"
    note = "normal"
    retried = "normal"
    refused = "normal"
"#;
const PATIENCE: Duration = Duration::from_secs(180);

/// The largest frame that the broker takes; all but 8 bytes of it may be a content header.
const FRAME_MAX: usize = 131_072;

macro_rules! tasks {
    ($($kind:ident = $name:literal),*) => {$(
        #[derive(Debug, Serialize, Deserialize)]
        struct $kind {
            number: u64,
        }

        impl Task for $kind {
            const NAME: &'static str = $name;
        }
    )*};
}

tasks!(
    CriticalPing = "critical.ping",
    NormalPing = "normal.ping",
    Note = "note",
    Retried = "retried",
    Refused = "refused"
);

/// A worker and a collector, and what they did.
struct Shop {
    app: Tierline,
    letters: DeadLetters,
    producer: RawProducer,
    done: Arc<Mutex<BTreeSet<u64>>>,
    happened: Arc<Mutex<Vec<String>>>,
    next: u64,
    shutdown: CancellationToken,
    worker: tokio::task::JoinHandle<Result<(), tierline::Error>>,
    _servers: (tierline_testbed::Vhost, tierline_testbed::Database),
}

impl Shop {
    async fn open() -> Self {
        let (vhost, database) = tokio::join!(vhost(), database());
        let done = Arc::new(Mutex::new(BTreeSet::new()));
        let happened = Arc::new(Mutex::new(Vec::new()));
        let told = Arc::clone(&happened);
        let app = Tierline::builder(Topology::parse(MAP).unwrap())
            .amqp(vhost.amqp_url())
            .postgres(database.url())
            .registry(registry(&done))
            .observe(move |event: &Event<'_>| told.lock().unwrap().push(format!("{event:?}")))
            .connect()
            .await
            .unwrap();
        app.database().unwrap().migrate().await.unwrap();
        let shutdown = CancellationToken::new();
        let worker = app.work(["all"]).until(shutdown.clone().cancelled_owned());
        Self {
            letters: app.dead_letters().unwrap(),
            producer: RawProducer::connect(vhost.amqp_url()).await.unwrap(),
            app,
            done,
            happened,
            next: 0,
            shutdown,
            worker: tokio::spawn(worker),
            _servers: (vhost, database),
        }
    }

    /// Sends a message with these properties and a payload of its own, and answers which.
    async fn send(&mut self, exchange: &str, key: &[u8], properties: &[u8]) -> u64 {
        self.next += 1;
        let payload = format!("{{\"number\":{}}}", self.next);
        let (exchange, payload) = (exchange.as_bytes(), payload.as_bytes());
        let sent = self.producer.publish(exchange, key, properties, payload);
        sent.await.unwrap();
        self.next
    }

    /// Has a task of each tier run now.
    async fn ping(&mut self) {
        self.next += 2;
        let (first, second) = (self.next - 1, self.next);
        self.app
            .publish(CriticalPing { number: first })
            .await
            .unwrap();
        self.app
            .publish(NormalPing { number: second })
            .await
            .unwrap();
        self.until("a task of each tier to run", async |shop| {
            let done = shop.done.lock().unwrap();
            done.contains(&first) && done.contains(&second)
        })
        .await;
    }

    /// The rows by the number in their payload.
    async fn rows(&self) -> BTreeMap<u64, DeadLetter> {
        let mut rows = BTreeMap::new();
        let mut page = Page::first(Page::LARGEST);
        loop {
            let listed = self.letters.list(&Filter::default(), page).await.unwrap();
            for summary in &listed.letters {
                let letter = self.letters.get(summary.id).await.unwrap();
                let payload: Note = serde_json::from_slice(&letter.payload).unwrap();
                rows.insert(payload.number, letter);
            }
            match listed.next {
                Some(next) => page = Page::after(Page::LARGEST, next),
                None => return rows,
            }
        }
    }

    /// Waits until every one of these ran or has its row, and answers the rows.
    async fn accounted_for(&self, numbers: &[u64]) -> BTreeMap<u64, DeadLetter> {
        self.until("every message to run or to have its row", async |shop| {
            let done = shop.done.lock().unwrap().clone();
            let missing = numbers.iter().filter(|it| !done.contains(it)).count();
            shop.letters.count(&Filter::default()).await.unwrap() >= missing as u64
        })
        .await;
        let rows = self.rows().await;
        let done = self.done.lock().unwrap();
        for number in numbers {
            assert!(
                done.contains(number) != rows.contains_key(number),
                "{number}"
            );
        }
        rows
    }

    async fn until(&self, what: &str, is_so: impl AsyncFn(&Self) -> bool) {
        let waiting = async {
            while !is_so(self).await {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        if tokio::time::timeout(PATIENCE, waiting).await.is_err() {
            let happened = self.happened.lock().unwrap();
            let last = &happened[happened.len().saturating_sub(20)..];
            panic!("waited for {what}; the last events: {last:#?}");
        }
    }

    /// Ends the worker; nothing may have been disturbed.
    async fn end(self) {
        self.shutdown.cancel();
        self.worker.await.unwrap().unwrap();
        let happened = self.happened.lock().unwrap();
        for event in happened.iter() {
            let is_trouble = [
                "Disconnected",
                "ConnectFailed",
                "Interrupted",
                "CollectFailed",
            ];
            assert!(
                !is_trouble.iter().any(|kind| event.starts_with(kind)),
                "{event}"
            );
        }
    }
}

fn registry(done: &Arc<Mutex<BTreeSet<u64>>>) -> Registry {
    let mut registry = Registry::new();
    let of = Arc::clone(done);
    registry
        .register::<CriticalPing, _>(move |task: CriticalPing| {
            of.lock().unwrap().insert(task.number);
            async {}
        })
        .unwrap();
    let of = Arc::clone(done);
    registry
        .register::<NormalPing, _>(move |task: NormalPing| {
            of.lock().unwrap().insert(task.number);
            async {}
        })
        .unwrap();
    let of = Arc::clone(done);
    registry
        .register::<Note, _>(move |task: Note| {
            of.lock().unwrap().insert(task.number);
            async {}
        })
        .unwrap();
    let of = Arc::clone(done);
    registry
        .register::<Retried, _>(move |task: Retried, cx: Context| {
            let is_first = cx.attempt() == 1;
            if !is_first {
                of.lock().unwrap().insert(task.number);
            }
            async move {
                match is_first {
                    true => Err(TaskError::retry_after(
                        Duration::from_millis(100),
                        "not yet",
                    )),
                    false => Ok(()),
                }
            }
        })
        .unwrap();
    registry
        .register::<Refused, _>(|_: Refused| async { Err::<(), _>(TaskError::permanent("never")) })
        .unwrap();
    registry
}

/// A property's flag, by its place from the highest bit on.
const fn flag(place: u16) -> u16 {
    1 << (15 - place)
}

const HEADERS: u16 = flag(2);
const TYPE: u16 = flag(10);
const STRINGS: [(&str, u16); 10] = [
    ("content_type", flag(0)),
    ("content_encoding", flag(1)),
    ("correlation_id", flag(5)),
    ("reply_to", flag(6)),
    ("expiration", flag(7)),
    ("message_id", flag(8)),
    ("type", TYPE),
    ("user_id", flag(11)),
    ("app_id", flag(12)),
    ("cluster_id", flag(13)),
];

fn short(text: &[u8]) -> Vec<u8> {
    [&[u8::try_from(text.len()).unwrap()][..], text].concat()
}

fn long(bytes: &[u8]) -> Vec<u8> {
    let length = u32::try_from(bytes.len()).unwrap();
    [&length.to_be_bytes()[..], bytes].concat()
}

/// Properties with a type and one string of bytes, which may be the type.
fn with_string(flag: u16, bytes: &[u8]) -> Vec<u8> {
    let flags = (flag | TYPE).to_be_bytes().to_vec();
    match flag.cmp(&TYPE) {
        // The higher bit comes first.
        std::cmp::Ordering::Greater => [flags, short(bytes), short(b"note")].concat(),
        std::cmp::Ordering::Equal => [flags, short(bytes)].concat(),
        std::cmp::Ordering::Less => [flags, short(b"note"), short(bytes)].concat(),
    }
}

fn with_headers(task: &str, entries: &[u8]) -> Vec<u8> {
    let flags = (HEADERS | TYPE).to_be_bytes().to_vec();
    [flags, long(entries), short(task.as_bytes())].concat()
}

/// Tables in tables, or arrays in arrays, or both in turns.
fn nested(depth: usize, kinds: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for level in 0..depth {
        let kind = kinds[level % kinds.len()];
        let holder = kinds[(level + 1) % kinds.len()];
        let mut value = vec![kind];
        value.extend(long(&bytes));
        if holder == b'F' {
            value.insert(0, 0);
        }
        bytes = value;
    }
    // As the value of a header.
    let value = if bytes[0] == 0 { &bytes[1..] } else { &bytes };
    [short(b"deep"), value.to_vec()].concat()
}

/// Properties whose content header is so large in all.
fn of_size(task: &str, size: usize) -> Vec<u8> {
    let empty = with_headers(task, &[short(b"large"), b"S".to_vec(), long(b"")].concat());
    let value = vec![b'l'; size - 12 - empty.len()];
    with_headers(
        task,
        &[short(b"large"), b"S".to_vec(), long(&value)].concat(),
    )
}

/// What nobody sends on purpose, each with a name.
fn hostile() -> Vec<(String, Vec<u8>)> {
    let mut cases = Vec::new();
    for (name, flag) in STRINGS {
        // The broker itself refuses these two unless they are a number and the user's name.
        if !matches!(name, "expiration" | "user_id") {
            cases.push((name.to_owned(), with_string(flag, b"no\xffte\xc3")));
        }
    }
    let entries = [short(b"na\xffme"), b"S".to_vec(), long(b"v\xff")].concat();
    cases.push((
        "the name of a header".to_owned(),
        with_headers("note", &entries),
    ));
    for depth in [33, 100, 2_000, 20_000] {
        for kinds in [&b"F"[..], b"A", b"FA"] {
            let name = format!("{depth} levels of {}", String::from_utf8_lossy(kinds));
            cases.push((name, with_headers("note", &nested(depth, kinds))));
        }
    }
    for size in [129_000, 130_000, 130_600, 130_900, 131_000, FRAME_MAX - 8] {
        cases.push((format!("a header of {size} bytes"), of_size("note", size)));
    }
    cases
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_properties_stop_a_worker_or_hide_a_dead_letter() {
    let mut shop = Shop::open().await;
    shop.ping().await;
    let mut sent = Vec::new();
    // One delay level: the broker itself takes seconds to encode 20,000 levels of tables again.
    let delayed = delay::route("shop", "normal", Duration::from_millis(200))
        .unwrap()
        .unwrap();
    for (name, properties) in hostile() {
        for (exchange, key) in [
            ("", "shop.critical"),
            ("", "shop.normal"),
            ("", "shop.critical.dlq"),
            ("", "shop.normal.dlq"),
            (&*delayed.exchange, &*delayed.routing_key),
        ] {
            let number = shop.send(exchange, key.as_bytes(), &properties).await;
            sent.push((number, name.clone(), key.to_owned(), properties.clone()));
        }
        let begin = std::time::Instant::now();
        shop.ping().await;
        println!("{name}: the next tasks ran {:?} later", begin.elapsed());
    }
    let numbers: Vec<u64> = sent.iter().map(|(number, ..)| *number).collect();
    let rows = shop.accounted_for(&numbers).await;
    for (number, name, key, properties) in sent {
        let row = rows.get(&number);
        let is_unknown = name == "type";
        assert_eq!(row.is_some(), is_unknown || key.ends_with(".dlq"), "{name}");
        let Some(row) = row else { continue };
        let error = row.summary.error.as_deref().unwrap();
        let is_well_formed = name.starts_with("a header of");
        assert_eq!(
            error.contains("malformed"),
            !is_well_formed,
            "{name}: {error}"
        );
        // Delay levels add headers of their own.
        if !is_well_formed && key != delayed.routing_key {
            assert_eq!(row.raw_properties.as_deref(), Some(&*properties), "{name}");
        }
    }
    shop.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_retried_or_dies_with_headers_near_the_frame_limit_harms_nobody() {
    let mut shop = Shop::open().await;
    let (mut retried, mut refused) = (Vec::new(), Vec::new());
    for size in [100_000, 130_000, 130_600, 130_900, FRAME_MAX - 8] {
        for queue in ["shop.critical", "shop.normal"] {
            let properties = of_size("retried", size);
            retried.push(shop.send("", queue.as_bytes(), &properties).await);
            let properties = of_size("refused", size);
            refused.push(shop.send("", queue.as_bytes(), &properties).await);
        }
        shop.ping().await;
    }
    let all: Vec<u64> = retried.iter().chain(&refused).copied().collect();
    let rows = shop.accounted_for(&all).await;
    assert_eq!(rows.keys().copied().collect::<Vec<_>>(), refused);
    for row in rows.values() {
        assert_eq!(row.headers["tierline-left-out"], r#"["large"]"#);
    }
    shop.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_routing_key_that_is_not_utf_8_costs_a_task_nothing_if_the_map_has_it() {
    let mut shop = Shop::open().await;
    shop.ping().await;
    // Where the shared delay levels hand over to the tier that the routing key names.
    let (exchange, key) = ("shop.delay.long.out", b"nor\xffmal.0.0");
    let mapped = with_string(flag(8), b"an-id");
    let mapped = shop.send(exchange, key, &mapped).await;
    let unmapped = with_string(TYPE, b"nobody");
    let unmapped = shop.send(exchange, key, &unmapped).await;
    let rows = shop.accounted_for(&[mapped, unmapped]).await;
    assert_eq!(rows.keys().copied().collect::<Vec<_>>(), [unmapped]);
    let row = &rows[&unmapped].summary;
    assert_eq!(
        (row.tier.as_str(), row.reason),
        ("unrouted", Reason::Unroutable)
    );
    shop.ping().await;
    shop.end().await;
}
