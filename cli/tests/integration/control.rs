//! `tierline control` as an operator would use it, and the same over HTTP.

#![cfg(test)]

use std::process::Stdio;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tierline::{Registry, Task, Tierline, Topology};
use tierline_testbed::{Database, Vhost, database, vhost};
use tokio::process::Command;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::command::File;

const MAP: &str = r#"
app = "shop"
[tiers.high]
queue = "classic"
ttl = "1h"
[tiers.low]
queue = "postgres"
lease = "2s"
limit = { rate = "100/m", burst = 20 }
[groups.all]
tiers = ["high", "low"]
concurrency = 2
[tasks]
"report.export" = "high"
"report.send" = "high"
"mail.send" = "low"
"#;

#[derive(Debug, Serialize, Deserialize)]
struct Export {}

impl Task for Export {
    const NAME: &'static str = "report.export";
}

#[derive(Debug, Serialize, Deserialize)]
struct Send {}

impl Task for Send {
    const NAME: &'static str = "report.send";
}

/// The servers and the file of an app with a worker.
struct Shop {
    vhost: Vhost,
    database: Database,
    file: File,
    app: Tierline,
    stop: oneshot::Sender<()>,
    working: JoinHandle<Result<(), tierline::Error>>,
}

impl Shop {
    async fn open(name: &str) -> Self {
        let (vhost, database) = tokio::join!(vhost(), database());
        let mut registry = Registry::new();
        registry
            .register::<Export, _>(|_: Export| async {})
            .unwrap();
        registry.register::<Send, _>(|_: Send| async {}).unwrap();
        let app = Tierline::builder(Topology::parse(MAP).unwrap())
            .amqp(vhost.amqp_url())
            .postgres(database.url())
            .registry(registry);
        let app = app.connect().await.unwrap();
        let (stop, stopped) = oneshot::channel::<()>();
        let working = tokio::spawn(app.work(["all"]).until(async {
            let _ = stopped.await;
        }));
        let control = app.control().unwrap();
        while control.processes().await.unwrap().is_empty() {
            tokio::task::yield_now().await;
        }
        Self {
            vhost,
            database,
            file: File::new(name, MAP),
            app,
            stop,
            working,
        }
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tierline"));
        command
            .args(["control", words[0], &self.file.0])
            .args(&words[1..])
            .env("AMQP_URL", self.vhost.amqp_url())
            .env("DATABASE_URL", self.database.url())
            .env("USER", "ada")
            .stdin(Stdio::null());
        command
    }

    async fn run(&self, words: &[&str]) -> (i32, String) {
        let ended = self.command(words).output().await.unwrap();
        let text = String::from_utf8(ended.stdout).unwrap();
        let text = text + &String::from_utf8_lossy(&ended.stderr);
        (ended.status.code().unwrap(), text)
    }

    /// The text of a command that succeeds.
    async fn well(&self, words: &[&str]) -> String {
        let (code, text) = self.run(words).await;
        assert_eq!(code, 0, "{words:?}: {text}");
        text
    }

    async fn json(&self, words: &[&str]) -> Value {
        let text = self.well(&[words, &["--json"]].concat()).await;
        serde_json::from_str(&text).unwrap()
    }

    async fn end(self) {
        self.stop.send(()).unwrap();
        self.working.await.unwrap().unwrap();
        self.app.close().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_pauses_limits_and_resumes() {
    let shop = Shop::open("control-pause").await;
    let text = shop.well(&["list"]).await;
    assert_eq!(
        text.trim(),
        "nothing is paused, limited or overridden by an operator"
    );
    let because = ["--because", "the provider is down"];
    let pause = ["pause", "tier", "high", "--for", "1h"];
    let text = shop.well(&[&pause[..], &because].concat()).await;
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("tier high: paused until 2"), "{text}");
    assert!(
        lines[1].starts_with("note: the broker goes on to dead-letter"),
        "{text}"
    );
    let text = shop.well(&["pause", "tier", "high"]).await;
    assert!(
        text.starts_with("tier high: paused until somebody ends it\nbefore: paused until 2"),
        "{text}"
    );
    assert!(
        text.contains(", by ada since ") && text.contains(": the provider is down\n"),
        "{text}"
    );
    shop.well(&["pause", "group", "all", "--by", "eve"]).await;
    shop.well(&["pause", "task", "mail.send"]).await;
    let text = shop.well(&["resume", "tier", "high"]).await;
    assert!(text.starts_with("tier high is resumed\nbefore: "), "{text}");
    assert!(
        text.ends_with("note: group all is still paused, by eve\n"),
        "{text}"
    );
    let text = shop.well(&["resume", "tier", "high"]).await;
    assert!(text.starts_with("note: tier high was not paused"), "{text}");

    let limit = ["limit", "tier", "low", "--rate", "50/m", "--burst", "5"];
    let text = shop.well(&[&limit[..], &["--running", "2"]].concat()).await;
    assert!(
        text.starts_with("tier low: limited to 50/m with bursts of 5, 2 running until somebody"),
        "{text}"
    );
    assert!(
        text.contains("note: it replaces the limit of the map, 100/m with bursts of 20"),
        "{text}"
    );
    let lifted = shop.json(&["limit", "tier", "low", "--none"]).await;
    assert_eq!(lifted["before"]["running"], 2);
    let text = shop.well(&["list"]).await;
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("OF"), "{text}");
    assert!(lines[1].starts_with("group all       paused"), "{text}");
    assert!(lines[2].starts_with("task mail.send  paused"), "{text}");
    assert!(
        lines[3].starts_with("tier low        without a limit"),
        "{text}"
    );
    let text = shop.well(&["unlimit", "tier", "low"]).await;
    assert!(
        text.starts_with("tier low: the limit has ended\n"),
        "{text}"
    );

