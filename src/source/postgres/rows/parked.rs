//! Rows that may not run now: they are moved to their lanes, claimed from there when they may run, and made ready again when
//! nothing holds them back any more.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::watch;
use tokio::time::Instant;

use super::super::RowSettings;
use super::claims::CLAIMED_BYTES;
use super::{Quarantine, Rows, State};
use crate::Error;
use crate::backlog::{Lane, LaneClaim, OpenLanes, ParkedRow, RunKey, Sweep, Unparked};
use crate::control::{Gated, Gates, Gating, Snapshot};
use crate::message::Received;
use crate::source::Handle;
use crate::source::postgres::statements::{ParkedClaim, Statement};

/// How long a lane is known that no look has seen: the look may have begun before the lane did.
const KNOWN_FOR: Duration = Duration::from_secs(2);
/// How many rows one statement moves to their lanes.
const PARKED_AT_ONCE: usize = 500;

/// What a source knows of the rows of its tier that may not run now.
pub(super) struct Parked {
    pub(super) gating: Arc<Gating>,
    controls: watch::Receiver<Arc<Snapshot>>,
    limits: watch::Receiver<Arc<Gates>>,
    /// The lanes in which rows wait, by their task; empty: of all tasks of the tier.
    lanes: HashMap<String, KnownLane>,
    /// Rows of this process that are to be moved to their lanes.
    to_park: Vec<(Handle, RunKey, Lane)>,
    /// Whether ready rows may be there that have to be moved to their lanes.
    must_sweep: bool,
    is_sweeping: bool,
    is_unparking: bool,
    is_claiming: bool,
    /// How many slots the group has.
    slots: usize,
}

struct KnownLane {
    /// Whether a claim may find a row that may run.
    expects_more: bool,
    has_suspects: bool,
    seen_at: Instant,
}

impl RowSettings {
    /// What is known at first of rows of a tier that may not run now.
    pub(super) fn parked(&self, tier: &str, slots: usize) -> Parked {
        let mut controls = self.consumer.controls.changes();
        let snapshot = controls.borrow_and_update().clone();
        let gating = Arc::new(self.gating(tier, &snapshot));
        Parked {
            must_sweep: !gating.is_empty(),
            limits: self.consumer.limits.changes(),
            gating,
            controls,
            lanes: HashMap::new(),
            to_park: Vec::new(),
            is_sweeping: false,
            is_unparking: false,
            is_claiming: false,
            slots,
        }
    }
}

impl Parked {
    /// Whether ready rows that may not run now are being moved away: claims would take them first.
    pub(super) fn is_sweeping(&self) -> bool {
        self.is_sweeping || self.must_sweep
    }
}

impl Rows {
    /// Follows what operators change.
    pub(super) fn follow_controls(&mut self) {
        let has_changed = matches!(self.parked.controls.has_changed(), Ok(true));
        if !matches!(self.parked.limits.has_changed(), Ok(true)) && !has_changed {
            return;
        }
        self.parked.limits.mark_unchanged();
        let snapshot = self.parked.controls.borrow_and_update().clone();
        self.parked.gating = Arc::new(self.settings.gating(&self.name, &snapshot));
        self.parked.must_sweep = !self.parked.gating.is_empty();
        for lane in self.parked.lanes.values_mut() {
            lane.expects_more = true;
        }
        // What was prefetched may have to wait now, or may run.
        for handle in self.prefetched.drain() {
            self.admit(handle, Admission::Again);
        }
    }

    /// Lets a row wait for a slot here, or moves it to its lane.
    pub(super) fn admit(&mut self, handle: Handle, admission: Admission) {
        let Some(unsettled) = self.unsettled.get(&handle) else {
            return;
        };
        let (place, received) = (unsettled.place, unsettled.received.clone());
        if self.settings.is_relay || self.parked.gating.is_empty() {
            self.prefetched.insert(place, handle);
            return;
        }
        let is_from_lane = unsettled.is_from_lane || admission == Admission::FromLane;
        let task = received.task();
        match self.parked.gating.of(task) {
            Some(Gated::Paused) => self.park(handle, &received),
            Some(Gated::Limited(gate)) => {
                let has_room = self.prefetched.limited(task) < gate.allowance();
                match is_from_lane || (has_room && !self.parked.lanes.contains_key(task)) {
                    true => self
                        .prefetched
                        .insert_limited(task, &gate.clone(), place, handle),
                    false => self.park(handle, &received),
                }
            }
            Some(Gated::PerKey { gate, .. }) => match (is_from_lane, gate) {
                (true, Some(gate)) => {
                    self.prefetched
                        .insert_limited(task, &gate.clone(), place, handle);
                }
                (true, None) => self.prefetched.insert(place, handle),
                (false, _) => self.park(handle, &received),
            },
            None if self.parked.gating.is_fair() && !is_from_lane => self.park(handle, &received),
            None => self.prefetched.insert(place, handle),
        }
    }

