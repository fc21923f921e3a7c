//! The statements that insert rows.

use super::claim::seconds;
use super::row::NewRow;
use crate::postgres::PgConnection;

// Times count from the statement: the caller's transaction may have begun long before.
const READY: &str = "WITH inserted AS ( \
     INSERT INTO tierline.ready (id, due_at, backlog, rank, task, name, properties, payload) \
     SELECT id, statement_timestamp() + number * interval '1 microsecond', \
         (SELECT id FROM tierline.backlogs WHERE app = $1 AND tier = $2), rank, task, name, properties, payload \
     FROM unnest($3::uuid[], $4::smallint[], $5::text[], $6::text[], $7::bytea[], $8::bytea[], $9::float8[]) \
         WITH ORDINALITY AS new (id, rank, task, name, properties, payload, after, number) \
     ON CONFLICT (id) DO NOTHING \
     ) SELECT txid_current()";

const SCHEDULED: &str = "WITH inserted AS ( \
     INSERT INTO tierline.scheduled (id, due_at, backlog, rank, task, name, properties, payload) \
     SELECT id, statement_timestamp() + make_interval(secs => after), \
         (SELECT id FROM tierline.backlogs WHERE app = $1 AND tier = $2), rank, task, name, properties, payload \
     FROM unnest($3::uuid[], $4::smallint[], $5::text[], $6::text[], $7::bytea[], $8::bytea[], $9::float8[]) \
         AS new (id, rank, task, name, properties, payload, after) \
     ON CONFLICT (id) DO NOTHING \
     ) SELECT txid_current()";

/// Inserts rows of a tier, which are all ready, or all due later. Returns the number of the transaction.
pub(super) async fn insert_rows(
    connection: &mut PgConnection<'_>,
    (app, tier): (&str, &str),
    rows: &[&NewRow],
) -> Result<i64, sqlx::Error> {
    fn column<'r, T>(rows: &[&'r NewRow], of: impl Fn(&'r NewRow) -> T) -> Vec<T> {
        rows.iter().map(|row| of(row)).collect()
    }
    let is_ready = rows.first().is_none_or(|row| row.after.is_zero());
    sqlx::query_scalar(if is_ready { READY } else { SCHEDULED })
        .bind(app)
        .bind(tier)
        .bind(column(rows, |row| row.id))
        .bind(column(rows, |row| row.rank))
        .bind(column(rows, |row| row.task.as_str()))
        .bind(column(rows, |row| row.name.as_deref()))
        .bind(column(rows, |row| row.properties.as_deref()))
        .bind(column(rows, |row| row.payload.as_slice()))
        .bind(column(rows, |row| seconds(row.after)))
        .fetch_one(connection)
        .await
}
