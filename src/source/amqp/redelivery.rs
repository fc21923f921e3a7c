//! What a process remembers of a tier's deliveries, to tell why the broker delivers one again.
//!
//! The broker marks everything as redelivered that it delivered before: the task whose worker died, its
//! prefetched neighbours, everything that a consumer returned, and whole queues after the broker restarted. A task is
//! a suspect only if nothing that this process knows explains its redelivery.
//!
//! The history counts: of two equal messages, one that is done explains one redelivery. A message without an id
//! is never recognised. The history only counts how many of them this process lost lately, and as many redeliveries are
//! explained.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use crate::message::{Key, Received};

/// How many deliveries in a row may come again because workers died, in windows of the tier. A
/// longer row is a broker that was restarted.
const WINDOWS_IN_A_ROW: usize = 4;
/// How many deliveries are remembered of each kind; the oldest are forgotten.
const LONGEST_MEMORY: usize = 20_000;
/// How many ended tasks are remembered. A classic queue writes acknowledgements down in batches, and
/// a broker that is killed forgets the last ones.
const ENDED_MEMORY: usize = 4_096;
/// How long an acknowledgement may be under way; and how long after its channel was made again a
/// message that is done may come again. What comes later may be a new message that is equal, lost by
/// another process.
const ENDED_FOR: Duration = Duration::from_secs(60);
/// How long after its channel was made again a lost connection explains redeliveries. A killer that was enqueued
/// before the loss must be counted some day.
const EXCUSED_FOR: Duration = Duration::from_secs(120);
/// How long the acknowledgement of a message without an id may be under way. Any other message without
/// an id may be taken for it, also one that kills its process: those that were acknowledged longer ago,
/// and most likely do not come again, must not stand for it.
const ENDED_WITHOUT_ID_FOR: Duration = Duration::from_secs(5);

/// Why a delivery is here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RedeliveryCause {
    /// It runs.
    Explained,
    /// It was run to its end by this process, and the broker was not told in time.
    Done,
    /// Its worker died, perhaps because of it.
    Unexplained,
}

#[derive(Debug)]
pub(super) struct RedeliveryHistory {
    /// The most messages that one process holds of this tier.
    window: usize,
    /// Given back by this process, or lost with a channel of its own, and to be run.
    returned: Notes,
    /// Likewise, without an id: when each was. Like `done` they are forgotten after a while.
    without_id: VecDeque<Instant>,
    /// Ended, and acknowledged so lately that the broker may not have read it.
    ended: VecDeque<(Instant, Option<Key>)>,
    /// Ended, and not acknowledged as far as is known: the channel was lost.
    done: Notes,
    /// When this process last lost a channel. A message that was enqueued before may be redelivered for that.
    lost_at: Option<SystemTime>,
    /// Until when that explains a redelivery; `None` while there is no channel.
    excused_until: Option<Instant>,
    redelivered_in_a_row: usize,
}

impl RedeliveryHistory {
    pub(super) fn new(window: usize) -> Self {
        Self {
            window,
            returned: Notes::default(),
            without_id: VecDeque::new(),
            ended: VecDeque::new(),
            done: Notes::default(),
            lost_at: None,
            excused_until: None,
            redelivered_in_a_row: 0,
        }
    }

    /// A delivery came for the first time.
    pub(super) fn first_delivery(&mut self) -> RedeliveryCause {
        self.redelivered_in_a_row = 0;
        RedeliveryCause::Explained
    }

