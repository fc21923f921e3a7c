//! Makes scheduled tasks ready when they fall due.

use std::time::{Duration, SystemTime};

use sqlx::Row;

use crate::postgres::{PgConnection, Time};

/// How many tasks, and about how many bytes of them, one statement makes ready. It is at least one task.
const ROWS: i64 = 200;
const BYTES: i64 = 4 << 20;

/// What has become ready.
#[derive(Debug)]
pub(crate) struct MadeReady {
    /// The first row of each rank that has any, by its due time.
    pub(crate) starts: Vec<(i16, SystemTime)>,
    /// How long until the next task falls due; zero if there are more that are due.
    pub(crate) next_due: Option<Duration>,
}

/// Moves due tasks of a tier to `ready`, the earliest first. Those that another process is moving are left to it.
pub(crate) async fn make_ready(
    connection: &mut PgConnection<'_>,
    app: &str,
    tier: &str,
) -> Result<MadeReady, sqlx::Error> {
    let rows = sqlx::query(
        "WITH tier AS MATERIALIZED ( \
            SELECT id FROM tierline.backlogs WHERE app = $1 AND tier = $2 \
         ), due AS MATERIALIZED ( \
            SELECT place, sum(size) OVER (ORDER BY due_at, id) - size AS before FROM ( \
                SELECT ctid AS place, id, due_at, \
                    octet_length(payload) + coalesce(octet_length(properties), 0) AS size \
                FROM tierline.scheduled WHERE backlog = (SELECT id FROM tier) AND due_at <= now() \
                ORDER BY due_at, id LIMIT $3 FOR UPDATE SKIP LOCKED \
            ) AS due \
         ), taken AS ( \
            DELETE FROM tierline.scheduled WHERE ctid = ANY(ARRAY(SELECT place FROM due WHERE before < $4)) \
            RETURNING scheduled.* \
         ), moved AS ( \
            INSERT INTO tierline.ready (id, due_at, rank, is_held, backlog, first_backlog, task, name, properties, payload) \
            SELECT id, due_at, rank, is_held, backlog, first_backlog, task, name, properties, payload FROM taken \
            ON CONFLICT (id) DO NOTHING RETURNING rank, due_at \
         ) SELECT rank, min(due_at) AS first, NULL::float8 AS next_due FROM moved GROUP BY rank \
         UNION ALL \
         SELECT NULL, NULL, CASE WHEN (SELECT count(*) FROM due) = $3 OR EXISTS (SELECT FROM due WHERE before >= $4) \
            THEN 0 ELSE (SELECT extract(epoch FROM due_at - now())::float8 FROM tierline.scheduled \
                WHERE backlog = (SELECT id FROM tier) AND due_at > now() ORDER BY due_at, id LIMIT 1) END",
    )
    .bind(app)
    .bind(tier)
    .bind(ROWS)
    .bind(BYTES)
    .fetch_all(connection)
    .await?;
    let mut made = MadeReady {
        starts: Vec::new(),
        next_due: None,
    };
    for row in &rows {
        let (rank, first) = (row.try_get("rank")?, row.try_get("first")?);
        if let (Some(rank), Some(Time(first))) = (rank, first) {
            made.starts.push((rank, first));
        }
        let next_due: Option<f64> = row.try_get("next_due")?;
        if let Some(next_due) = next_due {
            made.next_due = Duration::try_from_secs_f64(next_due.max(0.0)).ok();
        }
    }
    Ok(made)
}
