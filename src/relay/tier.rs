//! Relays the rows of one tier: claim, publish, delete what is confirmed, and again.
//!
//! It is one task that acts in ticks, as a worker's group does. No transaction is open while it waits for confirms.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use tokio::time::{Instant, Sleep, timeout};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use uuid::Uuid;

use super::burst::{Activity, Bursts, Urgency};
use super::keys::KeyHolder;
use super::message::{Relayed, relayed, unpublishable};
use super::pace::Pace;
use crate::Error;
use crate::backoff::Backoff;
use crate::error::PublishError;
use crate::message::Received;
use crate::observe::Event;
use crate::publish::DEFAULT_DEADLINE;
use crate::source::amqp::ConsumerSettings;
use crate::source::postgres::{RowSettings, Rows};
use crate::source::{Handle, Next, Source, Supply, task_ref};

/// How many messages may be unconfirmed. RabbitMQ is fastest from 200 on, and a larger window makes other tiers wait.
const UNCONFIRMED: usize = 256;
/// How many rows are claimed beyond those, so that the next ones are here when the last are confirmed.
const PREFETCHED: usize = 256;
/// How many messages one tick sends: threads of the runtime that other tiers wait for must be free soon.
const SENT_AT_ONCE: usize = 64;
/// How many bytes may be unconfirmed, about. It is at least one message.
const UNCONFIRMED_BYTES: usize = 16 << 20;
/// How much longer a mebibyte of payload may take to be confirmed.
const LIMIT_PER_MIB: Duration = Duration::from_secs(1);
/// When a row is tried again that alone may be the reason why it was not stored.
const AGAIN_AFTER: Duration = Duration::from_secs(10);
/// How long the end may take.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);

pub(super) struct RelayedTier {
    consumer: Arc<ConsumerSettings>,
    name: String,
    rows: Box<Rows>,
    keys: KeyHolder,
    publishing: FuturesUnordered<BoxFuture<'static, Published>>,
    unconfirmed_bytes: usize,
    pace: Pace,
    bursts: Bursts,
    /// When to warn again of rows that go to another tier.
    stray_warnings: Backoff,
    stopping: Pin<Box<WaitForCancellationFutureOwned>>,
    is_draining: bool,
    timer: Pin<Box<Sleep>>,
}

/// A row whose publish has ended.
pub(super) struct Published {
    handle: Handle,
    pub(super) row: Uuid,
    received: Arc<Received>,
    is_own_tier: bool,
    pub(super) stored: Result<(), Arc<Error>>,
}

impl Published {
    /// Whether its key is to be held before the row is deleted.
    fn has_key_to_hold(&self) -> bool {
        let message = self.received.message();
        self.stored.is_ok() && message.is_ok_and(|message| message.key.is_some())
    }
}

impl RelayedTier {
    /// `None`: the map has no such tier.
    pub(super) fn new(
        consumer: Arc<ConsumerSettings>,
        rows: &Arc<RowSettings>,
        name: &str,
        activity: &Arc<Activity>,
        stopping: CancellationToken,
    ) -> Option<Self> {
        let urgency = Urgency::of(consumer.topology.tier(name)?);
        Some(Self {
            consumer,
            name: name.to_owned(),
            rows: Box::new(Rows::new(
                rows,
                "relay",
                0,
                name,
                1,
                UNCONFIRMED + PREFETCHED,
            )?),
            keys: KeyHolder::new(rows.database()),
            publishing: FuturesUnordered::new(),
            unconfirmed_bytes: 0,
            pace: Pace::new(UNCONFIRMED),
            bursts: Bursts::new(activity, name, urgency),
            stray_warnings: Backoff::new(),
            stopping: Box::pin(stopping.cancelled_owned()),
            is_draining: false,
            timer: Box::pin(tokio::time::sleep(Duration::ZERO)),
        })
    }

    /// Relays until shutdown is requested, and what was sent is settled.
    pub(super) async fn run(mut self) {
        poll_fn(|cx| self.tick(cx)).await;
        let _ = timeout(CLOSE_LIMIT, self.rows.close()).await;
    }

