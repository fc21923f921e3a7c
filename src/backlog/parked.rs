//! Tasks that may not run now: they are paused, or at a limit. They wait in lanes, one for each tier, task and key
//! (`migrations/0303_parked.sql`).

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use sqlx::Row;
use uuid::Uuid;

use super::claim::{RankStart, draw_token};
use super::row::{ClaimedRow, RunKey};
use crate::postgres::{PgConnection, Time};

/// How many ready tasks of each rank one look for tasks to be parked goes through.
const LOOKED_AT: i64 = 2_000;
/// How many tasks, and about how many bytes of them, one statement moves. It is at least one task.
const MOVED_ROWS: i32 = 500;
const MOVED_BYTES: i64 = 4 << 20;

/// The lane of a task within its tier.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Lane {
    /// Empty: all tasks of the tier.
    pub(crate) task: String,
    /// Empty: it has none.
    pub(crate) key: String,
}

/// Tasks to be claimed from lanes.
#[derive(Debug, Clone)]
pub(crate) struct LaneClaim {
    /// The task of the lanes. Empty: all tasks of the tier.
    pub(crate) task: String,
    /// How many tasks at most.
    pub(crate) most: usize,
    /// How many of a key may run at once. `None`: any number.
    pub(crate) places: Option<u32>,
    /// How long a task may wait.
    pub(crate) ttl: Option<Duration>,
}

/// A task that was claimed from a lane.
#[derive(Debug)]
pub(crate) struct ParkedRow {
    pub(crate) row: ClaimedRow,
    /// Its place among those that were claimed with it.
    pub(crate) number: i64,
}

/// The lanes of a task in which tasks wait.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OpenLanes {
    pub(crate) task: String,
    /// Whether a task waits that may run beside others.
    pub(crate) has_tasks: bool,
    /// Whether a lane begins with a task that may kill its worker.
    pub(crate) has_suspects: bool,
}

/// Which of a tier's ready tasks are to be looked at.
#[derive(Debug, Clone)]
pub(crate) struct Sweep {
    /// From where on to look, by rank.
    pub(crate) ranks: Vec<RankStart>,
    /// The names of the tasks. `None`: all.
    pub(crate) tasks: Option<Vec<String>>,
}

/// Locks ready tasks that are to be parked, in the order of their ids.
pub(crate) async fn lock_ready(
    connection: &mut PgConnection<'_>,
    app: &str,
    tier: &str,
    sweep: &Sweep,
) -> Result<Vec<ClaimedRow>, sqlx::Error> {
    let ranks: Vec<i16> = sweep.ranks.iter().map(|it| it.rank).collect();
    let since: Vec<Option<Time>> = sweep.ranks.iter().map(|it| it.since.map(Time)).collect();
    let rows = sqlx::query(
        "WITH of AS MATERIALIZED (SELECT id FROM tierline.backlogs WHERE app = $1 AND tier = $2), found AS MATERIALIZED ( \
            SELECT near.id, sum(near.size) OVER (ORDER BY start.number, near.due_at, near.id) - near.size AS before \
            FROM unnest($3::smallint[], $4::timestamptz[]) WITH ORDINALITY AS start (rank, since, number) \
            CROSS JOIN LATERAL ( \
                SELECT id, due_at, task, octet_length(payload) + coalesce(octet_length(properties), 0) AS size \
                FROM tierline.ready \
                WHERE backlog = (SELECT id FROM of) AND rank = start.rank AND due_at >= coalesce(start.since, '-infinity') \
                ORDER BY due_at, id LIMIT $5 \
            ) AS near WHERE $6::text[] IS NULL OR near.task = ANY($6) LIMIT $7 \
         ) SELECT id, 0::bigint AS token, due_at, rank, is_held, first_backlog, task, name, properties, payload, false AS is_expired \
         FROM tierline.ready WHERE id = ANY(ARRAY(SELECT id FROM found WHERE before < $8)) AND backlog = (SELECT id FROM of) \
         ORDER BY id FOR UPDATE SKIP LOCKED",
    )
    .bind(app)
    .bind(tier)
    .bind(ranks)
    .bind(since)
    .bind(LOOKED_AT)
    .bind(sweep.tasks.as_deref())
    .bind(i64::from(MOVED_ROWS))
    .bind(MOVED_BYTES)
    .fetch_all(connection)
    .await?;
    rows.iter().map(ClaimedRow::read).collect()
}

/// Which tasks are moved to their lanes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ParkFrom {
    Ready,
    /// This process has claimed them, and not begun.
    Running,
}

