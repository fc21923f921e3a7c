//! Completion marks: the statements about them.

use std::time::Duration;

use sqlx::Row;

use super::RunningRow;
use crate::backlog::seconds;
use crate::message::CompletionKey;
use crate::postgres::PgConnection;

/// Whether a task could be completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Completion {
    Completed,
    /// Another run has completed it.
    AlreadyDone,
    /// Its row belongs to another run.
    TakenOver,
}

/// Writes the mark of a message of the broker.
const COMPLETE_MESSAGE: &str = "WITH mark AS ( \
        INSERT INTO tierline.completed (key, app) VALUES ($1, $2) ON CONFLICT (key) DO NOTHING RETURNING key \
    ) SELECT EXISTS (SELECT FROM mark) AS is_new, true AS is_ours";

/// Writes the mark, if the row has a key, and ends the run. A tier that keeps its tasks keeps this one: `$5` is the worker
/// then.
const COMPLETE_ROW: &str = "WITH mark AS ( \
        INSERT INTO tierline.completed (key, app) SELECT $1, $2 WHERE $1::bytea IS NOT NULL \
        ON CONFLICT (key) DO NOTHING RETURNING key \
    ), ended AS ( \
        DELETE FROM tierline.running WHERE id = $3 AND token = $4 RETURNING running.* \
    ), kept AS ( \
        INSERT INTO tierline.finished \
            (id, finished_at, backlog, first_backlog, rank, due_at, ending, worker, task, name, properties, payload) \
        SELECT id, clock_timestamp(), backlog, first_backlog, rank, due_at, 'done', $5, task, name, properties, payload \
        FROM ended WHERE $5::text IS NOT NULL ON CONFLICT (id, finished_at) DO NOTHING \
    ) SELECT $1::bytea IS NULL OR EXISTS (SELECT FROM mark) AS is_new, EXISTS (SELECT FROM ended) AS is_ours";

/// Completes a task, in the transaction of its handler. If it cannot, the transaction must be rolled back.
pub(super) async fn complete(
    connection: &mut sqlx::PgConnection,
    app: &str,
    key: Option<CompletionKey>,
    row: Option<&RunningRow>,
) -> Result<Completion, sqlx::Error> {
    let key = key.as_ref().map(CompletionKey::as_bytes);
    let completing = match row {
        None => sqlx::query(COMPLETE_MESSAGE).bind(key).bind(app),
        Some(row) => sqlx::query(COMPLETE_ROW)
            .bind(key)
            .bind(app)
            .bind(row.run.id)
            .bind(row.run.token)
            .bind(row.keeper.as_deref()),
    };
    let completed = completing.fetch_one(connection).await?;
    Ok(
        match (completed.try_get("is_new")?, completed.try_get("is_ours")?) {
            (false, _) => Completion::AlreadyDone,
            (true, false) => Completion::TakenOver,
            (true, true) => Completion::Completed,
        },
    )
}

/// Whether a task is done.
pub(super) async fn is_completed(
    mut connection: PgConnection<'_>,
    key: CompletionKey,
) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar("SELECT EXISTS (SELECT FROM tierline.completed WHERE key = $1)")
        .bind(key.as_bytes())
        .fetch_one(&mut connection)
        .await
}

/// Removes marks that are older than `keep`, at most `most`. Returns how many.
pub(crate) async fn remove_marks(
    connection: &mut PgConnection<'_>,
    app: &str,
    keep: Duration,
    most: i64,
) -> Result<u64, sqlx::Error> {
    let removed = sqlx::query(
        "DELETE FROM tierline.completed WHERE ctid = ANY(ARRAY( \
            SELECT ctid FROM tierline.completed WHERE app = $1 AND completed_at < now() - make_interval(secs => $2) \
            ORDER BY completed_at LIMIT $3 FOR UPDATE SKIP LOCKED))",
    )
    .bind(app)
    .bind(seconds(keep))
    .bind(most)
    .execute(connection)
    .await?;
    Ok(removed.rows_affected())
}
