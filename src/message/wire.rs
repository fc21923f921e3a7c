//! The wire format: a message as AMQP properties and headers, the same for producers in any
//! language.
//!
//! Publish to the direct exchange `{app}.tasks` with the tier as routing key (`tierline topology plan --json` has both
//! for every task), with `mandatory` and a confirm: a message under a wrong key is else gone without a word.
//!
//! | where | what | where a producer leaves it out |
//! |---|---|---|
//! | body | the payload as JSON | required |
//! | `type` | the task's name | required |
//! | `message_id` | the task's identifier, a UUID v7 unless given | drawn at each delivery, until a retry stores one: set it where a handler must know a task again |
//! | `priority` | within the tier, as the plan says | set it always |
//! | `delivery_mode` | 2, persistent | set it always |
//! | `content_type` | `application/json` | not looked at |
//! | `app_id` | the app that published | not looked at |
//! | header `tierline-version` | 1, the version of this format | 1 |
//! | header `tierline-attempt` | the attempt to come, from 1 | 1 |
//! | header `tierline-enqueued-at` | when it was first enqueued, in milliseconds since 1970, 64 bits | when it arrived |
//! | header `tierline-due-at` | when it falls due, if it was delayed or redriven, likewise | at once |
//! | header `tierline-expires-at` | when it is no longer worth running, likewise | never |
//! | header `traceparent` | the W3C trace context | none |
//! | header `tierline-life` | how often it was redriven | 0 |
//! | header `tierline-crashes` | how often a worker died with it | 0 |
//! | header `tierline-history` | failed attempts, JSON: `[{"attempt", "at", "kind", "error"}]` | none |
//! | headers `tierline-redriven-from`, `-by` | the dead letter it was, and who redrove it | none |
//! | header `tierline-left-out` | the names of headers that had no room when it was sent on, a JSON list | none |
//! | header `tierline-repaired` | what was wrong with its properties when they came | nothing |
//! | header `tierline-raw-properties` | those properties as they came, or the first 24 KiB of them, as bytes | |
//! | any other header of text | the publisher's own | |
//!
//! A dead letter is the message as it came, and what became of it:
//!
//! | header | what |
//! |---|---|
//! | `tierline-reason` | why it is dead, [`DeadReason`](super::DeadReason) in words |
//! | `tierline-error` | what went wrong last |
//! | `tierline-error-kind` | in which way, [`FailureKind`] in words |
//! | `tierline-error-type` | the type of the error, where it is known |
//! | `tierline-causes` | what led to it, a JSON list of texts, the nearest first |
//! | `tierline-died-at` | when, in milliseconds since 1970 |
//! | `tierline-worker`, `tierline-worker-version` | who gave it up |
//!
//! The AMQP property `expiration` is never set: it would release delayed messages early. Headers that the
//! broker adds or acts on (`x-…`, `CC`, `BCC`) are not the publisher's, and a retry, a copy, a redrive or a
//! dead letter does not carry them on. Do not send them: on RabbitMQ 3.10 an `x-death` that is not what the broker
//! writes stops all delays and retries of the node when it reaches a delay queue. Nor does anything carry the property `user_id`, which the broker compares with
//! the user who publishes.

mod carry;
mod dead;
mod fields;

use std::collections::BTreeMap;
use std::time::SystemTime;

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use serde::{Deserialize, Serialize};

use super::{FailedAttempt, FailureKind, Message, Redriven, Repaired};
use crate::Error;
use crate::error::PublishError;
use crate::task::TaskId;
#[cfg(feature = "postgres")]
pub(crate) use carry::repaired_before;
use carry::{carried_on, sent_again};
use dead::{MAX_IN_LIST, json_list, that_fit};
use fields::{count, cut, insert, long, time};
pub(crate) use fields::{integer, milliseconds, text};

/// The version of the format that this release writes, and the newest that it reads.
pub const VERSION: i64 = 1;

/// The room that a publisher's own headers have, in bytes: names, values, and six for each. All headers of a
/// message must fit into one frame of 128 KiB, and a dead letter carries its errors there too.
pub const MAX_HEADERS: usize = 48 << 10;

/// What begins the names of headers that are ours.
const OWN: &str = "tierline-";
const CRASHES: &str = "tierline-crashes";
const PERSISTENT: u8 = 2;
/// What a header of text takes in a frame beside its name and value: two lengths and a type.
const FIELD_OVERHEAD: usize = 6;
/// The longest name, identifier or type that AMQP carries, in bytes.
const LONGEST: usize = 255;

