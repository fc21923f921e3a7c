//! The wire format: a message as AMQP properties and headers, the same for producers in any
//! language.
//!
//! | where | what | from a foreign producer |
//! |---|---|---|
//! | body | the payload as JSON | required |
//! | `type` | the task's name | required |
//! | `message_id` | the task's identifier, a UUID v7 unless given | drawn where it is missing |
//! | `priority` | within the tier, as the plan says | set it always |
//! | `delivery_mode` | 2, persistent | set it always |
//! | `content_type` | `application/json` | not looked at |
//! | `app_id` | the app that published | not looked at |
//! | header `tierline-version` | 1, the version of this format | 1 |
//! | header `tierline-attempt` | the attempt to come, from 1 | 1 |
//! | header `tierline-enqueued-at` | when it was first enqueued, in milliseconds since 1970, 64 bits | when it arrived |
//! | header `tierline-expires-at` | when it is no longer worth running, likewise | never |
//! | header `traceparent` | the W3C trace context | none |
//! | any other header of text | the publisher's own | |
//!
//! The AMQP property `expiration` is never set: it would release delayed messages early. Headers
//! that the broker adds (`x-…`) are not the publisher's, and are not carried on.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable, ShortString};

use super::Message;
use crate::Error;
use crate::task::TaskId;

/// The version of the format that this release writes, and the newest that it reads.
pub const VERSION: i64 = 1;

/// The room that a publisher's own headers have, names and values, in bytes. All headers of a
/// message must fit into one frame of 128 KiB, and a dead letter carries its errors there too.
pub const MAX_HEADERS: usize = 48 << 10;

/// What begins the names of headers that are ours.
const OWN: &str = "tierline-";
const PERSISTENT: u8 = 2;
/// The longest name, identifier or type that AMQP carries, in bytes.
const LONGEST: usize = 255;

impl Message {
    /// The properties that carry this message, published by `app`.
    ///
    /// # Errors
    /// [`Error::InvalidMessage`] where a name, an identifier or the headers do not fit.
    pub(crate) fn properties(&self, app: &str) -> Result<BasicProperties, Error> {
        self.check()?;
        let mut headers = FieldTable::default();
        for (name, value) in &self.headers {
            insert(
                &mut headers,
                name,
                AMQPValue::LongString(value.as_str().into()),
            );
        }
        if let Some(traceparent) = &self.traceparent {
            insert(
                &mut headers,
                "traceparent",
                AMQPValue::LongString(traceparent.as_str().into()),
            );
        }
        let number = AMQPValue::LongLongInt;
        insert(&mut headers, "tierline-version", number(VERSION));
        insert(
            &mut headers,
            "tierline-attempt",
            number(self.attempt.into()),
        );
        insert(
            &mut headers,
            "tierline-enqueued-at",
            number(milliseconds(self.enqueued_at)),
        );
        if let Some(expires_at) = self.expires_at {
            insert(
                &mut headers,
                "tierline-expires-at",
                number(milliseconds(expires_at)),
            );
        }
        Ok(BasicProperties::default()
            .with_content_type("application/json".into())
            .with_delivery_mode(PERSISTENT)
            .with_priority(self.priority)
            .with_message_id(self.id.as_str().into())
            .with_type(self.task.as_str().into())
            .with_app_id(app.into())
            .with_headers(headers))
    }

    fn check(&self) -> Result<(), Error> {
        let refuse = |problem: String| {
            Err(Error::InvalidMessage {
                task: self.task.as_str().into(),
                problem: problem.into(),
            })
        };
        if self.id.as_str().is_empty() || self.id.as_str().len() > LONGEST {
            return refuse(format!("its id must have 1 to {LONGEST} bytes"));
        }
        for name in self.headers.keys() {
            if name.is_empty() || name.len() > LONGEST {
                return refuse(format!("a header's name must have 1 to {LONGEST} bytes"));
            }
            if is_reserved(name) {
                return refuse(format!(
                    "the header {name:?} is not yours to set: choose another name"
                ));
            }
        }
        let size: usize = self
            .headers
            .iter()
            .map(|(name, value)| name.len() + value.len())
            .sum();
        let size = size + self.traceparent.as_ref().map_or(0, String::len);
        if size > MAX_HEADERS {
            return refuse(format!(
                "its headers have {size} bytes and may have {MAX_HEADERS}: put large values into the payload"
            ));
        }
        Ok(())
    }

    /// The message that arrived with these properties in `tier` at `now`.
    ///
    /// # Errors
    /// What is missing or cannot be read, in words for the dead letter that it becomes.
    pub fn from_wire(
        properties: &BasicProperties,
        payload: Vec<u8>,
        tier: &str,
        now: SystemTime,
    ) -> Result<Self, String> {
        let empty = FieldTable::default();
        let headers = properties.headers().as_ref().unwrap_or(&empty).inner();
        let version = integer(headers.get("tierline-version")).unwrap_or(VERSION);
        if version != VERSION {
            return Err(format!(
                "it is in version {version} of the wire format, and this program reads {VERSION}"
            ));
        }
        let task = properties
            .kind()
            .as_ref()
            .map(ShortString::as_str)
            .unwrap_or_default();
        if task.is_empty() {
            return Err("the property \"type\" is missing, which names the task".to_owned());
        }
        let id = properties.message_id().as_ref().map(ShortString::as_str);
        let attempt = integer(headers.get("tierline-attempt")).unwrap_or(1);
        Ok(Self {
            task: task.to_owned(),
            id: id
                .filter(|id| !id.is_empty())
                .map_or_else(TaskId::random, TaskId::from),
            payload,
            attempt: u32::try_from(attempt.max(1)).unwrap_or(u32::MAX),
            tier: tier.to_owned(),
            priority: properties.priority().unwrap_or_default(),
            enqueued_at: integer(headers.get("tierline-enqueued-at")).map_or(now, time),
            expires_at: integer(headers.get("tierline-expires-at")).map(time),
            headers: own_headers(headers),
            traceparent: headers.get("traceparent").and_then(text),
        })
    }
}

