//! The key that a task was published with. The database decides who holds a key; this says which it was.

use std::collections::BTreeMap;

use lapin::types::{AMQPValue, FieldTable, ShortString};

use super::fields::{cut, insert, long, text};
use crate::task::{MAX_KEY, TaskKey};

const UNIQUE: &str = "tierline-unique-key";
const IDEMPOTENCY: &str = "tierline-idempotency-key";

pub(super) fn write_key(headers: &mut FieldTable, key: &TaskKey) {
    let name = match key {
        TaskKey::Unique(_) => UNIQUE,
        TaskKey::Idempotency(_) => IDEMPOTENCY,
    };
    // Another producer may send a longer one.
    insert(headers, name, long(cut(key.as_str(), MAX_KEY)));
}

pub(super) fn read_key(headers: &BTreeMap<ShortString, AMQPValue>) -> Option<TaskKey> {
    let read = |name: &str| {
        let key = headers.get(name).and_then(text)?;
        Some(cut(&key, MAX_KEY).to_owned())
    };
    let unique = read(UNIQUE).map(TaskKey::Unique);
    unique.or_else(|| read(IDEMPOTENCY).map(TaskKey::Idempotency))
}
