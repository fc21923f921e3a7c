//! Rows that may not run now: which they are, and what is known of their lanes. `lanes` has the statements about them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::watch;
use tokio::time::Instant;

use super::super::RowSettings;
use super::{Rows, State};
use crate::Error;
use crate::backlog::{Lane, OpenLanes, RunKey};
use crate::control::{Gated, Gates, Gating, Outlook, Snapshot};
use crate::message::Received;
use crate::source::Handle;

/// How long lanes are known that no look has seen: the look may have begun before the lane did.
const KNOWN_FOR: Duration = Duration::from_secs(2);
/// How long a task counts as parked, although no look has seen its lane: the statement that parks it may take a while.
const PARKED_FOR: Duration = Duration::from_secs(10);

/// What a source knows of the rows of its tier that may not run now.
pub(super) struct Parked {
    pub(super) gating: Arc<Gating>,
    controls: watch::Receiver<Arc<Snapshot>>,
    limits: watch::Receiver<Arc<Gates>>,
    /// When `gating` has changed.
    pub(super) changed_at: Instant,
    /// The lanes in which rows wait, by their task; empty: of all tasks of the tier.
    pub(super) lanes: HashMap<String, KnownLanes>,
    /// Rows of this process that are to be moved to their lanes.
    pub(super) to_park: Vec<RowToPark>,
    /// Whether ready rows may be there that have to be moved to their lanes.
    pub(super) must_sweep: bool,
    pub(super) is_sweeping: bool,
    /// Whether a claim of ready rows comes before the next sweep: others are behind those that are moved.
    pub(super) claim_first: bool,
    pub(super) is_unparking: bool,
    pub(super) is_claiming: bool,
    /// How many rows the claim under way asks for that take a place of the window, and whether they can start at once.
    pub(super) claiming: usize,
    pub(super) is_coming: bool,
    /// Whether the last claim by keys has found nothing.
    pub(super) was_empty: bool,
    /// Whether lanes have the next turn, while they and the ready rows have rows of one rank.
    pub(super) is_turn_of_lanes: bool,
    /// How many claims from lanes were made.
    pub(super) lane_claims: usize,
    /// How many slots the group has.
    pub(super) slots: usize,
}

/// A row that this process has claimed, and that is to wait in its lane.
pub(crate) type RowToPark = (Handle, RunKey, Arc<Received>);

/// The lanes of a task.
pub(super) struct KnownLanes {
    /// The rank of the first row, as far as is known.
    pub(super) rank: Option<i16>,
    /// Whether a claim may find a row that may run.
    pub(super) expects_more: bool,
    pub(super) has_suspects: bool,
    /// Whether rows wait in a lane without a key, and in lanes with one.
    pub(super) has_keyless: bool,
    pub(super) has_keyed: bool,
    seen_at: Instant,
}

