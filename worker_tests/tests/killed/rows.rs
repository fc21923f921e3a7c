//! Workers of tiers in Postgres that are killed, stopped, or killed by their tasks.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use futures_util::{StreamExt, stream};
use sqlx::PgPool;
use tierline::dead::{Filter, Page, Reason};
use tierline::task::PublishRequest;
use tierline::{Tierline, Topology};
use tierline_testbed::{Database, database};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

use crate::deployment::{PATIENCE, Worker};

const MAP: &str = r#"
    app = "deployment"
    [tiers.normal]
    queue = "postgres"
    lease = "2s"
    [groups.all]
    tiers = ["normal"]
    concurrency = 4
    prefetch = 4
    [tasks]
    note = "normal"
    abort = "normal"
"#;

/// A database, a ledger of what ran, and workers that come and go.
struct Rows {
    database: Database,
    app: Tierline,
    pool: PgPool,
    ledger: PathBuf,
}

impl Rows {
    async fn build() -> Self {
        let database = database().await;
        let app = Tierline::builder(Topology::parse(MAP).unwrap())
            .postgres(database.url())
            .connect()
            .await
            .unwrap();
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("rows-{}-{number}", std::process::id());
        Self {
            app,
            pool: PgPool::connect(database.url()).await.unwrap(),
            database,
            ledger: Path::new(env!("CARGO_TARGET_TMPDIR")).join(name),
        }
    }

    async fn worker(&self) -> Worker {
        let mut process = Command::new(env!("CARGO_BIN_EXE_worker"))
            .env("DATABASE_URL", self.database.url())
            .env_remove("AMQP_URL")
            .env("MAP", MAP)
            .env("LEDGER", &self.ledger)
            .env("GRACE", "1500")
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let mut worker = Worker { process, lines };
        worker.until("consuming normal").await;
        worker
    }

    async fn publish(&self, task: &str, numbers: std::ops::Range<u64>, milliseconds: u64) {
        let requests = numbers.map(|number| {
            let payload = format!(r#"{{"number":{number},"milliseconds":{milliseconds}}}"#);
            PublishRequest::named(task, payload.into_bytes())
        });
        let outcomes = self.app.publish_many(stream::iter(requests));
        outcomes
            .for_each(async |outcome| drop(outcome.unwrap()))
            .await;
    }

    fn lines(&self, beginning: &str) -> Vec<u64> {
        let ledger = std::fs::read_to_string(&self.ledger).unwrap_or_default();
        let lines = ledger.lines().filter_map(|it| it.strip_prefix(beginning));
        lines.map(|number| number.parse().unwrap()).collect()
    }

    /// How many notes have run to their end.
    fn ended(&self) -> usize {
        let mut ended = self.lines("end ");
        ended.sort_unstable();
        ended.dedup();
        ended.len()
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

    /// How many rows wait or run, and how many of them have a crash count.
    async fn left(&self) -> (i64, i64) {
        let count = "SELECT count(*) FROM (SELECT properties FROM tierline.ready UNION ALL \
             SELECT properties FROM tierline.running UNION ALL SELECT properties FROM tierline.scheduled) AS row \
             WHERE $1 = '' OR position(convert_to($1, 'UTF8') IN properties) > 0";
        let mut counts = [0; 2];
        for (index, header) in ["", "tierline-crashes"].iter().enumerate() {
            counts[index] = sqlx::query_scalar(count)
                .bind(header)
                .fetch_one(&self.pool)
                .await
                .unwrap();
        }
        (counts[0], counts[1])
    }
}

impl Drop for Rows {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.ledger);
    }
}

#[tokio::test]
async fn a_killed_worker_keeps_a_unique_key_until_its_task_is_taken_over_and_done() {
    let rows = Rows::build().await;
    let publish = async || {
        let payload = serde_json::json!({ "number": 7, "milliseconds": 2_000 });
        let publish = rows.app.publish_named("note", &payload).unique("note:7");
        publish.deadline("30s").await.unwrap()
    };
    let first = publish().await;
    let mut worker = rows.worker().await;
    rows.until("it began", || rows.lines("start ").len() == 1)
        .await;
    worker.kill().await;
    let second = publish().await;
    assert!(second.is_duplicate && second.id == first.id, "{second:?}");
    let mut other = rows.worker().await;
    rows.until("it began again", || rows.lines("start ").len() == 2)
        .await;
    assert!(publish().await.is_duplicate);
    rows.until("it ended", || rows.ended() == 1).await;
    let free = async { while publish().await.is_duplicate {} };
    let free = tokio::time::timeout(PATIENCE, free).await;
    free.expect("the key was never free");
    rows.until("the new one ended", || rows.lines("end ").len() == 2)
        .await;
    other.end().await;
}

