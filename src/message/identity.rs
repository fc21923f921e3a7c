//! Which message a delivery is, to know it again when it comes again.

use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::mem::discriminant;
use std::sync::LazyLock;

use lapin::BasicProperties;
use lapin::types::{AMQPValue, ShortString};
#[cfg(feature = "postgres")]
use sha2::{Digest, Sha256};

#[cfg(feature = "postgres")]
use super::Message;
#[cfg(feature = "postgres")]
use super::wire::milliseconds;

/// One message, as a number: its payload, its id, type, correlation id, reply address, timestamp and app
/// id, and its headers, except for those of the broker and for what is inside tables and arrays. Other
/// properties, such as the priority and the content type, are left out. A retry or a copy with another
/// crash count is another message, because tierline counts both in headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Key(u64);

/// One for the process, and not predictable: nobody can make two messages that share a number.
static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::new);

impl Key {
    /// The key of a message. `None` where it has no id: nothing then tells it from the next one.
    pub(super) fn of(properties: &BasicProperties, payload: &[u8]) -> Option<Self> {
        let id = id(properties)?;
        let mut hasher = HASHER.build_hasher();
        id.hash(&mut hasher);
        properties.kind().hash(&mut hasher);
        properties.correlation_id().hash(&mut hasher);
        properties.reply_to().hash(&mut hasher);
        properties.timestamp().hash(&mut hasher);
        properties.app_id().hash(&mut hasher);
        let headers = properties.headers().iter().flat_map(|it| it.inner());
        for (name, value) in headers {
            // The broker counts deliveries in headers of its own.
            if !name.as_str().starts_with("x-") {
                name.hash(&mut hasher);
                hash(value, &mut hasher);
            }
        }
        payload.hash(&mut hasher);
        Some(Self(hasher.finish()))
    }
}

/// A task, as a number that is the same in all processes: its app, name and id, when it was enqueued, to the
/// millisecond, and its payload. All attempts, copies and redrives of a task have it. A caller may give an id to many
/// tasks, and a publish to several programs: the time and the payload tell those apart.
///
/// The redrive count is left out. A dead letter whose attempt has committed all the same, because the answer to the
/// commit was lost, must not run again when it is redriven.
#[cfg(feature = "postgres")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CompletionKey([u8; 32]);

/// What a message lacks to be recognised.
#[cfg(feature = "postgres")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unidentified {
    NoId,
    /// Its enqueue time would be another one at each delivery.
    NoTime,
}

#[cfg(feature = "postgres")]
impl CompletionKey {
    /// The key of a message that has an id and an enqueue time of its own.
    pub(super) fn of(app: &str, message: &Message) -> Self {
        let mut hash = Sha256::new();
        let enqueued_at = milliseconds(message.enqueued_at).to_be_bytes();
        let texts = [app, &message.task, message.id.as_str()].map(str::as_bytes);
        for part in texts.into_iter().chain([&enqueued_at, &*message.payload]) {
            // The length separates the parts.
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part);
        }
        Self(hash.finalize().into())
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// The identifier that a message came with. An empty one is none.
pub(super) fn id(properties: &BasicProperties) -> Option<&str> {
    let id = properties.message_id().as_ref().map(ShortString::as_str);
    id.filter(|id| !id.is_empty())
}

/// What is inside tables and arrays is left out: no handler can read that.
fn hash(value: &AMQPValue, hasher: &mut impl Hasher) {
    discriminant(value).hash(hasher);
    match value {
        AMQPValue::Boolean(value) => value.hash(hasher),
        AMQPValue::ShortShortInt(value) => value.hash(hasher),
        AMQPValue::ShortShortUInt(value) => value.hash(hasher),
        AMQPValue::ShortInt(value) => value.hash(hasher),
        AMQPValue::ShortUInt(value) => value.hash(hasher),
        AMQPValue::LongInt(value) => value.hash(hasher),
        AMQPValue::LongUInt(value) => value.hash(hasher),
        AMQPValue::LongLongInt(value) => value.hash(hasher),
        AMQPValue::Timestamp(value) => value.hash(hasher),
        AMQPValue::Float(value) => value.to_bits().hash(hasher),
        AMQPValue::Double(value) => value.to_bits().hash(hasher),
        AMQPValue::ShortString(text) => text.hash(hasher),
        AMQPValue::LongString(text) => text.as_bytes().hash(hasher),
        AMQPValue::ByteArray(bytes) => bytes.as_slice().hash(hasher),
        AMQPValue::DecimalValue(_)
        | AMQPValue::FieldArray(_)
        | AMQPValue::FieldTable(_)
        | AMQPValue::Void => {}
    }
}

#[cfg(test)]
mod tests {
    use lapin::types::FieldTable;

