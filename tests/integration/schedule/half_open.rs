//! A database that falls silent without closing a connection.

use std::net::SocketAddr;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::{App, World, map};

const EVERY_SECOND: &str = r#"
    [schedules.tick]
    task = "sync.pull"
    cron = "* * * * * *"
    expires = "1m"
"#;

/// A way to a server that can be frozen: what is sent arrives nowhere, and nothing is closed.
struct Way {
    address: SocketAddr,
    frozen: watch::Sender<bool>,
}

impl Way {
    async fn to(server: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (frozen, is_frozen) = watch::channel(false);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect(&server).await.unwrap();
                let (client_reads, client_writes) = client.into_split();
                let (server_reads, server_writes) = server.into_split();
                tokio::spawn(carry(client_reads, server_writes, is_frozen.clone()));
                tokio::spawn(carry(server_reads, client_writes, is_frozen.clone()));
            }
        });
        Self { address, frozen }
    }
}

async fn carry(
    mut from: impl AsyncRead + Unpin,
    mut to: impl AsyncWrite + Unpin,
    mut is_frozen: watch::Receiver<bool>,
) {
    let mut buffer = vec![0; 8 << 10];
    while let Ok(length @ 1..) = from.read(&mut buffer).await {
        let _ = is_frozen.wait_for(|frozen| !frozen).await;
        if to.write_all(&buffer[..length]).await.is_err() {
            return;
        }
    }
}

#[tokio::test]
async fn a_leader_that_the_database_no_longer_hears_is_replaced_and_knows_it() {
    let world = World::new().await;
    let url = world.database.url();
    let (user, rest) = url.split_once('@').unwrap();
    let (server, name) = rest.split_once('/').unwrap();
    let way = Way::to(server.to_owned()).await;
    let through = format!("{user}@{}/{name}", way.address);

    let amqp = world.vhost.amqp_url();
    let mut first = App::connect(map(EVERY_SECOND), amqp, &through).await;
    let mut second = App::connect(map(EVERY_SECOND), amqp, url).await;
    let first_running = first.start();
    first.leads(true).await;
    let second_running = second.start();
    first.hears_published().await;

    way.frozen.send_replace(true);
    first.leads(false).await;
    second.leads(true).await;
    let (_, id) = second.hears_published().await;
    assert!(id.starts_with("schedule:tick:"), "{id}");

    way.frozen.send_replace(false);
    second.hears_published().await;
    let beside: Vec<_> = first.heard_so_far();
    assert_eq!(beside, [], "the first stands by");
    second_running.stop().await;
    first.leads(true).await;
    first_running.stop().await;
}
