//! Every command for a map whose tiers are all in Postgres, with no broker to be found.

#![cfg(test)]

use std::process::Stdio;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tierline::dead::Filter;
use tierline::{Registry, Task, TaskError, Tierline, Topology};
use tierline_testbed::{Database, database};
use tokio::process::Command;
use tokio::time::{sleep, timeout};

const MAP: &str = r#"
app = "shop"
[tiers.normal]
queue = "postgres"
[groups.all]
tiers = ["normal"]
concurrency = 2
[tasks]
"order.ship" = "normal"
[schedules.nightly]
task = "order.ship"
cron = "30 2 * * *"
payload = { order = 1 }
expires = "4h"
"#;

/// Two tiers more, on the broker.
const MIXED: &str = r#"
[tiers.urgent]
queue = "classic"
[tiers.bulk]
queue = "quorum"
[groups.others]
tiers = ["urgent", "bulk"]
concurrency = 1
"#;

/// How long a test waits for something that must happen.
const PATIENCE: Duration = Duration::from_secs(180);

#[derive(Serialize, Deserialize)]
struct Ship {
    order: u32,
}

impl Task for Ship {
    const NAME: &'static str = "order.ship";
}

/// A database, and the file of an app that needs nothing else.
struct Shop {
    database: Database,
    file: String,
}

impl Shop {
    /// As after the first start of a scheduler, with this many dead letters.
    async fn with(name: &str, dead: u32) -> Self {
        let file = format!("tierline-alone-{name}-{}.toml", std::process::id());
        let file = std::env::temp_dir().join(file).to_str().unwrap().to_owned();
        std::fs::write(&file, MAP).unwrap();
        let database = database().await;
        let shop = Self { database, file };
        let (code, _, err) = shop.tierline(&["migrate"]).await;
        assert_eq!(code, 0, "{err}");
        shop.fill(dead).await;
        shop
    }

    async fn fill(&self, dead: u32) {
        let mut registry = Registry::new();
        registry
            .register::<Ship, _>(|_: Ship| async {
                Err::<(), _>(TaskError::permanent("there is no address"))
            })
            .unwrap();
        let app = Tierline::builder(Topology::parse(MAP).unwrap())
            .postgres(self.database.url())
            .registry(registry)
            .connect()
            .await
            .unwrap();
        for order in 0..dead {
            app.publish(Ship { order }).await.unwrap();
        }
        let (letters, schedules) = (app.dead_letters().unwrap(), app.schedules().unwrap());
        let filled = async || {
            while letters.count(&Filter::default()).await.unwrap() < u64::from(dead)
                || schedules.list().await.unwrap().is_empty()
            {
                sleep(Duration::from_millis(10)).await;
            }
        };
        let worker = app.work(["all"]).until(filled());
        let scheduler = app.scheduler().unwrap().until(filled());
        let both = async { tokio::try_join!(worker, scheduler) };
        timeout(PATIENCE, both).await.unwrap().unwrap();
        app.close().await;
    }

    fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tierline"));
        command
            .env_remove("AMQP_URL")
            .env_remove("MANAGEMENT_URL")
            .env("DATABASE_URL", self.database.url())
            .env("USER", "ada")
            .stdin(Stdio::null())
            .kill_on_drop(true);
        command
    }

    async fn tierline(&self, words: &[&str]) -> (i32, String, String) {
        let mut command = self.command();
        let ended = timeout(PATIENCE, command.args(words).output()).await;
        let ended = ended.unwrap().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        let code = ended.status.code().unwrap();
        (code, text(ended.stdout), text(ended.stderr))
    }

    /// A command for the file that succeeds, with its JSON.
    async fn json(&self, words: &[&str], more: &[&str]) -> Value {
        let words = [words, &[&self.file], more, &["--json"]].concat();
        let (code, out, err) = self.tierline(&words).await;
        assert_eq!((code, err.as_str()), (0, ""), "{words:?}: {out}");
        serde_json::from_str(&out).unwrap()
    }

    /// How many tasks wait in the tier.
    async fn waiting(&self) -> usize {
        let listed = self.json(&["tasks", "list"], &["--state", "ready"]).await;
        listed["tasks"].as_array().unwrap().len()
    }
}