    /// Whether a row that has waited for too long may wait on: nothing that is paused is a dead letter.
    pub(super) fn is_paused_task(&self, received: &Received) -> bool {
        matches!(self.parked.gating.of(received.task()), Some(Gated::Paused))
    }

    fn park(&mut self, handle: Handle, received: &Received) {
        let Some(unsettled) = self.unsettled.get_mut(&handle) else {
            return;
        };
        let lane = lane(&self.parked.gating, received);
        if unsettled.state == State::Prefetched {
            self.prefetched_bytes -= unsettled.bytes;
        }
        unsettled.state = State::Settling;
        self.parked.to_park.push((handle, unsettled.run, lane));
        self.parked.must_sweep = true;
    }

    /// The next statement about rows that may not run now, if any is worth it.
    pub(super) fn next_parked(&mut self, now: Instant) -> Option<Statement> {
        if !self.parked.to_park.is_empty() {
            let some = self.parked.to_park.len().min(PARKED_AT_ONCE);
            return Some(Statement::Park(self.parked.to_park.drain(..some).collect()));
        }
        if self.settings.is_relay || self.worker.is_none() || self.drain_by.is_some() {
            return None;
        }
        if self.parked.must_sweep && !self.parked.is_sweeping {
            self.parked.must_sweep = false;
            self.parked.is_sweeping = true;
            let gating = self.parked.gating.clone();
            let tasks = gating.tasks().map(str::to_owned).collect();
            let sweep = Sweep {
                ranks: self.starts.clone(),
                tasks: (!gating.is_fair()).then_some(tasks),
            };
            return Some(Statement::Sweep(sweep, gating));
        }
        if let Some(unpark) = self.next_unpark() {
            return Some(unpark);
        }
        if self.is_paused || self.must_not_claim(now) {
            return None;
        }
        self.next_parked_claim()
    }

    fn next_unpark(&mut self) -> Option<Statement> {
        let gating = &self.parked.gating;
        if self.parked.is_unparking {
            return None;
        }
        let is_free = |task: &str| match task {
            "" => !gating.is_fair(),
            task => gating.of(task).is_none(),
        };
        let mut lanes = self.parked.lanes.iter_mut();
        let (task, lane) = lanes.find(|(task, lane)| lane.expects_more && is_free(task))?;
        lane.expects_more = false;
        self.parked.is_unparking = true;
        Some(Statement::Unpark(task.clone()))
    }

    fn next_parked_claim(&mut self) -> Option<Statement> {
        let worker = self.worker?;
        if self.parked.is_claiming {
            return None;
        }
        let mut room = self
            .window
            .saturating_sub(self.unsettled.len() + self.claiming);
        let mut claims = Vec::new();
        let gating = self.parked.gating.clone();
        let waiting = self.prefetched.count();
        let mut lanes = std::mem::take(&mut self.parked.lanes);
        for (task, lane) in &mut lanes {
            if !lane.expects_more || room == 0 {
                continue;
            }
            let (most, places) = match gating.of(task) {
                Some(Gated::Paused) => continue,
                Some(Gated::Limited(gate)) => {
                    let held = self.prefetched.limited(task);
                    (gate.allowance().saturating_sub(held), None)
                }
                Some(Gated::PerKey { places, gate, .. }) => {
                    // A row that waits for a slot keeps others of its key waiting, perhaps in another process.
                    let most = self.parked.slots.saturating_sub(waiting);
                    let allowed = gate.as_ref().map_or(usize::MAX, |gate| {
                        gate.allowance()
                            .saturating_sub(self.prefetched.limited(task))
                    });
                    (most.min(allowed), Some(*places))
                }
                None if task.is_empty() && gating.is_fair() => (room, None),
                None => continue,
            };
            let most = most.min(room);
            if most == 0 {
                continue;
            }
            room -= most;
            lane.expects_more = false;
            claims.push(LaneClaim {
                task: task.clone(),
                most,
                places,
                ttl: self.ttl_of(task),
            });
        }
        self.parked.lanes = lanes;
        if claims.is_empty() {
            return None;
        }
        let rows = claims.iter().map(|claim| claim.most).sum();
        Some(self.claim_from_lanes(worker, claims, rows, false))
    }

