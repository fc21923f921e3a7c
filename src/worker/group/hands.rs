//! Sees to it that no other suspect is in hand when a task runs alone in the process.
//!
//! Who is in hand when a process dies comes again marked like the task that ended it. So before a
//! suspect may run alone, every group of the process takes in what is under way to it, sends the
//! other suspects around, and makes sure that the broker has read that.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::future::join_all;
use tokio::sync::watch;

use super::{Group, moved_on};
use crate::worker::gate::{ALONE_FROM, Closure, Gate, Member};
use crate::worker::job::Kind;
use crate::worker::tier::{Held, Tier};

/// What a group knows of the gate, and how far it is with emptying its hands.
pub(super) struct Hands {
    /// While there are deliveries.
    member: Option<Member>,
    gate: watch::Receiver<Option<Closure>>,
    gate_moved: Asked,
    /// The closure of the gate for which they are being emptied, and how far that is.
    emptying: Option<(Closure, Step)>,
}

enum Step {
    /// The broker is asked something: when it answers, all that it had sent before is here.
    Look(Asked),
    /// Suspects are sent around, and what runs comes to its end.
    Wait,
    /// The broker is asked something: when it answers, it has read the last acknowledgement.
    Settle(Asked),
    /// No suspect is in hand. One that comes now is sent around at once.
    Done,
}

type Asked = Pin<Box<dyn Future<Output = ()> + Send>>;

impl Hands {
    pub(super) fn new(gate: &Gate) -> Self {
        Self {
            member: None,
            gate_moved: Box::pin(moved_on(gate.watch())),
            gate: gate.watch(),
            emptying: None,
        }
    }

    /// Deliveries are about to come.
    pub(super) fn join(&mut self, gate: &Arc<Gate>) {
        self.member = Some(gate.join());
    }

    /// There are none any more.
    pub(super) fn leave(&mut self) {
        self.member = None;
        self.emptying = None;
    }

    /// Completes when nobody runs alone, or waits for it.
    pub(super) fn may_be_filled(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut gate = self.gate.clone();
        // An error means that the gate is gone, and with it this group.
        async move { drop(gate.wait_for(Option::is_none).await) }
    }

    /// Whether suspects may not stay: somebody runs alone, or waits for it.
    pub(super) fn must_be_empty(&self) -> bool {
        self.gate.borrow().is_some()
    }
}

impl Group {
    /// Empties the hands of suspects while the gate is closed.
    pub(super) fn empty_hands(&mut self, cx: &mut Context<'_>) {
        while self.hands.gate_moved.as_mut().poll(cx).is_ready() {
            self.hands.gate_moved = Box::pin(moved_on(self.hands.gate.clone()));
        }
        let closure = *self.hands.gate.borrow();
        let Some(closure) = closure else {
            self.hands.emptying = None;
            return;
        };
        let mut step = match self.hands.emptying.take() {
            Some((current, step)) if current == closure => step,
            _ => Step::Look(self.ask_all()),
        };
        let mut goes_on = true;
        while goes_on {
            (step, goes_on) = self.step(step, closure, cx);
        }
        self.hands.emptying = Some((closure, step));
    }

    /// The next step, and whether it can be taken at once.
    fn step(&mut self, step: Step, closure: Closure, cx: &mut Context<'_>) -> (Step, bool) {
        match step {
            Step::Look(mut asked) => match asked.as_mut().poll(cx) {
                Poll::Ready(()) => {
                    // What has come is taken in at the beginning of the next turn.
                    cx.waker().wake_by_ref();
                    (Step::Wait, false)
                }
                Poll::Pending => (Step::Look(asked), false),
            },
            Step::Wait if self.running.is_empty() => (Step::Settle(self.ask_all()), true),
            Step::Settle(mut asked) => match asked.as_mut().poll(cx) {
                Poll::Ready(()) if self.running.is_empty() => {
                    if let Some(member) = &self.hands.member {
                        member.is_empty_in(closure);
                    }
                    (Step::Done, false)
                }
                // A suspect has come meanwhile, and is being sent around.
                Poll::Ready(()) => (Step::Wait, false),
                Poll::Pending => (Step::Settle(asked), false),
            },
            Step::Wait | Step::Done => (step, false),
        }
    }

    /// Acknowledges what is finished, and asks the broker something on every channel.
    fn ask_all(&mut self) -> Asked {
        let asked = join_all(self.tiers.iter_mut().filter_map(Tier::settle));
        Box::pin(async move { drop(asked.await) })
    }

    /// Sends those of the tier's suspects around that wait here for their turn to run alone.
    pub(super) fn send_suspects_around(&mut self, tier: usize) {
        let goes_around = |held: &Held| held.crashes >= ALONE_FROM && !held.is_suspect;
        if !self.tiers[tier].buffer.iter().any(goes_around) {
            return;
        }
        for held in std::mem::take(&mut self.tiers[tier].buffer) {
            match goes_around(&held) {
                true => self.start(tier, held, Kind::SendAround, None),
                false => self.tiers[tier].buffer.push_back(held),
            }
        }
    }
}