    let text = shop.well(&["audit", "--limit", "2"]).await;
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 3, "{text}");
    assert!(lines[1].contains("unlimit tier  tier low"), "{text}");
    assert!(
        lines[2].contains("limit tier    tier low  no limit"),
        "{text}"
    );
    let number = lines[2].split(' ').next().unwrap();
    let log = shop.json(&["audit", "--before", number]).await;
    let actions = log["entries"].as_array().unwrap().iter();
    let actions: Vec<_> = actions.map(|it| (&it["action"], &it["who"])).collect();
    assert_eq!(actions.len(), 6, "{log}");
    assert_eq!(actions[3], (&json!("pause group"), &json!("eve")));
    shop.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_overrides_tasks_and_looks_at_processes() {
    let shop = Shop::open("control-override").await;
    shop.well(&["pause", "group", "all"]).await;
    let both = ["override", "task", "report.export", "report.send"];
    let to = ["--tier", "low", "--priority", "3", "--for", "7d"];
    let text = shop.well(&[&both[..], &to].concat()).await;
    let lines: Vec<&str> = text.lines().collect();
    assert!(
        lines[0].starts_with("task report.export: in tier low with priority 3 until 2"),
        "{text}"
    );
    assert!(
        lines[1].starts_with("task report.send: in tier low"),
        "{text}"
    );
    assert_eq!(lines[2], "rows moved: 0");
    let paused = "note: group all is paused, by ada: the tasks wait there";
    let empty = "note: the queue of tier high is empty; delayed messages may come to it";
    assert_eq!(lines[3..5], [paused, empty]);
    let prefix = ["override", "prefix", "report.", "--tier", "low"];
    let mut command = shop.command(&prefix);
    command
        .env_remove("AMQP_URL")
        .env("AMQP_URL", "amqp://127.0.0.1:1");
    let ended = command.output().await.unwrap();
    assert_eq!(
        ended.status.code(),
        Some(0),
        "a broker that is away is no reason to fail"
    );
    let text = shop.well(&["end-override", "prefix", "report."]).await;
    assert!(
        text.starts_with("tasks report.*: the override has ended\nbefore: in tier low, by ada"),
        "{text}"
    );
    let text = shop.well(&["processes"]).await;
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("NAME"), "{text}");
    assert!(
        lines[1].contains("  alive  ") && lines[1].ends_with("all 2 (high, low)"),
        "{text}"
    );
    let text = shop.well(&["scaling"]).await;
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines[0].trim_end(),
        "GROUP  SLOTS  WANTED  PROCESSES  WANTED"
    );
    assert_eq!(lines[1], "all    2      0       1          0");
    assert!(
        lines[4].starts_with("high  all    0.0           0        0.0/s     -")
            && lines[4].ends_with("paused"),
        "{text}"
    );
    shop.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_that_cannot_be_made_has_its_exit_code_and_says_why() {
    let shop = Shop::open("control-codes").await;
    for (words, expected, said) in [
        (&["pause", "tier", "hihg"][..], 4, "did you mean \"high\"?"),
        (&["pause", "group", "al"], 4, "did you mean \"all\"?"),
        (
            &["limit", "task", "mail.sent", "--running", "1"],
            4,
            "did you mean \"mail.send\"?",
        ),
        (
            &["override", "prefix", "rpeort.", "--tier", "low"],
            4,
            "did you mean \"report.\"?",
        ),
        (
            &["override", "task", "report.send", "--tier", "lwo"],
            4,
            "did you mean \"low\"?",
        ),
        (
            &["override", "task", "mail.send", "--tier", "high"],
            1,
            "has a handler for mail.send",
        ),
        (
            &["override", "task", "mail.send", "--priority", "11"],
            1,
            "which takes 0 to 10",
        ),
        (&["pause", "teir", "high"], 2, "tier, group, task"),
        (
            &["limit", "group", "all", "--running", "1"],
            2,
            "tier, task",
        ),
        (&["pause", "tier", "high", "--for", "5"], 2, "--for"),
        (
            &["limit", "tier", "low", "--rate", "fast"],
            2,
            "cannot read \"fast\" as a rate",
        ),
        (&["limit", "tier", "low"], 2, "say how often"),
        (&["limit", "tier", "low", "--burst", "1"], 2, "needs a rate"),
        (
            &["override", "task", "mail.send"],
            2,
            "neither a tier nor a priority",
        ),
        (&["override", "task", "--tier", "low"], 2, "NAME"),
        (
            &["override", "prefix", "report.", "mail.", "--tier", "low"],
            2,
            "one prefix at a time",
        ),
        (&["audit", "--limit", "0"], 2, "1..=500"),
    ] {
        let (code, text) = shop.run(words).await;
        assert_eq!(code, expected, "{words:?}: {text}");
        assert!(text.contains(said), "{words:?}: {text}");
    }
    assert_eq!(shop.json(&["list"]).await, json!({ "controls": [] }));
    shop.end().await;
}

