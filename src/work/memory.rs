//! What a process remembers of a tier's deliveries, to tell why one comes again.
//!
//! The broker marks as redelivered whatever was handed out before: the task whose worker died, and
//! also its prefetched neighbours, everything given back at a shutdown, and after a restart of the
//! broker whole queues. A task is a suspect only where nothing that this process knows explains it.

use std::collections::{HashMap, HashSet, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::time::SystemTime;

use lapin::BasicProperties;
use lapin::types::ShortString;

use crate::message::wire;

/// How many deliveries in a row may come again because workers died, in windows of the tier. A
/// longer row is a broker that was restarted.
const WINDOWS_IN_A_ROW: usize = 4;
/// How many returned deliveries are remembered; the oldest are forgotten.
const LONGEST_MEMORY: usize = 20_000;
/// How many ended tasks are remembered. A classic queue writes acknowledgements down in batches, and
/// a broker that is killed forgets the last ones.
const ENDED_MEMORY: usize = 4_096;

/// One attempt of one task, as a number: its name, identifier, attempt and life.
pub(super) type Key = u64;

/// Why a delivery is here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Judgement {
    /// It runs.
    Innocent,
    /// It was run to its end by this process, and the broker was not told in time.
    Done,
    /// It is running in this process, which lost the channel that it came on.
    Running,
    /// Its worker died, perhaps because of it.
    Suspect,
}

#[derive(Debug)]
pub(super) struct Memory {
    hasher: RandomState,
    /// The most messages that one process holds of this tier.
    window: usize,
    /// Given back by this process, or lost with a channel of its own.
    returned: HashSet<Key>,
    returned_in_order: VecDeque<Key>,
    /// Ended, and acknowledged so lately that the broker may not have read it.
    ended: VecDeque<Key>,
    /// What was under way when a channel was lost.
    orphans: HashMap<Key, Orphan>,
    /// When this process last lost a channel. Who was enqueued before may have come back for that.
    lost_at: Option<SystemTime>,
    redelivered_in_a_row: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Orphan {
    Running,
    Done,
}

impl Memory {
    pub(super) fn new(window: usize) -> Self {
        Self {
            hasher: RandomState::new(),
            window,
            returned: HashSet::new(),
            returned_in_order: VecDeque::new(),
            ended: VecDeque::new(),
            orphans: HashMap::new(),
            lost_at: None,
            redelivered_in_a_row: 0,
        }
    }

    /// The key of a delivery with these properties.
    pub(super) fn key(&self, properties: &BasicProperties) -> Key {
        self.hasher.hash_one((
            properties.kind().as_ref().map(ShortString::as_str),
            properties.message_id().as_ref().map(ShortString::as_str),
            wire::number(properties, "tierline-attempt"),
            wire::number(properties, "tierline-life"),
        ))
    }

    /// Why a delivery is here.
    pub(super) fn judge(
        &mut self,
        key: Key,
        is_redelivered: bool,
        properties: &BasicProperties,
    ) -> Judgement {
        if !is_redelivered {
            self.redelivered_in_a_row = 0;
            // A new copy: what was known of an earlier one says nothing about it.
            if self.orphans.get(&key) == Some(&Orphan::Done) {
                self.orphans.remove(&key);
            }
            return Judgement::Innocent;
        }
        self.redelivered_in_a_row += 1;
        let was_returned = self.returned.remove(&key);
        match self.orphans.get(&key) {
            Some(Orphan::Running) => return Judgement::Running,
            Some(Orphan::Done) => {
                self.orphans.remove(&key);
                return Judgement::Done;
            }
            None => {}
        }
        let is_mass = self.redelivered_in_a_row > self.window * WINDOWS_IN_A_ROW;
        let enqueued_at = wire::number(properties, "tierline-enqueued-at").map(wire::time);
        let is_explained = self
            .lost_at
            .zip(enqueued_at)
            .is_some_and(|(lost_at, enqueued_at)| enqueued_at <= lost_at);
        match was_returned || is_mass || is_explained {
            true => Judgement::Innocent,
            false => Judgement::Suspect,
        }
    }

    /// A delivery goes back to the broker.
    pub(super) fn returned(&mut self, key: Key) {
        if self.returned.insert(key) {
            self.returned_in_order.push_back(key);
        }
        if self.returned_in_order.len() > LONGEST_MEMORY
            && let Some(oldest) = self.returned_in_order.pop_front()
        {
            self.returned.remove(&oldest);
        }
    }

    /// A task ran to its end, and nothing follows on it.
    pub(super) fn ended(&mut self, key: Key) {
        match self.orphans.get_mut(&key) {
            Some(orphan) => *orphan = Orphan::Done,
            None => {
                if self.ended.len() >= ENDED_MEMORY {
                    self.ended.pop_front();
                }
                self.ended.push_back(key);
            }
        }
    }

