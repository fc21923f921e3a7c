//! The connection and the channels of a group: made, lost, and made again.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::Group;
use super::jobs::Running;
use crate::amqp::Connection;
use crate::observe::{Event, Purpose};
use crate::worker::Phase;
use crate::worker::resubscribe::{Addresses, Place, Resubscribed, Resubscribing, Source};
use crate::worker::subscription::Subscription;

/// How long the other tiers wait for one from whose queue the broker gives no answer. They wait once: from
/// then on it has a connection of its own.
const ONE_TIER: Duration = Duration::from_secs(5);

impl Group {
    /// A connection, however long it takes. `None` where the shutdown is over before.
    pub(super) async fn connect(&mut self) -> Option<Connection> {
        let urls = self.shop.urls.clone();
        let purpose = Purpose::Work;
        for url in urls.iter().cycle().skip(self.next_url % urls.len()) {
            if !self.is_wanted().await {
                return None;
            }
            let name = format!("{} {}", self.shop.connection_name, self.name);
            match self
                .unless_left(Connection::open(url.expose(), &name))
                .await?
            {
                Ok(connection) => {
                    let address = connection.address().to_string();
                    tracing::info!(group = self.name, address, "connected");
                    let address = &address;
                    self.shop
                        .observers
                        .emit(&Event::Connected { purpose, address });
                    return Some(connection);
                }
                Err(error) => {
                    let cause = &error.to_string();
                    tracing::warn!(group = self.name, cause, "cannot connect");
                    self.shop
                        .observers
                        .emit(&Event::ConnectFailed { purpose, cause });
                    self.next_url += 1;
                }
            }
            let pause = self.backoff.next();
            self.unless_left(sleep(pause)).await?;
        }
        None
    }

    /// What `future` gives, or `None` where the shutdown is over before. What runs goes on meanwhile,
    /// and when it ends it gives back its right to run: others may wait for that.
    pub(super) async fn unless_left<T>(&mut self, future: impl Future<Output = T>) -> Option<T> {
        let mut left = pin!(left(self.phase.clone()));
        let mut future = pin!(future);
        loop {
            tokio::select! {
                done = &mut future => return Some(done),
                () = &mut left => return None,
                Some(news) = self.news.recv() => self.hear(news),
            }
        }
    }

    /// Whether a connection is of use. In a shutdown it is not: what is running cannot be settled on
    /// a new one, and is only waited for.
    async fn is_wanted(&mut self) -> bool {
        if *self.phase.borrow() < Phase::Drain {
            return true;
        }
        let leave = left(self.phase.clone());
        let ended = async {
            while !self.running.is_empty() {
                match self.news.recv().await {
                    Some(news) => self.hear(news),
                    None => break,
                }
            }
        };
        tokio::select! {
            () = ended => {}
            () = leave => {}
        }
        false
    }

    /// Subscribes to all tiers, the first one first: what a lower tier sends must not be taken for
    /// all there is.
    pub(super) async fn subscribe(&mut self, connection: &Arc<Connection>) {
        if self.unless_left(self.hands.may_be_filled()).await.is_none() {
            return;
        }
        self.hands.join(&self.shop.gate);
        for tier in 0..self.tiers.len() {
            let mut resubscribing = self.resubscribe(tier, connection, Duration::ZERO);
            if self.tiers[tier].is_apart {
                self.resubscribing[tier] = Some(resubscribing);
                continue;
            }
            let first = timeout(
                ONE_TIER,
                poll_fn(|cx| match resubscribing.poll(cx) {
                    Poll::Ready(resubscribed) => Poll::Ready(Some(resubscribed)),
                    Poll::Pending if resubscribing.has_failed() => Poll::Ready(None),
                    Poll::Pending => Poll::Pending,
                }),
            );
            match self.unless_left(first).await {
                Some(Ok(Some(Some(resubscribed)))) => self.resubscribed(tier, resubscribed),
                Some(Ok(None)) => self.resubscribing[tier] = Some(resubscribing),
                Some(Err(_)) => {
                    self.resubscribing[tier] = Some(resubscribing);
                    self.tiers[tier].is_apart = true;
                }
                // The connection is gone again, perhaps because of this tier.
                Some(Ok(Some(None))) => {
                    self.tiers[tier].is_apart = true;
                    return;
                }
                // The shutdown is over.
                None => return,
            }
        }
    }

