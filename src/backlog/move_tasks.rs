//! Moves the waiting tasks of some names to another tier, or to another priority, because an operator has overridden them.
//!
//! A tier's rows are walked over in their order, a bounded number in each statement, because no index has the tasks. What
//! moved is then as if it had been published under the override: `first_backlog` stays empty, so a later override moves it
//! again, and its retries go where the task goes then. A row that a rule or an operator has moved by itself stays.
//!
//! Scheduled rows come first: one that falls due meanwhile is found among the ready ones. Parked rows come last, because
//! ready ones are parked meanwhile. Rows that others have locked are left out and counted, so that nobody waits; the caller
//! walks again for them.

use std::ops::RangeInclusive;
use std::time::{Duration, SystemTime};

use sqlx::Row;
use tokio::time::Instant;
use uuid::Uuid;

use super::parked::place_lanes;
use super::{add_backlogs, connection, notify_of_older, seconds};
use crate::Error;
use crate::postgres::{Database, PgConnection, Time};

/// How many rows one statement walks over, and moves at most. It takes some milliseconds, so no claim waits for long.
const AT_ONCE: i64 = 500;
/// About how many bytes of parked rows, which are written anew, one statement moves. It is at least one row.
const BYTES_AT_ONCE: i64 = 4 << 20;
/// How long one statement may take.
const LIMIT: Duration = Duration::from_secs(10);

/// How soon after a notification the next one follows. Each makes every worker of the tier look.
const NOTIFY_EVERY: Duration = Duration::from_millis(100);

/// Which rows go where.
#[derive(Debug)]
pub(crate) struct TasksToMove<'a> {
    pub(crate) app: &'a str,
    /// The numbers of the changes by operators that ask for it. Nothing moves unless all of them are in force.
    pub(crate) controls: &'a [i64],
    /// Only tasks of these names.
    pub(crate) tasks: Vec<&'a str>,
    pub(crate) from: &'a str,
    /// The same tier, if only the priorities change.
    pub(crate) to: &'a str,
    /// The priorities that a task may have there: each gets the nearest.
    pub(crate) priorities: RangeInclusive<u8>,
    /// What has been ready for longer stays: it would expire there at once.
    pub(crate) ttl: Option<Duration>,
}

/// What a walk over a tier did.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Moved {
    /// How many rows it moved.
    pub(crate) count: u64,
    /// How many stay because they are too old for the other tier.
    pub(crate) too_old: u64,
    /// How many others had locked.
    pub(crate) locked: u64,
}

/// How a walk ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WalkEnd {
    /// At the end of the rows.
    Complete,
    OutOfTime,
    /// The operator's change is not in force any more.
    NotInForce,
}

/// Where the next statement begins.
struct Place {
    rank: i16,
    due_at: SystemTime,
    id: Uuid,
}

/// Walks over some rows of a tier after a place, in the order of an index that begins with the tier, and moves those of
/// them that are to. Returns how many, and the place of the last.
///
/// As with promotions, rows that have moved on since they were found are told apart after they are locked.
macro_rules! move_some {
    ($table:literal, $order:literal, $after:literal, $is_too_old:literal) => {
        concat!(
            "WITH walked AS MATERIALIZED ( \
                SELECT id, task, rank, due_at, first_backlog FROM tierline.",
            $table,
            " WHERE backlog = $1 AND (",
            $order,
            ") > (",
            $after,
            ") ORDER BY ",
            $order,
            " LIMIT $10 \
             ), wanted AS MATERIALIZED ( \
                SELECT id, ",
            $is_too_old,
            " AS is_too_old FROM walked WHERE task = ANY($3) AND first_backlog IS NULL AND ($1 <> $2 \
                OR CASE WHEN rank > 0 THEN 1000 - rank ELSE -rank END NOT BETWEEN $4 AND $5) \
             ), locked AS MATERIALIZED ( \
                SELECT ctid AS place, backlog, rank, CASE WHEN rank > 0 THEN 1000 - rank ELSE -rank END AS priority \
                FROM tierline.",
            $table,
            " WHERE id = ANY(ARRAY(SELECT id FROM wanted WHERE NOT is_too_old)) FOR UPDATE SKIP LOCKED \
             ), moved AS ( \
                UPDATE tierline.",
            $table,
            " AS row SET backlog = $2, rank = CASE WHEN row.rank > 0 THEN 1000 - greatest(least(1000 - row.rank, $5), $4) \
                    ELSE -greatest(least(-row.rank, $5), $4) END \
                WHERE row.ctid = ANY(ARRAY(SELECT place FROM locked WHERE backlog = $1 \
                    AND ($1 <> $2 OR priority NOT BETWEEN $4 AND $5))) \
                RETURNING row.id \
             ) SELECT (SELECT count(*) FROM moved) AS moved, (SELECT count(*) FROM wanted WHERE is_too_old) AS too_old, \
                (SELECT count(*) FROM wanted WHERE NOT is_too_old) - (SELECT count(*) FROM locked) AS locked, \
                rank, due_at, id FROM walked ORDER BY (",
            $order,
            ") DESC LIMIT 1"
        )
    };
}

