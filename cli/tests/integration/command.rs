//! The command as a CI would run it.

#![cfg(test)]

use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tierline_testbed::{Broker, MANAGEMENT_URL, Plugins, Release, database, vhost};

const HOTEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../topology/hotel.toml");

/// `tierline topology …`, with no broker in its environment.
fn tierline(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tierline"));
    command
        .arg("topology")
        .args(arguments)
        .env_remove("AMQP_URL")
        .env_remove("DATABASE_URL")
        .env_remove("MANAGEMENT_URL")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn run(arguments: &[&str]) -> (i32, String, String) {
    finished(tierline(arguments).output().unwrap())
}

fn finished(output: Output) -> (i32, String, String) {
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let code = output.status.code().unwrap();
    (code, text(output.stdout), text(output.stderr))
}

/// A file that is removed when the value is dropped.
pub(crate) struct File(pub(crate) String);

impl File {
    pub(crate) fn new(name: &str, content: &str) -> Self {
        let name = format!("tierline-{name}-{}.toml", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::write(&path, content).unwrap();
        Self(path.to_str().unwrap().to_owned())
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn check_counts_what_is_in_a_file() {
    let (code, out, err) = run(&["check", HOTEL]);
    assert_eq!((code, err.as_str()), (0, ""));
    assert_eq!(
        out,
        "hotel is valid: 6 tiers, 4 groups, 75 tasks, 4 schedules\n"
    );
}

#[test]
fn check_counts_one_of_each_as_one() {
    let map = "app = \"shop\"\n[tiers.normal]\nqueue = \"quorum\"\n[groups.all]\n\
               tiers = [\"normal\"]\nconcurrency = 1\n[tasks]\n\"order.ship\" = \"normal\"\n\
               [schedules.nightly]\ntask = \"order.ship\"\ncron = \"0 3 * * *\"\nexpires = \"1h\"\n";
    let file = File::new("one-of-each", map);
    let (code, out, err) = run(&["check", &file.0]);
    assert_eq!((code, err.as_str()), (0, ""));
    assert_eq!(out, "shop is valid: 1 tier, 1 group, 1 task, 1 schedule\n");
}

const SEVEN_MISTAKES: &str = r#"app = "ho tel"
[tiers.critical]
queue = "clasic"
[tiers.lonely]
queue = "quorum"
weight = -1
[groups.urgent]
tiers = ["critcal"]
concurrency = 0
[tasks]
"email.send_otp" = "critcal"
"#;

#[test]
fn seven_mistakes_give_seven_messages_with_their_lines() {
    let file = File::new("seven-mistakes", SEVEN_MISTAKES);
    let (code, out, err) = run(&["check", &file.0]);
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(err.contains(&format!("{}:3:9: ", file.0)), "{err}");

    let (code, out, _) = run(&["check", &file.0, "--json"]);
    let out: Value = serde_json::from_str(&out).unwrap();
    let problems = out["problems"].as_array().unwrap();
    let lines: Vec<_> = problems
        .iter()
        .map(|problem| problem["line"].as_u64())
        .collect();
    assert_eq!(
        (code, lines),
        (1, [1, 3, 4, 6, 8, 9, 11].map(Some).to_vec()),
        "{out:#}"
    );
}

#[test]
fn a_file_that_is_not_there_is_named() {
    let (code, _, err) = run(&["check", "/nowhere/hotel.toml"]);
    assert_eq!(code, 1);
    assert!(err.contains("/nowhere/hotel.toml"), "{err}");
}

#[test]
fn a_wrong_command_line_ends_with_two() {
    assert_eq!(run(&["chekc", HOTEL]).0, 2);
    assert_eq!(run(&["apply", HOTEL]).0, 2);
    assert_eq!(run(&["plan", HOTEL, "--broker-version", "four"]).0, 2);
}

#[test]
fn plan_needs_no_broker_and_minds_the_version() {
    let (code, out, _) = run(&["plan", HOTEL, "--json"]);
    let plan: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, plan["queues"].as_array().unwrap().len()), (0, 112));
    let mut plan = tierline(&["plan", HOTEL, "--broker-version", "3.10"]);
    plan.env("AMQP_URL", "amqp://127.0.0.1:1");
    let (code, out, _) = finished(plan.output().unwrap());
    assert_eq!(code, 0);
    assert!(out.contains("112 queues"), "{out}");
    let (code, _, err) = run(&["plan", HOTEL, "--broker-version", "3.9"]);
    assert_eq!(code, 1);
    assert!(err.contains("3.9.0"), "{err}");
}

#[tokio::test]
async fn with_a_database_no_queues_for_long_delays_are_planned_exported_or_applied() {
    let (vhost, database) = (vhost().await, database().await);
    let postgres = ["--postgres", database.url()];
    let (code, out, _) = run(&[["plan", HOTEL], postgres].concat());
    assert_eq!(code, 0);
    assert!(out.contains("101 queues"), "{out}");
    let (code, out, _) = run(&[["export", HOTEL], postgres].concat());
    let definitions: Value = serde_json::from_str(&out).unwrap();
    let queues = definitions["queues"].as_array().unwrap().len();
    assert_eq!((code, queues), (0, 101));
    let amqp = ["--amqp", vhost.amqp_url()];
    let (code, out, _) = run(&[["apply", HOTEL], amqp, postgres].concat());
    assert_eq!(code, 0, "{out}");
    assert_eq!(vhost.queue_names().await.unwrap().len(), 101);
    let (code, out, _) = run(&[["doctor", HOTEL], amqp, postgres].concat());
    assert_eq!(code, 0, "{out}");
    let (code, out, _) = run(&[["doctor", HOTEL], amqp].concat());
    assert!(
        code == 1 && out.contains("queue hotel.delay.long.14"),
        "{out}"
    );
}

#[test]
fn help_shows_examples_and_never_a_password() {
    for command in ["check", "plan", "apply", "doctor", "export"] {
        let mut tierline = tierline(&[command, "--help"]);
        let url = "amqp://ada:hush@localhost";
        let tierline = tierline.env("AMQP_URL", url).env("MANAGEMENT_URL", url);
        let (code, out, _) = finished(tierline.output().unwrap());
        assert_eq!(code, 0);
        assert!(out.contains("Example") && !out.contains("hush"), "{out}");
    }
}

#[test]
fn export_leaves_users_out_when_told_to() {
    let (code, out, _) = run(&["export", HOTEL, "--vhost", "it's"]);
    let definitions: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        (code, definitions["users"].as_array().unwrap().len()),
        (0, 5)
    );
    assert_eq!(definitions["queues"][0]["vhost"], "it's");

    let (_, out, _) = run(&["export", HOTEL, "--no-users"]);
    let definitions: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(definitions["users"], serde_json::json!([]));
    assert_eq!(definitions["permissions"], serde_json::json!([]));

    let (_, out, _) = run(&["export", HOTEL, "--permissions", "--vhost", "it's"]);
    assert_eq!(out.lines().count(), 5);
    assert!(out.starts_with(r"rabbitmqctl set_permissions -p 'it'\''s' 'hotel.publisher' '^$' "));
}

#[test]
fn a_broker_that_cannot_be_reached_ends_with_three_and_no_password_is_shown() {
    let url = "amqp://ada:hush@127.0.0.1:1";
    for command in ["plan", "apply", "doctor"] {
        let (code, out, err) = run(&[command, HOTEL, "--amqp", url, "--json"]);
        assert_eq!(code, 3, "{err}");
        assert!(!format!("{out}{err}").contains("hush"), "{out}{err}");
        let out: Value = serde_json::from_str(&out).unwrap();
        assert!(
            out["error"]
                .as_str()
                .unwrap()
                .contains("amqp://127.0.0.1:1")
        );
    }
}

#[test]
fn a_url_in_the_wrong_place_is_named_without_its_password() {
    let url = "postgres://ada:hu@sh@host/hotel";
    for (arguments, code) in [(["check", url, url], 2), (["check", url, "--json"], 1)] {
        let (found, out, err) = run(&arguments);
        assert_eq!(found, code, "{out}{err}");
        assert!(err.contains("postgres://…@host/hotel"), "{err}");
        assert!(!format!("{out}{err}").contains("sh@"), "{out}{err}");
    }
}

#[tokio::test]
async fn apply_takes_several_nodes_and_goes_on_without_one_that_is_down() {
    let vhost = vhost().await;
    let nodes = ["amqp://127.0.0.1:1", vhost.amqp_url()];
    let [down, up] = nodes.map(|url| ["--amqp", url]);
    let (code, out, _) = run(&[["apply", HOTEL], down, up].concat());
    let applied = "110 exchanges, 112 queues and 219 bindings are there\n";
    assert_eq!((code, out.as_str()), (0, applied));
    assert_eq!(vhost.queue_names().await.unwrap().len(), 112);
}

#[tokio::test]
async fn ten_processes_apply_at_once_and_all_succeed() {
    let vhost = vhost().await;
    let appliers: Vec<_> = (0..10)
        .map(|_| {
            tierline(&["apply", HOTEL, "--amqp", vhost.amqp_url()])
                .spawn()
                .unwrap()
        })
        .collect();
    for applier in appliers {
        let (code, out, err) = finished(applier.wait_with_output().unwrap());
        assert_eq!((code, err.as_str()), (0, ""));
        assert_eq!(
            out,
            "110 exchanges, 112 queues and 219 bindings are there\n"
        );
    }
    assert_eq!(vhost.queue_names().await.unwrap().len(), 112);
}

#[tokio::test]
async fn a_move_says_its_steps_refuses_what_would_lose_something_and_deletes_the_rest() {
    let vhost = vhost().await;
    let amqp = vhost.amqp_url();
    assert_eq!(run(&["apply", HOTEL, "--amqp", amqp]).0, 0);
    assert_eq!(
        run(&["move", HOTEL, "--amqp", amqp]).1,
        "no tier of the file has formerly: nothing moves\n"
    );
    let tier = "[tiers.low]\ngeneration = 2\nformerly = { queue = \"quorum\", generation = 1 }";
    let hotel = std::fs::read_to_string(HOTEL).unwrap();
    let moving = File::new("moving", &hotel.replacen("[tiers.low]", tier, 1));

    let (code, out, _) = run(&["move", &moving.0, "low", "--amqp", amqp]);
    assert_eq!(code, 1, "{out}");
    assert!(
        out.contains("waits: the quorum queue hotel.low.g2 is not there"),
        "{out}"
    );
    assert_eq!(run(&["apply", &moving.0, "--amqp", amqp]).0, 0);

    let dry = ["move", &moving.0, "--dry-run", "--amqp", amqp];
    let (code, out, _) = run(&dry);
    assert_eq!(code, 1, "{out}");
    assert!(out.contains("--assume-acknowledged"), "{out}");
    let (code, out, _) = run(&[&dry[..], &["--assume-acknowledged"]].concat());
    assert_eq!(code, 0, "{out}");
    assert!(
        out.contains("to do: hotel.low is empty and unused, and can be deleted"),
        "{out}"
    );
    assert!(
        vhost
            .queue_names()
            .await
            .unwrap()
            .contains(&"hotel.low".to_owned())
    );

    let mut run_move = tierline(&["move", &moving.0, "low", "--amqp", amqp, "--json"]);
    run_move.env(MANAGEMENT_URL, management());
    let (code, out, _) = finished(run_move.output().unwrap());
    let out: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(code, 0, "{out}");
    assert_eq!(out[0]["steps"][1]["state"], "done", "{out}");
    assert!(
        !vhost
            .queue_names()
            .await
            .unwrap()
            .contains(&"hotel.low".to_owned())
    );
    let (code, out, _) = run(&["move", &moving.0, "--amqp", amqp]);
    assert_eq!(code, 0, "{out}");
    assert!(out.contains("remove formerly from [tiers.low]"), "{out}");
    assert_eq!(run(&["move", &moving.0, "lwo", "--amqp", amqp]).0, 4);
    assert_eq!(run(&["move", &moving.0, "low"]).0, 1);

    // The second tier needs a database. What was found of the first one is shown all the same.
    let both = std::fs::read_to_string(&moving.0).unwrap();
    let both = both.replacen(
        "[tiers.bulk]\n",
        "[tiers.bulk]\nformerly = \"postgres\"\n",
        1,
    );
    let both = File::new("moving-both", &both);
    let (code, out, err) = run(&["move", &both.0, "--amqp", amqp]);
    assert_eq!(code, 1, "{err}");
    assert!(out.contains("remove formerly from [tiers.low]"), "{out}");
    assert!(err.contains("bulk"), "{err}");
    let (code, out, _) = run(&["move", &both.0, "--amqp", amqp, "--json"]);
    let out: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, &out["done"][0]["tier"]), (1, &"low".into()));
    assert!(out["error"].is_string(), "{out}");
}

