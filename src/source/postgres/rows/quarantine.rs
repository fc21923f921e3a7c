//! Takes suspects from the quarantine of a tier, one at a time.

use std::task::{Context, Poll};

use super::claims::CLAIMED_BYTES;
use super::{Quarantine, Rows, SUSPECT_PATIENCE, State};
use crate::backlog::{Batch, QUARANTINE_RANK, RankStart};
use crate::source::postgres::statements::{Claim, Statement};

/// The number of a claim that takes a suspect. Others are counted from 1 on.
pub(super) const SUSPECT_CLAIM: u64 = 0;

impl Rows {
    /// A claim of one suspect.
    pub(super) fn claim_suspect(&mut self, worker: i64) -> Statement {
        self.claiming += 1;
        self.claiming_bytes += CLAIMED_BYTES;
        let ranks = (0..=i16::from(u8::MAX)).rev().map(|priority| RankStart {
            rank: QUARANTINE_RANK - priority,
            since: None,
        });
        Statement::Claim(Claim {
            worker,
            ttl: None,
            number: SUSPECT_CLAIM,
            generation: self.generation,
            batch: Batch {
                done: Vec::new(),
                begun: Vec::new(),
                rows: 1,
                bytes: CLAIMED_BYTES,
                ranks: ranks.collect(),
            },
        })
    }

    /// A suspect waits: takes it when this process runs no other one.
    pub(super) fn expect_suspect(&mut self) {
        // The right to take a suspect is that of the whole process.
        if !self.is_paused
            && let Quarantine::Empty = self.quarantine
        {
            let suspects = self.settings.consumer.suspects.clone();
            let waiting = async move { suspects.quarantine().await };
            self.quarantine = Quarantine::Waiting(Box::pin(waiting));
        }
    }

    pub(super) fn poll_quarantine(&mut self, cx: &mut Context<'_>) {
        if let Quarantine::Waiting(waiting) = &mut self.quarantine
            && let Poll::Ready(permit) = waiting.as_mut().poll(cx)
        {
            self.quarantine = match permit {
                Some(permit) => Quarantine::Permitted(permit),
                None => Quarantine::Empty,
            };
        }
        // A suspect that gets no slot keeps those of other tiers waiting.
        if let Quarantine::Held(handle, since) = self.quarantine
            && since.elapsed() >= SUSPECT_PATIENCE
            && let Some(unsettled) = self.unsettled.get(&handle)
            && unsettled.state == State::Prefetched
        {
            self.prefetched.remove(&unsettled.place);
            self.put_back(handle);
        }
    }
}
