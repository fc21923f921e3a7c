//! What a message keeps when it is sent on: as a retry, a copy, a redrive or a dead letter.
//!
//! All headers travel in one frame, and both RabbitMQ and lapin close the connection over one that is
//! too large. So the headers of others have a limit here, with room left for ours and for what the
//! broker adds on the way; what does not fit is left out and named.

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable};

use super::dead::list_text;
use super::fields::{cut, encoded_size, insert, integer, long, text};
use super::{MAX_HEADERS, PERSISTENT, VERSION_HEADER, is_of_broker, is_own, is_read, with_headers};
use crate::message::Repaired;

/// The room for headers of others, as they are encoded.
///
/// A frame has 128 KiB. Ours take up to 38 KiB: an error, its causes, a history and the names of what is
/// left out, 8 KiB each, and the short ones. The broker adds an entry to `x-death` for each of at most 40
/// queues on the way, under a KiB each even where all names are as long as AMQP allows.
const MAX_CARRIED: usize = MAX_HEADERS + (1 << 10);
/// The room for properties as they came, inside the room for headers of others.
const MAX_RAW: usize = 24 << 10;
/// The room for saying what was wrong with them.
const MAX_PROBLEM: usize = 2 << 10;

const REPAIRED: &str = "tierline-repaired";
const RAW_PROPERTIES: &str = "tierline-raw-properties";
const LEFT_OUT: &str = "tierline-left-out";

/// The headers of a delivery for whoever sends it on: without those that the broker added, which would
/// make it see a cycle, without those that tell of an earlier death, and without the largest where
/// they are too much.
pub(super) fn carried_on(delivered: &BasicProperties, repaired: Option<&Repaired>) -> FieldTable {
    let mut headers = FieldTable::default();
    let mut left_out = left_out_before(delivered);
    let mut room = MAX_CARRIED;
    if let Some((problem, raw)) = repaired_before(delivered, repaired) {
        insert(&mut headers, REPAIRED, long(cut(&problem, MAX_PROBLEM)));
        let raw = &raw[..raw.len().min(MAX_RAW)];
        insert(
            &mut headers,
            RAW_PROPERTIES,
            AMQPValue::ByteArray(raw.into()),
        );
        room -= raw.len();
    }
    let given = delivered.headers().as_ref().map(FieldTable::inner);
    let mut others: Vec<_> = given
        .into_iter()
        .flatten()
        // A version that this release does not read stays, so that nobody misreads the message later. No other is
        // written: programs of version 1 refuse a 2.
        .filter(|(name, value)| match name.as_str() {
            VERSION_HEADER => integer(Some(value)).is_some_and(|version| !is_read(version)),
            name => !is_of_broker(name) && !is_own(name),
        })
        .map(|(name, value)| (name.as_str().len() + 1 + encoded_size(value), name, value))
        .collect();
    let mut size: usize = others.iter().map(|(size, ..)| size).sum();
    if size > room {
        others.sort_by_key(|(size, ..)| *size);
    }
    while size > room
        && let Some((largest, name, _)) = others.pop()
    {
        size -= largest;
        left_out.push(name.to_string());
    }
    for (_, name, value) in others {
        headers.insert(name.clone(), value.clone());
    }
    if !left_out.is_empty() {
        insert(&mut headers, LEFT_OUT, list_text(&left_out));
    }
    headers
}

