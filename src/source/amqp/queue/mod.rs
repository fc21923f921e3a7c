//! A tier's queue as a source.
//!
//! `consumer` keeps it subscribed, `receive` decides what becomes of a delivery that arrives, `prefetched` has the deliveries that
//! wait for a slot, `gated` says which may not run as they come, `settle` ends deliveries, `drain` is its part of a shutdown, and
//! `pause` ends and begins consuming while it goes on.

mod consumer;
mod drain;
mod gated;
mod pause;
mod prefetched;
mod receive;
mod settle;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use self::consumer::Consumer;
use self::drain::Drain;
use self::pause::EndingChannel;
use self::prefetched::Prefetched;
use self::settle::Unsettled;
use super::ConsumerSettings;
use super::consumer_connection::ConsumerConnection;
use super::outlook::Outlook;
use super::redelivery::RedeliveryHistory;
use super::successor::{Origin, Stored};
use crate::backoff::Backoff;
use crate::control::{Gates, Gating, Snapshot};
use crate::source::{Delivery, Handle, Next, Source, Supply};
use crate::topology::{self, Tier};

/// A prefetched message goes back when it has waited for a slot during this part of the broker's ack timeout.
const ACK_TIMEOUT_PARTS: u32 = 3;
/// How long an acknowledgement may wait for others. What is not acknowledged when a worker dies runs
/// again, so this is all that gathering can cost.
const LONGEST_GATHERING: Duration = Duration::from_millis(1);

/// The queue of a tier, consumed from on a channel of its own.
pub(super) struct Queue {
    settings: Arc<ConsumerSettings>,
    group: String,
    tier: usize,
    name: Arc<str>,
    queue: String,
    /// Whether the tier had this queue before it moved.
    is_former: bool,
    /// Whether what came last has become a row: a task that is paused, or at its limit.
    parks_arrivals: bool,
    /// Whether a former queue is gone.
    is_gone: bool,
    window: u16,
    /// How long a prefetched message may wait for a slot.
    patience: Duration,
    connection: ConsumerConnection,
    connection_changed: BoxFuture<'static, ()>,
    consumer: Consumer,
    /// Counts the channels: a delivery tag means nothing on another one.
    generation: u64,
    /// Whether to consume on one more connection: on the tier's own one this queue may end the channel of the
    /// quarantine too.
    has_own_connection: bool,
    /// Until when the other tiers wait for the first subscription on this connection.
    first_subscription_by: Option<Instant>,
    prefetched: Prefetched,
    /// All deliveries that are not settled.
    unsettled: HashMap<Handle, Unsettled>,
    /// Those whose channel was lost. Some may be settled meanwhile.
    orphans: Vec<Handle>,
    next_handle: Handle,
    history: RedeliveryHistory,
    /// Which tasks may not run as they come.
    gating: Arc<Gating>,
    controls: watch::Receiver<Arc<Snapshot>>,
    limits: watch::Receiver<Arc<Gates>>,
    outlook: Outlook,
    /// Since when something is finished and not acknowledged.
    gathering_since: Option<Instant>,
    subscribed_at: Instant,
    /// The pauses after channels that were lost.
    backoff: Backoff,
    /// Set while the consumer ends, because of a pause or a shutdown, and until the end of the pause.
    drain: Option<Drain>,
    is_paused: bool,
    /// Whether the worker shuts down.
    is_ending: bool,
    ending_channels: Vec<EndingChannel>,
    stored: mpsc::UnboundedReceiver<(Handle, Stored)>,
    sender: mpsc::UnboundedSender<(Handle, Stored)>,
    settled: VecDeque<Handle>,
}

impl Queue {
    pub(super) fn new(
        settings: &Arc<ConsumerSettings>,
        group: &topology::Group,
        index: usize,
        tier: &Tier,
        connection: ConsumerConnection,
    ) -> Self {
        let queue = settings.topology.names().queue(tier);
        let mut source = Self::named(settings, group, index, tier, queue, connection);
        source.expect_subscription();
        source
    }

    /// The queue of this name, which the tier had before it moved. Handles count up from the first one.
    pub(super) fn former(
        settings: &Arc<ConsumerSettings>,
        group: &topology::Group,
        index: usize,
        tier: &Tier,
        queue: String,
        connection: ConsumerConnection,
        first_handle: Handle,
    ) -> Self {
        Self {
            is_former: true,
            next_handle: first_handle,
            ..Self::named(settings, group, index, tier, queue, connection)
        }
    }

