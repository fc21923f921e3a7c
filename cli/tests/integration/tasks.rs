//! `tierline tasks` as an operator would use it.

#![cfg(test)]

use std::process::Stdio;

use serde_json::Value;
use tierline::{Tierline, Topology};
use tierline_testbed::{Database, database};
use tokio::process::Command;

const MAP: &str = r#"
app = "shop"
[tiers.high]
queue = "postgres"
[tiers.normal]
queue = "postgres"
keep = "7d"
promote = { after = "1h", to = "high" }
[groups.all]
tiers = ["high", "normal"]
concurrency = 1
[tasks]
"order.ship" = "normal"
"#;

async fn tierline(database: &Database, file: &str, words: &[&str]) -> (Option<i32>, String) {
    let ended = Command::new(env!("CARGO_BIN_EXE_tierline"))
        .args(["tasks", words[0], file])
        .args(&words[1..])
        .env("DATABASE_URL", database.url())
        .env("USER", "ada")
        .stdin(Stdio::null())
        .output()
        .await
        .unwrap();
    let text = String::from_utf8(ended.stdout).unwrap() + &String::from_utf8_lossy(&ended.stderr);
    (ended.status.code(), text)
}

#[tokio::test]
async fn an_operator_lists_shows_and_cancels_tasks() {
    let database = database().await;
    let file = format!("tierline-tasks-{}.toml", std::process::id());
    let file = std::env::temp_dir().join(file).to_str().unwrap().to_owned();
    std::fs::write(&file, MAP).unwrap();
    let app = Tierline::builder(Topology::parse(MAP).unwrap()).postgres(database.url());
    let app = app.connect().await.unwrap();
    let payload = serde_json::json!({ "order": 7 });
    let first = app.publish_named("order.ship", &payload).unique("order:7");
    let first = first.await.unwrap();
    for _ in 0..3 {
        let publish = app.publish_named("order.ship", &payload).delay("1h");
        publish.await.unwrap();
    }
    let run = async |words: &[&str]| tierline(&database, &file, words).await;

    let (code, text) = run(&["list", "--json"]).await;
    let listed: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (code, listed["tasks"].as_array().unwrap().len()),
        (Some(0), 4)
    );
    let (_, text) = run(&["list", "--limit", "1"]).await;
    assert!(
        text.contains(first.id.as_str()) && text.contains("--after "),
        "{text}"
    );
    let (_, text) = run(&["show", first.id.as_str()]).await;
    assert!(text.contains(r#"payload:   {"order":7}"#), "{text}");
    assert!(text.contains("key:       order:7 (unique)"), "{text}");

    let (code, text) = run(&["cancel", "--state", "scheduled"]).await;
    assert_eq!(code, Some(2));
    assert!(
        text.contains("this would cancel 3 tasks; confirm with --yes"),
        "{text}"
    );
    let (code, text) = run(&["cancel", "--state", "scheduled", "--yes"]).await;
    assert_eq!((code, text.trim()), (Some(0), "3 cancelled"));
    let (code, _) = run(&["cancel", first.id.as_str(), "--because", "asked"]).await;
    assert_eq!(code, Some(0));
    let (code, text) = run(&["cancel", first.id.as_str()]).await;
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("it has ended"), "{text}");
    let (code, text) = run(&["cancel", "no-such-task"]).await;
    assert_eq!(code, Some(4), "{text}");
    for misused in [
        &["cancel"][..],
        &["cancel", "x", "--task", "y"],
        &["list", "--state", "gone"],
        &["cancel", "--state", "running", "--yes"],
        &["cancel", "--state", "finished", "--yes"],
    ] {
        let (code, text) = run(misused).await;
        assert_eq!(code, Some(2), "{misused:?}: {text}");
    }
    let (_, text) = run(&["list"]).await;
    assert_eq!(text.trim(), "no tasks");
    let (_, text) = run(&["list", "--state", "finished"]).await;
    assert_eq!(text.matches("finished, cancelled").count(), 4, "{text}");
    let (_, text) = run(&["show", first.id.as_str()]).await;
    assert!(text.contains("ended:     cancelled at "), "{text}");
    let (_, text) = run(&["audit", "--json"]).await;
    let log: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(log["entries"][0]["who"], "ada");
    assert_eq!(log["entries"][0]["why"], "asked");
    std::fs::remove_file(&file).unwrap();
}

#[tokio::test]
async fn an_operator_escalates_a_task() {
    let database = database().await;
    let file = format!("tierline-escalate-{}.toml", std::process::id());
    let file = std::env::temp_dir().join(file).to_str().unwrap().to_owned();
    std::fs::write(&file, MAP).unwrap();
    let app = Tierline::builder(Topology::parse(MAP).unwrap()).postgres(database.url());
    let app = app.connect().await.unwrap();
    let payload = serde_json::json!({ "order": 7 });
    for id in ["order-7", "order-8"] {
        let publish = app.publish_named("order.ship", &payload).id(id).delay("1h");
        publish.await.unwrap();
    }
    let run = async |words: &[&str]| tierline(&database, &file, words).await;
    let (code, text) = run(&["escalate", "order-7", "--to", "hihg"]).await;
    assert_eq!(code, Some(4), "{text}");
    assert!(text.contains("did you mean \"high\"?"), "{text}");
    let (code, text) = run(&["escalate", "order-7", "--to", "high", "--because", "asked"]).await;
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("order-7 is in tier high now, after normal: scheduled"));
    let now = [
        "escalate", "order-8", "--to", "high", "--now", "--by", "eve", "--json",
    ];
    let (code, text) = run(&now).await;
    let escalated: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (code, &escalated["after"]["state"]),
        (Some(0), &"ready".into())
    );
    let (code, text) = run(&["escalate", "order-7", "--to", "high"]).await;
    assert_eq!(code, Some(1), "{text}");
    let (_, text) = run(&["list"]).await;
    assert_eq!(text.matches("high (first normal)").count(), 2, "{text}");
    let (_, text) = run(&["show", "order-7"]).await;
    assert!(text.contains("tier:      high (first normal)"), "{text}");
    let (_, text) = run(&["audit", "--json"]).await;
    let log: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(log["entries"][0]["who"], "eve");
    assert_eq!(log["entries"][1]["why"], "asked");

    let plan = async |with_database: bool| {
        let mut plan = Command::new(env!("CARGO_BIN_EXE_tierline"));
        plan.args(["topology", "plan", &file]);
        plan.env_remove("DATABASE_URL");
        if with_database {
            plan.args(["--postgres", database.url()]);
        }
        String::from_utf8(plan.output().await.unwrap().stdout).unwrap()
    };
    for with_database in [false, true] {
        let text = plan(with_database).await;
        assert!(text.contains("promotes to high after 1h"), "{text}");
    }
    std::fs::remove_file(&file).unwrap();
}
