//! The queries by which operators find rows.

use uuid::Uuid;

use super::finished::ONE_FINISHED;
use super::task::{FoundRow, TaskState};
use crate::TaskId;
use crate::postgres::PgConnection;

/// The columns of a list: without the payload, which may be large.
macro_rules! columns {
    ($payload:literal, $token:literal, $worker:literal) => {
        concat!(
            "SELECT id, ",
            $token,
            " AS token, due_at, rank, is_held, first_backlog, false AS is_expired, \
             (SELECT tier FROM tierline.backlogs WHERE backlogs.id = backlog) AS tier, \
             (SELECT tier FROM tierline.backlogs WHERE backlogs.id = first_backlog) AS first_tier, task, name, properties, ",
            $payload,
            " AS payload, octet_length(payload)::bigint AS size, ",
            $worker,
            " AS worker "
        )
    };
}

pub(super) const LIST_RUNNING: &str = concat!(
    columns!(
        "''::bytea",
        "token",
        "(SELECT workers.name FROM tierline.workers WHERE workers.id = running.worker)"
    ),
    "FROM tierline.running WHERE backlog = (SELECT id FROM tierline.backlogs WHERE app = $1 AND tier = $2) AND id > $4 ORDER BY id LIMIT $3"
);

pub(super) const LIST_READY: &str = concat!(
    columns!("''::bytea", "0::bigint", "NULL::text"),
    "FROM tierline.ready WHERE backlog = (SELECT id FROM tierline.backlogs WHERE app = $1 AND tier = $2) AND (rank, due_at, id) > ($6, $5, $4) \
     ORDER BY rank, due_at, id LIMIT $3"
);

pub(super) const LIST_PARKED: &str = concat!(
    columns!("''::bytea", "0::bigint", "NULL::text"),
    "FROM tierline.parked WHERE backlog = (SELECT id FROM tierline.backlogs WHERE app = $1 AND tier = $2) AND (rank, due_at, id) > ($6, $5, $4) \
     ORDER BY rank, due_at, id LIMIT $3"
);

pub(super) const LIST_SCHEDULED: &str = concat!(
    columns!("''::bytea", "0::bigint", "NULL::text"),
    "FROM tierline.scheduled WHERE backlog = (SELECT id FROM tierline.backlogs WHERE app = $1 AND tier = $2) AND (due_at, id) > ($5, $4) \
     ORDER BY due_at, id LIMIT $3"
);

const ONE_RUNNING: &str = concat!(
    columns!(
        "payload",
        "token",
        "(SELECT workers.name FROM tierline.workers WHERE workers.id = running.worker)"
    ),
    "FROM tierline.running WHERE backlog IN (SELECT id FROM tierline.backlogs WHERE app = $1) AND (id = $2 OR name = $3) ORDER BY id LIMIT 2"
);

const ONE_READY: &str = concat!(
    columns!("payload", "0::bigint", "NULL::text"),
    "FROM tierline.ready WHERE backlog IN (SELECT id FROM tierline.backlogs WHERE app = $1) AND (id = $2 OR name = $3) ORDER BY id LIMIT 2"
);

const ONE_PARKED: &str = concat!(
    columns!("payload", "0::bigint", "NULL::text"),
    "FROM tierline.parked WHERE backlog IN (SELECT id FROM tierline.backlogs WHERE app = $1) AND (id = $2 OR name = $3) ORDER BY id LIMIT 2"
);

const ONE_SCHEDULED: &str = concat!(
    columns!("payload", "0::bigint", "NULL::text"),
    "FROM tierline.scheduled WHERE backlog IN (SELECT id FROM tierline.backlogs WHERE app = $1) AND (id = $2 OR name = $3) ORDER BY id LIMIT 2"
);

/// The row of a task that waits, which no other transaction can change until this one ends.
const LOCK_READY: &str = concat!(
    columns!("''::bytea", "0::bigint", "NULL::text"),
    "FROM tierline.ready WHERE id = $1 FOR UPDATE"
);

const LOCK_PARKED: &str = concat!(
    columns!("''::bytea", "0::bigint", "NULL::text"),
    "FROM tierline.parked WHERE id = $1 FOR UPDATE"
);

const LOCK_SCHEDULED: &str = concat!(
    columns!("''::bytea", "0::bigint", "NULL::text"),
    "FROM tierline.scheduled WHERE id = $1 FOR UPDATE"
);

/// A task by its id, and whether others have the same.
pub(super) async fn find_one(
    connection: &mut PgConnection<'_>,
    app: &str,
    id: &TaskId,
) -> Result<Option<(FoundRow, bool)>, sqlx::Error> {
    // In the order in which a task moves, so that one that moves meanwhile is not missed; those that go back are found
    // in the second round.
    let waiting = [
        (TaskState::Scheduled, ONE_SCHEDULED),
        (TaskState::Ready, ONE_READY),
        (TaskState::Parked, ONE_PARKED),
        (TaskState::Running, ONE_RUNNING),
    ];
    let finished = [(TaskState::Finished, ONE_FINISHED)];
    for tables in [&waiting[..], &waiting, &finished] {
        let mut found: Vec<FoundRow> = Vec::new();
        for (state, query) in tables {
            let rows = sqlx::query(*query)
                .bind(app)
                .bind(id.uuid())
                .bind(id.as_str().replace('\0', "\u{fffd}"))
                .fetch_all(&mut *connection)
                .await?;
            for row in &rows {
                let row = FoundRow::read(row, *state)?;
                // Seen before it moved, and again after.
                found.retain(|other| other.claimed.key.id != row.claimed.key.id);
                found.push(row);
            }
        }
        let are_several = found.len() > 1;
        if let Some(found) = found.pop() {
            return Ok(Some((found, are_several)));
        }
    }
    Ok(None)
}

/// An operator is not kept waiting, with a connection of the pool, by a transaction that has a row and stays open.
pub(super) async fn limit_lock_waits(
    transaction: &mut PgConnection<'_>,
) -> Result<(), sqlx::Error> {
    let limit = "SET LOCAL lock_timeout = '2s'";
    sqlx::query(limit).execute(transaction).await.map(drop)
}

/// Locks a row that waits in this state. The lane of one that is parked must be locked before. `None`: it does not any more.
pub(super) async fn lock_waiting(
    connection: &mut PgConnection<'_>,
    state: TaskState,
    id: Uuid,
) -> Result<Option<FoundRow>, sqlx::Error> {
    let locking = match state {
        TaskState::Ready => LOCK_READY,
        TaskState::Parked => LOCK_PARKED,
        TaskState::Scheduled => LOCK_SCHEDULED,
        TaskState::Running | TaskState::Finished => return Ok(None),
    };
    let row = sqlx::query(locking)
        .bind(id)
        .fetch_optional(connection)
        .await?;
    row.map(|row| FoundRow::read(&row, state)).transpose()
}
