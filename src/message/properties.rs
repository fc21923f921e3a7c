//! AMQP properties as bytes, in their wire form, which no release changes.

use lapin::BasicProperties;
use lapin::protocol::basic::{gen_properties, parse_properties};
use lapin::types::{AMQPValue, FieldTable};

/// Encoding fails only for headers that the protocol cannot carry, and those never arrive.
pub(crate) fn encode(properties: &BasicProperties) -> Vec<u8> {
    cookie_factory::gen_simple(gen_properties(properties), Vec::new()).unwrap_or_default()
}

/// `None` if the bytes are damaged.
pub(crate) fn decode(bytes: &[u8]) -> Option<BasicProperties> {
    let (_, properties) = parse_properties(bytes).ok()?;
    Some(properties)
}

/// How much memory the headers of a delivery take, about: far more than on the wire for small values.
pub(crate) fn memory(properties: &BasicProperties) -> usize {
    properties.headers().as_ref().map_or(0, table_memory)
}

fn table_memory(table: &FieldTable) -> usize {
    let entries = table.inner().iter();
    entries
        .map(|(name, value)| name.as_str().len() + value_memory(value))
        .sum()
}

fn value_memory(value: &AMQPValue) -> usize {
    size_of::<AMQPValue>()
        + match value {
            AMQPValue::LongString(text) => text.as_bytes().len(),
            AMQPValue::ShortString(text) => text.as_str().len(),
            AMQPValue::ByteArray(bytes) => bytes.as_slice().len(),
            AMQPValue::FieldArray(values) => values.as_slice().iter().map(value_memory).sum(),
            AMQPValue::FieldTable(table) => table_memory(table),
            _ => 0,
        }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lapin::types::{ByteArray, FieldArray};

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