/// The properties of a delivery with other headers, as they are sent on.
///
/// Without `expiration`, which would release a delayed message early, and without `user_id`: the broker
/// closes the channel over one that is not the user who publishes.
pub(super) fn sent_again(delivered: &BasicProperties, headers: FieldTable) -> BasicProperties {
    let sent = BasicProperties::default().with_delivery_mode(PERSISTENT);
    let mut sent = with_headers(sent, headers);
    if let Some(value) = delivered.content_type() {
        sent = sent.with_content_type(value.clone());
    }
    if let Some(value) = delivered.content_encoding() {
        sent = sent.with_content_encoding(value.clone());
    }
    if let Some(value) = delivered.priority() {
        sent = sent.with_priority(*value);
    }
    if let Some(value) = delivered.correlation_id() {
        sent = sent.with_correlation_id(value.clone());
    }
    if let Some(value) = delivered.reply_to() {
        sent = sent.with_reply_to(value.clone());
    }
    if let Some(value) = delivered.message_id() {
        sent = sent.with_message_id(value.clone());
    }
    if let Some(value) = delivered.timestamp() {
        sent = sent.with_timestamp(*value);
    }
    if let Some(value) = delivered.kind() {
        sent = sent.with_type(value.clone());
    }
    if let Some(value) = delivered.app_id() {
        sent = sent.with_app_id(value.clone());
    }
    if let Some(value) = delivered.cluster_id() {
        sent = sent.with_cluster_id(value.clone());
    }
    sent
}

/// What was wrong with a delivery's properties, now or when an earlier attempt arrived, and how they
/// came.
pub(crate) fn repaired_before(
    delivered: &BasicProperties,
    repaired: Option<&Repaired>,
) -> Option<(String, Vec<u8>)> {
    if let Some(repaired) = repaired {
        return Some((repaired.problem.clone(), repaired.original.clone()));
    }
    let headers = delivered.headers().as_ref()?.inner();
    let problem = headers.get(REPAIRED).and_then(text)?;
    let raw = match headers.get(RAW_PROPERTIES) {
        Some(AMQPValue::ByteArray(bytes)) => bytes.as_slice().to_vec(),
        _ => Vec::new(),
    };
    Some((problem, raw))
}