/// Moves tasks to their lanes, if they are still where they were.
pub(crate) async fn park(
    connection: &mut PgConnection<'_>,
    app: &str,
    tier: &str,
    from: ParkFrom,
    rows: &[(RunKey, Lane)],
) -> Result<(), sqlx::Error> {
    // The lanes of a tier with `fair` are those of no task.
    for is_fair in [false, true] {
        let mut lanes: BTreeMap<&Lane, i32> = BTreeMap::new();
        let rows = rows
            .iter()
            .filter(|(_, lane)| lane.task.is_empty() == is_fair);
        for (_, lane) in rows.clone() {
            lanes.insert(lane, 0);
        }
        if lanes.is_empty() {
            continue;
        }
        for (number, place) in (1..).zip(lanes.values_mut()) {
            *place = number;
        }
        let mut rows: Vec<&(RunKey, Lane)> = rows.collect();
        rows.sort_unstable_by_key(|(run, _)| *run);
        let tokens: Vec<i64> = rows.iter().map(|(run, _)| run.token).collect();
        let lane_of: Vec<i32> = rows
            .iter()
            .filter_map(|(_, lane)| lanes.get(lane).copied())
            .collect();
        sqlx::query("SELECT tierline.park($1, $2, $3, $4, $5, $6, $7, $8)")
            .bind(app)
            .bind(tier)
            .bind(is_fair)
            .bind(
                lanes
                    .keys()
                    .map(|lane| lane.task.as_str())
                    .collect::<Vec<_>>(),
            )
            .bind(
                lanes
                    .keys()
                    .map(|lane| lane.key.as_str())
                    .collect::<Vec<_>>(),
            )
            .bind(rows.iter().map(|(run, _)| run.id).collect::<Vec<Uuid>>())
            .bind(lane_of)
            .bind((from == ParkFrom::Running).then_some(tokens))
            .execute(&mut *connection)
            .await?;
    }
    Ok(())
}

/// Claims tasks from lanes, for a worker.
pub(crate) async fn claim_parked(
    connection: &mut PgConnection<'_>,
    app: &str,
    tier: &str,
    worker: i64,
    claims: &[LaneClaim],
    are_suspects: bool,
    bytes: usize,
) -> Result<Vec<ParkedRow>, sqlx::Error> {
    let token = draw_token();
    let mut parked = Vec::new();
    for are_fair in [false, true] {
        let mut claims: Vec<&LaneClaim> = claims
            .iter()
            .filter(|it| it.task.is_empty() == are_fair)
            .collect();
        if claims.is_empty() {
            continue;
        }
        // In one order everywhere, so that two processes never deadlock.
        claims.sort_unstable_by(|one, other| one.task.cmp(&other.task));
        let count = |count: usize| i32::try_from(count).unwrap_or(i32::MAX);
        let ttls = claims.iter().map(|it| it.ttl.map(|ttl| ttl.as_secs_f64()));
        let places = claims
            .iter()
            .map(|it| it.places.map(|it| count(it as usize)));
        let rows = sqlx::query(
            "SELECT * FROM tierline.claim_parked($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)",
        )
        .bind(app)
        .bind(tier)
        .bind(worker)
        .bind(token)
        .bind(ttls.collect::<Vec<_>>())
        .bind(claims.iter().map(|it| it.task.as_str()).collect::<Vec<_>>())
        .bind(claims.iter().map(|it| count(it.most)).collect::<Vec<_>>())
        .bind(places.collect::<Vec<_>>())
        .bind(are_fair)
        .bind(are_suspects)
        .bind(i64::try_from(bytes.max(1)).unwrap_or(i64::MAX))
        .fetch_all(&mut *connection)
        .await?;
        for row in &rows {
            parked.push(ParkedRow {
                row: ClaimedRow::read(row)?,
                number: row.try_get("number")?,
            });
        }
    }
    Ok(parked)
}

/// Locks the lanes of these parked tasks, in the order in which parking locks them, and before the tasks. Returns them.
pub(super) async fn lock_lanes_of(
    connection: &mut PgConnection<'_>,
    ids: &[Uuid],
) -> Result<Vec<i64>, sqlx::Error> {
    sqlx::query_scalar(
        "SELECT id FROM tierline.lanes WHERE id = ANY(ARRAY(SELECT lane FROM tierline.parked WHERE id = ANY($1))) \
         ORDER BY backlog, task, key FOR UPDATE",
    )
    .bind(ids)
    .fetch_all(connection)
    .await
}

