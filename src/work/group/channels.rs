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
use crate::broker::Connection;
use crate::observe::{Event, Purpose};
use crate::work::Phase;
use crate::work::repair::{Repair, Repaired};
use crate::work::subscription::Subscription;

/// How long the other tiers wait for one whose queue cannot be had.
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
                        .tell(&Event::Connected { purpose, address });
                    return Some(connection);
                }
                Err(error) => {
                    let cause = &error.to_string();
                    tracing::warn!(group = self.name, cause, "cannot connect");
                    self.shop
                        .observers
                        .tell(&Event::ConnectFailed { purpose, cause });
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
            let mut repair = self.repair(tier, connection, Duration::ZERO);
            let repaired = timeout(ONE_TIER, poll_fn(|cx| repair.poll(cx)));
            match self.unless_left(repaired).await {
                Some(Ok(Some(repaired))) => self.repaired(tier, repaired),
                Some(Err(_)) => self.repairs[tier] = Some(repair),
                // The connection is gone again, or the shutdown is over.
                Some(Ok(None)) | None => return,
            }
        }
    }

    pub(super) fn repair(
        &self,
        tier: usize,
        connection: &Arc<Connection>,
        after: Duration,
    ) -> Repair {
        let tier = &self.tiers[tier];
        let tag = format!("{} {}", self.shop.worker, tier.name);
        Repair::new(
            &self.shop,
            connection.clone(),
            tier.queue.clone(),
            tier.window,
            tag,
            after,
        )
    }

    pub(super) fn poll_repair(&mut self, tier: usize, cx: &mut Context<'_>) {
        let Some(Some(repair)) = self.repairs.get_mut(tier) else {
            return;
        };
        if let Poll::Ready(repaired) = repair.poll(cx) {
            self.repairs[tier] = None;
            // Without a connection there is nothing to subscribe on: the turn looks at that.
            if let Some(repaired) = repaired {
                self.repaired(tier, repaired);
            }
            // Its first delivery may be here already, and nobody was told to look.
            cx.waker().wake_by_ref();
        }
    }

    fn repaired(&mut self, tier: usize, repaired: Repaired) {
        let (group, name) = (&self.name, &self.tiers[tier].name);
        let observers = &self.shop.observers;
        if repaired.was_declared {
            tracing::error!(
                group,
                tier = name,
                "the queue was gone, and is declared again"
            );
            observers.tell(&Event::Redeclared { tier: name });
        }
        tracing::info!(group, tier = name, "consuming");
        observers.tell(&Event::Consuming { group, tier: name });
        self.tiers[tier].subscribed(repaired.subscription);
    }

    /// The tier's channel is gone, and with it all that was in hand.
    pub(super) fn interrupted(&mut self, tier: usize, cause: &str) {
        let name = &self.tiers[tier].name;
        tracing::warn!(group = self.name, tier = name, cause, "a consumer is lost");
        self.shop.observers.tell(&Event::Interrupted {
            group: &self.name,
            tier: name,
            cause,
        });
        self.lose(tier);
    }

    pub(super) fn lose(&mut self, tier: usize) {
        self.repairs[tier] = None;
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
        self.repairs.clear();
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
