//! Relays that are killed.

use std::collections::BTreeMap;
use std::process::Stdio;

use futures_util::{StreamExt, stream};
use lapin::options::{BasicAckOptions, BasicGetOptions};
use lapin::{Channel, ConnectionProperties};
use sqlx::{Executor, PgPool};
use tierline::message::Message;
use tierline::task::PublishRequest;
use tierline::{Tierline, Topology};
use tierline_testbed::{Database, Vhost, database, vhost};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;
use tokio::time::{Instant, sleep, timeout};

use crate::deployment::{PATIENCE, Worker};

const MAP: &str = r#"
    app = "deployment"
    [tiers.normal]
    queue = "quorum"
    [groups.all]
    tiers = ["normal"]
    concurrency = 1
    [tasks]
    note = "normal"
"#;

/// Rows of a tier on the broker, and relays that come and go.
struct Outbox {
    vhost: Vhost,
    database: Database,
    pool: PgPool,
    /// Has the tier in Postgres, so that what it publishes are rows.
    rows: Tierline,
}

impl Outbox {
    async fn build() -> Self {
        let (vhost, database) = (vhost().await, database().await);
        let map = MAP.replace("\"quorum\"", "\"postgres\"");
        let rows = Tierline::builder(Topology::parse(map).unwrap())
            .postgres(database.url())
            .connect()
            .await
            .unwrap();
        Self {
            pool: PgPool::connect(database.url()).await.unwrap(),
            vhost,
            database,
            rows,
        }
    }

    async fn relay(&self) -> Worker {
        let mut process = Command::new(env!("CARGO_BIN_EXE_worker"))
            .env("AMQP_URL", self.vhost.amqp_url())
            .env("DATABASE_URL", self.database.url())
            .env("RELAY", "")
            .env("MAP", MAP)
            .env("LEDGER", "/dev/null")
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let mut relay = Worker { process, lines };
        relay.until("relays").await;
        relay
    }

    /// Publishes rows, and returns their ids.
    async fn publish(&self, number: usize) -> Vec<String> {
        let payload = || br#"{"number":1,"milliseconds":0}"#.to_vec();
        let requests = (0..number).map(|_| PublishRequest::named("note", payload()));
        let receipts = self.rows.publish_many(stream::iter(requests));
        let ids = receipts.map(|receipt| receipt.unwrap().id.to_string());
        let mut ids: Vec<String> = ids.collect().await;
        ids.sort();
        ids
    }

    async fn channel(&self) -> Channel {
        let properties = ConnectionProperties::default();
        let connection = lapin::Connection::connect(self.vhost.amqp_url(), properties);
        connection.await.unwrap().create_channel().await.unwrap()
    }

    /// How many rows wait or are held.
    async fn left(&self) -> i64 {
        let count = "SELECT (SELECT count(*) FROM tierline.ready) + (SELECT count(*) FROM tierline.running)";
        sqlx::query_scalar(count)
            .fetch_one(&self.pool)
            .await
            .unwrap()
    }
}

/// Takes what is in the queue, and counts each id.
async fn take(channel: &Channel, ids: &mut BTreeMap<String, usize>) {
    while take_some(channel, ids).await {}
}

/// Takes up to a hundred messages. Whether there were as many.
async fn take_some(channel: &Channel, ids: &mut BTreeMap<String, usize>) -> bool {
    let options = BasicGetOptions { no_ack: false };
    for _ in 0..100 {
        let got = channel.basic_get("deployment.normal".into(), options);
        let Some(got) = got.await.unwrap() else {
            return false;
        };
        got.ack(BasicAckOptions::default()).await.unwrap();
        let now = std::time::SystemTime::now();
        let message = Message::from_wire(&got.properties, got.data.clone(), "normal", now);
        let message = message.unwrap();
        assert_eq!((message.crashes, message.attempt), (0, 1));
        *ids.entry(message.id.to_string()).or_default() += 1;
    }
    true
}

#[tokio::test]
async fn a_relay_that_is_killed_between_confirm_and_delete_doubles_messages_under_their_ids() {
    const ROWS: usize = 200;
    let outbox = Outbox::build().await;
    // No row can be deleted from `running` while the test holds the lock.
    let mut holder = outbox.pool.acquire().await.unwrap();
    holder.execute("SELECT pg_advisory_lock(42)").await.unwrap();
    let trigger = "CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS \
             'BEGIN PERFORM pg_advisory_xact_lock_shared(42); RETURN OLD; END'; \
         CREATE TRIGGER hold BEFORE DELETE ON tierline.running FOR EACH ROW EXECUTE FUNCTION hold()";
    outbox.pool.execute(sqlx::raw_sql(trigger)).await.unwrap();
    let sent = outbox.publish(ROWS).await;
    let mut relay = outbox.relay().await;
    let channel = outbox.channel().await;
    let mut ids = BTreeMap::new();
    let confirmed = async {
        while ids.len() < ROWS {
            take(&channel, &mut ids).await;
        }
    };
    timeout(PATIENCE, confirmed).await.unwrap();
    assert_eq!(outbox.left().await, ROWS as i64);
    relay.kill().await;
    // What the server still tries for the dead process must not succeed.
    let end = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
               WHERE datname = current_database() AND wait_event_type = 'Lock'";
    outbox.pool.execute(end).await.unwrap();
    let release = "DROP TRIGGER hold ON tierline.running; SELECT pg_advisory_unlock(42)";
    holder.execute(sqlx::raw_sql(release)).await.unwrap();

    let mut relay = outbox.relay().await;
    let settled = async { while outbox.left().await > 0 {} };
    timeout(PATIENCE, settled).await.unwrap();
    take(&channel, &mut ids).await;
    assert!(ids.values().all(|times| *times == 2), "{ids:?}");
    assert_eq!(ids.into_keys().collect::<Vec<_>>(), sent);
    relay.terminate().await;
}

#[tokio::test]
async fn relays_that_are_killed_again_and_again_lose_nothing_and_suspect_nobody() {
    const ROWS: usize = 8_000;
    let outbox = Outbox::build().await;
    let sent = outbox.publish(ROWS).await;
    let channel = outbox.channel().await;
    let mut ids = BTreeMap::new();
    for part in 1..=3 {
        let mut relay = outbox.relay().await;
        let begun = async {
            while ids.len() < part * 500 {
                take_some(&channel, &mut ids).await;
            }
        };
        timeout(PATIENCE, begun).await.unwrap();
        relay.kill().await;
    }
    let mut relay = outbox.relay().await;
    let deadline = Instant::now() + PATIENCE;
    while outbox.left().await > 0 {
        let count = ids.len();
        assert!(Instant::now() < deadline, "{count} of {ROWS}");
        take_some(&channel, &mut ids).await;
        sleep(std::time::Duration::from_millis(10)).await;
    }
    take(&channel, &mut ids).await;
    relay.terminate().await;
    let twice = ids.values().filter(|times| **times > 1).count();
    println!("{twice} messages came twice");
    assert!(twice <= 3 * 2_000, "{twice} messages came twice");
    assert_eq!(ids.into_keys().collect::<Vec<_>>(), sent);
}
