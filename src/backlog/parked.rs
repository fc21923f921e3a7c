//! Tasks that are held back: they are paused, at a limit, or wait for the turn of their key. They wait in lanes, one for each
//! tier, task and key (`migrations/0303_parked.sql`).

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use sqlx::Row;
use sqlx::postgres::PgRow;
use uuid::Uuid;

use super::claim::{RankStart, draw_token, seconds};
use super::row::{ClaimedRow, NewRow, RunKey};
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
    /// `=` and the key, which may be empty. Empty: the tasks are not told apart by a key.
    pub(crate) key: String,
}

/// Tasks to be claimed from lanes.
#[derive(Debug, Clone)]
pub(crate) struct LaneClaim {
    /// The task of the lanes. Empty: all tasks of the tier.
    pub(crate) task: String,
    /// How many tasks at most.
    pub(crate) most: usize,
    /// How many of a key may run at once. `None`: the tasks have no keys, or these take turns.
    pub(crate) places: Option<u32>,
    /// How long a task may wait.
    pub(crate) ttl: Option<Duration>,
}

/// What was claimed from lanes.
#[derive(Debug, Default)]
pub(crate) struct ClaimedFromLanes {
    /// Each with its place among those of its lanes that were claimed with it.
    pub(crate) rows: Vec<(ClaimedRow, i64)>,
    /// The tasks of which some lanes were locked by others, which may leave something.
    pub(crate) passed_over: Vec<String>,
}

/// The lanes of a task in which tasks wait.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OpenLanes {
    pub(crate) task: String,
    /// The rank of the first task that may run beside others.
    pub(crate) rank: Option<i16>,
    /// Whether a task waits that may kill its worker.
    pub(crate) has_suspects: bool,
    /// Whether tasks wait in a lane without a key, and in lanes with one.
    pub(crate) has_keyless: bool,
    pub(crate) has_keyed: bool,
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

/// Lanes in the order in which all lock them, and the place of each row's lane among them, from 1 on.
struct LanesOfRows<'l> {
    tasks: Vec<&'l str>,
    keys: Vec<&'l str>,
    lane_of: Vec<i32>,
}

impl<'l> LanesOfRows<'l> {
    fn new(lanes: impl Iterator<Item = &'l Lane> + Clone) -> Self {
        let mut places: BTreeMap<&Lane, i32> = lanes.clone().map(|lane| (lane, 0)).collect();
        for (number, place) in (1..).zip(places.values_mut()) {
            *place = number;
        }
        Self {
            tasks: places.keys().map(|lane| lane.task.as_str()).collect(),
            keys: places.keys().map(|lane| lane.key.as_str()).collect(),
            lane_of: lanes.filter_map(|lane| places.get(lane).copied()).collect(),
        }
    }
}

/// Moves tasks to their lanes, if they are still where they were.
pub(crate) async fn park(
    connection: &mut PgConnection<'_>,
    app: &str,
    tier: &str,
    from: ParkFrom,
    rows: &[(RunKey, Lane)],
) -> Result<(), sqlx::Error> {
    if rows.is_empty() {
        return Ok(());
    }
    let mut rows: Vec<&(RunKey, Lane)> = rows.iter().collect();
    rows.sort_unstable_by_key(|(run, _)| *run);
    let lanes = LanesOfRows::new(rows.iter().map(|(_, lane)| lane));
    let tokens: Vec<i64> = rows.iter().map(|(run, _)| run.token).collect();
    sqlx::query("SELECT tierline.park($1, $2, $3, $4, $5, $6, $7)")
        .bind(app)
        .bind(tier)
        .bind(lanes.tasks)
        .bind(lanes.keys)
        .bind(rows.iter().map(|(run, _)| run.id).collect::<Vec<Uuid>>())
        .bind(lanes.lane_of)
        .bind((from == ParkFrom::Running).then_some(tokens))
        .execute(connection)
        .await
        .map(drop)
}

/// Inserts rows of a tier into their lanes. Returns the number of the transaction.
pub(super) async fn park_new(
    connection: &mut PgConnection<'_>,
    (app, tier): (&str, &str),
    rows: &[(&NewRow, &Lane)],
) -> Result<i64, sqlx::Error> {
    fn column<'r, T>(rows: &[(&'r NewRow, &Lane)], of: impl Fn(&'r NewRow) -> T) -> Vec<T> {
        rows.iter().map(|(row, _)| of(row)).collect()
    }
    let lanes = LanesOfRows::new(rows.iter().map(|(_, lane)| *lane));
    let parking = "SELECT tierline.park_new($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)";
    sqlx::query_scalar(parking)
        .bind(app)
        .bind(tier)
        .bind(lanes.tasks)
        .bind(lanes.keys)
        .bind(column(rows, |row| row.id))
        .bind(lanes.lane_of)
        .bind(column(rows, |row| row.rank))
        .bind(column(rows, |row| row.task.as_str()))
        .bind(column(rows, |row| row.name.as_deref()))
        .bind(column(rows, |row| row.properties.as_deref()))
        .bind(column(rows, |row| row.payload.as_slice()))
        .fetch_one(connection)
        .await
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
) -> Result<ClaimedFromLanes, sqlx::Error> {
    // Lanes are locked in one order everywhere, so that two processes never wait for each other.
    let mut claims: Vec<&LaneClaim> = claims.iter().collect();
    claims.sort_unstable_by(|one, other| one.task.cmp(&other.task));
    let count = |count: usize| i32::try_from(count).unwrap_or(i32::MAX);
    let ttls = claims.iter().map(|it| it.ttl.map(seconds));
    let places = claims
        .iter()
        .map(|it| it.places.map(|it| count(it as usize)));
    let rows =
        sqlx::query("SELECT * FROM tierline.claim_parked($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)")
            .bind(app)
            .bind(tier)
            .bind(worker)
            .bind(draw_token())
            .bind(ttls.collect::<Vec<_>>())
            .bind(claims.iter().map(|it| it.task.as_str()).collect::<Vec<_>>())
            .bind(claims.iter().map(|it| count(it.most)).collect::<Vec<_>>())
            .bind(places.collect::<Vec<_>>())
            .bind(are_suspects)
            .bind(i64::try_from(bytes.max(1)).unwrap_or(i64::MAX))
            .fetch_all(connection)
            .await?;
    let mut claimed = ClaimedFromLanes::default();
    for row in &rows {
        match row.try_get::<Option<Uuid>, _>("id")? {
            Some(_) => claimed
                .rows
                .push((ClaimedRow::read(row)?, row.try_get("number")?)),
            None => claimed.passed_over.push(row.try_get("task")?),
        }
    }
    Ok(claimed)
}