#[cfg(all(unix, feature = "admin"))]
#[tokio::test(flavor = "multi_thread")]
async fn the_command_prints_what_the_api_answers() {
    use crate::serve::Serving;

    let shop = Shop::open("control-same").await;
    let serving = Serving::of(&shop.file.0, shop.vhost.amqp_url(), shop.database.url()).await;
    shop.well(&["pause", "group", "all"]).await;
    let limit = [
        "limit",
        "task",
        "mail.send",
        "--rate",
        "5/10s",
        "--for",
        "1h",
    ];
    shop.well(&limit).await;
    let to = ["override", "task", "report.send", "--tier", "low"];
    shop.well(&to).await;
    for (command, path) in [
        ("list", "/admin/control"),
        ("audit", "/admin/control/audit"),
        ("scaling", "/admin/control/scaling"),
    ] {
        assert_eq!(
            shop.json(&[command]).await,
            serving.ask("GET", path, "").await,
            "{command}"
        );
    }
    // Heartbeats go on.
    let without_sign = |mut processes: Value| {
        let process = processes["processes"][0].as_object_mut().unwrap();
        assert!(process.remove("last_heartbeat").is_some());
        processes
    };
    assert_eq!(
        without_sign(shop.json(&["processes"]).await),
        without_sign(serving.ask("GET", "/admin/control/processes", "").await)
    );
    // The same change twice, once by each.
    let without_times = |mut changed: Value| {
        for name in ["before", "after"] {
            let entries = match &mut changed[name] {
                Value::Array(entries) => entries.iter_mut().collect(),
                entry => vec![entry],
            };
            for entry in entries {
                assert!(entry["since"].take().is_string(), "{entry}");
                entry["until"].take();
            }
        }
        changed
    };
    for (words, mut body) in [
        (
            &["pause", "tier", "high", "--for", "1h"][..],
            json!({ "target": "tier", "name": "high", "for": "1h" }),
        ),
        (
            &["limit", "tier", "low", "--running", "3"],
            json!({ "target": "tier", "name": "low", "running": 3 }),
        ),
        (
            &["override", "task", "report.send", "--tier", "low"],
            json!({ "target": "task", "names": ["report.send"], "tier": "low" }),
        ),
    ] {
        let words = [words, &["--because", "why"]].concat();
        (body["by"], body["because"]) = (json!("ada"), json!("why"));
        // So that both find the same before.
        shop.well(&words).await;
        let printed = shop.json(&words).await;
        let path = format!("/admin/control/{}", words[0]);
        let answered = serving.ask("POST", &path, &body.to_string()).await;
        assert_eq!(without_times(printed), without_times(answered), "{words:?}");
    }
    assert_eq!(serving.terminated().await, 0);
    shop.end().await;
}
