//! Claims rows, and tells the database what is done.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::parked::RowOrigin;
use super::quarantine::SUSPECT_CLAIM;
use super::{MARK_AFTER, Quarantine, RELEASE_AFTER, Rows, State, Unsettled};
use crate::Error;
use crate::backlog::{Batch, ClaimedRow, Later, MadeReady, RankStart, RunKey};
use crate::backoff::Backoff;
use crate::source::Handle;
use crate::source::postgres::signal::earlier;
use crate::source::postgres::statements::{Answer, Claim, Statement, may_be_done};

/// How many rows to settle and claim are worth a statement beside others: three quarters of the prefetch window, within
/// these bounds. Larger batches cost less for each row: with 96 in place of 32, a window of 128 drained a third faster.
const WORTH_A_STATEMENT: RangeInclusive<usize> = 32..=256;
/// How many bytes of payload a tier prefetches, about.
pub(super) const PREFETCHED_BYTES: usize = 16 << 20;
/// How many bytes one claim takes, about.
pub(super) const CLAIMED_BYTES: usize = 4 << 20;
/// How many runs one statement puts back or stores for later, and about how many bytes of properties.
const SETTLED_ROWS: usize = 500;
const SETTLED_BYTES: usize = 1 << 20;
/// How many dead letters one statement stores.
const DEAD_AT_ONCE: usize = 20;
/// How long what is done may wait for more that is done.
const LONGEST_GATHERING: Duration = Duration::from_millis(1);
/// How far before the last claimed row the next claim begins: transactions commit in another order than they began.
const LATE_COMMITS: Duration = Duration::from_millis(500);

/// What is done waits for more that is.
struct Gathering;

/// A claimed row.
pub(super) struct AcceptedRow {
    pub(super) row: ClaimedRow,
    /// Its place in the order of the tier, if that is not its due time.
    pub(super) turn: Option<SystemTime>,
    pub(super) origin: RowOrigin,
}

impl Rows {
    /// Begins the statements that are worth it. Whether more may be worth it in a moment.
    pub(super) fn begin_statements(&mut self, is_quiet: bool) -> bool {
        let now = Instant::now();
        match self.retry_at {
            Some(at) if at > now => return false,
            _ => self.retry_at = None,
        }
        while self.statements.has_room() {
            let statement = if !self.beginning.is_empty() {
                Statement::Begin(std::mem::take(&mut self.beginning))
            } else if !self.back.is_empty() {
                let some = self.back.len().min(SETTLED_ROWS);
                Statement::Back(self.back.drain(..some).collect())
            } else if !self.later.is_empty() {
                Statement::Later(self.next_later())
            } else if let Some(dead) = self.next_dead() {
                dead
            } else if let Some(release) = self.release(now) {
                release
            } else if let Some(moving) = self.next_move() {
                moving
            } else if self.must_make_ready(now) {
                self.next_due = None;
                self.is_making_ready = true;
                Statement::MakeReady
            } else {
                match self.next_claim(now, is_quiet) {
                    Ok(Some(claim)) => claim,
                    Ok(None) => match self.next_lane_claim(now) {
                        Some(claim) => claim,
                        None => return false,
                    },
                    Err(Gathering) => match self.next_lane_claim(now) {
                        Some(claim) => claim,
                        None => return true,
                    },
                }
            };
            self.statements.begin(statement);
        }
        false
    }

    /// Some retries: as many as one statement stores in good time.
    fn next_later(&mut self) -> Vec<(Handle, Later)> {
        let (mut some, mut bytes) = (0, 0);
        while some < self.later.len().min(SETTLED_ROWS) && bytes < SETTLED_BYTES {
            bytes += self.later[some].1.properties.len();
            some += 1;
        }
        self.later.drain(..some).collect()
    }

    /// Some dead letters, one statement at a time: a wave of them must not take all connections.
    fn next_dead(&mut self) -> Option<Statement> {
        if self.is_storing_dead || self.dead.is_empty() {
            return None;
        }
        self.is_storing_dead = true;
        let some = self.dead.len().min(DEAD_AT_ONCE);
        Some(Statement::Dead(self.dead.drain(..some).collect()))
    }

    fn must_make_ready(&self, now: Instant) -> bool {
        let is_serving = self.worker.is_some() && self.drain_by.is_none();
        is_serving && !self.is_making_ready && self.next_due.is_some_and(|due| due <= now)
    }

