//! `tierline dlq` and `tierline migrate` as an operator would use them.

#![cfg(test)]

use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use lapin::options::BasicPublishOptions;
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Connection, ConnectionProperties};
use serde_json::Value;
use tierline::dead::Filter;
use tierline::{Tierline, Topology};
use tierline_testbed::{Database, Vhost, database, vhost};

const MAP: &str = r#"
app = "shop"
[tiers.normal]
queue = "quorum"
[groups.all]
tiers = ["normal"]
concurrency = 1
[tasks]
"order.ship" = "normal"
"#;

/// A broker and a database with dead letters, and the file of their app.
struct Shop {
    vhost: Vhost,
    database: Database,
    file: String,
}

impl Shop {
    /// With so many dead letters in its log, each with a number of its own in the error.
    async fn with(name: &str, count: usize) -> Self {
        let (vhost, database) = tokio::join!(vhost(), database());
        let file = format!("tierline-{name}-{}.toml", std::process::id());
        let file = std::env::temp_dir().join(file).to_str().unwrap().to_owned();
        std::fs::write(&file, MAP).unwrap();
        let shop = Self {
            vhost,
            database,
            file,
        };
        let (code, _, err) = shop.tierline(&["migrate"]);
        assert_eq!(code, 0, "{err}");
        shop.fill(count).await;
        shop
    }

    async fn fill(&self, count: usize) {
        let app = Tierline::builder(Topology::parse(MAP).unwrap())
            .amqp(self.vhost.amqp_url())
            .postgres(self.database.url())
            .connect()
            .await
            .unwrap();
        let properties = ConnectionProperties::default();
        let connection = Connection::connect(self.vhost.amqp_url(), properties);
        let channel = connection.await.unwrap().create_channel().await.unwrap();
        for number in 0..count {
            let mut headers = FieldTable::default();
            let error = format!("\u{1b}[31morder {number} not found <b>O'Brien</b>");
            for (name, value) in [
                ("tierline-reason", "retries exhausted"),
                ("tierline-error", error.as_str()),
            ] {
                headers.insert(name.into(), AMQPValue::LongString(value.into()));
            }
            let properties = BasicProperties::default()
                .with_type("order.ship".into())
                .with_message_id(format!("ship-{number}").into())
                .with_headers(headers);
            let options = BasicPublishOptions::default();
            let sending = channel.basic_publish(
                "shop.normal.dlx".into(),
                "".into(),
                options,
                b"1",
                properties,
            );
            sending.await.unwrap();
        }
        let collecting = tokio::spawn(app.collector().unwrap().into_future());
        let letters = app.dead_letters().unwrap();
        let begin = Instant::now();
        while letters.count(&Filter::default()).await.unwrap() < count as u64 {
            assert!(begin.elapsed() < Duration::from_secs(60));
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        collecting.abort();
    }

    /// Runs the command with the servers in its environment.
    fn tierline(&self, arguments: &[&str]) -> (i32, String, String) {
        let output = Command::new(env!("CARGO_BIN_EXE_tierline"))
            .args(arguments)
            .env("AMQP_URL", self.vhost.amqp_url())
            .env("DATABASE_URL", self.database.url())
            .env("USER", "ada")
            .stdin(Stdio::null())
            .output()
            .unwrap();
        finished(output)
    }

    /// `tierline dlq WHAT FILE …`.
    fn dlq(&self, what: &str, arguments: &[&str]) -> (i32, String, String) {
        let begin = ["dlq", what, self.file.as_str()];
        self.tierline(&[&begin, arguments].concat())
    }

    fn json(&self, what: &str, arguments: &[&str]) -> Value {
        let (code, out, err) = self.dlq(what, &[arguments, &["--json"]].concat());
        assert_eq!((code, err.as_str()), (0, ""), "{out}");
        serde_json::from_str(&out).unwrap()
    }
}

impl Drop for Shop {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.file);
    }
}

fn finished(output: Output) -> (i32, String, String) {
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let code = output.status.code().unwrap();
    (code, text(output.stdout), text(output.stderr))
}

#[tokio::test]
async fn what_failed_is_listed_grouped_and_shown() {
    let shop = Shop::with("shown", 3).await;
    let (code, out, _) = shop.dlq("list", &[]);
    assert_eq!((code, out.lines().count()), (0, 4), "{out}");
    // An error cannot steer the terminal.
    assert!(
        out.contains("order 2 not found") && !out.contains('\u{1b}'),
        "{out}"
    );
    let listed = shop.json("list", &["--limit", "2", "--tier", "normal"]);
    assert_eq!(listed["letters"].as_array().unwrap().len(), 2);
    let next = listed["next"].as_str().unwrap();
    let rest = shop.json("list", &["--after", next]);
    assert_eq!(rest["letters"].as_array().unwrap().len(), 1);
    let found = shop.json("list", &["--text", "ORDER 1 NOT", "--since", "1h"]);
    let found = &found["letters"][0];
    assert_eq!(found["message_id"], "ship-1");
    let id = found["id"].to_string();
    let shown = shop.json("show", &[&id]);
    assert_eq!(shown["reason"], "retries exhausted");
    assert_eq!(shown["assessment"]["advice"], "fix_first");
    let (code, out, _) = shop.dlq("show", &[&id]);
    assert!(
        code == 0 && out.contains("bad data") || out.contains("same data"),
        "{out}"
    );
    let groups = shop.json("groups", &["--since", "24h"]);
    assert_eq!(groups["groups"][0]["count"], 3);
    let tiers = shop.json("tiers", &[]);
    assert_eq!(tiers["tiers"][0]["dead"], 3);
}