/// The parameters of all statements: the numbers of the two tiers, the tasks, the lowest and the highest priority, the `ttl`,
/// the place, how many rows to walk over, and, for parked ones, about how many bytes.
const READY: &str = move_some!(
    "ready",
    "rank, due_at, id",
    "$7, coalesce($8, '-infinity'), $9",
    "coalesce(due_at <= now() - make_interval(secs => $6), false)"
);
const SCHEDULED: &str = move_some!(
    "scheduled",
    "due_at, id",
    "coalesce($8, '-infinity'), $9",
    "false"
);

/// Tasks that may not run now leave their lanes and are ready in the other tier. Its workers park them again if they have to.
/// Lanes are locked in the order in which parking locks them.
const PARKED: &str = "WITH found AS MATERIALIZED ( \
        SELECT id, lane, task, rank, due_at, first_backlog, \
            octet_length(payload) + coalesce(octet_length(properties), 0) AS size \
        FROM tierline.parked WHERE backlog = $1 AND (rank, due_at, id) > ($7, coalesce($8, '-infinity'), $9) \
        ORDER BY rank, due_at, id LIMIT $10 \
     ), walked AS MATERIALIZED ( \
        SELECT * FROM (SELECT *, sum(size) OVER (ORDER BY rank, due_at, id) - size AS before FROM found) AS found \
        WHERE before < $11 \
     ), wanted AS MATERIALIZED ( \
        SELECT id, lane, coalesce(due_at <= now() - make_interval(secs => $6), false) AS is_too_old FROM walked \
        WHERE task = ANY($3) AND first_backlog IS NULL AND ($1 <> $2 \
            OR CASE WHEN rank > 0 THEN 1000 - rank ELSE -rank END NOT BETWEEN $4 AND $5) \
     ), locked AS MATERIALIZED ( \
        SELECT id FROM tierline.lanes WHERE id = ANY(ARRAY(SELECT lane FROM wanted WHERE NOT is_too_old)) \
        ORDER BY task, key FOR UPDATE \
     ), chosen AS MATERIALIZED ( \
        SELECT ctid AS place FROM tierline.parked WHERE id = ANY(ARRAY(SELECT id FROM wanted WHERE NOT is_too_old)) \
            AND lane = ANY(ARRAY(SELECT id FROM locked)) FOR UPDATE SKIP LOCKED \
     ), taken AS ( \
        DELETE FROM tierline.parked WHERE ctid = ANY(ARRAY(SELECT place FROM chosen)) RETURNING parked.* \
     ), moved AS ( \
        INSERT INTO tierline.ready (id, due_at, backlog, first_backlog, rank, is_held, task, name, properties, payload) \
        SELECT id, due_at, $2, first_backlog, CASE WHEN rank > 0 THEN 1000 - greatest(least(1000 - rank, $5), $4) \
            ELSE -greatest(least(-rank, $5), $4) END, is_held, task, name, properties, payload \
        FROM taken ON CONFLICT (id) DO NOTHING RETURNING ready.id \
     ) SELECT (SELECT count(*) FROM moved) AS moved, (SELECT count(*) FROM wanted WHERE is_too_old) AS too_old, \
        (SELECT count(*) FROM wanted WHERE NOT is_too_old) - (SELECT count(*) FROM chosen) AS locked, \
        ARRAY(SELECT id FROM locked) AS lanes, rank, due_at, id \
     FROM walked ORDER BY (rank, due_at, id) DESC LIMIT 1";

