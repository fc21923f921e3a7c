//! Gives way: a tier with a long backlog leaves the servers to those that have a row now and then.
//!
//! A backlog that is relayed at full speed keeps broker and database busy, and each step of a row of another tier waits for
//! them. So while other tiers of this process have rows from time to time, a tier that never runs out of rows sends them in
//! bursts, and rests between two for longer than a burst takes. It does not give way to a tier that is less urgent.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::topology::Tier;

/// How long a tier counts as one that others give way to, after it has sent all rows that it had.
const ACTIVE_FOR: Duration = Duration::from_secs(1);
/// How many messages a burst has.
const BURST: usize = 64;
/// With so many unconfirmed a burst is over: a few may wait for a queue that is slow.
const LEFT: usize = BURST / 4;
/// A burst is over after this time in any case.
const LONGEST_BURST: Duration = Duration::from_millis(100);
/// How many times as long as a burst the rest after it is.
const REST: u32 = 2;
const SHORTEST_REST: Duration = Duration::from_millis(10);

/// When each tier of a relay last sent all rows that it had.
#[derive(Debug, Default)]
pub(super) struct Activity(Mutex<HashMap<String, (Urgency, Instant)>>);

/// How urgent a tier is, as far as the map says: by its `slo`, then by its `weight`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Urgency {
    slo: Option<Duration>,
    weight: Option<f64>,
}

impl Urgency {
    pub(super) fn of(tier: &Tier) -> Self {
        let Tier { slo, weight, .. } = tier;
        Self {
            slo: *slo,
            weight: *weight,
        }
    }

    /// Whether the map says so. Two tiers of which it says nothing are equal.
    fn is_less_than(self, other: Self) -> bool {
        let slo = |of: Self| of.slo.unwrap_or(Duration::MAX);
        match slo(self).cmp(&slo(other)) {
            Ordering::Less => false,
            Ordering::Greater => true,
            Ordering::Equal => self.weight.unwrap_or(1.0) < other.weight.unwrap_or(1.0),
        }
    }
}

/// The bursts of one tier.
#[derive(Debug)]
pub(super) struct Bursts {
    activity: Arc<Activity>,
    tier: String,
    urgency: Urgency,
    /// Whether there were more rows than could be sent the last time.
    has_backlog: bool,
    began: Option<Instant>,
    rests_until: Option<Instant>,
}

impl Bursts {
    pub(super) fn new(activity: &Arc<Activity>, tier: &str, urgency: Urgency) -> Self {
        Self {
            activity: activity.clone(),
            tier: tier.to_owned(),
            urgency,
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
        if let Some(began) = self.began {
            let took = now - began;
            if unconfirmed > LEFT && took < LONGEST_BURST {
                // Nothing is added to a burst.
                return 0;
            }
            self.began = None;
            let rest = took.min(LONGEST_BURST) * REST;
            self.rests_until = Some(now + rest.max(SHORTEST_REST));
        }
        match self.rests_until {
            Some(until) if now < until => 0,
            _ => {
                self.rests_until = None;
                window.min(unconfirmed + BURST)
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
            activity.insert(self.tier.clone(), (self.urgency, now));
        }
    }

    /// When to look again whether a burst or a rest is over.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        let over = self.began.filter(|_| self.has_backlog);
        self.rests_until.or(over.map(|began| began + LONGEST_BURST))
    }

    fn is_another_active(&self, now: Instant) -> bool {
        let activity = self.activity.0.lock();
        let activity = activity.unwrap_or_else(PoisonError::into_inner);
        activity
            .iter()
            .filter(|(tier, _)| **tier != self.tier)
            .any(|(_, (urgency, at))| now < *at + ACTIVE_FOR && !urgency.is_less_than(self.urgency))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING_SAID: Urgency = Urgency {
        slo: None,
        weight: None,
    };

    #[tokio::test(start_paused = true)]
    async fn a_backlog_rests_between_bursts_while_another_tier_has_rows_now_and_then() {
        let activity = Arc::default();
        let bursts = |tier| Bursts::new(&activity, tier, NOTHING_SAID);
        let [mut bulk, mut critical] = ["bulk", "critical"].map(bursts);
        let begin = Instant::now();
        bulk.sent(false, begin);
        assert_eq!(bulk.window(256, 200, begin), 256);
        critical.sent(true, begin);
        assert_eq!(critical.window(256, 1, begin), 256);
        assert_eq!(bulk.window(256, 0, begin), BURST);
        bulk.sent(false, begin);
        let confirmed = begin + Duration::from_millis(20);
        assert_eq!(bulk.window(256, LEFT + 1, confirmed), 0);
        assert_eq!(bulk.window(256, LEFT, confirmed), 0);
        let rested = confirmed + Duration::from_millis(40);
        assert_eq!(bulk.wake_at(), Some(rested));
        assert_eq!(bulk.window(256, LEFT, rested), LEFT + BURST);
        // The other one has a backlog of its own, or nothing, for a while.
        bulk.sent(false, rested);
        critical.sent(false, rested);
        assert_eq!(bulk.window(256, BURST, begin + ACTIVE_FOR), 256);
        assert_eq!(bulk.wake_at(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_burst_that_is_not_confirmed_holds_up_the_next_one_for_a_moment() {
        let activity = Arc::default();
        let bursts = |tier| Bursts::new(&activity, tier, NOTHING_SAID);
        let [mut bulk, mut critical] = ["bulk", "critical"].map(bursts);
        let begin = Instant::now();
        critical.sent(true, begin);
        bulk.sent(false, begin);
        assert_eq!(bulk.window(256, BURST, begin), 0);
        assert_eq!(bulk.wake_at(), Some(begin + LONGEST_BURST));
        let over = begin + LONGEST_BURST;
        assert_eq!(bulk.window(256, BURST, over), 0);
        let rested = over + LONGEST_BURST * REST;
        assert_eq!(bulk.window(256, BURST, rested), 2 * BURST);
    }

    #[tokio::test(start_paused = true)]
    async fn no_tier_gives_way_to_itself_or_to_one_that_is_less_urgent() {
        let activity = Arc::default();
        let urgent = Urgency {
            slo: Some(Duration::from_secs(5)),
            ..NOTHING_SAID
        };
        let mut critical = Bursts::new(&activity, "critical", urgent);
        let mut bulk = Bursts::new(&activity, "bulk", NOTHING_SAID);
        bulk.sent(true, Instant::now());
        critical.sent(true, Instant::now());
        critical.sent(false, Instant::now());
        assert_eq!(critical.window(256, 10, Instant::now()), 256);
        let [heavy, light] = [2.0, 0.5].map(|weight| Urgency {
            weight: Some(weight),
            ..NOTHING_SAID
        });
        assert!(light.is_less_than(NOTHING_SAID) && NOTHING_SAID.is_less_than(heavy));
        assert!(heavy.is_less_than(urgent) && !urgent.is_less_than(heavy));
        assert!(!light.is_less_than(light));
    }
}