    /// Why a delivery came again that no job of this process works on.
    pub(super) fn cause_of(&mut self, received: &Received) -> RedeliveryCause {
        self.redelivered_in_a_row += 1;
        self.done.forget_older_than(ENDED_FOR);
        self.returned.forget_older_than(EXCUSED_FOR);
        self.forget_old_without_id();
        // Of equal messages those come first that must run: the others may never come.
        let was_returned = match received.has_id() {
            true => self.returned.take(received),
            false => self.without_id.pop_front().is_some(),
        };
        if !was_returned && self.done.take(received) {
            return RedeliveryCause::Done;
        }
        let longest_row = self.window.saturating_mul(WINDOWS_IN_A_ROW);
        let is_mass = self.redelivered_in_a_row > longest_row;
        // One that was counted before is excused only by what is known of it alone: it may have killed the
        // worker that held it while this process lost its connection.
        let is_explained = received.crashes() == 0
            && self
                .lost_at
                .filter(|_| {
                    self.excused_until
                        .is_none_or(|until| Instant::now() <= until)
                })
                .zip(received.stated_enqueued_at())
                .is_some_and(|(lost_at, enqueued_at)| enqueued_at <= lost_at);
        match was_returned || is_mass || is_explained {
            true => RedeliveryCause::Explained,
            false => RedeliveryCause::Unexplained,
        }
    }

    /// A delivery goes back to the broker although nothing explained it. It comes again at once, which is no sign of
    /// a broker that restarted.
    pub(super) fn refused(&mut self) {
        self.redelivered_in_a_row = self.redelivered_in_a_row.saturating_sub(1);
    }

    /// A delivery goes back to the broker, or was lost with its channel. It is to be run.
    pub(super) fn returned(&mut self, key: Option<Key>) {
        match key {
            Some(key) => self.returned.add(key),
            None => self.returned_without_id(1),
        }
    }

    fn returned_without_id(&mut self, number: usize) {
        let room = LONGEST_MEMORY - self.without_id.len();
        let now = Instant::now();
        self.without_id.extend((0..number.min(room)).map(|_| now));
    }

    fn forget_old_without_id(&mut self) {
        while let Some(returned_at) = self.without_id.front()
            && returned_at.elapsed() > ENDED_FOR
        {
            self.without_id.pop_front();
        }
    }

    /// A task ran to its end, nothing follows on it, and it is about to be acknowledged.
    pub(super) fn ended(&mut self, key: Option<Key>) {
        if self.ended.len() >= ENDED_MEMORY {
            self.ended.pop_front();
        }
        self.ended.push_back((Instant::now(), key));
    }

    /// Likewise, and it cannot be acknowledged: its channel is lost.
    pub(super) fn ended_unacknowledged(&mut self, key: Option<Key>) {
        // One without an id is counted already, since its channel was lost.
        if let Some(key) = key {
            self.done.add(key);
        }
    }

    /// The channel is lost. These were not begun; of those that run so many have no id.
    pub(super) fn lost(
        &mut self,
        at: SystemTime,
        waiting: impl Iterator<Item = Option<Key>>,
        running_without_id: usize,
    ) {
        self.lost_at = Some(at);
        self.excused_until = None;
        self.forget_old_without_id();
        for (ended_at, key) in std::mem::take(&mut self.ended) {
            let age = ended_at.elapsed();
            match key {
                Some(key) if age <= ENDED_FOR => self.done.add(key),
                None if age <= ENDED_WITHOUT_ID_FOR => self.returned_without_id(1),
                _ => {}
            }
        }
        waiting.for_each(|key| self.returned(key));
        self.returned_without_id(running_without_id);
    }

    /// There is a channel again: what was lost comes from now on.
    pub(super) fn subscribed(&mut self) {
        self.excused_until = Some(Instant::now() + EXCUSED_FOR);
        self.done.renew();
        self.returned.renew();
        self.without_id
            .iter_mut()
            .for_each(|at| *at = Instant::now());
    }
}

/// How often messages were noted. The oldest notes are forgotten.
#[derive(Debug, Default)]
struct Notes {
    counts: HashMap<Key, u32>,
    /// All that was added, also what was taken since: forgetting that costs at most a later note.
    added: VecDeque<(Instant, Key)>,
}

