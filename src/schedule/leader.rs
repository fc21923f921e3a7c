//! The leader: finds due schedules, publishes their runs, and advances their state.
//!
//! It queries the database for due schedules, by an index on the due time. So a tick costs as much as is
//! due, not as much as exists, a change that any process makes takes effect at the next tick, and a new
//! leader has nothing to load.

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

/// The longest time between two queries: changes by other processes take effect by then.
const LONGEST_TICK: Duration = Duration::from_secs(1);
/// The shortest time between two queries. Runs that are due within it go in one batch.
const SHORTEST_TICK: Duration = Duration::from_millis(50);
/// The largest number of runs in flight.
const MOST_UNDER_WAY: usize = 1_000;
/// The pause before a run that could not be published is tried again. It doubles up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The leader's dependencies.
pub(super) struct Leader {
    pub(super) table: Table,
    pub(super) publisher: Arc<dyn Publish>,
    pub(super) observers: Observers,
}

/// The state of one term of leadership. It is dropped with the lease; the next leader repeats unstored runs.
#[derive(Default)]
struct Term {
    under_way: FuturesUnordered<Pin<Box<dyn Future<Output = FinishedPublish> + Send>>>,
    /// The schedules whose runs are in flight.
    busy: HashSet<String>,
    /// The schedules whose last run could not be published.
    backing_off: HashMap<String, RetryPause>,
    /// Runs that the database has not recorded yet.
    settled: Vec<Settled>,
    due_time_check: DueTimeCheck,
}

/// Progress of the check that stored due times fit this clock and these time zones.
enum DueTimeCheck {
    /// The check is in progress, a page at a time. It has reached this name.
    Checked(String),
    /// The check was complete at this time.
    CompleteAt(Timestamp),
}

impl Default for DueTimeCheck {
    fn default() -> Self {
        Self::Checked(String::new())
    }
}

/// A publish that has succeeded or failed.
struct FinishedPublish {
    run: Settled,
    published: Result<Receipt, Error>,
}

struct RetryPause {
    until: Instant,
    pause: Duration,
}

impl Leader {
    /// Leads until shutdown is requested and the runs in flight have finished. `lease` always has the latest
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
            if self.check_due_times(&mut term, &held).await {
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

    /// Starts the due runs, and returns when to look again.
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
                tracing::warn!(%error, "the scheduler cannot query due schedules");
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

    /// Publishes the run of a schedule that is due, or skips it.
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
            // A process that was suspended after the query must not publish that run.
            Some(_) if !lease.holds() => {}
            Some(due) => {
                let request = run::request(&run.schedule, due, now);
                let publisher = self.publisher.clone();
                term.busy.insert(run.schedule.name.clone());
                term.under_way.push(Box::pin(async move {
                    let published = publisher.publish(request).await;
                    FinishedPublish { run, published }
                }));
            }
        }
    }

    /// Until the next query, records publishes as they finish, in batches.
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

    fn end(
        &self,
        term: &mut Term,
        FinishedPublish { mut run, published }: FinishedPublish,
        now: Timestamp,
    ) {
        let name = &run.schedule.name;
        term.busy.remove(name);
        match published {
            Ok(receipt) => {
                term.backing_off.remove(name);
                self.emit_published(&run, &receipt, now);
                run.published_at = Some(now);
                term.settled.push(run);
            }
            Err(error) => {
                tracing::warn!(schedule = name, %error, "cannot publish a run; trying again");
                term.back_off(name);
                // The older runs are skipped whether or not the newest is published.
                if let Some(decision) = run.decision.older_only(&run.schedule) {
                    term.settled.push(Settled { decision, ..run });
                }
            }
        }
    }

    /// Records finished runs in the database, and returns the earliest of their next due times. If the
    /// database does not answer, the next call records them.
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
                        self.emit_missed(&run);
                    }
                }
            }
            Err(error) => tracing::warn!(%error, "the scheduler cannot record published runs"),
        }
        next
    }

    /// Checks stored due times once a term, and after the clock stepped back: they may come from another clock
    /// or an older edition of the time zones. Returns whether there is more to check.
    async fn check_due_times(&mut self, term: &mut Term, lease: &Lease) -> bool {
        let now = lease.now();
        let seen = match &term.due_time_check {
            DueTimeCheck::CompleteAt(before) if !is_step_back(*before, now) => {
                term.due_time_check = DueTimeCheck::CompleteAt(now.max(*before));
                return false;
            }
            DueTimeCheck::CompleteAt(_) => "",
            DueTimeCheck::Checked(name) => name.as_str(),
        };
        match self.table.correct_due_times(now, seen).await {
            Ok(Some(last)) => term.due_time_check = DueTimeCheck::Checked(last),
            Ok(None) => term.due_time_check = DueTimeCheck::CompleteAt(now),
            Err(error) => tracing::warn!(%error, "the scheduler cannot check stored due times"),
        }
        matches!(term.due_time_check, DueTimeCheck::Checked(_))
    }

    fn emit_published(&self, run: &Settled, receipt: &Receipt, now: Timestamp) {
        let (schedule, due) = (&run.schedule.name, run.decision.newest);
        let late = Duration::try_from(now.duration_since(due)).unwrap_or_default();
        tracing::debug!(schedule, id = %receipt.id, ?late, "published a run");
        self.observers.emit(&Event::SchedulePublished {
            schedule,
            id: &receipt.id,
            due: system(due),
            late,
        });
    }

    fn emit_missed(&self, run: &Settled) {
        let (schedule, count) = (&run.schedule.name, run.decision.missed);
        let newest = run.decision.newest;
        tracing::warn!(schedule, count, %newest, "missed runs");
        self.observers.emit(&Event::ScheduleMissed {
            schedule,
            count,
            last_due: system(run.decision.newest),
        });
    }
}

impl Term {
    /// The schedules that the next query leaves out. Brings `wake` forward to the end of the first pause.
    fn aside(&mut self, now: Instant, wake: &mut Instant) -> Vec<String> {
        self.backing_off
            .retain(|_, retry| retry.until + LONGEST_PAUSE > now);
        let mut aside: Vec<String> = self.busy.iter().cloned().collect();
        aside.extend(self.settled.iter().map(|run| run.schedule.name.clone()));
        for (name, retry) in self
            .backing_off
            .iter()
            .filter(|(_, retry)| retry.until > now)
        {
            *wake = retry.until.min(*wake);
            aside.push(name.clone());
        }
        aside
    }

    fn back_off(&mut self, name: &str) {
        let before = self.backing_off.get(name).map(|retry| retry.pause * 2);
        let pause = before.unwrap_or(FIRST_PAUSE).min(LONGEST_PAUSE);
        let until = Instant::now() + pause;
        self.backing_off
            .insert(name.to_owned(), RetryPause { until, pause });
    }
}
