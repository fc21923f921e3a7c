//! Declares again what the map names and the broker has lost: a dead-letter queue, say, that somebody
//! deleted to empty it. A tier's own queue is mended where it is consumed from, in `resubscribe`.

use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{Instant, sleep, timeout};

use super::Workshop;
use super::resubscribe::AFTER_A_LOSS;
use crate::Error;
use crate::amqp::{Applied, Connection, apply};
use crate::topology::plan::Plan;

/// How long it may take: a slot waits for it.
const LIMIT: Duration = Duration::from_secs(10);
/// How often it is tried at most. What a node that is down has, no declaration brings back.
const EVERY: Duration = Duration::from_secs(10);

/// When it was done last.
#[derive(Debug, Default)]
pub(super) struct Mended(Mutex<Option<Instant>>);

impl Workshop {
    /// No queue takes what follows on a message: declares everything again, unless that is done by
    /// another job or was done lately.
    pub(super) async fn mend(&self) {
        if !self.may_declare {
            return;
        }
        let Ok(mut last) = self.mended.0.try_lock() else {
            return;
        };
        if last.is_some_and(|last| last.elapsed() < EVERY) {
            return;
        }
        *last = Some(Instant::now());
        match timeout(LIMIT, self.declare_all()).await {
            Ok(Ok(applied)) => tracing::warn!(%applied, "a queue was gone, all are declared again"),
            Ok(Err(error)) => {
                tracing::error!(%error, "a queue is gone, and cannot be declared again")
            }
            Err(_) => tracing::error!("a queue is gone, and declaring it again takes too long"),
        }
    }

    async fn declare_all(&self) -> Result<Applied, Error> {
        sleep(AFTER_A_LOSS).await;
        let (_, connection) = Connection::open_any(&self.urls, &self.connection_name).await?;
        let plan = Plan::new(&self.topology, connection.capabilities())?;
        let applied = apply(&connection, &plan).await;
        connection.close().await;
        applied
    }
}
