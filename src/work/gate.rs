//! Lets a task that may kill its process run alone in it.
//!
//! Whoever runs beside a killer is redelivered like the killer itself, and nothing tells them apart.
//! So a task whose worker died twice runs alone: if that worker dies too, it was the task.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

/// From this crash count on a task runs alone.
pub(super) const ALONE_FROM: u32 = 2;

/// Counts what runs in the process, in all its groups.
#[derive(Debug, Default)]
pub(crate) struct Gate(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    running: usize,
    /// Those of `running` whose worker died once: perhaps by them.
    doubtful: usize,
    alone: Alone,
    /// Whoever was turned away.
    waiting: Vec<Waker>,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum Alone {
    #[default]
    Nobody,
    /// Somebody waits until nothing runs any more; until then nothing starts.
    Wanted,
    Running,
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
    is_granted: bool,
}

impl Gate {
    /// Lets a task of this crash count run beside others. `None` while somebody runs alone or waits
    /// for it; then `waker` is woken when that is over.
    pub(super) fn enter(self: &Arc<Self>, crashes: u32, waker: &Waker) -> Option<Pass> {
        let mut state = self.lock();
        if state.alone != Alone::Nobody {
            state.wait(waker);
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

    /// Asks to run alone. `None` where somebody else does, or where another suspect runs: if that
    /// one is the killer, the task that waits here would be blamed too.
    pub(super) fn claim(self: &Arc<Self>) -> Option<Claim> {
        let mut state = self.lock();
        if state.alone != Alone::Nobody || state.doubtful > 0 {
            return None;
        }
        state.alone = Alone::Wanted;
        Some(Claim {
            gate: self.clone(),
            is_granted: false,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Claim {
    /// The right to run alone, as soon as nothing else runs; until then `waker` is woken when that
    /// may have changed.
    pub(super) fn grant(mut self, waker: &Waker) -> Result<Pass, Claim> {
        let gate = self.gate.clone();
        let mut state = gate.lock();
        if state.running > 0 {
            state.wait(waker);
            drop(state);
            return Err(self);
        }
        state.running += 1;
        state.alone = Alone::Running;
        self.is_granted = true;
        drop(state);
        Ok(Pass {
            gate,
            is_doubtful: false,
            is_alone: true,
        })
    }
}

impl State {
    fn wait(&mut self, waker: &Waker) {
        if !self.waiting.iter().any(|other| other.will_wake(waker)) {
            self.waiting.push(waker.clone());
        }
    }

    fn wake(&mut self) {
        self.waiting.drain(..).for_each(Waker::wake);
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        let mut state = self.gate.lock();
        state.running -= 1;
        state.doubtful -= usize::from(self.is_doubtful);
        if self.is_alone {
            state.alone = Alone::Nobody;
        }
        if self.is_alone || state.running == 0 {
            state.wake();
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.is_granted {
            let mut state = self.gate.lock();
            state.alone = Alone::Nobody;
            state.wake();
        }
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
        let neighbour = gate.enter(0, waker).unwrap();
        let claim = gate.claim().unwrap();
        assert!(gate.enter(0, waker).is_none() && gate.claim().is_none());
        let claim = claim.grant(waker).unwrap_err();
        drop(neighbour);
        let pass = claim.grant(waker).unwrap();
        assert!(gate.enter(0, waker).is_none() && gate.claim().is_none());
        drop(pass);
        assert!(gate.enter(0, waker).is_some());
    }

    #[test]
    fn nobody_waits_in_hand_while_another_suspect_runs() {
        let (gate, waker) = (gate(), Waker::noop());
        let suspect = gate.enter(1, waker).unwrap();
        assert!(gate.claim().is_none());
        drop(suspect);
        assert!(gate.claim().is_some());
    }

    #[test]
    fn a_claim_that_is_given_up_opens_the_gate() {
        let gate = gate();
        drop(gate.claim());
        assert!(gate.enter(0, Waker::noop()).is_some());
    }
}