impl Notes {
    fn add(&mut self, key: Key) {
        if self.added.len() >= LONGEST_MEMORY {
            self.forget_oldest();
        }
        *self.counts.entry(key).or_default() += 1;
        self.added.push_back((Instant::now(), key));
    }

    /// Takes one note of a message; whether there was one. Where nothing is noted, its payload is not
    /// read.
    fn take(&mut self, received: &Received) -> bool {
        !self.counts.is_empty() && received.key().is_some_and(|key| self.take_key(key))
    }

    fn take_key(&mut self, key: Key) -> bool {
        match self.counts.get_mut(&key) {
            Some(1) => self.counts.remove(&key).is_some(),
            Some(count) => {
                *count -= 1;
                true
            }
            None => false,
        }
    }

    fn forget_oldest(&mut self) {
        if let Some((_, key)) = self.added.pop_front() {
            self.take_key(key);
        }
    }

    fn forget_older_than(&mut self, age: Duration) {
        while let Some((added_at, _)) = self.added.front()
            && added_at.elapsed() > age
        {
            self.forget_oldest();
        }
    }

    /// All are as old as if they were added now.
    fn renew(&mut self) {
        let now = Instant::now();
        self.added
            .iter_mut()
            .for_each(|(added_at, _)| *added_at = now);
    }
}

#[cfg(test)]
mod tests {
    use std::iter::empty;
    use std::time::UNIX_EPOCH;

    use lapin::BasicProperties;

    use super::*;
    use crate::message::Message;
    use crate::task::PublishRequest;

    fn delivery(id: u32, enqueued_at: u64) -> Received {
        let message = message(id, enqueued_at);
        received(message.properties(false), message.payload)
    }

    fn message(id: u32, enqueued_at: u64) -> Message {
        let mut request = PublishRequest::named("greet", b"{}".to_vec());
        request.id = Some(format!("task-{id}").as_str().into());
        let at = UNIX_EPOCH + Duration::from_secs(enqueued_at);
        Message::first(request, "normal", 5, at)
    }

    fn received(properties: BasicProperties, payload: Vec<u8>) -> Received {
        Received::new(properties, payload, None, "normal".into(), UNIX_EPOCH)
    }

    fn key(id: u32) -> Option<Key> {
        delivery(id, 50).key()
    }

    /// Why the task of this number comes again.
    fn again(history: &mut RedeliveryHistory, id: u32) -> RedeliveryCause {
        history.cause_of(&delivery(id, 50))
    }

    /// Why a message comes again that has no id, and no header that says when it was enqueued.
    fn again_without_id(history: &mut RedeliveryHistory) -> RedeliveryCause {
        let properties = BasicProperties::default();
        history.cause_of(&received(properties, Vec::new()))
    }

    #[tokio::test]
    async fn what_comes_again_with_no_reason_known_is_a_suspect() {
        let mut history = RedeliveryHistory::new(8);
        history.first_delivery();
        assert_eq!(again(&mut history, 1), RedeliveryCause::Unexplained);
        assert_eq!(again_without_id(&mut history), RedeliveryCause::Unexplained);
    }

    #[tokio::test]
    async fn what_this_process_gave_back_is_innocent_as_often_as_it_was_given_back() {
        let mut history = RedeliveryHistory::new(8);
        history.returned(key(1));
        history.returned(key(1));
        assert_eq!(again(&mut history, 1), RedeliveryCause::Explained);
        assert_eq!(again(&mut history, 1), RedeliveryCause::Explained);
        assert_eq!(again(&mut history, 1), RedeliveryCause::Unexplained);
    }

    #[tokio::test]
    async fn after_a_lost_channel_what_is_done_is_not_run_and_what_waited_is() {
        let mut history = RedeliveryHistory::new(8);
        history.ended(key(1));
        history.lost(UNIX_EPOCH, [key(3)].into_iter(), 0);
        history.ended_unacknowledged(key(2));
        history.subscribed();
        assert_eq!(again(&mut history, 1), RedeliveryCause::Done);
        assert_eq!(again(&mut history, 2), RedeliveryCause::Done);
        assert_eq!(again(&mut history, 3), RedeliveryCause::Explained);
    }

