//! The part of a process in a limit that processes share.

use super::*;
use crate::control::limit::share::{Answer, Report, Share, ShareId, Wants};
use crate::random;

/// How much more than its measured use a process wants, and how coarse that is: not every round is to change a row.
const HEADROOM: f64 = 1.5;
/// The use is measured over at least this time.
const MEASURED: f64 = 0.2;
const WEIGHT: f64 = 0.5;
/// How often a process with something to start takes part in rounds.
const EVERY: Duration = Duration::from_millis(500);
/// How often one that has no share, or less than its part.
const EVERY_WHEN_SHORT: Duration = Duration::from_millis(100);
/// How often one that starts nothing, while tasks run.
const EVERY_WHEN_RUNNING: Duration = Duration::from_secs(4);

/// How the pool of a limit knows this process.
#[derive(Debug)]
pub(in crate::control::limit) struct ShareState {
    /// Drawn anew after the pool has forgotten it.
    id: ShareId,
    /// Whether a round was answered under this id.
    is_known: bool,
    /// All tokens that were ever given back to the pool and taken from it, under this id: a round whose answer is lost
    /// loses none.
    pub(super) returned: f64,
    given: f64,
    /// What the last answer named as the fair part, and what the pool thinks is held.
    fair: Share,
    granted: Share,
    /// Starts per second, measured.
    used: f64,
    measured: Instant,
    /// When the rounds have last run, by the monotonic clock and by the wall clock.
    pub(super) ticked: (Instant, SystemTime),
}

impl ShareState {
    pub(super) fn new(now: Instant, wall: SystemTime) -> Self {
        Self {
            id: u64::from(random::number()) << 32 | u64::from(random::number()),
            is_known: false,
            returned: 0.0,
            given: 0.0,
            fair: Share::default(),
            granted: Share::default(),
            used: 0.0,
            measured: now,
            ticked: (now, wall),
        }
    }
}

impl Local {
    /// Whether no round was answered yet.
    pub(super) fn is_undecided(&self) -> bool {
        self.shared_limit().is_some() && !self.share.is_known
    }

    /// The rounds run. A process that stood still uses its share again when a round was answered.
    pub(in crate::control::limit) fn tick(&mut self, now: Instant) {
        if !self.is_stalled(now) {
            self.share.ticked = (now, self.wall);
        }
    }

    /// How long after a round the next is due. `None`: there is to be none, as nobody wants to start anything, and nothing
    /// is held.
    pub(in crate::control::limit) fn pause(&self, now: Instant) -> Option<Duration> {
        if !self.takes_part(now) {
            return None;
        }
        let is_agreed = self.share.is_known && self.held() == self.share.granted;
        Some(match () {
            // What was given up may be held by others then.
            () if !is_agreed => Duration::ZERO,
            () if self.is_short(now) => EVERY_WHEN_SHORT,
            () if self.is_wanted(now) => EVERY,
            () if self.runs_any() => EVERY_WHEN_RUNNING,
            () => Duration::ZERO,
        })
    }

    /// Whether somebody wants to start something, or other processes think that something is held.
    pub(in crate::control::limit) fn takes_part(&self, now: Instant) -> bool {
        self.is_wanted(now) || self.share.is_known || self.runs_any()
    }

    /// Whether there is somebody who would start more, or has done so a moment ago.
    pub(in crate::control::limit) fn is_wanted(&self, now: Instant) -> bool {
        self.is_shared() && is_recent(self.demand.last, now)
    }

    /// Nobody wants to start anything any more.
    pub(in crate::control::limit) fn give_up(&mut self) {
        self.demand = Demand::default();
    }

    /// Whether somebody waits for more than is held, and less is held than is this process's part.
    fn is_short(&self, now: Instant) -> bool {
        let (held, fair) = (self.held(), self.share.fair);
        let is_below = !self.share.is_known
            || held.rate < fair.rate * 0.99
            || held.burst < fair.burst
            || held.running < fair.running;
        self.lacks(now)
            && (is_below
                || held.burst == 0 && self.rate.is_some()
                || held.running == 0 && self.places.is_some())
    }

    /// Whether tasks run that take places.
    pub(in crate::control::limit) fn runs_any(&self) -> bool {
        self.is_shared() && self.used > 0 && self.places.is_some()
    }