/// The names of headers that an earlier attempt had no room for.
fn left_out_before(delivered: &BasicProperties) -> Vec<String> {
    let headers = delivered.headers().as_ref().map(FieldTable::inner);
    let names = headers
        .and_then(|headers| headers.get(LEFT_OUT))
        .and_then(text);
    names
        .and_then(|names| serde_json::from_str(&names).ok())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::time::{SystemTime, UNIX_EPOCH};

    use lapin::types::ShortString;

    use super::super::fields::encoded_properties;
    use super::*;
    use crate::message::{
        DeadReason, Death, FailedAttempt, Failure, FailureKind, Message, Redriven,
    };
    use crate::task::{MAX_KEY, TaskKey};

    const FRAME: usize = 131_072;
    /// What the broker may add on the way: an entry of `x-death` for each level and the tier's queue.
    const ADDED_BY_BROKER: usize = 40 * 900 + 6 * 300;

    fn size(properties: &BasicProperties) -> usize {
        encoded_properties(properties).len()
    }

    fn longest() -> ShortString {
        "\u{1}".repeat(255).into()
    }

    /// A delivery in which everything is as long as it can be.
    fn largest(headers: FieldTable) -> BasicProperties {
        BasicProperties::default()
            .with_type(longest())
            .with_message_id(longest())
            .with_content_type(longest())
            .with_content_encoding(longest())
            .with_correlation_id(longest())
            .with_reply_to(longest())
            .with_app_id(longest())
            .with_cluster_id(longest())
            .with_headers(headers)
    }

    fn read(properties: &BasicProperties) -> Message {
        Message::from_wire(properties, Vec::new(), "normal", SystemTime::now()).unwrap()
    }

    fn dead(delivered: &BasicProperties, repaired: Option<&Repaired>) -> BasicProperties {
        let mut failure = Failure::new(FailureKind::Panic, "\u{1}".repeat(100_000));
        failure.causes = vec!["\u{1}".repeat(5_000); 100];
        failure.error_type = Some("t".repeat(1_000));
        let death = Death {
            reason: DeadReason::CrashLoop,
            failure,
            at: UNIX_EPOCH,
            worker: "w".repeat(1_000),
            version: "v".repeat(1_000),
        };
        let mut message = read(delivered);
        message.history = (1..2_000)
            .map(|attempt| FailedAttempt {
                attempt,
                at: UNIX_EPOCH,
                kind: FailureKind::TimedOut,
                error: "\u{1}".repeat(2_000),
            })
            .collect();
        message.redriven = Some(Redriven {
            from: "f".repeat(255),
            by: "b".repeat(255),
        });
        message.key = Some(TaskKey::Unique("k".repeat(MAX_KEY)));
        death.properties(delivered, Some(&message), repaired)
    }

    #[test]
    fn whatever_is_sent_on_leaves_room_for_what_the_broker_adds() {
        let repaired = Repaired {
            problem: "p".repeat(10_000),
            is_unreadable: false,
            original: vec![0xff; 130_000],
        };
        for (count, length) in [(1, 130_500), (9, 14_000), (2_000, 50), (30_000, 0)] {
            let mut headers = FieldTable::default();
            for number in 0..count {
                insert(
                    &mut headers,
                    &format!("{number:x}"),
                    long(&"v".repeat(length)),
                );
            }
            let delivered = largest(headers);
            for repaired in [None, Some(&repaired)] {
                let retried = read(&delivered).follow(&delivered, repaired);
                assert!(size(&retried) + ADDED_BY_BROKER < FRAME);
                let died = dead(&retried, repaired);
                assert!(size(&died) + ADDED_BY_BROKER < FRAME, "{}", size(&died));
                let again = read(&died).follow(&died, None);
                assert!(size(&again) + ADDED_BY_BROKER < FRAME);
            }
        }
    }

    #[test]
    fn what_the_broker_acts_on_is_not_sent_on() {
        let mut headers = FieldTable::default();
        for name in ["CC", "BCC", "x-death", "x-delay"] {
            insert(&mut headers, name, long("high"));
        }
        let delivered = largest(headers)
            .with_user_id("somebody else".into())
            .with_expiration("5".into());
        let next = read(&delivered).follow(&delivered, None);
        assert!(next.user_id().is_none() && next.expiration().is_none());
        assert_eq!(next.cluster_id(), delivered.cluster_id());
        let headers = next.headers().as_ref().unwrap().inner();
        let others = headers.keys().filter(|name| !is_own(name.as_str()));
        assert_eq!(others.count(), 0);
    }

    #[test]
    fn all_headers_that_a_publisher_may_set_are_carried_on() {
        for (count, length) in [(1, MAX_HEADERS - 10), (400, 100), (MAX_HEADERS / 11, 0)] {
            let mut headers = FieldTable::default();
            for number in 0..count {
                insert(
                    &mut headers,
                    &format!("h{number:04x}"),
                    long(&"v".repeat(length)),
                );
            }
            let delivered = largest(headers);
            let next = read(&delivered).follow(&delivered, None);
            let next = read(&next).follow(&next, None);
            assert_eq!(read(&next).headers.len(), count);
        }
    }

    #[test]
    fn what_was_left_out_or_repaired_once_is_still_known_after_more_attempts() {
        let mut headers = FieldTable::default();
        insert(&mut headers, "small", long("s"));
        insert(&mut headers, "large", long(&"l".repeat(100_000)));
        let repaired = Repaired {
            problem: "the property \"reply_to\" is not UTF-8".to_owned(),
            is_unreadable: false,
            original: vec![0xff; 100],
        };
        let delivered = largest(headers);
        let next = read(&delivered).follow(&delivered, Some(&repaired));
        let next = read(&next).follow(&next, None);
        let headers = next.headers().as_ref().unwrap().inner();
        assert!(headers.contains_key("small") && !headers.contains_key("large"));
        assert_eq!(text(&headers[LEFT_OUT]).unwrap(), r#"["large"]"#);
        let (problem, raw) = repaired_before(&next, None).unwrap();
        assert_eq!((problem, raw), (repaired.problem, repaired.original));
    }
}
