//! The wire format: a message as AMQP properties and headers, the same for producers in any
//! language. This is version 2; [version 1](#version-1) is read for ever.
//!
//! Publish to the direct exchange `{app}.tasks` with the tier as routing key, and `{tier}:g2` for the second generation of
//! its queue (`tierline topology plan --json` has both for every task), with `mandatory` and a confirm: a message under a wrong key is else gone without a word.
//!
//! Most tasks need no header at all: the body, four properties, and that is 57 bytes of properties for a task whose
//! name has 25. A field that would say what its absence means is left out.
//!
//! | where | what | if it is missing |
//! |---|---|---|
//! | body | the payload as JSON | required |
//! | `type` | the task's name | required |
//! | `message_id` | the task's id, [drawn](#the-id) unless the caller gave one | drawn at each delivery, until a retry stores one: set it where a handler must know a task again |
//! | `priority` | within the tier, as the plan says | set it always |
//! | `delivery_mode` | 2, persistent | set it always |
//! | header `tierline-enqueued-at` | when it was first enqueued, in milliseconds since 1970, 64 bits | the time in the id if it has the form of a [drawn](#the-id) one, else when it arrived |
//! | header `tierline-attempt` | the attempt to come, from 1 | 1 |
//! | header `tierline-due-at` | when it falls due, if it was delayed or redriven, in milliseconds since 1970, 64 bits. A record that delays nothing: a message is delayed by publishing it to the exchange and routing key of [`delay::route`](crate::topology::delay::route) | at once |
//! | header `tierline-expires-at` | when it is no longer worth running, in the same form | never |
//! | header `traceparent` | the W3C trace context | none |
//! | header `tierline-life` | how often it was redriven | 0 |
//! | header `tierline-crashes` | how often a worker died with it | 0 |
//! | header `tierline-history` | failed attempts, JSON: `[{"attempt", "at", "kind", "error"}]` | none |
//! | headers `tierline-redriven-from`, `-by` | the dead letter it was, and who redrove it | none |
//! | headers `tierline-unique-key`, `tierline-idempotency-key` | the [key](crate::task::TaskKey) that it was published with. A record that holds no key: rows in Postgres do | none |
//! | header `tierline-limit-key` | the key that a [limit](crate::topology::Limit) with `per` counts it under | the field of the payload that the map names |
//! | header `tierline-left-out` | the names of headers that had no room when it was sent on, a JSON list | none |
//! | header `tierline-repaired` | what was wrong with its properties when they came | nothing |
//! | header `tierline-raw-properties` | those properties as they came, or the first 24 KiB of them, as bytes | |
//! | header `tierline-version` | 1 or 2, the version of this format; any other is refused. Do not write it: programs of version 1 refuse a 2 | 2 |
//! | any other header of text | the publisher's own | |
//!
//! A dead letter is the message as it came, and what became of it:
//!
//! | header | what |
//! |---|---|
//! | `tierline-reason` | why it is dead, [`DeadReason`](super::DeadReason) in words |
//! | `tierline-error` | what went wrong last |
//! | `tierline-error-kind` | in which way, [`FailureKind`](super::FailureKind) in words |
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
//!
//! # The id
//! An id that a producer draws holds the time, so `tierline-enqueued-at` can be left out. It is a UUID v7 behind a one
//! bit, a number of 129 bits, in 26 characters of Crockford's base32. In Python:
//!
//! ```python
//! def draw_id():
//!     number = 1                                               # the mark
//!     number = number << 48 | time.time_ns() // 1_000_000      # when the task is enqueued, in milliseconds
//!     number = number << 4 | 7                                 # the version of the UUID
//!     number = number << 12 | secrets.randbits(12)
//!     number = number << 2 | 2                                 # the variant of the UUID
//!     number = number << 62 | secrets.randbits(62)
//!     alphabet = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
//!     return "".join(alphabet[number >> shift & 31] for shift in range(125, -1, -5))
//! ```
//!
//! The UUID `01998b1c-7d3a-7a5e-b0c4-92f16e08d3b7` is `81K65HRZ9TF9FB1H4JY5Q0HMXQ`, of 2025-09-27 at 12:18:44.154 UTC.
//!
//! A producer that takes the id from elsewhere always writes `tierline-enqueued-at`, also if the id has this form: it
//! may have been drawn for another task, long ago. The header counts where both are there. An id counts if all of it is
//! as above, in capitals. A time in an id that is more than a day after the message arrived counts as none.
//!
//! # Version 1
//! Version 1 wrote `tierline-version` (1), `tierline-attempt` and `tierline-enqueued-at` into every message, and the properties
//! `content_type` (`application/json`) and `app_id` (the app that published), which nothing reads. Its ids were UUIDs
//! of 36 characters. If `tierline-version` is 1, the id has no time: without `tierline-enqueued-at` the message was
//! enqueued when it arrived. All else is the same, so the two versions are read alike.
//!
//! Programs of both versions may share queues and the log of dead letters. Only the time in an id is lost on version 1:
//! to such a program a task was enqueued when it arrived, and its retry or dead letter of that task says so. So a
//! program of version 2 writes `tierline-enqueued-at` into every retry, copy, redrive and dead letter.

