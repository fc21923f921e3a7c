//! What the proxy does to a conversation, seen from both of its ends.

#![allow(clippy::unwrap_used, reason = "a test may panic")]
use std::io::ErrorKind;
use std::time::{Duration, Instant};

use tierline_testbed::{Network, Proxy};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

/// Long enough to see that something does not come.
const MOMENT: Duration = Duration::from_millis(200);
const LIMIT: Duration = Duration::from_secs(30);

/// A client and a server with a proxy between them.
struct Line {
    proxy: Proxy,
    listener: TcpListener,
    client: TcpStream,
    server: TcpStream,
}

impl Line {
    async fn open() -> Line {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = Proxy::start(listener.local_addr().unwrap().port())
            .await
            .unwrap();
        let client = connect(&proxy).await;
        let (server, _) = timeout(LIMIT, listener.accept()).await.unwrap().unwrap();
        Line {
            proxy,
            listener,
            client,
            server,
        }
    }
}

async fn connect(proxy: &Proxy) -> TcpStream {
    TcpStream::connect(("127.0.0.1", proxy.port()))
        .await
        .unwrap()
}

async fn hears(stream: &mut TcpStream, expected: &[u8]) {
    let mut heard = vec![0; expected.len()];
    let reading = stream.read_exact(&mut heard);
    timeout(LIMIT, reading).await.unwrap().unwrap();
    assert_eq!(heard, expected);
}

async fn hears_nothing(stream: &mut TcpStream) {
    let heard = timeout(MOMENT, stream.read_u8()).await;
    assert!(heard.is_err(), "{heard:?}");
}

async fn is_reset(stream: &mut TcpStream) {
    let end = timeout(LIMIT, stream.read_u8()).await.unwrap();
    assert_eq!(end.unwrap_err().kind(), ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn a_good_network_carries_both_ways() {
    let mut line = Line::open().await;
    line.client.write_all(b"question").await.unwrap();
    hears(&mut line.server, b"question").await;
    line.server.write_all(b"answer").await.unwrap();
    hears(&mut line.client, b"answer").await;
}

#[tokio::test]
async fn a_slow_network_carries_everything_later() {
    let mut line = Line::open().await;
    line.proxy.set(Network::Slow(MOMENT));
    let begin = Instant::now();
    line.client.write_all(b"question").await.unwrap();
    hears(&mut line.server, b"question").await;
    assert!(begin.elapsed() >= MOMENT);
}

#[tokio::test]
async fn a_silent_network_swallows_both_ways_and_resets_what_lost_something() {
    let mut line = Line::open().await;
    line.proxy.set(Network::Silent);
    line.client.write_all(b"question").await.unwrap();
    line.server.write_all(b"answer").await.unwrap();
    hears_nothing(&mut line.server).await;
    hears_nothing(&mut line.client).await;
    line.proxy.set(Network::Good);
    is_reset(&mut line.client).await;
    is_reset(&mut line.server).await;
}

#[tokio::test]
async fn a_half_open_network_holds_the_answers_back_and_loses_none() {
    let mut line = Line::open().await;
    line.proxy.set(Network::HalfOpen);
    line.client.write_all(b"question").await.unwrap();
    hears(&mut line.server, b"question").await;
    line.server.write_all(b"answer").await.unwrap();
    hears_nothing(&mut line.client).await;
    line.proxy.set(Network::Good);
    hears(&mut line.client, b"answer").await;
}

#[tokio::test]
async fn a_cut_network_resets_old_and_new_connections_and_a_good_one_takes_new_ones() {
    let mut line = Line::open().await;
    line.proxy.set(Network::Cut);
    is_reset(&mut line.client).await;
    is_reset(&mut line.server).await;
    let mut refused = connect(&line.proxy).await;
    is_reset(&mut refused).await;

    line.proxy.set(Network::Good);
    let mut client = connect(&line.proxy).await;
    let accepted = timeout(LIMIT, line.listener.accept()).await;
    let (mut server, _) = accepted.unwrap().unwrap();
    client.write_all(b"again").await.unwrap();
    hears(&mut server, b"again").await;
}
