//! Claims rows, and settles those that were claimed.
//!
//! Every statement about a run names the row and the token of its claim. If another process has claimed the row since,
//! the statement finds nothing and changes nothing.
//!
//! A publish that got no answer is repeated, so a row may be in a table that its twin moves to. They are the same task:
//! every move leaves the one that is there.

use std::time::{Duration, SystemTime};

use uuid::Uuid;

use super::row::{ClaimedRow, RunKey};
use crate::postgres::{PgConnection, Time};
use crate::task::TaskEnding;

/// What one statement settles and claims.
#[derive(Debug)]
pub(crate) struct Batch {
    /// Runs that are done, with how their tasks ended. `None`: the task goes on elsewhere.
    pub(crate) done: Vec<(RunKey, Option<TaskEnding>)>,
    /// Runs that have begun, and must be known to have if their process dies.
    pub(crate) begun: Vec<RunKey>,
    /// How many rows to claim at most.
    pub(crate) rows: usize,
    /// How many bytes of payload to claim, about. At least one row is claimed.
    pub(crate) bytes: usize,
    /// The ranks to claim from, in order, and where each one's rows begin.
    pub(crate) ranks: Vec<RankStart>,
}

impl Batch {
    /// Whether this process claimed a row, lost its lease, claimed it again, and ends both runs.
    fn ends_an_id_twice(&self) -> bool {
        let mut ids: Vec<Uuid> = column(&self.done, |(run, _)| run.id);
        ids.sort_unstable();
        ids.windows(2).any(|pair| pair[0] == pair[1])
    }
}

/// From which due time on a rank has rows. Rows that other transactions add before it are found later.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RankStart {
    pub(crate) rank: i16,
    /// `None`: from the beginning.
    pub(crate) since: Option<SystemTime>,
}

/// The last batch is settled and the next one claimed in one statement: a commit each would cost more than the work.
///
/// Rows that are locked are deleted by their place in the table, which no other transaction can change then.
///
/// Runs are found by `id = ANY`, also where they are joined with their tokens: Postgres may otherwise take `running` for
/// small, and scan all of it for each statement.
///
/// The scan of each rank begins where its rows begin. Before that are entries of rows that were deleted, and while
/// some transaction holds an old snapshot, nobody can remove them.
/// A run that is marked as begun is not marked again: its handler's transaction marks it before it begins, and could not
/// complete it if it had changed since (REPEATABLE READ).
macro_rules! claim {
    ($settle:expr, $on_conflict:literal) => {
        concat!(
            "WITH ",
            $settle,
            ", begun AS ( \
        UPDATE tierline.running SET is_begun = true FROM unnest($5::uuid[], $6::bigint[]) AS started (id, token) \
        WHERE running.id = ANY($5::uuid[]) AND running.id = started.id AND running.token = started.token \
            AND NOT running.is_begun \
    ), picked AS MATERIALIZED ( \
        SELECT place, sum(size) OVER (ORDER BY rank, due_at, id) - size AS before FROM ( \
            SELECT found.* FROM unnest($7::smallint[], $8::timestamptz[]) AS start (rank, since) \
            CROSS JOIN LATERAL ( \
                SELECT ctid AS place, id, rank, due_at, octet_length(payload) + coalesce(octet_length(properties), 0) AS size \
                FROM tierline.ready \
                WHERE backlog = (SELECT id FROM tierline.backlogs WHERE app = $1 AND tier = $2) AND rank = start.rank \
                    AND due_at >= coalesce(start.since, '-infinity') \
                ORDER BY due_at, id LIMIT $9 FOR UPDATE SKIP LOCKED \
            ) AS found LIMIT $9 \
        ) AS found \
    ), taken AS ( \
        DELETE FROM tierline.ready WHERE ctid = ANY(ARRAY(SELECT place FROM picked WHERE before < $10)) \
        RETURNING ready.* \
    ) INSERT INTO tierline.running \
        (id, due_at, token, worker, rank, is_held, backlog, first_backlog, task, name, properties, payload) \
    SELECT id, due_at, $13, $11, rank, is_held, backlog, first_backlog, task, name, properties, payload FROM taken \
    ",
            $on_conflict,
            "RETURNING id, token, due_at, rank, is_held, first_backlog, task, name, properties, payload, \
        coalesce(due_at < now() - make_interval(secs => $12), false) AS is_expired"
        )
    };
}

