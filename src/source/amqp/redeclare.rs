//! Declares what the map names and the broker has lost: a dead-letter queue, for example, that somebody
//! deleted to empty it. A tier's own queue is declared again where it is consumed from, in `subscribe`.

use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{Instant, sleep, timeout};

use super::ConsumerSettings;
use super::subscribe::AFTER_A_LOSS;
use crate::Error;
use crate::amqp::{Applied, Connection, apply, spread};
use crate::secret::Secret;
use crate::topology::plan::Plan;

/// How long it may take: a slot waits for it.
const LIMIT: Duration = Duration::from_secs(10);
/// How often it is tried at most. No declaration brings back what is on a node that is down.
const EVERY: Duration = Duration::from_secs(10);

/// When everything was last declared again.
#[derive(Debug, Default)]
pub(crate) struct Redeclared(Mutex<Option<Instant>>);

impl ConsumerSettings {
    /// Declares everything again because a queue is missing, unless another job does so or did so lately.
    pub(super) async fn redeclare(&self) {
        if !self.may_declare {
            return;
        }
        let Ok(mut last) = self.redeclared.0.try_lock() else {
            return;
        };
        if last.is_some_and(|last| last.elapsed() < EVERY) {
            return;
        }
        *last = Some(Instant::now());
        match timeout(LIMIT, self.declare_all()).await {
            Ok(Ok(applied)) => {
                tracing::warn!(%applied, "a queue was missing, all are declared again")
            }
            Ok(Err(error)) => {
                tracing::error!(%error, "a queue is missing, and cannot be declared again")
            }
            Err(_) => tracing::error!("a queue is missing, and declaring it again takes too long"),
        }
    }

    async fn declare_all(&self) -> Result<Applied, Error> {
        sleep(AFTER_A_LOSS).await;
        let connection = Connection::open_any(&self.urls, &self.connection_name).await?;
        let has_database = self.publisher.has_database();
        let plan = Plan::new(&self.topology, connection.version(), has_database)?;
        let applied = self.declare(&connection, &plan).await;
        connection.close().await;
        applied
    }

    /// Declares a plan or a part of it, each queue through the node of its share.
    pub(super) async fn declare(
        &self,
        connection: &Connection,
        plan: &Plan,
    ) -> Result<Applied, Error> {
        let urls: Vec<_> = self.urls.iter().map(Secret::expose).collect();
        spread(connection, &urls, &self.connection_name, plan).await;
        apply(connection, plan).await
    }
}
