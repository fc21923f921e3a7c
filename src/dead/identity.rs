//! The identity of a dead letter.
//!
//! A message is identified by its id, task and payload: an equal id with another task or payload is another
//! message. With its redrive count (column `life`) this is the key of a row, so a message that is collected
//! again, or that died in two copies, has one row for each redrive count. Values that differ between two
//! deliveries of one message do not count: the broker's counters, the attempts, and when, where and why it
//! died.
//!
//! If an equal message dies after an operator discarded or redrove the row, it gets a row of its own:
//! nobody would look at the old one again.
//!
//! A message without an id cannot be told from an equal one, so each of its deliveries counts as a message
//! of its own. If a collector is killed after it committed such a message and before it acknowledged it,
//! the broker delivers it again, and the log has two rows. One row for all equal messages would lose
//! messages whenever a few equal ones die.

use std::time::SystemTime;

use sha2::{Digest, Sha256};

use super::fingerprint::hex;
use crate::message::wire;

/// The identity of a message that has an id.
pub(super) fn of_message(id: &str, task: Option<&str>, payload: &[u8]) -> String {
    let mut hash = Sha256::new();
    let task = task.unwrap_or_default();
    for part in [id.as_bytes(), task.as_bytes(), payload] {
        // The length separates the parts.
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    format!("message:{}", hex(&hash.finalize()))
}

/// The identity of a message that died after an equal one was discarded or redriven. It is the same however
/// often the message is collected.
pub(super) fn of_later_death(identity: &str, died_at: SystemTime) -> String {
    format!("{identity}@{}", wire::milliseconds(died_at))
}

/// The identity of a delivery without an id. It becomes the message's id when the row is redriven.
pub(super) fn drawn() -> String {
    uuid::Uuid::now_v7().to_string()
}

/// The identity that releases before migration 2 gave to a message with this id, whatever its payload.
pub(super) fn of_earlier_release(id: &str) -> String {
    match id.contains('\0') {
        true => format!("sha256:{}", hex(&Sha256::digest(id))),
        false => id.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_its_id_its_task_and_its_payload() {
        let message = of_message("1", Some("order.ship"), b"7");
        assert_eq!(message, of_message("1", Some("order.ship"), b"7"));
        for other in [
            of_message("2", Some("order.ship"), b"7"),
            of_message("1", Some("order.pay"), b"7"),
            of_message("1", None, b"7"),
            of_message("1", Some("order.ship"), b"8"),
            of_message("1", Some("order.shi"), b"p7"),
            of_message("1o", Some("rder.ship"), b"7"),
        ] {
            assert_ne!(message, other);
        }
    }

    #[test]
    fn an_identity_is_the_same_in_every_release() {
        assert_eq!(
            of_message("1", Some("order.ship"), b"7"),
            "message:95496375b19f7003d9c9c9a44469ed233b80a10fec5c9e72e71854c21ba5eae0"
        );
    }

    #[test]
    fn no_two_messages_without_an_id_are_the_same() {
        assert_ne!(drawn(), drawn());
    }
}