    /// A task's successor is stored: should the delivery come again, it is as good as new.
    pub(super) fn succeeded(&mut self, key: Key) {
        self.orphans.remove(&key);
    }

    /// The channel is lost, with these running and those not begun.
    pub(super) fn lost(
        &mut self,
        at: SystemTime,
        running: impl Iterator<Item = Key>,
        waiting: impl Iterator<Item = Key>,
    ) {
        self.lost_at = Some(at);
        self.orphans.retain(|_, orphan| *orphan == Orphan::Running);
        for key in self.ended.drain(..) {
            self.orphans.insert(key, Orphan::Done);
        }
        for key in waiting {
            // The same task twice: one of them is not done.
            self.orphans.remove(&key);
            self.returned(key);
        }
        for key in running {
            self.orphans.insert(key, Orphan::Running);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;
    use crate::message::Message;
    use crate::task::PublishRequest;

    fn delivery(id: u32, enqueued_at: u64) -> BasicProperties {
        let mut request = PublishRequest::named("greet", b"{}".to_vec());
        request.id = Some(format!("task-{id}").as_str().into());
        let at = UNIX_EPOCH + Duration::from_secs(enqueued_at);
        let message = Message::first(request, "normal", 5, at);
        message.properties("hotel")
    }

    fn judge(memory: &mut Memory, id: u32, is_redelivered: bool) -> Judgement {
        let properties = delivery(id, 50);
        let key = memory.key(&properties);
        memory.judge(key, is_redelivered, &properties)
    }

    #[test]
    fn what_comes_again_with_no_reason_known_is_a_suspect() {
        let mut memory = Memory::new(8);
        assert_eq!(judge(&mut memory, 1, false), Judgement::Innocent);
        assert_eq!(judge(&mut memory, 1, true), Judgement::Suspect);
    }

    #[test]
    fn what_this_process_gave_back_is_innocent_once() {
        let mut memory = Memory::new(8);
        memory.returned(memory.key(&delivery(1, 50)));
        assert_eq!(judge(&mut memory, 1, true), Judgement::Innocent);
        assert_eq!(judge(&mut memory, 1, true), Judgement::Suspect);
    }

    #[test]
    fn after_a_lost_channel_nothing_is_run_twice_by_this_process() {
        let mut memory = Memory::new(8);
        let key = |memory: &Memory, id| memory.key(&delivery(id, 50));
        memory.ended(key(&memory, 1));
        let (running, waiting) = ([key(&memory, 2)], [key(&memory, 3)]);
        let at = UNIX_EPOCH + Duration::from_secs(60);
        memory.lost(at, running.into_iter(), waiting.into_iter());
        assert_eq!(judge(&mut memory, 1, true), Judgement::Done);
        assert_eq!(judge(&mut memory, 2, true), Judgement::Running);
        assert_eq!(judge(&mut memory, 3, true), Judgement::Innocent);
        memory.ended(running[0]);
        assert_eq!(judge(&mut memory, 2, true), Judgement::Done);
    }

    #[test]
    fn a_task_whose_successor_is_stored_is_not_taken_for_done() {
        let mut memory = Memory::new(8);
        let key = memory.key(&delivery(1, 50));
        memory.lost(UNIX_EPOCH, [key].into_iter(), std::iter::empty());
        memory.succeeded(key);
        assert_eq!(judge(&mut memory, 1, true), Judgement::Suspect);
    }

    #[test]
    fn a_new_copy_of_a_done_task_runs() {
        let mut memory = Memory::new(8);
        memory.ended(memory.key(&delivery(1, 50)));
        memory.lost(UNIX_EPOCH, std::iter::empty(), std::iter::empty());
        assert_eq!(judge(&mut memory, 1, false), Judgement::Innocent);
        assert_eq!(judge(&mut memory, 1, true), Judgement::Suspect);
    }

    #[test]
    fn a_lost_connection_explains_what_was_enqueued_before() {
        let mut memory = Memory::new(8);
        let at = UNIX_EPOCH + Duration::from_secs(60);
        memory.lost(at, std::iter::empty(), std::iter::empty());
        let later = delivery(2, 70);
        let key = memory.key(&later);
        assert_eq!(judge(&mut memory, 1, true), Judgement::Innocent);
        assert_eq!(memory.judge(key, true, &later), Judgement::Suspect);
    }

    #[test]
    fn a_whole_queue_that_comes_again_is_a_broker_that_restarted() {
        let mut memory = Memory::new(2);
        let suspects = (0..100)
            .filter(|id| judge(&mut memory, *id, true) == Judgement::Suspect)
            .count();
        assert_eq!(suspects, 8);
        assert_eq!(judge(&mut memory, 200, false), Judgement::Innocent);
        assert_eq!(judge(&mut memory, 201, true), Judgement::Suspect);
    }
}