mod carry;
mod dead;
mod enqueued;
mod fields;
mod history;
mod key;

use std::collections::BTreeMap;
use std::time::SystemTime;

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable, ShortString};

use super::{MAX_LIMIT_KEY, Message, Redriven, Repaired};
use crate::Error;
use crate::error::PublishError;
use crate::task::TaskId;
#[cfg(feature = "postgres")]
pub(crate) use carry::repaired_before;
use carry::{carried_on, sent_again};
pub(crate) use enqueued::stated_enqueued_at;
use enqueued::{ENQUEUED_AT, has_time};
use fields::{count, insert, long, time};
pub(crate) use fields::{cut, integer, milliseconds, text};
use history::{history, history_text};
use key::{read_key, write_key};

/// The version of the format that this release writes, and the newest that it reads. It reads all before.
pub const VERSION: i64 = 2;

/// The room that a publisher's own headers have, in bytes: names, values, and six for each. All headers of a
/// message must fit into one frame of 128 KiB, and a dead letter carries its errors there too.
pub const MAX_HEADERS: usize = 48 << 10;

/// What begins the names of headers that are ours.
const OWN: &str = "tierline-";
const VERSION_HEADER: &str = "tierline-version";
const ATTEMPT: &str = "tierline-attempt";
const CRASHES: &str = "tierline-crashes";
const LIMIT_KEY: &str = "tierline-limit-key";
const PERSISTENT: u8 = 2;
/// What a header of text takes in a frame beside its name and value: two lengths and a type.
const FIELD_OVERHEAD: usize = 6;
/// The longest name, identifier or type that AMQP carries, in bytes.
pub(crate) const LONGEST: usize = 255;

impl Message {
    /// The properties that publish this message, which was [checked](Self::check). `is_id_drawn` says that this publish
    /// drew its id: a caller may use an id of the same form again.
    pub(crate) fn properties(&self, is_id_drawn: bool) -> BasicProperties {
        let mut headers = FieldTable::default();
        for (name, value) in &self.headers {
            insert(&mut headers, name, long(value));
        }
        if let Some(traceparent) = &self.traceparent {
            insert(&mut headers, "traceparent", long(traceparent));
        }
        self.write_own(&mut headers);
        if !is_id_drawn || !has_time(&self.id, self.enqueued_at) {
            self.write_enqueued_at(&mut headers);
        }
        let properties = BasicProperties::default()
            .with_delivery_mode(PERSISTENT)
            .with_priority(self.priority)
            .with_message_id(self.id.as_str().into())
            .with_type(self.task.as_str().into());
        with_headers(properties, headers)
    }

