//! Writes rows to the log: many in one statement, each of them once.

use std::time::Duration;

use sqlx::Row;

use super::entry::Entry;
use super::identity;
use crate::Error;
use crate::error::DatabaseError;
use crate::postgres::{Database, PgConnection, STATEMENT_LIMIT, Time};

/// From this many bytes on, a connection drops its buffer after the statement.
const LARGE: usize = 1 << 20;

/// How many rows a batch added.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Written {
    /// New rows.
    pub(super) new: u64,
    /// Rows that the log already had.
    pub(super) repeated: u64,
    /// Those of the new rows that no worker has made dead letters of.
    pub(super) by_broker: Vec<DeadByBroker>,
}

/// Dead letters that the broker has made by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DeadByBroker {
    pub(super) task: String,
    pub(super) tier: String,
    /// Whether they had waited for too long.
    pub(super) has_expired: bool,
    pub(super) count: u64,
}

impl Written {
    fn add(&mut self, other: Self) {
        self.new += other.new;
        self.repeated += other.repeated;
        self.by_broker.extend(other.by_broker);
    }
}

/// Writes the rows. `Ok` means that every one of them is committed, now or before.
///
/// A row that Postgres refuses does not affect the others: the batch is halved until that row is alone. It is
/// then written without its JSON, and if that fails too, as bytes alone.
pub(super) async fn write(
    database: &Database,
    app: &str,
    entries: &[Entry],
) -> Result<Written, Error> {
    let mut written = Written::default();
    let mut batches = vec![entries];
    while let Some(batch) = batches.pop() {
        let more = match write_at_once(database, app, batch).await {
            Err(Error::Database(DatabaseError::Refused { .. })) if batch.len() > 1 => {
                let (first, second) = batch.split_at(batch.len() / 2);
                batches.extend([second, first]);
                continue;
            }
            Err(Error::Database(DatabaseError::Refused { cause, .. })) => {
                tracing::warn!(%cause, "Postgres refuses a dead letter; writing it without its JSON");
                write_less(database, app, batch).await?
            }
            written => written?,
        };
        written.add(more);
    }
    Ok(written)
}

/// Writes the row of one dead letter.
pub(crate) async fn write_entry(database: &Database, app: &str, entry: Entry) -> Result<(), Error> {
    write(database, app, &[entry]).await.map(drop)
}

/// Writes a row that Postgres refuses, with less in it. It changes a copy: if Postgres refuses everything,
/// as a read-only database does, the next attempt writes the full row.
async fn write_less(database: &Database, app: &str, row: &[Entry]) -> Result<Written, Error> {
    let mut row = row.to_vec();
    row.iter_mut().for_each(Entry::without_json);
    match write_at_once(database, app, &row).await {
        Err(Error::Database(DatabaseError::Refused { .. })) => {}
        written => return written,
    }
    row.iter_mut().for_each(Entry::bytes_alone);
    write_at_once(database, app, &row).await
}

async fn write_at_once(
    database: &Database,
    app: &str,
    entries: &[Entry],
) -> Result<Written, Error> {
    // One message may be as large as the broker allows, so the limit grows with its size.
    let bytes: usize = entries.iter().map(|entry| entry.payload.len()).sum();
    let limit = STATEMENT_LIMIT + Duration::from_secs((bytes >> 20) as u64);
    let writing = insert(database, app, entries, bytes);
    database.within(limit, "log dead letters", writing).await
}

async fn insert(
    database: &Database,
    app: &str,
    entries: &[Entry],
    bytes: usize,
) -> Result<Written, sqlx::Error> {
    let mut connection = database.pool().acquire().await?;
    let written = if entries.iter().any(|it| it.redriven_from.is_some()) {
        let mut transaction = connection.begin().await?;
        let written = insert_entries(&mut transaction, app, entries).await?;
        transaction.commit().await?;
        written
    } else {
        insert_entries(&mut connection, app, entries).await?
    };
    if bytes >= LARGE {
        connection.shrink_buffers();
    }
    Ok(written)
}

