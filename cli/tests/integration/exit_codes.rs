//! The codes that the command promises in its help, for every kind of mistake.

#![cfg(test)]

use std::process::{Command, Stdio};

use tierline_testbed::{PgBouncer, PoolMode, database, vhost};

const HOTEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../topology/hotel.toml");
const NOWHERE: &str = "127.0.0.1:1";

/// Runs the command with these servers in its environment, and gives its code and what it says.
fn run(arguments: &[&str], amqp: &str, postgres: &str) -> (i32, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_tierline"))
        .args(arguments)
        .env("AMQP_URL", amqp)
        .env("DATABASE_URL", postgres)
        .env("TIERLINE_ADMIN_TOKEN", "0123456789abcdef")
        .env_remove("MANAGEMENT_URL")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!said.contains("hush"), "{said}");
    (output.status.code().unwrap(), said)
}

/// The commands that log in to the broker, and those that log in to the database.
const WITH_BROKER: &[&[&str]] = &[
    #[cfg(feature = "admin")]
    &["serve", HOTEL, "--listen", "127.0.0.1:0"],
    &["topology", "plan", HOTEL],
    &["topology", "apply", HOTEL],
    &["topology", "doctor", HOTEL],
    &["dlq", "redrive", HOTEL, "1"],
    &["schedule", "run", HOTEL, "night-audit"],
];
const WITH_DATABASE: &[&[&str]] = &[
    &["migrate"],
    &["dlq", "list", HOTEL],
    &["dlq", "show", HOTEL, "1"],
    &["dlq", "groups", HOTEL],
    &["dlq", "tiers", HOTEL],
    &["dlq", "discard", HOTEL, "1"],
    &["dlq", "purge", HOTEL],
    &["schedule", "list", HOTEL],
    &["schedule", "next", HOTEL],
    &["control", "list", HOTEL],
    &["control", "processes", HOTEL],
    &["control", "audit", HOTEL],
];

#[test]
fn the_help_names_every_code() {
    let output = Command::new(env!("CARGO_BIN_EXE_tierline"))
        .arg("--help")
        .output()
        .unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    for code in 0..=4 {
        assert!(help.contains(&format!("\n  {code}  ")), "{code}: {help}");
    }
}

#[test]
fn a_url_that_is_none_is_a_mistake_in_the_command_line() {
    let amqp = "amqp://ada:hu/sh@host";
    let postgres = "postgres://ada:hu/sh@host/hotel";
    for arguments in WITH_BROKER.iter() {
        let (code, said) = run(arguments, amqp, "postgres://127.0.0.1:1/hotel");
        assert_eq!(code, 2, "{arguments:?}: {said}");
        assert!(said.contains("write amqp://user:password@host"), "{said}");
    }
    for arguments in WITH_DATABASE.iter() {
        let (code, said) = run(arguments, "", postgres);
        assert_eq!(code, 2, "{arguments:?}: {said}");
        assert!(
            said.contains("write postgres://user:password@host"),
            "{said}"
        );
    }
    let doctor = ["topology", "doctor", HOTEL, "--management", "ftp://host"];
    let (code, said) = run(&doctor, "amqp://127.0.0.1:1", "");
    assert_eq!(code, 2, "{said}");
}

#[cfg(feature = "admin")]
#[test]
fn serve_refuses_a_weak_token_and_a_time_that_is_none() {
    for (option, value, said) in [("--token", "short", "16 bytes"), ("--grace", "5", "unit")] {
        let arguments = ["serve", HOTEL, option, value];
        let (code, text) = run(&arguments, "amqp://127.0.0.1:1", "postgres://127.0.0.1:1/x");
        assert_eq!(code, 2, "{text}");
        assert!(text.contains(said), "{text}");
    }
}

#[tokio::test]
async fn a_server_that_is_away_or_lets_nobody_in_is_three() {
    let (vhost, database) = tokio::join!(vhost(), database());
    let (_, broker) = vhost.amqp_url().rsplit_once('@').unwrap();
    for amqp in [
        format!("amqp://ada:hush@{NOWHERE}"),
        format!("amqp://ada:hush@{broker}"),
        format!("{}-gone", vhost.amqp_url()),
    ] {
        for arguments in WITH_BROKER.iter() {
            let (code, said) = run(arguments, &amqp, database.url());
            assert_eq!(code, 3, "{arguments:?}: {said}");
        }
    }
    let (place, name) = database.url().rsplit_once('/').unwrap();
    let (_, server) = place.rsplit_once('@').unwrap();
    for (postgres, expected) in [
        (
            format!("postgres://nobody:hush@{server}/{name}"),
            "\"nobody\"",
        ),
        (format!("{place}/no_such_database"), "\"no_such_database\""),
    ] {
        for arguments in WITH_DATABASE.iter() {
            let (code, said) = run(arguments, vhost.amqp_url(), &postgres);
            assert_eq!(code, 3, "{arguments:?}: {said}");
            assert!(said.contains(expected), "{arguments:?}: {said}");
        }
    }
    // One command alone: each waits for a connection as long as the pool does.
    let postgres = format!("postgres://ada:hush@{NOWHERE}/hotel");
    let (code, said) = run(&["dlq", "tiers", HOTEL], vhost.amqp_url(), &postgres);
    assert_eq!(code, 3, "{said}");
}

#[tokio::test]
async fn a_database_that_is_not_prepared_is_one_and_says_what_to_run() {
    let database = database().await;
    for arguments in &WITH_DATABASE[1..] {
        let (code, said) = run(arguments, "amqp://127.0.0.1:1", database.url());
        assert_eq!(code, 1, "{arguments:?}: {said}");
        assert!(said.contains("tierline migrate"), "{said}");
    }
}

#[tokio::test]
async fn a_transaction_pooler_is_one_until_the_command_is_told_of_it() {
    let database = database().await;
    let pooler = PgBouncer::start(&database, PoolMode::Transaction, 2);
    let pooler = pooler.await.unwrap();
    for arguments in WITH_DATABASE.iter() {
        let (code, said) = run(arguments, "amqp://127.0.0.1:1", pooler.url());
        assert_eq!(code, 1, "{arguments:?}: {said}");
        assert!(said.contains("--pooler"), "{arguments:?}: {said}");
    }
    let told = |arguments: &[&'static str]| [arguments, &["--pooler"]].concat();
    for arguments in [
        &["migrate"][..],
        &["dlq", "list", HOTEL],
        &["schedule", "list", HOTEL],
    ] {
        let (code, said) = run(&told(arguments), "", pooler.url());
        assert_eq!(code, 0, "{arguments:?}: {said}");
    }
}