    fn tick(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let mut is_quiet = true;
            while let Poll::Ready(Some(published)) = self.publishing.poll_next_unpin(cx) {
                is_quiet = false;
                match published.has_key_to_hold() {
                    true => self.keys.push(published),
                    false => self.settle(published),
                }
            }
            for published in self.keys.poll(cx) {
                is_quiet = false;
                self.settle(published);
            }
            if !self.is_draining && self.stopping.as_mut().poll(cx).is_ready() {
                self.is_draining = true;
                self.rows.drain();
            }
            while self.rows.poll(cx).is_ready() {}
            let has_sent = !self.is_draining && self.send();
            let is_gathering = self.rows.flush(is_quiet || self.is_draining);
            let is_all_settled = self.publishing.is_empty() && self.keys.len() == 0;
            if self.is_draining && is_all_settled && self.rows.is_drained() {
                return Poll::Ready(());
            }
            if !has_sent && self.is_time(cx) {
                continue;
            }
            if has_sent || is_gathering {
                // What was sent is first polled in the next tick. Other tiers have their turn before.
                cx.waker().wake_by_ref();
            }
            return Poll::Pending;
        }
    }

    /// Sends as many rows as may be unconfirmed. Whether there were any.
    fn send(&mut self) -> bool {
        let window = self.pace.window(Instant::now());
        self.rows.set_window(match window {
            UNCONFIRMED.. => UNCONFIRMED + PREFETCHED,
            few => few,
        });
        if window == 0 {
            // Others may have more luck with them.
            while let Some(delivery) = self.rows.take() {
                self.rows.settle(delivery.handle, Next::Back);
            }
            return false;
        }
        let mut has_sent = false;
        let now = Instant::now();
        let unconfirmed = |relayed: &Self| relayed.publishing.len() + relayed.keys.len();
        let window = self.bursts.window(window, unconfirmed(self), now);
        let window = window.min(unconfirmed(self) + SENT_AT_ONCE);
        let mut are_all = false;
        while unconfirmed(self) < window && self.unconfirmed_bytes < UNCONFIRMED_BYTES {
            let Some(delivery) = self.rows.take() else {
                are_all = matches!(self.rows.supply(), Supply::Empty);
                break;
            };
            let (handle, received) = (delivery.handle, delivery.received);
            match relayed(&self.consumer, &received) {
                Ok(relayed) => {
                    let Some(row) = self.rows.row_id(handle) else {
                        continue;
                    };
                    has_sent = true;
                    self.unconfirmed_bytes += received.payload().len();
                    let run = (handle, row);
                    let publishing = publish(self.consumer.clone(), run, received, relayed);
                    self.publishing.push(Box::pin(publishing));
                }
                Err(next) => self.rows.settle(handle, next),
            }
        }
        if has_sent {
            self.bursts.sent(are_all, now);
        }
        has_sent
    }

    fn settle(&mut self, published: Published) {
        let Published {
            handle,
            received,
            is_own_tier,
            stored,
            ..
        } = published;
        self.unconfirmed_bytes -= received.payload().len();
        let Ok(message) = received.message() else {
            return;
        };
        let error = match stored {
            Ok(()) => {
                self.rows.relayed(handle);
                self.pace.stored();
                let task = task_ref(message);
                self.consumer.observers.emit(&Event::Relayed { task });
                return;
            }
            Err(error) => error,
        };
        let (tier, id) = (self.name.as_str(), &message.id);
        let is_of_queue = is_own_tier && !matches!(*error, Error::Database(_));
        let is_warning = match is_of_queue {
            true => self.pace.refused(Instant::now()),
            false => self.stray_warnings.is_worth_a_warning(),
        };
        match is_warning {
            true => tracing::warn!(tier, %id, %error, "a row was not relayed, trying again"),
            false => tracing::debug!(tier, %id, %error, "a row was not relayed, trying again"),
        }
        let next = match trouble(&error) {
            Trouble::Row => unpublishable(message, &error),
            // It keeps its place and its due time: all rows of the tier wait for the same queue.
            Trouble::Tier if is_own_tier => Next::Back,
            Trouble::Tier | Trouble::Unknown => Next::Later {
                message: Box::new(message.clone()),
                after: AGAIN_AFTER,
                failure: None,
            },
        };
        self.rows.settle(handle, next);
    }

    /// Whether it is time to look again.
    fn is_time(&mut self, cx: &mut Context<'_>) -> bool {
        let paused = self.pace.paused_until().filter(|_| !self.is_draining);
        // While nothing is sent, nobody asks whether a burst is over.
        let is_sending = !self.is_draining && paused.is_none();
        let bursts = self.bursts.wake_at().filter(|_| is_sending);
        let wake_at = self.rows.wake_at().into_iter().chain(paused).chain(bursts);
        let Some(wake_at) = wake_at.min() else {
            return false;
        };
        if wake_at < self.timer.deadline() {
            self.timer.as_mut().reset(wake_at);
        }
        while self.timer.as_mut().poll(cx).is_ready() {
            if Instant::now() >= wake_at {
                return true;
            }
            self.timer.as_mut().reset(wake_at);
        }
        false
    }
}

async fn publish(
    consumer: Arc<ConsumerSettings>,
    (handle, row): (Handle, Uuid),
    received: Arc<Received>,
    relayed: Relayed,
) -> Published {
    let Relayed {
        outgoing,
        is_own_tier,
    } = relayed;
    let mebibytes = u32::try_from(received.payload().len() >> 20).unwrap_or(u32::MAX);
    let limit = DEFAULT_DEADLINE + LIMIT_PER_MIB.saturating_mul(mebibytes);
    let deadline = Instant::now() + limit;
    let publisher = &consumer.publisher;
    let forwarding = publisher.forward_unless_refused(outgoing, received.id(), deadline);
    let stored = forwarding.await.map_err(Arc::new);
    Published {
        handle,
        row,
        received,
        is_own_tier,
        stored,
    }
}

/// Why a row was not stored.
enum Trouble {
    /// The broker will never take it.
    Row,
    /// The broker takes nothing for this tier now.
    Tier,
    /// It may be stored or not. A broker that closes the channel because of this row looks the same as one that is lost.
    Unknown,
}

fn trouble(error: &Error) -> Trouble {
    match error {
        Error::Publish(
            PublishError::Refused { .. }
            | PublishError::Blocked { .. }
            | PublishError::NotConnected { .. }
            | PublishError::QueueDown { .. }
            | PublishError::Unroutable { .. },
        )
        | Error::Closed { .. } => Trouble::Tier,
        Error::Publish(PublishError::Unconfirmed { .. }) => Trouble::Unknown,
        // The key could not be held.
        Error::Database(_) => Trouble::Unknown,
        error if error.is_transient() => Trouble::Unknown,
        _ => Trouble::Row,
    }
}
