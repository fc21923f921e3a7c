//! What this process may start of one limited tier or task. Pure: the time is given.

#[cfg(feature = "postgres")]
mod shared;

use std::time::{Duration, SystemTime};

use tokio::time::Instant;

#[cfg(feature = "postgres")]
use shared::ShareState;

use crate::topology::{Limit, LimitScope};

/// How long after the last start, or the last attempt at one, a process still wants its share.
pub(super) const DEMAND_LASTS: Duration = Duration::from_millis(1_500);
#[cfg(feature = "postgres")]
/// A process whose rounds have not run for this long stood still, and others may have its share.
const STALLED: Duration = Duration::from_secs(20);
/// How long a share of what may run holds after the last round that was answered. Others take it over later: see `rounds`.
#[cfg(feature = "postgres")]
const LEASE: Duration = Duration::from_secs(20);
/// What is added to a token that is nearly there: the sum of many fractions is never exact.
const NEARLY: f64 = 1e-9;
/// A task that starts within this time may wait for it where others need the room.
const SOON: Duration = Duration::from_millis(250);
/// How long tasks wait for the processes to divide the limit for the first time.
const UNDECIDED_FOR: Duration = Duration::from_secs(1);
/// How much of its rate a process may have prefetched.
const PREFETCHED: f64 = 0.25;

/// The limits of one tier or task in this process, and what is used of them.
#[derive(Debug)]
pub(super) struct Local {
    /// `None`: there is none any more, and everything may start.
    limit: Option<Limit>,
    rate: Option<Bucket>,
    places: Option<Places>,
    /// How many tasks run, also while there is no limit: they count when there is one again.
    used: u32,
    demand: Demand,
    /// The time of the wall clock.
    wall: SystemTime,
    #[cfg(feature = "postgres")]
    share: ShareState,
}

/// How much is asked for.
#[derive(Debug, Default)]
struct Demand {
    /// The last attempt, refused or not.
    last: Option<Instant>,
    /// The last attempt that was refused for lack of a token, and of a place.
    lacked_token: Option<Instant>,
    lacked_place: Option<Instant>,
    /// Whether somebody was refused since a token came.
    is_refused: bool,
    /// Since when somebody asks, and the processes have not divided the limit.
    undecided_since: Option<Instant>,
    /// How many tasks have started since the use was last measured.
    starts: u32,
}

/// The tokens of a rate: each start takes one.
#[derive(Debug)]
struct Bucket {
    per_second: f64,
    burst: u32,
    tokens: f64,
    /// The time for which `tokens` was computed.
    at: Instant,
}

/// The places of tasks that run.
#[derive(Debug)]
struct Places {
    /// How many this process has.
    held: u32,
    /// How many it is to keep: it gives up the others when handlers end.
    kept: u32,
    /// `None`: they hold for ever.
    until: Option<Instant>,
}

/// What a task may expect that would wait for its right to start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outlook {
    /// The processes have not divided the limit. They will in a moment.
    Undecided,
    /// All that wait, and as many as come at once, may start.
    FarFromLimit,
    /// So many may start, now or in a moment.
    NearLimit { startable: usize },
}

/// Whether a task may start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Start {
    Yes,
    No {
        /// Whether there was no refusal in the last 1.5 s.
        is_new: bool,
    },
}

/// What was changed by the end of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    /// Another task may start.
    Opened,
    /// This process has a place too many, which another one waits for.
    GivesUpPlace,
    Nothing,
}

impl Local {
    pub(super) fn new(limit: &Limit, now: Instant, wall: SystemTime) -> Self {
        let mut local = Self {
            limit: None,
            rate: None,
            places: None,
            used: 0,
            demand: Demand::default(),
            wall,
            #[cfg(feature = "postgres")]
            share: ShareState::new(now, wall),
        };
        local.set_limit(Some(limit), now);
        local
    }

