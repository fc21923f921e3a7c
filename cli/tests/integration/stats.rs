//! `tierline stats` and `tierline top` as an operator would use them.

use std::process::Stdio;

use serde_json::{Value, json};
use tierline::stats::Stats;
use tierline::{Registry, Tierline, Topology};
use tierline_testbed::{Database, Vhost, database, vhost};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;

use crate::command::File;

const MAP: &str = r#"
app = "shop"
[tiers.high]
queue = "quorum"
slo = "5s"
[tiers.mail]
queue = "postgres"
[groups.all]
tiers = ["high", "mail"]
concurrency = 2
[tasks]
"report.export" = "high"
"mail.send" = "mail"
"#;

struct Shop {
    vhost: Vhost,
    database: Database,
    file: File,
    app: Tierline,
}

impl Shop {
    /// With a message and two rows.
    async fn open(name: &str) -> Self {
        let (vhost, database) = tokio::join!(vhost(), database());
        let app = Tierline::builder(Topology::parse(MAP).unwrap())
            .amqp(vhost.amqp_url())
            .postgres(database.url())
            .registry(Registry::new())
            .connect()
            .await
            .unwrap();
        app.publish_named("report.export", &json!({}))
            .await
            .unwrap();
        for _ in 0..2 {
            app.publish_named("mail.send", &json!({})).await.unwrap();
        }
        Self {
            vhost,
            database,
            file: File::new(name, MAP),
            app,
        }
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tierline"));
        command
            .args([words[0], &self.file.0])
            .args(&words[1..])
            .env("AMQP_URL", self.vhost.amqp_url())
            .env("DATABASE_URL", self.database.url())
            .env_remove("MANAGEMENT_URL")
            .env("USER", "ada")
            .stdin(Stdio::null());
        command
    }
}

async fn run(mut command: Command) -> (i32, String) {
    let ended = command.output().await.unwrap();
    let text = String::from_utf8(ended.stdout).unwrap();
    (
        ended.status.code().unwrap(),
        text + &String::from_utf8_lossy(&ended.stderr),
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_sees_each_tier_and_what_is_out_of_the_ordinary() {
    let shop = Shop::open("stats-text").await;
    let control = shop.app.control().unwrap().by("eve");
    control
        .pause_tier("mail")
        .because("the move")
        .await
        .unwrap();
    let (code, text) = run(shop.command(&["stats"])).await;
    assert_eq!(code, 0, "{text}");
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("TIER  WAITING  OLDEST"), "{text}");
    assert!(lines[1].starts_with("high  1        "), "{text}");
    assert!(lines[2].starts_with("mail  2        "), "{text}");
    assert_eq!(lines[3], "high: no consumers");
    assert_eq!(lines[4], "mail: paused by eve");
    assert_eq!(lines[5], "all: 0 live processes, 0 of 0 slots");
    shop.app.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn programs_read_json_once_or_again_and_again() {
    let shop = Shop::open("stats-json").await;
    let (code, text) = run(shop.command(&["stats", "--json"])).await;
    assert_eq!(code, 0, "{text}");
    let stats: Stats = serde_json::from_str(&text).unwrap();
    assert_eq!(stats.tiers[1].waiting.unwrap().count, 2);
    let mut command = shop.command(&["stats", "--watch=200ms", "--json"]);
    let mut watching = command
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(watching.stdout.take().unwrap()).lines();
    for _ in 0..3 {
        let line = lines.next_line().await.unwrap().unwrap();
        let stats: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(stats["app"], "shop");
    }
    // A reader that has seen enough ends it.
    drop(lines);
    assert_eq!(watching.wait().await.unwrap().code(), Some(0));
    shop.app.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_is_away_hides_its_part_and_is_named() {
    let shop = Shop::open("stats-away").await;
    let mut command = shop.command(&["stats"]);
    command.env("AMQP_URL", "amqp://ada:secret@127.0.0.1:1");
    let (code, text) = run(command).await;
    assert_eq!(code, 1, "{text}");
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[1].starts_with("high  -        "), "{text}");
    assert!(lines[2].starts_with("mail  2        "), "{text}");
    assert!(
        text.contains("not known: cannot reach the broker"),
        "{text}"
    );
    assert!(!text.contains("secret"), "{text}");
    shop.app.close().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn top_needs_a_terminal_and_says_what_programs_use() {
    let shop = Shop::open("top").await;
    let (code, text) = run(shop.command(&["top"])).await;
    assert_eq!(code, 2, "{text}");
    assert!(text.contains("`tierline stats --json`"), "{text}");
    shop.app.close().await;
}