impl Message {
    /// The properties that carry this message, which was [checked](Self::check), published by `app`.
    pub(crate) fn properties(&self, app: &str) -> BasicProperties {
        let mut headers = FieldTable::default();
        for (name, value) in &self.headers {
            insert(&mut headers, name, long(value));
        }
        if let Some(traceparent) = &self.traceparent {
            insert(&mut headers, "traceparent", long(traceparent));
        }
        self.write_own(&mut headers);
        BasicProperties::default()
            .with_content_type("application/json".into())
            .with_delivery_mode(PERSISTENT)
            .with_priority(self.priority)
            .with_message_id(self.id.as_str().into())
            .with_type(self.task.as_str().into())
            .with_app_id(app.into())
            .with_headers(headers)
    }

    /// The properties of what follows on a delivery: what it came with, with this message's own
    /// headers in place of the old ones and without what the broker added. What has no room is left out.
    pub(crate) fn follow(
        &self,
        delivered: &BasicProperties,
        repaired: Option<&Repaired>,
    ) -> BasicProperties {
        let mut headers = carried_on(delivered, repaired);
        self.write_own(&mut headers);
        sent_again(delivered, headers)
            .with_priority(self.priority)
            .with_message_id(self.id.as_str().into())
    }

    fn write_own(&self, headers: &mut FieldTable) {
        let number = AMQPValue::LongLongInt;
        insert(headers, "tierline-version", number(VERSION));
        insert(headers, "tierline-attempt", number(self.attempt.into()));
        insert(
            headers,
            "tierline-enqueued-at",
            number(milliseconds(self.enqueued_at)),
        );
        if let Some(due_at) = self.due_at {
            insert(headers, "tierline-due-at", number(milliseconds(due_at)));
        }
        if let Some(expires_at) = self.expires_at {
            let expires_at = number(milliseconds(expires_at));
            insert(headers, "tierline-expires-at", expires_at);
        }
        if self.life > 0 {
            insert(headers, "tierline-life", number(self.life.into()));
        }
        if self.crashes > 0 {
            insert(headers, CRASHES, number(self.crashes.into()));
        }
        if !self.history.is_empty() {
            insert(headers, "tierline-history", history_text(&self.history));
        }
        if let Some(redriven) = &self.redriven {
            insert(headers, "tierline-redriven-from", long(&redriven.from));
            insert(headers, "tierline-redriven-by", long(&redriven.by));
        }
    }

    /// Whether it can be written as properties.
    ///
    /// # Errors
    /// [`PublishError::InvalidMessage`] where a name or an identifier does not fit,
    /// [`PublishError::HeadersTooLarge`] where the headers do not.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let refuse = |problem: String| {
            Err(Error::Publish(PublishError::InvalidMessage {
                task: self.task.as_str().into(),
                problem: problem.into(),
            }))
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
                    "the header {name:?} is reserved: choose another name"
                ));
            }
        }
        let size: usize = self
            .headers
            .iter()
            .map(|(name, value)| name.len() + value.len() + FIELD_OVERHEAD)
            .sum();
        let size = size + self.traceparent.as_ref().map_or(0, String::len);
        if size > MAX_HEADERS {
            return Err(Error::Publish(PublishError::HeadersTooLarge {
                task: self.task.as_str().into(),
                size: size as u64,
                limit: MAX_HEADERS as u64,
            }));
        }
        Ok(())
    }

    /// The message that arrived with these properties in `tier` at `now`.
    ///
    /// # Errors
    /// What is missing or cannot be read, in words for the dead letter that it becomes.
    #[doc(hidden)]
    pub fn from_wire(
        properties: &BasicProperties,
        payload: Vec<u8>,
        tier: &str,
        now: SystemTime,
    ) -> Result<Self, String> {
        let message = Self::envelope(properties, tier, now)?;
        Ok(Self { payload, ..message })
    }

    /// The same, without its payload.
    pub(super) fn envelope(
        properties: &BasicProperties,
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
            payload: Vec::new(),
            attempt: u32::try_from(attempt.max(1)).unwrap_or(u32::MAX),
            tier: tier.to_owned(),
            priority: properties.priority().unwrap_or_default(),
            enqueued_at: integer(headers.get("tierline-enqueued-at")).map_or(now, time),
            due_at: integer(headers.get("tierline-due-at")).map(time),
            expires_at: integer(headers.get("tierline-expires-at")).map(time),
            headers: own_headers(headers),
            traceparent: headers.get("traceparent").and_then(text),
            life: count(headers.get("tierline-life")),
            crashes: count(headers.get(CRASHES)),
            history: history(headers.get("tierline-history")),
            redriven: headers
                .get("tierline-redriven-from")
                .and_then(text)
                .map(|from| Redriven {
                    from: cut(&from, LONGEST).to_owned(),
                    by: headers
                        .get("tierline-redriven-by")
                        .and_then(text)
                        .map(|by| cut(&by, LONGEST).to_owned())
                        .unwrap_or_default(),
                }),
        })
    }
}

