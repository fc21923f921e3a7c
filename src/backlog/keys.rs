//! Unique and idempotency keys: rows that are published with one, and how long a key is held.
//!
//! `tierline.publish_keyed` (migrations 205 and 304) takes keys and inserts rows in one commit. No statement frees a key when its
//! task ends: see there.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::value::RawValue;
use sha2::{Digest, Sha256};
use sqlx::Row;
use tokio::time::sleep;
use uuid::Uuid;

use super::claim::seconds;
use super::row::NewRow;
use crate::TaskId;
use crate::postgres::PgConnection;
use crate::task::KeyClaim;

/// No attempt to take a busy key begins later than this before the deadline. One that is cut off leaves unknown whether the
/// task is stored, and breaks a transaction of the caller.
pub(crate) const KEY_ATTEMPT: Duration = Duration::from_millis(250);

/// How deeply a payload may be nested whose objects are compared member by member.
const DEEPEST: u8 = 64;
/// The pause before another look at a key that somebody has locked for a moment.
const LOCKED_PAUSE: Duration = Duration::from_millis(20);

/// The key of a row that is to be inserted.
#[derive(Debug, Clone)]
pub(crate) struct RowKey {
    pub(crate) claim: KeyClaim,
    /// The id of the task, as its publisher knows it.
    task_id: String,
    /// Of an idempotency key: what the task is.
    digest: Option<Vec<u8>>,
}

/// What became of a publish.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Inserted {
    /// The row is stored.
    New,
    /// The row is stored in the place of this task, which waited.
    Replaced(TaskId),
    /// This task has the key.
    Duplicate { first: TaskId, tier: String },
}

/// Why a row with a key is not stored, unless it is a duplicate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum KeyProblem {
    /// The idempotency key was used for this task, which has another name or payload.
    Mismatch { first: TaskId },
    /// A transaction that has not ended has taken the key.
    Busy,
    /// The key is free, and the tier has no room.
    Full,
    /// The key was changed after the caller's transaction took its snapshot.
    Stale,
}

pub(crate) type KeyedInsert = Result<Inserted, KeyProblem>;

/// A row with its key, and whether its tier has room for one more.
#[derive(Debug, Clone, Copy)]
pub(super) struct KeyedRow<'r> {
    pub(super) row: &'r NewRow,
    pub(super) key: &'r RowKey,
    pub(super) has_room: bool,
}

impl<'r> KeyedRow<'r> {
    /// `None`: the row has no key.
    pub(super) fn of(row: &'r NewRow, has_room: bool) -> Option<Self> {
        let key = row.key.as_ref()?;
        Some(Self { row, key, has_room })
    }
}

/// How long a publish waits for a key that is busy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Wait {
    /// Not at all: other keys are behind it.
    No,
    /// A little: most transactions are short.
    Briefly,
    /// The same, in a transaction of the caller's, which goes on after this.
    Within,
}

/// What became of rows with keys, in order.
#[derive(Debug)]
pub(super) struct KeyedAnswer {
    pub(super) inserted: Vec<KeyedInsert>,
    /// The number of the transaction, if it has written anything.
    pub(super) transaction: Option<i64>,
}

impl RowKey {
    pub(crate) fn new(claim: KeyClaim, id: &TaskId, task: &str, payload: &[u8]) -> Self {
        let digest = claim.is_idempotency().then(|| digest(task, payload));
        Self {
            claim,
            task_id: super::row::readable(id.as_str()),
            digest,
        }
    }

    /// How many bytes it takes, about.
    pub(super) fn size(&self) -> usize {
        self.claim.key.as_str().len() + self.task_id.len() + 100
    }
}

