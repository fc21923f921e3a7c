//! Tasks that kill their worker, workers that are killed, and workers that are asked to end.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use lapin::ConnectionProperties;
use lapin::options::{BasicAckOptions, BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions};
use tierline::message::{DeadReason, Death};
use tierline::task::PublishRequest;
use tierline::{Tierline, Topology};
use tierline_testbed::{Vhost, vhost};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

/// How long a test waits for something that must happen.
const PATIENCE: Duration = Duration::from_secs(120);

fn map(queue: &str, prefetch: u16) -> String {
    format!(
        r#"
        app = "house"
        [tiers.normal]
        queue = "{queue}"
        [tiers.low]
        queue = "{queue}"
        [groups.all]
        tiers = ["normal"]
        concurrency = 4
        prefetch = {prefetch}
        [groups.low]
        tiers = ["low"]
        concurrency = 4
        prefetch = {prefetch}
        [tasks]
        note = "normal"
        abort = "normal"
        spin = "normal"
        "#
    )
}

#[tokio::test]
async fn a_task_that_aborts_its_process_ends_as_a_dead_letter_and_harms_no_neighbour_classic() {
    let house = House::build("classic", 2).await;
    house
        .kills_only_itself("abort", &[DeadReason::CrashLoop])
        .await;
}

#[tokio::test]
async fn a_task_that_aborts_its_process_ends_as_a_dead_letter_and_harms_no_neighbour_quorum() {
    let house = House::build("quorum", 2).await;
    house
        .kills_only_itself("abort", &[DeadReason::CrashLoop])
        .await;
}

#[tokio::test]
async fn a_killer_is_told_apart_from_all_who_are_suspected_with_it() {
    for queue in ["classic", "quorum"] {
        let house = House::build(queue, 2).await;
        house.publish_notes(0..10, 10).await;
        house.app.publish_named("abort", &nothing()).await.unwrap();
        house.publish_notes(10..20, 10).await;
        house.suspect(21, |_| 2).await;
        house.outlives("abort", &[DeadReason::CrashLoop], 20).await;
    }
}

#[tokio::test]
async fn a_task_that_never_yields_ends_as_a_dead_letter_and_harms_no_neighbour() {
    let house = House::build("quorum", 2).await;
    house
        .kills_only_itself("spin", &[DeadReason::Hung, DeadReason::CrashLoop])
        .await;
}

#[tokio::test]
async fn a_worker_that_is_killed_loses_nothing() {
    let house = House::build("classic", 2).await;
    house.publish_notes(0..300, 10).await;
    let mut worker = house.worker().await;
    house.until_ended(50).await;
    worker.kill().await;
    let mut worker = house.worker().await;
    house.until_all_ended(300).await;
    worker.kill().await;
    let again = house.runs().values().filter(|runs| **runs > 1).count();
    // What was in hand when it was killed: two per slot.
    assert!(again <= 8, "{again} tasks ran twice");
}

#[tokio::test]
async fn a_worker_that_is_asked_to_end_gives_back_what_it_has_not_begun() {
    let house = House::build("quorum", 4).await;
    house.publish_notes(0..200, 20).await;
    let mut worker = house.worker().await;
    house.until_ended(20).await;
    worker.terminate().await;
    let ran = house.runs();
    assert!(ran.len() < 200, "there is work left");
    let ended = house.ended();
    assert_eq!(ended, ran.len(), "what was begun has ended");
    house.until_depth(200 - ran.len()).await;
    let mut other = house.worker().await;
    house.until_all_ended(200).await;
    other.terminate().await;
    assert!(house.runs().values().all(|runs| *runs == 1));
}

#[tokio::test]
async fn a_worker_that_is_asked_to_end_while_it_is_busy_loses_nothing() {
    let house = House::build("quorum", 4).await;
    // A few outlast the grace period.
    for number in 0..200 {
        let milliseconds = if number % 50 == 49 { 8_000 } else { 10 };
        house.publish_notes(number..number + 1, milliseconds).await;
    }
    let mut worker = house.worker().await;
    house.until_ended(110).await;
    let begin = Instant::now();
    worker.terminate().await;
    println!("it took {:?}, with 1.5 s of grace", begin.elapsed());
    let mut other = house.worker().await;
    house.until_all_ended(200).await;
    other.terminate().await;
    let again = house.runs().values().filter(|runs| **runs > 1).count();
    println!("{again} of 200 tasks ran twice");
    assert!(again >= 1, "none outlasted the grace period");
    assert!(again <= 4, "more than there are slots: {again}");
}

#[tokio::test]
async fn a_worker_that_takes_long_to_end_leaves_alone_what_waits() {
    let house = House::build("classic", 1).await;
    // In all slots, and longer than a worker is content with a consumer of which it hears nothing.
    house.publish_notes(0..4, 13_000).await;
    let mut worker = house.worker_with(PATIENCE).await;
    house.until("all are begun", || house.begun() == 4).await;
    worker.ask_to_end().await;
    house.publish_notes(4..40, 10).await;
    worker.until_terminated().await;
    assert_eq!(house.ended(), 4);
    let lines = worker.rest().await;
    assert!(
        !lines.iter().any(|it| it == "consuming normal"),
        "{lines:?}"
    );
    house.until_depth(36).await;
}

