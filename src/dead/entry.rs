//! Makes a log row from a delivery of a dead-letter queue. All pure.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use serde::de::IgnoredAny;
use serde_json::{Value, json};

use super::fingerprint::fingerprint;
use super::{Reason, identity};
use crate::message::{Death, FailedAttempt, Message, Repaired, properties, wire};
use crate::topology::Topology;

/// The tier of dead letters for which the map has no tier. No tier of a map may have this name.
pub const UNROUTED: &str = "unrouted";

/// The highest redrive count that a row can have. A higher one comes from another producer, and a redrive
/// could not increment it.
const MOST_LIVES: i32 = 1_000_000;

/// A queue that the collector consumes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DeadLetterQueue {
    pub(super) queue: String,
    pub(super) tier: String,
    /// Whether the tier has moved to Postgres, so that the queue may be gone.
    pub(super) is_former: bool,
}

impl DeadLetterQueue {
    pub(super) fn all(topology: &Topology) -> Vec<Self> {
        let names = topology.names();
        let tiers = topology.tiers_using_broker().map(|tier| Self {
            queue: names.dead_letter_queue(&tier.name),
            tier: tier.name.clone(),
            is_former: !tier.home.is_on_broker(),
        });
        tiers.collect()
    }
}

/// A row to be written.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(super) identity: String,
    /// The identity that an earlier release may have given to the same message. Rows of that release keep
    /// it.
    pub(super) earlier_identity: Option<String>,
    pub(super) life: i32,
    pub(super) message_id: Option<String>,
    pub(super) task: Option<String>,
    pub(super) tier: String,
    pub(super) reason: Reason,
    pub(super) error: Option<String>,
    pub(super) error_kind: Option<String>,
    pub(super) error_type: Option<String>,
    pub(super) causes: String,
    pub(super) attempts: i32,
    pub(super) history: String,
    pub(super) enqueued_at: Option<SystemTime>,
    pub(super) died_at: SystemTime,
    pub(super) worker: Option<String>,
    pub(super) worker_version: Option<String>,
    pub(super) fingerprint: String,
    pub(super) payload: Vec<u8>,
    /// Whether the payload is JSON that Postgres most likely accepts.
    pub(super) is_json: bool,
    pub(super) properties: Vec<u8>,
    pub(super) headers: Option<String>,
    /// The properties as they arrived, if they had to be repaired to be parsed.
    pub(super) raw_properties: Option<Vec<u8>>,
    pub(super) redriven_from: Option<i64>,
}

impl Entry {
    /// The row for a dead letter of a tier in Postgres, with the properties that a dead letter on the broker would have.
    pub(crate) fn of_tier(
        topology: &Topology,
        tier: &str,
        sent: &BasicProperties,
        payload: Vec<u8>,
        now: SystemTime,
    ) -> Self {
        let source = DeadLetterQueue {
            queue: String::new(),
            tier: tier.to_owned(),
            is_former: false,
        };
        Self {
            // Only a collector meets rows of earlier releases.
            earlier_identity: None,
            ..Self::new(topology, &source, sent, payload, now)
        }
    }

    /// Leaves out what Postgres may refuse, one step further with each call. Whether there was anything to leave out.
    pub(crate) fn reduce(&mut self) -> bool {
        if self.is_json {
            self.without_json();
            return true;
        }
        let has_texts = self.headers.is_some();
        self.bytes_alone();
        has_texts
    }