#[tokio::test]
async fn a_worker_that_is_killed_loses_nothing_and_what_had_not_begun_is_no_suspect() {
    let rows = Rows::build().await;
    // Four run, twelve are prefetched.
    rows.publish("note", 0..16, 60_000).await;
    let mut worker = rows.worker().await;
    rows.until("four began", || rows.lines("start ").len() == 4)
        .await;
    let marked = async {
        while sqlx::query_scalar::<_, i64>("SELECT count(*) FROM tierline.running WHERE is_begun")
            .fetch_one(&rows.pool)
            .await
            .unwrap()
            < 4
        {}
    };
    tokio::time::timeout(PATIENCE, marked).await.unwrap();
    worker.kill().await;
    let mut worker = rows.worker().await;
    let recovered = async { while rows.left().await != (16, 4) {} };
    let recovered = tokio::time::timeout(PATIENCE, recovered).await;
    assert!(recovered.is_ok(), "{:?}", rows.left().await);
    worker.kill().await;
}

#[tokio::test]
async fn workers_that_are_killed_again_and_again_lose_nothing() {
    let rows = Rows::build().await;
    rows.publish("note", 0..400, 5).await;
    for count in [50, 100, 150] {
        let mut worker = rows.worker().await;
        rows.until("notes ran", || rows.ended() >= count).await;
        worker.kill().await;
    }
    let mut worker = rows.worker().await;
    rows.until("all notes ran", || rows.ended() == 400).await;
    // Some had ended when their worker was killed, and nobody knows it.
    let settled = async { while rows.left().await.0 > 0 {} };
    let settled = tokio::time::timeout(PATIENCE, settled).await;
    assert!(settled.is_ok(), "{:?}", rows.left().await);
    worker.terminate().await;
    let again = rows.lines("start ").len() - 400;
    println!("{again} tasks ran twice");
    assert!(again <= 3 * 16, "{again} tasks ran twice");
}

#[tokio::test]
async fn a_killer_is_a_dead_letter_and_no_neighbour_is() {
    let rows = Rows::build().await;
    rows.publish("note", 0..10, 20).await;
    rows.publish("abort", 0..1, 0).await;
    rows.publish("note", 10..20, 20).await;
    let letters = rows.app.dead_letters().unwrap();
    let mut deaths = 0;
    let working = async {
        loop {
            let mut worker = rows.worker().await;
            loop {
                let dead = letters.list(&Filter::default(), Page::first(10)).await;
                if !dead.unwrap().letters.is_empty() && rows.ended() == 20 {
                    worker.kill().await;
                    return;
                }
                if worker.process.try_wait().unwrap().is_some() {
                    deaths += 1;
                    break;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    };
    let is_over = tokio::time::timeout(PATIENCE, working).await;
    assert!(is_over.is_ok(), "{} ended", rows.ended());
    let dead = letters.list(&Filter::default(), Page::first(10)).await;
    let dead = dead.unwrap().letters;
    assert_eq!(dead.len(), 1, "{dead:?}");
    assert_eq!(
        (dead[0].task.as_deref(), dead[0].reason),
        (Some("abort"), Reason::CrashLoop)
    );
    println!("{deaths} workers died");
    assert!(deaths <= 6, "{deaths} workers died");
}

#[tokio::test]
async fn a_worker_that_was_stopped_changes_nothing_when_it_goes_on() {
    let rows = Rows::build().await;
    rows.publish("note", 0..1, 300_000).await;
    let mut stopped = rows.worker().await;
    rows.until("it began", || rows.lines("start ").len() == 1)
        .await;
    let pid = stopped.process.id().unwrap().to_string();
    let signal = async |name: &str| {
        let sent = Command::new("kill").args([name, &pid]).status();
        assert!(sent.await.unwrap().success());
    };
    signal("-STOP").await;
    let mut other = rows.worker().await;
    rows.until("another began", || rows.lines("start ").len() == 2)
        .await;
    let token = async || {
        let token = sqlx::query_scalar::<_, i64>("SELECT token FROM tierline.running");
        token.fetch_all(&rows.pool).await.unwrap()
    };
    let of_other = token().await;
    signal("-CONT").await;
    stopped.until("lease lost note").await;
    stopped.terminate().await;
    // It has given back what it held, and changed nothing by that.
    assert_eq!((token().await, rows.left().await.0), (of_other, 1));
    other.kill().await;
}

#[tokio::test]
async fn a_graceful_restart_makes_no_suspects() {
    let rows = Rows::build().await;
    rows.publish("note", 0..300, 10).await;
    for count in [60, 120, 180, 240] {
        let mut worker = rows.worker().await;
        rows.until("notes ran", || rows.ended() >= count).await;
        worker.terminate().await;
        let (_, suspects) = rows.left().await;
        assert_eq!(suspects, 0);
    }
    let mut worker = rows.worker().await;
    rows.until("all notes ran", || rows.ended() == 300).await;
    worker.terminate().await;
    assert_eq!(
        (rows.lines("start ").len(), rows.left().await),
        (300, (0, 0))
    );
}
