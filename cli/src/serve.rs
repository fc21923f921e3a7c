//! `tierline serve`: the admin API alone.

use std::future::{Future, IntoFuture};
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use serde_json::json;
use tierline::Topology;
use tierline::admin::{Token, router};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::arguments::{Log, MapBroker, read_duration};
use crate::connect::builder;
use crate::output::{Failure, Output};
use crate::secret::Secret;

pub(crate) async fn run(
    log: &Log,
    broker: &MapBroker,
    token: &Secret,
    listen: SocketAddr,
    grace: &str,
) -> Result<Output, Failure> {
    let grace = read_duration("--grace", grace)?;
    let token = Token::new(token.expose())?;
    let topology = Topology::load(&log.input.file)?;
    let app = builder(topology, broker, &log.database)?
        .connection_name("tierline serve")
        .metrics()
        .connect()
        .await?;
    let admin = Router::new().nest("/admin", router(&app, token)?);
    let failed = |error: io::Error| {
        Failure::Misused(format!(
            "cannot listen on {listen}: {error}; choose another --listen"
        ))
    };
    let listener = TcpListener::bind(listen).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let signals =
        ShutdownSignals::listen().map_err(|cause| tierline::Error::NoSignals { cause })?;
    eprintln!("listening on http://{address}/admin until SIGTERM or Ctrl-C");
    let serving = axum::serve(listener, admin).with_graceful_shutdown(signals.received(1));
    tokio::select! {
        served = serving.into_future() => served.map_err(failed)?,
        () = signals.grace_over(grace) => eprintln!("ended before all requests were answered"),
    }
    Ok(Output::well("ended".to_owned(), json!({ "ended": true })))
}

/// Counts shutdown signals.
struct ShutdownSignals(watch::Receiver<u32>);

impl ShutdownSignals {
    /// Handles signals from now on, so that they no longer kill the process.
    fn listen() -> io::Result<Self> {
        let (sender, receiver) = watch::channel(0);
        let mut signals = Signals::new()?;
        tokio::spawn(async move {
            loop {
                signals.next().await;
                sender.send_modify(|times| *times += 1);
            }
        });
        Ok(Self(receiver))
    }

    /// Completes after this many signals.
    fn received(&self, wanted: u32) -> impl Future<Output = ()> + Send + use<> {
        let mut count = self.0.clone();
        async move {
            // The sender exists as long as the process.
            let _ = count.wait_for(|times| *times >= wanted).await;
        }
    }

    /// Completes when open requests have had their time: `grace` after the first signal, or at the
    /// second.
    async fn grace_over(&self, grace: Duration) {
        self.received(1).await;
        let _ = timeout(grace, self.received(2)).await;
    }
}

/// The signals that request a shutdown.
#[cfg(unix)]
struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    fn new() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};

        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self)
    }

    async fn next(&mut self) {
        // Without signal handling, only a kill ends the process.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