    /// The properties of what follows on a delivery: what it came with, with this message's own
    /// headers in place of the old ones and without what the broker added. What has no room is left out.
    pub(crate) fn follow(
        &self,
        delivered: &BasicProperties,
        repaired: Option<&Repaired>,
    ) -> BasicProperties {
        let mut headers = carried_on(delivered, repaired);
        // A redrive has a context of its own. A context that was left out for want of room stays out.
        if let Some(traceparent) = &self.traceparent {
            let came = delivered.headers().as_ref();
            let came = came.is_some_and(|it| it.contains_key("traceparent"));
            if !came || headers.contains_key("traceparent") {
                insert(&mut headers, "traceparent", long(traceparent));
            }
        }
        self.write_own(&mut headers);
        // Also where the id has it: a program of version 1 derives no time.
        self.write_enqueued_at(&mut headers);
        sent_again(delivered, headers)
            .with_priority(self.priority)
            .with_message_id(self.id.as_str().into())
    }

    /// Writes our headers, without the enqueue time. One that would say what its absence means is left out.
    fn write_own(&self, headers: &mut FieldTable) {
        let number = AMQPValue::LongLongInt;
        if self.attempt != 1 {
            insert(headers, ATTEMPT, number(self.attempt.into()));
        }
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
        if let Some(key) = &self.key {
            write_key(headers, key);
        }
        if let Some(key) = &self.limit_key {
            insert(headers, LIMIT_KEY, long(key));
        }
    }

    fn write_enqueued_at(&self, headers: &mut FieldTable) {
        let enqueued_at = milliseconds(self.enqueued_at);
        insert(headers, ENQUEUED_AT, AMQPValue::LongLongInt(enqueued_at));
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
        if self
            .limit_key
            .as_ref()
            .is_some_and(|key| key.len() > MAX_LIMIT_KEY)
        {
            return refuse(format!("its limit_key may have {MAX_LIMIT_KEY} bytes"));
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
        let version = version(headers);
        if !is_read(version) {
            return Err(format!(
                "it is in version {version} of the wire format, and this program reads 1 to {VERSION}"
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
        let attempt = integer(headers.get(ATTEMPT)).unwrap_or(1);
        Ok(Self {
            task: task.to_owned(),
            id: id
                .filter(|id| !id.is_empty())
                .map_or_else(TaskId::random, TaskId::from),
            payload: Vec::new(),
            attempt: u32::try_from(attempt.max(1)).unwrap_or(u32::MAX),
            tier: tier.to_owned(),
            priority: properties.priority().unwrap_or_default(),
            enqueued_at: stated_enqueued_at(properties, now).unwrap_or(now),
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
            key: read_key(headers),
            limit_key: headers
                .get(LIMIT_KEY)
                .and_then(text)
                .map(|key| cut(&key, MAX_LIMIT_KEY).to_owned()),
        })
    }
}

/// How often a worker died with the message.
pub(super) fn crashes(properties: &BasicProperties) -> u32 {
    let headers = properties.headers().as_ref();
    count(headers.and_then(|headers| headers.inner().get(CRASHES)))
}

/// The version that the headers of a message are in.
fn version(headers: &BTreeMap<ShortString, AMQPValue>) -> i64 {
    integer(headers.get(VERSION_HEADER)).unwrap_or(VERSION)
}

/// Whether this release reads a version.
fn is_read(version: i64) -> bool {
    (1..=VERSION).contains(&version)
}

/// Properties with these headers. An empty table is left out: it takes four bytes.
fn with_headers(properties: BasicProperties, headers: FieldTable) -> BasicProperties {
    match headers.inner().is_empty() {
        true => properties,
        false => properties.with_headers(headers),
    }
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

/// Headers that the publisher's own may not be confused with.
fn is_reserved(name: &str) -> bool {
    is_own(name) || name == "traceparent" || is_of_broker(name)
}

/// Headers that only tierline writes.
pub(crate) fn is_own(name: &str) -> bool {
    name.starts_with(OWN)
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
mod tests;
