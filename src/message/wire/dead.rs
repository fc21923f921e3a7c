//! A dead letter on the wire: the message as it came, and what is known of its death, cut to fit.

use std::time::UNIX_EPOCH;

use lapin::BasicProperties;
use lapin::types::AMQPValue;
use serde::Serialize;

use super::LONGEST;
use super::carry::{carried_on, sent_again};
use super::fields::{cut, insert, integer, long, milliseconds, text, time};
use crate::message::{DeadReason, Death, Failure, FailureKind, Message, Repaired};

impl Death {
    /// The properties of a delivery as a dead letter: all that it came with, whether it can be read
    /// or not, and what is known of its death, cut to fit.
    pub(crate) fn properties(
        &self,
        delivered: &BasicProperties,
        message: Option<&Message>,
        repaired: Option<&Repaired>,
    ) -> BasicProperties {
        let mut headers = carried_on(delivered, repaired);
        if let Some(message) = message {
            message.write_own(&mut headers);
            message.write_enqueued_at(&mut headers);
        }
        let failure = &self.failure;
        insert(&mut headers, "tierline-reason", long(self.reason.as_str()));
        insert(
            &mut headers,
            "tierline-error",
            long(cut(&failure.message, MAX_ERROR)),
        );
        insert(
            &mut headers,
            "tierline-error-kind",
            long(failure.kind.as_str()),
        );
        if let Some(error_type) = &failure.error_type {
            insert(
                &mut headers,
                "tierline-error-type",
                long(cut(error_type, LONGEST)),
            );
        }
        if !failure.causes.is_empty() {
            insert(&mut headers, "tierline-causes", list_text(&failure.causes));
        }
        insert(
            &mut headers,
            "tierline-died-at",
            AMQPValue::LongLongInt(milliseconds(self.at)),
        );
        insert(
            &mut headers,
            "tierline-worker",
            long(cut(&self.worker, LONGEST)),
        );
        insert(
            &mut headers,
            "tierline-worker-version",
            long(cut(&self.version, LONGEST)),
        );
        sent_again(delivered, headers)
    }

    /// The death of a message that a worker gave up. `None` where no worker did: it was the broker.
    #[doc(hidden)]
    pub fn from_wire(properties: &BasicProperties) -> Option<Self> {
        let headers = properties.headers().as_ref()?.inner();
        let read = |name: &str| headers.get(name).and_then(text);
        let kind = read("tierline-error-kind").and_then(|kind| FailureKind::parse(&kind));
        let causes = read("tierline-causes")
            .and_then(|causes| serde_json::from_str(&causes).ok())
            .unwrap_or_default();
        Some(Self {
            reason: DeadReason::parse(&read("tierline-reason")?)?,
            failure: Failure {
                kind: kind.unwrap_or(FailureKind::Error),
                message: read("tierline-error").unwrap_or_default(),
                error_type: read("tierline-error-type"),
                causes,
            },
            at: integer(headers.get("tierline-died-at")).map_or(UNIX_EPOCH, time),
            worker: read("tierline-worker").unwrap_or_default(),
            version: read("tierline-worker-version").unwrap_or_default(),
        })
    }
}

/// The room for the message of an error; for a list of texts; and for one text in a list.
const MAX_ERROR: usize = 8 << 10;
const MAX_LIST: usize = 8 << 10;
pub(super) const MAX_IN_LIST: usize = 1 << 10;

/// The first texts, as many as fit, as a JSON list.
pub(super) fn list_text(texts: &[String]) -> AMQPValue {
    let texts = texts.iter().map(|text| cut(text, MAX_IN_LIST));
    long(&json_list(&that_fit(texts)))
}

/// The first items as JSON, as many as fit into a list.
pub(super) fn that_fit(items: impl Iterator<Item = impl Serialize>) -> Vec<String> {
    let mut room = MAX_LIST - "[]".len();
    items
        .map(|item| serde_json::to_string(&item).unwrap_or_default())
        .take_while(|item| {
            let size = item.len() + ",".len();
            let fits = size <= room;
            room = room.saturating_sub(size);
            fits
        })
        .collect()
}

pub(super) fn json_list(items: &[String]) -> String {
    format!("[{}]", items.join(","))
}

#[cfg(test)]
mod tests {
    use lapin::types::FieldTable;

    use super::super::fields::encoded_size;
    use super::*;

    #[test]
    fn a_dead_letter_tells_what_happened_and_keeps_all_that_it_came_with() {
        let mut delivered = FieldTable::default();
        insert(
            &mut delivered,
            "x-death",
            AMQPValue::FieldArray(Default::default()),
        );
        insert(&mut delivered, "flag", AMQPValue::Boolean(true));
        let delivered = BasicProperties::default()
            .with_expiration("5".into())
            .with_correlation_id("c".into())
            .with_headers(delivered);
        let mut failure = Failure::new(FailureKind::Panic, "é".repeat(MAX_ERROR));
        failure.causes = vec!["\u{1}".repeat(5_000); 100];
        let death = Death {
            reason: DeadReason::CrashLoop,
            failure,
            at: time(1_700_000_000_123),
            worker: "host:1".to_owned(),
            version: "1.2".to_owned(),
        };
        let properties = death.properties(&delivered, None, None);
        assert!(properties.expiration().is_none());
        assert!(properties.correlation_id().is_some());
        let headers = properties.headers().as_ref().unwrap().inner();
        assert!(headers.contains_key("flag") && !headers.contains_key("x-death"));
        let read = Death::from_wire(&properties).unwrap();
        assert_eq!(
            (read.reason, read.failure.kind, read.at, &read.worker),
            (death.reason, death.failure.kind, death.at, &death.worker)
        );
        assert!(read.failure.message.starts_with("éé"));
        assert!(encoded_size(&AMQPValue::FieldTable(headers.clone().into())) < 32 << 10);
        assert!(Death::from_wire(&delivered).is_none());
    }

    #[test]
    fn headers_too_large_to_fit_beside_the_error_are_left_out_by_name() {
        let mut delivered = FieldTable::default();
        insert(&mut delivered, "small", long("s"));
        insert(&mut delivered, "large", long(&"l".repeat(100_000)));
        let delivered = BasicProperties::default().with_headers(delivered);
        let death = Death {
            reason: DeadReason::Permanent,
            failure: Failure::new(FailureKind::Error, "no"),
            at: UNIX_EPOCH,
            worker: String::new(),
            version: String::new(),
        };
        let properties = death.properties(&delivered, None, None);
        let headers = properties.headers().as_ref().unwrap().inner();
        assert!(headers.contains_key("small") && !headers.contains_key("large"));
        assert_eq!(text(&headers["tierline-left-out"]).unwrap(), r#"["large"]"#);
    }
}
