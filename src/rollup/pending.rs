//! What was counted and is not in the database yet, minute by minute. Pure.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

use super::RollupTotals;
use super::counters::Cell;

/// How many minutes are kept apart while the database is away.
const MOST_MINUTES: usize = 60;
/// How many counts of a task in a minute are kept, about 5 MB. Beyond that, the oldest minutes become one.
const MOST_CELLS: usize = 10_000;
/// How many rows one statement writes.
const BATCH: usize = 500;

const MINUTE: Duration = Duration::from_secs(60);

/// What is not written yet.
pub(super) struct Pending {
    /// The oldest first. The last one is counted into.
    minutes: VecDeque<Minute>,
    /// When the next minute begins, by the clock of the database as far as that is known.
    next_minute: Instant,
    /// What has counts in the present minute although nothing happened.
    marked: HashSet<Cell>,
    /// What was sent last and may be written or not.
    in_flight: Option<Batch>,
    last_number: i64,
}

struct Minute {
    /// When it began. The database finds out which minute of its own clock that was.
    begin: Instant,
    cells: HashMap<Cell, Box<RollupTotals>>,
}

/// What one statement writes: all or nothing, and once, by its number.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Batch {
    pub(super) number: i64,
    pub(super) begin: Instant,
    pub(super) cells: Vec<(Cell, Box<RollupTotals>)>,
}

impl Pending {
    /// `into_minute` is how much of the present minute is over.
    pub(super) fn new(now: Instant, into_minute: Duration) -> Self {
        Self {
            minutes: VecDeque::new(),
            next_minute: now + MINUTE.saturating_sub(into_minute),
            marked: HashSet::new(),
            in_flight: None,
            last_number: 0,
        }
    }

    /// Corrects when the next minute begins.
    pub(super) fn set_clock(&mut self, now: Instant, into_minute: Duration) {
        let mut next = now + MINUTE.saturating_sub(into_minute);
        // The minute that the database has begun may be one that is not begun here yet.
        if next > self.next_minute + MINUTE / 2 {
            next = next.checked_sub(MINUTE).unwrap_or(next);
        }
        self.next_minute = next;
    }

    /// When to take the counts of a minute that ends.
    pub(super) fn next_minute(&self) -> Instant {
        self.next_minute
    }

    /// Adds counts of the present minute.
    pub(super) fn add(&mut self, now: Instant, cell: Cell, totals: Box<RollupTotals>) {
        if self.minutes.is_empty() {
            let cells = HashMap::new();
            self.minutes.push_back(Minute { begin: now, cells });
        }
        if let Some(minute) = self.minutes.back_mut() {
            minute.add(cell, totals);
        }
    }

    /// Has a row in the present minute, once, even if nothing happens.
    pub(super) fn mark(&mut self, now: Instant, cell: Cell) {
        if self.marked.insert(cell) {
            self.add(now, cell, Box::default());
        }
    }

    /// When the present minute began, or its counts.
    pub(super) fn minute_begin(&self, now: Instant) -> Instant {
        self.minutes.back().map_or(now, |minute| minute.begin)
    }

    /// Begins the next minute, if it is time. What was counted until now was added before.
    pub(super) fn turn(&mut self, now: Instant) {
        if now < self.next_minute {
            return;
        }
        let late = now - self.next_minute;
        let begin = now - Duration::from_nanos(nanos_into_minute(late));
        self.next_minute = begin + MINUTE;
        self.marked.clear();
        let cells = HashMap::new();
        // What was counted in a process that stood still is late by that.
        self.minutes.push_back(Minute { begin, cells });
        self.shrink();
    }

    /// The oldest counts that are not written. The same ones again, until [`forget_batch`](Self::forget_batch).
    pub(super) fn next_batch(&mut self) -> Option<&Batch> {
        if self.in_flight.is_none() {
            self.in_flight = self.take_batch();
        }
        self.in_flight.as_ref()
    }

    /// The batch that was given last is in the database, or never will be.
    pub(super) fn forget_batch(&mut self) {
        self.in_flight = None;
    }

    /// Forgets all but the present minute.
    pub(super) fn forget(&mut self) {
        self.in_flight = None;
        while self.minutes.len() > 1 {
            self.minutes.pop_front();
        }
    }

    fn take_batch(&mut self) -> Option<Batch> {
        while self.minutes.len() > 1 && self.minutes.front().is_some_and(|it| it.cells.is_empty()) {
            self.minutes.pop_front();
        }
        let minute = self.minutes.front_mut().filter(|it| !it.cells.is_empty())?;
        let mut chosen: Vec<Cell> = minute.cells.keys().copied().collect();
        chosen.sort_unstable();
        chosen.truncate(BATCH);
        let cells = chosen.into_iter().filter_map(|cell| {
            let totals = minute.cells.remove(&cell)?;
            Some((cell, totals))
        });
        self.last_number += 1;
        Some(Batch {
            number: self.last_number,
            begin: minute.begin,
            cells: cells.collect(),
        })
    }

    /// Joins the two oldest minutes, as long as there are too many. Nothing is lost but when it was.
    fn shrink(&mut self) {
        let count = |minutes: &VecDeque<Minute>| -> usize {
            let cells = minutes.iter().map(|minute| minute.cells.len());
            cells.sum()
        };
        while self.minutes.len() > 2
            && (self.minutes.len() > MOST_MINUTES || count(&self.minutes) > MOST_CELLS)
        {
            let (Some(oldest), Some(next)) = (self.minutes.pop_front(), self.minutes.front_mut())
            else {
                return;
            };
            next.begin = oldest.begin;
            for (cell, totals) in oldest.cells {
                next.add(cell, totals);
            }
        }
    }
}

