//! `tierline topology` for maps with tiers in Postgres.

#![cfg(test)]

use std::process::Command;

use serde_json::Value;
use tierline::{Tierline, Topology};
use tierline_testbed::{database, vhost};

use crate::command::File;

const MAP: &str = r#"
app = "shop"
[tiers.normal]
queue = "postgres"
[groups.all]
tiers = ["normal"]
concurrency = 1
[tasks]
"order.ship" = "normal"
"#;

/// `tierline topology …`, with no server in its environment.
fn run(arguments: &[&str]) -> (i32, String) {
    let ended = Command::new(env!("CARGO_BIN_EXE_tierline"))
        .arg("topology")
        .args(arguments)
        .env_remove("AMQP_URL")
        .env_remove("DATABASE_URL")
        .env_remove("MANAGEMENT_URL")
        .output()
        .unwrap();
    let text = String::from_utf8(ended.stdout).unwrap() + &String::from_utf8_lossy(&ended.stderr);
    (ended.status.code().unwrap(), text)
}

#[tokio::test]
async fn a_map_without_a_broker_is_planned_applied_and_examined_without_one() {
    let database = database().await;
    let file = File::new("postgres-alone", MAP);
    let with = ["--postgres", database.url()];
    let run = |command: &str| run(&[&[command, &file.0], &with[..]].concat());

    let (code, text) = run("plan");
    assert_eq!(code, 0, "{text}");
    for part in ["migrations to apply\n", "  backlog\n", "  normal  to add\n"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("exchange"), "{text}");
    assert_eq!(run("doctor").0, 1);

    let (code, text) = run("apply");
    assert_eq!(code, 0, "{text}");
    assert!(text.starts_with("applied to the database: "), "{text}");
    assert!(text.ends_with("; 1 tier in Postgres is there, new: normal\n"));
    let (code, text) = run("apply");
    let nothing = "the database schema is up to date; 1 tier in Postgres is there\n";
    assert_eq!((code, text.as_str()), (0, nothing));
    assert!(run("plan").1.starts_with("0 migrations to apply\n"));
    let (code, text) = run("doctor");
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("0 errors, 0 warnings, 1 note"), "{text}");

    let app = Tierline::builder(Topology::parse(MAP).unwrap()).postgres(database.url());
    let app = app.connect().await.unwrap();
    app.publish_named("order.ship", &Value::from(7))
        .await
        .unwrap();
    let (code, text) = run("doctor");
    assert_eq!(code, 1);
    let waits = "warning: tier normal: nobody works on it, and 1 task waits, the oldest for ";
    assert!(text.contains(waits), "{text}");
}

#[tokio::test]
async fn a_map_of_both_kinds_needs_both_and_says_which_is_missing() {
    let (database, vhost) = (database().await, vhost().await);
    let both = MAP
        .replace(
            "[groups.all]",
            "[tiers.quick]\nqueue = \"quorum\"\n[groups.all]",
        )
        .replace("[\"normal\"]", "[\"quick\", \"normal\"]");
    let file = File::new("both-kinds", &both);
    let amqp = ["--amqp", vhost.amqp_url()];
    let postgres = ["--postgres", database.url()];

    let (code, text) = run(&["plan", &file.0, "--json"]);
    let plan: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(code, 0);
    assert_eq!(plan["postgres"]["tiers"][0], "normal");
    assert!(!plan["queues"].as_array().unwrap().is_empty());
    let (_, text) = run(&[&["plan", &file.0, "--json"], &postgres[..]].concat());
    let plan: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(plan["postgres"]["tiers"][0]["number"], Value::Null);

    let (code, text) = run(&[&["apply", &file.0], &amqp[..]].concat());
    assert_eq!(code, 2);
    assert!(text.contains("tiers in Postgres (normal)"), "{text}");
    let (code, text) = run(&[&["apply", &file.0], &postgres[..]].concat());
    assert_eq!(code, 2);
    assert!(text.contains("--amqp"), "{text}");
    let all = [&["apply", &file.0, "--json"], &amqp[..], &postgres].concat();
    let (code, text) = run(&all);
    let applied: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (code, &applied["postgres"]["new_tiers"][0]),
        (0, &"normal".into())
    );

    let (code, text) = run(&[&["doctor", &file.0], &amqp[..]].concat());
    assert_eq!(code, 0, "{text}");
    let not_checked = "not checked: the tiers in Postgres: give their database with --postgres";
    assert!(text.contains(not_checked), "{text}");
    let (code, text) = run(&[&["doctor", &file.0], &amqp[..], &postgres].concat());
    assert_eq!(code, 0, "{text}");
    assert!(
        text.contains("note: tier normal: nobody works on it"),
        "{text}"
    );
    assert!(
        text.contains("note: tier quick: nobody works on it"),
        "{text}"
    );
}

#[test]
fn a_map_without_a_broker_needs_its_database() {
    let file = File::new("no-database", MAP);
    for command in ["apply", "doctor"] {
        let (code, text) = run(&[command, &file.0]);
        assert_eq!(code, 2, "{text}");
        assert!(text.contains("--postgres or DATABASE_URL"), "{text}");
    }
    let url = "postgres://ada:hush@127.0.0.1:1/shop";
    for command in ["plan", "apply", "doctor"] {
        let (code, text) = run(&[command, &file.0, "--postgres", url]);
        assert_eq!(code, 3, "{text}");
        assert!(!text.contains("hush"), "{text}");
    }
}

#[tokio::test]
async fn a_map_on_the_broker_is_stored_for_producers_that_publish_by_sql() {
    let (vhost, database) = (vhost().await, database().await);
    let file = File::new("sql-broker", &MAP.replace("\"postgres\"", "\"quorum\""));
    let with = ["--amqp", vhost.amqp_url(), "--postgres", database.url()];
    let (code, text) = run(&[&["apply", &file.0], &with[..]].concat());
    assert_eq!(code, 0, "{text}");
    assert!(
        text.ends_with("; the tasks of the map are stored\n"),
        "{text}"
    );
    let (_, text) = run(&[&["plan", &file.0], &with[..]].concat());
    assert!(text.contains("\n0 migrations to apply\n"), "{text}");
}