/// Ends the runs $3 whose tokens $4 are still theirs, where no id is in $3 twice.
macro_rules! done_once {
    () => {
        "done AS ( DELETE FROM tierline.running \
            WHERE id = ANY($3::uuid[]) AND token = ($4::bigint[])[array_position($3::uuid[], id)] )"
    };
}

/// The same where an id may be there twice. It costs a tenth of a claim.
macro_rules! done {
    () => {
        "done AS ( DELETE FROM tierline.running USING unnest($3::uuid[], $4::bigint[]) AS ended (id, token) \
            WHERE running.id = ANY($3::uuid[]) AND running.id = ended.id AND running.token = ended.token )"
    };
}

/// The same in a tier that keeps its tasks: those that still belonged to this process, and have come to an end, are
/// kept. $14 are their endings and $15 the name of the worker.
macro_rules! done_and_kept {
    () => {
        "done AS ( \
        DELETE FROM tierline.running USING unnest($3::uuid[], $4::bigint[], $14::text[]) AS ended (id, token, ending) \
        WHERE running.id = ANY($3::uuid[]) AND running.id = ended.id AND running.token = ended.token \
        RETURNING running.*, ended.ending \
    ), kept AS ( \
        INSERT INTO tierline.finished \
            (id, finished_at, backlog, first_backlog, rank, due_at, ending, worker, task, name, properties, payload) \
        SELECT id, now(), backlog, first_backlog, rank, due_at, ending, $15, task, name, properties, payload \
        FROM done WHERE ending IS NOT NULL ON CONFLICT (id, finished_at) DO NOTHING )"
    };
}

/// The texts of a claim.
struct ClaimStatement {
    usual: &'static str,
    /// The same where a run may end that this process has claimed twice, or a row may be running already. These checks
    /// cost a tenth of a claim each.
    careful: &'static str,
}

const CLAIM: ClaimStatement = ClaimStatement {
    usual: claim!(done_once!(), ""),
    careful: claim!(done!(), "ON CONFLICT (id) DO NOTHING "),
};
/// For tiers that keep their tasks: the others do not pay for it.
const CLAIM_AND_KEEP: ClaimStatement = ClaimStatement {
    usual: claim!(done_and_kept!(), ""),
    careful: claim!(done_and_kept!(), "ON CONFLICT (id) DO NOTHING "),
};

/// Settles and claims rows of a tier, and returns those that were claimed, in order. A run that belonged to another
/// process by then is not settled. `ttl` is how long a row may wait. `keeper` is the name of this worker, if the tier
/// keeps its tasks.
pub(crate) async fn claim_and_settle(
    connection: &mut PgConnection<'_>,
    app: &str,
    tier: &str,
    worker: i64,
    ttl: Option<Duration>,
    keeper: Option<&str>,
    batch: &Batch,
) -> Result<Vec<ClaimedRow>, sqlx::Error> {
    let statement = match keeper {
        Some(_) => CLAIM_AND_KEEP,
        None => CLAIM,
    };
    let claiming = Claiming {
        app,
        tier,
        worker,
        ttl,
        keeper,
        batch,
    };
    if batch.ends_an_id_twice() {
        return claiming.execute(statement.careful, connection).await;
    }
    match claiming.execute(statement.usual, connection).await {
        Err(sqlx::Error::Database(said)) if said.is_unique_violation() => {
            claiming.execute(statement.careful, connection).await
        }
        claimed => claimed,
    }
}