    pub(super) fn resubscribe(
        &self,
        tier: usize,
        connection: &Arc<Connection>,
        after: Duration,
    ) -> Resubscribing {
        let tier = &self.tiers[tier];
        let source = Source {
            queue: tier.queue.clone(),
            window: tier.window,
            tag: format!("{} {}", self.shop.worker, tier.name),
        };
        let addresses = Addresses {
            name: format!("{} {} {}", self.shop.connection_name, self.name, tier.name),
            next_url: self.next_url,
        };
        let place = match tier.is_apart {
            false => Place::Shared(connection.clone(), addresses),
            true => Place::Apart(addresses),
        };
        Resubscribing::new(&self.shop, source, place, after)
    }

    pub(super) fn poll_resubscribing(&mut self, tier: usize, cx: &mut Context<'_>) {
        let Some(Some(resubscribing)) = self.resubscribing.get_mut(tier) else {
            return;
        };
        if let Poll::Ready(resubscribed) = resubscribing.poll(cx) {
            self.resubscribing[tier] = None;
            match resubscribed {
                Some(resubscribed) => self.resubscribed(tier, resubscribed),
                // Without a connection there is nothing to subscribe on: the turn looks at that.
                None => self.tiers[tier].is_apart = true,
            }
            // Its first delivery may be here already, and nobody was told to look.
            cx.waker().wake_by_ref();
        }
    }

    /// The connection of the group is lost. A tier that was about to be consumed from may be why: a broker
    /// whose quorum queue has no leader answers a consumer with the end of the whole connection. From now
    /// on it has one of its own, until it was consumed from.
    pub(super) fn set_apart_after_loss(&mut self) {
        for (tier, resubscribing) in self.tiers.iter_mut().zip(&self.resubscribing) {
            let is_waiting = tier.is_apart && tier.subscription.is_none();
            tier.is_apart = is_waiting || resubscribing.is_some();
        }
    }

    fn resubscribed(&mut self, tier: usize, resubscribed: Resubscribed) {
        let (group, name) = (&self.name, &self.tiers[tier].name);
        let observers = &self.shop.observers;
        if resubscribed.was_declared {
            tracing::error!(
                group,
                tier = name,
                "the queue was gone, and is declared again"
            );
            observers.emit(&Event::Redeclared { tier: name });
        }
        tracing::info!(group, tier = name, "consuming");
        observers.emit(&Event::Consuming { group, tier: name });
        self.tiers[tier].subscribed(resubscribed.subscription);
    }

    /// The tier's channel is gone, and with it all that was in hand.
    pub(super) fn interrupted(&mut self, tier: usize, cause: &str) {
        let name = &self.tiers[tier].name;
        tracing::warn!(group = self.name, tier = name, cause, "a consumer is lost");
        self.shop.observers.emit(&Event::Interrupted {
            group: &self.name,
            tier: name,
            cause,
        });
        self.lose(tier);
    }

    pub(super) fn lose(&mut self, tier: usize) {
        self.resubscribing[tier] = None;
        let waiting = self.alone.take_if(|(waiting, ..)| *waiting == tier);
        let state = &mut self.tiers[tier];
        if let Some((_, held, _)) = waiting {
            state.buffer.push_back(held);
        }
        let generation = state.generation;
        let came_on_it = |job: &&Running| job.tier == tier && job.generation == generation;
        let running = self.running.values().filter(came_on_it);
        let without_id = running.filter(|job| !job.package.has_id()).count();
        state.lost(without_id);
    }

    /// Says goodbye, after the last acknowledgements.
    pub(super) async fn close(&mut self, connection: Arc<Connection>) {
        self.resubscribing.clear();
        let subscriptions = self
            .tiers
            .drain(..)
            .filter_map(|tier| tier.subscription.map(Subscription::close));
        join_all(subscriptions).await;
        if let Ok(connection) = Arc::try_unwrap(connection) {
            connection.close().await;
        }
    }
}

/// Completes when the shutdown is over.
async fn left(mut phase: watch::Receiver<Phase>) {
    // An error means that the worker is gone.
    let _ = phase.wait_for(|phase| *phase >= Phase::Leave).await;
}
