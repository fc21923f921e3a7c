//! Values of headers, as text and numbers.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lapin::types::{AMQPValue, FieldTable, ShortString};

/// The bytes that a value takes in a frame, its type included.
pub(super) fn encoded_size(value: &AMQPValue) -> usize {
    const LENGTH: usize = 4;
    1 + match value {
        AMQPValue::Void => 0,
        AMQPValue::Boolean(_) | AMQPValue::ShortShortInt(_) | AMQPValue::ShortShortUInt(_) => 1,
        AMQPValue::ShortInt(_) | AMQPValue::ShortUInt(_) => 2,
        AMQPValue::LongInt(_) | AMQPValue::LongUInt(_) | AMQPValue::Float(_) => 4,
        AMQPValue::DecimalValue(_) => 5,
        AMQPValue::LongLongInt(_) | AMQPValue::Double(_) | AMQPValue::Timestamp(_) => 8,
        AMQPValue::ShortString(text) => 1 + text.as_str().len(),
        AMQPValue::LongString(text) => LENGTH + text.as_bytes().len(),
        AMQPValue::ByteArray(bytes) => LENGTH + bytes.as_slice().len(),
        AMQPValue::FieldArray(values) => {
            LENGTH + values.as_slice().iter().map(encoded_size).sum::<usize>()
        }
        AMQPValue::FieldTable(table) => {
            let entries = table.inner().iter();
            let size = |(name, value): (&ShortString, &AMQPValue)| {
                1 + name.as_str().len() + encoded_size(value)
            };
            LENGTH + entries.map(size).sum::<usize>()
        }
    }
}

/// The beginning of a text, of at most so many bytes.
pub(crate) fn cut(text: &str, longest: usize) -> &str {
    &text[..text.floor_char_boundary(longest)]
}

pub(super) fn long(text: &str) -> AMQPValue {
    AMQPValue::LongString(text.into())
}

pub(super) fn count(value: Option<&AMQPValue>) -> u32 {
    u32::try_from(integer(value).unwrap_or_default().max(0)).unwrap_or(u32::MAX)
}

pub(super) fn insert(headers: &mut FieldTable, name: &str, value: AMQPValue) {
    headers.insert(name.into(), value);
}

/// A number of any width: clients of other languages choose for themselves.
pub(crate) fn integer(value: Option<&AMQPValue>) -> Option<i64> {
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

pub(crate) fn text(value: &AMQPValue) -> Option<String> {
    match value {
        AMQPValue::LongString(text) => Some(String::from_utf8_lossy(text.as_bytes()).into_owned()),
        AMQPValue::ShortString(text) => Some(text.as_str().to_owned()),
        _ => None,
    }
}

pub(crate) fn milliseconds(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

pub(super) fn time(milliseconds: i64) -> SystemTime {
    let since = Duration::from_millis(milliseconds.try_into().unwrap_or_default());
    UNIX_EPOCH.checked_add(since).unwrap_or(UNIX_EPOCH)
}

/// Properties as they are in a frame.
#[cfg(test)]
pub(super) fn encoded_properties(properties: &lapin::BasicProperties) -> Vec<u8> {
    let write = lapin::protocol::basic::gen_properties(properties);
    let written = write(Vec::new().into());
    written.map(|it| it.into_inner().0).unwrap_or_default()
}
