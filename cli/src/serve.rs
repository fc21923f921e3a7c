//! `tierline serve`: the admin API alone.

use std::net::SocketAddr;

use axum::Router;
use serde_json::json;
use tierline::admin::{Token, router};
use tierline::{OnConnect, Tierline, Topology};
use tokio::net::TcpListener;

use crate::arguments::{Broker, Log};
use crate::output::{Failure, Output};
use crate::secret::Secret;

pub(crate) async fn run(
    log: &Log,
    broker: &Broker,
    token: &Secret,
    listen: SocketAddr,
) -> Result<Output, Failure> {
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
    let failed = |error: std::io::Error| {
        Failure::Misused(format!(
            "cannot listen on {listen}: {error}; choose another --listen"
        ))
    };
    let listener = TcpListener::bind(listen).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    eprintln!("listening on http://{address}/admin until Ctrl-C");
    let ended = async {
        // Without a signal to listen to, it ends when it is killed.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    let serving = axum::serve(listener, admin).with_graceful_shutdown(ended);
    serving.await.map_err(failed)?;
    Ok(Output::well("ended".to_owned(), json!({ "ended": true })))
}