#[tokio::test]
async fn a_task_that_outlasts_the_grace_period_is_given_back_at_no_cost() {
    let house = House::build("classic", 1).await;
    house.publish_notes(0..1, 600_000).await;
    let mut worker = house.worker().await;
    house.until("it is begun", || house.begun() == 1).await;
    let begin = Instant::now();
    worker.terminate().await;
    println!("it took {:?}", begin.elapsed());
    house.until_depth(1).await;
    let mut other = house.worker().await;
    house
        .until("it was begun again", || house.runs()[&0] == 2)
        .await;
    other.kill().await;
    let lines = other.rest().await;
    assert!(
        !lines.iter().any(|it| it.contains("suspected")),
        "{lines:?}"
    );
}

#[tokio::test]
async fn a_suspect_that_waits_in_a_worker_is_given_back_at_no_cost() {
    let house = House::build("quorum", 2).await;
    // All slots of both groups, and then all the rest of their windows.
    house.publish_notes(0..8, 4_000).await;
    house.publish_notes(8..16, 10).await;
    // The next crash would be their last.
    house
        .suspect(16, |number| if number < 8 { 0 } else { 3 })
        .await;
    let mut worker = house.worker().await;
    house.until("8 are begun", || house.begun() >= 8).await;
    house.until_depth(0).await;
    worker.terminate().await;
    let mut other = house.worker().await;
    house.until_all_ended(16).await;
    other.terminate().await;
    assert_eq!(house.dead_letters().await, 0);
}

/// A broker's corner, a ledger, and workers that come and go.
struct House {
    vhost: Vhost,
    map: String,
    app: Tierline,
    ledger: PathBuf,
}

impl House {
    async fn build(queue: &str, prefetch: u16) -> Self {
        let vhost = vhost().await;
        let map = map(queue, prefetch);
        let app = Tierline::builder(Topology::parse(&map).unwrap())
            .amqp(vhost.amqp_url())
            .connect()
            .await
            .unwrap();
        static HOUSES: AtomicU32 = AtomicU32::new(0);
        let house = HOUSES.fetch_add(1, Ordering::Relaxed);
        let name = format!("ledger-{}-{house}", std::process::id());
        let ledger = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        Self {
            vhost,
            map,
            app,
            ledger,
        }
    }

    /// A worker that has begun to consume, and has little time to end.
    async fn worker(&self) -> Worker {
        self.worker_with(Duration::from_millis(1_500)).await
    }

    async fn worker_with(&self, grace: Duration) -> Worker {
        let mut process = Command::new(env!("CARGO_BIN_EXE_worker"))
            .env("AMQP_URL", self.vhost.amqp_url())
            .env("MAP", &self.map)
            .env("LEDGER", &self.ledger)
            .env("GRACE", grace.as_millis().to_string())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let mut worker = Worker { process, lines };
        worker.until("consuming normal").await;
        worker
    }

    /// A killer among fifty innocents.
    async fn kills_only_itself(&self, killer: &str, reasons: &[DeadReason]) {
        self.publish_notes(0..25, 30).await;
        self.app.publish_named(killer, &nothing()).await.unwrap();
        self.publish_notes(25..50, 30).await;
        self.outlives(killer, reasons, 50).await;
    }

    /// Starts a worker whenever one has died, until the killer is a dead letter and the innocents
    /// have run.
    async fn outlives(&self, killer: &str, reasons: &[DeadReason], innocents: usize) {
        let mut lives = 0;
        let is_over = async {
            loop {
                lives += 1;
                let mut worker = self.worker().await;
                loop {
                    if self.dead_letters().await > 0 && self.ended() >= innocents {
                        worker.kill().await;
                        return;
                    }
                    if worker.process.try_wait().unwrap().is_some() {
                        break;
                    }
                    tokio::task::yield_now().await;
                }
            }
        };
        let is_over = tokio::time::timeout(PATIENCE, is_over).await;
        assert!(is_over.is_ok(), "after {lives} lives: {:?}", self.runs());
        println!("{lives} workers were started");
        let (task, death) = self.take_dead().await;
        assert_eq!(task, killer);
        assert!(reasons.contains(&death.reason), "{death:?}");
        assert_eq!(self.dead_letters().await, 0, "a neighbour was condemned");
        let mut worker = self.worker().await;
        self.until_all_ended(innocents).await;
        worker.kill().await;
    }

    /// Gives each of so many messages a number of crashes, and the notes to both tiers by turns.
    async fn suspect(&self, messages: usize, crashes: impl Fn(usize) -> i64) {
        let channel = self.channel().await;
        for number in 0..messages {
            let options = BasicGetOptions { no_ack: true };
            let got = channel.basic_get("house.normal".into(), options).await;
            let got = got.unwrap().unwrap().delivery;
            let mut headers = got.properties.headers().clone().unwrap();
            headers.insert("tierline-crashes".into(), crashes(number).into());
            let is_note = got.properties.kind().as_ref().unwrap().as_str() == "note";
            let queue = match is_note && number % 2 == 0 {
                true => "house.low",
                false => "house.normal",
            };
            let properties = got.properties.with_headers(headers);
            let options = BasicPublishOptions::default();
            channel
                .basic_publish("".into(), queue.into(), options, &got.data, properties)
                .await
                .unwrap()
                .await
                .unwrap();
        }
    }