    fn named(
        settings: &Arc<ConsumerSettings>,
        group: &topology::Group,
        index: usize,
        tier: &Tier,
        queue: String,
        connection: ConsumerConnection,
    ) -> Self {
        let window = group.concurrency.saturating_mul(group.prefetch);
        let mut controls = settings.controls.changes();
        let snapshot = controls.borrow_and_update().clone();
        let gating = Gating::new(&settings.topology, &tier.name, &snapshot, &settings.limits);
        let gating = Arc::new(gating);
        let (sender, stored) = mpsc::unbounded_channel();
        Self {
            group: group.name.clone(),
            tier: index,
            name: tier.name.as_str().into(),
            queue,
            is_former: false,
            parks_arrivals: false,
            is_gone: false,
            window,
            patience: settings.topology.broker().ack_timeout / ACK_TIMEOUT_PARTS,
            connection_changed: connection.changed(),
            connection,
            consumer: Consumer::None,
            generation: 0,
            has_own_connection: false,
            first_subscription_by: None,
            prefetched: Prefetched::default(),
            unsettled: HashMap::new(),
            orphans: Vec::new(),
            next_handle: 0,
            history: RedeliveryHistory::new(window.into()),
            limits: settings.limits.changes(),
            gating,
            controls,
            outlook: Outlook::new(),
            gathering_since: None,
            subscribed_at: Instant::now(),
            backoff: Backoff::new(),
            drain: None,
            is_paused: false,
            is_ending: false,
            ending_channels: Vec::new(),
            stored,
            sender,
            settled: VecDeque::new(),
            settings: settings.clone(),
        }
    }

    /// Whether all deliveries are settled, and the broker is told so.
    pub(super) fn is_settled(&self) -> bool {
        let is_flushed = match &self.consumer {
            Consumer::Subscribed(subscription) => !subscription.has_finished(),
            Consumer::None | Consumer::Subscribing(_) => true,
        };
        self.unsettled.is_empty() && is_flushed
    }

    /// Ends the consumer, and copies what was prefetched. The connection stays.
    fn stop_receiving(&mut self) {
        if self.drain.is_some() {
            return;
        }
        // Whether the queue is empty is asked once more.
        self.outlook.expect_more();
        self.drain = Some(Drain::new());
    }

    /// The handle of the next delivery.
    pub(super) fn next_handle(&self) -> Handle {
        self.next_handle
    }

    /// `Ok` if a former queue is gone, or has been empty for a while, and none of its deliveries is unsettled.
    ///
    /// # Errors
    /// When to ask again, unless something happens before.
    pub(super) fn is_used_up(&self, quiet: Duration) -> Result<(), Option<Instant>> {
        if !self.unsettled.is_empty() {
            return Err(None);
        }
        match &self.consumer {
            _ if self.is_gone => Ok(()),
            Consumer::Subscribed(subscription) if subscription.unsettled() == 0 => {
                let quiet_at = self.outlook.last_movement() + quiet;
                match Instant::now() < quiet_at {
                    true => Err(Some(quiet_at)),
                    false => Ok(()),
                }
            }
            _ => Err(None),
        }
    }

    fn origin(&self) -> Origin {
        Origin::Tier(self.name.to_string())
    }
}

