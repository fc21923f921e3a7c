//! The statements about rows that may not run now: they are moved to their lanes, claimed from there when they may run, and
//! made ready again when nothing holds them back any more.

use std::cmp::Ordering;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::claims::{AcceptedRow, CLAIMED_BYTES, PREFETCHED_BYTES};
use super::parked::{KnownLanes, RowOrigin, RowToPark};
use super::{Quarantine, Rows, State};
use crate::Error;
use crate::backlog::{ClaimedFromLanes, ClaimedRow, Lane, LaneClaim, LaneKeys, Sweep, Unparked};
use crate::control::{Gate, Gated, Gating};
use crate::source::postgres::statements::{ParkedClaim, Statement};

/// How many rows one statement moves to their lanes.
const PARKED_AT_ONCE: usize = 500;
/// For how long a lane must have been left alone before its rows are made ready, unless this process has just learned of a
/// change: while two releases with different maps run, the other one would move them back.
const QUIET: Duration = Duration::from_secs(3);
const CHANGED_FOR: Duration = Duration::from_secs(10);

/// Which rows come first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum First {
    Ready,
    Lanes,
    /// Each has half of what is free.
    InTurns,
}

impl Rows {
    /// The next statement that moves rows to their lanes or back, if any is worth it.
    pub(super) fn next_move(&mut self) -> Option<Statement> {
        let gating = self.parked.gating.clone();
        if !self.parked.to_park.is_empty() {
            let some = self.parked.to_park.len().min(PARKED_AT_ONCE);
            let rows = self.parked.to_park.drain(..some).collect();
            return Some(Statement::Park(rows, gating));
        }
        if self.settings.is_relay || self.worker.is_none() || self.drain_by.is_some() {
            return None;
        }
        if gating.is_fair() && self.expects_more {
            // All its ready rows go to their lanes.
            self.expects_more = false;
            self.is_woken = false;
            self.parked.must_sweep = true;
        }
        let may_claim_first = self.parked.claim_first && self.expects_more && !self.is_paused;
        if self.parked.must_sweep && !self.parked.is_sweeping && !may_claim_first {
            self.parked.must_sweep = false;
            let tasks = self.tasks_to_sweep();
            if gating.is_fair() || !tasks.is_empty() {
                self.parked.is_sweeping = true;
                let sweep = Sweep {
                    ranks: self.starts.clone(),
                    tasks: (!gating.is_fair()).then_some(tasks),
                };
                return Some(Statement::Sweep(sweep, gating));
            }
        }
        self.next_unpark(&gating)
    }

    /// Empties lanes that are not those of what is in force.
    fn next_unpark(&mut self, gating: &Gating) -> Option<Statement> {
        if self.parked.is_unparking {
            return None;
        }
        let keys_to_empty = |task: &str, lanes: &KnownLanes| match gating.of(task) {
            _ if task.is_empty() => (!gating.is_fair()).then_some(LaneKeys::All),
            None => Some(LaneKeys::All),
            Some(Gated::Paused { .. }) => None,
            Some(Gated::Limited(_)) => lanes.has_keyed.then_some(LaneKeys::Some),
            Some(Gated::PerKey { .. }) => lanes.has_keyless.then_some(LaneKeys::None),
        };
        let quiet = match self.parked.changed_at.elapsed() < CHANGED_FOR {
            true => Duration::ZERO,
            false => QUIET,
        };
        for (task, lanes) in &mut self.parked.lanes {
            if lanes.expects_more
                && let Some(keys) = keys_to_empty(task, lanes)
            {
                match keys {
                    LaneKeys::All => lanes.expects_more = false,
                    LaneKeys::Some => lanes.has_keyed = false,
                    LaneKeys::None => lanes.has_keyless = false,
                }
                self.parked.is_unparking = true;
                return Some(Statement::Unpark {
                    task: task.clone(),
                    keys,
                    quiet,
                });
            }
        }
        None
    }

    /// How many of the rows that may be claimed now are to come from the ready ones.
    pub(super) fn room_for_ready(&self) -> usize {
        let room = self.room();
        match self.lanes_want().then(|| self.first()) {
            Some(First::Lanes) => 0,
            Some(First::InTurns) if self.parked.is_turn_of_lanes => 0,
            Some(First::InTurns) => room.div_ceil(2),
            Some(First::Ready) | None => room,
        }
    }