    pub(in crate::control::limit) fn held(&self) -> Share {
        if !self.is_shared() {
            return Share::default();
        }
        let rate = self.rate.as_ref();
        Share {
            rate: rate.map_or(0.0, |bucket| bucket.per_second),
            burst: rate.map_or(0, |bucket| bucket.burst),
            running: self.places.as_ref().map_or(0, |places| places.held),
        }
    }

    /// What this process says in a round. What it does not want any more it gives up before it says so.
    pub(in crate::control::limit) fn report(&mut self, now: Instant) -> Report {
        let is_wanted = self.is_wanted(now);
        self.measure(now);
        if let Some(bucket) = &mut self.rate {
            bucket.refill(now);
        }
        if !is_wanted {
            self.lower(&Share::default());
        }
        let share = &self.share;
        let room = self.rate.as_ref().filter(|_| self.is_shared());
        Report {
            id: share.id,
            is_known: share.is_known,
            held: self.held(),
            wants: self.wants(now, is_wanted),
            room: room.map_or(0.0, |bucket| f64::from(bucket.burst) - bucket.tokens),
            returned: share.returned,
            is_leaving: !is_wanted && !self.runs_any(),
        }
    }

    fn measure(&mut self, now: Instant) {
        let share = &mut self.share;
        let elapsed = now.saturating_duration_since(share.measured).as_secs_f64();
        if elapsed < MEASURED {
            return;
        }
        let starts = f64::from(std::mem::take(&mut self.demand.starts)) / elapsed;
        share.used += (starts - share.used) * WEIGHT;
        share.measured = now;
    }

    fn wants(&self, now: Instant, is_wanted: bool) -> Wants {
        let rate = match is_recent(self.demand.lacked_token, now) {
            true => None,
            // Up to the next power.
            false => {
                Some(HEADROOM.powf((self.share.used * HEADROOM).max(1e-6).log(HEADROOM).ceil()))
            }
        };
        let running = match is_recent(self.demand.lacked_place, now) {
            true => u32::MAX,
            false => self.used,
        };
        Wants {
            rate,
            running,
            is_wanted,
        }
    }

    /// Follows an answer to what was reported at `sent`. `None`: the pool does not know this process any more. Whether more
    /// may start than before.
    pub(in crate::control::limit) fn answered(
        &mut self,
        answer: Option<&Answer>,
        sent: Instant,
        now: Instant,
    ) -> bool {
        let was_stalled = self.is_stalled(now);
        // An answer that is old says nothing of what others hold by now.
        self.share.ticked = (sent, self.wall);
        let Some(answer) = answer else {
            // Others may have its share by now.
            self.lower(&Share::default());
            let (used, measured) = (self.share.used, self.share.measured);
            self.share = ShareState {
                used,
                measured,
                ..ShareState::new(now, self.wall)
            };
            return false;
        };
        self.share.is_known = !answer.is_left;
        self.share.fair = answer.fair;
        self.share.granted = answer.granted;
        if answer.is_left {
            self.share = ShareState::new(now, self.wall);
            return false;
        }
        let before = self.held();
        self.raise(answer, sent, now);
        let raised = self.held();
        let part = match self.is_wanted(now) {
            true => answer.fair,
            false => Share::default(),
        };
        self.lower(&part);
        was_stalled
            || raised.rate > before.rate
            || raised.burst > before.burst
            || raised.running > before.running
    }

    fn raise(&mut self, answer: &Answer, sent: Instant, now: Instant) {
        let given = (answer.given - self.share.given).max(0.0);
        self.share.given = answer.given;
        if !self.is_shared() {
            // The limit ended while the answer was on its way.
            self.share.returned += given;
            return;
        }
        match &mut self.rate {
            Some(bucket) => {
                // Until now it had the rate of before.
                bucket.refill(now);
                bucket.per_second = bucket.per_second.max(answer.granted.rate);
                bucket.burst = bucket.burst.max(answer.granted.burst);
                bucket.tokens += given;
                self.share.returned += bucket.lower(f64::INFINITY, u32::MAX);
            }
            None => self.share.returned += given,
        }
        if let Some(places) = &mut self.places {
            places.held = places.held.max(answer.granted.running);
            places.until = Some(sent + LEASE);
        }
    }

    /// Lowers what is held to a part. Places are given up when their tasks end.
    fn lower(&mut self, part: &Share) {
        if !self.is_shared() {
            return;
        }
        if let Some(bucket) = &mut self.rate {
            self.share.returned += bucket.lower(part.rate, part.burst);
        }
        if let Some(places) = &mut self.places {
            places.kept = part.running;
        }
        self.lower_places();
    }
}
