//! Inputs made of random numbers, near enough to real ones to get past the first check.

// `cargo bolero` builds this for an engine too, whose runtime comes with it.
#[cfg(test)]
use bolero as _;
use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldArray, FieldTable};

/// A map with one task.
pub const MAP: &str = r#"
    app = "shop"
    [tiers.normal]
    queue = "quorum"
    [groups.all]
    tiers = ["normal"]
    concurrency = 1
    [tasks]
    note = "normal"
"#;

/// A cut, a copy or an insertion in a text that was right.
pub type Edit = (u16, u16, u8, Vec<u8>);

/// A text with some edits.
pub fn edited(text: &[u8], edits: &[Edit]) -> Vec<u8> {
    let mut text = text.to_vec();
    for (from, length, kind, bytes) in edits {
        let from = usize::from(*from) % (text.len() + 1);
        let to = (from + usize::from(*length) % 64).min(text.len());
        let piece: Vec<u8> = match kind % 4 {
            // Cut it out.
            0 => Vec::new(),
            // Say it twice.
            1 => [&text[from..to], &text[from..to]].concat(),
            // Put another part of the text there.
            2 => {
                let other = usize::from(*length).wrapping_mul(31) % (text.len() + 1);
                text[other..(other + 16).min(text.len())].to_vec()
            }
            _ => bytes.clone(),
        };
        text.splice(from..to, piece);
    }
    text
}

/// A header: which name, which kind of value, and what it is made of.
pub type Header = (u8, u8, Vec<u8>);

const NAMES: [&str; 25] = [
    "tierline-version",
    "tierline-attempt",
    "tierline-enqueued-at",
    "tierline-due-at",
    "tierline-expires-at",
    "tierline-life",
    "tierline-crashes",
    "tierline-history",
    "tierline-redriven-from",
    "tierline-redriven-by",
    "tierline-reason",
    "tierline-error",
    "tierline-error-kind",
    "tierline-error-type",
    "tierline-causes",
    "tierline-died-at",
    "tierline-worker",
    "tierline-worker-version",
    "tierline-left-out",
    "tierline-limit-key",
    "traceparent",
    "x-death",
    "x-first-death-queue",
    "x-first-death-reason",
    "of-the-publisher",
];

const TEXTS: [&str; 10] = [
    "retries exhausted",
    "crash loop",
    "unknown task",
    "[{\"attempt\":1,\"at\":5,\"kind\":\"error\",\"error\":\"x\"}]",
    "[\"one\",\"two\"]",
    "{\"a\":[]}",
    "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "shop.normal",
    "rejected",
    "\u{0}NUL\u{0}",
];

/// Properties with such headers.
pub fn properties(task: &str, id: &str, headers: &[Header]) -> BasicProperties {
    let mut table = FieldTable::default();
    for (name, kind, bytes) in headers {
        let name = NAMES[usize::from(*name) % NAMES.len()];
        table.insert(name.into(), value(*kind, bytes, 3));
    }
    BasicProperties::default()
        .with_type(task.into())
        .with_message_id(id.into())
        .with_headers(table)
}

/// An id as tierline draws it, of any bits: `message::wire` says how.
pub fn drawn_id(bits: u128) -> String {
    let uuid = bits & !(0xf << 76) & !(0b11 << 62) | 7 << 76 | 0b10 << 62;
    let digit = |place: u32| match (uuid >> (5 * place)) as usize & 31 {
        first if place == 25 => first | 8,
        digit => digit,
    };
    let alphabet = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ";
    let places = (0..26).rev();
    places
        .map(|place| char::from(alphabet[digit(place)]))
        .collect()
}

fn value(kind: u8, bytes: &[u8], depth: u8) -> AMQPValue {
    let mut number = [0; 8];
    for (to, from) in number.iter_mut().zip(bytes) {
        *to = *from;
    }
    let number = i64::from_le_bytes(number);
    match kind % 12 {
        0 => AMQPValue::LongString(bytes.to_vec().into()),
        1 => AMQPValue::LongLongInt(number),
        2 => AMQPValue::LongInt(number as i32),
        3 => AMQPValue::Boolean(number % 2 == 0),
        4 => AMQPValue::Timestamp(number.unsigned_abs()),
        5 => AMQPValue::Double(f64::from_bits(number.unsigned_abs())),
        6 => AMQPValue::Void,
        7 => AMQPValue::ByteArray(bytes.to_vec().into()),
        8 | 9 => {
            let text = TEXTS[bytes.len() % TEXTS.len()];
            AMQPValue::LongString(text.into())
        }
        10 if depth > 0 => {
            let mut array = FieldArray::default();
            for (place, byte) in bytes.iter().take(4).enumerate() {
                array.push(value(*byte, &bytes[place..], depth - 1));
            }
            AMQPValue::FieldArray(array)
        }
        11 if depth > 0 => {
            let mut table = FieldTable::default();
            for (place, byte) in bytes.iter().take(4).enumerate() {
                let names = ["queue", "reason", "count", "time", "exchange"];
                let name = names[usize::from(*byte) % names.len()];
                table.insert(name.into(), value(byte / 5, &bytes[place..], depth - 1));
            }
            AMQPValue::FieldTable(table)
        }
        _ => AMQPValue::ShortShortUInt(number as u8),
    }
}