    fn room_for_lanes(&self) -> usize {
        let room = self.room();
        match self.expects_more.then(|| self.first()) {
            Some(First::Ready) => 0,
            Some(First::InTurns) if !self.parked.is_turn_of_lanes => 0,
            Some(First::InTurns) => room.div_ceil(2),
            Some(First::Lanes) | None => room,
        }
    }

    /// How many more rows may be claimed. Those that wait for the gate of their task take no place: it may be long, and others
    /// are behind them.
    fn room(&self) -> usize {
        let held = self.unsettled.len() - self.prefetched.waiting_for_gates();
        self.window
            .saturating_sub(held + self.claiming + self.parked.claiming)
    }

    pub(super) fn free_bytes(&self) -> usize {
        PREFETCHED_BYTES
            .saturating_sub(self.prefetched_bytes + self.claiming_bytes)
            .min(CLAIMED_BYTES)
    }

    /// The lanes from which rows may be claimed that take a place of the window. Those that wait for the gate of their task
    /// take none.
    fn wanting(&self) -> impl Iterator<Item = &KnownLanes> {
        let gating = &self.parked.gating;
        let has_places = self.free_places() > 0;
        let is_wanting = move |task: &str| match gating.of(task) {
            _ if task.is_empty() => gating.is_fair(),
            Some(Gated::PerKey { gate, .. }) => {
                let is_allowed =
                    |gate: &Arc<Gate>| gate.allowance() > self.prefetched.limited(task);
                has_places && gate.as_ref().is_none_or(is_allowed)
            }
            None | Some(Gated::Paused { .. } | Gated::Limited(_)) => false,
        };
        let lanes = self.parked.lanes.iter();
        let wanting = lanes.filter(move |(task, lanes)| lanes.expects_more && is_wanting(task));
        wanting.map(|(_, lanes)| lanes)
    }

    /// Whether a claim from lanes is worth it.
    fn lanes_want(&self) -> bool {
        // Nearly always there are none.
        !self.parked.lanes.is_empty() && !self.parked.is_claiming && self.wanting().next().is_some()
    }

    /// How many more rows that count for their keys may wait here: one that waits for a slot keeps others of its key waiting,
    /// perhaps in another process.
    fn free_places(&self) -> usize {
        let is_counted = |it: &&super::Unsettled| {
            it.state == State::Prefetched && it.origin == (RowOrigin::Lane { is_counted: true })
        };
        let waiting = self.unsettled.values().filter(is_counted).count();
        self.parked.slots.saturating_sub(waiting)
    }

    /// Compares the first row of the lanes with the first ready one, by rank.
    fn first(&self) -> First {
        let ranks: Option<Vec<i16>> = self.wanting().map(|lanes| lanes.rank).collect();
        let of_lanes = ranks.and_then(|ranks| ranks.into_iter().min());
        let ranks = of_lanes.zip(self.ready_rank);
        match ranks.map(|(of_lanes, ready)| of_lanes.cmp(&ready)) {
            Some(Ordering::Less) => First::Lanes,
            Some(Ordering::Greater) => First::Ready,
            Some(Ordering::Equal) | None => First::InTurns,
        }
    }