#[tokio::test]
async fn one_is_redriven_and_many_after_a_yes() {
    let shop = Shop::with("redriven", 5).await;
    let listed = shop.json("list", &[]);
    let id = listed["letters"][0]["id"].to_string();
    let one = shop.json("redrive", &[&id, "--because", "it is back"]);
    assert_eq!(one["tier"], "normal");
    let shown = shop.json("show", &[&id]);
    assert_eq!(shown["actions"][0]["who"], "ada");
    assert_eq!(shown["actions"][0]["why"], "it is back");

    let (code, _, err) = shop.dlq("redrive", &["--tier", "normal"]);
    assert_eq!(code, 2);
    assert!(
        err.contains("4 dead letters") && err.contains("--yes"),
        "{err}"
    );
    let all = shop.json("redrive", &["--tier", "normal", "--yes", "--rate", "100"]);
    assert_eq!(
        (all["done"].as_u64(), &all["state"]),
        (Some(4), &"done".into())
    );
    assert_eq!(shop.vhost.depth("shop.normal").await.unwrap(), 5);
    let operation = all["id"].to_string();
    let (code, _, err) = shop.dlq("redrive", &["--resume", &operation]);
    assert_eq!(code, 1);
    assert!(err.contains("it is done"), "{err}");
}

#[tokio::test]
async fn what_is_not_needed_goes_after_a_yes() {
    let shop = Shop::with("removed", 4).await;
    let listed = shop.json("list", &[]);
    let id = listed["letters"][0]["id"].to_string();
    shop.json("discard", &[&id]);
    let (code, _, err) = shop.dlq("purge", &["--state", "discarded"]);
    assert_eq!(code, 2, "{err}");
    let purged = shop.json("purge", &["--state", "discarded", "--yes"]);
    assert_eq!(purged["done"], 1);
    let discarded = shop.json("discard", &["--task", "order.ship", "--yes"]);
    assert_eq!(discarded["done"], 3);
}

#[tokio::test]
async fn what_is_wrong_is_said_with_its_code_and_changes_nothing() {
    let shop = Shop::with("wrong", 1).await;
    for (arguments, code, said) in [
        (&["show", "99999"][..], 4, "no dead letter 99999"),
        (&["redrive", "99999"], 4, "no dead letter 99999"),
        (&["discard", "99999"], 4, "no dead letter 99999"),
        (&["show", "first"], 2, "invalid value"),
        (&["list", "--reason", "boredom"], 2, "retries exhausted"),
        (&["list", "--since", "yesterday"], 2, "24h"),
        (&["list", "--text", "x"], 2, "since"),
        (&["list", "--after", "'; DROP"], 2, "cursor"),
        (&["list", "--tier", "nromal"], 4, "did you mean \"normal\"?"),
        (
            &["groups", "--tier", "nope"],
            4,
            "the tiers are normal, unrouted",
        ),
        (
            &["redrive", "--tier", "nope"],
            4,
            "there is no tier \"nope\"",
        ),
        (
            &["discard", "--tier", "nope"],
            4,
            "there is no tier \"nope\"",
        ),
        (
            &["purge", "--tier", "unruted"],
            4,
            "did you mean \"unrouted\"?",
        ),
        (
            &["redrive", "1", "--canary", "1", "--canary-wait", "soon"],
            2,
            "\"soon\"",
        ),
        (&["list", "--limit", "0"], 2, "1..=500"),
        (&["redrive", "1", "--tier", "normal"], 2, "not both"),
        (&["redrive", "--stop", "77"], 4, "no operation 77"),
        (&["redrive", "--resume", "77"], 4, "no operation 77"),
    ] {
        let (found, out, err) = shop.dlq(arguments[0], &arguments[1..]);
        assert_eq!(found, code, "{arguments:?}: {out}{err}");
        assert!(err.contains(said), "{arguments:?}: {err}");
    }
    // A tier that was taken out of the map has dead letters as before.
    let moved = shop.file.replace("wrong", "moved");
    std::fs::write(&moved, MAP.replace("normal", "other")).unwrap();
    let (code, out, err) = shop.tierline(&["dlq", "list", &moved, "--tier", "normal"]);
    std::fs::remove_file(&moved).unwrap();
    assert_eq!((code, out.lines().count()), (0, 2), "{out}{err}");

    let nowhere = "postgres://ada:secret@127.0.0.1:1/hotel";
    let (code, _, err) = shop.dlq("list", &["--postgres", nowhere]);
    assert_eq!(code, 3);
    assert!(!err.contains("secret"), "{err}");
    assert_eq!(shop.json("tiers", &[])["tiers"][0]["dead"], 1);
}