    /// The row for a delivery that arrived from `source` at `now`.
    pub(super) fn new(
        topology: &Topology,
        source: &DeadLetterQueue,
        delivered: &BasicProperties,
        payload: Vec<u8>,
        now: SystemTime,
    ) -> Self {
        let empty = FieldTable::default();
        let table = delivered.headers().as_ref().unwrap_or(&empty).inner();
        let death = Death::from_wire(delivered);
        let broker = broker_death(topology, source, table);
        let reason = match (&death, &broker) {
            (Some(death), _) => death.reason.into(),
            (None, Some(broker)) => broker.reason,
            (None, None) => Reason::Unknown,
        };
        let died_at = match (&death, &broker) {
            (Some(death), _) if death.at != UNIX_EPOCH => death.at,
            (_, Some(broker)) => broker.at,
            _ => now,
        };
        let tier = match reason {
            Reason::Unroutable => UNROUTED,
            _ => &source.tier,
        };
        let read = Message::from_wire(delivered, Vec::new(), &source.tier, now);
        let unreadable = read.as_ref().err().cloned();
        let message = read.ok();
        let task = short(delivered.kind());
        let failure = death.as_ref().map(|death| &death.failure);
        let error = failure
            .map(|failure| failure.message.clone())
            .or(unreadable)
            .or_else(|| {
                let said = said_of(reason);
                said.map(str::to_owned)
            });
        let error_type = failure.and_then(|failure| failure.error_type.clone());
        let fingerprint = fingerprint(
            task.as_deref().unwrap_or_default(),
            error_type.as_deref(),
            error.as_deref().unwrap_or(reason.as_str()),
        );
        let enqueued_at = message
            .as_ref()
            .and_then(|_| wire::stated_enqueued_at(delivered, now));
        // The broker dead-lettered it before the attempt that its header names.
        let attempt = message.as_ref().map_or(0, |message| message.attempt);
        let attempts = attempt.saturating_sub(u32::from(death.is_none()));
        let life = message.as_ref().map_or(0, |message| message.life);
        let id = short(delivered.message_id()).filter(|id| !id.is_empty());
        let identity = match &id {
            Some(id) => identity::of_message(id, task.as_deref(), &payload),
            None => identity::drawn(),
        };
        Self {
            identity,
            earlier_identity: id.as_deref().map(identity::of_earlier_release),
            life: i32::try_from(life)
                .ok()
                .filter(|life| *life <= MOST_LIVES)
                .unwrap_or(0),
            message_id: id.as_deref().map(readable),
            task: task.as_deref().map(readable),
            tier: tier.to_owned(),
            reason,
            error: error.as_deref().map(readable),
            error_kind: failure.map(|failure| failure.kind.as_str().to_owned()),
            error_type: error_type.as_deref().map(readable),
            causes: json_text(&json!(failure.map_or(&[][..], |failure| &failure.causes))),
            attempts: i32::try_from(attempts).unwrap_or(i32::MAX),
            history: history(message.as_ref().map_or(&[], |message| &message.history)),
            enqueued_at,
            died_at,
            worker: death.as_ref().map(|death| readable(&death.worker)),
            worker_version: death.as_ref().map(|death| readable(&death.version)),
            fingerprint,
            is_json: is_accepted_json(&payload),
            payload,
            properties: properties::encode(delivered),
            headers: Some(json_text(&json!(shown_headers(table)))),
            raw_properties: None,
            redriven_from: message
                .and_then(|message| message.redriven)
                .and_then(|redriven| redriven.from.parse().ok()),
        }
    }

    /// Adds the problem of malformed properties, found by the collector or by a worker.
    pub(super) fn repaired(&mut self, delivered: &BasicProperties, repaired: Option<&Repaired>) {
        let Some((problem, original)) = wire::repaired_before(delivered, repaired) else {
            return;
        };
        self.raw_properties = (!original.is_empty()).then_some(original);
        let problem = readable(&problem);
        self.error = Some(match self.error.take() {
            Some(error) if error.contains(&problem) => error,
            Some(error) => format!("{error}; its properties are malformed: {problem}"),
            None => format!("its properties are malformed: {problem}"),
        });
    }

    /// Drops the JSON columns, which Postgres may refuse.
    pub(super) fn without_json(&mut self) {
        self.is_json = false;
    }

    /// Keeps only bytes, which Postgres always accepts.
    pub(super) fn bytes_alone(&mut self) {
        self.without_json();
        self.headers = None;
        self.earlier_identity = None;
        self.message_id = None;
        self.task = None;
        self.error = Some("Postgres refused its texts: see payload and properties".to_owned());
        self.error_kind = None;
        self.error_type = None;
        self.causes = "[]".to_owned();
        self.history = "[]".to_owned();
        self.worker = None;
        self.worker_version = None;
    }
}

