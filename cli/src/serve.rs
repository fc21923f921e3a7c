//! `tierline serve`: the admin API alone.

use std::future::{Future, IntoFuture};
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use serde_json::json;
use tierline::admin::{Token, router};
use tierline::task::IntoDuration;
use tierline::{OnConnect, Tierline, Topology};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::arguments::{Broker, Log};
use crate::output::{Failure, Output};
use crate::secret::Secret;

pub(crate) async fn run(
    log: &Log,
    broker: &Broker,
    token: &Secret,
    listen: SocketAddr,
    grace: &str,
) -> Result<Output, Failure> {
    let grace = grace.into_duration()?;
    let token = Token::new(token.expose())?;
    let topology = Topology::load(&log.input.file)?;
    // Whoever deploys changes the broker: a server of pages does not.
    let connecting = Tierline::builder(topology)
        .amqp(broker.amqp.expose())
        .postgres(log.database.postgres.expose())
        .connection_name("tierline serve")
        .on_connect(OnConnect::Nothing)
        .connect();
    let app = connecting.await?;
    let admin = Router::new().nest("/admin", router(app.dead_letters()?, token));
    let failed = |error: io::Error| {
        Failure::Misused(format!(
            "cannot listen on {listen}: {error}; choose another --listen"
        ))
    };
    let listener = TcpListener::bind(listen).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let asked = Asked::listen().map_err(|cause| tierline::Error::NoSignals { cause })?;
    eprintln!("listening on http://{address}/admin until SIGTERM or Ctrl-C");
    let serving = axum::serve(listener, admin).with_graceful_shutdown(asked.times(1));
    tokio::select! {
        served = serving.into_future() => served.map_err(failed)?,
        () = asked.patience(grace) => eprintln!("ended with requests under way"),
    }
    Ok(Output::well("ended".to_owned(), json!({ "ended": true })))
}

/// How often the process was asked to end.
struct Asked(watch::Receiver<u32>);

impl Asked {
    /// Listens from now on: a signal that comes later does not kill the process any more.
    fn listen() -> io::Result<Self> {
        let (tell, asked) = watch::channel(0);
        let mut signals = Signals::new()?;
        tokio::spawn(async move {
            loop {
                signals.next().await;
                tell.send_modify(|times| *times += 1);
            }
        });
        Ok(Self(asked))
    }

    /// Completes when the process was asked so often.
    fn times(&self, wanted: u32) -> impl Future<Output = ()> + Send + use<> {
        let mut asked = self.0.clone();
        async move {
            // Who tells lives as long as the process does.
            let _ = asked.wait_for(|times| *times >= wanted).await;
        }
    }

    /// Completes when requests under way have had their time: so long after the first signal, or at the
    /// second.
    async fn patience(&self, grace: Duration) {
        self.times(1).await;
        let _ = timeout(grace, self.times(2)).await;
    }
}

/// What asks a process to end.
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
        // Without a signal to listen to, it ends when it is killed.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}
