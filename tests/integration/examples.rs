//! Every example, run as its first line says, on a broker and a database of its own.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tierline_testbed::{Database, Vhost};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::TcpStream;
use tokio::process::{Child, ChildStdout, Command};
use tokio::time::timeout;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples");
/// How long a test waits for something that must happen.
const PATIENCE: Duration = Duration::from_secs(120);

/// Those that are run here. `testing` is a test itself, which `cargo test` runs.
const RUN_HERE: [&str; 13] = [
    "delayed",
    "hello",
    "middleware",
    "one_process",
    "outbox",
    "postgres",
    "redrive",
    "retries",
    "schedule",
    "shutdown",
    "tiers",
    "traces",
    "web",
];

#[test]
fn every_example_begins_with_its_command_and_is_run_here() {
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir(FOLDER).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let verb = if name == "testing" { "test" } else { "run" };
        let text = std::fs::read_to_string(&path).unwrap();
        let command = format!("//! `cargo {verb} --example {name}`: ");
        assert!(text.starts_with(&command), "{name} has no {command:?}");
        found.insert(name);
    }
    let expected: BTreeSet<_> = RUN_HERE.into_iter().chain(["testing"]).collect();
    assert!(found.iter().eq(&expected), "{found:?}");
    let list = std::fs::read_to_string(Path::new(FOLDER).join("README.md")).unwrap();
    let unlisted: Vec<_> = found
        .iter()
        .filter(|name| !list.contains(&format!("--example {name}`")))
        .collect();
    assert!(
        unlisted.is_empty(),
        "not in examples/README.md: {unlisted:?}"
    );
}

#[tokio::test]
async fn hello_greets() {
    let place = Place::new().await;
    assert_eq!(
        place.run("hello").await,
        ["the broker has it, in the tier default", "Hello, world!"]
    );
}

