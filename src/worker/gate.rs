//! Lets a task that may kill its process run alone in it.
//!
//! Whoever is in the hands of a process that dies is redelivered like the task that killed it, and
//! nothing tells them apart. So a task whose worker died twice runs alone, with no other suspect in
//! hand: if that worker dies too, it was the task.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

/// From this crash count on a task runs alone.
pub(super) const ALONE_FROM: u32 = 2;

/// How long the groups have to empty their hands. The process stands still meanwhile, and while the
/// broker takes no messages a suspect cannot be sent around.
const LONGEST_EMPTYING: Duration = Duration::from_secs(10);

/// Counts what runs in the process, in all its groups.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    state: Mutex<State>,
    closure: watch::Sender<Option<Closure>>,
}

/// Which time it is that the gate is closed: somebody runs alone, or waits for it.
pub(super) type Closure = u64;

#[derive(Debug, Default)]
struct State {
    running: usize,
    /// Those of `running` whose worker died once: perhaps by them.
    doubtful: usize,
    is_closed: bool,
    closures: Closure,
    /// The groups that have deliveries, and since which closure each of them has no suspect in hand.
    members: HashMap<u64, Closure>,
    next_member: u64,
    /// Who waits to run alone.
    claimant: Option<Waker>,
}

/// The right to run, given back when it is dropped.
#[derive(Debug)]
pub(super) struct Pass {
    gate: Arc<Gate>,
    is_doubtful: bool,
    is_alone: bool,
}

/// The only claim to run alone, given up when it is dropped.
#[derive(Debug)]
pub(super) struct Claim {
    gate: Arc<Gate>,
    since: Instant,
    is_granted: bool,
}

/// A group that has deliveries, until this is dropped.
#[derive(Debug)]
pub(super) struct Member {
    gate: Arc<Gate>,
    number: u64,
}

impl Gate {
    /// Which time the gate is closed, while it is.
    pub(super) fn watch(&self) -> watch::Receiver<Option<Closure>> {
        self.closure.subscribe()
    }

    /// Has whoever wants to run alone wait until a group has no suspects in hand.
    pub(super) fn join(self: &Arc<Self>) -> Member {
        let mut state = self.lock();
        state.next_member += 1;
        let number = state.next_member;
        state.members.insert(number, 0);
        Member {
            gate: self.clone(),
            number,
        }
    }

    /// Lets a task of this crash count run beside others. `None` while the gate is closed.
    pub(super) fn enter(self: &Arc<Self>, crashes: u32) -> Option<Pass> {
        let mut state = self.lock();
        if state.is_closed {
            return None;
        }
        let is_doubtful = crashes > 0;
        state.running += 1;
        state.doubtful += usize::from(is_doubtful);
        Some(Pass {
            gate: self.clone(),
            is_doubtful,
            is_alone: false,
        })
    }

    /// Asks to run alone, which closes the gate. `None` where somebody else does, or where another
    /// suspect runs: if that one is the killer, the task that waits here would be blamed too.
    pub(super) fn claim(self: &Arc<Self>) -> Option<Claim> {
        let mut state = self.lock();
        if state.is_closed || state.doubtful > 0 {
            return None;
        }
        state.is_closed = true;
        state.closures += 1;
        self.closure.send_replace(Some(state.closures));
        Some(Claim {
            gate: self.clone(),
            since: Instant::now(),
            is_granted: false,
        })
    }

