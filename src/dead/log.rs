//! Writing to the log: many rows in one statement, each of them once.

use sqlx::PgConnection;

use super::entry::Entry;
use crate::Error;
use crate::database::{Database, STATEMENT_LIMIT, Time};

/// What a batch came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Written {
    /// Rows that are new.
    pub(super) new: u64,
    /// Rows that were there already.
    pub(super) repeated: u64,
}

/// Writes the rows. When this answers `Ok`, every one of them is committed, now or before.
///
/// What Postgres refuses costs only itself: the batch is halved until the row is alone, which then
/// goes without its JSON, and at last as bytes alone.
pub(super) async fn write(
    database: &Database,
    app: &str,
    entries: &[Entry],
) -> Result<Written, Error> {
    match write_at_once(database, app, entries).await {
        Err(Error::DatabaseRefused { .. }) => {}
        written => return written,
    }
    let mut written = Written::default();
    let mut batches = vec![(entries.to_vec(), Care::Usual)];
    while let Some((mut entries, care)) = batches.pop() {
        match write_at_once(database, app, &entries).await {
            Ok(more) => {
                written.new += more.new;
                written.repeated += more.repeated;
            }
            Err(Error::DatabaseRefused { .. }) if entries.len() > 1 => {
                let second = entries.split_off(entries.len() / 2);
                batches.push((second, care));
                batches.push((entries, care));
            }
            Err(Error::DatabaseRefused { cause, .. }) if care != Care::BytesAlone => {
                let next = match care {
                    Care::Usual => Care::WithoutJson,
                    _ => Care::BytesAlone,
                };
                tracing::warn!(?next, %cause, "Postgres refuses a dead letter as it is");
                for entry in &mut entries {
                    match next {
                        Care::WithoutJson => entry.without_json(),
                        _ => entry.bytes_alone(),
                    }
                }
                batches.push((entries, next));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(written)
}

async fn write_at_once(
    database: &Database,
    app: &str,
    entries: &[Entry],
) -> Result<Written, Error> {
    let writing = insert(database, app, entries);
    let tried = "log dead letters";
    let new = database.within(STATEMENT_LIMIT, tried, writing).await?;
    Ok(Written {
        new,
        repeated: entries.len() as u64 - new,
    })
}

/// How much of a row is given up so that Postgres takes the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Care {
    Usual,
    WithoutJson,
    BytesAlone,
}

async fn insert(database: &Database, app: &str, entries: &[Entry]) -> Result<u64, sqlx::Error> {
    let redriven: Vec<&Entry> = entries
        .iter()
        .filter(|entry| entry.redriven_from.is_some())
        .collect();
    if redriven.is_empty() {
        let mut connection = database.pool().acquire().await?;
        return insert_rows(&mut connection, app, entries).await;
    }
    let mut transaction = database.pool().begin().await?;
    let new = insert_rows(&mut transaction, app, entries).await?;
    mark_dead_again(&mut transaction, app, &redriven).await?;
    transaction.commit().await?;
    Ok(new)
}

const INSERT: &str = "\
    INSERT INTO tierline.dead_letters (app, identity, life, message_id, task, tier, reason, error, \
        error_kind, error_type, causes, attempts, history, enqueued_at, died_at, worker, \
        worker_version, fingerprint, payload, payload_json, properties, headers, redriven_from, \
        raw_properties) \
    SELECT $1, identity, life, message_id, task, tier, reason, error, error_kind, error_type, \
        causes::jsonb, attempts, history::jsonb, enqueued_at, died_at, worker, worker_version, \
        fingerprint, payload, payload_json::jsonb, properties, headers::jsonb, redriven_from, raw_properties \
    FROM UNNEST($2::text[], $3::int[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[], \
        $9::text[], $10::text[], $11::text[], $12::int[], $13::text[], $14::timestamptz[], \
        $15::timestamptz[], $16::text[], $17::text[], $18::text[], $19::bytea[], $20::text[], \
        $21::bytea[], $22::text[], $23::bigint[], $24::bytea[]) \
        AS entry (identity, life, message_id, task, tier, reason, error, error_kind, error_type, \
            causes, attempts, history, enqueued_at, died_at, worker, worker_version, fingerprint, \
            payload, payload_json, properties, headers, redriven_from, raw_properties) \
    ON CONFLICT (app, identity, life) DO NOTHING";

async fn insert_rows(
    connection: &mut PgConnection,
    app: &str,
    entries: &[Entry],
) -> Result<u64, sqlx::Error> {
    fn column<'e, T>(entries: &'e [Entry], of: impl Fn(&'e Entry) -> T) -> Vec<T> {
        entries.iter().map(of).collect()
    }
    let inserted = sqlx::query(INSERT)
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
        .bind(column(entries, |entry| entry.payload_json.as_deref()))
        .bind(column(entries, |entry| entry.properties.as_slice()))
        .bind(column(entries, |entry| entry.headers.as_deref()))
        .bind(column(entries, |entry| entry.redriven_from))
        .bind(column(entries, |entry| entry.raw_properties.as_deref()))
        .execute(connection)
        .await?;
    Ok(inserted.rows_affected())
}

/// The rows that these were in their life before: their redrive did not help.
async fn mark_dead_again(
    connection: &mut PgConnection,
    app: &str,
    redriven: &[&Entry],
) -> Result<(), sqlx::Error> {
    // In one order everywhere, so that two collectors never wait for each other.
    let mut lives: Vec<(i64, i32)> = redriven
        .iter()
        .filter_map(|entry| Some((entry.redriven_from?, entry.life)))
        .collect();
    lives.sort_unstable();
    let (ids, lives): (Vec<i64>, Vec<i32>) = lives.into_iter().unzip();
    super::outcome::mark(connection, app, &ids, &lives, &vec!["dead"; ids.len()]).await
}