    /// A claim of one suspect from a lane, if one may wait there.
    pub(super) fn claim_parked_suspect(&mut self, worker: i64) -> Option<Statement> {
        let gating = self.parked.gating.clone();
        let mut lanes = self.parked.lanes.iter_mut();
        let (task, lane) = lanes.find(|(task, lane)| {
            lane.has_suspects && !matches!(gating.of(task), Some(Gated::Paused))
        })?;
        lane.has_suspects = false;
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
        Some(self.claim_from_lanes(worker, vec![claim], 1, true))
    }

    fn claim_from_lanes(
        &mut self,
        worker: i64,
        claims: Vec<LaneClaim>,
        rows: usize,
        are_suspects: bool,
    ) -> Statement {
        self.claiming += rows;
        self.claiming_bytes += CLAIMED_BYTES;
        self.parked.is_claiming |= !are_suspects;
        Statement::ClaimParked(ParkedClaim {
            worker,
            generation: self.generation,
            claims,
            rows,
            are_suspects,
            bytes: CLAIMED_BYTES,
        })
    }

    pub(super) fn claimed_parked(
        &mut self,
        claim: ParkedClaim,
        claimed: Result<Vec<ParkedRow>, Error>,
    ) -> Result<(), Error> {
        self.claiming -= claim.rows;
        self.claiming_bytes -= claim.bytes;
        if !claim.are_suspects {
            self.parked.is_claiming = false;
        }
        let permit = match std::mem::replace(&mut self.quarantine, Quarantine::Empty) {
            Quarantine::Claiming(permit) if claim.are_suspects => Some(permit),
            other => {
                self.quarantine = other;
                None
            }
        };
        let rows = match claimed {
            Ok(rows) => rows,
            Err(error) => {
                self.claim_failed(&error);
                for claim in &claim.claims {
                    self.lanes_expect_more(&claim.task);
                }
                return Err(error);
            }
        };
        let are_suspects = claim.are_suspects;
        for claim in &claim.claims {
            let of_task = |row: &&ParkedRow| claim.task.is_empty() || row.row.task() == claim.task;
            let is_all = rows.iter().filter(of_task).count() < claim.most;
            match (is_all, self.parked.gating.of(&claim.task)) {
                (false, _) => self.lanes_expect_more(&claim.task),
                // Without keys there is one lane, and it is empty.
                (true, Some(Gated::Limited(_))) if !are_suspects => self.forget_lanes(&claim.task),
                (true, _) => {}
            }
        }
        let is_lost = claim.generation != self.generation;
        let is_fair = claim.claims.iter().any(|claim| claim.task.is_empty());
        let now = SystemTime::now();
        let mut rows = rows;
        rows.sort_by_key(|row| row.number);
        let rows = rows.into_iter().map(|parked| {
            let place = match is_fair {
                // The keys take turns.
                true => now.checked_add(Duration::from_micros(parked.number.unsigned_abs())),
                false => None,
            };
            (parked.row, place)
        });
        self.accept_all(rows.collect(), permit, is_lost, true);
        Ok(())
    }

    pub(super) fn unparked(
        &mut self,
        task: &str,
        unparked: Result<Unparked, Error>,
    ) -> Option<Error> {
        self.parked.is_unparking = false;
        match unparked {
            Ok(unparked) => {
                match unparked.has_more {
                    true => self.lanes_expect_more(task),
                    false => self.forget_lanes(task),
                }
                if !unparked.starts.is_empty() {
                    self.found_older(&unparked.starts);
                }
                None
            }
            Err(error) => {
                self.lanes_expect_more(task);
                Some(error)
            }
        }
    }