    fn open(&self, state: &mut State) {
        state.is_closed = false;
        state.claimant = None;
        self.closure.send_replace(None);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Claim {
    /// When it was made.
    pub(super) fn since(&self) -> Instant {
        self.since
    }

    /// When groups that still have suspects are not waited for any more, until then.
    pub(super) fn late_at(&self) -> Option<Instant> {
        let late_at = self.since + LONGEST_EMPTYING;
        Some(late_at).filter(|late_at| Instant::now() < *late_at)
    }

    /// The right to run alone, as soon as nothing else runs and no group has another suspect in hand,
    /// or it is [late](Self::late_at). Until then `waker` is woken when that may have changed.
    pub(super) fn grant(mut self, waker: &Waker) -> Result<Pass, Claim> {
        let gate = self.gate.clone();
        let mut state = gate.lock();
        if state.running > 0 || !(state.is_empty() || self.late_at().is_none()) {
            state.claimant = Some(waker.clone());
            drop(state);
            return Err(self);
        }
        state.running += 1;
        self.is_granted = true;
        drop(state);
        Ok(Pass {
            gate,
            is_doubtful: false,
            is_alone: true,
        })
    }
}

impl Member {
    /// The group has no suspect in hand, in this closure.
    pub(super) fn is_empty_in(&self, closure: Closure) {
        let mut state = self.gate.lock();
        state.members.insert(self.number, closure);
        state.wake_claimant();
    }
}

impl State {
    /// Whether no group has a suspect in hand.
    fn is_empty(&self) -> bool {
        let mut members = self.members.values();
        members.all(|closure| *closure == self.closures)
    }

    fn wake_claimant(&mut self) {
        if self.running == 0
            && let Some(claimant) = self.claimant.take()
        {
            claimant.wake();
        }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        let mut state = self.gate.lock();
        state.running -= 1;
        state.doubtful -= usize::from(self.is_doubtful);
        match self.is_alone {
            true => self.gate.open(&mut state),
            false => state.wake_claimant(),
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.is_granted {
            self.gate.open(&mut self.gate.lock());
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let mut state = self.gate.lock();
        state.members.remove(&self.number);
        state.wake_claimant();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gate() -> Arc<Gate> {
        Arc::new(Gate::default())
    }

    #[test]
    fn who_runs_alone_waits_for_the_others_and_lets_nobody_in() {
        let (gate, waker) = (gate(), Waker::noop());
        let neighbour = gate.enter(0).unwrap();
        let claim = gate.claim().unwrap();
        assert!(gate.enter(0).is_none() && gate.claim().is_none());
        let claim = claim.grant(waker).unwrap_err();
        drop(neighbour);
        let pass = claim.grant(waker).unwrap();
        assert!(gate.enter(0).is_none() && gate.claim().is_none());
        drop(pass);
        assert!(gate.enter(0).is_some());
    }

    #[test]
    fn who_runs_alone_waits_until_no_group_has_suspects() {
        let (gate, waker) = (gate(), Waker::noop());
        let (one, other) = (gate.join(), gate.join());
        let claim = gate.claim().unwrap();
        let first = gate.watch().borrow().unwrap();
        one.is_empty_in(first);
        let claim = claim.grant(waker).unwrap_err();
        drop(other);
        drop(claim.grant(waker).unwrap());
        let claim = gate.claim().unwrap().grant(waker).unwrap_err();
        one.is_empty_in(first);
        let claim = claim.grant(waker).unwrap_err();
        let second = gate.watch().borrow().unwrap();
        one.is_empty_in(second);
        assert!(claim.grant(waker).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_group_that_cannot_get_rid_of_its_suspects_is_not_waited_for_forever() {
        let (gate, waker) = (gate(), Waker::noop());
        let _stuck = gate.join();
        let claim = gate.claim().unwrap().grant(waker).unwrap_err();
        tokio::time::sleep_until(claim.late_at().unwrap()).await;
        assert!(claim.late_at().is_none());
        assert!(claim.grant(waker).is_ok());
    }

    #[test]
    fn nobody_waits_in_hand_while_another_suspect_runs() {
        let gate = gate();
        let suspect = gate.enter(1).unwrap();
        assert!(gate.claim().is_none());
        drop(suspect);
        assert!(gate.claim().is_some());
    }

    #[test]
    fn all_are_told_when_the_gate_closes_and_opens() {
        let gate = gate();
        let watch = gate.watch();
        let claim = gate.claim().unwrap();
        assert!(watch.borrow().is_some());
        let pass = claim.grant(Waker::noop()).unwrap();
        assert!(watch.borrow().is_some());
        drop(pass);
        assert!(watch.borrow().is_none());
    }

    #[test]
    fn a_claim_that_is_given_up_opens_the_gate() {
        let gate = gate();
        drop(gate.claim());
        assert!(gate.enter(0).is_some());
    }
}