/// What a claim is made with.
struct Claiming<'a> {
    app: &'a str,
    tier: &'a str,
    worker: i64,
    ttl: Option<Duration>,
    keeper: Option<&'a str>,
    batch: &'a Batch,
}

impl Claiming<'_> {
    async fn execute(
        &self,
        statement: &'static str,
        connection: &mut PgConnection<'_>,
    ) -> Result<Vec<ClaimedRow>, sqlx::Error> {
        let batch = self.batch;
        let mut ended = batch.done.clone();
        // In the order of `columns`.
        ended.sort_unstable_by_key(|(run, _)| *run);
        let done: Vec<Uuid> = column(&ended, |(run, _)| run.id);
        let done_tokens: Vec<i64> = column(&ended, |(run, _)| run.token);
        let (begun, begun_tokens) = columns(&batch.begun);
        let ranks: Vec<i16> = batch.ranks.iter().map(|it| it.rank).collect();
        let since: Vec<Option<Time>> = batch.ranks.iter().map(|it| it.since.map(Time)).collect();
        let claiming = sqlx::query(statement)
            .bind(self.app)
            .bind(self.tier)
            .bind(done)
            .bind(done_tokens)
            .bind(begun)
            .bind(begun_tokens)
            .bind(ranks)
            .bind(since)
            .bind(number(batch.rows))
            .bind(number(batch.bytes.max(1)))
            .bind(self.worker)
            .bind(self.ttl.map(|ttl| ttl.as_secs_f64()))
            .bind(draw_token());
        let claiming = match self.keeper {
            Some(keeper) => {
                let endings = column(&ended, |(_, ending)| ending.map(TaskEnding::as_str));
                claiming.bind(endings).bind(keeper)
            }
            None => claiming,
        };
        let found = claiming.fetch_all(connection).await?;
        let rows: Result<Vec<ClaimedRow>, _> = found.iter().map(ClaimedRow::read).collect();
        let mut rows = rows?;
        rows.sort_by_key(|row| (row.rank, row.due_at, row.key.id));
        Ok(rows)
    }
}

/// Marks runs as begun. Returns those that still belong to this process.
pub(crate) async fn mark_begun(
    connection: &mut PgConnection<'_>,
    runs: &[RunKey],
) -> Result<Vec<Uuid>, sqlx::Error> {
    let (ids, tokens) = columns(runs);
    sqlx::query_scalar(
        "UPDATE tierline.running SET is_begun = true FROM unnest($1::uuid[], $2::bigint[]) AS started (id, token) \
         WHERE running.id = ANY($1::uuid[]) AND running.id = started.id AND running.token = started.token RETURNING running.id",
    )
    .bind(ids)
    .bind(tokens)
    .fetch_all(connection)
    .await
}

/// Puts rows back where they were claimed from, as if they had never been.
pub(crate) async fn give_back(
    connection: &mut PgConnection<'_>,
    runs: &[RunKey],
) -> Result<(), sqlx::Error> {
    let (ids, tokens) = columns(runs);
    sqlx::query(
        "WITH back AS ( \
            DELETE FROM tierline.running USING unnest($1::uuid[], $2::bigint[]) AS ended (id, token) \
            WHERE running.id = ANY($1::uuid[]) AND running.id = ended.id AND running.token = ended.token RETURNING running.* \
         ) INSERT INTO tierline.ready (id, due_at, rank, is_held, backlog, first_backlog, task, name, properties, payload) \
         SELECT id, due_at, rank, is_held, backlog, first_backlog, task, name, properties, payload FROM back \
         ON CONFLICT (id) DO NOTHING",
    )
    .bind(ids)
    .bind(tokens)
    .execute(connection)
    .await?;
    Ok(())
}

/// What takes the place of a run: the same task later.
#[derive(Debug)]
pub(crate) struct Later {
    pub(crate) run: RunKey,
    /// The tier that the map gives the task now, or its own if it was promoted or escalated.
    pub(crate) tier: String,
    pub(crate) rank: i16,
    pub(crate) after: Duration,
    pub(crate) properties: Vec<u8>,
    /// Whether a process that held the task has died.
    pub(crate) is_held: bool,
}