    /// While no claim is under way, everything that this process holds is known here.
    pub(super) fn release(&mut self, now: Instant) -> Option<Statement> {
        let worker = self.worker?;
        let is_due = self.release_at.front().is_some_and(|at| *at <= now);
        if !is_due || self.claiming > 0 || self.statements.under_way() > 0 {
            return None;
        }
        self.release_at.pop_front();
        self.is_releasing = true;
        let unsettled = self.unsettled.values().map(|it| it.run);
        let known = unsettled.chain(self.done.iter().map(|(run, _)| *run));
        Some(Statement::ReleaseUnknown {
            worker,
            known: known.map(|run| run.token).collect(),
        })
    }

    /// Whether claims must wait, because rows are being released or about to be.
    pub(super) fn must_not_claim(&self, now: Instant) -> bool {
        self.is_releasing || self.release_at.front().is_some_and(|at| *at <= now)
    }

    fn next_claim(&mut self, now: Instant, is_quiet: bool) -> Result<Option<Statement>, Gathering> {
        let Some(worker) = self.worker else {
            return Ok(None);
        };
        let may_receive = self.drain_by.is_none() && !self.is_paused;
        if may_receive
            && !self.must_not_claim(now)
            && let Quarantine::Permitted(_) = self.quarantine
            && let Quarantine::Permitted(permit) =
                std::mem::replace(&mut self.quarantine, Quarantine::Empty)
        {
            self.quarantine = Quarantine::Claiming(permit);
            let claim = self.claim_parked_suspect(worker);
            return Ok(Some(claim.unwrap_or_else(|| self.claim_suspect(worker))));
        }
        // All ready rows of a tier with `fair` are moved to their lanes.
        let is_fair = self.parked.gating.is_fair();
        let may_claim = self.expects_more
            && may_receive
            && !is_fair
            && !self.parked.is_sweeping
            && !self.must_not_claim(now);
        let free_bytes = self.free_bytes();
        let rows = match may_claim && free_bytes > 0 {
            true => self.room_for_ready(),
            false => 0,
        };
        let has_marks = self
            .unmarked
            .front()
            .is_some_and(|(since, _)| *since + MARK_AFTER <= now);
        if self.done.is_empty() && !has_marks && rows == 0 {
            self.gathering_since = None;
            return Ok(None);
        }
        let worth = self.done.len() + rows;
        let is_alone = self.statements.under_way() == 0;
        let has_waited = self
            .gathering_since
            .is_some_and(|since| now >= since + LONGEST_GATHERING);
        let (least, most) = WORTH_A_STATEMENT.into_inner();
        let worth_a_statement = (self.window / 4 * 3).clamp(least, most);
        let is_worth_it = worth >= worth_a_statement || (is_alone && (is_quiet || has_waited));
        if !is_worth_it {
            // With another statement under way, its answer begins the next one.
            self.gathering_since.get_or_insert(now);
            return if is_alone { Err(Gathering) } else { Ok(None) };
        }
        self.gathering_since = None;
        self.claiming += rows;
        self.claiming_bytes += free_bytes;
        self.is_woken = false;
        if rows > 0 {
            self.parked.claim_first = false;
            self.parked.is_turn_of_lanes = true;
        }
        let begun = self.due_marks(now);
        self.claims_sent += 1;
        Ok(Some(Statement::Claim(Claim {
            worker,
            ttl: self.ttl_of(""),
            number: self.claims_sent,
            generation: self.generation,
            batch: Batch {
                done: std::mem::take(&mut self.done),
                begun,
                rows,
                bytes: free_bytes,
                ranks: self.starts.clone(),
            },
        })))
    }

    /// Handlers that have run for long enough to be marked as begun.
    pub(super) fn due_marks(&mut self, now: Instant) -> Vec<RunKey> {
        let mut due = Vec::new();
        while let Some((since, handle)) = self.unmarked.front()
            && *since + MARK_AFTER <= now
        {
            let unsettled = self.unsettled.get(handle);
            let running = unsettled.filter(|it| it.state == State::Taken);
            due.extend(running.map(|it| it.run));
            self.unmarked.pop_front();
        }
        due
    }

    /// What was to be marked as begun is not.
    pub(super) fn unmark(&mut self, begun: &[RunKey]) {
        let now = Instant::now();
        for (handle, unsettled) in &self.unsettled {
            if begun.contains(&unsettled.run) {
                self.unmarked.push_front((now, *handle));
            }
        }
    }

