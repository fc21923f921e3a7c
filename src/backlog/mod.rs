//! The backlog in Postgres: tasks of tiers with `queue = "postgres"`, as rows.
//!
//! A task is a row of exactly one table, by its phase: `scheduled` until it is due, `ready` until a worker claims it,
//! `running` until it is settled, and `parked` while a pause or a limit holds it back. `row` turns tasks into rows and back. `writer` inserts rows for publishers, `within` in a
//! transaction of the caller, and `keys` takes unique and idempotency keys. `claim` has the statements with which a worker
//! claims and settles rows, `due` the one that makes scheduled tasks ready, `promote` those that move tasks to another
//! tier, and `parked` those about tasks that are held back. `notify` tells workers of rows. Operators look through the rows with [`Backlog`] (`inspect`, `find`, `task`), cancel
//! them and move them (`escalate`). Deployments prepare the tables with [`apply`], and [`doctor`] finds what is wrong with
//! them.

mod apply;
mod claim;
mod commits;
mod count;
mod depth;
mod doctor;
mod due;
pub(crate) mod error;
mod escalate;
mod find;
mod finished;
mod insert;
mod inspect;
mod keys;
mod move_tasks;
mod notify;
mod parked;
mod prepare;
mod promote;
mod room;
mod row;
mod task;
mod tasks;
mod within;
mod writer;

pub use apply::{DatabaseApplied, DatabasePlan, PlannedTier, apply, plan};
pub use doctor::{LONG_TRANSACTION, doctor};
pub use escalate::{Escalated, Escalation};
pub use inspect::Backlog;
pub use task::{BacklogPage, BacklogTask, BacklogTaskDetails, TaskFilter, TaskState};

pub(crate) use claim::{
    Batch, Later, RankStart, claim_and_settle, give_back, mark_begun, seconds, store_later,
};
pub(crate) use count::{
    HeldBack, Startable, TasksLeft, count_rows, count_startable, count_tasks_left,
};
pub(crate) use depth::{RankDepth, RowCount, TierDepth, sum, tier_depths};
pub(crate) use due::{MadeReady, make_ready};
pub(crate) use finished::remove_finished;
pub(crate) use keys::{
    Inserted, KEY_ATTEMPT, KeyProblem, KeyedInsert, hold_keys_to_the_end, remove_expired_keys,
};
pub(crate) use move_tasks::{Moved, TasksToMove, WalkEnd, move_tasks};
pub(crate) use notify::{CHANNEL, OLDER, notify_of_older};
pub(crate) use parked::{
    ClaimedFromLanes, Lane, LaneClaim, LaneKeys, OpenLanes, ParkFrom, Sweep, Unparked,
    claim_parked, lock_lanes_of, lock_ready, open_lanes, park, place_lanes, remove_empty_lanes,
    unpark,
};
pub(crate) use promote::{Aged, Promoted, Rule as AgingRule, find_aged, promote};
pub(crate) use row::{ClaimedRow, NewRow, QUARANTINE_RANK, RunKey, rank};
pub(crate) use tasks::store_tasks;
pub(crate) use writer::{InsertFailure, RowWriters};

use crate::postgres::{Database, DedicatedConnection, PgConnection};

/// Settings of connections for rows. Their statements are made for index scans: a plan that Postgres made while a table
/// was small, and keeps, must not scan it when it is large. A statement that a client gave up after 10 s would stay on the
/// server for as long as it waits for a lock, and the next one opens another connection: it ends soon after. A process that stands
/// still within a transaction keeps its locks no longer than that.
const SETUP: &str = "SET statement_timeout = '12s'; SET enable_seqscan = off; SET enable_bitmapscan = off; SET enable_hashjoin = off; \
                     SET enable_mergejoin = off; SET plan_cache_mode = force_generic_plan; SET jit = off; \
                     SET idle_in_transaction_session_timeout = '5s'";

/// Gives tiers their numbers, if they have none. Returns those that had none.
pub(crate) async fn add_backlogs(
    connection: &mut PgConnection<'_>,
    app: &str,
    tiers: &[&str],
) -> Result<Vec<String>, sqlx::Error> {
    // A conflict also uses a number up, so the tiers that are there are left out.
    sqlx::query_scalar(
        "INSERT INTO tierline.backlogs (app, tier) SELECT $1, new.tier FROM unnest($2::text[]) AS new (tier) \
         WHERE NOT EXISTS (SELECT FROM tierline.backlogs AS known WHERE known.app = $1 AND known.tier = new.tier) \
         ON CONFLICT (app, tier) DO NOTHING RETURNING tier",
    )
    .bind(app)
    .bind(tiers)
    .fetch_all(connection)
    .await
}

/// A connection for the statements of the backlog.
pub(crate) fn connection(database: &Database) -> DedicatedConnection {
    DedicatedConnection::with_setup(database, SETUP)
}
