//! `tierline serve` as an orchestrator runs and ends it.

#![cfg(test)]
#![cfg(all(unix, feature = "admin"))]

use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;

use tierline_testbed::{Database, Vhost, database, vhost};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio::time::timeout;

const HOTEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../topology/hotel.toml");
pub(crate) const TOKEN: &str = "0123456789abcdef0123456789abcdef";
/// How long a test waits for something that must happen.
const PATIENCE: Duration = Duration::from_secs(180);

/// A server in a process of its own.
pub(crate) struct Serving {
    process: Child,
    pub(crate) address: SocketAddr,
    _servers: Option<(Vhost, Database)>,
}

impl Serving {
    async fn begin(grace: &str) -> Self {
        let (vhost, database) = tokio::join!(vhost(), database());
        let serving = Self::start(HOTEL, grace, vhost.amqp_url(), database.url()).await;
        Self {
            _servers: Some((vhost, database)),
            ..serving
        }
    }

    /// The API of the app of a file.
    pub(crate) async fn of(file: &str, amqp: &str, postgres: &str) -> Self {
        Self::start(file, "1h", amqp, postgres).await
    }

    async fn start(file: &str, grace: &str, amqp: &str, postgres: &str) -> Self {
        let tierline = || {
            let mut command = Command::new(env!("CARGO_BIN_EXE_tierline"));
            command
                .env("AMQP_URL", amqp)
                .env("DATABASE_URL", postgres)
                .env("TIERLINE_ADMIN_TOKEN", TOKEN)
                .stderr(Stdio::piped())
                .kill_on_drop(true);
            command
        };
        let migrated = tierline().arg("migrate").output().await.unwrap();
        assert!(migrated.status.success());
        let serve = ["serve", file, "--listen", "127.0.0.1:0", "--grace", grace];
        let mut process = tierline().args(serve).spawn().unwrap();
        let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
        let line = timeout(PATIENCE, lines.next_line()).await.unwrap();
        let line = line.unwrap().unwrap();
        let address = line.strip_prefix("listening on http://").unwrap();
        let (address, rest) = address.split_once("/admin").unwrap();
        assert_eq!(rest, " until SIGTERM or Ctrl-C");
        // What it still has to say must not find a closed pipe.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        Self {
            process,
            address: address.parse().unwrap(),
            _servers: None,
        }
    }

    /// A request that the server has begun to answer, and whose body is not sent yet.
    async fn slow_request(&self) -> BufReader<TcpStream> {
        let mut stream = BufReader::new(TcpStream::connect(self.address).await.unwrap());
        let head = format!(
            "POST /admin/dlq/7/redrive HTTP/1.1\r\nhost: {}\r\nauthorization: Bearer {TOKEN}\r\n\
             content-length: 2\r\nexpect: 100-continue\r\nconnection: close\r\n\r\n",
            self.address
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut line = String::new();
        let reading = stream.read_line(&mut line);
        timeout(PATIENCE, reading).await.unwrap().unwrap();
        assert_eq!(line, "HTTP/1.1 100 Continue\r\n");
        stream
    }

    /// A request, and the JSON of its answer.
    pub(crate) async fn ask(&self, method: &str, path: &str, body: &str) -> serde_json::Value {
        serde_json::from_str(&self.text_of(method, path, body).await.1).unwrap()
    }

    /// A request, and the head and the text of its answer.
    async fn text_of(&self, method: &str, path: &str, body: &str) -> (String, String) {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let request = format!(
            "{method} {path} HTTP/1.0\r\nhost: {}\r\nauthorization: Bearer {TOKEN}\r\n\
             content-length: {}\r\n\r\n{body}",
            self.address,
            body.len()
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        let reading = stream.read_to_string(&mut answer);
        timeout(PATIENCE, reading).await.unwrap().unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.0 200"), "{answer}");
        (head.to_owned(), body.to_owned())
    }

    /// Ends it with a signal, and gives its exit code.
    pub(crate) async fn terminated(self) -> i32 {
        self.signal("TERM").await;
        self.end().await
    }

    async fn signal(&self, name: &str) {
        let id = self.process.id().unwrap().to_string();
        let sent = Command::new("kill").args(["-s", name, &id]).status();
        assert!(sent.await.unwrap().success());
    }

    /// Waits until nobody is let in any more.
    async fn until_closed(&self) {
        let closed = async {
            while TcpStream::connect(self.address).await.is_ok() {
                tokio::task::yield_now().await;
            }
        };
        timeout(PATIENCE, closed).await.unwrap();
    }

    /// The code that it ends with.
    async fn end(mut self) -> i32 {
        let ended = timeout(PATIENCE, self.process.wait()).await.unwrap();
        ended.unwrap().code().expect("it was killed by a signal")
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_under_way_is_answered_before_the_server_ends() {
    for name in ["TERM", "INT"] {
        // No test waits so long: it ends because the request does.
        let serving = Serving::begin("1h").await;
        let mut request = serving.slow_request().await;
        serving.signal(name).await;
        serving.until_closed().await;
        request.write_all(b"{}").await.unwrap();
        let mut answer = String::new();
        let reading = request.read_to_string(&mut answer);
        timeout(PATIENCE, reading).await.unwrap().unwrap();
        assert!(answer.contains("there is no dead letter 7"), "{answer}");
        assert_eq!(serving.end().await, 0, "SIG{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_never_ends_is_waited_for_as_long_as_the_grace_period() {
    let serving = Serving::begin("100 ms").await;
    let _request = serving.slow_request().await;
    serving.signal("TERM").await;
    assert_eq!(serving.end().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_ends_the_grace_period() {
    let serving = Serving::begin("1h").await;
    let _request = serving.slow_request().await;
    serving.signal("TERM").await;
    serving.until_closed().await;
    serving.signal("INT").await;
    assert_eq!(serving.end().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn prometheus_scrapes_what_the_server_counts() {
    let serving = Serving::begin("1h").await;
    let (head, text) = serving.text_of("GET", "/admin/metrics", "").await;
    let content_type = "content-type: application/openmetrics-text; version=1.0.0; charset=utf-8";
    assert!(head.contains(content_type), "{head}");
    assert!(text.ends_with("# EOF\n"), "{text}");
    for line in [
        "# TYPE tierline_published counter",
        "tierline_slo_seconds{tier=\"critical\"} 5.0",
        "tierline_connect_failures_total{purpose=\"publish\"} 0",
        "tierline_leader 0",
    ] {
        assert!(text.contains(line), "{line} in {text}");
    }
    assert_eq!(serving.terminated().await, 0);
}
