//! Moves tasks that have waited for too long to another tier (`promote` in the map).
//!
//! Rows are found in the order of their due times over all ranks, without a lock, and only those that move are locked: a
//! claim never comes to a row that is locked and stays. Of processes that find the same rows at once, one moves them and
//! the others move nothing, so the order holds over all processes.

use std::ops::RangeInclusive;
use std::time::{Duration, SystemTime};

use sqlx::Row;

use super::claim::seconds;
use crate::postgres::{PgConnection, Time};

/// How many tasks one statement moves at most. What Postgres stores of them out of line stays where it is, so a page for
/// each is the most that is written.
const AT_ONCE: i64 = 200;
/// How many old tasks one statement goes through while some tasks are paused, which it leaves where they are.
const LOOKED_AT: i64 = 2_000;

/// A rule of the map.
#[derive(Debug, Clone)]
pub(crate) struct Rule {
    pub(crate) from: String,
    pub(crate) to: String,
    pub(crate) after: Duration,
    /// The priorities that a task may have in the tier that it moves to.
    pub(crate) priorities: RangeInclusive<u8>,
}

/// What waits in a tier with a rule.
#[derive(Debug, Default)]
pub(crate) struct Aged {
    /// The ranks whose first task has waited for too long. Suspects (ranks above 0) stay where they are.
    pub(crate) ranks: Vec<i16>,
    /// How long until the first task of any other rank has.
    pub(crate) next: Option<Duration>,
}

pub(crate) async fn find_aged(
    connection: &mut PgConnection<'_>,
    app: &str,
    rule: &Rule,
) -> Result<Aged, sqlx::Error> {
    let rows = sqlx::query(
        "WITH RECURSIVE of AS MATERIALIZED (SELECT id FROM tierline.backlogs WHERE app = $1 AND tier = $2), first AS ( \
            (SELECT rank, due_at FROM tierline.ready WHERE backlog = (SELECT id FROM of) AND rank <= 0 \
             ORDER BY rank, due_at, id LIMIT 1) \
            UNION ALL \
            SELECT next.rank, next.due_at FROM first CROSS JOIN LATERAL ( \
                SELECT rank, due_at FROM tierline.ready \
                WHERE backlog = (SELECT id FROM of) AND rank > first.rank AND rank <= 0 \
                ORDER BY rank, due_at, id LIMIT 1 \
            ) AS next \
         ) SELECT rank, extract(epoch FROM due_at + make_interval(secs => $3) - now())::float8 AS rest FROM first",
    )
    .bind(app)
    .bind(&rule.from)
    .bind(seconds(rule.after))
    .fetch_all(connection)
    .await?;
    let mut aged = Aged::default();
    for row in &rows {
        let rest: f64 = row.try_get("rest")?;
        match Duration::try_from_secs_f64(rest) {
            Ok(rest) if !rest.is_zero() => {
                aged.next = Some(aged.next.map_or(rest, |next| next.min(rest)))
            }
            _ => aged.ranks.push(row.try_get("rank")?),
        }
    }
    Ok(aged)
}

/// What one statement did.
#[derive(Debug, Default)]
pub(crate) struct Promoted {
    /// How many tasks it found. Those that another transaction has locked stay.
    pub(crate) found: u64,
    /// Whether there may be more.
    pub(crate) has_more: bool,
    /// How many it moved.
    pub(crate) count: u64,
    /// The first that it moved to each rank, by its due time.
    pub(crate) starts: Vec<(i16, SystemTime)>,
    /// The due time of the last that it found: there are none before.
    pub(crate) last: Option<SystemTime>,
}

/// Moves some tasks of these ranks that are not `paused`, the oldest first. `since` is `last` of the statement before, which begins the scan
/// behind the index entries of what has moved.
///
/// Rows that have moved on since they were found are told apart after they are locked: with the tier as a condition of the
/// lock, Postgres may go through all rows of the tier instead of those ids (43,000 buffers a batch in place of 4,000).
pub(crate) async fn promote(
    connection: &mut PgConnection<'_>,
    app: &str,
    rule: &Rule,
    ranks: &[i16],
    since: Option<SystemTime>,
    paused: &[&str],
) -> Result<Promoted, sqlx::Error> {
    let looked_at = match paused.is_empty() {
        true => AT_ONCE,
        false => LOOKED_AT,
    };
    let rows = sqlx::query(
        "WITH of AS MATERIALIZED ( \
            SELECT (SELECT id FROM tierline.backlogs WHERE app = $1 AND tier = $2) AS source, \
                (SELECT id FROM tierline.backlogs WHERE app = $1 AND tier = $3) AS target \
         ), near AS MATERIALIZED ( \
            SELECT found.id, found.due_at, found.task FROM unnest($4::smallint[]) AS wanted (rank) \
            CROSS JOIN LATERAL ( \
                SELECT id, due_at, task FROM tierline.ready \
                WHERE backlog = (SELECT source FROM of) AND rank = wanted.rank \
                    AND due_at >= coalesce($5, '-infinity') AND due_at <= now() - make_interval(secs => $6) \
                ORDER BY due_at, id LIMIT $10 \
            ) AS found ORDER BY found.due_at, found.id LIMIT $10 \
         ), aged AS MATERIALIZED ( \
            SELECT id, due_at FROM near WHERE task <> ALL($11) ORDER BY due_at, id LIMIT $7 \
         ), locked AS MATERIALIZED ( \
            SELECT ctid AS place, backlog, rank FROM tierline.ready WHERE id = ANY(ARRAY(SELECT id FROM aged)) \
            FOR UPDATE SKIP LOCKED \
         ), moved AS ( \
            UPDATE tierline.ready SET backlog = (SELECT target FROM of), rank = greatest(least(rank, $8), $9), \
                first_backlog = nullif(coalesce(first_backlog, backlog), (SELECT target FROM of)) \
            WHERE ctid = ANY(ARRAY(SELECT place FROM locked WHERE backlog = (SELECT source FROM of) AND rank <= 0)) \
            RETURNING rank, due_at \
         ) SELECT NULL::smallint AS rank, count(*) AS count, \
            CASE WHEN count(*) = $7 THEN max(due_at) ELSE (SELECT max(due_at) FROM near) END AS due_at, \
            count(*) = $7 OR (SELECT count(*) FROM near) = $10 AS has_more FROM aged \
         UNION ALL \
         SELECT rank, count(*), min(due_at), false FROM moved GROUP BY rank",
    )
    .bind(app)
    .bind(&rule.from)
    .bind(&rule.to)
    .bind(ranks)
    .bind(since.map(Time))
    .bind(seconds(rule.after))
    .bind(AT_ONCE)
    .bind(-i16::from(*rule.priorities.start()))
    .bind(-i16::from(*rule.priorities.end()))
    .bind(looked_at)
    .bind(paused)
    .fetch_all(connection)
    .await?;
    let mut promoted = Promoted::default();
    for row in &rows {
        let count: i64 = row.try_get("count")?;
        let due_at: Option<Time> = row.try_get("due_at")?;
        let due_at = due_at.map(|Time(at)| at);
        match (row.try_get("rank")?, due_at) {
            (Some(rank), Some(first)) => {
                promoted.count += count.unsigned_abs();
                promoted.starts.push((rank, first));
            }
            _ => {
                promoted.found = count.unsigned_abs();
                promoted.last = due_at;
                promoted.has_more = row.try_get("has_more")?;
            }
        }
    }
    Ok(promoted)
}
