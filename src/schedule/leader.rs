//! The one that leads: finds what is due, publishes it, and moves the state on.
//!
//! What is due is asked of the database, by an index on the due time. So a tick costs what is due
//! and not what exists, a change that any process makes counts from the next tick on, and a new
//! leader has nothing to load before it can begin.

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::FutureExt;
use futures_util::stream::{FuturesUnordered, StreamExt};
use jiff::Timestamp;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::due::{decide, is_step_back};
use super::lease::Lease;
use super::run;
use super::table::{BATCH, Settled, Table, system};
use crate::Error;
use crate::observe::{Event, Observers};
use crate::task::{Publish, Receipt};
use crate::topology::Schedule;

/// How often to look at least: what others add or change counts from then on.
const LONGEST_TICK: Duration = Duration::from_secs(1);
/// How often to look at most. Runs that are due within it go in one batch.
const SHORTEST_TICK: Duration = Duration::from_millis(50);
/// How many runs are under way at most.
const MOST_UNDER_WAY: usize = 1_000;
/// The pause before a run that could not be published is tried again; it doubles up to the longest.
const FIRST_REST: Duration = Duration::from_millis(250);
const LONGEST_REST: Duration = Duration::from_secs(5);

/// What a leader has beside its lease.
pub(super) struct Leader {
    pub(super) table: Table,
    pub(super) publisher: Arc<dyn Publish>,
    pub(super) observers: Observers,
}

/// What a leader has on its desk. Dropped with the lease: what was not settled is the next one's.
#[derive(Default)]
struct Term {
    under_way: FuturesUnordered<Pin<Box<dyn Future<Output = Ended> + Send>>>,
    /// The schedules of what is under way.
    busy: HashSet<String>,
    /// The schedules whose last run could not be published.
    resting: HashMap<String, Rest>,
    /// What the database does not have yet.
    settled: Vec<Settled>,
    soundness: Soundness,
}

/// Whether what waits waits for the right time, by this clock and these time zones.
enum Soundness {
    /// It is being looked at, a page at a time; those up to this name were.
    Seen(String),
    /// It did when the clock was last looked at.
    At(Timestamp),
}

impl Default for Soundness {
    fn default() -> Self {
        Self::Seen(String::new())
    }
}

/// A publish that has ended.
struct Ended {
    run: Settled,
    published: Result<Receipt, Error>,
}

struct Rest {
    until: Instant,
    pause: Duration,
}

impl Leader {
    /// Leads until it is told to stop, and has ended what was under way. `lease` always has the latest
    /// renewal.
    pub(super) async fn lead(
        &mut self,
        lease: &watch::Receiver<Lease>,
        stopping: &watch::Receiver<bool>,
    ) {
        let mut term = Term::default();
        while !*stopping.borrow() {
            let held = lease.borrow().clone();
            let mut wake = self.look(&mut term, &held).await;
            if self.keep_sound(&mut term, &held).await {
                wake = wake.min(Instant::now() + SHORTEST_TICK);
            }
            self.wait(&mut term, lease, wake).await;
        }
        while let Some(ended) = term.under_way.next().await {
            let held = lease.borrow().clone();
            self.end(&mut term, ended, held.now());
            self.advance(&mut term, &held).await;
        }
    }

    /// Starts what is due, and says when to look again.
    async fn look(&mut self, term: &mut Term, lease: &Lease) -> Instant {
        let start = Instant::now();
        let soonest = start + SHORTEST_TICK;
        if term.under_way.len() >= MOST_UNDER_WAY {
            return soonest;
        }
        let mut wake = start + LONGEST_TICK;
        let aside = term.aside(start, &mut wake);
        let found = match self.table.find(lease, lease.now(), &aside).await {
            Ok(found) => found,
            Err(error) => {
                tracing::warn!(%error, "the scheduler cannot look for what is due");
                return wake;
            }
        };
        let is_all = found.due.len() < BATCH;
        for (schedule, due) in found.due {
            self.start(term, lease, schedule, due);
        }
        if let Some(next) = found.next {
            wake = wake.min(lease.instant(next));
        }
        match is_all {
            true => wake.max(soonest),
            false => start,
        }
    }

    /// Starts the run of a schedule that is due, or gives it up.
    fn start(&self, term: &mut Term, lease: &Lease, schedule: Schedule, expected: Timestamp) {
        let now = lease.now();
        let Some(decision) = decide(&schedule, expected, now, lease.led_since) else {
            return;
        };
        let run = Settled {
            schedule,
            expected,
            decision,
            published_at: None,
        };
        match decision.publish {
            None => term.settled.push(run),
            // Whoever has slept since it asked must not publish what was due then.
            Some(_) if !lease.holds() => {}
            Some(due) => {
                let request = run::request(&run.schedule, due, now);
                let publisher = self.publisher.clone();
                term.busy.insert(run.schedule.name.clone());
                term.under_way.push(Box::pin(async move {
                    let published = publisher.publish(request).await;
                    Ended { run, published }
                }));
            }
        }
    }