    pub(super) fn answered(&mut self, answer: Answer) {
        let failed = match answer {
            Answer::Claimed(claim, claimed) => self.claimed(claim, claimed).err(),
            // Handlers that got no answer give their tasks back.
            Answer::Begun(begun) => begun.err(),
            Answer::Back(back, Ok(())) => {
                self.claim_again(&back);
                self.places_are_free();
                for (handle, _) in back {
                    self.settle_now(handle);
                }
                None
            }
            Answer::Back(back, Err(error)) => {
                self.back.extend(back);
                Some(error)
            }
            Answer::Later(later, Ok(ours)) => {
                self.places_are_free();
                for (handle, later) in later {
                    let is_ours = ours.contains(&later.run.id);
                    self.stored_later(handle, later.after, is_ours);
                }
                None
            }
            Answer::Later(later, Err(error)) => {
                self.later.extend(later);
                Some(error)
            }
            Answer::Dead(stored) => {
                self.is_storing_dead = false;
                self.places_are_free();
                let mut failed = None;
                for (dead, stored) in stored {
                    match stored {
                        Ok(()) => self.settle_now(dead.handle),
                        Err(error) if error.is_transient() => {
                            failed = Some(error);
                            self.dead.push(dead);
                        }
                        Err(error) => self.not_stored(dead.handle, &error),
                    }
                }
                failed
            }
            Answer::ClaimedParked(claim, claimed) => self.claimed_parked(claim, claimed).err(),
            Answer::Parked(parked, result) => self.parked(parked, result),
            Answer::Swept(swept) => self.swept(swept),
            Answer::Unparked(task, keys, unparked) => self.unparked(&task, keys, unparked),
            Answer::MadeReady(Ok(made)) => {
                self.is_making_ready = false;
                self.made_ready(&made);
                None
            }
            Answer::MadeReady(Err(error)) => {
                self.is_making_ready = false;
                self.next_due = Some(Instant::now());
                Some(error)
            }
            Answer::Released(Ok(count)) => {
                self.is_releasing = false;
                if count > 0 {
                    tracing::debug!(count, tier = %self.name, "put back rows of a claim without an answer");
                    self.expects_more = true;
                }
                None
            }
            Answer::Released(Err(error)) => {
                self.is_releasing = false;
                self.release_at.push_front(Instant::now());
                Some(error)
            }
        };
        match failed {
            Some(error) => self.failed(&error),
            None => {
                self.backoff = Backoff::new();
                self.is_failing = false;
            }
        }
    }

    /// A relay gives rows back that their queue refuses, and they are the next ones. Without this a look would find them,
    /// up to a second later.
    fn claim_again(&mut self, back: &[(Handle, RunKey)]) {
        if !self.settings.is_relay {
            return;
        }
        let places = back.iter().filter_map(|(handle, _)| {
            let (rank, due_at, _) = self.unsettled.get(handle)?.place;
            Some((rank, due_at))
        });
        let places: Vec<(i16, SystemTime)> = places.collect();
        self.begin_at(&places);
        self.expects_more = true;
    }

    fn made_ready(&mut self, made: &MadeReady) {
        let next_due = made
            .next_due
            .and_then(|after| Instant::now().checked_add(after));
        self.next_due = earlier(self.next_due, next_due);
        if !made.starts.is_empty() {
            self.found_older(&made.starts);
        }
    }

    /// Rows are ready that claims may have gone past.
    pub(super) fn found_older(&mut self, starts: &[(i16, SystemTime)]) {
        self.begin_at(starts);
        self.expects_more = true;
        // A claim under way may not have seen them.
        self.is_woken = true;
    }

    pub(super) fn failed(&mut self, error: &Error) {
        let tier = &*self.name;
        match self.backoff.is_worth_a_warning() {
            true => tracing::warn!(%error, tier, "the database failed, trying again"),
            false => tracing::debug!(%error, tier, "the database failed, trying again"),
        }
        self.retry_at = Some(Instant::now() + self.backoff.next());
        self.is_failing = true;
    }

