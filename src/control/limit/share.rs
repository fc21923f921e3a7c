//! How processes divide a limit among them. Pure: what a process reports and what the pool is make the next pool, and the
//! answer.
//!
//! The pool is what nobody holds, together with what each process holds. The tokens in the pool and in all processes are
//! never more than the burst of the limit, and they grow with no more than its rate: so in any T seconds at most rate × T
//! and burst tasks start. A process that is to hold less lowers itself first and reports that in its next round; what is
//! reported may then be held by others. Tokens on their way between a process and the pool are counted by totals that only
//! grow, so a lost answer loses none and doubles none.
//!
//! There is one exception. The others drop a process that has been silent for 30 s, and divide its rate. If it lives and only
//! the database is out of its reach, it goes on with its last rate: until it is back, the sum exceeds the limit by that. The
//! alternative would be to stop whatever has a rate in every process that cannot reach the database.

use serde::{Deserialize, Serialize};

use crate::topology::Limit;

/// With fewer bursts, or places, than processes, how many seconds pass until others have them.
const TURN: f64 = 5.0;
/// How many seconds pass until a process that reports nothing new says that it lives.
const BEAT: f64 = 3.0;
/// What a process said so many seconds ago says nothing of now.
const SILENT: f64 = 30.0;
/// A smaller difference of rates is none.
const SAME: f64 = 1e-6;

/// How a pool knows a process: a number drawn at random.
pub(super) type ShareId = u64;

/// What may be divided.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct LimitParts {
    /// Per second. `None`: only `running` is limited.
    rate: Option<f64>,
    burst: u32,
    running: Option<u32>,
}

/// A part of a limit.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub(super) struct Share {
    pub(super) rate: f64,
    pub(super) burst: u32,
    pub(super) running: u32,
}

/// What a process could use.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub(super) struct Wants {
    /// Starts per second. `None`: more than it gets.
    pub(super) rate: Option<f64>,
    pub(super) running: u32,
    /// Whether it wants to start anything.
    pub(super) is_wanted: bool,
}

/// A limit as the database has it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Pool {
    /// The tokens that nobody holds, and when that was so, in seconds of the database's clock.
    tokens: f64,
    at: f64,
    /// In the order of their ids.
    pub(super) holders: Vec<Holder>,
}

/// A process as the pool knows it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct Holder {
    pub(super) id: ShareId,
    /// Rises at least every few seconds while the process lives.
    pub(super) beat: u64,
    /// When that was.
    at: f64,
    held: Share,
    wants: Wants,
    /// All tokens that it ever took, and gave back.
    given: f64,
    returned: f64,
}

/// What a process says in a round.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Report {
    pub(super) id: ShareId,
    /// Whether the pool has answered it before.
    pub(super) is_known: bool,
    pub(super) held: Share,
    pub(super) wants: Wants,
    /// How many tokens it has room for.
    pub(super) room: f64,
    pub(super) returned: f64,
    /// It holds and wants nothing any more.
    pub(super) is_leaving: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Answer {
    /// What the process may hold from now on.
    pub(super) granted: Share,
    /// Its part. If it holds more, it lowers itself.
    pub(super) fair: Share,
    pub(super) given: f64,
    /// The pool has forgotten the process, as it wished.
    pub(super) is_left: bool,
}

/// What a round comes to.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Outcome {
    /// The next pool. `None`: it stays as it is.
    pub(super) pool: Option<Pool>,
    /// `None`: the pool does not know the process any more.
    pub(super) answer: Option<Answer>,
}

impl LimitParts {
    pub(super) fn of(limit: &Limit) -> Self {
        Self {
            rate: limit.rate.map(|rate| rate.per_second()),
            burst: limit.rate.map_or(0, |rate| rate.burst()),
            running: limit.running.filter(|_| limit.per.is_none()),
        }
    }
}

impl Pool {
    /// A pool of a limit that was not in use.
    pub(super) fn new(limit: LimitParts, now: f64) -> Self {
        Self {
            tokens: limit.burst.into(),
            ..Self::empty(now)
        }
    }

    /// One in which nobody knows what was used.
    pub(super) fn empty(now: f64) -> Self {
        Self {
            tokens: 0.0,
            at: now,
            holders: Vec::new(),
        }
    }