#[tokio::test]
async fn a_mismatch_ends_with_one_and_shows_every_argument() {
    let vhost = vhost().await;
    let amqp = vhost.amqp_url();
    assert_eq!(run(&["apply", HOTEL, "--amqp", amqp]).0, 0);
    let change = "[tiers.critical]\nmax_priority = 5\nttl = \"1h\"";
    let hotel = std::fs::read_to_string(HOTEL).unwrap();
    let changed = File::new("changed", &hotel.replacen("[tiers.critical]", change, 1));

    let (code, out, err) = run(&["apply", &changed.0, "--amqp", amqp]);
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(err.contains("generation = 2 in [tiers.critical]"), "{err}");

    let mut apply = tierline(&["apply", &changed.0, "--amqp", amqp, "--json"]);
    apply.env(MANAGEMENT_URL, management());
    let (code, out, _) = finished(apply.output().unwrap());
    let out: Value = serde_json::from_str(&out).unwrap();
    let changes = out["mismatch"]["differences"][0]["changes"]
        .as_array()
        .unwrap();
    assert_eq!((code, changes.len()), (1, 2), "{out}");
}

#[tokio::test]
async fn the_doctor_ends_with_one_only_if_something_is_to_be_mended() {
    let vhost = vhost().await;
    let amqp = vhost.amqp_url();
    assert_eq!(run(&["apply", HOTEL, "--amqp", amqp]).0, 0);
    let doctor = |url: &str| run(&["doctor", HOTEL, "--amqp", amqp, "--management", url]);

    let (code, out, _) = doctor(&management());
    assert_eq!(code, 0, "{out}");
    assert!(out.contains("0 errors, 0 warnings"), "{out}");

    vhost.delete_queue("hotel.low").await.unwrap();
    let (code, out, _) = doctor(&management());
    assert_eq!(code, 1);
    assert!(
        out.contains("error: queue hotel.low: is in the file and not on the broker"),
        "{out}"
    );

    let (code, _, err) = doctor("http://ada:hush@127.0.0.1:1");
    assert_eq!(code, 3);
    assert!(
        err.contains("http://127.0.0.1:1") && !err.contains("hush"),
        "{err}"
    );
}

fn management() -> String {
    tierline_testbed::management_url(&std::env::var(tierline_testbed::AMQP_URL).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_with_tls_is_talked_to_if_somebody_vouches_for_it() {
    let plugins = Plugins {
        tls: true,
        ..Plugins::management()
    };
    let broker = Broker::start_with(Release::find().unwrap(), plugins);
    let broker = broker.await.unwrap();
    let url = broker.amqps_url().unwrap();
    let apply = ["apply", HOTEL, "--amqp", &url];

    let (code, _, err) = run(&apply);
    assert_eq!(code, 3, "{err}");
    assert!(err.contains("certificate"), "{err}");
    assert!(!err.contains("guest:guest"), "{err}");

    let mut trusting = tierline(&apply);
    trusting.env("SSL_CERT_FILE", broker.ca_file());
    let (code, out, err) = finished(trusting.output().unwrap());
    assert_eq!(code, 0, "{out}{err}");
    let queues = broker.rabbitmqctl(&["list_queues", "name"]).await.unwrap();
    assert!(queues.contains("hotel.critical"), "{queues}");
}