    /// Until the next look, moves on what ends, as much at once as has ended.
    async fn wait(&mut self, term: &mut Term, lease: &watch::Receiver<Lease>, wake: Instant) {
        let mut wake = wake;
        let soonest = Instant::now() + SHORTEST_TICK;
        loop {
            let held = lease.borrow().clone();
            if let Some(next) = self.advance(term, &held).await {
                wake = wake.min(held.instant(next).max(soonest));
            }
            let first = match timeout_at(wake, term.under_way.next()).await {
                Ok(Some(ended)) => ended,
                Ok(None) => return sleep_until(wake).await,
                Err(_) => return,
            };
            self.end(term, first, held.now());
            while let Some(Some(ended)) = term.under_way.next().now_or_never() {
                self.end(term, ended, held.now());
            }
        }
    }

    fn end(&self, term: &mut Term, Ended { mut run, published }: Ended, now: Timestamp) {
        let name = &run.schedule.name;
        term.busy.remove(name);
        match published {
            Ok(receipt) => {
                term.resting.remove(name);
                self.tell_published(&run, &receipt, now);
                run.published_at = Some(now);
                term.settled.push(run);
            }
            Err(error) => {
                tracing::warn!(schedule = name, %error, "a run waits until it can be published");
                term.rest(name);
                // The older ones are given up whatever becomes of the newest.
                if let Some(decision) = run.decision.older_only(&run.schedule) {
                    term.settled.push(Settled { decision, ..run });
                }
            }
        }
    }

    /// Tells the database what was settled, and gives the time when the first of it is due again.
    /// What the database cannot be told now it is told the next time.
    async fn advance(&mut self, term: &mut Term, lease: &Lease) -> Option<Timestamp> {
        let next_due = term.settled.iter().map(|run| run.decision.next);
        let next = next_due.flatten().min();
        if term.settled.is_empty() {
            return None;
        }
        match self.table.advance(lease, &term.settled).await {
            Ok(advanced) => {
                let advanced: HashSet<String> = advanced.into_iter().collect();
                for run in term.settled.drain(..) {
                    if run.decision.missed > 0 && advanced.contains(&run.schedule.name) {
                        self.tell_missed(&run);
                    }
                }
            }
            Err(error) => tracing::warn!(%error, "the scheduler cannot move schedules on"),
        }
        next
    }

    /// Once a term, and after the clock went back: what waits may wait for a time of another clock, or
    /// of an older edition of the time zones. Says whether there is more to look at.
    async fn keep_sound(&mut self, term: &mut Term, lease: &Lease) -> bool {
        let now = lease.now();
        let seen = match &term.soundness {
            Soundness::At(before) if !is_step_back(*before, now) => {
                term.soundness = Soundness::At(now.max(*before));
                return false;
            }
            Soundness::At(_) => "",
            Soundness::Seen(name) => name.as_str(),
        };
        match self.table.settle(now, seen).await {
            Ok(Some(last)) => term.soundness = Soundness::Seen(last),
            Ok(None) => term.soundness = Soundness::At(now),
            Err(error) => tracing::warn!(%error, "the scheduler cannot look at what waits"),
        }
        matches!(term.soundness, Soundness::Seen(_))
    }

    fn tell_published(&self, run: &Settled, receipt: &Receipt, now: Timestamp) {
        let (schedule, due) = (&run.schedule.name, run.decision.newest);
        let late = Duration::try_from(now.duration_since(due)).unwrap_or_default();
        tracing::debug!(schedule, id = %receipt.id, ?late, "a run was published");
        self.observers.emit(&Event::SchedulePublished {
            schedule,
            id: &receipt.id,
            due: system(due),
            late,
        });
    }

    fn tell_missed(&self, run: &Settled) {
        let (schedule, count) = (&run.schedule.name, run.decision.missed);
        let newest = run.decision.newest;
        tracing::warn!(schedule, count, %newest, "runs were missed");
        self.observers.emit(&Event::ScheduleMissed {
            schedule,
            count,
            last_due: system(run.decision.newest),
        });
    }
}

impl Term {
    /// The schedules that are not to be looked at now; `wake` is brought forward to when one is.
    fn aside(&mut self, now: Instant, wake: &mut Instant) -> Vec<String> {
        self.resting
            .retain(|_, rest| rest.until + LONGEST_REST > now);
        let mut aside: Vec<String> = self.busy.iter().cloned().collect();
        aside.extend(self.settled.iter().map(|run| run.schedule.name.clone()));
        for (name, rest) in self.resting.iter().filter(|(_, rest)| rest.until > now) {
            *wake = rest.until.min(*wake);
            aside.push(name.clone());
        }
        aside
    }

    fn rest(&mut self, name: &str) {
        let before = self.resting.get(name).map(|rest| rest.pause * 2);
        let pause = before.unwrap_or(FIRST_REST).min(LONGEST_REST);
        let until = Instant::now() + pause;
        self.resting.insert(name.to_owned(), Rest { until, pause });
    }
}