    /// A claim from lanes, if any is worth it.
    pub(super) fn next_lane_claim(&mut self, now: Instant) -> Option<Statement> {
        let worker = self.worker?;
        let bytes = self.free_bytes();
        if self.settings.is_relay
            || self.parked.is_claiming
            || self.parked.lanes.is_empty()
            || self.is_paused
            || self.drain_by.is_some()
            || self.must_not_claim(now)
            || bytes == 0
        {
            return None;
        }
        let gating = self.parked.gating.clone();
        let (mut room, mut places_left) = (self.room_for_lanes(), self.free_places());
        let tasks = self.tasks_in_turn();
        let (mut claims, mut rows, mut is_coming) = (Vec::new(), 0, false);
        for (index, (rank, task)) in tasks.iter().enumerate() {
            // Tasks of one rank divide what is free.
            let takes_room = |task: &str| match gating.of(task) {
                _ if task.is_empty() => gating.is_fair(),
                gated => matches!(gated, Some(Gated::PerKey { .. })),
            };
            let of_rank = tasks[index..].iter().take_while(|(it, _)| it == rank);
            let sharing = of_rank.filter(|(_, task)| takes_room(task)).count().max(1);
            let task = task.clone();
            let held = self.prefetched.limited(&task);
            let (most, places) = match gating.of(&task) {
                _ if task.is_empty() && gating.is_fair() => (room.div_ceil(sharing), None),
                Some(Gated::Limited(gate)) => {
                    is_coming |= gate.startable(false) > 0;
                    (gate.allowance().saturating_sub(held), None)
                }
                Some(Gated::PerKey { places, gate, .. }) => {
                    let allowed = gate
                        .as_ref()
                        .map_or(usize::MAX, |gate| gate.allowance().saturating_sub(held));
                    let share = places_left.min(room).div_ceil(sharing);
                    (allowed.min(share), Some(*places))
                }
                _ => continue,
            };
            if most == 0 {
                continue;
            }
            match gating.of(&task) {
                Some(Gated::Limited(_)) => {}
                gated => {
                    // Where all keys were at their limit, lower tiers do not wait for the next answer.
                    is_coming |= gated.is_none() || !self.parked.was_empty;
                    rows += most;
                    room -= most;
                    if places.is_some() {
                        places_left -= most;
                    }
                }
            }
            if let Some(lanes) = self.parked.lanes.get_mut(&task) {
                lanes.expects_more = false;
            }
            claims.push(LaneClaim {
                most,
                places,
                ttl: self.ttl_of(&task),
                task,
            });
        }
        if claims.is_empty() {
            return None;
        }
        self.parked.is_turn_of_lanes = false;
        self.parked.lane_claims = self.parked.lane_claims.wrapping_add(1);
        self.parked.is_claiming = true;
        self.parked.is_coming = is_coming;
        self.parked.claiming += rows;
        self.claiming_bytes += bytes;
        Some(Statement::ClaimParked(ParkedClaim {
            worker,
            generation: self.generation,
            claims,
            rows,
            are_suspects: false,
            bytes,
        }))
    }

    /// The tasks whose lanes may have a row, in the order in which they are asked for: by rank, and within a rank another task
    /// comes first each time.
    fn tasks_in_turn(&self) -> Vec<(Option<i16>, String)> {
        let lanes = self.parked.lanes.iter();
        let lanes = lanes.filter(|(_, lanes)| lanes.expects_more);
        let mut tasks: Vec<_> = lanes
            .map(|(task, lanes)| (lanes.rank, task.clone()))
            .collect();
        tasks.sort_unstable();
        for of_rank in tasks.chunk_by_mut(|(one, _), (other, _)| one == other) {
            of_rank.rotate_left(self.parked.lane_claims % of_rank.len());
        }
        tasks
    }

    /// A claim of one suspect from a lane, if one may wait there.
    pub(super) fn claim_parked_suspect(&mut self, worker: i64) -> Option<Statement> {
        let gating = self.parked.gating.clone();
        let mut lanes = self.parked.lanes.iter_mut();
        let is_paused = |task: &str| matches!(gating.of(task), Some(Gated::Paused { .. }));
        let (task, lanes) = lanes.find(|(task, lanes)| lanes.has_suspects && !is_paused(task))?;
        lanes.has_suspects = false;
        let places = match gating.of(task) {
            Some(Gated::PerKey { places, .. }) => Some(*places),
            _ => None,
        };
        let claim = LaneClaim {
            task: task.clone(),
            most: 1,
            places,
            ttl: None,
        };
        self.claiming_bytes += CLAIMED_BYTES;
        Some(Statement::ClaimParked(ParkedClaim {
            worker,
            generation: self.generation,
            claims: vec![claim],
            rows: 0,
            are_suspects: true,
            bytes: CLAIMED_BYTES,
        }))
    }