/// Walks once over the rows of a tier, until `end` at the latest, and adds to `moved` what it did.
///
/// # Errors
/// As every use of the database. What was moved before is counted.
pub(crate) async fn move_tasks(
    database: &Database,
    tasks: &TasksToMove<'_>,
    end: Instant,
    moved: &mut Moved,
) -> Result<WalkEnd, Error> {
    let TasksToMove { app, from, to, .. } = tasks;
    let mut connection = connection(database);
    let numbering = connection.within(LIMIT, "look tiers up", async |connection| {
        add_backlogs(connection, app, &[from, to]).await?;
        let number = "SELECT id FROM tierline.backlogs WHERE app = $1 AND tier = $2";
        let number = |tier| sqlx::query_scalar(number).bind(app).bind(tier);
        let from: i32 = number(*from).fetch_one(&mut *connection).await?;
        let to: i32 = number(*to).fetch_one(connection).await?;
        Ok((from, to))
    });
    let tiers = numbering.await?;
    let mut notified_at = None;
    for statement in [SCHEDULED, READY, PARKED] {
        let (mut place, mut must_notify) = (None, false);
        loop {
            let step = match Instant::now() >= end {
                true => Step::End(WalkEnd::OutOfTime),
                false => {
                    let moving = connection.within(LIMIT, "move tasks to another tier", {
                        async |connection| {
                            move_some(connection, statement, tasks, tiers, place.as_ref()).await
                        }
                    });
                    moving.await?
                }
            };
            let ended = match step {
                Step::End(end) => Some(end),
                Step::Moved(..) => None,
            };
            if let Step::Moved(some, last) = step {
                moved.count += some.count;
                moved.too_old += some.too_old;
                moved.locked += some.locked;
                must_notify |= some.count > 0;
                place = Some(last);
            }
            let is_soon = notified_at.is_some_and(|at: Instant| at.elapsed() < NOTIFY_EVERY);
            if must_notify && (ended.is_some() || !is_soon) {
                let notifying = connection.within(LIMIT, "notify workers", async |connection| {
                    notify_of_older(connection, app, to).await
                });
                notifying.await?;
                (must_notify, notified_at) = (false, Some(Instant::now()));
            }
            match ended {
                None => {}
                Some(WalkEnd::Complete) => break,
                Some(end) => return Ok(end),
            }
        }
    }
    Ok(WalkEnd::Complete)
}

/// What one statement did.
enum Step {
    /// It walked up to this place.
    Moved(Moved, Place),
    /// There is nothing more for it to do.
    End(WalkEnd),
}

async fn move_some(
    connection: &mut PgConnection<'_>,
    statement: &'static str,
    tasks: &TasksToMove<'_>,
    (from, to): (i32, i32),
    place: Option<&Place>,
) -> Result<Step, sqlx::Error> {
    let priorities = &tasks.priorities;
    let mut transaction = connection.begin().await?;
    // Who ends the change waits for this statement, so that nothing moves after the end.
    let in_force = sqlx::query(
        "SELECT FROM tierline.controls WHERE id = ANY($1) AND (until IS NULL OR until > clock_timestamp()) \
         ORDER BY id FOR SHARE",
    )
    .bind(tasks.controls)
    .fetch_all(&mut *transaction)
    .await?;
    if in_force.len() < tasks.controls.len() {
        return Ok(Step::End(WalkEnd::NotInForce));
    }
    let row = sqlx::query(statement)
        .bind(from)
        .bind(to)
        .bind(&tasks.tasks)
        .bind(i16::from(*priorities.start()))
        .bind(i16::from(*priorities.end()))
        .bind(tasks.ttl.map(seconds))
        .bind(place.map_or(i16::MIN, |place| place.rank))
        .bind(place.map(|place| Time(place.due_at)))
        .bind(place.map_or(Uuid::nil(), |place| place.id))
        .bind(AT_ONCE)
        .bind(BYTES_AT_ONCE)
        .fetch_optional(&mut *transaction)
        .await?;
    let Some(row) = row else {
        return Ok(Step::End(WalkEnd::Complete));
    };
    if statement == PARKED {
        let lanes: Vec<i64> = row.try_get("lanes")?;
        place_lanes(&mut transaction, &lanes).await?;
    }
    transaction.commit().await?;
    let count = |column| -> Result<u64, sqlx::Error> {
        let count: i64 = row.try_get(column)?;
        Ok(count.unsigned_abs())
    };
    let moved = Moved {
        count: count("moved")?,
        too_old: count("too_old")?,
        locked: count("locked")?,
    };
    let Time(due_at) = row.try_get("due_at")?;
    let place = Place {
        rank: row.try_get("rank")?,
        due_at,
        id: row.try_get("id")?,
    };
    Ok(Step::Moved(moved, place))
}