/// Inserts the rows, and marks the rows that they were redriven from: several statements, for a transaction where
/// there are such.
pub(crate) async fn insert_entries(
    connection: &mut PgConnection<'_>,
    app: &str,
    entries: &[Entry],
) -> Result<Written, sqlx::Error> {
    let redriven = entries.iter().filter(|it| it.redriven_from.is_some());
    let redriven: Vec<&Entry> = redriven.collect();
    let mut written = insert_rows(connection, app, entries).await?;
    if !redriven.is_empty() {
        mark_dead_again(connection, app, &redriven).await?;
    }
    let count = entries.len() as u64;
    if written.new < count {
        written.add(insert_later_deaths(connection, app, entries).await?);
    }
    written.repeated = count - written.new;
    Ok(written)
}

/// Inserts rows for messages that died after an operator discarded or redrove an equal message: nobody
/// would look at the old row again. An application may publish the same task under the same id every day.
async fn insert_later_deaths(
    connection: &mut PgConnection<'_>,
    app: &str,
    entries: &[Entry],
) -> Result<Written, sqlx::Error> {
    let identities: Vec<&str> = entries
        .iter()
        .map(|entry| entry.identity.as_str())
        .collect();
    let lives: Vec<i32> = entries.iter().map(|entry| entry.life).collect();
    let deaths: Vec<Time> = entries.iter().map(|entry| Time(entry.died_at)).collect();
    let later: Vec<i64> = sqlx::query_scalar(
        "SELECT number FROM UNNEST($2::text[], $3::int[], $4::timestamptz[]) \
             WITH ORDINALITY AS entry (identity, life, died_at, number) \
         JOIN tierline.dead_letters AS known ON known.app = $1 \
             AND known.identity = entry.identity AND known.life = entry.life \
         WHERE known.state IN ('discarded', 'redriven') AND known.died_at < entry.died_at",
    )
    .bind(app)
    .bind(identities)
    .bind(lives)
    .bind(deaths)
    .fetch_all(&mut *connection)
    .await?;
    let later: Vec<Entry> = later
        .into_iter()
        .filter_map(|number| entries.get(usize::try_from(number - 1).ok()?))
        .map(|entry| Entry {
            identity: identity::of_later_death(&entry.identity, entry.died_at),
            earlier_identity: None,
            ..entry.clone()
        })
        .collect();
    match later.is_empty() {
        true => Ok(Written::default()),
        false => insert_rows(connection, app, &later).await,
    }
}

/// The statement that inserts rows if a condition holds. The payload is sent once: Postgres derives the
/// JSON for queries from it. Rows without a worker are dead letters of the broker.
macro_rules! insert_where {
    ($condition:literal) => {
        concat!(
            "WITH new AS (INSERT INTO tierline.dead_letters (app, identity, life, message_id, task, tier, reason, \
                error, error_kind, error_type, causes, attempts, history, enqueued_at, died_at, \
                worker, worker_version, fingerprint, payload, payload_json, properties, headers, \
                redriven_from, raw_properties) \
            SELECT $1, identity, life, message_id, task, tier, reason, error, error_kind, error_type, \
                causes::jsonb, attempts, history::jsonb, enqueued_at, died_at, worker, \
                worker_version, fingerprint, payload, \
                CASE WHEN is_json THEN convert_from(payload, 'UTF8')::jsonb END, properties, \
                headers::jsonb, redriven_from, raw_properties \
            FROM UNNEST($2::text[], $3::int[], $4::text[], $5::text[], $6::text[], $7::text[], \
                $8::text[], $9::text[], $10::text[], $11::text[], $12::int[], $13::text[], \
                $14::timestamptz[], $15::timestamptz[], $16::text[], $17::text[], $18::text[], \
                $19::bytea[], $20::bool[], $21::bytea[], $22::text[], $23::bigint[], $24::bytea[], \
                 $25::text[]) \
                AS entry (identity, life, message_id, task, tier, reason, error, error_kind, \
                    error_type, causes, attempts, history, enqueued_at, died_at, worker, \
                    worker_version, fingerprint, payload, is_json, properties, headers, \
                    redriven_from, raw_properties, earlier_identity) \
            WHERE ",
            $condition,
            " ON CONFLICT (app, identity, life) DO NOTHING RETURNING tier, task, reason, worker) \
            SELECT count(*) AS count, worker IS NULL AS is_by_broker, \
                CASE WHEN worker IS NULL THEN tier END AS tier, CASE WHEN worker IS NULL THEN task END AS task, \
                worker IS NULL AND reason = 'expired' AS has_expired \
            FROM new GROUP BY 2, 3, 4, 5"
        )
    };
}