/// Which lanes of a task are to be emptied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LaneKeys {
    All,
    /// Those without a key.
    None,
    /// Those with one.
    Some,
}

/// Locks the lanes of these parked tasks, in the order in which parking locks them, and before the tasks. Returns them.
pub(crate) async fn lock_lanes_of(
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
pub(crate) async fn place_lanes(
    connection: &mut PgConnection<'_>,
    lanes: &[i64],
) -> Result<(), sqlx::Error> {
    if lanes.is_empty() {
        return Ok(());
    }
    // In a statement of its own, which sees what is left in the lanes.
    sqlx::query("SELECT tierline.place_lanes($1, false)")
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

/// Makes tasks of a task's lanes ready again. `lane_task` is empty for the lanes of a whole tier. Lanes that tasks were moved
/// to within the time `quiet` stay as they are.
pub(crate) async fn unpark(
    connection: &mut PgConnection<'_>,
    app: &str,
    tier: &str,
    lane_task: &str,
    keys: LaneKeys,
    quiet: Duration,
) -> Result<Unparked, sqlx::Error> {
    let rows = sqlx::query("SELECT * FROM tierline.unpark($1, $2, $3, $4, $5, $6, $7)")
        .bind(app)
        .bind(tier)
        .bind(lane_task)
        .bind(match keys {
            LaneKeys::All => "all",
            LaneKeys::None => "none",
            LaneKeys::Some => "some",
        })
        .bind(seconds(quiet))
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
        "SELECT of.tier, found.task, first.rank, \
            EXISTS (SELECT FROM tierline.lanes WHERE backlog = of.id AND task = found.task AND has_suspects) AS has_suspects, \
            EXISTS (SELECT FROM tierline.lanes WHERE backlog = of.id AND task = found.task AND key = '' \
                AND (rank IS NOT NULL OR has_suspects)) AS has_keyless, \
            EXISTS (SELECT FROM tierline.lanes WHERE backlog = of.id AND task = found.task AND key <> '' AND rank IS NOT NULL) \
            OR EXISTS (SELECT FROM tierline.lanes WHERE backlog = of.id AND task = found.task AND key <> '' AND has_suspects) \
                AS has_keyed \
         FROM tierline.backlogs AS of CROSS JOIN LATERAL ( \
            WITH RECURSIVE known AS ( \
                (SELECT task FROM tierline.lanes WHERE backlog = of.id AND rank IS NOT NULL \
                 ORDER BY task, rank, turn, id LIMIT 1) \
                UNION ALL \
                SELECT next.task FROM known CROSS JOIN LATERAL ( \
                    SELECT task FROM tierline.lanes WHERE backlog = of.id AND task > known.task AND rank IS NOT NULL \
                    ORDER BY task, rank, turn, id LIMIT 1 \
                ) AS next \
            ) SELECT task FROM known \
            UNION (SELECT task FROM tierline.lanes WHERE backlog = of.id AND has_suspects LIMIT 100) \
         ) AS found LEFT JOIN LATERAL ( \
            SELECT rank FROM tierline.lanes WHERE backlog = of.id AND task = found.task AND rank IS NOT NULL \
            ORDER BY rank, turn, id LIMIT 1 \
         ) AS first ON true WHERE of.app = $1 AND of.tier = ANY($2)",
    )
    .bind(app)
    .bind(tiers)
    .fetch_all(connection)
    .await?;
    let read = |row: &PgRow| {
        let lanes = OpenLanes {
            task: row.try_get("task")?,
            rank: row.try_get("rank")?,
            has_suspects: row.try_get("has_suspects")?,
            has_keyless: row.try_get("has_keyless")?,
            has_keyed: row.try_get("has_keyed")?,
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
            SELECT id FROM tierline.lanes WHERE emptied_at < now() - interval '1 hour' \
                AND NOT EXISTS (SELECT FROM tierline.parked WHERE parked.lane = lanes.id) \
            ORDER BY emptied_at LIMIT $1 FOR UPDATE SKIP LOCKED))",
    )
    .bind(most)
    .execute(connection)
    .await?;
    Ok(removed.rows_affected())
}