    #[tokio::test]
    async fn of_equal_messages_each_that_is_done_explains_one_and_those_that_waited_come_first() {
        let mut history = RedeliveryHistory::new(8);
        history.ended(key(1));
        history.ended(key(1));
        history.lost(UNIX_EPOCH, [key(1)].into_iter(), 0);
        history.subscribed();
        // One of the three was never run. It may be the only one that comes.
        assert_eq!(again(&mut history, 1), RedeliveryCause::Explained);
        assert_eq!(again(&mut history, 1), RedeliveryCause::Done);
        assert_eq!(again(&mut history, 1), RedeliveryCause::Done);
        assert_eq!(again(&mut history, 1), RedeliveryCause::Unexplained);
    }

    #[tokio::test]
    async fn a_message_without_an_id_is_never_taken_for_done_and_as_many_as_were_lost_are_innocent()
    {
        let mut history = RedeliveryHistory::new(8);
        history.ended(None);
        history.lost(UNIX_EPOCH, [None, key(1), None].into_iter(), 1);
        history.ended_unacknowledged(None);
        history.subscribed();
        for _ in 0..4 {
            assert_eq!(again_without_id(&mut history), RedeliveryCause::Explained);
        }
        assert_eq!(again_without_id(&mut history), RedeliveryCause::Unexplained);
    }

    #[tokio::test(start_paused = true)]
    async fn an_equal_message_that_comes_long_after_the_loss_is_not_taken_for_done() {
        let mut history = RedeliveryHistory::new(8);
        history.ended(key(1));
        history.lost(UNIX_EPOCH, empty(), 0);
        tokio::time::advance(ENDED_FOR * 10).await;
        // The broker was away for that long.
        history.subscribed();
        assert_eq!(again(&mut history, 1), RedeliveryCause::Done);

        history.ended(key(2));
        history.lost(UNIX_EPOCH, empty(), 0);
        history.subscribed();
        tokio::time::advance(ENDED_FOR * 2).await;
        assert_eq!(again(&mut history, 2), RedeliveryCause::Unexplained);

        history.ended(key(3));
        tokio::time::advance(ENDED_FOR * 2).await;
        history.lost(UNIX_EPOCH, empty(), 0);
        history.subscribed();
        assert_eq!(again(&mut history, 3), RedeliveryCause::Unexplained);
    }

    #[tokio::test(start_paused = true)]
    async fn a_message_without_an_id_that_comes_long_after_the_loss_is_a_suspect() {
        let mut history = RedeliveryHistory::new(8);
        history.lost(UNIX_EPOCH, [None, None].into_iter(), 1);
        tokio::time::advance(ENDED_FOR * 10).await;
        // The broker was away for that long.
        history.subscribed();
        assert_eq!(again_without_id(&mut history), RedeliveryCause::Explained);
        tokio::time::advance(ENDED_FOR * 2).await;
        assert_eq!(again_without_id(&mut history), RedeliveryCause::Unexplained);
    }

    #[tokio::test(start_paused = true)]
    async fn a_message_without_an_id_that_was_acknowledged_long_before_the_loss_excuses_no_other() {
        let mut history = RedeliveryHistory::new(8);
        history.ended(None);
        tokio::time::advance(ENDED_WITHOUT_ID_FOR * 2).await;
        history.ended(None);
        history.lost(UNIX_EPOCH, empty(), 0);
        history.subscribed();
        assert_eq!(again_without_id(&mut history), RedeliveryCause::Explained);
        assert_eq!(again_without_id(&mut history), RedeliveryCause::Unexplained);
    }

