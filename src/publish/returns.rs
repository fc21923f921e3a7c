//! Finds out which messages the broker returned as unroutable.
//!
//! The broker returns an unroutable message before it confirms it. lapin attaches the returns, in the
//! order in which they arrive, to the confirms that complete next, one each. The confirms of one
//! acknowledgement complete one by one and in any order, and this module may run between two of them.
//! So the return of a message may be attached to a confirm that completes later; but then the
//! message's own confirm carries the return of another unconfirmed message. As long as such a message
//! exists, every message whose confirm carried a return is held back. All others are certain.

use std::collections::HashMap;
use std::sync::Arc;

use lapin::Confirmation;
use lapin::message::BasicReturnMessage;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use tokio::sync::oneshot;

use super::confirm_channel::SendOutcome;
use super::outgoing::OutgoingMessage;
use crate::message::wire;

/// A message whose confirm has arrived, or never will.
pub(super) struct CompletedSend {
    message: Arc<OutgoingMessage>,
    sender: oneshot::Sender<SendOutcome>,
    outcome: SendOutcome,
    /// The return that lapin attached to the confirm, of this message or another one.
    attached: Option<BasicReturnMessage>,
    /// Whether its confirm had a return attached.
    has_carried: bool,
}

impl CompletedSend {
    pub(super) fn new(
        message: Arc<OutgoingMessage>,
        sender: oneshot::Sender<SendOutcome>,
        result: lapin::Result<Confirmation>,
    ) -> Self {
        let (outcome, attached) = match result {
            Ok(Confirmation::Ack(returned)) => (SendOutcome::Confirmed, returned),
            Ok(Confirmation::Nack(returned)) => (SendOutcome::Refused, returned),
            Ok(Confirmation::NotRequested) => {
                (SendOutcome::Lost("confirms are off".to_owned()), None)
            }
            Err(error) => (SendOutcome::Lost(error.to_string()), None),
        };
        Self {
            message,
            sender,
            outcome,
            has_carried: attached.is_some(),
            attached,
        }
    }

    /// A message that was not sent at all.
    pub(super) fn not_sent(
        message: Arc<OutgoingMessage>,
        sender: oneshot::Sender<SendOutcome>,
    ) -> Self {
        Self {
            message,
            sender,
            outcome: SendOutcome::NotSent,
            attached: None,
            has_carried: false,
        }
    }

    /// Whether the broker sent a nack.
    pub(super) fn is_refused(&self) -> bool {
        matches!(self.outcome, SendOutcome::Refused)
    }

    fn notify(self) {
        // The publisher may have given up, and dropped the receiver.
        let _ = self.sender.send(self.outcome);
    }
}

/// The key that most messages differ in. Ids may be missing or repeat: messages with equal keys are
/// compared by their contents, and it does not matter which of two equal messages a return belongs to.
#[derive(Debug, PartialEq, Eq, Hash)]
struct MessageKey {
    id: Option<String>,
    exchange: String,
    routing_key: String,
}

