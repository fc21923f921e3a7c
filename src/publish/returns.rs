//! Which letters were returned.
//!
//! The broker returns an unroutable message before it confirms it, and lapin gives the returns, in
//! the order in which they came, to the confirms that complete next, one each. The confirms of one
//! acknowledgement complete one by one and in any order, and we may look between two of them. So a
//! letter's own return may be with a confirm that completes later: but then its own confirm carries
//! the return of another letter that is still under way. As long as there is such a letter, what
//! carries a return is held back; the rest is certain.

use std::collections::HashMap;
use std::sync::Arc;

use lapin::Confirmation;
use lapin::message::BasicReturnMessage;
use lapin::types::ShortString;
use tokio::sync::oneshot;

use super::lane::{Answer, Letter};

/// A letter whose confirm has come, or never will.
pub(super) struct Ended {
    letter: Arc<Letter>,
    answer: oneshot::Sender<Answer>,
    outcome: Answer,
    /// The return that lapin attached, of this letter or another one.
    attached: Option<BasicReturnMessage>,
    has_carried: bool,
}

impl Ended {
    pub(super) fn new(
        letter: Arc<Letter>,
        answer: oneshot::Sender<Answer>,
        result: lapin::Result<Confirmation>,
    ) -> Self {
        let (outcome, attached) = match result {
            Ok(Confirmation::Ack(returned)) => (Answer::Confirmed, returned),
            Ok(Confirmation::Nack(returned)) => (Answer::Refused, returned),
            Ok(Confirmation::NotRequested) => (Answer::Lost("confirms are off".to_owned()), None),
            Err(error) => (Answer::Lost(error.to_string()), None),
        };
        Self {
            letter,
            answer,
            outcome,
            has_carried: attached.is_some(),
            attached,
        }
    }

    /// A letter that was not sent at all.
    pub(super) fn not_sent(letter: Arc<Letter>, answer: oneshot::Sender<Answer>) -> Self {
        Self {
            letter,
            answer,
            outcome: Answer::NotSent,
            attached: None,
            has_carried: false,
        }
    }

    /// Whether the broker said no.
    pub(super) fn is_refused(&self) -> bool {
        matches!(self.outcome, Answer::Refused)
    }

    fn answer(self) {
        // Nobody may be waiting any more: that publisher has given up.
        let _ = self.answer.send(self.outcome);
    }
}

/// What tells letters apart. Letters that are equal in this have the same fate.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Mark {
    id: Option<String>,
    exchange: String,
    routing_key: String,
}

impl Mark {
    fn of_letter(letter: &Letter) -> Self {
        Self {
            id: letter.id().map(str::to_owned),
            exchange: letter.exchange.clone(),
            routing_key: letter.routing_key.clone(),
        }
    }

    fn of_return(message: &BasicReturnMessage) -> Self {
        Self {
            id: text(message.properties.message_id()),
            exchange: message.exchange.to_string(),
            routing_key: message.routing_key.to_string(),
        }
    }
}

/// The returns and confirms of one channel.
#[derive(Default)]
pub(super) struct Returns {
    /// Returns of letters whose own confirm has not completed, with how many there are of each.
    early: HashMap<Mark, usize>,
    /// Letters with a return of another, which may have been returned themselves.
    held: Vec<Ended>,
}

impl Returns {
    /// Answers those of whom it is certain what became of them. `completed` are all whose confirms
    /// have completed since the last time.
    pub(super) fn answer(&mut self, completed: &mut Vec<Ended>) {
        for ended in completed.iter_mut() {
            if let Some(message) = ended.attached.take() {
                *self.early.entry(Mark::of_return(&message)).or_default() += 1;
            }
        }
        if self.early.is_empty() && self.held.is_empty() {
            completed.drain(..).for_each(Ended::answer);
            return;
        }
        completed.append(&mut self.held);
        let mut not_returned = Vec::new();
        for mut ended in completed.drain(..) {
            match self.take(&Mark::of_letter(&ended.letter)) {
                true => {
                    ended.outcome = Answer::Unroutable;
                    ended.answer();
                }
                false => not_returned.push(ended),
            }
        }
        for ended in not_returned {
            match ended.has_carried && !self.early.is_empty() {
                true => self.held.push(ended),
                false => ended.answer(),
            }
        }
    }