/// Takes the keys of rows of a tier and inserts those rows whose key is free, in the transaction of the connection or
/// in one of its own. Returns what became of each, in order. Each row is decided by itself: a key that is busy neither
/// fails nor holds up the others, and does not abort the transaction.
///
/// The tier has a number ([`add_backlogs`](super::add_backlogs)). `keeping` are the tiers that keep finished tasks.
pub(super) async fn insert_keyed(
    connection: &mut PgConnection<'_>,
    (app, tier): (&str, &str),
    wait: Wait,
    keeping: &[&str],
    keyed: &[KeyedRow<'_>],
) -> Result<KeyedAnswer, sqlx::Error> {
    fn column<'r, T>(rows: &[KeyedRow<'r>], of: impl Fn(&'r NewRow, &'r RowKey) -> T) -> Vec<T> {
        rows.iter().map(|it| of(it.row, it.key)).collect()
    }
    let answers = sqlx::query(
        "SELECT entry, outcome, other_id, other_tier, txid_current_if_assigned() AS transaction \
         FROM tierline.publish_keyed($1, $2, $3, $4, $5::uuid[], $6::smallint[], $7::text[], $8::text[], $9::bytea[], \
             $10::bytea[], $11::float8[], $12::text[], $13::text[], $14::text[], $15::text[], $16::float8[], \
             $17::bytea[], $18::bool[], $19::bool[], $20::text[])",
    )
    .bind(app)
    .bind(tier)
    .bind(wait == Wait::Within)
    .bind(wait != Wait::No)
    .bind(column(keyed, |row, _| row.id))
    .bind(column(keyed, |row, _| row.rank))
    .bind(column(keyed, |row, _| row.task.as_str()))
    .bind(column(keyed, |row, _| row.name.as_deref()))
    .bind(column(keyed, |row, _| row.properties.as_deref()))
    .bind(column(keyed, |row, _| row.payload.as_slice()))
    .bind(column(keyed, |row, _| seconds(row.after)))
    .bind(column(keyed, |_, key| key.claim.key.kind()))
    .bind(column(keyed, |_, key| key.claim.key.as_str()))
    .bind(column(keyed, |_, key| key.task_id.as_str()))
    .bind(column(keyed, |_, key| key.claim.holds()))
    .bind(column(keyed, |row, key| seconds(key.claim.lasts(row.after))))
    .bind(column(keyed, |_, key| key.digest.as_deref()))
    .bind(column(keyed, |_, key| key.claim.replaces()))
    .bind(keyed.iter().map(|it| it.has_room).collect::<Vec<bool>>())
    .bind(keeping)
    .fetch_all(connection)
    .await?;
    let mut transaction = None;
    // In their order, and not in that of the keys.
    let mut inserted = vec![Err(KeyProblem::Busy); keyed.len()];
    for answer in &answers {
        transaction = transaction.or(answer.try_get("transaction")?);
        let entry: i32 = answer.try_get("entry")?;
        let index = usize::try_from(entry - 1).ok();
        let Some(place) = index.and_then(|index| inserted.get_mut(index)) else {
            continue;
        };
        let other = || -> Result<TaskId, sqlx::Error> {
            let id: String = answer.try_get("other_id")?;
            Ok(TaskId::from(id))
        };
        let outcome: &str = answer.try_get("outcome")?;
        *place = match outcome {
            "inserted" => Ok(Inserted::New),
            "replaced" => Ok(Inserted::Replaced(other()?)),
            "duplicate" => Ok(Inserted::Duplicate {
                first: other()?,
                tier: answer.try_get("other_tier")?,
            }),
            "mismatch" => Err(KeyProblem::Mismatch { first: other()? }),
            "stale" => Err(KeyProblem::Stale),
            "full" => Err(KeyProblem::Full),
            _ => Err(KeyProblem::Busy),
        };
    }
    Ok(KeyedAnswer {
        inserted,
        transaction,
    })
}

/// Holds the keys of these rows until their maximum, whatever becomes of the rows: they are about to leave Postgres. A
/// publish may have locked a key while it looks at it: this looks again, for as long as the caller waits.
pub(crate) async fn hold_keys_to_the_end(
    connection: &mut PgConnection<'_>,
    rows: &[Uuid],
) -> Result<(), sqlx::Error> {
    while !hold_unlocked_keys(connection, rows).await? {
        sleep(LOCKED_PAUSE).await;
    }
    Ok(())
}

/// Returns whether all are held now. Waiting for the lock could take as long as a transaction of a caller.
async fn hold_unlocked_keys(
    connection: &mut PgConnection<'_>,
    rows: &[Uuid],
) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar(
        "WITH held AS ( \
             UPDATE tierline.unique_keys SET holds = 'period' WHERE ctid = ANY(ARRAY( \
                 SELECT ctid FROM tierline.unique_keys WHERE row_id = ANY($1) AND holds <> 'period' \
                 FOR UPDATE SKIP LOCKED)) \
             RETURNING row_id \
         ) SELECT NOT EXISTS (SELECT FROM tierline.unique_keys \
             WHERE row_id = ANY($1) AND holds <> 'period' AND expires_at > clock_timestamp() \
                 AND row_id NOT IN (SELECT row_id FROM held))",
    )
    .bind(rows)
    .fetch_one(connection)
    .await
}