impl MessageKey {
    fn of_message(message: &OutgoingMessage) -> Self {
        Self {
            id: message.id().map(str::to_owned),
            exchange: message.exchange.clone(),
            routing_key: message.routing_key.clone(),
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
    /// Returns of messages whose own confirm has not completed.
    early: HashMap<MessageKey, Vec<BasicReturnMessage>>,
    /// Messages whose confirm carried the return of another, and which may be returned themselves.
    held: Vec<CompletedSend>,
}

impl Returns {
    /// Sends the outcomes that are certain to their publishers. `completed` are the messages whose
    /// confirms have completed since the last call.
    pub(super) fn resolve(&mut self, completed: &mut Vec<CompletedSend>) {
        for completed_send in completed.iter_mut() {
            if let Some(message) = completed_send.attached.take() {
                let returned = self.early.entry(MessageKey::of_return(&message));
                returned.or_default().push(message);
            }
        }
        if self.early.is_empty() && self.held.is_empty() {
            completed.drain(..).for_each(CompletedSend::notify);
            return;
        }
        completed.append(&mut self.held);
        let mut not_returned = Vec::new();
        for mut completed_send in completed.drain(..) {
            match self.take(&completed_send.message) {
                true => {
                    completed_send.outcome = SendOutcome::Unroutable;
                    completed_send.notify();
                }
                false => not_returned.push(completed_send),
            }
        }
        for completed_send in not_returned {
            match completed_send.has_carried && !self.early.is_empty() {
                true => self.held.push(completed_send),
                false => completed_send.notify(),
            }
        }
    }

    /// Removes the return of a message. `false`: there is none.
    fn take(&mut self, message: &OutgoingMessage) -> bool {
        let key = MessageKey::of_message(message);
        let Some(returned) = self.early.get_mut(&key) else {
            return false;
        };
        let Some(index) = returned.iter().position(|it| is_of(it, message)) else {
            return false;
        };
        returned.swap_remove(index);
        if returned.is_empty() {
            self.early.remove(&key);
        }
        true
    }
}

/// Whether a return with an equal key belongs to a message. The broker may have added headers, but none of ours, and may
/// encode integers in another width.
fn is_of(returned: &BasicReturnMessage, message: &OutgoingMessage) -> bool {
    if returned.data != message.payload() {
        return false;
    }
    let (sent, returned) = (message.properties(), &returned.properties);
    let empty = FieldTable::default();
    let wanted = sent.headers().as_ref().unwrap_or(&empty).inner();
    let headers = returned.headers().as_ref().unwrap_or(&empty).inner();
    let has = |(name, value): (&ShortString, &AMQPValue)| {
        let returned = headers.get(name.as_str());
        wire::integer(Some(value)) == wire::integer(returned)
            && wire::text(value) == returned.and_then(wire::text)
    };
    // A first attempt has no number, which its retry has.
    let is_known = |name: &ShortString| !wire::is_own(name.as_str()) || wanted.contains_key(name);
    returned.kind() == sent.kind() && wanted.iter().all(has) && headers.keys().all(is_known)
}

fn text(id: &Option<ShortString>) -> Option<String> {
    id.as_ref().map(ToString::to_string)
}

#[cfg(test)]
mod tests {
    use lapin::BasicProperties;
    use lapin::message::Delivery;

    use super::super::outgoing::Content;
    use super::*;

    fn properties(id: &str) -> BasicProperties {
        BasicProperties::default().with_message_id(id.into())
    }

    /// The properties and payload of a message.
    type Inside = (BasicProperties, &'static [u8]);

    /// The message `id`, confirmed with the return of the message `returned` attached.
    fn confirmed(
        id: &str,
        returned: Option<&str>,
    ) -> (CompletedSend, oneshot::Receiver<SendOutcome>) {
        let inside = |id| (properties(id), &b""[..]);
        confirmed_as(inside(id), returned.map(inside))
    }

    fn confirmed_as(
        sent: Inside,
        returned: Option<Inside>,
    ) -> (CompletedSend, oneshot::Receiver<SendOutcome>) {
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
        let message = OutgoingMessage {
            tier: "normal".to_owned(),
            exchange: "shop.tasks".to_owned(),
            routing_key: "normal".to_owned(),
            content: Content::Forwarded {
                payload: sent.1.to_vec(),
                properties: sent.0,
            },
        };
        let (sender, receiver) = oneshot::channel();
        let confirm = Ok(Confirmation::Ack(attached));
        let completed_send = CompletedSend::new(Arc::new(message), sender, confirm);
        (completed_send, receiver)
    }

    fn header(properties: BasicProperties, name: &str, value: i64) -> BasicProperties {
        let mut headers = properties.headers().clone().unwrap_or_default();
        headers.insert(name.into(), value.into());
        properties.with_headers(headers)
    }

    /// Two messages of which the second is returned, with the confirm of the first.
    fn only_the_second_is_returned(first: Inside, second: Inside, returned: Inside) {
        let mut returns = Returns::default();
        let (first, mut about_first) = confirmed_as(first, Some(returned));
        returns.resolve(&mut vec![first]);
        let (second, mut about_second) = confirmed_as(second, None);
        returns.resolve(&mut vec![second]);
        assert!(matches!(
            about_second.try_recv(),
            Ok(SendOutcome::Unroutable)
        ));
        assert!(matches!(about_first.try_recv(), Ok(SendOutcome::Confirmed)));
    }

    #[test]
    fn messages_with_the_same_id_or_none_are_matched_by_their_contents() {
        let none = BasicProperties::default;
        only_the_second_is_returned((none(), b"1"), (none(), b"2"), (none(), b"2"));
        let same = || properties("same");
        only_the_second_is_returned((same(), b"1"), (same(), b"2"), (same(), b"2"));
        let of = |task: &str| same().with_type(task.into());
        only_the_second_is_returned((of("dig"), b""), (of("fill"), b""), (of("fill"), b""));
        let attempt = |number| header(same(), "tierline-attempt", number);
        let returned = header(attempt(2), "timestamp_in_ms", 9);
        only_the_second_is_returned(
            (attempt(1), b""),
            (attempt(2), b""),
            (returned.clone(), b""),
        );
        only_the_second_is_returned((same(), b""), (attempt(2), b""), (returned, b""));
    }

    #[test]
    fn a_message_whose_return_comes_with_a_later_confirm_waits_for_it() {
        let mut returns = Returns::default();
        // One and two are returned; two's confirm completes first, with the return of one.
        let (two, mut about_two) = confirmed("two", Some("one"));
        let (other, mut about_other) = confirmed("other", None);
        returns.resolve(&mut vec![two, other]);
        assert!(about_two.try_recv().is_err());
        assert!(matches!(about_other.try_recv(), Ok(SendOutcome::Confirmed)));

        let (one, mut about_one) = confirmed("one", Some("two"));
        returns.resolve(&mut vec![one]);
        assert!(matches!(about_one.try_recv(), Ok(SendOutcome::Unroutable)));
        assert!(matches!(about_two.try_recv(), Ok(SendOutcome::Unroutable)));
    }

    #[test]
    fn a_message_that_carried_the_return_of_another_is_confirmed_once_that_is_known() {
        let mut returns = Returns::default();
        let (stored, mut about_stored) = confirmed("stored", Some("returned"));
        returns.resolve(&mut vec![stored]);
        assert!(about_stored.try_recv().is_err());

        let (returned, mut about_returned) = confirmed("returned", None);
        returns.resolve(&mut vec![returned]);
        assert!(matches!(
            about_returned.try_recv(),
            Ok(SendOutcome::Unroutable)
        ));
        assert!(matches!(
            about_stored.try_recv(),
            Ok(SendOutcome::Confirmed)
        ));
    }

    #[test]
    fn each_of_two_equal_messages_needs_a_return_of_its_own() {
        let mut returns = Returns::default();
        let (first, mut about_first) = confirmed("twin", Some("twin"));
        let (second, mut about_second) = confirmed("twin", Some("twin"));
        returns.resolve(&mut vec![first, second]);
        assert!(matches!(
            about_first.try_recv(),
            Ok(SendOutcome::Unroutable)
        ));
        assert!(matches!(
            about_second.try_recv(),
            Ok(SendOutcome::Unroutable)
        ));
        let (third, mut about_third) = confirmed("twin", None);
        returns.resolve(&mut vec![third]);
        assert!(matches!(about_third.try_recv(), Ok(SendOutcome::Confirmed)));
    }
}