impl Source for Queue {
    fn tier(&self) -> Option<usize> {
        Some(self.tier)
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Handle> {
        self.resume();
        self.check_ending_channels();
        self.poll_consumer(cx);
        self.follow_controls();
        if let Err(cause) = self.poll_deliveries(cx) {
            self.interrupted(&cause);
            // The next consumer has not registered its waker yet.
            cx.waker().wake_by_ref();
        }
        while let Poll::Ready(Some((handle, stored))) = self.stored.poll_recv(cx) {
            self.stored(handle, stored);
        }
        self.park_excess();
        self.put_back_starved();
        if self.poll_drain(cx) {
            // The last deliveries came before the answer to the cancel.
            let _ = self.poll_deliveries(cx);
            self.poll_drain(cx);
        }
        if let Consumer::Subscribed(subscription) = &self.consumer
            && self.drain.is_none()
        {
            self.outlook.check_consumer(subscription, cx);
        }
        if self.can_resume() {
            // The new consumer has not registered its waker yet.
            cx.waker().wake_by_ref();
        }
        match self.settled.pop_front() {
            Some(handle) => Poll::Ready(handle),
            None => Poll::Pending,
        }
    }

    fn wake_at(&self) -> Option<Instant> {
        let starved = self.prefetched.oldest().map(|it| it + self.patience);
        let suspect = match self.prefetched.has_suspect() {
            true => self.settings.suspects.start_at(),
            false => None,
        };
        let drain = self.drain.as_ref();
        let is_waiting = match &self.consumer {
            Consumer::None => false,
            Consumer::Subscribing(_) => true,
            Consumer::Subscribed(subscription) => !subscription.is_cancelled(),
        };
        let cancel = drain.map(|it| it.cancel_by).filter(|_| is_waiting);
        let check = match &self.consumer {
            Consumer::Subscribed(_) if drain.is_none() => Some(self.outlook.next_check()),
            _ => None,
        };
        let acknowledge = match &self.consumer {
            Consumer::Subscribed(subscription) if subscription.has_finished() => {
                drain.map(|it| it.acknowledge_by)
            }
            _ => None,
        };
        let opens = self.prefetched.opens_at();
        let due = [starved, suspect, cancel, acknowledge, check, opens];
        due.into_iter().flatten().min()
    }

    fn supply(&mut self) -> Supply {
        if self.is_paused {
            return Supply::Empty;
        }
        if self.prefetched.is_ready(&self.settings.suspects) {
            return Supply::Ready;
        }
        match &self.consumer {
            Consumer::Subscribed(subscription) => {
                // What is finished makes room as soon as it is acknowledged, which is about to happen.
                let room = usize::from(self.window).saturating_sub(subscription.open());
                // What comes next will probably become a row too, and takes no slot.
                match self.outlook.expects_more && room > 0 && !self.parks_arrivals {
                    true => Supply::Coming(room),
                    false => Supply::Empty,
                }
            }
            // What a lower tier has must not be taken for all there is.
            _ => match self.first_subscription_by {
                Some(by) if Instant::now() < by => Supply::Coming(self.window.into()),
                _ => Supply::Empty,
            },
        }
    }

    fn take(&mut self) -> Option<Delivery> {
        let (handle, permit) = self.prefetched.take(&self.settings.suspects)?;
        let unsettled = self.unsettled.get_mut(&handle)?;
        unsettled.is_taken = true;
        if unsettled.received.crashes() > 0 {
            unsettled.running = Some(self.settings.suspects.start());
        }
        let received = unsettled.received.clone();
        let lease = None;
        Some(Delivery {
            handle,
            received,
            permit,
            lease,
        })
    }

    fn hold(&mut self, cx: &mut Context<'_>) -> Option<Instant> {
        let Consumer::Subscribed(subscription) = &mut self.consumer else {
            return self.first_subscription_by;
        };
        if subscription.has_finished() {
            // What the slot is held for comes only after that.
            subscription.flush();
            self.gathering_since = None;
            self.outlook.moved();
        }
        self.outlook.hold(subscription, cx)
    }

    fn settle(&mut self, handle: Handle, next: Next) {
        if !matches!(next, Next::Done(_)) {
            let Some(unsettled) = self.unsettled.get(&handle) else {
                return;
            };
            let (settings, origin) = (self.settings.clone(), self.origin());
            let received = unsettled.received.clone();
            return self.store(handle, async move {
                settings.store(&origin, &received, next).await
            });
        }
        let Some(unsettled) = self.unsettled.remove(&handle) else {
            return;
        };
        let key = unsettled.received.key();
        match self.finished(unsettled.generation, unsettled.tag) {
            true => self.history.ended(key),
            false => self.history.ended_unacknowledged(key),
        }
    }

    fn flush(&mut self, is_quiet: bool) -> bool {
        self.flush_ending_channels();
        let is_withheld = self.drain.as_ref().is_some_and(|drain| {
            let is_gathering = Instant::now() < drain.acknowledge_by && !self.unsettled.is_empty();
            !self.is_cancelled() || is_gathering
        });
        let Consumer::Subscribed(subscription) = &mut self.consumer else {
            return false;
        };
        if is_withheld || !subscription.has_finished() {
            self.gathering_since = None;
            return false;
        }
        let now = Instant::now();
        let since = *self.gathering_since.get_or_insert(now);
        if !is_quiet && now < since + LONGEST_GATHERING {
            return true;
        }
        subscription.flush();
        self.gathering_since = None;
        self.outlook.moved();
        false
    }

    fn set_paused(&mut self, is_paused: bool) {
        self.is_paused = is_paused;
        if is_paused {
            self.stop_receiving();
        }
    }

    fn drain(&mut self) {
        self.is_ending = true;
        self.connection.drain();
        self.stop_receiving();
    }

    fn is_drained(&self) -> bool {
        let Some(drain) = &self.drain else {
            return false;
        };
        let is_cancelled = match &self.consumer {
            Consumer::Subscribed(_) => self.is_cancelled(),
            Consumer::Subscribing(_) => false,
            Consumer::None => true,
        };
        is_cancelled && drain.cancelling.is_none() && self.unsettled.values().all(|it| it.is_taken)
    }

    fn close(self: Box<Self>) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let Self {
                consumer,
                connection,
                connection_changed,
                ending_channels,
                ..
            } = *self;
            drop(connection_changed);
            Self::close_channels(ending_channels).await;
            if let Consumer::Subscribed(mut subscription) = consumer {
                subscription.flush();
                subscription.close().await;
            }
            connection.close().await;
        })
    }
}
