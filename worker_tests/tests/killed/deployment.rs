//! Workers in processes of their own, what their handlers note, and the broker between them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures_util::{StreamExt, stream};
use lapin::ConnectionProperties;
use lapin::options::{BasicAckOptions, BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions};
use tierline::message::{DeadReason, Death};
use tierline::task::PublishRequest;
use tierline::{Tierline, Topology};
use tierline_testbed::{Proxy, Vhost, vhost};
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

/// How long a test waits for something that must happen.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

fn map(queue: &str, prefetch: u16) -> String {
    format!(
        r#"
        app = "deployment"
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
        note_low = "low"
        abort_low = "low"
        "#
    )
}

/// A virtual host, a ledger of what ran, and workers that come and go.
pub(crate) struct Deployment {
    pub(crate) vhost: Vhost,
    pub(crate) map: String,
    pub(crate) app: Tierline,
    pub(crate) ledger: PathBuf,
}

impl Deployment {
    pub(crate) async fn build(queue: &str, prefetch: u16) -> Self {
        let vhost = vhost().await;
        let map = map(queue, prefetch);
        let app = Tierline::builder(Topology::parse(&map).unwrap())
            .amqp(vhost.amqp_url())
            .connect()
            .await
            .unwrap();
        static DEPLOYMENTS: AtomicU32 = AtomicU32::new(0);
        let deployment = DEPLOYMENTS.fetch_add(1, Ordering::Relaxed);
        let name = format!("ledger-{}-{deployment}", std::process::id());
        let ledger = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        Self {
            vhost,
            map,
            app,
            ledger,
        }
    }

    /// A worker that has begun to consume, and has little time to end.
    pub(crate) async fn worker(&self) -> Worker {
        self.worker_with(Duration::from_millis(1_500)).await
    }

    pub(crate) async fn worker_with(&self, grace: Duration) -> Worker {
        self.worker_at(self.vhost.amqp_url(), grace).await
    }

    /// A worker that reaches the broker by another URL.
    pub(crate) async fn worker_at(&self, url: &str, grace: Duration) -> Worker {
        self.worker_of(url, grace, &["ABORT_WHEN_HUNG"]).await
    }

    /// A worker with these variables set.
    pub(crate) async fn worker_of(&self, url: &str, grace: Duration, flags: &[&str]) -> Worker {
        let mut process = Command::new(env!("CARGO_BIN_EXE_worker"))
            .env("AMQP_URL", url)
            .env_remove("DATABASE_URL")
            .env("MAP", &self.map)
            .env("LEDGER", &self.ledger)
            .env("GRACE", grace.as_millis().to_string())
            .envs(flags.iter().map(|flag| (flag, "1")))
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let mut worker = Worker { process, lines };
        worker.until("consuming normal").await;
        worker
    }

    /// A bad network before the broker, and the URL that leads through it.
    pub(crate) async fn behind_a_proxy(&self) -> (String, Proxy) {
        let url = self.vhost.amqp_url();
        let (before, after) = url.rsplit_once('/').unwrap();
        let (host, port) = before.rsplit_once(':').unwrap();
        let proxy = Proxy::start(port.parse().unwrap()).await.unwrap();
        (format!("{host}:{}/{after}", proxy.port()), proxy)
    }

    /// A killer among fifty innocents.
    pub(crate) async fn kills_only_itself(&self, killer: &str, reasons: &[DeadReason]) {
        self.publish_notes(0..25, 30).await;
        self.app.publish_named(killer, &nothing()).await.unwrap();
        self.publish_notes(25..50, 30).await;
        self.outlives(killer, reasons, 50).await;
    }

