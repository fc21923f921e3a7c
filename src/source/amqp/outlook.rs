//! Whether a queue is about to send more.
//!
//! After an acknowledgement the next message is a round trip away. A slot that is given to a lower tier in that
//! moment serves it while the higher tier has a backlog. So a queue whose prefetch window was full is believed to
//! have more, until the broker says that it is empty.

use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::Instant;

use super::subscription::{QueueState, QueueStateFuture, Subscription};

/// How long a queue must be quiet before the broker is asked whether it has more.
const QUIET: Duration = Duration::from_millis(3);
/// How long slots are held for a queue whose messages do not come, although it has some: longer than a
/// busy broker stalls.
const LONGEST_HOLD: Duration = Duration::from_millis(300);
/// How long a consumer may be quiet before the broker is asked whether it still knows it.
const CHECK_EVERY: Duration = Duration::from_secs(10);

pub(super) struct Outlook {
    pub(super) expects_more: bool,
    /// When a message last came, or room for one was made.
    last_movement: Instant,
    /// Since when a slot is held.
    held_since: Option<Instant>,
    question: Option<(Instant, QueueStateFuture)>,
    last_check: Instant,
}

impl Outlook {
    pub(super) fn new() -> Self {
        Self {
            expects_more: false,
            last_movement: Instant::now(),
            held_since: None,
            question: None,
            last_check: Instant::now(),
        }
    }

    pub(super) fn expect_more(&mut self) {
        self.expects_more = true;
        self.moved();
    }

    /// A message came, or room for one was made.
    pub(super) fn moved(&mut self) {
        self.last_movement = Instant::now();
        self.held_since = None;
    }

    /// When a message last came, or room for one was made.
    pub(super) fn last_movement(&self) -> Instant {
        self.last_movement
    }

    /// The channel is gone.
    pub(super) fn lost(&mut self) {
        self.nothing_more();
        self.question = None;
    }

    /// Until when to hold a slot; `None` if it is released. Asks the broker after a quiet while.
    pub(super) fn hold(
        &mut self,
        subscription: &Subscription,
        cx: &mut Context<'_>,
    ) -> Option<Instant> {
        let now = Instant::now();
        let latest = *self.held_since.get_or_insert(now) + LONGEST_HOLD;
        if now >= latest {
            self.nothing_more();
            return None;
        }
        let quiet = self.last_movement + QUIET;
        if now < quiet {
            return Some(quiet.min(latest));
        }
        self.ask(subscription, cx);
        Some(latest)
    }

    /// Asks the broker about a consumer that has been quiet for long.
    pub(super) fn check_consumer(&mut self, subscription: &Subscription, cx: &mut Context<'_>) {
        if Instant::now() >= self.next_check() {
            self.last_check = Instant::now();
            self.ask(subscription, cx);
        }
    }

    pub(super) fn next_check(&self) -> Instant {
        self.last_check.max(self.last_movement) + CHECK_EVERY
    }

    /// Takes in the broker's answer. Whether it says that the queue is empty.
    ///
    /// # Errors
    /// Why the consumer is of no use any more.
    pub(super) fn poll_answer(&mut self, cx: &mut Context<'_>) -> Result<bool, String> {
        let Some((asked_at, question)) = &mut self.question else {
            return Ok(false);
        };
        let Poll::Ready(state) = question.as_mut().poll(cx) else {
            return Ok(false);
        };
        let is_empty = matches!(state, Some(QueueState { ready: 0, .. }));
        let has_moved = self.last_movement > *asked_at;
        self.question = None;
        self.last_check = Instant::now();
        match (has_moved, state) {
            (true, _) => {}
            (false, Some(QueueState { consumers: 0, .. })) => {
                // Seen after a quorum queue was deleted and declared again at once: the broker cancels no
                // consumer, and sends nothing.
                return Err("the broker has forgotten the consumer".to_owned());
            }
            (false, Some(QueueState { ready: 0, .. }) | None) => self.nothing_more(),
            (false, Some(_)) => self.last_movement = Instant::now(),
        }
        Ok(is_empty)
    }

    /// Asks the broker whether the queue has more.
    pub(super) fn ask(&mut self, subscription: &Subscription, cx: &mut Context<'_>) {
        if self.question.is_none() {
            self.question = Some((Instant::now(), subscription.queue_state()));
            // The question is sent when it is first polled, with everything else that waits.
            cx.waker().wake_by_ref();
        }
    }

    fn nothing_more(&mut self) {
        self.expects_more = false;
        self.held_since = None;
    }
}