impl Drop for Shop {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.file);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_redrives_and_runs_schedules_without_a_broker() {
    let shop = Shop::with("operator", 3).await;
    let listed = shop.json(&["dlq", "list"], &[]).await;
    let letters = listed["letters"].as_array().unwrap();
    assert_eq!(letters.len(), 3, "{listed:#}");
    let id = letters[0]["id"].to_string();

    let shown = shop.json(&["dlq", "show"], &[&id]).await;
    assert_eq!(shown["error"], "there is no address");
    let redriven = shop.json(&["dlq", "redrive"], &[&id]).await;
    assert_eq!(redriven["tier"], "normal");
    assert_eq!(shop.waiting().await, 1);
    let canary = ["--task", "order.ship", "--rate", "100", "--yes"];
    let rest = shop.json(&["dlq", "redrive"], &canary).await;
    assert_eq!((&rest["state"], &rest["done"]), (&"done".into(), &2.into()));
    assert_eq!(shop.waiting().await, 3);

    let run = shop.json(&["schedule", "run"], &["nightly"]).await;
    assert_eq!(run["tier"], "normal");
    assert_eq!(shop.waiting().await, 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_the_environment_names_is_not_connected_to() {
    let shop = Shop::with("unused-broker", 0).await;
    let mut command = shop.command();
    command.args(["schedule", "run", &shop.file, "nightly"]);
    // Nobody listens there.
    let ended = command.env("AMQP_URL", "amqp://127.0.0.1:1").output().await;
    assert!(ended.unwrap().status.success());
    assert_eq!(shop.waiting().await, 1);
}

#[cfg(feature = "admin")]
#[tokio::test(flavor = "multi_thread")]
async fn the_admin_api_redrives_without_a_broker() {
    use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};

    let shop = Shop::with("serve", 1).await;
    let listed = shop.json(&["dlq", "list"], &[]).await;
    let id = &listed["letters"][0]["id"];
    let mut command = shop.command();
    command
        .args(["serve", &shop.file, "--listen", "127.0.0.1:0"])
        .env("TIERLINE_ADMIN_TOKEN", "0123456789abcdef")
        .stderr(Stdio::piped());
    let mut serving = command.spawn().unwrap();
    let mut lines = BufReader::new(serving.stderr.take().unwrap()).lines();
    let line = timeout(PATIENCE, lines.next_line()).await.unwrap();
    let line = line.unwrap().unwrap();
    let address = line.strip_prefix("listening on http://").expect(&line);
    let (address, _) = address.split_once("/admin").unwrap();

    let talking = async {
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let request = format!(
            "POST /admin/dlq/{id}/redrive HTTP/1.1\r\nhost: {address}\r\n\
             authorization: Bearer 0123456789abcdef\r\ncontent-type: application/json\r\n\
             content-length: 2\r\nconnection: close\r\n\r\n{{}}"
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    };
    let answer = timeout(PATIENCE, talking).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert_eq!(shop.waiting().await, 1);
    serving.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_map_is_checked_and_exported_without_a_broker() {
    let shop = Shop::with("topology", 0).await;
    let checked = shop.json(&["topology", "check"], &[]).await;
    assert_eq!(checked["tiers"], 1);
    let exported = shop.json(&["topology", "export"], &[]).await;
    assert_eq!(exported["users"], serde_json::json!([]), "{exported:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_map_of_both_kinds_names_the_tiers_that_need_the_broker() {
    let shop = Shop::with("mixed", 0).await;
    std::fs::write(&shop.file, format!("{MAP}{MIXED}")).unwrap();
    for words in [
        &["dlq", "redrive", &shop.file, "1"][..],
        &["schedule", "run", &shop.file, "nightly"],
        #[cfg(feature = "admin")]
        &["serve", &shop.file, "--token", "0123456789abcdef"],
    ] {
        let (code, _, err) = shop.tierline(words).await;
        assert_eq!(code, 2, "{err}");
        assert!(
            err.contains("are or were on RabbitMQ (urgent, bulk)"),
            "{err}"
        );
        assert!(err.contains("--amqp"), "{err}");
    }
    // Reading the log needs no broker, whatever the map.
    shop.json(&["dlq", "tiers"], &[]).await;
}
