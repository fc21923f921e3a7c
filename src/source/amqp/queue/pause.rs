//! A pause of the tier.
//!
//! It ends the consumer as a shutdown does: nothing is received any more, and what was prefetched is copied, so that no
//! redelivered flag tells of a crash that never was. What runs goes on. After the pause the queue is consumed from on a new
//! channel, and what still runs from before is settled on the channel that it came on.

use std::time::SystemTime;

use super::{Consumer, Queue};
use crate::source::amqp::outlook::Outlook;
use crate::source::amqp::subscription::Subscription;
use crate::source::{Handle, Source};

/// A channel of before a pause. Its consumer is cancelled, and some of its deliveries still run.
pub(super) struct EndingChannel {
    generation: u64,
    subscription: Box<Subscription>,
}

/// The channel of this generation.
pub(super) fn find(channels: &mut [EndingChannel], generation: u64) -> Option<&mut Subscription> {
    let mut channels = channels.iter_mut();
    let channel = channels.find(|it| it.generation == generation)?;
    Some(&mut channel.subscription)
}

impl Queue {
    /// Whether a pause is over, and everything that was prefetched before it is copied.
    pub(super) fn can_resume(&self) -> bool {
        !self.is_paused && !self.is_ending && self.is_drained()
    }

    /// Consumes again after a pause.
    pub(super) fn resume(&mut self) {
        if !self.can_resume() {
            return;
        }
        self.drain = None;
        if let Consumer::Subscribed(subscription) =
            std::mem::replace(&mut self.consumer, Consumer::None)
        {
            self.ending_channels.push(EndingChannel {
                generation: self.generation,
                subscription,
            });
        }
        self.has_own_connection = false;
        self.gathering_since = None;
        self.outlook = Outlook::new();
        self.expect_subscription();
    }

    /// Whether a delivery can be settled on a channel of before a pause.
    pub(super) fn has_ending_channel(&self, handle: Handle) -> bool {
        let generation = self.unsettled.get(&handle).map(|it| it.generation);
        let mut channels = self.ending_channels.iter();
        channels.any(|it| Some(it.generation) == generation)
    }

    /// Notices that channels of before a pause are lost. Their deliveries come again on the new one.
    pub(super) fn check_ending_channels(&mut self) {
        let is_lost = |it: &mut EndingChannel| !it.subscription.is_open();
        let lost: Vec<_> = self.ending_channels.extract_if(.., is_lost).collect();
        for EndingChannel {
            generation,
            subscription,
        } in lost
        {
            tokio::spawn(subscription.close());
            let running = self.unsettled.iter();
            let running = running.filter(|(_, it)| it.generation == generation);
            let (handles, has_id): (Vec<_>, Vec<_>) = running
                .map(|(handle, it)| (*handle, it.received.has_id()))
                .unzip();
            let without_id = has_id.iter().filter(|has_id| !**has_id).count();
            self.orphans.extend(handles);
            self.history
                .lost(SystemTime::now(), std::iter::empty(), without_id);
            if let Consumer::Subscribed(_) = self.consumer {
                self.history.subscribed();
            }
        }
    }

    /// Acknowledges what is done of before a pause, and closes the channels whose deliveries are all settled.
    pub(super) fn flush_ending_channels(&mut self) {
        let unsettled = &self.unsettled;
        let is_settled = |it: &mut EndingChannel| {
            if it.subscription.has_finished() {
                it.subscription.flush();
            }
            !unsettled
                .values()
                .any(|unsettled| unsettled.generation == it.generation)
        };
        for settled in self.ending_channels.extract_if(.., is_settled) {
            tokio::spawn(settled.subscription.close());
        }
    }

    /// Acknowledges what is done, and closes channels of before a pause.
    pub(super) async fn close_channels(channels: Vec<EndingChannel>) {
        let closing = channels.into_iter().map(|mut channel| {
            channel.subscription.flush();
            channel.subscription.close()
        });
        futures_util::future::join_all(closing).await;
    }
}
