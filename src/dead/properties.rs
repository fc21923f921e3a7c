//! AMQP properties as bytes: the form that they have on the wire, which no release changes.

use lapin::BasicProperties;
use lapin::protocol::basic::{gen_properties, parse_properties};

/// Nothing but headers that the protocol cannot carry would not encode, and those never arrive.
pub(super) fn encode(properties: &BasicProperties) -> Vec<u8> {
    cookie_factory::gen_simple(gen_properties(properties), Vec::new()).unwrap_or_default()
}

/// `None` where they are damaged.
pub(super) fn decode(bytes: &[u8]) -> Option<BasicProperties> {
    let (_, properties) = parse_properties(bytes).ok()?;
    Some(properties)
}

#[cfg(test)]
mod tests {
    use super::*;
    use lapin::types::{AMQPValue, ByteArray, FieldArray, FieldTable};

    #[test]
    fn properties_come_out_as_they_went_in() {
        let mut inner = FieldTable::default();
        inner.insert("n".into(), AMQPValue::Void);
        let mut headers = FieldTable::default();
        for (name, value) in [
            ("text", AMQPValue::LongString("é\0".into())),
            ("bytes", AMQPValue::LongString(vec![0xff, 0x00].into())),
            ("raw", AMQPValue::ByteArray(ByteArray::from(vec![1, 2]))),
            ("flag", AMQPValue::Boolean(true)),
            ("big", AMQPValue::LongLongInt(i64::MIN)),
            ("time", AMQPValue::Timestamp(7)),
            (
                "list",
                AMQPValue::FieldArray(FieldArray::from(vec![AMQPValue::FieldTable(inner)])),
            ),
        ] {
            headers.insert(name.into(), value);
        }
        let properties = BasicProperties::default()
            .with_type("greet".into())
            .with_priority(3)
            .with_headers(headers);
        assert_eq!(decode(&encode(&properties)), Some(properties));
        assert_eq!(decode(b"\xff\xff"), None);
    }
}