    /// Whether a process has of late found nothing left of the limit. `now` is that of the database's clock.
    pub(super) fn is_saturated(&self, now: f64) -> bool {
        let holders = self.holders.iter();
        let mut wanting = holders.filter(|it| it.wants.is_wanted && now - it.at < SILENT);
        wanting.any(|it| it.wants.rate.is_none() || it.wants.running == u32::MAX)
    }

    /// One round of a process. `dead` are processes of which nothing was heard for long, with their last beats.
    pub(super) fn round(
        &self,
        limit: LimitParts,
        report: &Report,
        dead: &[(ShareId, u64)],
        now: f64,
    ) -> Outcome {
        let mut pool = self.clone();
        pool.refill(limit, now);
        let is_dead = |holder: &Holder| dead.contains(&(holder.id, holder.beat));
        pool.holders
            .retain(|holder| holder.id == report.id || !is_dead(holder));
        let has_dead = pool.holders.len() < self.holders.len();
        let place = pool
            .holders
            .binary_search_by_key(&report.id, |holder| holder.id);
        let index = match place {
            Ok(index) => index,
            Err(_) if report.is_known => {
                return Outcome {
                    pool: None,
                    answer: None,
                };
            }
            Err(_) if report.is_leaving => {
                return Outcome {
                    pool: None,
                    answer: Some(Answer::LEFT),
                };
            }
            Err(index) => {
                pool.holders.insert(index, Holder::new(report.id));
                index
            }
        };
        let mine = &mut pool.holders[index];
        let before = mine.clone();
        mine.held = report.held;
        mine.wants = report.wants;
        pool.tokens += (report.returned - mine.returned).max(0.0);
        mine.returned = report.returned;
        if report.is_leaving {
            pool.holders.remove(index);
            pool.cap(limit);
            return Outcome {
                pool: Some(pool),
                answer: Some(Answer::LEFT),
            };
        }
        pool.cap(limit);
        let fair = pool.fair_part(limit, index, now);
        pool.grant(limit, index, fair);
        let free = pool.holders[index].held.burst - report.held.burst;
        let given = (report.room + f64::from(free)).clamp(0.0, pool.tokens);
        pool.tokens -= given;
        let mine = &mut pool.holders[index];
        mine.given += given;
        let answer = Answer {
            granted: mine.held,
            fair,
            given: mine.given,
            is_left: false,
        };
        let has_changed = has_dead
            || place.is_err()
            || mine.held != before.held
            || mine.wants != before.wants
            || mine.returned != before.returned
            || mine.given != before.given;
        let is_written = has_changed || (now - mine.at).abs() >= BEAT;
        if is_written {
            mine.beat += 1;
            mine.at = now;
        }
        pool.cap(limit);
        Outcome {
            pool: is_written.then_some(pool),
            answer: Some(answer),
        }
    }

    /// The sum of what processes hold.
    fn held(&self) -> Share {
        let mut sum = Share::default();
        for Holder { held, .. } in &self.holders {
            sum.rate += held.rate;
            sum.burst = sum.burst.saturating_add(held.burst);
            sum.running = sum.running.saturating_add(held.running);
        }
        sum
    }

    /// The pool has the rate and the burst that nobody holds.
    fn refill(&mut self, limit: LimitParts, now: f64) {
        let elapsed = (now - self.at).max(0.0);
        let rate = limit.rate.unwrap_or_default() - self.held().rate;
        self.tokens += rate.max(0.0) * elapsed;
        self.at = now;
        self.cap(limit);
    }

    fn cap(&mut self, limit: LimitParts) {
        let room = limit.burst.saturating_sub(self.held().burst);
        self.tokens = self.tokens.min(room.into());
    }

    /// Raises what a process holds to its part, as far as nobody else holds it.
    fn grant(&mut self, limit: LimitParts, index: usize, fair: Share) {
        let held = self.held();
        let free = Share {
            rate: (limit.rate.unwrap_or_default() - held.rate).max(0.0),
            burst: limit.burst.saturating_sub(held.burst),
            running: limit
                .running
                .unwrap_or_default()
                .saturating_sub(held.running),
        };
        let mine = &mut self.holders[index].held;
        if fair.burst > mine.burst {
            mine.burst = fair.burst.min(mine.burst + free.burst);
        }
        // Without a burst a rate is of no use, and with the pool it is.
        if mine.burst > 0 && fair.rate > mine.rate * (1.0 + SAME) {
            mine.rate = fair.rate.min(mine.rate + free.rate);
        }
        if fair.running > mine.running {
            mine.running = fair.running.min(mine.running + free.running);
        }
    }