    /// Rows were moved from `ready` to these lanes.
    pub(super) fn swept(&mut self, swept: Result<Vec<Lane>, Error>) -> Option<Error> {
        self.parked.is_sweeping = false;
        match swept {
            Ok(lanes) => {
                // There may be more.
                self.parked.must_sweep |= !lanes.is_empty();
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
        parked: Vec<(Handle, RunKey, Lane)>,
        result: Result<(), Error>,
    ) -> Option<Error> {
        match result {
            Ok(()) => {
                self.know_lanes(parked.iter().map(|(_, _, lane)| lane));
                for (handle, _, _) in parked {
                    self.remove(handle);
                }
                None
            }
            Err(error) => {
                self.parked.to_park.extend(parked);
                Some(error)
            }
        }
    }

    fn know_lanes<'l>(&mut self, lanes: impl Iterator<Item = &'l Lane>) {
        for lane in lanes {
            self.lanes_expect_more(&lane.task);
        }
    }

    fn lanes_expect_more(&mut self, task: &str) {
        let now = Instant::now();
        match self.parked.lanes.get_mut(task) {
            Some(lane) => {
                lane.expects_more = true;
                lane.seen_at = now;
            }
            None => {
                let lane = KnownLane {
                    expects_more: true,
                    has_suspects: false,
                    seen_at: now,
                };
                self.parked.lanes.insert(task.to_owned(), lane);
                self.settings.consumer.parked_tasks.insert(&self.name, task);
            }
        }
    }

    fn forget_lanes(&mut self, task: &str) {
        if self
            .parked
            .lanes
            .get(task)
            .is_some_and(|lane| !lane.has_suspects)
        {
            self.parked.lanes.remove(task);
            self.settings.consumer.parked_tasks.remove(&self.name, task);
        }
    }

    /// A look has found these lanes.
    pub(super) fn found_lanes(&mut self, found: Vec<OpenLanes>) {
        let now = Instant::now();
        let has_suspects = found.iter().any(|lanes| lanes.has_suspects);
        for lanes in &found {
            let is_new = !self.parked.lanes.contains_key(&lanes.task);
            if lanes.has_tasks || is_new {
                self.lanes_expect_more(&lanes.task);
            }
            if let Some(known) = self.parked.lanes.get_mut(&lanes.task) {
                known.has_suspects = lanes.has_suspects;
                known.seen_at = now;
            }
        }
        let (name, parked_tasks) = (&self.name, &self.settings.consumer.parked_tasks);
        self.parked.lanes.retain(|task, lane| {
            let is_known = lane.seen_at + KNOWN_FOR > now;
            if !is_known {
                parked_tasks.remove(name, task);
            }
            is_known
        });
        if has_suspects {
            self.expect_suspect();
        }
    }

    /// Runs have ended: others of their keys may run.
    pub(super) fn places_are_free(&mut self) {
        for (task, lane) in &mut self.parked.lanes {
            if let Some(Gated::PerKey { .. }) = self.parked.gating.of(task) {
                lane.expects_more = true;
            }
        }
    }

    /// How long rows may wait, those that are ready or of the lanes of a task: as much longer as they were paused.
    pub(super) fn ttl_of(&self, task: &str) -> Option<Duration> {
        let ttl = self.ttl?;
        if task.is_empty() {
            return Some(self.settings.waiting_time(&self.name, ttl).unwrap_or(ttl));
        }
        let controls = self.parked.controls.borrow();
        let now = SystemTime::now();
        let paused = controls.time_paused(&self.group, &self.name, |it| it == task, ttl, now);
        Some(ttl.saturating_add(paused))
    }
}

/// Where a row comes from that may wait here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Admission {
    /// The ready rows.
    Ready,
    FromLane,
    /// It waited here before.
    Again,
}

/// The lane of a task that may not run as it comes.
pub(in crate::source::postgres) fn lane(gating: &Gating, received: &Received) -> Lane {
    let task = received.task();
    let given = received
        .message()
        .ok()
        .and_then(|it| it.limit_key.as_deref());
    Lane {
        key: gating.key(task, given, received.payload()),
        task: gating.lane_task(task).unwrap_or(task).to_owned(),
    }
}
