//! One tier of a group: what of it is in hand, and what is believed to be on its way.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use lapin::message::Delivery;
use tokio::time::Instant;

use super::memory::{Judgement, Memory};
use super::order::Supply;
use super::resubscribe::AFTER_A_LOSS;
use super::settle::Package;
use super::subscription::{Answer, Question, Subscription};
use crate::backoff::Backoff;
use crate::message::{Repaired, wire};

/// How long a tier must be quiet before the broker is asked whether it has more.
const QUIET: Duration = Duration::from_millis(3);
/// How long slots are held for a tier whose messages do not come, although it has some: longer than a
/// busy broker stalls.
const LONGEST_HOLD: Duration = Duration::from_millis(300);
/// How long a consumer may be quiet before it is asked after.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// How long an acknowledgement may wait for others. What is not acknowledged when a worker dies runs
/// again, so this is all that gathering can cost.
const LONGEST_GATHERING: Duration = Duration::from_millis(1);

#[derive(Debug)]
pub(super) struct Tier {
    pub(super) name: String,
    pub(super) queue: String,
    pub(super) window: u16,
    /// The channel, while there is one; and which one in succession.
    pub(super) subscription: Option<Subscription>,
    pub(super) generation: u64,
    /// Whether it must be consumed from on a connection of its own: on the one of the group it may end that
    /// for the others.
    pub(super) is_apart: bool,
    pub(super) buffer: VecDeque<Held>,
    pub(super) memory: Memory,
    outlook: Outlook,
    /// Since when something is finished and not acknowledged.
    gathering_since: Option<Instant>,
    subscribed_at: Instant,
    /// The pauses after channels that were lost.
    backoff: Backoff,
}

/// A message in hand that has not begun.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) tag: u64,
    pub(super) crashes: u32,
    pub(super) is_suspect: bool,
    pub(super) package: Arc<Package>,
    arrived: Instant,
}

/// Whether more is to be expected. After an acknowledgement the next message is a round trip away;
/// only a tier whose window was full before is believed to have one.
struct Outlook {
    expects_more: bool,
    /// When a message last came, or room for one was made.
    last_movement: Instant,
    /// Since when a slot is held for this tier.
    held_since: Option<Instant>,
    question: Option<Asked>,
    /// When to look whether a quiet consumer is still one.
    next_look: Instant,
}

/// A question that waits for its answer.
struct Asked {
    at: Instant,
    question: Question,
    /// Whether whoever waits will be woken by the answer.
    is_awaited: bool,
}

impl Tier {
    pub(super) fn new(name: String, queue: String, window: u16) -> Self {
        Self {
            name,
            queue,
            window,
            subscription: None,
            generation: 0,
            is_apart: false,
            buffer: VecDeque::new(),
            memory: Memory::new(window.into()),
            outlook: Outlook {
                expects_more: false,
                last_movement: Instant::now(),
                held_since: None,
                question: None,
                next_look: Instant::now(),
            },
            gathering_since: None,
            subscribed_at: Instant::now(),
            backoff: Backoff::new(),
        }
    }

    /// Consumes from a channel from now on.
    pub(super) fn subscribed(&mut self, subscription: Subscription) {
        self.generation += 1;
        self.subscription = Some(subscription);
        self.subscribed_at = Instant::now();
        self.memory.subscribed();
        // What waits in the queue is not known yet.
        self.outlook.expects_more = true;
        self.outlook.moved();
    }

    /// Takes in a delivery. `adopt` gives one that came again, with its tag, to a job that was begun on
    /// an earlier channel and works on the same message, and says whether there is one.
    pub(super) fn receive(
        &mut self,
        delivery: Delivery,
        repaired: Option<Repaired>,
        adopt: impl FnOnce(&Package, u64) -> bool,
    ) {
        self.outlook.moved();
        let Delivery {
            delivery_tag: tag,
            redelivered,
            properties,
            data,
            ..
        } = delivery;
        let crashes = wire::number(&properties, "tierline-crashes").unwrap_or_default();
        let mut package = Package::new(self.name.clone(), properties, data);
        package.repaired = repaired;
        let judgement = match redelivered {
            true if adopt(&package, tag) => return,
            true => self.memory.judge(&package),
            false => self.memory.first_delivery(),
        };
        if judgement == Judgement::Done {
            self.finished(self.generation, tag);
            return;
        }
        self.buffer.push_back(Held {
            tag,
            crashes: u32::try_from(crashes).unwrap_or_default(),
            is_suspect: judgement == Judgement::Suspect,
            package: Arc::new(package),
            arrived: Instant::now(),
        });
    }