    pub(super) fn claimed_parked(
        &mut self,
        claim: ParkedClaim,
        claimed: Result<ClaimedFromLanes, Error>,
    ) -> Result<(), Error> {
        self.claiming_bytes -= claim.bytes;
        self.hold_until = None;
        if !claim.are_suspects {
            self.parked.claiming -= claim.rows;
            self.parked.is_claiming = false;
            self.parked.is_coming = false;
        }
        let permit = match std::mem::replace(&mut self.quarantine, Quarantine::Empty) {
            Quarantine::Claiming(permit) if claim.are_suspects => Some(permit),
            other => {
                self.quarantine = other;
                None
            }
        };
        let ClaimedFromLanes { rows, passed_over } = match claimed {
            Ok(claimed) => claimed,
            Err(error) => {
                self.claim_failed(&error);
                for claim in &claim.claims {
                    self.lanes_expect_more(&claim.task);
                }
                return Err(error);
            }
        };
        if claim.are_suspects && rows.is_empty() {
            // Its key is at the limit, or another process has it. Others may wait: in the lanes of another task, or ready.
            drop(permit);
            self.expect_suspect();
            return Ok(());
        }
        let bytes: usize = rows.iter().map(|(row, _)| row.size()).sum();
        for of_task in &claim.claims {
            let is_of_task =
                |row: &&(ClaimedRow, i64)| of_task.task.is_empty() || row.0.task() == of_task.task;
            let of_lanes = || rows.iter().filter(is_of_task);
            let is_all = of_lanes().count() < of_task.most && bytes < claim.bytes;
            if claim.are_suspects {
                continue;
            }
            if of_task.places.is_some() {
                self.parked.was_empty = of_lanes().count() == 0;
            }
            if !is_all || passed_over.contains(&of_task.task) {
                let last = of_lanes().max_by_key(|(_, number)| *number);
                let rank = last.map(|(row, _)| row.rank);
                let known = self.lanes_expect_more(&of_task.task);
                known.rank = rank.or(known.rank);
            } else if let Some(Gated::Limited(_)) = self.parked.gating.of(&of_task.task) {
                self.lane_is_empty(&of_task.task);
            }
        }
        let is_lost = claim.generation != self.generation;
        let counted = |task: &str| {
            let of_task = claim.claims.iter().find(|claim| claim.task == task);
            of_task.is_some_and(|claim| claim.places.is_some())
        };
        let is_fair = claim.claims.iter().any(|claim| claim.task.is_empty());
        let now = SystemTime::now();
        let mut rows = rows;
        rows.sort_by_key(|(_, number)| *number);
        let rows = rows.into_iter().map(|(row, number)| AcceptedRow {
            origin: RowOrigin::Lane {
                is_counted: counted(row.task()),
            },
            // The keys take turns.
            turn: match is_fair {
                true => now.checked_add(Duration::from_micros(number.unsigned_abs())),
                false => None,
            },
            row,
        });
        self.accept_all(rows.collect(), permit, is_lost);
        Ok(())
    }

    /// No row waits in the lane without a key.
    fn lane_is_empty(&mut self, task: &str) {
        let Some(known) = self.parked.lanes.get_mut(task) else {
            return;
        };
        known.has_keyless = false;
        if !known.has_suspects && !known.has_keyed {
            self.forget_lanes(task);
        }
    }

    pub(super) fn unparked(
        &mut self,
        task: &str,
        keys: LaneKeys,
        unparked: Result<Unparked, Error>,
    ) -> Option<Error> {
        self.parked.is_unparking = false;
        let unparked = match unparked {
            Ok(unparked) => unparked,
            Err(error) => return self.lanes_failed(task, error),
        };
        match (unparked.has_more, keys) {
            (true, LaneKeys::All) => drop(self.lanes_expect_more(task)),
            (true, LaneKeys::Some) => self.lanes_expect_more(task).has_keyed = true,
            (true, LaneKeys::None) => self.lanes_expect_more(task).has_keyless = true,
            // A look finds those that are left alone for now.
            (false, LaneKeys::All) => self.forget_lanes(task),
            (false, _) => {}
        }
        if !unparked.starts.is_empty() {
            self.found_older(&unparked.starts);
        }
        None
    }

    /// Rows were moved from `ready` to these lanes.
    pub(super) fn swept(&mut self, swept: Result<Vec<Lane>, Error>) -> Option<Error> {
        self.parked.is_sweeping = false;
        match swept {
            Ok(lanes) => {
                // There may be more.
                self.parked.must_sweep |= !lanes.is_empty();
                self.parked.claim_first = true;
                if self.parked.gating.is_fair() {
                    // It is claimed from its lanes alone.
                    (self.first_answer_by, self.hold_until) = (None, None);
                }
                self.know_lanes(lanes.iter());
                None
            }
            Err(error) => {
                self.parked.must_sweep = true;
                Some(error)
            }
        }
    }

    pub(super) fn parked(
        &mut self,
        rows: Vec<RowToPark>,
        parked: Result<Vec<Lane>, Error>,
    ) -> Option<Error> {
        match parked {
            Ok(lanes) => {
                self.know_lanes(lanes.iter());
                for (handle, ..) in rows {
                    self.remove(handle);
                }
                None
            }
            Err(error) => {
                self.parked.to_park.extend(rows);
                Some(error)
            }
        }
    }
}