    #[tokio::test]
    async fn a_lost_connection_explains_what_was_enqueued_before() {
        let mut history = RedeliveryHistory::new(8);
        let at = UNIX_EPOCH + Duration::from_secs(60);
        history.lost(at, empty(), 0);
        assert_eq!(again(&mut history, 1), RedeliveryCause::Explained);
        assert_eq!(
            history.cause_of(&delivery(2, 70)),
            RedeliveryCause::Unexplained
        );
    }

    #[tokio::test]
    async fn a_lost_connection_explains_what_was_enqueued_before_by_the_time_in_its_id() {
        let mut history = RedeliveryHistory::new(8);
        let at = UNIX_EPOCH + Duration::from_secs(60);
        history.lost(at, empty(), 0);
        let mut cause_of_drawn = |seconds| {
            let request = PublishRequest::named("greet", b"{}".to_vec());
            let enqueued_at = UNIX_EPOCH + Duration::from_secs(seconds);
            let message = Message::first(request, "normal", 5, enqueued_at);
            history.cause_of(&received(message.properties(true), message.payload))
        };
        assert_eq!(cause_of_drawn(60), RedeliveryCause::Explained);
        assert_eq!(cause_of_drawn(61), RedeliveryCause::Unexplained);
        // A time far after the arrival excuses nothing.
        assert_eq!(cause_of_drawn(1 << 38), RedeliveryCause::Unexplained);
    }

    #[tokio::test(start_paused = true)]
    async fn a_lost_connection_explains_nothing_long_after_the_channel_was_made_again() {
        let mut history = RedeliveryHistory::new(8);
        let at = UNIX_EPOCH + Duration::from_secs(60);
        history.lost(at, empty(), 0);
        tokio::time::advance(EXCUSED_FOR * 2).await;
        history.subscribed();
        assert_eq!(again(&mut history, 1), RedeliveryCause::Explained);
        tokio::time::advance(EXCUSED_FOR * 2).await;
        assert_eq!(again(&mut history, 2), RedeliveryCause::Unexplained);
    }

    #[tokio::test]
    async fn a_suspect_that_goes_back_again_and_again_is_not_taken_for_a_restart_of_the_broker() {
        let mut history = RedeliveryHistory::new(1);
        for _ in 0..100 {
            assert_eq!(again(&mut history, 1), RedeliveryCause::Unexplained);
            history.refused();
        }
    }

    #[tokio::test]
    async fn a_lost_connection_does_not_explain_a_message_whose_worker_died_before() {
        let mut history = RedeliveryHistory::new(8);
        let at = UNIX_EPOCH + Duration::from_secs(60);
        history.lost(at, empty(), 0);
        let mut counted = message(1, 50);
        counted.crashes = 1;
        let counted = received(counted.properties(false), counted.payload);
        assert_eq!(history.cause_of(&counted), RedeliveryCause::Unexplained);
        history.returned(counted.key());
        assert_eq!(history.cause_of(&counted), RedeliveryCause::Explained);
    }

    #[tokio::test]
    async fn a_whole_queue_that_comes_again_is_a_broker_that_restarted() {
        let mut history = RedeliveryHistory::new(2);
        let suspects = (0..100)
            .filter(|id| again(&mut history, *id) == RedeliveryCause::Unexplained)
            .count();
        assert_eq!(suspects, 8);
        history.first_delivery();
        assert_eq!(again(&mut history, 201), RedeliveryCause::Unexplained);
    }

    #[tokio::test]
    async fn history_is_bounded() {
        let mut history = RedeliveryHistory::new(8);
        for id in 0..30_000 {
            history.ended(key(id));
            history.returned(key(id));
            history.returned(None);
            if id % 1_000 == 0 {
                history.lost(UNIX_EPOCH, empty(), 1);
            }
        }
        assert!(history.ended.len() <= ENDED_MEMORY && history.without_id.len() <= LONGEST_MEMORY);
        for notes in [&history.returned, &history.done] {
            assert!(notes.added.len() <= LONGEST_MEMORY && notes.counts.len() <= LONGEST_MEMORY);
        }
    }
}