/// Sets the place of lanes that this transaction has locked, after tasks have left them.
pub(super) async fn place_lanes(
    connection: &mut PgConnection<'_>,
    lanes: &[i64],
) -> Result<(), sqlx::Error> {
    if lanes.is_empty() {
        return Ok(());
    }
    // In a statement of its own, which sees what is left in the lanes.
    sqlx::query(
        "SELECT tierline.place_lanes(array_agg(id), task = '', false) \
         FROM tierline.lanes WHERE id = ANY($1) GROUP BY task = ''",
    )
    .bind(lanes)
    .execute(connection)
    .await
    .map(drop)
}

/// What has become ready again.
#[derive(Debug, Default)]
pub(crate) struct Unparked {
    /// The first task of each rank that has any, by its due time.
    pub(crate) starts: Vec<(i16, SystemTime)>,
    pub(crate) has_more: bool,
}

/// Makes tasks of a task's lanes ready again. `lane_task` is empty for the lanes of a whole tier.
pub(crate) async fn unpark(
    connection: &mut PgConnection<'_>,
    app: &str,
    tier: &str,
    lane_task: &str,
) -> Result<Unparked, sqlx::Error> {
    let rows = sqlx::query("SELECT * FROM tierline.unpark($1, $2, $3, $4, $5, $6)")
        .bind(app)
        .bind(tier)
        .bind(lane_task)
        .bind(lane_task.is_empty())
        .bind(MOVED_ROWS)
        .bind(MOVED_BYTES)
        .fetch_all(connection)
        .await?;
    let mut unparked = Unparked::default();
    for row in &rows {
        match (row.try_get("rank")?, row.try_get("first")?) {
            (Some(rank), Some(Time(first))) => unparked.starts.push((rank, first)),
            _ => unparked.has_more = true,
        }
    }
    Ok(unparked)
}

/// The lanes of these tiers in which tasks wait, by tier. It reads a few index entries of each task with lanes.
pub(crate) async fn open_lanes(
    connection: &mut PgConnection<'_>,
    app: &str,
    tiers: &[&str],
) -> Result<Vec<(String, OpenLanes)>, sqlx::Error> {
    let rows = sqlx::query(
        "SELECT of.tier, lanes.task, lanes.rank <= 0 AS has_tasks, \
            EXISTS (SELECT FROM tierline.lanes AS suspects WHERE suspects.backlog = of.id AND suspects.task = lanes.task \
                AND suspects.rank > 0) AS has_suspects \
         FROM tierline.backlogs AS of CROSS JOIN LATERAL ( \
            WITH RECURSIVE first AS ( \
                (SELECT task, rank FROM tierline.lanes WHERE backlog = of.id AND rank IS NOT NULL \
                 ORDER BY task, rank, turn, id LIMIT 1) \
                UNION ALL \
                SELECT next.task, next.rank FROM first CROSS JOIN LATERAL ( \
                    SELECT task, rank FROM tierline.lanes WHERE backlog = of.id AND task > first.task AND rank IS NOT NULL \
                    ORDER BY task, rank, turn, id LIMIT 1 \
                ) AS next \
            ) SELECT task, rank FROM first \
         ) AS lanes WHERE of.app = $1 AND of.tier = ANY($2)",
    )
    .bind(app)
    .bind(tiers)
    .fetch_all(connection)
    .await?;
    let read = |row: &sqlx::postgres::PgRow| {
        let lanes = OpenLanes {
            task: row.try_get("task")?,
            has_tasks: row.try_get("has_tasks")?,
            has_suspects: row.try_get("has_suspects")?,
        };
        Ok((row.try_get("tier")?, lanes))
    };
    rows.iter().map(read).collect()
}

/// Removes lanes that have been empty for a while, at most so many. Returns how many.
pub(crate) async fn remove_empty_lanes(
    connection: &mut PgConnection<'_>,
    most: i64,
) -> Result<u64, sqlx::Error> {
    let removed = sqlx::query(
        "DELETE FROM tierline.lanes WHERE id = ANY(ARRAY( \
            SELECT id FROM tierline.lanes WHERE rank IS NULL AND emptied_at < now() - interval '1 hour' \
                AND NOT EXISTS (SELECT FROM tierline.running WHERE running.lane = lanes.id) \
                AND NOT EXISTS (SELECT FROM tierline.parked WHERE parked.lane = lanes.id) \
            ORDER BY emptied_at LIMIT $1 FOR UPDATE SKIP LOCKED))",
    )
    .bind(most)
    .execute(connection)
    .await?;
    Ok(removed.rows_affected())
}
