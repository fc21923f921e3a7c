//! Brokers that cannot be entered.

use std::error::Error as _;
use std::io;
use std::time::Duration;

use tierline::Error;
use tierline::amqp::Connection;
use tierline::error::BrokerError;
use tierline_testbed::vhost;
use tokio::io::AsyncReadExt;
use tokio::net::TcpListener;

async fn refused(url: &str) -> Error {
    Connection::open(url, "test").await.unwrap_err()
}

#[tokio::test]
async fn a_broker_that_is_not_there_is_named_without_the_password() {
    let error = refused("amqp://ada:secret@127.0.0.1:1/hotel").await;
    assert!(
        matches!(error, Error::Broker(BrokerError::Unreachable { .. })) && error.is_transient()
    );
    let shown = format!("{error} {error:?}");
    assert!(shown.contains("amqp://127.0.0.1:1/hotel"), "{shown}");
    assert!(!shown.contains("secret"), "{shown}");
}

#[tokio::test]
async fn what_the_operating_system_says_of_a_broker_that_is_not_there_is_the_source() {
    let error = refused("amqp://127.0.0.1:1").await;
    assert!(error.to_string().contains("connection refused"), "{error}");
    let source = error.source().unwrap().downcast_ref::<io::Error>().unwrap();
    assert_eq!(source.kind(), io::ErrorKind::ConnectionRefused);
    // A report of all sources has its text once.
    let report = format!("{:#}", anyhow::Error::from(error));
    assert_eq!(report.matches("os error").count(), 1, "{report}");
}

#[tokio::test]
async fn a_wrong_password_is_told_from_a_broker_that_is_down() {
    let vhost = vhost().await;
    let (_, host) = vhost.amqp_url().rsplit_once('@').unwrap();
    let error = refused(&format!("amqp://ada:secret@{host}")).await;
    assert!(
        matches!(error, Error::Broker(BrokerError::LoginRefused { .. })) && !error.is_transient()
    );
    let shown = format!("{error} {error:?}");
    assert!(
        shown.contains("\"ada\"") && !shown.contains("secret"),
        "{shown}"
    );
}

#[tokio::test]
async fn a_virtual_host_that_does_not_exist_is_named() {
    let vhost = vhost().await;
    let error = refused(&format!("{}-gone%27s", vhost.amqp_url())).await;
    assert!(
        matches!(error, Error::Broker(BrokerError::VirtualHostRefused { .. })),
        "{error}"
    );
    assert!(!error.is_transient());
    let shown = format!("{error} {error:?}");
    assert!(
        shown.contains("-gone's") && !shown.contains("guest"),
        "{shown}"
    );
}

// The clock is paused, and so jumps to the deadline as soon as all are waiting.
#[tokio::test(start_paused = true)]
async fn a_server_that_says_nothing_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let error = refused(&format!("amqp://ada:secret@127.0.0.1:{port}")).await;
    assert!(
        error.to_string().contains("no answer within 10 s"),
        "{error}"
    );
    assert!(error.is_transient());
}

#[tokio::test]
async fn an_attempt_that_is_given_up_leaves_no_connection_behind() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let url = format!("amqp://127.0.0.1:{port}");
    let opening = tokio::spawn(async move { Connection::open(&url, "test").await });
    let (mut stream, _) = listener.accept().await.unwrap();
    let mut header = [0; 8];
    stream.read_exact(&mut header).await.unwrap();
    assert_eq!(&header, b"AMQP\x00\x00\x09\x01");

    opening.abort();

    let mut rest = Vec::new();
    let ended = tokio::time::timeout(Duration::from_secs(20), stream.read_to_end(&mut rest)).await;
    assert!(ended.is_ok(), "the connection is still open");
}

#[tokio::test]
async fn a_server_that_speaks_something_else_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = tokio::spawn(async move {
        let (stream, _) = listener.accept().await.unwrap();
        let _ = stream.try_write(b"HTTP/1.1 400 Bad Request\r\n\r\n");
    });
    let error = refused(&format!("amqp://ada:secret@127.0.0.1:{port}")).await;
    assert!(
        matches!(error, Error::Broker(BrokerError::Unreachable { .. })),
        "{error}"
    );
    server.await.unwrap();
}

#[tokio::test]
async fn the_version_is_the_one_that_the_broker_reports() {
    let vhost = vhost().await;
    let connection = Connection::open(vhost.amqp_url(), "test").await.unwrap();
    let expected = tierline_testbed::Release::find().unwrap();
    let reported = connection.version().to_string();
    assert!(expected.version().starts_with(&reported), "{reported}");
    connection.close().await;
}