/// Headers that the publisher's own may not be confused with.
fn is_reserved(name: &str) -> bool {
    name.starts_with(OWN) || name.starts_with("x-") || name == "traceparent"
}

fn own_headers(headers: &BTreeMap<ShortString, AMQPValue>) -> BTreeMap<String, String> {
    headers
        .iter()
        .filter(|(name, _)| !is_reserved(name.as_str()))
        .filter_map(|(name, value)| Some((name.as_str().to_owned(), text(value)?)))
        .collect()
}

fn insert(headers: &mut FieldTable, name: &str, value: AMQPValue) {
    headers.insert(name.into(), value);
}

/// A number of any width: clients of other languages choose for themselves.
fn integer(value: Option<&AMQPValue>) -> Option<i64> {
    match value? {
        AMQPValue::ShortShortInt(number) => Some((*number).into()),
        AMQPValue::ShortShortUInt(number) => Some((*number).into()),
        AMQPValue::ShortInt(number) => Some((*number).into()),
        AMQPValue::ShortUInt(number) => Some((*number).into()),
        AMQPValue::LongInt(number) => Some((*number).into()),
        AMQPValue::LongUInt(number) => Some((*number).into()),
        AMQPValue::LongLongInt(number) => Some(*number),
        _ => None,
    }
}

fn text(value: &AMQPValue) -> Option<String> {
    match value {
        AMQPValue::LongString(text) => Some(String::from_utf8_lossy(text.as_bytes()).into_owned()),
        AMQPValue::ShortString(text) => Some(text.as_str().to_owned()),
        _ => None,
    }
}

fn milliseconds(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

fn time(milliseconds: i64) -> SystemTime {
    let since = Duration::from_millis(milliseconds.try_into().unwrap_or_default());
    UNIX_EPOCH.checked_add(since).unwrap_or(UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::task::PublishRequest;

    #[derive(serde::Serialize, serde::Deserialize)]
    struct Greet;

    impl crate::Task for Greet {
        const NAME: &'static str = "greet";
    }

    fn message() -> Message {
        let mut request = PublishRequest::new(&Greet).unwrap();
        request
            .headers
            .insert("tenant".to_owned(), "ada".to_owned());
        request.expires = Some(Duration::from_secs(60));
        request.traceparent = Some("00-1-2-01".to_owned());
        Message::first(request, "normal", 4, time(1_700_000_000_123)).next_attempt()
    }

    #[test]
    fn a_message_comes_out_as_it_went_in() {
        let sent = message();
        let properties = sent.properties("hotel").unwrap();
        assert_eq!(properties.delivery_mode(), &Some(PERSISTENT));
        assert!(properties.expiration().is_none());
        let payload = sent.payload.clone();
        let received = Message::from_wire(&properties, payload, "normal", SystemTime::now());
        assert_eq!(received.unwrap(), sent);
    }

    #[test]
    fn a_foreign_message_needs_a_type_and_a_body_alone() {
        let now = time(5_000);
        let properties = BasicProperties::default().with_type("greet".into());
        let read = Message::from_wire(&properties, b"null".to_vec(), "normal", now).unwrap();
        assert_eq!(
            (read.task.as_str(), read.attempt, read.enqueued_at),
            ("greet", 1, now)
        );
        assert!(!read.id.as_str().is_empty() && read.expires_at.is_none());

        let nameless = BasicProperties::default();
        let error = Message::from_wire(&nameless, Vec::new(), "normal", now).unwrap_err();
        assert!(error.contains("\"type\""), "{error}");
    }

    #[test]
    fn numbers_of_every_width_are_read_and_odd_ones_do_no_harm() {
        let read = |value: AMQPValue| {
            let mut headers = FieldTable::default();
            insert(&mut headers, "tierline-attempt", value.clone());
            insert(&mut headers, "tierline-expires-at", value);
            let properties = BasicProperties::default()
                .with_type("greet".into())
                .with_headers(headers);
            Message::from_wire(&properties, Vec::new(), "normal", UNIX_EPOCH).unwrap()
        };
        for value in [
            AMQPValue::ShortShortUInt(3),
            AMQPValue::ShortInt(3),
            AMQPValue::LongUInt(3),
            AMQPValue::LongLongInt(3),
        ] {
            assert_eq!(read(value).attempt, 3);
        }
        assert_eq!(read(AMQPValue::LongLongInt(i64::MIN)).attempt, 1);
        assert_eq!(read(AMQPValue::LongLongInt(i64::MAX)).attempt, u32::MAX);
        assert_eq!(read(AMQPValue::LongString("3".into())).attempt, 1);
    }

    #[test]
    fn a_later_version_of_the_format_is_not_misread() {
        let mut headers = FieldTable::default();
        insert(&mut headers, "tierline-version", AMQPValue::LongInt(2));
        let properties = BasicProperties::default()
            .with_type("greet".into())
            .with_headers(headers);
        let error = Message::from_wire(&properties, Vec::new(), "normal", UNIX_EPOCH).unwrap_err();
        assert!(error.contains("version 2"), "{error}");
    }
}