/// Puts tasks into `scheduled`, or into `ready` if they are due at once. Returns those that still belonged to this
/// process.
pub(crate) async fn store_later(
    connection: &mut PgConnection<'_>,
    later: &[Later],
) -> Result<Vec<Uuid>, sqlx::Error> {
    let mut later: Vec<&Later> = later.iter().collect();
    later.sort_unstable_by_key(|it| it.run);
    let later = later.as_slice();
    let runs: Vec<RunKey> = later.iter().map(|it| it.run).collect();
    let (ids, tokens) = columns(&runs);
    sqlx::query_scalar(
        "WITH ended AS ( \
            DELETE FROM tierline.running USING unnest($1::uuid[], $2::bigint[], $3::text[], $4::smallint[], \
                $5::float8[], $6::bytea[], $7::bool[]) AS next (id, token, tier, rank, after, properties, is_held) \
            WHERE running.id = ANY($1::uuid[]) AND running.id = next.id AND running.token = next.token \
            RETURNING running.id, running.first_backlog, running.task, running.name, running.payload, next.rank, \
                coalesce((SELECT other.id FROM tierline.backlogs AS own JOIN tierline.backlogs AS other USING (app) \
                    WHERE own.id = running.backlog AND other.tier = next.tier), running.backlog) AS backlog, \
                next.after, next.properties, next.is_held \
         ), at_once AS ( \
            INSERT INTO tierline.ready (id, due_at, rank, is_held, backlog, first_backlog, task, name, properties, payload) \
            SELECT id, now(), rank, is_held, backlog, first_backlog, task, name, properties, payload FROM ended WHERE after <= 0 \
            ON CONFLICT (id) DO NOTHING \
         ), delayed AS ( \
            INSERT INTO tierline.scheduled (id, due_at, rank, is_held, backlog, first_backlog, task, name, properties, payload) \
            SELECT id, now() + make_interval(secs => after), rank, is_held, backlog, first_backlog, task, name, properties, \
                payload FROM ended WHERE after > 0 ON CONFLICT (id) DO NOTHING \
         ) SELECT id FROM ended",
    )
    .bind(ids)
    .bind(tokens)
    .bind(column(later, |it| it.tier.as_str()))
    .bind(column(later, |it| it.rank))
    .bind(column(later, |it| seconds(it.after)))
    .bind(column(later, |it| it.properties.as_slice()))
    .bind(column(later, |it| it.is_held))
    .fetch_all(connection)
    .await
}

/// A delay in seconds. One that no calendar has ends in a thousand years.
pub(crate) fn seconds(after: Duration) -> f64 {
    const LONGEST: f64 = 1_000.0 * 365.25 * 86_400.0;
    after.as_secs_f64().min(LONGEST)
}

/// A token for a claim. It is random, so that not even a database that lost its last transactions gives it out again.
pub(super) fn draw_token() -> i64 {
    (Uuid::now_v7().as_u128() as u64 >> 1) as i64
}

/// In one order everywhere, so that two statements about the same rows never deadlock.
fn columns(runs: &[RunKey]) -> (Vec<Uuid>, Vec<i64>) {
    let mut runs = runs.to_vec();
    if !runs.is_sorted() {
        runs.sort_unstable();
    }
    runs.into_iter().map(|run| (run.id, run.token)).unzip()
}

fn column<'r, R, T>(rows: &'r [R], of: impl Fn(&'r R) -> T) -> Vec<T> {
    rows.iter().map(of).collect()
}

fn number(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_tiers_that_keep_their_tasks_write_them_to_the_history() {
        assert!(!CLAIM.usual.contains("tierline.finished"));
        assert!(
            CLAIM_AND_KEEP
                .usual
                .contains("INSERT INTO tierline.finished")
        );
    }
}
