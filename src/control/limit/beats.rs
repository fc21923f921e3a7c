//! Which of the other processes that hold a share are dead. Pure: the time is given.
//!
//! A process is dead when its beat has not changed for 30 s by the monotonic clock of the process that reads it. A process that
//! could not read the beats forgets them, so after the database was away nobody is taken for dead.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use super::share::{Pool, ShareId};

/// A process of which nothing was heard for so long is dead: longer than what it thinks that its places hold (`local`).
const DEAD_AFTER: Duration = Duration::from_secs(30);
/// After a longer time between two reads, the beats are forgotten.
const LONGEST_GAP: Duration = Duration::from_secs(10);

/// The beats of the other processes of one limit.
#[derive(Debug, Default)]
pub(super) struct Liveness {
    read_at: Option<Instant>,
    /// The last beat of each, and since when it has been the same.
    beats: HashMap<ShareId, (u64, Instant)>,
}

impl Liveness {
    /// Returns those that are dead, with their last beats.
    pub(super) fn dead(&mut self, pool: Option<&Pool>, now: Instant) -> Vec<(ShareId, u64)> {
        let is_late = |read_at| now.saturating_duration_since(read_at) > LONGEST_GAP;
        if self.read_at.is_none_or(is_late) {
            self.beats.clear();
        }
        self.read_at = Some(now);
        let holders = pool.map_or(&[][..], |pool| &pool.holders);
        let is_there = |id: &ShareId| holders.iter().any(|holder| holder.id == *id);
        self.beats.retain(|id, _| is_there(id));
        let mut dead = Vec::new();
        for holder in holders {
            let known = self.beats.entry(holder.id).or_insert((holder.beat, now));
            if known.0 != holder.beat {
                *known = (holder.beat, now);
            }
            if now.saturating_duration_since(known.1) >= DEAD_AFTER {
                dead.push((holder.id, holder.beat));
            }
        }
        dead
    }

    /// Forgets the beats at the next read.
    pub(super) fn forget(&mut self) {
        self.read_at = None;
    }
}
