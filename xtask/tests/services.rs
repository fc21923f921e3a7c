//! Whatever ends the command, its servers end too.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// `cargo xtask services`, once it has printed its URLs.
struct Services {
    child: Child,
    ports: Vec<u16>,
}

impl Services {
    fn start() -> Services {
        let mut child = Command::new(env!("CARGO_BIN_EXE_xtask"))
            .arg("services")
            .env_remove("AMQP_URL")
            .env_remove("DATABASE_URL")
            .env_remove("MANAGEMENT_URL")
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let printed = BufReader::new(child.stdout.take().unwrap());
        let ports = printed
            .lines()
            .take(3)
            .map(|line| port_of(&line.unwrap()))
            .collect();
        Services { child, ports }
    }

    fn end(&mut self, signal: &str) -> Option<i32> {
        let id = self.child.id().to_string();
        assert!(
            Command::new("kill")
                .args([signal, &id])
                .status()
                .unwrap()
                .success()
        );
        self.child.wait().unwrap().code()
    }

    fn until_nothing_is_left(&self) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !processes_of(self.child.id()).is_empty() {
            let left = processes_of(self.child.id());
            assert!(Instant::now() < deadline, "{left:?}");
            std::thread::yield_now();
        }
    }

    fn answering(&self) -> Vec<u16> {
        let answers = |port: &&u16| TcpStream::connect(("127.0.0.1", **port)).is_ok();
        self.ports.iter().filter(answers).copied().collect()
    }
}

#[test]
fn ctrl_c_ends_the_servers_before_the_command_returns() {
    let mut services = Services::start();
    assert_eq!(services.answering().len(), 3, "{:?}", services.ports);

    assert_eq!(services.end("-INT"), Some(130));

    assert_eq!(services.answering(), []);
    let left = processes_of(services.child.id());
    // The shell that outlives the command may still remove the folders.
    assert!(left.iter().all(|it| it.starts_with("rm\0")), "{left:?}");
    services.until_nothing_is_left();
}

#[test]
fn even_a_killed_command_leaves_no_server_behind() {
    let mut services = Services::start();

    assert_eq!(services.end("-KILL"), None);

    // Nothing is left in the command itself that could wait for them.
    services.until_nothing_is_left();
    assert_eq!(services.answering(), []);
}

fn port_of(line: &str) -> u16 {
    let (_, address) = line.rsplit_once("127.0.0.1:").unwrap();
    address.split('/').next().unwrap().parse().unwrap()
}

/// The processes that work in a folder of the process `owner`: its number is part of their names.
fn processes_of(owner: u32) -> Vec<String> {
    let marks = [format!("/rabbitmq-{owner}-"), format!("/postgres-{owner}-")];
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let mut text = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        text.extend(fs::read(entry.path().join("environ")).unwrap_or_default());
        let text = String::from_utf8_lossy(&text).into_owned();
        if marks.iter().any(|mark| text.contains(mark)) {
            found.push(text.chars().take(80).collect());
        }
    }
    found
}