/// The broker's record of a death that no worker caused.
struct BrokerDeath {
    reason: Reason,
    at: SystemTime,
}

/// Reads the `x-death` entry of the tier's queue. Entries of delay queues, which the message may have
/// passed before, do not say why it died.
fn broker_death(
    topology: &Topology,
    source: &DeadLetterQueue,
    headers: &BTreeMap<ShortString, AMQPValue>,
) -> Option<BrokerDeath> {
    let Some(AMQPValue::FieldArray(deaths)) = headers.get("x-death") else {
        return None;
    };
    let tier = topology.tier(&source.tier);
    deaths.as_slice().iter().find_map(|death| {
        let AMQPValue::FieldTable(death) = death else {
            return None;
        };
        let read = |name: &str| death.inner().get(name);
        let queue = read("queue").and_then(wire::text)?;
        if let Some(tier) = tier
            && topology
                .names()
                .generation_number(&tier.name, &queue)
                .is_none()
        {
            return None;
        }
        let at = match read("time") {
            Some(AMQPValue::Timestamp(seconds)) => {
                UNIX_EPOCH.checked_add(Duration::from_secs(*seconds))?
            }
            _ => return None,
        };
        let reason = read("reason").and_then(wire::text).unwrap_or_default();
        Some(BrokerDeath {
            reason: Reason::of_broker(&reason),
            at,
        })
    })
}

/// The error text if no worker recorded one. Fingerprints contain these texts, so they never change.
fn said_of(reason: Reason) -> Option<&'static str> {
    Some(match reason {
        Reason::Rejected => "a consumer rejected it without requeueing it",
        Reason::Expired => "it waited in its queue for longer than the queue allows",
        Reason::DeliveryLimit => "it was delivered too often without an answer",
        Reason::MaxLength => "its queue was too long",
        Reason::Unknown => "nobody says why it is here",
        _ => return None,
    })
}

fn short(text: &Option<ShortString>) -> Option<String> {
    text.as_ref().map(|text| text.as_str().to_owned())
}

/// A text that Postgres accepts: without NUL.
fn readable(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}

/// JSON that Postgres accepts.
fn json_text(value: &Value) -> String {
    without_nul(value.to_string())
}

fn without_nul(json: String) -> String {
    // After another backslash this is plain text, which is then changed without need. The result is only
    // for display.
    match json.contains("\\u0000") {
        true => json.replace("\\u0000", "\\ufffd"),
        false => json,
    }
}

/// Whether the payload is JSON that Postgres most likely accepts.
fn is_accepted_json(payload: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(payload) else {
        return false;
    };
    serde_json::from_str::<IgnoredAny>(text).is_ok() && !text.contains("\\u0000")
}

/// The headers for people: texts and numbers as they are, other values described.
fn shown_headers(headers: &BTreeMap<ShortString, AMQPValue>) -> BTreeMap<String, Value> {
    let shown = headers
        .iter()
        .filter(|(name, _)| !wire::is_logged_apart(name.as_str()));
    shown
        .map(|(name, value)| (name.as_str().to_owned(), shown_value(value, 4)))
        .collect()
}

fn shown_value(value: &AMQPValue, depth: u8) -> Value {
    if let Some(text) = wire::text(value) {
        return Value::String(text);
    }
    if let Some(number) = wire::integer(Some(value)) {
        return json!(number);
    }
    match value {
        AMQPValue::Boolean(flag) => json!(flag),
        AMQPValue::Float(number) => json!(number),
        AMQPValue::Double(number) => json!(number),
        AMQPValue::Timestamp(seconds) => json!(seconds),
        AMQPValue::Void => Value::Null,
        AMQPValue::ByteArray(bytes) => json!(format!("{} bytes", bytes.as_slice().len())),
        AMQPValue::FieldArray(values) if depth > 0 => {
            let values = values.as_slice().iter();
            values.map(|value| shown_value(value, depth - 1)).collect()
        }
        AMQPValue::FieldTable(table) if depth > 0 => {
            let entries = table.inner().iter();
            let shown = |(name, value): (&ShortString, &AMQPValue)| {
                (name.as_str().to_owned(), shown_value(value, depth - 1))
            };
            Value::Object(entries.map(shown).collect())
        }
        _ => json!("…"),
    }
}