const INSERT: &str = insert_where!("true");

/// The condition for messages that an earlier release may have logged under another identity.
const INSERT_UNLESS_KNOWN: &str = insert_where!(
    "earlier_identity IS NULL OR NOT EXISTS (SELECT FROM tierline.dead_letters AS known \
        WHERE known.app = $1 AND known.identity = entry.earlier_identity \
        AND known.life = entry.life AND known.task IS NOT DISTINCT FROM entry.task \
        AND known.payload = entry.payload)"
);

async fn insert_rows(
    connection: &mut PgConnection<'_>,
    app: &str,
    entries: &[Entry],
) -> Result<Written, sqlx::Error> {
    fn column<'e, T>(entries: &'e [Entry], of: impl Fn(&'e Entry) -> T) -> Vec<T> {
        entries.iter().map(of).collect()
    }
    // Postgres plans a query for earlier rows anew each time: a plan from when the log was small would scan
    // a large one.
    let is_plain = entries.iter().all(|it| it.earlier_identity.is_none());
    let statement = if is_plain {
        INSERT
    } else {
        INSERT_UNLESS_KNOWN
    };
    let counts = sqlx::query(statement)
        .persistent(is_plain)
        .bind(app)
        .bind(column(entries, |entry| entry.identity.as_str()))
        .bind(column(entries, |entry| entry.life))
        .bind(column(entries, |entry| entry.message_id.as_deref()))
        .bind(column(entries, |entry| entry.task.as_deref()))
        .bind(column(entries, |entry| entry.tier.as_str()))
        .bind(column(entries, |entry| entry.reason.as_str()))
        .bind(column(entries, |entry| entry.error.as_deref()))
        .bind(column(entries, |entry| entry.error_kind.as_deref()))
        .bind(column(entries, |entry| entry.error_type.as_deref()))
        .bind(column(entries, |entry| entry.causes.as_str()))
        .bind(column(entries, |entry| entry.attempts))
        .bind(column(entries, |entry| entry.history.as_str()))
        .bind(column(entries, |entry| entry.enqueued_at.map(Time)))
        .bind(column(entries, |entry| Time(entry.died_at)))
        .bind(column(entries, |entry| entry.worker.as_deref()))
        .bind(column(entries, |entry| entry.worker_version.as_deref()))
        .bind(column(entries, |entry| entry.fingerprint.as_str()))
        .bind(column(entries, |entry| entry.payload.as_slice()))
        .bind(column(entries, |entry| entry.is_json))
        .bind(column(entries, |entry| entry.properties.as_slice()))
        .bind(column(entries, |entry| entry.headers.as_deref()))
        .bind(column(entries, |entry| entry.redriven_from))
        .bind(column(entries, |entry| entry.raw_properties.as_deref()))
        .bind(column(entries, |entry| entry.earlier_identity.as_deref()))
        .fetch_all(connection)
        .await?;
    let mut written = Written::default();
    for row in &counts {
        let count: i64 = row.try_get("count")?;
        let count = count.unsigned_abs();
        written.new += count;
        if row.try_get("is_by_broker")? {
            written.by_broker.push(DeadByBroker {
                task: row.try_get::<Option<_>, _>("task")?.unwrap_or_default(),
                tier: row.try_get::<Option<_>, _>("tier")?.unwrap_or_default(),
                has_expired: row.try_get("has_expired")?,
                count,
            });
        }
    }
    Ok(written)
}

/// Marks the rows that these messages were redriven from: their redrive failed.
async fn mark_dead_again(
    connection: &mut PgConnection<'_>,
    app: &str,
    redriven: &[&Entry],
) -> Result<(), sqlx::Error> {
    // In one order everywhere, so that two collectors never deadlock.
    let mut lives: Vec<(i64, i32)> = redriven
        .iter()
        .filter_map(|entry| Some((entry.redriven_from?, entry.life)))
        .collect();
    lives.sort_unstable();
    let (ids, lives): (Vec<i64>, Vec<i32>) = lives.into_iter().unzip();
    super::outcome::mark(connection, app, &ids, &lives, &vec!["dead"; ids.len()]).await
}
