//! The history of tiers with `keep`: finished tasks, in a table of their own.

use std::time::Duration;

use uuid::Uuid;

use super::claim::seconds;
use super::parked::{lock_lanes_of, place_lanes};
use super::task::TaskState;
use crate::postgres::PgConnection;

/// The columns that a list has, of a task that ended.
macro_rules! columns {
    ($payload:literal) => {
        concat!(
            "SELECT id, 0::bigint AS token, due_at, rank, false AS is_held, first_backlog, false AS is_expired, \
             (SELECT tier FROM tierline.backlogs WHERE backlogs.id = backlog) AS tier, \
             (SELECT tier FROM tierline.backlogs WHERE backlogs.id = first_backlog) AS first_tier, task, name, properties, ",
            $payload,
            " AS payload, octet_length(payload)::bigint AS size, worker, finished_at, ending FROM tierline.finished "
        )
    };
}

/// The latest first.
pub(super) const LIST_FINISHED: &str = concat!(
    columns!("''::bytea"),
    "WHERE backlog = (SELECT id FROM tierline.backlogs WHERE app = $1 AND tier = $2) \
         AND (finished_at, id) < (coalesce($5::timestamptz, 'infinity'), $4) \
     ORDER BY finished_at DESC, id DESC LIMIT $3"
);

/// How the task ended the last time.
pub(super) const ONE_FINISHED: &str = concat!(
    columns!("payload"),
    "WHERE backlog IN (SELECT id FROM tierline.backlogs WHERE app = $1) AND (id = $2 OR name = $3) \
     ORDER BY finished_at DESC LIMIT 1"
);

/// Deletes rows that wait and keeps those of the tiers in `$3`.
macro_rules! cancel {
    ($table:literal) => {
        concat!(
            "WITH gone AS (DELETE FROM ",
            $table,
            " WHERE id = ANY($1) RETURNING id, backlog, first_backlog, rank, due_at, task, name, properties, payload), kept AS ( \
                INSERT INTO tierline.finished \
                    (id, finished_at, backlog, first_backlog, rank, due_at, ending, task, name, properties, payload) \
                SELECT id, now(), backlog, first_backlog, rank, due_at, 'cancelled', task, name, properties, payload FROM gone \
                WHERE backlog IN (SELECT id FROM tierline.backlogs WHERE app = $2 AND tier = ANY($3)) \
                ON CONFLICT (id, finished_at) DO NOTHING \
             ) SELECT count(*) FROM gone"
        )
    };
}

/// Cancels rows that wait. Those of the tiers in `keeping` are kept. Returns how many there were.
pub(super) async fn cancel(
    connection: &mut PgConnection<'_>,
    state: TaskState,
    ids: &[Uuid],
    app: &str,
    keeping: &[&str],
) -> Result<u64, sqlx::Error> {
    let cancelling = match state {
        TaskState::Running | TaskState::Finished => return Ok(0),
        TaskState::Ready => sqlx::query_scalar(cancel!("tierline.ready")),
        TaskState::Parked => sqlx::query_scalar(cancel!("tierline.parked")),
        TaskState::Scheduled => sqlx::query_scalar(cancel!("tierline.scheduled")),
    };
    let lanes = match state {
        TaskState::Parked => lock_lanes_of(&mut *connection, ids).await?,
        _ => Vec::new(),
    };
    let count: i64 = cancelling
        .bind(ids)
        .bind(app)
        .bind(keeping)
        .fetch_one(&mut *connection)
        .await?;
    place_lanes(connection, &lanes).await?;
    Ok(count.unsigned_abs())
}

/// Removes tasks that ended longer ago than their tier keeps them, at most `most` of each tier. Returns how many.
pub(crate) async fn remove_finished(
    connection: &mut PgConnection<'_>,
    app: &str,
    tiers: &[(&str, Duration)],
    most: i64,
) -> Result<u64, sqlx::Error> {
    let (names, keep): (Vec<&str>, Vec<f64>) = tiers
        .iter()
        .map(|(tier, keep)| (*tier, seconds(*keep)))
        .unzip();
    let removed = sqlx::query(
        "DELETE FROM tierline.finished WHERE ctid = ANY(ARRAY( \
            SELECT old.place FROM unnest($2::text[], $3::float8[]) AS kept (tier, seconds) \
            JOIN tierline.backlogs AS of ON of.app = $1 AND of.tier = kept.tier \
            CROSS JOIN LATERAL ( \
                SELECT ctid AS place FROM tierline.finished \
                WHERE backlog = of.id AND finished_at < now() - make_interval(secs => kept.seconds) \
                ORDER BY finished_at, id LIMIT $4 FOR UPDATE SKIP LOCKED \
            ) AS old))",
    )
    .bind(app)
    .bind(names)
    .bind(keep)
    .bind(most)
    .execute(connection)
    .await?;
    Ok(removed.rows_affected())
}