/// How often a worker died with the message.
pub(super) fn crashes(properties: &BasicProperties) -> u32 {
    let headers = properties.headers().as_ref();
    count(headers.and_then(|headers| headers.inner().get(CRASHES)))
}

/// When the publisher says that it enqueued the message, if it does.
pub(crate) fn stated_enqueued_at(properties: &BasicProperties) -> Option<SystemTime> {
    let headers = properties.headers().as_ref()?.inner();
    integer(headers.get("tierline-enqueued-at")).map(time)
}

/// Whether the log of dead letters keeps this header in a column of its own.
#[cfg(feature = "postgres")]
pub(crate) fn is_logged_apart(name: &str) -> bool {
    matches!(
        name,
        "tierline-error"
            | "tierline-causes"
            | "tierline-history"
            | "tierline-worker"
            | "tierline-worker-version"
    )
}

#[derive(Serialize, Deserialize)]
struct HistoryEntry {
    attempt: u32,
    at: i64,
    kind: String,
    error: String,
}

/// The latest attempts, as many as fit.
fn history_text(history: &[FailedAttempt]) -> AMQPValue {
    let latest_first = history.iter().rev().map(|failed| HistoryEntry {
        attempt: failed.attempt,
        at: milliseconds(failed.at),
        kind: failed.kind.as_str().to_owned(),
        error: cut(&failed.error, MAX_IN_LIST).to_owned(),
    });
    let mut entries = that_fit(latest_first);
    entries.reverse();
    long(&json_list(&entries))
}

fn history(value: Option<&AMQPValue>) -> Vec<FailedAttempt> {
    let entries: Option<Vec<HistoryEntry>> = value
        .and_then(text)
        .and_then(|text| serde_json::from_str(&text).ok());
    let read = |entry: HistoryEntry| FailedAttempt {
        attempt: entry.attempt,
        at: time(entry.at),
        kind: FailureKind::parse(&entry.kind).unwrap_or(FailureKind::Error),
        error: entry.error,
    };
    entries.unwrap_or_default().into_iter().map(read).collect()
}

/// Headers that the publisher's own may not be confused with.
fn is_reserved(name: &str) -> bool {
    name.starts_with(OWN) || name == "traceparent" || is_of_broker(name)
}

/// Headers that the broker writes or acts on: it sends a message with `CC` or `BCC` to more queues.
fn is_of_broker(name: &str) -> bool {
    name.starts_with("x-") || matches!(name, "CC" | "BCC")
}

fn own_headers(headers: &BTreeMap<ShortString, AMQPValue>) -> BTreeMap<String, String> {
    headers
        .iter()
        .filter(|(name, _)| !is_reserved(name.as_str()))
        .filter_map(|(name, value)| Some((name.as_str().to_owned(), text(value)?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

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
        let properties = sent.properties("hotel");
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

    #[test]
    fn an_attempt_that_follows_carries_its_history_and_no_death_headers() {
        let mut sent = message();
        sent.life = 2;
        sent.crashes = 1;
        sent.redriven = Some(Redriven {
            from: "7".to_owned(),
            by: "ada".to_owned(),
        });
        let mut headers = FieldTable::default();
        insert(
            &mut headers,
            "x-death",
            AMQPValue::FieldArray(Default::default()),
        );
        insert(&mut headers, "tierline-reason", long("permanent error"));
        insert(&mut headers, "tenant", long("ada"));
        insert(&mut headers, "traceparent", long("00-1-2-01"));
        let delivered = BasicProperties::default()
            .with_type("greet".into())
            .with_headers(headers);
        sent.history = (1..100)
            .map(|attempt| FailedAttempt {
                attempt,
                at: time(attempt.into()),
                kind: FailureKind::TimedOut,
                error: "e".repeat(200),
            })
            .collect();
        let properties = sent.follow(&delivered, None);
        let headers = properties.headers().as_ref().unwrap().inner();
        assert!(!headers.contains_key("x-death") && !headers.contains_key("tierline-reason"));
        let read = Message::from_wire(&properties, sent.payload.clone(), "normal", UNIX_EPOCH);
        let read = read.unwrap();
        assert!(read.history.len() > 10 && sent.history.ends_with(&read.history));
        assert_eq!(
            Message {
                history: sent.history.clone(),
                ..read
            },
            sent
        );
    }
}