fn history(history: &[FailedAttempt]) -> String {
    let attempts = history.iter().map(|failed| {
        json!({
            "attempt": failed.attempt,
            "at": wire::milliseconds(failed.at),
            "kind": failed.kind.as_str(),
            "error": failed.error,
        })
    });
    json_text(&Value::Array(attempts.collect()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use lapin::types::FieldArray;

    fn topology() -> Topology {
        Topology::parse(
            r#"
            app = "shop"
            [tiers.normal]
            queue = "quorum"
            [groups.all]
            tiers = ["normal"]
            concurrency = 1
            [tasks]
            "order.pay" = "normal"
            "#,
        )
        .unwrap()
    }

    fn entry(properties: &BasicProperties, payload: &[u8]) -> Entry {
        let source = &DeadLetterQueue::all(&topology())[0];
        Entry::new(
            &topology(),
            source,
            properties,
            payload.to_vec(),
            UNIX_EPOCH,
        )
    }

    fn death(queue: &str, reason: &str) -> AMQPValue {
        let mut table = FieldTable::default();
        table.insert("queue".into(), AMQPValue::LongString(queue.into()));
        table.insert("reason".into(), AMQPValue::LongString(reason.into()));
        table.insert("time".into(), AMQPValue::Timestamp(1_700_000_000));
        AMQPValue::FieldTable(table)
    }

    fn died(deaths: Vec<AMQPValue>) -> BasicProperties {
        let mut headers = FieldTable::default();
        let deaths = AMQPValue::FieldArray(FieldArray::from(deaths));
        headers.insert("x-death".into(), deaths);
        BasicProperties::default()
            .with_type("order.pay".into())
            .with_headers(headers)
    }

    #[test]
    fn what_was_delayed_and_then_rejected_was_rejected() {
        let properties = died(vec![
            death("shop.delay.normal.03", "expired"),
            death("shop.normal.g2", "delivery_limit"),
        ]);
        let entry = entry(&properties, b"1");
        assert_eq!(entry.reason, Reason::DeliveryLimit);
        assert_eq!(
            entry.died_at,
            UNIX_EPOCH + Duration::from_secs(1_700_000_000)
        );
    }

    #[test]
    fn a_message_is_known_again_however_it_died_and_is_delivered() {
        let of_id = |id: &str, deaths| died(deaths).with_message_id(id.into());
        let once = of_id("7", vec![death("shop.normal", "rejected")]);
        let mut headers = once.headers().clone().unwrap();
        headers.insert("x-delivery-count".into(), AMQPValue::LongInt(3));
        headers.insert("tierline-died-at".into(), AMQPValue::LongLongInt(7));
        let again = once.clone().with_headers(headers).with_priority(9);
        let elsewhere = of_id("7", vec![death("shop.normal", "expired")]);
        let identity = |properties| entry(properties, b"1").identity;
        assert_eq!(identity(&once), identity(&again));
        assert_eq!(identity(&once), identity(&elsewhere));
        assert_ne!(identity(&once), entry(&once, b"2").identity);
        let other_task = once.clone().with_type("order.ship".into());
        assert_ne!(identity(&once), identity(&other_task));
    }

    #[test]
    fn messages_without_an_id_are_never_the_same() {
        let once = died(vec![death("shop.normal", "rejected")]);
        for without in [&once, &once.clone().with_message_id("".into())] {
            let (one, other) = (entry(without, b"1"), entry(without, b"1"));
            assert_ne!(one.identity, other.identity);
            assert_eq!((one.message_id, one.earlier_identity), (None, None));
        }
    }

    #[test]
    fn what_is_no_json_for_postgres_is_kept_as_bytes() {
        for (payload, is_json) in [
            (&b"{\"a\": 1}"[..], true),
            (b"\xff", false),
            (b"{", false),
            (b"\"\\u0000\"", false),
        ] {
            let entry = entry(&BasicProperties::default(), payload);
            assert_eq!(entry.is_json, is_json);
            assert_eq!(entry.payload, payload);
        }
    }
}
