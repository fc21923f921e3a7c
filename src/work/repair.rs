//! Makes a tier's subscription, and its queue where that is gone, for as long as it takes.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::sleep;

use super::Workshop;
use super::subscription::{NoSubscription, Subscription};
use crate::backoff::Backoff;
use crate::broker::{Connection, apply};
use crate::topology::plan::Plan;

/// How long a queue is left alone that was perhaps deleted. While the deletion of a quorum queue is
/// under way, who declares it again may get a shell that neither cancels its consumers nor feeds them
/// (RabbitMQ 3.10), and who consumes from it loses the whole connection (4.3).
pub(super) const AFTER_A_LOSS: Duration = Duration::from_millis(300);

/// A subscription in the making.
pub(super) struct Repair(Pin<Box<dyn Future<Output = Option<Repaired>> + Send>>);

pub(super) struct Repaired {
    pub(super) subscription: Subscription,
    /// Whether the queue was gone.
    pub(super) was_declared: bool,
}

impl Repair {
    /// A subscription that is begun after a while.
    pub(super) fn new(
        shop: &Arc<Workshop>,
        connection: Arc<Connection>,
        queue: String,
        window: u16,
        tag: String,
        after: Duration,
    ) -> Self {
        let shop = shop.clone();
        Self(Box::pin(async move {
            sleep(after).await;
            let mut backoff = Backoff::new();
            let mut was_declared = false;
            // A queue that could not be reached may be there without its bindings.
            let mut is_doubtful = false;
            loop {
                let connection = connection.clone();
                let begin =
                    Subscription::begin(connection.clone(), queue.clone(), window, tag.clone());
                match begin.await {
                    Ok(subscription) => {
                        if is_doubtful {
                            declare(&shop, &connection, &queue).await;
                        }
                        return Some(Repaired {
                            subscription,
                            was_declared,
                        });
                    }
                    Err(NoSubscription::NoQueue) if shop.may_declare => {
                        // A queue that is gone each time it was declared is not declared in a row.
                        let is_first = !was_declared;
                        was_declared = declare(&shop, &connection, &queue).await;
                        is_doubtful = !was_declared;
                        if was_declared && is_first {
                            continue;
                        }
                    }
                    Err(NoSubscription::NoQueue) => {
                        tracing::error!(queue, "the queue does not exist: apply the topology");
                    }
                    Err(NoSubscription::Failed(error)) => tracing::warn!(%error),
                }
                if !connection.is_open() {
                    return None;
                }
                backoff.pause().await;
            }
        }))
    }

    /// The subscription; `None` where the connection is gone.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Repaired>> {
        self.0.as_mut().poll(cx)
    }
}

/// Declares the queue again; all else too, if that is gone as well.
async fn declare(shop: &Workshop, connection: &Connection, queue: &str) -> bool {
    let declared = async {
        let whole = Plan::new(&shop.topology, connection.capabilities())?;
        let mut plan = whole.clone();
        plan.exchanges.clear();
        plan.retired.clear();
        plan.queues.retain(|it| it.name == queue);
        plan.bindings.retain(|it| it.destination == queue);
        match apply(connection, &plan).await {
            Ok(applied) => Ok(applied),
            Err(_) => apply(connection, &whole).await,
        }
    };
    match declared.await {
        Ok(applied) if applied.unreachable.iter().any(|it| it == queue) => {
            tracing::warn!(
                queue,
                "the queue is on a node that is down, or has no leader"
            );
            false
        }
        Ok(_) => true,
        Err(error) => {
            tracing::error!(%error, queue, "the queue is gone, and cannot be declared again");
            false
        }
    }
}