/// Removes keys that nobody holds any more because their time is over, of all apps of the database, at most `most`. Returns
/// how many.
pub(crate) async fn remove_expired_keys(
    connection: &mut PgConnection<'_>,
    most: i64,
) -> Result<u64, sqlx::Error> {
    let removed = sqlx::query(
        "DELETE FROM tierline.unique_keys WHERE ctid = ANY(ARRAY( \
             SELECT ctid FROM tierline.unique_keys WHERE expires_at < now() \
             ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED))",
    )
    .bind(most)
    .execute(connection)
    .await?;
    Ok(removed.rows_affected())
}

/// The name and the payload of a task, as a number. The order of an object's members does not count: a map in a payload
/// is encoded in another order by each process.
fn digest(task: &str, payload: &[u8]) -> Vec<u8> {
    let mut sorted = Vec::with_capacity(payload.len());
    let read = serde_json::from_slice(payload).ok();
    let written = read.and_then(|value| write_sorted(value, &mut sorted, DEEPEST));
    let mut hasher = Sha256::new();
    hasher.update((task.len() as u64).to_be_bytes());
    hasher.update(task);
    hasher.update(match written {
        Some(()) => &sorted,
        None => payload,
    });
    hasher.finalize().to_vec()
}

/// Writes a value with the members of its objects in order. Numbers stay as they are: as numbers of Rust, large ones would
/// be equal to their neighbours. `None`: it is nested too deeply.
fn write_sorted(value: &RawValue, out: &mut Vec<u8>, depth: u8) -> Option<()> {
    let (text, depth) = (value.get(), depth.checked_sub(1)?);
    match text.as_bytes().first()? {
        b'{' => {
            let members: BTreeMap<String, &RawValue> = serde_json::from_str(text).ok()?;
            out.push(b'{');
            for (name, member) in members {
                serde_json::to_writer(&mut *out, &name).ok()?;
                out.push(b':');
                write_sorted(member, out, depth)?;
                out.push(b',');
            }
            out.push(b'}');
        }
        b'[' => {
            let elements: Vec<&RawValue> = serde_json::from_str(text).ok()?;
            out.push(b'[');
            for element in elements {
                write_sorted(element, out, depth)?;
                out.push(b',');
            }
            out.push(b']');
        }
        b'"' => {
            let text: String = serde_json::from_str(text).ok()?;
            serde_json::to_writer(&mut *out, &text).ok()?;
        }
        _ => out.extend_from_slice(text.as_bytes()),
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::digest;

    #[test]
    fn a_digest_is_that_of_the_task_and_its_payload_as_json() {
        let one = digest("ship", br#"{"a": 1, "b": {"c": [1, 2], "d": 2}}"#);
        assert_eq!(one, digest("ship", br#"{"b":{"d":2,"c":[1,2]},"a":1}"#));
        for (task, payload) in [
            ("send", &br#"{"a": 1, "b": {"c": [1, 2], "d": 2}}"#[..]),
            ("ship", br#"{"a": 1, "b": {"c": [2, 1], "d": 2}}"#),
            ("ship", br#"{"a": "1", "b": {"c": [1, 2], "d": 2}}"#),
            ("ship", br#"{"a": 1, "b": {"c": [1, 2]}}"#),
            ("ship", b"no json"),
            ("ship", br#"{"a": 1.0, "b": {"c": [1, 2], "d": 2}}"#),
        ] {
            assert_ne!(one, digest(task, payload), "{task}");
        }
        assert_eq!(digest("ship", b"no json"), digest("ship", b"no json"));
        let large = |last: u8| format!("12345678901234567890123456789{last}").into_bytes();
        assert_ne!(digest("ship", &large(0)), digest("ship", &large(1)));
        assert_eq!(
            digest("ship", br#"["\u0061"]"#),
            digest("ship", br#"[ "a" ]"#)
        );
        let deep = "[".repeat(1 << 20);
        assert_eq!(
            digest("ship", deep.as_bytes()),
            digest("ship", deep.as_bytes())
        );
    }
}
