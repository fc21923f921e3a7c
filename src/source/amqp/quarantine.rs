//! The quarantine of a group as a source: tasks that may kill their worker, one at a time.
//!
//! It is a plain quorum queue. A task of its own takes one message with `basic.get`, hands it to the group, and
//! settles it before it takes the next one. So at most one slot of a process runs a suspect from quarantine,
//! and nothing else waits for it.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use futures_util::future::BoxFuture;
use lapin::Channel;
use lapin::message::BasicGetMessage;
use lapin::options::{BasicAckOptions, BasicGetOptions, BasicNackOptions};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::ConsumerSettings;
use super::consumer_connection::ConsumerConnection;
use super::redelivery::{RedeliveryCause, RedeliveryHistory};
use super::successor::{Origin, Stored};
use crate::amqp::Connection;
use crate::backoff::Backoff;
use crate::message::Received;
use crate::source::{Delivery, Handle, Next, Source, Supply};
use crate::topology;

/// How often to look into an empty quarantine.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// How long the broker may take to answer.
const LIMIT: Duration = Duration::from_secs(10);
/// How long a message waits for a slot before it goes to the back of the quarantine. A message of a higher tier
/// may be behind it.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

pub(super) struct Quarantine {
    offers: mpsc::Receiver<Offer>,
    /// The message that waits for a slot.
    offer: Option<Offer>,
    /// The message that runs, and where to send what follows on it.
    running: Option<(Handle, oneshot::Sender<Next>)>,
    next_handle: Handle,
    settled: mpsc::Receiver<()>,
    is_settling: bool,
    draining: CancellationToken,
    taker: AbortOnDropHandle<()>,
    has_taker_ended: bool,
    connection: ConsumerConnection,
}

/// A message that may run, until its receiver is dropped.
struct Offer {
    tier: usize,
    received: Arc<Received>,
    /// Sent when it begins; the sender in it is sent what follows.
    begin: oneshot::Sender<oneshot::Receiver<Next>>,
}

impl Quarantine {
    pub(super) fn new(
        settings: &Arc<ConsumerSettings>,
        group: &topology::Group,
        connection: ConsumerConnection,
    ) -> Self {
        let (offer, offers) = mpsc::channel(1);
        let (settle, settled) = mpsc::channel(1);
        let draining = CancellationToken::new();
        let taker = Taker {
            settings: settings.clone(),
            group: group.clone(),
            queue: settings.topology.names().quarantine(&group.name),
            connection: connection.clone(),
            history: RedeliveryHistory::new(1),
            has_had_channel: false,
            draining: draining.clone(),
            offer,
            settled: settle,
        };
        Self {
            offers,
            offer: None,
            running: None,
            next_handle: 0,
            settled,
            is_settling: false,
            draining,
            taker: AbortOnDropHandle::new(tokio::spawn(taker.run())),
            has_taker_ended: false,
            connection,
        }
    }
}

