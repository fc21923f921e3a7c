//! A bad network: a TCP proxy that can delay, silence, half-open and cut what goes through it.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

const CHUNK: usize = 16 * 1024;

/// What the network does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Network {
    /// Carries everything at once.
    #[default]
    Good,
    /// Carries everything, each piece this much later.
    Slow(Duration),
    /// Swallows everything and closes nothing. TCP would never go on after a gap, so a connection
    /// that lost something is reset when this ends.
    Silent,
    /// Carries what clients say, and holds back what servers answer until this ends. Nothing is lost
    /// or closed.
    HalfOpen,
    /// Resets every connection, and each new one.
    Cut,
}

/// A proxy on a port of its own before one server. Dropped, it closes everything.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    network: watch::Sender<Network>,
    server: watch::Sender<SocketAddr>,
    // Counts the resets: each connection ends when it changes.
    resets: watch::Sender<u64>,
    accepting: JoinHandle<()>,
}

impl Proxy {
    /// A proxy before the server at `port` of 127.0.0.1, which need not be up.
    pub async fn start(port: u16) -> Result<Proxy> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await;
        let listener = listener.context("could not open a port for a proxy")?;
        let address = listener.local_addr()?;
        let (network, seen) = watch::channel(Network::Good);
        let (resets, reset) = watch::channel(0);
        let (server, now) = watch::channel(SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        let accepting = tokio::spawn(accept(listener, now, seen, reset));
        Ok(Proxy {
            address,
            network,
            server,
            resets,
            accepting,
        })
    }

    /// Where clients connect to.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Makes the network so, until it is said otherwise.
    pub fn set(&self, network: Network) {
        self.network.send_replace(network);
        if network == Network::Cut {
            self.reset();
        }
    }

    /// Leads to the server at `port` of 127.0.0.1 from now on, as when an address moves to another machine.
    /// Connections that are open are reset.
    pub fn switch_to(&self, port: u16) {
        let server = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        self.server.send_replace(server);
        self.reset();
    }

    /// Resets the connections that are open, once.
    pub fn reset(&self) {
        self.resets.send_modify(|count| *count += 1);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        // Its connections are tasks of this one, and end with it.
        self.accepting.abort();
    }
}

async fn accept(
    listener: TcpListener,
    server: watch::Receiver<SocketAddr>,
    network: watch::Receiver<Network>,
    reset: watch::Receiver<u64>,
) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((client, _)) = accepted else { continue };
                let (network, mut reset) = (network.clone(), reset.clone());
                // Only resets from now on are meant for this connection.
                reset.mark_unchanged();
                connections.spawn(connect(client, server.clone(), network, reset));
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn connect(
    mut client: TcpStream,
    server: watch::Receiver<SocketAddr>,
    mut network: watch::Receiver<Network>,
    mut reset: watch::Receiver<u64>,
) {
    // With this a dropped socket says RST, as a host that knows nothing of a connection does.
    let _ = client.set_zero_linger();
    let now = *network.borrow_and_update();
    if now == Network::Cut {
        return;
    }
    if matches!(now, Network::Silent | Network::HalfOpen) {
        // The handshake is not answered either; a kernel would not have accepted the client.
        let ended = network.wait_for(|now| !matches!(now, Network::Silent | Network::HalfOpen));
        let is_cut = tokio::select! {
            now = ended => now.is_ok_and(|now| *now == Network::Cut),
            _ = reset.changed() => true,
        };
        if is_cut {
            return;
        }
    }
    let address = *server.borrow();
    let Ok(mut upstream) = TcpStream::connect(address).await else {
        return;
    };
    let _ = upstream.set_zero_linger();
    let _ = (client.set_nodelay(true), upstream.set_nodelay(true));
    // Borrowed halves: owned ones would say FIN before the RST.
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = upstream.split();
    let up = carry(from_client, to_server, network.clone(), Direction::Up);
    let down = carry(from_server, to_client, network, Direction::Down);
    tokio::select! {
        _ = up => {}
        _ = down => {}
        _ = reset.changed() => {}
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Direction {
    Up,
    Down,
}

/// Carries bytes until one side closes, or until a gap would show.
async fn carry(
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    mut network: watch::Receiver<Network>,
    direction: Direction,
) -> std::io::Result<()> {
    let mut chunk = vec![0; CHUNK];
    loop {
        let read = from.read(&mut chunk).await?;
        if read == 0 {
            return still(network).await;
        }
        let now = *network.borrow_and_update();
        match now {
            Network::Good | Network::Cut => {}
            Network::Slow(delay) => tokio::time::sleep(delay).await,
            Network::Silent => return swallow(from, network).await,
            Network::HalfOpen if direction == Direction::Up => {}
            Network::HalfOpen => {
                let _ = network.wait_for(|now| *now != Network::HalfOpen).await;
            }
        }
        to.write_all(&chunk[..read]).await?;
    }
}

/// The end of a stream, which the other side learns only through a network that carries it.
async fn still(mut network: watch::Receiver<Network>) -> std::io::Result<()> {
    let carries = |now: &Network| !matches!(now, Network::Silent | Network::HalfOpen);
    let _ = network.wait_for(carries).await;
    Ok(())
}

async fn swallow(
    mut from: ReadHalf<'_>,
    mut network: watch::Receiver<Network>,
) -> std::io::Result<()> {
    let mut chunk = vec![0; CHUNK];
    loop {
        let read = tokio::select! {
            read = from.read(&mut chunk) => read?,
            _ = network.wait_for(|now| *now != Network::Silent) => return Ok(()),
        };
        if read == 0 {
            return still(network).await;
        }
    }
}