    pub(super) fn claimed(
        &mut self,
        claim: Claim,
        claimed: Result<Vec<ClaimedRow>, Error>,
    ) -> Result<(), Error> {
        let Claim {
            number,
            generation,
            batch,
            ..
        } = claim;
        self.claiming -= batch.rows;
        self.claiming_bytes -= batch.bytes;
        self.hold_until = None;
        self.first_answer_by = None;
        let is_quarantine = number == SUSPECT_CLAIM;
        let rows = match claimed {
            Ok(claimed) => claimed,
            Err(error) => {
                if batch.rows > 0 {
                    self.claim_failed(&error);
                }
                // A run that is settled already is settled again without effect.
                self.done.extend(batch.done);
                self.unmark(&batch.begun);
                if is_quarantine {
                    self.quarantine = Quarantine::Empty;
                }
                self.expects_more = true;
                return Err(error);
            }
        };
        if !batch.done.is_empty() {
            self.places_are_free();
        }
        let bytes: usize = rows.iter().map(ClaimedRow::size).sum();
        if !is_quarantine && batch.rows > 0 {
            let is_all = rows.len() < batch.rows && bytes < batch.bytes;
            // A later claim may have seen more.
            if !is_all || number == self.claims_sent {
                self.expects_more = !is_all || std::mem::take(&mut self.is_woken);
                self.ready_rank = rows.last().map(|row| row.rank).filter(|_| !is_all);
            }
        }
        for row in &rows {
            let sent = batch.ranks.iter().find(|start| start.rank == row.rank);
            self.claimed_up_to(row.rank, row.due_at, sent.and_then(|it| it.since));
        }
        let permit = match std::mem::replace(&mut self.quarantine, Quarantine::Empty) {
            Quarantine::Claiming(permit) if is_quarantine => Some(permit),
            other => {
                self.quarantine = other;
                None
            }
        };
        let is_lost = generation != self.generation;
        let rows = rows.into_iter().map(|row| AcceptedRow {
            row,
            turn: None,
            origin: RowOrigin::Ready,
        });
        self.accept_all(rows.collect(), permit, is_lost);
        Ok(())
    }

    /// A claim without an answer may have left rows with this process.
    pub(super) fn claim_failed(&mut self, error: &Error) {
        if may_be_done(error) {
            let now = Instant::now();
            self.release_at = RELEASE_AFTER.map(|after| now + after).into();
        }
    }

    /// The next claim begins a little before the last row of this one, unless a look has found something before since
    /// the claim was sent.
    pub(super) fn claimed_up_to(
        &mut self,
        rank: i16,
        due_at: SystemTime,
        sent: Option<SystemTime>,
    ) {
        let since = due_at.checked_sub(LATE_COMMITS);
        if let Some(start) = self.starts.iter_mut().find(|start| start.rank == rank)
            && start.since >= sent
        {
            start.since = since.max(start.since);
        }
    }

    pub(super) fn accept_all(
        &mut self,
        rows: Vec<AcceptedRow>,
        mut permit: Option<OwnedSemaphorePermit>,
        is_lost: bool,
    ) {
        let now = SystemTime::now();
        for AcceptedRow { row, turn, origin } in rows {
            let handle = self.next_handle;
            self.next_handle += 1;
            let (run, is_held, is_expired) = (row.key, row.is_held, row.is_expired);
            let place = (row.rank, turn.unwrap_or(row.due_at), row.key);
            let bytes = row.size();
            let received = Arc::new(row.into_received(&self.name, now));
            if permit.is_some() {
                self.quarantine = Quarantine::Held(handle, Instant::now());
            }
            let unsettled = Unsettled {
                run,
                place,
                received: received.clone(),
                bytes,
                is_held,
                origin,
                state: State::Prefetched,
                _running: None,
                _quarantined: permit.take(),
                follows: None,
            };
            self.prefetched_bytes += bytes;
            self.unsettled.insert(handle, unsettled);
            if self.drain_by.is_some() || self.is_paused || is_lost {
                self.put_back(handle);
            } else if is_expired && !self.is_paused_task(&received) {
                self.expire(handle);
            } else {
                self.admit(handle);
            }
        }
    }

    /// Claims begin at the first rows that a look has found.
    pub(super) fn begin_at(&mut self, found: &[(i16, SystemTime)]) {
        for (rank, first) in found {
            // A relay runs nothing: to it a suspect is a row like any other.
            if *rank > 0 && !self.settings.is_relay {
                self.expect_suspect();
                continue;
            }
            let since = Some(*first);
            match self.starts.iter_mut().find(|start| start.rank == *rank) {
                // A claim under way may have begun before the look.
                Some(start) => start.since = start.since.map(|since| since.min(*first)),
                None => {
                    self.starts.push(RankStart { rank: *rank, since });
                    self.starts.sort_by_key(|start| start.rank);
                }
            }
        }
    }
}
