//! Recognises a transaction pooler, such as PgBouncer with `pool_mode = transaction`.
//!
//! A pooler passes on what the server says about itself, so no answer names it. But the server process that answers
//! tells it apart: on a plain server two connections that are both open have two processes, and each keeps its own.
//! A transaction pooler gives the one process to both, or, while other clients use it too, now this one and now that
//! one. A pooler that keeps a server connection for the length of a session behaves like a plain server, and is one as
//! far as tierline is concerned.

use std::time::Duration;

use sqlx::postgres::PgConnectOptions;
use sqlx::{ConnectOptions, PgConnection, Row};
use tokio::time::timeout;

/// How long the server may take to answer all questions.
const LIMIT: Duration = Duration::from_secs(5);
/// How often both connections are asked. A pooler of two server connections whose clients take them at random looks
/// like a plain server in one case of 128.
const ROUNDS: usize = 4;

/// The server is a transaction pooler, and the app did not say so.
#[derive(Debug, thiserror::Error)]
#[error("two connections were answered by the same server process")]
pub(super) struct TransactionPooler;

/// Fails with [`TransactionPooler`] if the server is one.
pub(super) async fn refuse(options: &PgConnectOptions) -> Result<(), sqlx::Error> {
    match timeout(LIMIT, is_pooler(options)).await {
        Ok(Ok(false)) => Ok(()),
        Ok(Ok(true)) => Err(sqlx::Error::Configuration(TransactionPooler.into())),
        Ok(Err(error)) => Err(error),
        // Nothing of the caller's was sent, as if the pool had found no connection.
        Err(_) => Err(sqlx::Error::PoolTimedOut),
    }
}

async fn is_pooler(options: &PgConnectOptions) -> Result<bool, sqlx::Error> {
    let mut first = options.connect().await?;
    let mut second = options.connect().await?;
    let process = process_of(&mut first).await?;
    let other = process_of(&mut second).await?;
    if process == other {
        return Ok(true);
    }
    for _ in 1..ROUNDS {
        if process_of(&mut first).await? != process || process_of(&mut second).await? != other {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The server process that answers. The time tells apart processes with one number on two servers, as a proxy may
/// have behind it.
async fn process_of(connection: &mut PgConnection) -> Result<String, sqlx::Error> {
    // A simple query: a statement of two steps may not survive a pooler.
    let asking = sqlx::raw_sql(
        "SELECT pid || ' ' || extract(epoch FROM backend_start) FROM pg_stat_activity WHERE pid = pg_backend_pid()",
    );
    asking.fetch_one(connection).await?.try_get(0)
}
