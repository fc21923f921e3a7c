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
use lapin::types::{AMQPValue, FieldTable, ShortString};
use tokio::sync::oneshot;

use super::lane::{Answer, Letter};
use crate::message::wire;

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

/// What tells most letters apart. Ids may be missing or repeat: letters that are equal in this are told
/// apart by what is in them, and those that are equal in that too can stand for each other.
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
    /// Returns of letters whose own confirm has not completed.
    early: HashMap<Mark, Vec<BasicReturnMessage>>,
    /// Letters with a return of another, which may have been returned themselves.
    held: Vec<Ended>,
}

impl Returns {
    /// Answers those of whom it is certain what became of them. `completed` are all whose confirms
    /// have completed since the last time.
    pub(super) fn answer(&mut self, completed: &mut Vec<Ended>) {
        for ended in completed.iter_mut() {
            if let Some(message) = ended.attached.take() {
                let returned = self.early.entry(Mark::of_return(&message));
                returned.or_default().push(message);
            }
        }
        if self.early.is_empty() && self.held.is_empty() {
            completed.drain(..).for_each(Ended::answer);
            return;
        }
        completed.append(&mut self.held);
        let mut not_returned = Vec::new();
        for mut ended in completed.drain(..) {
            match self.take(&ended.letter) {
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

    /// Takes the return of a letter; whether there is one.
    fn take(&mut self, letter: &Letter) -> bool {
        let mark = Mark::of_letter(letter);
        let Some(returned) = self.early.get_mut(&mark) else {
            return false;
        };
        let Some(index) = returned.iter().position(|it| is_of(it, letter)) else {
            return false;
        };
        returned.swap_remove(index);
        if returned.is_empty() {
            self.early.remove(&mark);
        }
        true
    }
}

/// Whether a return is of a letter with its mark. The broker may have added headers, and written numbers
/// in another width.
fn is_of(returned: &BasicReturnMessage, letter: &Letter) -> bool {
    if returned.data != letter.payload() {
        return false;
    }
    let (sent, returned) = (letter.properties(), &returned.properties);
    let headers = returned.headers().as_ref().map(FieldTable::inner);
    let has = |(name, value): (&ShortString, &AMQPValue)| {
        let returned = headers.and_then(|headers| headers.get(name.as_str()));
        wire::integer(Some(value)) == wire::integer(returned)
            && wire::text(value) == returned.and_then(wire::text)
    };
    let mut wanted = sent.headers().iter().flat_map(|it| it.inner());
    returned.kind() == sent.kind() && wanted.all(has)
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

    /// What is in a letter.
    type Inside = (BasicProperties, &'static [u8]);

    /// The letter `id`, confirmed with the return of the letter `returned` attached.
    fn confirmed(id: &str, returned: Option<&str>) -> (Ended, oneshot::Receiver<Answer>) {
        let inside = |id| (properties(id), &b""[..]);
        confirmed_as(inside(id), returned.map(inside))
    }

    fn confirmed_as(sent: Inside, returned: Option<Inside>) -> (Ended, oneshot::Receiver<Answer>) {
        let attached = returned.map(|(properties, payload)| {
            let address = ("shop.tasks".into(), "normal".into());
            let mut delivery = Delivery::mock(0, address.0, address.1, false, payload.to_vec());
            delivery.properties = properties;
            BasicReturnMessage {
                delivery,
                reply_code: 312,
                reply_text: "NO_ROUTE".into(),
            }
        });
        let letter = Letter {
            exchange: "shop.tasks".to_owned(),
            routing_key: "normal".to_owned(),
            content: Content::Forwarded {
                payload: sent.1.to_vec(),
                properties: sent.0,
            },
        };
        let (answer, answered) = oneshot::channel();
        let confirm = Ok(Confirmation::Ack(attached));
        let ended = Ended::new(Arc::new(letter), answer, confirm);
        (ended, answered)
    }

    fn header(properties: BasicProperties, name: &str, value: i64) -> BasicProperties {
        let mut headers = properties.headers().clone().unwrap_or_default();
        headers.insert(name.into(), value.into());
        properties.with_headers(headers)
    }

    /// Two letters of which the second is returned, with the confirm of the first.
    fn only_the_second_is_returned(first: Inside, second: Inside, returned: Inside) {
        let mut returns = Returns::default();
        let (first, mut about_first) = confirmed_as(first, Some(returned));
        returns.answer(&mut vec![first]);
        let (second, mut about_second) = confirmed_as(second, None);
        returns.answer(&mut vec![second]);
        assert!(matches!(about_second.try_recv(), Ok(Answer::Unroutable)));
        assert!(matches!(about_first.try_recv(), Ok(Answer::Confirmed)));
    }

    #[test]
    fn letters_that_share_an_id_or_have_none_are_told_apart_by_what_is_in_them() {
        let none = BasicProperties::default;
        only_the_second_is_returned((none(), b"1"), (none(), b"2"), (none(), b"2"));
        let same = || properties("same");
        only_the_second_is_returned((same(), b"1"), (same(), b"2"), (same(), b"2"));
        let of = |task: &str| same().with_type(task.into());
        only_the_second_is_returned((of("dig"), b""), (of("fill"), b""), (of("fill"), b""));
        let attempt = |number| header(same(), "tierline-attempt", number);
        let returned = header(attempt(2), "timestamp_in_ms", 9);
        only_the_second_is_returned((attempt(1), b""), (attempt(2), b""), (returned, b""));
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
