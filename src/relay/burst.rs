//! Gives way: a tier with a long backlog leaves the servers to those that have a row now and then.
//!
//! A backlog that is relayed at full speed keeps broker and database busy, and each step of a row of another tier waits for
//! them. So while other tiers of this process have rows from time to time, a tier that never runs out of rows sends them in
//! bursts, and rests between two for longer than a burst takes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// How long a tier counts as one that others give way to, after it has sent all rows that it had.
const ACTIVE_FOR: Duration = Duration::from_secs(1);
/// How many messages a burst has.
pub(super) const BURST: usize = 64;
/// How many times as long as a burst the rest after it is.
const REST: u32 = 4;
const SHORTEST_REST: Duration = Duration::from_millis(10);
const LONGEST_REST: Duration = Duration::from_millis(200);

/// When each tier of a relay last sent all rows that it had.
#[derive(Debug, Default)]
pub(super) struct Activity(Mutex<HashMap<String, Instant>>);

/// The bursts of one tier.
#[derive(Debug)]
pub(super) struct Bursts {
    activity: Arc<Activity>,
    tier: String,
    /// Whether there were more rows than could be sent the last time.
    has_backlog: bool,
    began: Option<Instant>,
    rests_until: Option<Instant>,
}

impl Bursts {
    pub(super) fn new(activity: &Arc<Activity>, tier: &str) -> Self {
        Self {
            activity: activity.clone(),
            tier: tier.to_owned(),
            has_backlog: false,
            began: None,
            rests_until: None,
        }
    }

    /// How many messages may be unconfirmed now, of at most `window`. So many are.
    pub(super) fn window(&mut self, window: usize, unconfirmed: usize, now: Instant) -> usize {
        if !self.has_backlog || !self.is_another_active(now) {
            (self.began, self.rests_until) = (None, None);
            return window;
        }
        if unconfirmed > 0 {
            // Nothing is added to a burst.
            return 0;
        }
        if let Some(began) = self.began.take() {
            let rest = (now - began) * REST;
            self.rests_until = Some(now + rest.clamp(SHORTEST_REST, LONGEST_REST));
        }
        match self.rests_until {
            Some(until) if now < until => 0,
            _ => {
                self.rests_until = None;
                window.min(BURST)
            }
        }
    }

    /// Messages were sent; `are_all`: there are no more rows.
    pub(super) fn sent(&mut self, are_all: bool, now: Instant) {
        self.began.get_or_insert(now);
        self.has_backlog = !are_all;
        if are_all {
            let mut activity = self.activity.0.lock();
            let activity = activity.as_mut().unwrap_or_else(PoisonError::get_mut);
            activity.insert(self.tier.clone(), now);
        }
    }

    /// When to send again.
    pub(super) fn rests_until(&self) -> Option<Instant> {
        self.rests_until
    }

    fn is_another_active(&self, now: Instant) -> bool {
        let activity = self.activity.0.lock();
        let activity = activity.unwrap_or_else(PoisonError::into_inner);
        activity
            .iter()
            .any(|(tier, at)| *tier != self.tier && now < *at + ACTIVE_FOR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_backlog_rests_between_bursts_while_another_tier_has_rows_now_and_then() {
        let activity = Arc::default();
        let [mut bulk, mut critical] = ["bulk", "critical"].map(|it| Bursts::new(&activity, it));
        let begin = Instant::now();
        bulk.sent(false, begin);
        assert_eq!(bulk.window(256, 200, begin), 256);
        critical.sent(true, begin);
        assert_eq!(critical.window(256, 1, begin), 256);
        assert_eq!(bulk.window(256, 200, begin), 0);
        assert_eq!(bulk.window(256, 0, begin), BURST);
        bulk.sent(false, begin);
        let confirmed = begin + Duration::from_millis(20);
        assert_eq!(bulk.window(256, 1, confirmed), 0);
        assert_eq!(bulk.window(256, 0, confirmed), 0);
        let rested = confirmed + Duration::from_millis(80);
        assert_eq!(bulk.rests_until(), Some(rested));
        assert_eq!(bulk.window(256, 0, rested), BURST);
        // The other one has a backlog of its own, or nothing, for a while.
        bulk.sent(false, rested);
        critical.sent(false, rested);
        assert_eq!(bulk.window(256, BURST, begin + ACTIVE_FOR), 256);
        assert_eq!(bulk.rests_until(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn no_tier_gives_way_to_itself() {
        let mut bulk = Bursts::new(&Arc::default(), "bulk");
        bulk.sent(true, Instant::now());
        bulk.sent(false, Instant::now());
        assert_eq!(bulk.window(256, 10, Instant::now()), 256);
    }
}
