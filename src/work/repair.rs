//! Makes a tier's subscription, and its queue where that is gone, for as long as it takes.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::Workshop;
use super::subscription::{NoSubscription, Subscription};
use crate::backoff::Backoff;
use crate::broker::{Connection, apply};
use crate::topology::plan::Plan;

/// A subscription in the making.
pub(super) struct Repair(Pin<Box<dyn Future<Output = Repaired> + Send>>);

pub(super) struct Repaired {
    pub(super) subscription: Subscription,
    /// Whether the queue was gone.
    pub(super) was_declared: bool,
}

impl Repair {
    pub(super) fn new(
        shop: &Arc<Workshop>,
        connection: Arc<Connection>,
        queue: String,
        window: u16,
        tag: String,
    ) -> Self {
        let shop = shop.clone();
        Self(Box::pin(async move {
            let mut backoff = Backoff::new();
            let mut was_declared = false;
            loop {
                let connection = connection.clone();
                let begin =
                    Subscription::begin(connection.clone(), queue.clone(), window, tag.clone());
                match begin.await {
                    Ok(subscription) => {
                        return Repaired {
                            subscription,
                            was_declared,
                        };
                    }
                    Err(NoSubscription::NoQueue) if shop.may_declare => {
                        was_declared = declare(&shop, &connection).await;
                        if was_declared {
                            continue;
                        }
                    }
                    Err(NoSubscription::NoQueue) => {
                        tracing::error!(queue, "the queue does not exist: apply the topology");
                    }
                    Err(NoSubscription::Failed(error)) => tracing::warn!(%error),
                }
                backoff.pause().await;
            }
        }))
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Repaired> {
        self.0.as_mut().poll(cx)
    }
}

/// Declares all that the map says, which leaves alone what is there.
async fn declare(shop: &Workshop, connection: &Connection) -> bool {
    let applied = match Plan::new(&shop.topology, connection.capabilities()) {
        Ok(plan) => apply(connection, &plan).await.map(drop),
        Err(error) => Err(error),
    };
    if let Err(error) = &applied {
        tracing::error!(%error, "a queue is gone, and cannot be declared again");
    }
    applied.is_ok()
}
