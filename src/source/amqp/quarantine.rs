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
use crate::amqp::{Connection, close_unanswered};
use crate::backoff::Backoff;
#[cfg(feature = "postgres")]
use crate::control::Gating;
use crate::message::Received;
use crate::source::suspects::Running;
use crate::source::{Delivery, Handle, Next, Source, Supply};
use crate::topology;

/// How often to look into an empty quarantine.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// A quorum queue does not come back from a crash with all its messages marked as redelivered.
const NO_MASS: usize = usize::MAX;
/// How long the broker may take to answer.
const LIMIT: Duration = Duration::from_secs(10);
/// How long a message waits for a slot before it goes to the back of the quarantine. A message of a higher tier
/// may be behind it.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// How long a message waits before it may start. The process that put it here acknowledges the delivery that it replaces
/// meanwhile: a death or a cut connection before that would leave both.
const REST: Duration = Duration::from_millis(300);

pub(super) struct Quarantine {
    settings: Arc<ConsumerSettings>,
    group: topology::Group,
    offers: mpsc::Receiver<Offer>,
    /// The message that waits for a slot.
    offer: Option<Offer>,
    running: Option<RunningOffer>,
    next_handle: Handle,
    settled: mpsc::Receiver<()>,
    /// The delivery whose successor is being stored.
    settling: Option<Handle>,
    /// Whether the taker that had that delivery has failed.
    is_orphan: bool,
    draining: CancellationToken,
    taker: AbortOnDropHandle<()>,
    has_taker_ended: bool,
    connection: ConsumerConnection,
}

/// The message that runs.
struct RunningOffer {
    handle: Handle,
    /// Where to send what follows on it.
    next: oneshot::Sender<Next>,
    _running: Running,
}

/// A message that may run, until its receiver is dropped.
struct Offer {
    tier: usize,
    received: Arc<Received>,
    /// Sent when it begins; what follows comes on the receiver in it.
    begin: oneshot::Sender<oneshot::Receiver<Next>>,
}

impl Quarantine {
    pub(super) fn new(
        settings: &Arc<ConsumerSettings>,
        group: &topology::Group,
        connection: ConsumerConnection,
    ) -> Self {
        let draining = CancellationToken::new();
        let (taker, offers, settled) = start(settings, group, &connection, &draining);
        Self {
            settings: settings.clone(),
            group: group.clone(),
            offers,
            offer: None,
            running: None,
            next_handle: 0,
            settled,
            settling: None,
            is_orphan: false,
            draining,
            taker,
            has_taker_ended: false,
            connection,
        }
    }

    /// Starts the taker again after it failed. The channels of the old one are gone, and so is its delivery.
    fn restart_taker(&mut self) {
        let (settings, group) = (&self.settings, &self.group);
        let (taker, offers, settled) = start(settings, group, &self.connection, &self.draining);
        self.taker = taker;
        self.offers = offers;
        self.offer = None;
        self.settled = settled;
        self.has_taker_ended = false;
    }
}

type Started = (
    AbortOnDropHandle<()>,
    mpsc::Receiver<Offer>,
    mpsc::Receiver<()>,
);

fn start(
    settings: &Arc<ConsumerSettings>,
    group: &topology::Group,
    connection: &ConsumerConnection,
    draining: &CancellationToken,
) -> Started {
    let (offer, offers) = mpsc::channel(1);
    let (settle, settled) = mpsc::channel(1);
    let taker = Taker {
        settings: settings.clone(),
        group: group.clone(),
        queue: settings.topology.names().quarantine(&group.name),
        connection: connection.clone(),
        history: RedeliveryHistory::new(NO_MASS),
        has_had_channel: false,
        draining: draining.clone(),
        offer,
        settled: settle,
    };
    let taker = AbortOnDropHandle::new(tokio::spawn(taker.run()));
    (taker, offers, settled)
}