    /// Starts a worker whenever one has died, until the killer is a dead letter and the innocents
    /// have run.
    pub(crate) async fn outlives(&self, killer: &str, reasons: &[DeadReason], innocents: usize) {
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
    pub(crate) async fn suspect(&self, messages: usize, crashes: impl Fn(usize) -> i64) {
        let channel = self.channel().await;
        for number in 0..messages {
            let options = BasicGetOptions { no_ack: true };
            let got = channel.basic_get("deployment.normal".into(), options).await;
            let got = got.unwrap().unwrap().delivery;
            let mut headers = got.properties.headers().clone().unwrap_or_default();
            headers.insert("tierline-crashes".into(), crashes(number).into());
            let is_note = got.properties.kind().as_ref().unwrap().as_str() == "note";
            let queue = match is_note && number % 2 == 0 {
                true => "deployment.low",
                false => "deployment.normal",
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

    pub(crate) async fn publish_notes(&self, numbers: std::ops::Range<u64>, milliseconds: u64) {
        self.publish("note", numbers, milliseconds).await;
    }

    /// Publishes a task of this name for each of these numbers.
    pub(crate) async fn publish(
        &self,
        task: &str,
        numbers: std::ops::Range<u64>,
        milliseconds: u64,
    ) {
        let requests = numbers.map(|number| {
            let payload = format!(r#"{{"number":{number},"milliseconds":{milliseconds}}}"#);
            PublishRequest::named(task, payload.into_bytes())
        });
        let outcomes = self.app.publish_many(stream::iter(requests));
        outcomes
            .for_each(async |outcome| drop(outcome.unwrap()))
            .await;
    }

    pub(crate) fn lines(&self, beginning: &str) -> Vec<u64> {
        let ledger = std::fs::read_to_string(&self.ledger).unwrap_or_default();
        let lines = ledger
            .lines()
            .filter_map(|line| line.strip_prefix(beginning));
        lines.map(|number| number.parse().unwrap()).collect()
    }

    /// How often each note was begun.
    pub(crate) fn runs(&self) -> BTreeMap<u64, usize> {
        let mut runs = BTreeMap::new();
        for number in self.lines("start ") {
            *runs.entry(number).or_default() += 1;
        }
        runs
    }

    /// How often each killer has killed a worker, by its number.
    pub(crate) fn deaths(&self) -> BTreeMap<u64, usize> {
        let mut deaths = BTreeMap::new();
        for number in self.lines("abort ") {
            *deaths.entry(number).or_default() += 1;
        }
        deaths
    }

    /// How many runs of notes were begun.
    pub(crate) fn begun(&self) -> usize {
        self.lines("start ").len()
    }

    /// How many notes have run to their end.
    pub(crate) fn ended(&self) -> usize {
        let mut ended = self.lines("end ");
        ended.sort_unstable();
        ended.dedup();
        ended.len()
    }

    pub(crate) async fn until_ended(&self, count: usize) {
        self.until("notes ran", || self.ended() >= count).await;
    }

    pub(crate) async fn until_all_ended(&self, count: usize) {
        self.until("all notes ran", || self.ended() == count).await;
    }

    pub(crate) async fn until(&self, what: &str, is_so: impl Fn() -> bool) {
        let waiting = async {
            while !is_so() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let waited = tokio::time::timeout(PATIENCE, waiting).await;
        assert!(waited.is_ok(), "{what}: {} ended", self.ended());
    }

    pub(crate) async fn until_depth(&self, depth: usize) {
        let waiting = async {
            while self.vhost.depth("deployment.normal").await.unwrap() as usize != depth {}
        };
        let waited = tokio::time::timeout(PATIENCE, waiting).await;
        let found = self.vhost.depth("deployment.normal").await;
        assert!(waited.is_ok(), "{found:?} messages wait, not {depth}");
    }

    /// Whether nothing waits but dead letters. Meant for when no worker is left.
    pub(crate) async fn is_drained(&self) -> bool {
        let queues = self.vhost.queues().await.unwrap();
        queues
            .iter()
            .all(|queue| queue.depth == 0 || queue.name.ends_with(".dlq"))
    }

    pub(crate) async fn dead_letters(&self) -> u64 {
        let normal = self.vhost.depth("deployment.normal.dlq").await.unwrap();
        u64::from(normal + self.vhost.depth("deployment.low.dlq").await.unwrap())
    }

    pub(crate) async fn channel(&self) -> lapin::Channel {
        let url = self.vhost.amqp_url();
        let connection = lapin::Connection::connect(url, ConnectionProperties::default());
        let channel = connection.await.unwrap().create_channel().await.unwrap();
        let options = ConfirmSelectOptions::default();
        channel.confirm_select(options).await.unwrap();
        channel
    }

    /// Takes all dead letters: how often each task is there, by its name and id.
    pub(crate) async fn take_all_dead(&self) -> BTreeMap<(String, String), usize> {
        let channel = self.channel().await;
        let mut dead = BTreeMap::new();
        for queue in ["deployment.normal.dlq", "deployment.low.dlq"] {
            let options = BasicGetOptions { no_ack: true };
            while let Some(got) = channel.basic_get(queue.into(), options).await.unwrap() {
                let task = got.properties.kind().as_ref().unwrap().to_string();
                let id = got.properties.message_id().as_ref().unwrap().to_string();
                *dead.entry((task, id)).or_default() += 1;
            }
        }
        dead
    }

    pub(crate) async fn take_dead(&self) -> (String, Death) {
        let channel = self.channel().await;
        let got = channel
            .basic_get("deployment.normal.dlq".into(), BasicGetOptions::default())
            .await
            .unwrap()
            .unwrap();
        got.ack(BasicAckOptions::default()).await.unwrap();
        let task = got.properties.kind().as_ref().unwrap().to_string();
        (task, Death::from_wire(&got.properties).unwrap())
    }
}

impl Drop for Deployment {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.ledger);
    }
}

pub(crate) fn nothing() -> serde_json::Value {
    serde_json::Value::Object(Default::default())
}

/// A worker's process.
pub(crate) struct Worker {
    pub(crate) process: Child,
    pub(crate) lines: Lines<BufReader<ChildStdout>>,
}

impl Worker {
    pub(crate) async fn until(&mut self, wanted: &str) {
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

    pub(crate) async fn rest(&mut self) -> Vec<String> {
        let mut rest = Vec::new();
        while let Ok(Some(line)) = self.lines.next_line().await {
            rest.push(line);
        }
        rest
    }

    /// kill -9
    pub(crate) async fn kill(&mut self) {
        self.process.kill().await.unwrap();
    }

    /// Asks it to end, and waits for that.
    pub(crate) async fn terminate(&mut self) {
        self.ask_to_end().await;
        self.until_terminated().await;
    }

    /// Likewise, for a worker that may have died or may be killed meanwhile.
    pub(crate) async fn end(&mut self) {
        if self.process.try_wait().unwrap().is_none() {
            self.ask_to_end().await;
            let ended = tokio::time::timeout(PATIENCE, self.process.wait()).await;
            ended.unwrap().unwrap();
        }
    }

    pub(crate) async fn ask_to_end(&self) {
        let pid = self.process.id().unwrap().to_string();
        let asked = Command::new("kill").args(["-TERM", &pid]).status();
        assert!(asked.await.unwrap().success());
    }

    pub(crate) async fn until_terminated(&mut self) {
        let ended = tokio::time::timeout(PATIENCE, self.process.wait()).await;
        assert!(ended.unwrap().unwrap().success());
    }
}