impl Source for Quarantine {
    fn tier(&self) -> Option<usize> {
        self.offer.as_ref().map(|offer| offer.tier)
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Handle> {
        if self.is_settling
            && let Poll::Ready(Some(())) = self.settled.poll_recv(cx)
        {
            self.is_settling = false;
            return Poll::Ready(self.next_handle - 1);
        }
        if self.draining.is_cancelled() && !self.has_taker_ended {
            self.has_taker_ended = Pin::new(&mut self.taker).poll(cx).is_ready();
        }
        loop {
            if let Some(offer) = &mut self.offer
                && offer.begin.poll_closed(cx).is_pending()
            {
                return Poll::Pending;
            }
            // An offer that is closed waited for too long.
            self.offer = None;
            match self.offers.poll_recv(cx) {
                Poll::Ready(Some(offer)) => self.offer = Some(offer),
                Poll::Ready(None) | Poll::Pending => return Poll::Pending,
            }
        }
    }

    fn wake_at(&self) -> Option<Instant> {
        None
    }

    fn supply(&mut self) -> Supply {
        match self.offer {
            Some(_) => Supply::Ready,
            None => Supply::Empty,
        }
    }

    fn take(&mut self) -> Option<Delivery> {
        let Offer {
            received, begin, ..
        } = self.offer.take()?;
        let (sender, next) = oneshot::channel();
        // Otherwise it has just gone to the back of the quarantine.
        begin.send(next).ok()?;
        let handle = self.next_handle;
        self.next_handle += 1;
        self.running = Some((handle, sender));
        Some(Delivery { handle, received })
    }

    fn hold(&mut self, _: &mut Context<'_>) -> Option<Instant> {
        None
    }

    fn settle(&mut self, handle: Handle, next: Next) {
        if let Some((_, sender)) = self.running.take_if(|it| it.0 == handle) {
            self.is_settling = !matches!(next, Next::Done);
            let _ = sender.send(next);
        }
    }

    fn flush(&mut self, _: bool) -> bool {
        false
    }

    fn drain(&mut self) {
        self.draining.cancel();
        self.offer = None;
    }

    fn is_drained(&self) -> bool {
        self.draining.is_cancelled() && (self.running.is_some() || self.has_taker_ended)
    }

    fn close(self: Box<Self>) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let Self {
                taker,
                has_taker_ended,
                connection,
                ..
            } = *self;
            taker.abort();
            if !has_taker_ended {
                let _ = taker.await;
            }
            connection.close().await;
        })
    }
}

/// The task that takes messages from the queue.
struct Taker {
    settings: Arc<ConsumerSettings>,
    group: topology::Group,
    queue: String,
    connection: ConsumerConnection,
    history: RedeliveryHistory,
    has_had_channel: bool,
    draining: CancellationToken,
    offer: mpsc::Sender<Offer>,
    settled: mpsc::Sender<()>,
}

impl Taker {
    async fn run(mut self) {
        let draining = self.draining.clone();
        let mut backoff = Backoff::new();
        let mut channel: Option<(Arc<Connection>, Channel)> = None;
        loop {
            let suspects = self.settings.suspects.clone();
            let ready = async {
                let connection = self.connection.opened().await?;
                Some((suspects.none_held().await?, connection))
            };
            let Some(Some((_permit, connection))) = draining.run_until_cancelled(ready).await
            else {
                return;
            };
            let is_current = |it: &(Arc<Connection>, Channel)| {
                Arc::ptr_eq(&it.0, &connection) && it.1.status().connected()
            };
            if !channel.as_ref().is_some_and(is_current) {
                channel = self.open(&connection).await;
            }
            let taken = match &channel {
                Some((_, channel)) => self.take(&connection, channel).await,
                None => Err(()),
            };
            drop(_permit);
            let pause = match taken {
                Ok(true) => continue,
                Ok(false) => LOOK_EVERY,
                Err(()) => {
                    channel = None;
                    backoff.next().max(LOOK_EVERY)
                }
            };
            drop(connection);
            if draining.run_until_cancelled(sleep(pause)).await.is_none() {
                return;
            }
        }
    }

    async fn open(&mut self, connection: &Arc<Connection>) -> Option<(Arc<Connection>, Channel)> {
        let channel = connection.channel(Instant::now() + LIMIT).await;
        if std::mem::replace(&mut self.has_had_channel, true) {
            let waiting = std::iter::empty();
            self.history.lost(SystemTime::now(), waiting, 0);
        }
        self.history.subscribed();
        match channel {
            Ok(channel) => Some((connection.clone(), channel)),
            Err(error) => {
                tracing::warn!(%error, queue = self.queue, "cannot look into the quarantine");
                None
            }
        }
    }