    /// What a process should hold.
    fn fair_part(&self, limit: LimitParts, index: usize, now: f64) -> Share {
        let turn = (now / TURN).max(0.0) as u64 as usize;
        let wants: Vec<u32> = self.holders.iter().map(|it| it.wants.burst()).collect();
        let bursts = divide_counts(limit.burst, &wants, turn);
        let rates: Vec<f64> = self
            .holders
            .iter()
            .zip(&bursts)
            .map(|(holder, burst)| match burst {
                0 => 0.0,
                _ => holder.wants.rate.unwrap_or(f64::INFINITY),
            })
            .collect();
        let rate = divide_rate(limit.rate.unwrap_or_default(), &rates, index);
        let running = limit.running.map_or(0, |running| {
            let wants: Vec<u32> = self.holders.iter().map(|it| it.wants.running()).collect();
            let mut parts = divide_counts(running, &wants, turn);
            // What nobody waits for is room for whoever starts next.
            let rest = running.saturating_sub(parts.iter().sum());
            let wanted = |holder: &&Holder| holder.wants.is_wanted;
            let wanting = self.holders.iter().filter(wanted).count() as u32;
            if self.holders[index].wants.is_wanted {
                let rank = self.holders[..index].iter().filter(wanted).count() as u32;
                parts[index] += rest / wanting + u32::from(rank < rest % wanting);
            }
            parts[index]
        });
        // Rates that differ by a rounding error would never come to rest.
        let held = self.holders[index].held.rate;
        let is_same = (held - rate).abs() <= rate * SAME;
        Share {
            rate: if is_same { held } else { rate },
            burst: bursts[index],
            running,
        }
    }
}

impl Holder {
    fn new(id: ShareId) -> Self {
        Self {
            id,
            beat: 0,
            at: 0.0,
            held: Share::default(),
            wants: Wants::default(),
            given: 0.0,
            returned: 0.0,
        }
    }
}

impl Wants {
    fn burst(&self) -> u32 {
        if self.is_wanted { u32::MAX } else { 0 }
    }

    fn running(&self) -> u32 {
        // Who wants to start something has a place at least.
        self.running.max(self.is_wanted.into())
    }
}

impl Answer {
    const LEFT: Self = Self {
        granted: Share {
            rate: 0.0,
            burst: 0,
            running: 0,
        },
        fair: Share {
            rate: 0.0,
            burst: 0,
            running: 0,
        },
        given: 0.0,
        is_left: true,
    };
}

/// Divides a number among those who want some: nobody gets more than it wants while another gets less than it does and
/// wants more. Where there are fewer than processes, they take turns.
fn divide_counts(total: u32, wants: &[u32], turn: usize) -> Vec<u32> {
    let mut parts = vec![0; wants.len()];
    let mut rest = total;
    let mut open: Vec<usize> = (0..wants.len()).filter(|index| wants[*index] > 0).collect();
    loop {
        let number = open.len() as u32;
        if number == 0 {
            return parts;
        }
        let each = rest / number;
        let before = open.len();
        open.retain(|index| {
            let has_enough = wants[*index] <= each;
            if has_enough {
                parts[*index] = wants[*index];
                rest -= wants[*index];
            }
            !has_enough
        });
        if open.len() < before {
            continue;
        }
        let more = rest % number;
        // The next turn begins where this one ends: nobody waits for longer than all others take together.
        let first = match each {
            0 => (turn % open.len()) * more as usize % open.len(),
            _ => 0,
        };
        for (place, index) in open.iter().enumerate() {
            let place = (place + open.len() - first) % open.len();
            parts[*index] = each + u32::from((place as u32) < more);
        }
        return parts;
    }
}

/// The part of one of those who want some of a rate. What nobody wants is divided too, among those who want any: it is
/// there when they want more.
fn divide_rate(total: f64, wants: &[f64], index: usize) -> f64 {
    if wants[index] <= 0.0 {
        return 0.0;
    }
    let mut sorted: Vec<f64> = wants.iter().copied().filter(|want| *want > 0.0).collect();
    sorted.sort_by(f64::total_cmp);
    let mut rest = total;
    let mut part = None;
    for (place, want) in sorted.iter().enumerate() {
        let each = rest / (sorted.len() - place) as f64;
        if *want > each {
            return part.unwrap_or(each);
        }
        if *want == wants[index] {
            part = Some(*want);
        }
        rest -= want;
    }
    part.unwrap_or_default() + rest / sorted.len() as f64
}