    /// What the tier can give a free slot.
    pub(super) fn supply(&mut self) -> Supply {
        if !self.buffer.is_empty() {
            return Supply::Ready;
        }
        let Some(subscription) = &self.subscription else {
            return Supply::Empty;
        };
        // What is finished makes room as soon as it is acknowledged, which is about to happen.
        let room = usize::from(self.window).saturating_sub(subscription.open());
        match self.outlook.expects_more && room > 0 {
            true => Supply::Coming(room),
            false => Supply::Empty,
        }
    }

    /// All deliveries that have come are received: a full window means that there may be more.
    pub(super) fn looked(&mut self) {
        if let Some(subscription) = &self.subscription
            && subscription.unsettled() >= self.window.into()
        {
            self.outlook.expects_more = true;
        }
    }

    /// Acknowledges what is finished, or leaves it for the next turn: while more is finished with every
    /// turn, one acknowledgement can stand for many. `is_quiet`: this turn brought nothing new. Whether
    /// the next turn must follow at once.
    pub(super) fn flush(&mut self, is_quiet: bool) -> bool {
        let Some(subscription) = &mut self.subscription else {
            return false;
        };
        if !subscription.has_finished() {
            self.gathering_since = None;
            return false;
        }
        let now = Instant::now();
        let since = *self.gathering_since.get_or_insert(now);
        if !is_quiet && now < since + LONGEST_GATHERING {
            return true;
        }
        subscription.flush();
        self.gathering_since = None;
        self.outlook.moved();
        false
    }

    /// Acknowledges what is finished, and asks something. When the broker answers it has read that, and
    /// all that it had sent before is here.
    pub(super) fn settle(&mut self) -> Option<Question> {
        let subscription = self.subscription.as_mut()?;
        subscription.flush();
        self.gathering_since = None;
        Some(subscription.ask())
    }

    /// A slot is held for this tier: until when, unless something moves. `None`: it is released.
    pub(super) fn hold(&mut self) -> Option<Instant> {
        let now = Instant::now();
        let subscription = self.subscription.as_mut()?;
        let outlook = &mut self.outlook;
        if subscription.has_finished() {
            // What the slot is held for comes only after that.
            subscription.flush();
            self.gathering_since = None;
            outlook.moved();
        }
        let held_since = *outlook.held_since.get_or_insert(now);
        let latest = held_since + LONGEST_HOLD;
        if now >= latest {
            outlook.nothing_more();
            return None;
        }
        let quiet = outlook.last_movement + QUIET;
        if now < quiet {
            return Some(quiet.min(latest));
        }
        if outlook.question.is_none() {
            outlook.question = Some(Asked::now(subscription));
        }
        Some(latest)
    }

    /// Whether the broker has answered, so that held slots are to be looked at again.
    ///
    /// # Errors
    /// Why the consumer is of no use any more.
    pub(super) fn poll_answer(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), String>> {
        let Some(asked) = &mut self.outlook.question else {
            return Poll::Pending;
        };
        asked.is_awaited = true;
        let Poll::Ready(answer) = asked.question.as_mut().poll(cx) else {
            return Poll::Pending;
        };
        let has_moved = self.outlook.last_movement > asked.at;
        self.outlook.question = None;
        self.outlook.next_look = Instant::now() + LOOK_EVERY;
        match (has_moved, answer) {
            (true, _) => {}
            (false, Some(Answer { consumers: 0, .. })) => {
                // Seen where a quorum queue was deleted and declared again at once: the broker
                // cancels nothing, and sends nothing.
                return Poll::Ready(Err("the broker has forgotten the consumer".to_owned()));
            }
            (false, Some(Answer { ready: 0, .. }) | None) => self.outlook.nothing_more(),
            (false, Some(_)) => self.outlook.last_movement = Instant::now(),
        }
        Poll::Ready(Ok(()))
    }

    /// Whether a question was asked whose answer nobody waits for yet.
    pub(super) fn has_new_question(&self) -> bool {
        let asked = self.outlook.question.as_ref();
        asked.is_some_and(|asked| !asked.is_awaited)
    }

    /// Looks after a consumer that has been quiet for long; when to look again.
    pub(super) fn look_after(&mut self) -> Option<Instant> {
        let subscription = self.subscription.as_ref()?;
        let now = Instant::now();
        let outlook = &mut self.outlook;
        let due = outlook.next_look.max(outlook.last_movement + LOOK_EVERY);
        if now < due {
            return Some(due);
        }
        if outlook.question.is_none() {
            outlook.question = Some(Asked::now(subscription));
        }
        outlook.next_look = now + LOOK_EVERY;
        Some(outlook.next_look)
    }