    /// Follows a limit; whether it is another one than before. What was held before is kept as far as it allows.
    pub(super) fn set_limit(&mut self, limit: Option<&Limit>, now: Instant) -> bool {
        if self.limit.as_ref() == limit {
            return false;
        }
        let was_shared = self.is_shared();
        self.limit = limit.cloned();
        let is_shared = self.is_shared();
        if is_shared != was_shared {
            // A share of what processes divide must be asked for first, and goes back when it is of no use any more.
            self.give_all_back(now);
        }
        let Some(limit) = limit else {
            (self.rate, self.places) = (None, None);
            return true;
        };
        let is_alone = !is_shared;
        let before = self.rate.take();
        let mut surplus = 0.0;
        self.rate = limit.rate.map(|rate| {
            let is_new = before.is_none();
            let mut bucket = before.unwrap_or(Bucket {
                per_second: 0.0,
                burst: 0,
                tokens: 0.0,
                at: now,
            });
            bucket.refill(now);
            let (most, burst) = (rate.per_second(), rate.burst());
            if is_alone {
                (bucket.per_second, bucket.burst) = (most, burst);
            }
            surplus = bucket.lower(most, burst);
            if is_new {
                bucket.tokens = bucket.burst.into();
            }
            bucket
        });
        self.give_back(surplus);
        // With keys, their tasks are counted in the database.
        let running = limit.running.filter(|_| limit.per.is_none());
        let before = self.places.take();
        self.places = running.map(|running| {
            let held = match (is_alone, before) {
                (true, _) => running,
                (false, Some(before)) => {
                    return Places {
                        kept: before.kept.min(running),
                        ..before
                    };
                }
                // What runs already counts, and nothing starts until other processes know that.
                (false, None) => self.used,
            };
            Places {
                held,
                kept: held,
                until: is_shared.then_some(now),
            }
        });
        self.lower_places();
        true
    }

    fn give_all_back(&mut self, now: Instant) {
        if let Some(mut bucket) = self.rate.take() {
            bucket.refill(now);
            let tokens = bucket.lower(0.0, 0);
            self.give_back(tokens);
        }
        self.places = None;
    }

    /// Follows the wall clock. It only shows whether the machine slept: an administrator may set it.
    pub(super) fn set_wall_clock(&mut self, wall: SystemTime) {
        self.wall = wall;
    }

    #[cfg(not(feature = "postgres"))]
    fn give_back(&mut self, _: f64) {}

    /// Gives tokens back to the pool, with the next round.
    #[cfg(feature = "postgres")]
    fn give_back(&mut self, tokens: f64) {
        self.share.returned += tokens;
    }

    /// The limit, if this process shares it with others.
    pub(super) fn shared_limit(&self) -> Option<&Limit> {
        let limit = self.limit.as_ref();
        limit.filter(|limit| limit.scope == LimitScope::App)
    }

    fn is_shared(&self) -> bool {
        self.shared_limit().is_some()
    }

    /// How many tasks may start now.
    pub(super) fn startable(&mut self, now: Instant) -> usize {
        if self.is_stalled(now) || !self.has_place(now) || !self.has_token(now) {
            return 0;
        }
        let tokens = self
            .rate
            .as_ref()
            .map(|bucket| (bucket.tokens + NEARLY) as usize);
        let places = self.places.as_ref();
        let places = places.map(|it| it.held.min(it.kept).saturating_sub(self.used) as usize);
        let least = [tokens, places].into_iter().flatten().min();
        least.unwrap_or(usize::MAX)
    }

    /// Takes the right to start one task.
    pub(super) fn try_start(&mut self, now: Instant) -> Start {
        if self.startable(now) == 0 {
            return Start::No {
                is_new: self.refuse(now),
            };
        }
        self.demand.last = Some(now);
        if let Some(bucket) = &mut self.rate {
            bucket.tokens -= 1.0;
        }
        self.used += 1;
        self.demand.starts = self.demand.starts.saturating_add(1);
        Start::Yes
    }

    /// Counts a task that ran before there was a limit. It has its place, also where that is one too many.
    pub(super) fn count_running(&mut self) {
        self.used += 1;
        if let Some(places) = &mut self.places {
            places.held = places.held.max(self.used);
        }
    }

    /// Notes that there is a task that may not start; whether there was no refusal in the last 1.5 s.
    pub(super) fn refuse(&mut self, now: Instant) -> bool {
        let is_new = !self.lacks(now);
        self.demand.last = Some(now);
        self.demand.is_refused = true;
        if !self.has_place(now) {
            self.demand.lacked_place = Some(now);
        }
        if !self.has_token(now) {
            self.demand.lacked_token = Some(now);
        }
        is_new
    }

    /// A token has come; whether somebody was refused before.
    pub(super) fn must_ask_again(&mut self) -> bool {
        std::mem::take(&mut self.demand.is_refused)
    }

    /// A task for which a right was taken was not started; whether only this lets another one start.
    pub(super) fn give_token_back(&mut self, now: Instant) -> bool {
        self.demand.starts = self.demand.starts.saturating_sub(1);
        let had_token = self.has_token(now);
        if let Some(bucket) = &mut self.rate {
            bucket.tokens = (bucket.tokens + 1.0).min(bucket.burst.into());
        }
        !had_token && self.has_token(now)
    }