    /// Takes one message and sees it through. Whether there was one.
    async fn take(&mut self, connection: &Connection, channel: &Channel) -> Result<bool, ()> {
        let options = BasicGetOptions { no_ack: false };
        let got = timeout(
            LIMIT,
            channel.basic_get(self.queue.as_str().into(), options),
        )
        .await;
        let message = match got {
            Ok(Ok(message)) => message,
            Ok(Err(error)) => {
                tracing::warn!(%error, queue = self.queue, "cannot take from the quarantine");
                if connection.is_open() {
                    // Most likely the queue does not exist.
                    self.settings.redeclare().await;
                }
                return Err(());
            }
            // The answer may still come, and belongs to nobody then.
            Err(_) => return Err(()),
        };
        let Some(BasicGetMessage { delivery, .. }) = message else {
            return Ok(false);
        };
        let tag = delivery.delivery_tag;
        let repaired = connection.repairs().take(channel.id(), tag);
        let now = SystemTime::now();
        let mut received = Received::new(delivery.properties, delivery.data, repaired, "", now);
        let tier = self.assign_tier(&mut received);
        let received = Arc::new(received);
        let cause = match delivery.redelivered {
            true => self.history.cause_of(&received),
            false => self.history.first_delivery(),
        };
        let origin = Origin::Quarantine(self.group.name.clone());
        let stored = match (cause, tier) {
            (RedeliveryCause::Done, _) => Stored::Yes,
            (RedeliveryCause::Unexplained, _) => {
                self.settings.count_crash(&origin, &received).await
            }
            (RedeliveryCause::Explained, Some(tier)) => self.offer(&origin, tier, &received).await,
            // The map gives the task to another group today: its workers put it into their quarantine.
            (RedeliveryCause::Explained, None) => {
                let tier = Origin::Tier(String::new());
                self.settings.store(&tier, &received, Next::Back).await
            }
        };
        let settled = self.settle(channel, tag, stored).await;
        // If it is delivered again all the same, that is explained.
        let is_explained = match stored {
            Stored::Yes => settled.is_err(),
            Stored::No | Stored::NoQuarantine => true,
            Stored::NoAndSuspect => false,
        };
        if is_explained {
            self.history.returned(received.key());
        }
        settled
    }

    /// The tier of the message, as its index in the group. `None`: it is a tier of another group.
    fn assign_tier(&self, received: &mut Received) -> Option<usize> {
        let Ok(message) = &mut received.message else {
            return Some(0);
        };
        let tiers = &self.group.tiers;
        match self.settings.topology.task(&message.task) {
            Some(route) => {
                message.tier = route.tier.clone();
                tiers.iter().position(|tier| *tier == route.tier)
            }
            // The worker makes a dead letter of it.
            None => {
                message.tier = tiers.first().cloned().unwrap_or_default();
                Some(0)
            }
        }
    }

    /// Offers the message to the group, runs it, and stores what follows.
    async fn offer(&mut self, origin: &Origin, tier: usize, received: &Arc<Received>) -> Stored {
        let (begin, begun) = oneshot::channel();
        let offer = Offer {
            tier,
            received: received.clone(),
            begin,
        };
        let begun = async {
            self.offer.send(offer).await.ok()?;
            timeout(LONGEST_WAIT, begun).await.ok()?.ok()
        };
        let Some(Some(next)) = self.draining.run_until_cancelled(begun).await else {
            return self.settings.store(origin, received, Next::Back).await;
        };
        // Without an answer the group is gone.
        let next = next.await.unwrap_or(Next::Back);
        if matches!(next, Next::Done) {
            self.history.ended(received.key());
            return Stored::Yes;
        }
        let stored = self.settings.store(origin, received, next).await;
        let _ = self.settled.try_send(());
        stored
    }

    async fn settle(&mut self, channel: &Channel, tag: u64, stored: Stored) -> Result<bool, ()> {
        let back = BasicNackOptions {
            multiple: false,
            requeue: true,
        };
        let settling = async {
            match stored {
                Stored::Yes => channel.basic_ack(tag, BasicAckOptions::default()).await,
                Stored::No | Stored::NoAndSuspect | Stored::NoQuarantine => {
                    channel.basic_nack(tag, back).await
                }
            }
        };
        match timeout(LIMIT, settling).await {
            Ok(Ok(())) => Ok(true),
            _ => Err(()),
        }
    }
}
