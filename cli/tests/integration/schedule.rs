//! `tierline schedule` as an operator would use it.

#![cfg(test)]

use std::process::{Command, Stdio};

use serde_json::Value;
use tierline::{Tierline, Topology};
use tierline_testbed::{Database, Vhost, database, depth, vhost};

const MAP: &str = r#"
app = "shop"
[tiers.normal]
queue = "quorum"
[groups.all]
tiers = ["normal"]
concurrency = 1
[tasks]
"report.build" = "normal"
[schedules.nightly]
task = "report.build"
cron = "30 2 * * *"
timezone = "Asia/Tokyo"
expires = "4h"
[schedules.hourly]
task = "report.build"
every = "1h"
expires = "10m"
"#;

/// The file of an app, and the servers it runs on.
struct Shop {
    vhost: Vhost,
    database: Database,
    file: String,
}

impl Shop {
    /// As after the first start of a scheduler.
    async fn new(name: &str) -> Self {
        let (vhost, database) = tokio::join!(vhost(), database());
        let file = format!("tierline-{name}-{}.toml", std::process::id());
        let file = std::env::temp_dir().join(file).to_str().unwrap().to_owned();
        std::fs::write(&file, MAP).unwrap();
        let shop = Self {
            vhost,
            database,
            file,
        };
        let app = Tierline::builder(Topology::parse(MAP).unwrap())
            .amqp(shop.vhost.amqp_url())
            .postgres(shop.database.url());
        let app = app.connect().await.unwrap();
        app.database().unwrap().migrate().await.unwrap();
        let schedules = app.schedules().unwrap();
        let declared = async {
            while schedules.list().await.unwrap().len() < 2 {
                tokio::task::yield_now().await;
            }
        };
        app.scheduler().unwrap().until(declared).await.unwrap();
        shop
    }

    fn tierline(&self, arguments: &[&str]) -> (i32, String, String) {
        let mut command = command(arguments);
        command
            .env("AMQP_URL", self.vhost.amqp_url())
            .env("DATABASE_URL", self.database.url());
        finished(command)
    }

    /// A subcommand for the schedule `nightly`, by Ada, with its JSON.
    fn nightly(&self, subcommand: &str) -> Value {
        let arguments = [subcommand, &self.file, "nightly", "--by", "ada", "--json"];
        let (code, out, err) = self.tierline(&arguments);
        assert_eq!(code, 0, "{err}");
        serde_json::from_str(&out).unwrap()
    }
}

impl Drop for Shop {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.file);
    }
}

fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tierline"));
    command
        .arg("schedule")
        .args(arguments)
        .env_remove("AMQP_URL")
        .env_remove("DATABASE_URL")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn finished(mut command: Command) -> (i32, String, String) {
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let code = output.status.code().unwrap();
    (code, text(output.stdout), text(output.stderr))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_lists_pauses_resumes_and_runs_schedules() {
    let shop = Shop::new("operator").await;
    let (code, out, err) = shop.tierline(&["list", &shop.file]);
    assert_eq!(code, 0, "{err}");
    let lines: Vec<&str> = out.lines().collect();
    assert!(lines[0].starts_with("SCHEDULE  TASK"), "{out}");
    assert!(lines[1].starts_with("hourly    report.build"), "{out}");
    assert!(lines[2].ends_with("30 2 * * * (Asia/Tokyo)"), "{out}");

    assert_eq!(shop.nightly("pause")["paused"]["by"], "ada");
    let (_, out, _) = shop.tierline(&["list", &shop.file]);
    assert!(out.contains("paused by ada"), "{out}");
    let resumed = shop.nightly("resume");
    assert_eq!(resumed["paused"], Value::Null);
    assert!(
        resumed["next_due"]
            .as_str()
            .unwrap()
            .ends_with("T17:30:00Z")
    );

    let run = shop.nightly("run");
    assert_eq!(
        (&run["schedule"], &run["tier"]),
        (&"nightly".into(), &"normal".into())
    );
    assert_eq!(
        depth(shop.vhost.amqp_url(), "shop.normal").await.unwrap(),
        1
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_runs_are_shown_on_the_clock_of_their_time_zone() {
    let shop = Shop::new("next").await;
    let nightly = ["next", &shop.file, "nightly", "--count", "3"];
    for (code, out, err) in [shop.tierline(&nightly), finished(command(&nightly))] {
        assert_eq!(code, 0, "{err}");
        let runs: Vec<&str> = out.lines().skip(1).collect();
        assert_eq!(runs.len(), 3, "{out}");
        assert!(
            runs.iter().all(|run| run.contains("T02:30:00+09:00")),
            "{out}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schedule_that_is_not_there_is_a_near_miss() {
    let shop = Shop::new("near-miss").await;
    let next = ["next", &shop.file, "nigthly"];
    for (code, _, err) in [
        shop.tierline(&["pause", &shop.file, "nigthly"]),
        shop.tierline(&next),
        finished(command(&next)),
    ] {
        assert_eq!(code, 4);
        assert_eq!(
            err,
            "there is no schedule \"nigthly\"; did you mean \"nightly\"?\n"
        );
    }
}