    use super::*;

    fn message(id: &str, task: &str) -> BasicProperties {
        BasicProperties::default()
            .with_message_id(id.into())
            .with_type(task.into())
    }

    fn with_header(properties: BasicProperties, name: &str, value: AMQPValue) -> BasicProperties {
        let mut headers = properties.headers().clone().unwrap_or_default();
        headers.insert(name.into(), value);
        properties.with_headers(headers)
    }

    #[test]
    fn a_message_without_an_id_has_no_key() {
        let without_id = BasicProperties::default().with_type("dig".into());
        assert_eq!(Key::of(&without_id, b"{}"), None);
        assert_eq!(Key::of(&message("", "dig"), b"{}"), None);
    }

    #[test]
    fn messages_of_the_same_id_that_differ_in_anything_have_keys_of_their_own() {
        let plain = message("1", "dig");
        let key = |properties: &BasicProperties| Key::of(properties, b"{}").unwrap();
        assert_eq!(key(&plain), key(&message("1", "dig")));
        assert_ne!(key(&plain), Key::of(&plain, b"{ }").unwrap());
        assert_ne!(key(&plain), key(&message("2", "dig")));
        assert_ne!(key(&plain), key(&message("1", "fill")));
        assert_ne!(
            key(&plain),
            key(&plain.clone().with_correlation_id("c".into()))
        );
        let of_header = |name, value| key(&with_header(plain.clone(), name, value));
        let texts = ["ada", "bob"].map(|text| AMQPValue::LongString(text.into()));
        let [ada, bob] = texts.map(|text| of_header("tenant", text));
        let attempts = [1, 2].map(|number| of_header("tierline-attempt", number.into()));
        assert!(key(&plain) != ada && ada != bob && attempts[0] != attempts[1]);
        // A name and its value are not one text.
        let table: FieldTable = FieldTable::default();
        assert_eq!(key(&plain), key(&plain.clone().with_headers(table)));
    }

    #[cfg(feature = "postgres")]
    #[test]
    fn a_task_is_completed_under_one_key_in_all_its_attempts_copies_and_redrives() {
        use std::time::{Duration, SystemTime};

        use crate::task::PublishRequest;

        let now = SystemTime::UNIX_EPOCH + Duration::from_micros(1_700_000_000_123_456);
        let mut request = PublishRequest::named("dig", b"{}".to_vec());
        request.id = Some("1".into());
        let message = Message::first(request, "normal", 5, now);
        let key = CompletionKey::of("hotel", &message);
        let again = Message {
            attempt: 2,
            crashes: 1,
            life: 3,
            tier: "low".to_owned(),
            // What travels on the wire has milliseconds.
            enqueued_at: now - Duration::from_micros(456),
            ..message.clone()
        };
        assert_eq!(CompletionKey::of("hotel", &again), key);
        let others = [
            Message {
                id: "2".into(),
                ..message.clone()
            },
            Message {
                task: "dig1".into(),
                id: "".into(),
                ..message.clone()
            },
            Message {
                payload: b"{ }".to_vec(),
                ..message.clone()
            },
            Message {
                enqueued_at: now + Duration::from_millis(1),
                ..message.clone()
            },
        ];
        for other in others {
            assert_ne!(CompletionKey::of("hotel", &other), key, "{other:?}");
        }
        assert_ne!(CompletionKey::of("motel", &message), key);
    }

    #[test]
    fn a_message_that_comes_again_has_the_key_that_it_had() {
        let plain = message("1", "dig");
        for (name, count) in [("x-delivery-count", 3_i64), ("x-acquired-count", 4)] {
            let again = with_header(plain.clone(), name, count.into());
            assert_eq!(Key::of(&plain, b"{}"), Key::of(&again, b"{}"));
        }
    }
}