    /// A task has ended.
    pub(super) fn end(&mut self) -> Ended {
        let was_full = matches!(&self.places, Some(places) if self.used >= places.held);
        self.used = self.used.saturating_sub(1);
        if self.lower_places() {
            return Ended::GivesUpPlace;
        }
        match was_full {
            true => Ended::Opened,
            false => Ended::Nothing,
        }
    }

    /// When a token is there by itself, if that is all that is missing.
    pub(super) fn next_at(&mut self, now: Instant) -> Option<Instant> {
        if self.is_stalled(now) || !self.has_place(now) {
            return None;
        }
        let bucket = self.rate.as_mut()?;
        bucket.refill(now);
        if bucket.burst == 0 || bucket.per_second <= 0.0 {
            return None;
        }
        let missing = (1.0 - bucket.tokens).max(0.0) / bucket.per_second;
        now.checked_add(Duration::try_from_secs_f64(missing).ok()?)
    }

    /// What a task may expect that would wait beside so many others.
    pub(super) fn outlook(&mut self, waiting: usize, window: usize, now: Instant) -> Outlook {
        if self.is_undecided() {
            let since = *self.demand.undecided_since.get_or_insert(now);
            if now < since + UNDECIDED_FOR {
                return Outlook::Undecided;
            }
        } else {
            self.demand.undecided_since = None;
        }
        let startable = self.startable(now);
        if startable >= waiting + window {
            return Outlook::FarFromLimit;
        }
        let is_soon = self.next_at(now).is_some_and(|at| at <= now + SOON);
        Outlook::NearLimit {
            startable: startable.max(is_soon.into()),
        }
    }

    #[cfg(not(feature = "postgres"))]
    fn is_undecided(&self) -> bool {
        false
    }

    /// How many deliveries are worth holding prefetched, at least 1.
    pub(super) fn allowance(&mut self, now: Instant) -> usize {
        let of_rate = self.rate.as_mut().map(|bucket| {
            bucket.refill(now);
            let soon = bucket.tokens + bucket.per_second * PREFETCHED;
            soon.max(0.0).ceil() as usize
        });
        let places = self.places.as_ref();
        let of_places = places.map(|places| 2 * places.kept as usize);
        let least = [of_rate, of_places].into_iter().flatten().min();
        least.map_or(usize::MAX, |least| least.max(1))
    }

    fn has_token(&mut self, now: Instant) -> bool {
        match &mut self.rate {
            Some(bucket) => {
                bucket.refill(now);
                bucket.tokens + NEARLY >= 1.0
            }
            None => true,
        }
    }

    fn has_place(&self, now: Instant) -> bool {
        match &self.places {
            Some(places) => {
                let holds = places.until.is_none_or(|until| now < until);
                holds && self.used < places.held && self.used < places.kept
            }
            None => true,
        }
    }

    /// Gives up places that are free and not to be kept; whether there were any.
    fn lower_places(&mut self) -> bool {
        let Some(places) = &mut self.places else {
            return false;
        };
        let held = places.kept.max(self.used).min(places.held);
        std::mem::replace(&mut places.held, held) != held
    }

    #[cfg(not(feature = "postgres"))]
    fn is_stalled(&self, _: Instant) -> bool {
        false
    }

    /// Whether this process stood still. The monotonic clock stops while the machine sleeps, and the wall clock does not.
    #[cfg(feature = "postgres")]
    fn is_stalled(&self, now: Instant) -> bool {
        let (ticked, ticked_wall) = self.share.ticked;
        let slept = self.wall.duration_since(ticked_wall).unwrap_or_default();
        self.is_shared() && now.saturating_duration_since(ticked).max(slept) > STALLED
    }

    /// Whether somebody was refused a moment ago.
    pub(super) fn lacks(&self, now: Instant) -> bool {
        let Demand {
            lacked_token,
            lacked_place,
            ..
        } = self.demand;
        is_recent(lacked_token, now) || is_recent(lacked_place, now)
    }
}

fn is_recent(at: Option<Instant>, now: Instant) -> bool {
    at.is_some_and(|at| now.saturating_duration_since(at) < DEMAND_LASTS)
}

impl Bucket {
    fn refill(&mut self, now: Instant) {
        let elapsed = now.saturating_duration_since(self.at).as_secs_f64();
        self.at = self.at.max(now);
        let most = f64::from(self.burst);
        self.tokens = (self.tokens + self.per_second * elapsed).min(most);
    }

    /// Lowers what is held. Returns the tokens that do not fit any more.
    fn lower(&mut self, per_second: f64, burst: u32) -> f64 {
        self.per_second = self.per_second.min(per_second);
        self.burst = self.burst.min(burst);
        let surplus = (self.tokens - f64::from(self.burst)).max(0.0);
        self.tokens -= surplus;
        surplus
    }
}