/// Where a row comes from that may wait here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RowOrigin {
    Ready,
    /// `is_counted`: it counts for its key.
    Lane {
        is_counted: bool,
    },
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
            changed_at: Instant::now(),
            lanes: HashMap::new(),
            to_park: Vec::new(),
            is_sweeping: false,
            claim_first: false,
            is_unparking: false,
            is_claiming: false,
            claiming: 0,
            is_coming: false,
            was_empty: false,
            is_turn_of_lanes: true,
            lane_claims: 0,
            slots,
        }
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
        self.parked.changed_at = Instant::now();
        self.parked.must_sweep = !self.parked.gating.is_empty();
        for lanes in self.parked.lanes.values_mut() {
            lanes.expects_more = true;
        }
        // What was prefetched may have to wait now, or may run.
        for handle in self.prefetched.drain() {
            self.admit(handle);
        }
    }

    /// Lets a row wait for a slot here, or moves it to its lane.
    pub(super) fn admit(&mut self, handle: Handle) {
        let Some(unsettled) = self.unsettled.get(&handle) else {
            return;
        };
        let (place, received, origin) = (
            unsettled.place,
            unsettled.received.clone(),
            unsettled.origin,
        );
        let gating = &self.parked.gating;
        if self.settings.is_relay || gating.is_empty() {
            self.prefetched.insert(place, handle);
            return;
        }
        let task = received.task();
        let is_from_lane = origin != RowOrigin::Ready;
        let gate = match gating.of(task) {
            Some(Gated::Paused { .. }) => return self.park(handle, received),
            Some(Gated::Limited(gate)) => {
                let waiting = self.prefetched.limited(task);
                let may_wait = || match gate.outlook(waiting, self.window) {
                    Outlook::Undecided => waiting < self.window,
                    Outlook::FarFromLimit => true,
                    Outlook::NearLimit { .. } => {
                        waiting < gate.allowance() && !self.parked.lanes.contains_key(task)
                    }
                };
                if !is_from_lane && !may_wait() {
                    return self.park(handle, received);
                }
                Some(gate.clone())
            }
            Some(Gated::PerKey { gate, .. }) => {
                if origin != (RowOrigin::Lane { is_counted: true }) {
                    return self.park(handle, received);
                }
                gate.clone()
            }
            None if gating.is_fair() && !is_from_lane => return self.park(handle, received),
            None => None,
        };
        match gate {
            Some(gate) => self.prefetched.insert_limited(task, &gate, place, handle),
            None => self.prefetched.insert(place, handle),
        }
    }

    /// Whether a row that has waited for too long may wait on: nothing that is paused is a dead letter.
    pub(super) fn is_paused_task(&self, received: &Received) -> bool {
        let gated = self.parked.gating.of(received.task());
        matches!(gated, Some(Gated::Paused { .. }))
    }

    fn park(&mut self, handle: Handle, received: Arc<Received>) {
        let Some(unsettled) = self.unsettled.get_mut(&handle) else {
            return;
        };
        if unsettled.state == State::Prefetched {
            self.prefetched_bytes -= unsettled.bytes;
        }
        unsettled.state = State::Settling;
        self.parked.to_park.push((handle, unsettled.run, received));
        self.parked.must_sweep = true;
    }

    /// Rows were moved to these lanes.
    pub(super) fn know_lanes<'l>(&mut self, lanes: impl Iterator<Item = &'l Lane>) {
        for lane in lanes {
            let known = self.lanes_expect_more(&lane.task);
            match lane.key.is_empty() {
                true => known.has_keyless = true,
                false => known.has_keyed = true,
            }
        }
    }

    pub(super) fn lanes_expect_more(&mut self, task: &str) -> &mut KnownLanes {
        let now = Instant::now();
        if !self.parked.lanes.contains_key(task) {
            self.settings.consumer.parked_tasks.insert(&self.name, task);
        }
        let known = self
            .parked
            .lanes
            .entry(task.to_owned())
            .or_insert(KnownLanes {
                rank: None,
                expects_more: true,
                has_suspects: false,
                has_keyless: false,
                has_keyed: false,
                seen_at: now,
            });
        known.expects_more = true;
        known.seen_at = now;
        known
    }

    /// No row waits in the lanes of a task any more, as far as is known.
    pub(super) fn forget_lanes(&mut self, task: &str) {
        self.parked.lanes.remove(task);
        self.settings.consumer.parked_tasks.remove(&self.name, task);
    }

    /// This process has parked messages of the tier's queue, and the tier was woken since.
    pub(super) fn learn_of_parked_messages(&mut self) {
        let parked = self.settings.consumer.parked_tasks.of_tier(&self.name);
        for (task, at) in parked {
            if at.elapsed() >= PARKED_FOR {
                continue;
            }
            let gating = self.parked.gating.clone();
            let known = self.lanes_expect_more(gating.lane_task(&task));
            match gating.of(&task) {
                Some(Gated::Limited(_)) => known.has_keyless = true,
                Some(Gated::PerKey { .. }) => known.has_keyed = true,
                _ => {}
            }
        }
    }

    /// A look has found these lanes.
    pub(super) fn found_lanes(&mut self, found: Vec<OpenLanes>) {
        let now = Instant::now();
        let has_suspects = found.iter().any(|lanes| lanes.has_suspects);
        for lanes in &found {
            let known = self.lanes_expect_more(&lanes.task);
            known.rank = lanes.rank;
            known.has_suspects = lanes.has_suspects;
            known.has_keyless = lanes.has_keyless;
            known.has_keyed = lanes.has_keyed;
        }
        let (name, parked_tasks) = (&self.name, &self.settings.consumer.parked_tasks);
        self.parked.lanes.retain(|task, lanes| {
            let is_known = lanes.seen_at + KNOWN_FOR > now;
            if !is_known {
                parked_tasks.remove(name, task);
            }
            is_known
        });
        for (task, at) in parked_tasks.of_tier(name) {
            if at.elapsed() >= PARKED_FOR && !self.parked.lanes.contains_key(&task) {
                parked_tasks.remove(name, &task);
            }
        }
        if has_suspects {
            self.expect_suspect();
        }
    }

    /// Runs have ended: others of their keys may run.
    pub(super) fn places_are_free(&mut self) {
        for (task, lanes) in &mut self.parked.lanes {
            if let Some(Gated::PerKey { .. }) = self.parked.gating.of(task) {
                lanes.expects_more = true;
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

    /// The tasks whose ready rows are to be moved to their lanes, wherever they are among the others. Empty: all.
    pub(super) fn tasks_to_sweep(&self) -> Vec<String> {
        let gating = &self.parked.gating;
        let is_swept = |task: &&str| match gating.of(task) {
            // Below its limit it may be claimed as it comes.
            Some(Gated::Limited(_)) => self.parked.lanes.contains_key(*task),
            gated => gated.is_some(),
        };
        let tasks = gating.tasks().filter(is_swept);
        tasks.map(str::to_owned).collect()
    }

    /// A statement about lanes has failed.
    pub(super) fn lanes_failed(&mut self, task: &str, error: Error) -> Option<Error> {
        self.lanes_expect_more(task);
        Some(error)
    }
}