impl Minute {
    fn add(&mut self, cell: Cell, totals: Box<RollupTotals>) {
        match self.cells.entry(cell) {
            std::collections::hash_map::Entry::Occupied(mut known) => {
                known.get_mut().merge(&totals)
            }
            std::collections::hash_map::Entry::Vacant(new) => drop(new.insert(totals)),
        }
    }
}

fn nanos_into_minute(late: Duration) -> u64 {
    let nanos = late.as_nanos() % MINUTE.as_nanos();
    u64::try_from(nanos).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn done(count: u64) -> Box<RollupTotals> {
        Box::new(RollupTotals {
            done: count,
            ..RollupTotals::default()
        })
    }

    /// All that is pending: how many were done, by the second in which their minute began.
    fn drained(pending: &mut Pending, origin: Instant) -> Vec<(u64, u64)> {
        let mut all = Vec::new();
        while let Some(batch) = pending.next_batch() {
            let begin = (batch.begin - origin).as_secs();
            let done = batch.cells.iter().map(|(_, totals)| totals.done).sum();
            all.push((begin, done));
            pending.forget_batch();
        }
        all
    }

    fn after(origin: Instant, seconds: u64) -> Instant {
        origin + Duration::from_secs(seconds)
    }

    #[test]
    fn counts_are_of_the_minute_in_which_they_were_taken() {
        let origin = Instant::now();
        let mut pending = Pending::new(origin, Duration::from_secs(50));
        pending.add(after(origin, 3), (0, 0), done(1));
        pending.turn(after(origin, 9));
        pending.add(after(origin, 9), (0, 0), done(2));
        pending.turn(after(origin, 11));
        pending.add(after(origin, 12), (0, 0), done(4));
        assert_eq!(drained(&mut pending, origin), [(3, 3), (10, 4)]);
        assert_eq!(pending.next_minute(), after(origin, 70));
    }

    #[test]
    fn what_is_marked_has_one_row_in_each_minute() {
        let origin = Instant::now();
        let mut pending = Pending::new(origin, Duration::ZERO);
        for second in [0, 10, 50, 61, 70] {
            pending.turn(after(origin, second));
            pending.mark(after(origin, second), (0, 0));
            pending.next_batch();
        }
        assert_eq!(drained(&mut pending, origin), [(0, 0), (60, 0)]);
    }

    #[test]
    fn a_clock_that_is_a_moment_ahead_skips_no_minute() {
        let origin = Instant::now();
        let mut pending = Pending::new(origin, Duration::ZERO);
        pending.add(after(origin, 59), (0, 0), done(1));
        // The database says, at the 59th second, that its next minute has begun.
        pending.set_clock(after(origin, 59), Duration::from_millis(2));
        pending.turn(after(origin, 59));
        pending.add(after(origin, 61), (0, 0), done(2));
        assert_eq!(drained(&mut pending, origin), [(59, 1), (58, 2)]);
        assert_eq!(
            pending.next_minute(),
            after(origin, 119) - Duration::from_millis(2)
        );
    }

    #[test]
    fn a_batch_comes_again_under_its_number_until_it_is_written() {
        let origin = Instant::now();
        let mut pending = Pending::new(origin, Duration::ZERO);
        pending.add(origin, (0, 0), done(1));
        let first = pending.next_batch().cloned().unwrap();
        pending.add(origin, (0, 0), done(2));
        assert_eq!(pending.next_batch(), Some(&first));
        pending.forget_batch();
        let second = pending.next_batch().cloned().unwrap();
        assert!(second.number > first.number);
        assert_eq!(second.cells, [((0, 0), done(2))]);
    }

    #[test]
    fn a_database_that_is_away_for_hours_costs_the_oldest_minutes_and_no_count() {
        let origin = Instant::now();
        let mut pending = Pending::new(origin, Duration::ZERO);
        for minute in 0..500 {
            let now = after(origin, 60 * minute);
            pending.turn(now);
            pending.add(now, (usize::try_from(minute % 7).unwrap(), 0), done(1));
        }
        let all = drained(&mut pending, origin);
        assert!(all.len() <= MOST_MINUTES, "{}", all.len());
        assert_eq!(all.iter().map(|(_, done)| done).sum::<u64>(), 500);
        assert_eq!(all.last(), Some(&(60 * 499, 1)));
    }

    #[test]
    fn many_tasks_do_not_fill_the_memory() {
        let origin = Instant::now();
        let mut pending = Pending::new(origin, Duration::ZERO);
        for minute in 0..40 {
            let now = after(origin, 60 * minute);
            pending.turn(now);
            for task in 0..1_000 {
                pending.add(now, (task, 0), done(1));
            }
        }
        let cells: usize = pending.minutes.iter().map(|it| it.cells.len()).sum();
        assert!(cells <= MOST_CELLS + 1_000, "{cells}");
        let all = drained(&mut pending, origin);
        assert_eq!(all.iter().map(|(_, done)| done).sum::<u64>(), 40_000);
    }

    #[test]
    fn a_process_that_stood_still_goes_on_with_the_present_minute() {
        let origin = Instant::now();
        let mut pending = Pending::new(origin, Duration::ZERO);
        pending.turn(after(origin, 150));
        pending.add(after(origin, 150), (0, 0), done(1));
        assert_eq!(drained(&mut pending, origin), [(120, 1)]);
        assert_eq!(pending.next_minute(), after(origin, 180));
    }
}