    fn take(&mut self, mark: &Mark) -> bool {
        match self.early.get_mut(mark) {
            Some(count) if *count > 1 => {
                *count -= 1;
                true
            }
            Some(_) => self.early.remove(mark).is_some(),
            None => false,
        }
    }
}

fn text(id: &Option<ShortString>) -> Option<String> {
    id.as_ref().map(ToString::to_string)
}

#[cfg(test)]
mod tests {
    use lapin::BasicProperties;
    use lapin::message::Delivery;

    use super::super::lane::Content;
    use super::*;

    fn properties(id: &str) -> BasicProperties {
        BasicProperties::default().with_message_id(id.into())
    }

    fn letter(id: &str) -> Arc<Letter> {
        Arc::new(Letter {
            exchange: "shop.tasks".to_owned(),
            routing_key: "normal".to_owned(),
            content: Content::Forwarded {
                payload: Vec::new(),
                properties: properties(id),
            },
        })
    }

    /// The letter `id`, confirmed with the return of the letter `returned` attached.
    fn confirmed(id: &str, returned: Option<&str>) -> (Ended, oneshot::Receiver<Answer>) {
        let attached = returned.map(|returned| {
            let address = ("shop.tasks".into(), "normal".into());
            let mut delivery = Delivery::mock(0, address.0, address.1, false, Vec::new());
            delivery.properties = properties(returned);
            BasicReturnMessage {
                delivery,
                reply_code: 312,
                reply_text: "NO_ROUTE".into(),
            }
        });
        let (answer, answered) = oneshot::channel();
        let ended = Ended::new(letter(id), answer, Ok(Confirmation::Ack(attached)));
        (ended, answered)
    }

    #[test]
    fn a_letter_whose_return_comes_with_a_later_confirm_waits_for_it() {
        let mut returns = Returns::default();
        // One and two are returned; two's confirm completes first, with the return of one.
        let (two, mut about_two) = confirmed("two", Some("one"));
        let (other, mut about_other) = confirmed("other", None);
        returns.answer(&mut vec![two, other]);
        assert!(about_two.try_recv().is_err());
        assert!(matches!(about_other.try_recv(), Ok(Answer::Confirmed)));

        let (one, mut about_one) = confirmed("one", Some("two"));
        returns.answer(&mut vec![one]);
        assert!(matches!(about_one.try_recv(), Ok(Answer::Unroutable)));
        assert!(matches!(about_two.try_recv(), Ok(Answer::Unroutable)));
    }

    #[test]
    fn a_letter_that_carried_the_return_of_another_is_confirmed_once_that_is_known() {
        let mut returns = Returns::default();
        let (stored, mut about_stored) = confirmed("stored", Some("returned"));
        returns.answer(&mut vec![stored]);
        assert!(about_stored.try_recv().is_err());

        let (returned, mut about_returned) = confirmed("returned", None);
        returns.answer(&mut vec![returned]);
        assert!(matches!(about_returned.try_recv(), Ok(Answer::Unroutable)));
        assert!(matches!(about_stored.try_recv(), Ok(Answer::Confirmed)));
    }

    #[test]
    fn each_of_two_equal_letters_needs_a_return_of_its_own() {
        let mut returns = Returns::default();
        let (first, mut about_first) = confirmed("twin", Some("twin"));
        let (second, mut about_second) = confirmed("twin", Some("twin"));
        returns.answer(&mut vec![first, second]);
        assert!(matches!(about_first.try_recv(), Ok(Answer::Unroutable)));
        assert!(matches!(about_second.try_recv(), Ok(Answer::Unroutable)));
        let (third, mut about_third) = confirmed("twin", None);
        returns.answer(&mut vec![third]);
        assert!(matches!(about_third.try_recv(), Ok(Answer::Confirmed)));
    }
}
