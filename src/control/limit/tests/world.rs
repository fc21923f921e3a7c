//! Processes that share a limit, the database, and everything that goes wrong between them.

use std::time::{Duration, UNIX_EPOCH};

use tokio::time::Instant;

use crate::control::limit::beats::Liveness;
use crate::control::limit::local::{Ended, Local, Start};
use crate::control::limit::share::{Answer, LimitParts, Pool, Report};
use crate::topology::Limit;

/// A process, and what is on its way between it and the database.
pub(super) struct Process {
    pub(super) local: Local,
    pub(super) liveness: Liveness,
    pub(super) last: Option<Instant>,
    /// When a pool is written, its version and the clock when it was read, and what is reported.
    pub(super) writing: Option<(Instant, u64, f64, Instant, Report)>,
    /// An answer that is on its way.
    pub(super) answer: Option<(Instant, Instant, Option<Answer>)>,
    /// When each task that runs ends.
    pub(super) running: Vec<Instant>,
    pub(super) is_dead: bool,
    /// Starts what it may.
    pub(super) is_busy: bool,
    /// Its next attempt.
    pub(super) asks_at: Instant,
}

/// The database, and everything that goes wrong.
pub(super) struct World {
    pub(super) now: Instant,
    pub(super) begin: Instant,
    pub(super) limit: Limit,
    pub(super) version: u64,
    pub(super) pool: Pool,
    pub(super) processes: Vec<Process>,
    pub(super) starts: Vec<Instant>,
    /// How many each process has started.
    pub(super) started: Vec<usize>,
    pub(super) most_running: usize,
    pub(super) step: Duration,
    pub(super) latency: Duration,
    pub(super) run: Duration,
    /// Of a hundred rounds, how many have no answer, though they are written or not.
    pub(super) lost: u32,
    pub(super) is_away: bool,
    pub(super) seed: u64,
}

impl World {
    pub(super) fn new(limit: Limit, processes: usize) -> Self {
        let begin = Instant::now();
        let mut world = Self {
            now: begin,
            begin,
            version: 0,
            pool: Pool::new(LimitParts::of(&limit), 1e9),
            limit,
            processes: Vec::new(),
            starts: Vec::new(),
            started: Vec::new(),
            most_running: 0,
            step: Duration::from_millis(2),
            latency: Duration::from_millis(4),
            run: Duration::from_millis(50),
            lost: 0,
            is_away: false,
            seed: 1,
        };
        for _ in 0..processes {
            world.join();
        }
        world
    }

    pub(super) fn join(&mut self) {
        self.started.push(0);
        self.processes.push(Process {
            local: Local::new(&self.limit, self.now, UNIX_EPOCH),
            liveness: Liveness::default(),
            last: None,
            writing: None,
            answer: None,
            running: Vec::new(),
            is_dead: false,
            is_busy: true,
            asks_at: self.now,
        });
    }

    pub(super) fn random(&mut self, below: u32) -> u32 {
        self.seed = self
            .seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        ((self.seed >> 33) % u64::from(below)) as u32
    }

    pub(super) fn clock(&self) -> f64 {
        1e9 + (self.now - self.begin).as_secs_f64()
    }

    pub(super) fn run(&mut self, time: Duration) {
        let end = self.now + time;
        while self.now < end {
            for index in 0..self.processes.len() {
                self.work(index);
                self.divide(index);
            }
            let running = self.processes.iter().map(|it| it.running.len()).sum();
            self.most_running = self.most_running.max(running);
            self.now += self.step;
        }
    }

    /// Starts what may start, and ends what has run.
    pub(super) fn work(&mut self, index: usize) {
        let (now, run) = (self.now, self.run);
        let process = &mut self.processes[index];
        if process.is_dead {
            return;
        }
        let before = process.running.len();
        process.running.retain(|end| *end > now);
        let ended = before - process.running.len();
        let is_opened =
            (0..ended).fold(false, |any, _| process.local.end() == Ended::Opened || any);
        if !process.is_busy || now < process.asks_at && !is_opened {
            return;
        }
        while process.local.try_start(now) == Start::Yes {
            process.running.push(now + run);
            self.starts.push(now);
            self.started[index] += 1;
        }
        let next = process.local.next_at(now);
        let asked_again = now + Duration::from_millis(500);
        process.asks_at = next.map_or(asked_again, |next| next.min(asked_again));
    }

    pub(super) fn divide(&mut self, index: usize) {
        let (now, clock) = (self.now, self.clock());
        let (half, parts) = (self.latency / 2, LimitParts::of(&self.limit));
        let (is_lost, is_written) = (self.random(100) < self.lost, self.random(2) == 0);
        let (is_away, version) = (self.is_away, self.version);
        let process = &mut self.processes[index];
        if process.is_dead {
            return;
        }
        process.local.tick(now);
        if let Some((at, sent, answer)) = &process.answer {
            if now >= *at {
                if process.local.answered(answer.as_ref(), *sent, now) {
                    process.asks_at = now;
                }
                process.answer = None;
                process.last = Some(now);
            }
            return;
        }
        if let Some((at, ..)) = &process.writing
            && now < *at
        {
            return;
        }
        if let Some((_, read, clock, sent, report)) = process.writing.take() {
            if read != version || is_away || is_lost && !is_written {
                // Another process was faster, or nobody knows what became of it.
                process.last = Some(now);
                return;
            }
            let dead = process.liveness.dead(Some(&self.pool), now);
            let outcome = self.pool.round(parts, &report, &dead, clock);
            if let Some(pool) = outcome.pool {
                self.pool = pool;
                self.version += 1;
            }
            process.last = Some(now);
            if !is_lost {
                process.answer = Some((now + half, sent, outcome.answer));
            }
            return;
        }
        let Some(pause) = process.local.pause(now) else {
            process.last = None;
            return;
        };
        let pause = pause.max(Duration::from_millis(20));
        if process.last.is_none_or(|last| now >= last + pause) {
            process.writing = Some((now + half, version, clock, now, process.local.report(now)));
        }
    }

    /// The most that ever started above the rate: in any T seconds, starts − rate × T.
    pub(super) fn most_above_rate(&self) -> f64 {
        let rate = self.limit.rate.unwrap().per_second();
        let (mut level, mut most, mut last) = (0.0_f64, 0.0_f64, self.begin);
        for start in &self.starts {
            level = (level - rate * (*start - last).as_secs_f64()).max(0.0) + 1.0;
            most = most.max(level);
            last = *start;
        }
        most
    }

    pub(super) fn check_rate(&self) {
        let burst = f64::from(self.limit.rate.unwrap().burst());
        let most = self.most_above_rate();
        assert!(most <= burst + 1e-6, "{most} of {burst} at once");
    }
}