impl Source for Quarantine {
    fn tier(&self) -> Option<usize> {
        self.offer.as_ref().map(|offer| offer.tier)
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Handle> {
        if !self.has_taker_ended {
            self.has_taker_ended = Pin::new(&mut self.taker).poll(cx).is_ready();
        }
        if self.has_taker_ended && !self.draining.is_cancelled() {
            tracing::error!("the task that takes from the quarantine failed, it starts again");
            self.restart_taker();
            self.is_orphan = self.settling.is_some();
            // The new one has not registered its waker yet.
            cx.waker().wake_by_ref();
        }
        let is_settled = match self.settling {
            // Without its taker nothing more follows: the broker takes the message back.
            Some(_) if self.is_orphan || self.has_taker_ended => true,
            Some(_) => self.settled.poll_recv(cx).is_ready(),
            None => false,
        };
        if let Some(handle) = self.settling.take_if(|_| is_settled) {
            return Poll::Ready(handle);
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
        match self.offer {
            Some(_) => self.settings.suspects.start_at(),
            None => None,
        }
    }

    fn supply(&mut self) -> Supply {
        match self.offer {
            Some(_) if self.settings.suspects.start_at().is_none() => Supply::Ready,
            _ => Supply::Empty,
        }
    }

    fn take(&mut self) -> Option<Delivery> {
        let Offer {
            received, begin, ..
        } = self.offer.take()?;
        let (next, receiver) = oneshot::channel();
        // Otherwise it has just gone to the back of the quarantine.
        begin.send(receiver).ok()?;
        let handle = self.next_handle;
        self.next_handle += 1;
        self.running = Some(RunningOffer {
            handle,
            next,
            _running: self.settings.suspects.start(),
        });
        let lease = None;
        Some(Delivery {
            handle,
            received,
            permit: None,
            lease,
        })
    }

    fn hold(&mut self, _: &mut Context<'_>) -> Option<Instant> {
        None
    }

    fn settle(&mut self, handle: Handle, next: Next) {
        if let Some(running) = self.running.take_if(|it| it.handle == handle) {
            self.settling = (!matches!(next, Next::Done(_))).then_some(handle);
            self.is_orphan = running.next.send(next).is_err();
        }
    }

    fn flush(&mut self, _: bool) -> bool {
        false
    }

    /// It serves all tiers of its group: the task that takes messages knows which are paused.
    fn set_paused(&mut self, _: bool) {}

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

/// What failed on a channel that is of no use any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Failed {
    Channel,
    /// The broker refused to give a message.
    Get,
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
            let opening = async {
                let connection = self.connection.opened().await?;
                let is_current = |it: &(Arc<Connection>, Channel)| {
                    Arc::ptr_eq(&it.0, &connection) && it.1.status().connected()
                };
                if !channel.as_ref().is_some_and(is_current) {
                    channel = self.open(&connection).await;
                }
                Some(connection)
            };
            let Some(Some(connection)) = draining.run_until_cancelled(opening).await else {
                return;
            };
            let taken = match &channel {
                Some((_, channel)) => {
                    let suspects = self.settings.suspects.clone();
                    let Some(permit) = draining.run_until_cancelled(suspects.quarantine()).await
                    else {
                        return;
                    };
                    let taken = self.take(&connection, channel).await;
                    drop(permit);
                    taken
                }
                None => Err(Failed::Channel),
            };
            let pause = match taken {
                Ok(true) => continue,
                Ok(false) => LOOK_EVERY,
                Err(failed) => {
                    channel = None;
                    if failed == Failed::Get && connection.is_open() {
                        // Most likely the queue does not exist.
                        self.settings.redeclare().await;
                    }
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
    async fn take(&mut self, connection: &Connection, channel: &Channel) -> Result<bool, Failed> {
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
                return Err(Failed::Get);
            }
            Err(_) => {
                close_unanswered(channel.clone());
                return Err(Failed::Channel);
            }
        };
        let Some(BasicGetMessage { delivery, .. }) = message else {
            return Ok(false);
        };
        let tag = delivery.delivery_tag;
        let repaired = connection.repairs().take(channel.id(), tag);
        let now = SystemTime::now();
        let mut received =
            Received::new(delivery.properties, delivery.data, repaired, "".into(), now);
        let tier = self.assign_tier(&mut received);
        let received = Arc::new(received);
        let cause = match delivery.redelivered {
            true => self.history.cause_of(&received),
            false => self.history.first_delivery(),
        };
        let origin = Origin::Quarantine(self.group.name.clone());
        let counting = match cause {
            RedeliveryCause::Unexplained => Some(self.settings.suspects.count()),
            RedeliveryCause::Explained | RedeliveryCause::Done => None,
        };
        let stored = match (cause, tier) {
            (RedeliveryCause::Done, _) => Stored::Yes,
            (RedeliveryCause::Unexplained, _) => {
                self.settings.count_crash(&origin, &received).await
            }
            #[cfg(feature = "postgres")]
            (RedeliveryCause::Explained, Some(tier))
                if let Some(gating) = self.must_park(tier, &received) =>
            {
                let gating = gating.of(received.task()).is_some().then_some(&gating);
                self.settings.park(&origin, &received, gating).await
            }
            (RedeliveryCause::Explained, Some(tier)) => self.offer(&origin, tier, &received).await,
            // The map gives the task to another group today: its workers put it into their quarantine.
            (RedeliveryCause::Explained, None) => {
                let tier = Origin::Tier(String::new());
                let stored = self.settings.store(&tier, &received, Next::Back).await;
                if stored == Stored::No {
                    sleep(LOOK_EVERY).await;
                }
                stored
            }
        };
        let settled = self.settle(channel, tag, stored).await;
        match stored {
            // If it is delivered again all the same, it is done.
            Stored::Yes if settled.is_err() => self.history.ended_unacknowledged(received.key()),
            // The broker may not have read the acknowledgement.
            Stored::Yes => self.history.ended(received.key()),
            Stored::Copied if settled.is_ok() => {}
            Stored::Copied | Stored::No | Stored::NoQuarantine => {
                self.history.returned(received.key());
            }
            Stored::NoAndSuspect => {}
        }
        drop(counting);
        settled
    }

    /// The tier of the message, as its index in the group. `None`: it is a tier of another group.
    fn assign_tier(&self, received: &mut Received) -> Option<usize> {
        let Ok(message) = received.message() else {
            return Some(0);
        };
        let tiers = &self.group.tiers;
        let (tier, index) = match self.settings.goes_to(&message.task) {
            Some(goes_to) => {
                let index = tiers.iter().position(|tier| *tier == goes_to.name);
                (goes_to.name.clone(), index)
            }
            // The worker makes a dead letter of it.
            None => (tiers.first().cloned().unwrap_or_default(), Some(0)),
        };
        received.assign_tier(tier);
        index
    }

    /// What holds back a message that may not run now as it comes, because of an operator or a limit: it waits as a row of
    /// its tier.
    #[cfg(feature = "postgres")]
    fn must_park(&self, tier: usize, received: &Received) -> Option<Gating> {
        let settings = &self.settings;
        let tier = self.group.tiers.get(tier)?;
        let snapshot = settings.controls.now();
        let gating = Gating::new(&settings.topology, tier, &snapshot, &settings.limits);
        // It would go from the front of the quarantine to its back again and again.
        let is_at_limit = || {
            let gate = settings.limits.tier(tier);
            gate.is_some_and(|gate| !gate.is_open())
        };
        let is_held_back = snapshot.is_paused(&self.group.name, tier)
            || gating.of(received.task()).is_some()
            || is_at_limit();
        (is_held_back && settings.publisher.has_database()).then_some(gating)
    }

    /// Offers the message to the group, runs it, and stores what follows.
    async fn offer(&mut self, origin: &Origin, tier: usize, received: &Arc<Received>) -> Stored {
        let (begin, mut begun) = oneshot::channel();
        let offer = Offer {
            tier,
            received: received.clone(),
            begin,
        };
        let waiting = async {
            sleep(REST).await;
            self.offer.send(offer).await.ok()?;
            timeout(LONGEST_WAIT, &mut begun).await.ok()?.ok()
        };
        let begun_in_time = self.draining.run_until_cancelled(waiting).await.flatten();
        // It may have begun in the moment in which the wait ended.
        begun.close();
        let Some(next) = begun_in_time.or_else(|| begun.try_recv().ok()) else {
            return self.settings.store(origin, received, Next::Back).await;
        };
        // Without an answer the group is gone.
        let next = next.await.unwrap_or(Next::Back);
        if matches!(next, Next::Done(_)) {
            return Stored::Yes;
        }
        let stored = self.settings.store(origin, received, next).await;
        let _ = self.settled.try_send(());
        stored
    }

    async fn settle(
        &mut self,
        channel: &Channel,
        tag: u64,
        stored: Stored,
    ) -> Result<bool, Failed> {
        let back = BasicNackOptions {
            multiple: false,
            requeue: true,
        };
        let settling = async {
            match stored {
                Stored::Yes | Stored::Copied => {
                    channel.basic_ack(tag, BasicAckOptions::default()).await
                }
                Stored::No | Stored::NoAndSuspect | Stored::NoQuarantine => {
                    channel.basic_nack(tag, back).await
                }
            }
        };
        match timeout(LIMIT, settling).await {
            Ok(Ok(())) => Ok(true),
            _ => Err(Failed::Channel),
        }
    }
}
