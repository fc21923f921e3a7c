//! How much is sent to a queue at once: everything that there is, or little by little after it refused.

use tokio::time::Instant;

use crate::backoff::Backoff;

/// How many messages of a tier may be sent and not confirmed.
pub(super) struct Pace {
    most: usize,
    window: usize,
    /// Until when nothing is sent.
    paused_until: Option<Instant>,
    /// The next pause. The first message that is stored ends its growth.
    backoff: Backoff,
    /// When to warn again. A queue at its limit refuses some messages all the time.
    warnings: Backoff,
}

impl Pace {
    /// At first `most` at once.
    pub(super) fn new(most: usize) -> Self {
        Self {
            most,
            window: most,
            paused_until: None,
            backoff: Backoff::new(),
            warnings: Backoff::new(),
        }
    }

    /// How many may be unconfirmed now.
    pub(super) fn window(&mut self, now: Instant) -> usize {
        match self.paused_until {
            Some(until) if now < until => 0,
            _ => {
                self.paused_until = None;
                self.window
            }
        }
    }

    /// When to send again.
    pub(super) fn paused_until(&self) -> Option<Instant> {
        self.paused_until
    }

    /// A message was stored: the window grows, so that it doubles with each round trip.
    pub(super) fn stored(&mut self) {
        if self.paused_until.is_some() {
            return;
        }
        if self.window < self.most {
            self.window += 1;
            self.backoff = Backoff::new();
        }
    }

    /// A message was not stored: nothing is sent for a while, and then one message. Returns whether that is worth a
    /// warning.
    pub(super) fn refused(&mut self, now: Instant) -> bool {
        if self.paused_until.is_some() {
            // What was sent together is refused together.
            return false;
        }
        self.window = 1;
        self.paused_until = Some(now + self.backoff.next());
        self.warnings.is_worth_a_warning()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_queue_that_refuses_is_asked_with_one_message_after_a_pause_that_grows() {
        let mut pace = Pace::new(100);
        assert_eq!(pace.window(Instant::now()), 100);
        let mut pauses = Vec::new();
        for _ in 0..10 {
            let begin = Instant::now();
            pace.refused(begin);
            pace.refused(begin);
            pace.stored();
            assert_eq!(pace.window(begin), 0);
            let until = pace.paused_until().unwrap();
            pauses.push(until - begin);
            tokio::time::sleep_until(until).await;
            assert_eq!(
                (pace.window(Instant::now()), pace.paused_until()),
                (1, None)
            );
        }
        assert!(pauses[0] <= Duration::from_millis(100), "{pauses:?}");
        assert!(pauses[9] >= Duration::from_millis(500), "{pauses:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_queue_that_takes_messages_again_gets_ever_more_up_to_all() {
        let mut pace = Pace::new(100);
        pace.refused(Instant::now());
        tokio::time::sleep(Duration::from_secs(1)).await;
        let mut rounds = 0;
        while pace.window(Instant::now()) < 100 {
            for _ in 0..pace.window(Instant::now()) {
                pace.stored();
            }
            rounds += 1;
        }
        assert_eq!(rounds, 7);
    }
}
