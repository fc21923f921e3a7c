//! Which deliveries of a channel are settled, and the fewest acknowledgements that say so.

use std::collections::VecDeque;

/// An acknowledgement to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ack {
    pub(super) tag: u64,
    /// Whether it stands for all before it too.
    pub(super) multiple: bool,
}

/// The deliveries of one channel, by their tags, which count up from 1.
#[derive(Debug, Default)]
pub(super) struct Acks {
    /// The tag of the first entry of `states`, less one.
    settled_up_to: u64,
    states: VecDeque<State>,
    /// Finished since the last flush, in no order.
    finished: Vec<u64>,
    /// Delivered, and the broker does not know of an end.
    unsettled: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    Finished,
    Settled,
}

impl Acks {
    /// A delivery arrived.
    pub(super) fn delivered(&mut self, tag: u64) {
        let expected = self.settled_up_to + self.states.len() as u64 + 1;
        for _ in expected..=tag {
            self.states.push_back(State::Open);
        }
        self.unsettled += 1;
    }

    /// A delivery is done with, and may be acknowledged.
    pub(super) fn finished(&mut self, tag: u64) {
        if let Some(state) = self.state(tag)
            && *state == State::Open
        {
            *state = State::Finished;
            self.finished.push(tag);
        }
    }

    /// A delivery went back to the broker by itself, with no acknowledgement.
    pub(super) fn returned(&mut self, tag: u64) {
        if let Some(state) = self.state(tag)
            && *state == State::Open
        {
            *state = State::Settled;
            self.unsettled -= 1;
            self.forget_settled();
        }
    }

    /// Whether a flush would send anything.
    pub(super) fn has_finished(&self) -> bool {
        !self.finished.is_empty()
    }

    /// How many deliveries the broker waits for.
    pub(super) fn unsettled(&self) -> usize {
        self.unsettled
    }

    /// How many of them are not done with.
    pub(super) fn open(&self) -> usize {
        self.unsettled - self.finished.len()
    }

    /// Hands out the acknowledgements of all that is finished: one for the unbroken run from the
    /// oldest on, and one each for the stragglers beyond.
    pub(super) fn flush(&mut self, mut send: impl FnMut(Ack)) {
        if self.finished.is_empty() {
            return;
        }
        self.unsettled -= self.finished.len();
        let mut run = None;
        let mut in_run = 0;
        for (offset, state) in self.states.iter().enumerate() {
            match state {
                State::Open => break,
                State::Settled => {}
                State::Finished => {
                    run = Some(self.settled_up_to + offset as u64 + 1);
                    in_run += 1;
                }
            }
        }
        if let Some(tag) = run {
            let multiple = in_run > 1;
            send(Ack { tag, multiple });
        }
        let finished = std::mem::take(&mut self.finished);
        for tag in &finished {
            if run.is_none_or(|run| *tag > run) {
                send(Ack {
                    tag: *tag,
                    multiple: false,
                });
            }
            if let Some(state) = self.state(*tag) {
                *state = State::Settled;
            }
        }
        self.finished = finished;
        self.finished.clear();
        self.forget_settled();
    }

    fn state(&mut self, tag: u64) -> Option<&mut State> {
        let offset = tag.checked_sub(self.settled_up_to + 1)?;
        self.states.get_mut(usize::try_from(offset).ok()?)
    }

    fn forget_settled(&mut self) {
        while self.states.front() == Some(&State::Settled) {
            self.states.pop_front();
            self.settled_up_to += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn flushed(acks: &mut Acks) -> Vec<(u64, bool)> {
        let mut sent = Vec::new();
        acks.flush(|ack| sent.push((ack.tag, ack.multiple)));
        sent
    }

    #[test]
    fn an_unbroken_run_is_one_acknowledgement_and_stragglers_are_their_own() {
        let mut acks = Acks::default();
        (1..=6).for_each(|tag| acks.delivered(tag));
        [2, 1, 3, 6].into_iter().for_each(|tag| acks.finished(tag));
        assert_eq!((acks.unsettled(), acks.open()), (6, 2));
        assert_eq!(flushed(&mut acks), [(3, true), (6, false)]);
        assert_eq!(acks.unsettled(), 2);
        acks.finished(5);
        assert_eq!(flushed(&mut acks), [(5, false)]);
        acks.finished(4);
        // 5 and 6 are settled already: naming them again would be an error on the channel.
        assert_eq!(flushed(&mut acks), [(4, false)]);
        assert_eq!(flushed(&mut acks), []);
        assert_eq!(acks.unsettled(), 0);
    }

    proptest! {
        #[test]
        fn every_finished_delivery_is_acknowledged_once_and_no_other(
            steps in prop::collection::vec((0_u8..4, any::<prop::sample::Index>()), 1..300),
        ) {
            let mut acks = Acks::default();
            let mut next = 1;
            let (mut open, mut finished) = (Vec::new(), BTreeSet::new());
            let mut unsettled = BTreeSet::new();
            for (kind, index) in steps {
                match kind {
                    0 => {
                        acks.delivered(next);
                        open.push(next);
                        unsettled.insert(next);
                        next += 1;
                    }
                    1 if !open.is_empty() => {
                        let tag = open.swap_remove(index.index(open.len()));
                        acks.finished(tag);
                        finished.insert(tag);
                    }
                    2 if !open.is_empty() => {
                        let tag = open.swap_remove(index.index(open.len()));
                        acks.returned(tag);
                        unsettled.remove(&tag);
                    }
                    3 => {
                        let mut covered = BTreeSet::new();
                        acks.flush(|ack| {
                            assert!(unsettled.contains(&ack.tag), "{ack:?} is unknown");
                            match ack.multiple {
                                true => covered.extend(unsettled.range(..=ack.tag)),
                                false => { covered.insert(ack.tag); }
                            }
                        });
                        prop_assert_eq!(&covered, &finished);
                        unsettled.retain(|tag| !covered.contains(tag));
                        finished.clear();
                    }
                    _ => {}
                }
                prop_assert_eq!(acks.unsettled(), unsettled.len());
            }
        }
    }
}