    async fn publish_notes(&self, numbers: std::ops::Range<u64>, milliseconds: u64) {
        let requests = numbers.map(|number| {
            let payload = format!(r#"{{"number":{number},"milliseconds":{milliseconds}}}"#);
            PublishRequest::named("note", payload.into_bytes())
        });
        let outcomes = self.app.publish_many(stream::iter(requests));
        outcomes
            .for_each(async |outcome| drop(outcome.unwrap()))
            .await;
    }

    fn lines(&self, beginning: &str) -> Vec<u64> {
        let ledger = std::fs::read_to_string(&self.ledger).unwrap_or_default();
        let lines = ledger
            .lines()
            .filter_map(|line| line.strip_prefix(beginning));
        lines.map(|number| number.parse().unwrap()).collect()
    }

    /// How often each note was begun.
    fn runs(&self) -> BTreeMap<u64, usize> {
        let mut runs = BTreeMap::new();
        for number in self.lines("start ") {
            *runs.entry(number).or_default() += 1;
        }
        runs
    }

    /// How many runs of notes were begun.
    fn begun(&self) -> usize {
        self.lines("start ").len()
    }

    /// How many notes have run to their end.
    fn ended(&self) -> usize {
        let mut ended = self.lines("end ");
        ended.sort_unstable();
        ended.dedup();
        ended.len()
    }

    async fn until_ended(&self, count: usize) {
        self.until("notes ran", || self.ended() >= count).await;
    }

    async fn until_all_ended(&self, count: usize) {
        self.until("all notes ran", || self.ended() == count).await;
    }

    async fn until(&self, what: &str, is_so: impl Fn() -> bool) {
        let waiting = async {
            while !is_so() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let waited = tokio::time::timeout(PATIENCE, waiting).await;
        assert!(waited.is_ok(), "{what}: {} ended", self.ended());
    }

    async fn until_depth(&self, depth: usize) {
        let waiting =
            async { while self.vhost.depth("house.normal").await.unwrap() as usize != depth {} };
        let waited = tokio::time::timeout(PATIENCE, waiting).await;
        let found = self.vhost.depth("house.normal").await;
        assert!(waited.is_ok(), "{found:?} messages wait, not {depth}");
    }

    async fn dead_letters(&self) -> u64 {
        let normal = self.vhost.depth("house.normal.dlq").await.unwrap();
        u64::from(normal + self.vhost.depth("house.low.dlq").await.unwrap())
    }

    async fn channel(&self) -> lapin::Channel {
        let url = self.vhost.amqp_url();
        let connection = lapin::Connection::connect(url, ConnectionProperties::default());
        let channel = connection.await.unwrap().create_channel().await.unwrap();
        let options = ConfirmSelectOptions::default();
        channel.confirm_select(options).await.unwrap();
        channel
    }

    async fn take_dead(&self) -> (String, Death) {
        let channel = self.channel().await;
        let got = channel
            .basic_get("house.normal.dlq".into(), BasicGetOptions::default())
            .await
            .unwrap()
            .unwrap();
        got.ack(BasicAckOptions::default()).await.unwrap();
        let task = got.properties.kind().as_ref().unwrap().to_string();
        (task, Death::from_wire(&got.properties).unwrap())
    }
}

impl Drop for House {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.ledger);
    }
}

fn nothing() -> serde_json::Value {
    serde_json::Value::Object(Default::default())
}

/// A worker's process.
struct Worker {
    process: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Worker {
    async fn until(&mut self, wanted: &str) {
        let waiting = async {
            while let Ok(Some(line)) = self.lines.next_line().await {
                if line == wanted {
                    return;
                }
            }
            panic!("the worker ended before {wanted:?}");
        };
        tokio::time::timeout(PATIENCE, waiting).await.unwrap();
    }

    async fn rest(&mut self) -> Vec<String> {
        let mut rest = Vec::new();
        while let Ok(Some(line)) = self.lines.next_line().await {
            rest.push(line);
        }
        rest
    }

    /// kill -9
    async fn kill(&mut self) {
        self.process.kill().await.unwrap();
    }

    /// Asks it to end, and waits for that.
    async fn terminate(&mut self) {
        self.ask_to_end().await;
        self.until_terminated().await;
    }

    async fn ask_to_end(&self) {
        let pid = self.process.id().unwrap().to_string();
        let asked = Command::new("kill").args(["-TERM", &pid]).status();
        assert!(asked.await.unwrap().success());
    }

    async fn until_terminated(&mut self) {
        let ended = tokio::time::timeout(PATIENCE, self.process.wait()).await;
        assert!(ended.unwrap().unwrap().success());
    }
}