    /// A delivery of this generation is done with. Whether it can be acknowledged: its channel is there.
    pub(super) fn finished(&mut self, generation: u64, tag: u64) -> bool {
        let subscription = self.current(generation);
        subscription.map(|it| it.finished(tag)).is_some()
    }

    /// A delivery of this generation goes back to the broker, or was lost with its channel. Should it
    /// come again, that is why.
    pub(super) fn give_back(&mut self, generation: u64, tag: u64, package: &Package) {
        let is_lost = !self.refuse(generation, tag);
        // One without an id was counted when its channel was lost.
        if package.has_id() || !is_lost {
            self.memory.returned(package.key());
        }
    }

    /// A delivery of this generation goes back to the broker, which explains nothing. Whether it does.
    pub(super) fn refuse(&mut self, generation: u64, tag: u64) -> bool {
        let subscription = self.current(generation);
        subscription.map(|it| it.give_back(tag)).is_some()
    }

    /// A job ran to its end, and nothing follows on it.
    pub(super) fn completed(&mut self, generation: u64, tag: u64, package: &Package) {
        match self.finished(generation, tag) {
            true => self.memory.ended(package.key()),
            false => self.memory.ended_unacknowledged(package.key()),
        }
    }

    /// What follows on a delivery is stored. Should it come again all the same, because its channel was
    /// lost, it is no suspect.
    pub(super) fn succeeded(&mut self, generation: u64, tag: u64, package: &Package) {
        if !self.finished(generation, tag) && package.has_id() {
            self.memory.returned(package.key());
        }
    }

    /// Gives back what has waited for a slot since before `since`.
    pub(super) fn give_back_waiting(&mut self, since: Instant) -> Vec<Held> {
        // In the order of their arrival, except for what did not get through the gate.
        let number = self.buffer.partition_point(|held| held.arrived <= since);
        let back: Vec<Held> = self.buffer.drain(..number).collect();
        for held in &back {
            self.give_back(self.generation, held.tag, &held.package);
        }
        back
    }

    /// The time at which the message arrived that has waited longest.
    pub(super) fn oldest(&self) -> Option<Instant> {
        self.buffer.front().map(|held| held.arrived)
    }

    /// The channel is gone, and with it all that was in hand. So many messages that came on it and have
    /// no id are being run.
    pub(super) fn lost(&mut self, running_without_id: usize) {
        let Some(subscription) = self.subscription.take() else {
            return;
        };
        tokio::spawn(subscription.close());
        let waiting = self.buffer.drain(..).map(|held| held.package.key());
        let now = SystemTime::now();
        self.memory.lost(now, waiting, running_without_id);
        self.outlook.nothing_more();
        self.outlook.question = None;
        self.gathering_since = None;
    }

    /// How long to wait before the channel that is lost is made again.
    pub(super) fn pause_after_loss(&mut self) -> Duration {
        let pause = self.backoff.next_after(self.subscribed_at.elapsed());
        pause.max(AFTER_A_LOSS)
    }

    /// The channel, if it is the one of this generation: a tag means nothing on another.
    fn current(&mut self, generation: u64) -> Option<&mut Subscription> {
        self.subscription
            .as_mut()
            .filter(|_| self.generation == generation)
    }
}

impl Asked {
    fn now(subscription: &Subscription) -> Self {
        Self {
            at: Instant::now(),
            question: subscription.ask(),
            is_awaited: false,
        }
    }
}

impl Outlook {
    fn moved(&mut self) {
        self.last_movement = Instant::now();
        self.held_since = None;
    }

    fn nothing_more(&mut self) {
        self.expects_more = false;
        self.held_since = None;
    }
}

impl std::fmt::Debug for Outlook {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Outlook")
            .field("expects_more", &self.expects_more)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_channel_that_is_lost_again_and_again_is_made_ever_more_seldom() {
        let mut tier = Tier::new("normal".to_owned(), "hotel.normal".to_owned(), 8);
        assert_eq!(tier.pause_after_loss(), AFTER_A_LOSS);
        let _pauses: Vec<_> = (0..4).map(|_| tier.pause_after_loss()).collect();
        assert!(tier.pause_after_loss() >= Duration::from_millis(500));
        tokio::time::advance(Duration::from_secs(60)).await;
        assert_eq!(tier.pause_after_loss(), AFTER_A_LOSS);
    }
}