#[cfg(feature = "otel")]
#[tokio::test(flavor = "multi_thread")]
async fn traces_sends_its_spans_to_a_collector() {
    let place = Place::new().await;
    let collector = crate::traces::Collector::receive().await;
    let mut command = place.command("traces");
    command.env("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url());
    let lines = Example::start(&mut command).end().await;
    let trace = lines.iter().find_map(|line| line.strip_prefix("trace "));
    let trace = u128::from_str_radix(trace.unwrap(), 16)
        .unwrap()
        .to_be_bytes();
    let sent = lines.contains(&"the mail about order 7 is sent".to_owned());
    assert!(sent, "{lines:?}");
    let mut names = collector.names(&trace);
    names.sort_unstable();
    assert_eq!(
        names,
        [
            "POST /orders",
            "ack mail",
            "ack orders",
            "process mail",
            "process mail",
            "process orders",
            "publish mail",
            "publish orders",
            "retry mail",
        ]
    );
}

#[tokio::test]
async fn an_example_without_a_broker_says_what_is_missing() {
    // Nobody listens on the port that is reserved for nobody.
    let mut command = command("hello");
    let output = command.env("AMQP_URL", "amqp://127.0.0.1:1").output();
    let output = timeout(PATIENCE, output).await.unwrap().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(error.contains("is the broker running"), "{error}");
}

#[tokio::test]
async fn tiers_let_a_password_overtake_exports() {
    let place = Place::new().await;
    assert_eq!(
        place.run("tiers").await,
        [
            "bulk: export 1",
            "critical: a password for +39 055 0000",
            "bulk: export 2",
            "bulk: export 3",
            "bulk: export 4",
        ]
    );
}

#[tokio::test]
async fn retries_succeed_or_end_as_a_dead_letter() {
    let place = Place::new().await;
    let lines = place.run("retries").await;
    let (dead, retried): (Vec<_>, Vec<_>) = lines
        .iter()
        .partition(|line| line.starts_with("dead letter"));
    assert_eq!(
        retried,
        [
            "attempt 1 failed, to be retried: the bank does not answer",
            "attempt 2 failed, to be retried: the bank does not answer",
            "charged in attempt 3",
        ]
    );
    assert_eq!(dead.len(), 1);
    assert!(dead[0].ends_with("there is no card number"), "{dead:?}");
}

#[tokio::test]
async fn middleware_checks_permissions_and_limits_handlers() {
    let place = Place::new().await;
    let lines = place.run("middleware").await;
    let expected = [
        "invoice 1007 is deleted",
        "invoice.delete for ada: Done",
        "invoice.delete for bob: Dead(",
        r#"report.export for ada: Discard("longer than 200 ms")"#,
    ];
    assert_eq!(lines.len(), expected.len(), "{lines:?}");
    for (line, expected) in lines.iter().zip(expected) {
        assert!(line.starts_with(expected), "{lines:?}");
    }
}

#[tokio::test]
async fn redrive_brings_a_dead_letter_back() {
    let place = Place::with_database().await;
    let lines = place.run("redrive").await;
    assert_eq!(lines.len(), 2, "{lines:?}");
    assert!(
        lines[0].starts_with("1 dead: connection refused"),
        "{lines:?}"
    );
    assert_eq!(lines[1], "invoice 7 is sent");
}

#[tokio::test]
async fn an_app_in_postgres_alone_looks_through_its_tasks_and_runs_them() {
    let database = tierline_testbed::database().await;
    let mut command = command("postgres");
    command.env("DATABASE_URL", database.url());
    command.env_remove("AMQP_URL");
    assert_eq!(
        Example::start(&mut command).end().await,
        [
            "Postgres has it, in the tier reports",
            "report.write is scheduled",
            "1 cancelled",
            "the report of 2025 is written",
        ]
    );
}

#[tokio::test]
async fn delayed_tasks_come_in_the_order_in_which_they_are_due() {
    let place = Place::new().await;
    let lines = place.run("delayed").await;
    let (late, reminders): (Vec<_>, Vec<_>) =
        lines.iter().partition(|line| line.contains("too late"));
    let begins = |line: &&String| line.split(" (").next().unwrap().to_owned();
    let order: Vec<_> = reminders.iter().map(begins).collect();
    assert_eq!(order, ["welcome", "breakfast", "check out"]);
    assert_eq!(late, ["guest.remind late came too late and was skipped"]);
}

#[tokio::test]
async fn a_schedule_comes_due_again_and_again() {
    let place = Place::with_database().await;
    let lines = place.run("schedule").await;
    assert!(lines.len() >= 3, "{lines:?}");
    let distinct: BTreeSet<_> = lines.iter().collect();
    assert_eq!(
        distinct.len(),
        lines.len(),
        "each run has a time of its own"
    );
    for line in lines {
        assert!(
            line.starts_with("counting the free rooms of floor 2, due at 2"),
            "{line}"
        );
    }
}

#[tokio::test]
async fn a_shutdown_finishes_what_runs_and_gives_back_the_rest() {
    let place = Place::new().await;
    let mut example = place.start("shutdown");
    example.until("page 1 begins").await;
    example.terminate().await;
    let rest = example.end().await;
    assert_eq!(rest[0], "page 1 is done");
    assert!(rest[1].starts_with("bye"), "{rest:?}");
    assert_eq!(rest.len(), 2, "{rest:?}");
    assert_eq!(place.vhost.depth("shutdown.default").await.unwrap(), 3);
}

#[tokio::test]
async fn a_web_app_publishes_works_and_answers_what_it_took_before_it_ends() {
    let place = Place::new().await;
    let mut example = place.start("web");
    let address = example.until("listening on http://").await;
    let answer = post(&address, "/orders", r#"{"order": 7}"#).await;
    assert!(answer.starts_with("HTTP/1.1 202"), "{answer}");
    example.until("the receipt of order 7 is sent").await;

    // A request that the app has begun to answer, and whose body comes after the signal.
    let body = r#"{"order": 8}"#;
    let mut slow = BufReader::new(TcpStream::connect(&address).await.unwrap());
    let head = head(&address, "/orders", body.len()) + "expect: 100-continue\r\n\r\n";
    slow.write_all(head.as_bytes()).await.unwrap();
    let mut line = String::new();
    let reading = slow.read_line(&mut line);
    timeout(PATIENCE, reading).await.unwrap().unwrap();
    assert_eq!(line, "HTTP/1.1 100 Continue\r\n");
    example.terminate().await;
    let closed = async { while TcpStream::connect(&address).await.is_ok() {} };
    timeout(PATIENCE, closed).await.unwrap();
    slow.write_all(body.as_bytes()).await.unwrap();
    let mut answer = String::new();
    let reading = slow.read_to_string(&mut answer);
    timeout(PATIENCE, reading).await.unwrap().unwrap();
    assert!(answer.contains("HTTP/1.1 202"), "{answer}");
    let rest = example.end().await;
    assert_eq!(rest, ["bye: every request that was taken is answered"]);
    // The worker had begun to end: the next one takes it.
    assert_eq!(place.vhost.depth("web.default").await.unwrap(), 1);
}

#[tokio::test]
async fn one_process_works_collects_schedules_and_ends_by_one_signal() {
    let place = Place::with_database().await;
    let mut example = place.start("one_process");
    let mut awaited = vec![
        "long: the export begins",
        "collected: 1 into the log",
        "scheduled: the free rooms",
    ];
    while !awaited.is_empty() {
        let line = example.until("").await;
        awaited.retain(|wanted| !line.starts_with(wanted));
    }
    example.terminate().await;
    let rest = example.end().await;
    assert!(
        rest.iter().any(|line| line.contains("gives way")),
        "{rest:?}"
    );
    assert_eq!(rest.last().unwrap(), "bye: all three have ended");
    let waiting = place.vhost.depth("one_process.default").await.unwrap();
    assert!(waiting >= 1, "the export goes on in the next process");
}

#[tokio::test]
async fn an_order_whose_process_dies_after_the_commit_has_its_receipt_and_no_other_has() {
    let place = Place::with_database().await;
    // No worker runs: the process is killed between the commit and the start.
    let mut command = place.command("outbox");
    let mut example = Example::start(command.env("WORK", "no"));
    let address = example.until("listening on http://").await;
    let stored = post(&address, "/orders", r#"{"guest": "Ada"}"#).await;
    assert!(stored.starts_with("HTTP/1.1 201"), "{stored}");
    let refused = post(&address, "/orders", r#"{"guest": ""}"#).await;
    assert!(refused.starts_with("HTTP/1.1 422"), "{refused}");
    example.process.kill().await.unwrap();

    let mut example = place.start("outbox");
    let address = example.until("listening on http://").await;
    example.until("the receipt of order 1 is sent").await;
    let stored = post(&address, "/orders", r#"{"guest": "Bob"}"#).await;
    assert!(stored.ends_with("order 3"), "{stored}");
    // That of order 2 was published before it.
    let next = example.until("the receipt of order ").await;
    assert_eq!(next, "3 is sent");
    example.process.kill().await.unwrap();
}

/// The corner of the broker, and perhaps the database, that an example is given.
struct Place {
    vhost: Vhost,
    database: Option<Database>,
}

impl Place {
    async fn new() -> Self {
        Self {
            vhost: tierline_testbed::vhost().await,
            database: None,
        }
    }

    async fn with_database() -> Self {
        Self {
            database: Some(tierline_testbed::database().await),
            ..Self::new().await
        }
    }

    /// The lines that an example prints until it has ended well.
    async fn run(&self, name: &str) -> Vec<String> {
        self.start(name).end().await
    }

    fn start(&self, name: &str) -> Example {
        Example::start(&mut self.command(name))
    }

    fn command(&self, name: &str) -> Command {
        let mut command = command(name);
        command.env("AMQP_URL", self.vhost.amqp_url());
        if let Some(database) = &self.database {
            command.env("DATABASE_URL", database.url());
        }
        command
    }
}

/// An example that runs.
struct Example {
    process: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Example {
    fn start(command: &mut Command) -> Self {
        let mut process = command
            .env("LISTEN", "127.0.0.1:0")
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        Example { process, lines }
    }

    /// Reads up to the line that begins like this, and gives the rest of it.
    async fn until(&mut self, beginning: &str) -> String {
        let reading = async {
            while let Some(line) = self.lines.next_line().await.unwrap() {
                if let Some(rest) = line.strip_prefix(beginning) {
                    return rest.to_owned();
                }
            }
            panic!("it ended without {beginning:?}")
        };
        timeout(PATIENCE, reading).await.unwrap()
    }

    async fn terminate(&self) {
        let id = self.process.id().unwrap().to_string();
        let asked = Command::new("kill").args(["-TERM", &id]).status();
        assert!(asked.await.unwrap().success());
    }

    /// The lines that are left, once it has ended well.
    async fn end(mut self) -> Vec<String> {
        let ending = async {
            let mut lines = Vec::new();
            while let Some(line) = self.lines.next_line().await.unwrap() {
                lines.push(line);
            }
            let status = self.process.wait().await.unwrap();
            assert!(status.success(), "{status}: {lines:#?}");
            lines
        };
        timeout(PATIENCE, ending).await.unwrap()
    }
}

fn command(name: &str) -> Command {
    Command::new(program(name))
}

/// Where cargo puts the examples: beside the folder that this test is in.
fn program(name: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let profile = test.parent().and_then(Path::parent).unwrap();
    let program = profile.join("examples").join(name);
    assert!(
        program.exists(),
        "{} is not built: run `cargo build --examples`, or all tests",
        program.display()
    );
    program
}

fn head(address: &str, path: &str, length: usize) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: {address}\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\nconnection: close\r\n"
    )
}

async fn post(address: &str, path: &str, json: &str) -> String {
    let talking = async {
        let mut stream = TcpStream::connect(address).await?;
        let request = format!("{}\r\n{json}", head(address, path, json.len()));
        stream.write_all(request.as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        std::io::Result::Ok(answer)
    };
    timeout(PATIENCE, talking).await.unwrap().unwrap()
}
