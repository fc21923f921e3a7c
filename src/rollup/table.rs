//! The statements about rollups.

use std::sync::LazyLock;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Row};
use uuid::Uuid;

use super::histogram::BUCKETS;
use super::pending::Batch;
use super::totals::COLUMNS;
use super::{Histogram, RollupTotals};
use crate::postgres::{PgConnection, Time};

/// A batch begins so much later than it says: a clock that is a moment behind must not take its minute for the one before.
const SLACK: Duration = Duration::from_secs(1);

/// Whether the database has the tables.
pub(super) async fn is_migrated(connection: &mut PgConnection<'_>) -> Result<bool, sqlx::Error> {
    sqlx::query_scalar("SELECT to_regclass('tierline.rollups') IS NOT NULL")
        .fetch_one(connection)
        .await
}

/// One statement, so that the number of the batch and its counts are stored together or not at all. The minute is that of
/// the server's clock, which is the same for all processes. Rows are in one order everywhere, so that two
/// processes never deadlock. The clock is read when they are written, however long they have waited for others.
static ADD: LazyLock<String> = LazyLock::new(|| {
    let columns = COLUMNS.join(", ");
    let types = COLUMNS.map(|column| format!("{column} bigint")).join(", ");
    let sums = COLUMNS.map(|column| format!("{column} = known.{column} + excluded.{column}"));
    let sums = sums.join(", ");
    format!(
        "WITH fresh AS ( \
            INSERT INTO tierline.rollup_writers AS writer (process, app, last_batch) VALUES ($1, $2, $3) \
            ON CONFLICT (process) DO UPDATE SET last_batch = excluded.last_batch, written_at = now() \
            WHERE writer.last_batch < excluded.last_batch RETURNING 1 \
         ), added AS ( \
            INSERT INTO tierline.rollups AS known (app, minute, tier, task, {columns}, is_paused, wait_sum, run_sum, wait, run) \
            SELECT $2, date_trunc('minute', statement_timestamp() - make_interval(secs => $4)), tier, task, {columns}, \
                is_paused, wait_sum, run_sum, wait, run \
            FROM jsonb_to_recordset($5::jsonb) AS counted (tier text, task text, {types}, is_paused boolean, \
                wait_sum bigint, run_sum bigint, wait bigint[], run bigint[]) \
            WHERE EXISTS (SELECT FROM fresh) ORDER BY tier COLLATE \"C\", task COLLATE \"C\" \
            ON CONFLICT (app, minute, tier, task) DO UPDATE SET {sums}, is_paused = known.is_paused OR excluded.is_paused, \
                wait_sum = known.wait_sum + excluded.wait_sum, run_sum = known.run_sum + excluded.run_sum, \
                wait = tierline.add_counts(known.wait, excluded.wait), \
                run = tierline.add_counts(known.run, excluded.run) RETURNING 1 \
         ) \
         SELECT extract(epoch FROM clock_timestamp() - date_trunc('minute', clock_timestamp()))::float8 \
         FROM (SELECT count(*) FROM added) AS written"
    )
});

/// A row of a batch as JSON. The names of a map are texts that Postgres can store.
pub(super) fn row(tier: &str, task: &str, totals: &RollupTotals) -> Value {
    let mut row = json!({
        "tier": tier,
        "task": task,
        "is_paused": totals.is_paused,
        "wait_sum": totals.wait.sum_micros,
        "run_sum": totals.run.sum_micros,
        "wait": totals.wait.trimmed(),
        "run": totals.run.trimmed(),
    });
    for (column, count) in COLUMNS.into_iter().zip(totals.counts()) {
        row[column] = count.into();
    }
    row
}

/// Adds a batch, unless it was added before. Returns how much of the present minute is over.
pub(super) async fn add(
    connection: &mut PgConnection<'_>,
    process: Uuid,
    app: &str,
    batch: &Batch,
    rows: &str,
) -> Result<Duration, sqlx::Error> {
    let age = batch.begin.elapsed().saturating_sub(SLACK);
    let into_minute: f64 = sqlx::query_scalar(AssertSqlSafe(ADD.as_str()))
        .bind(process)
        .bind(app)
        .bind(batch.number)
        .bind(age.as_secs_f64())
        .bind(rows)
        .fetch_one(connection)
        .await?;
    Ok(Duration::try_from_secs_f64(into_minute.clamp(0.0, 60.0)).unwrap_or_default())
}

/// Removes some of the minutes that were kept for long enough, and the numbers of processes that have ended. Returns how
/// many rows there were.
pub(super) async fn remove_old(
    connection: &mut PgConnection<'_>,
    app: &str,
    keep: Duration,
    most: i64,
) -> Result<u64, sqlx::Error> {
    // Another process may do the same at this moment: neither waits for the other.
    let removed = sqlx::query(
        "WITH old AS MATERIALIZED ( \
            SELECT minute, tier, task FROM tierline.rollups \
            WHERE app = $1 AND minute < statement_timestamp() - make_interval(secs => $2) \
            ORDER BY minute, tier, task LIMIT $3 FOR UPDATE SKIP LOCKED \
         ) DELETE FROM tierline.rollups AS kept USING old \
         WHERE kept.app = $1 AND kept.minute = old.minute AND kept.tier = old.tier AND kept.task = old.task",
    )
    .bind(app)
    .bind(keep.as_secs_f64())
    .bind(most)
    .execute(&mut *connection)
    .await?;
    // A process that could not write for so long has lost its number: its last batch may then count twice.
    sqlx::query(
        "DELETE FROM tierline.rollup_writers WHERE process IN ( \
            SELECT process FROM tierline.rollup_writers \
            WHERE app = $1 AND written_at < statement_timestamp() - interval '7 days' LIMIT $2 FOR UPDATE SKIP LOCKED)",
    )
    .bind(app)
    .bind(most)
    .execute(connection)
    .await?;
    Ok(removed.rows_affected())
}

/// Which minutes.
#[derive(Debug, Clone, Copy)]
pub(super) enum Span {
    /// Those of this time before now, by the clock of the server.
    Last(Duration),
    Between(SystemTime, SystemTime),
}

/// What to sum up.
pub(super) struct Selection<'a> {
    pub(super) app: &'a str,
    pub(super) span: Span,
    pub(super) tier: Option<&'a str>,
    pub(super) task: Option<&'a str>,
    pub(super) by_task: bool,
    /// Into spans of this length; `None`: all in one.
    pub(super) step: Option<Duration>,
    pub(super) most: i64,
}

/// A sum.
pub(super) struct Sum {
    pub(super) since: Option<SystemTime>,
    pub(super) tier: String,
    pub(super) task: Option<String>,
    pub(super) totals: RollupTotals,
}

/// Sums by subscript: the server adds numbers, and takes no array apart.
static SUM: LazyLock<String> = LazyLock::new(|| {
    let sums = COLUMNS.map(|column| format!("sum({column})::bigint"));
    let sums = sums.join(", ");
    let buckets = |column: &str| {
        let sums = (1..=BUCKETS).map(|place| format!("sum({column}[{place}])::bigint"));
        sums.collect::<Vec<_>>().join(", ")
    };
    let (wait, run) = (buckets("wait"), buckets("run"));
    format!(
        "SELECT step, tier, of_task AS task, bool_or(is_paused) AS is_paused, ARRAY[{sums}] AS counts, \
            sum(wait_sum)::bigint AS wait_sum, sum(run_sum)::bigint AS run_sum, ARRAY[{wait}] AS wait, ARRAY[{run}] AS run \
         FROM ( \
            SELECT *, CASE WHEN $6 THEN task END AS of_task, \
                floor(extract(epoch FROM minute) / $7::float8)::float8 * $7::float8 AS step \
            FROM tierline.rollups \
            WHERE app = $1 AND ($3::timestamptz IS NULL OR minute < $3) AND minute >= date_trunc('minute', \
                coalesce($2, statement_timestamp() - make_interval(secs => $9))) AND \
                ($4::text IS NULL OR tier = $4) AND ($5::text IS NULL OR task = $5) \
         ) AS chosen \
         GROUP BY step, tier, of_task ORDER BY step, tier, of_task LIMIT $8"
    )
});

/// Sums up what was counted, in the order of time, tier and task.
pub(super) async fn sum(
    connection: &mut PgConnection<'_>,
    selection: &Selection<'_>,
) -> Result<Vec<Sum>, sqlx::Error> {
    let (last, between) = match selection.span {
        Span::Last(span) => (Some(span), None),
        Span::Between(since, until) => (None, Some((Time(since), Time(until)))),
    };
    let rows = sqlx::query(AssertSqlSafe(SUM.as_str()))
        .bind(selection.app)
        .bind(between.map(|(since, _)| since))
        .bind(between.map(|(_, until)| until))
        .bind(selection.tier)
        .bind(selection.task)
        .bind(selection.by_task)
        .bind(selection.step.map(|step| step.as_secs_f64()))
        .bind(selection.most)
        .bind(last.map(|span| span.as_secs_f64()))
        .fetch_all(connection)
        .await?;
    rows.iter().map(read).collect()
}

/// How much comes in.
pub(crate) struct Arrivals {
    pub(crate) tier: String,
    pub(crate) task: String,
    pub(crate) per_second: f64,
}

/// What has come in within the last ten minutes, or since the app's first minute. Retries and snoozes come in too: each is
/// one more run. What was published with a delay does not come in now.
pub(super) async fn arrivals(
    connection: &mut PgConnection<'_>,
    app: &str,
) -> Result<Vec<Arrivals>, sqlx::Error> {
    let rows = sqlx::query_as::<_, (String, String, f64)>(
        "WITH span AS MATERIALIZED ( \
            SELECT greatest(date_trunc('minute', statement_timestamp() - interval '10 minutes'), \
                (SELECT minute FROM tierline.rollups WHERE app = $1 ORDER BY minute LIMIT 1)) AS since \
         ) \
         SELECT tier, task, sum(published - delayed + retried + snoozed)::float8 \
            / greatest(60, extract(epoch FROM statement_timestamp() - span.since))::float8 \
         FROM span JOIN tierline.rollups ON app = $1 AND minute >= span.since GROUP BY tier, task, span.since",
    )
    .bind(app)
    .fetch_all(connection)
    .await?;
    let arrivals = rows.into_iter().map(|(tier, task, per_second)| Arrivals {
        tier,
        task,
        per_second,
    });
    Ok(arrivals.collect())
}

fn read(row: &PgRow) -> Result<Sum, sqlx::Error> {
    let since: Option<f64> = row.try_get("step")?;
    let since = since.and_then(|it| Duration::try_from_secs_f64(it).ok());
    let mut totals = RollupTotals {
        is_paused: row.try_get("is_paused")?,
        wait: histogram(row.try_get("wait")?, row.try_get("wait_sum")?),
        run: histogram(row.try_get("run")?, row.try_get("run_sum")?),
        ..RollupTotals::default()
    };
    let counts: Vec<i64> = row.try_get("counts")?;
    for (count, read) in totals.counts_mut().into_iter().zip(counts) {
        *count = number(read);
    }
    Ok(Sum {
        since: since.and_then(|since| SystemTime::UNIX_EPOCH.checked_add(since)),
        tier: row.try_get("tier")?,
        task: row.try_get("task")?,
        totals,
    })
}

fn histogram(buckets: Vec<Option<i64>>, sum_micros: i64) -> Histogram {
    let mut histogram = Histogram {
        sum_micros: number(sum_micros),
        ..Histogram::default()
    };
    for (bucket, read) in histogram.buckets.iter_mut().zip(buckets) {
        *bucket = number(read.unwrap_or_default());
    }
    histogram
}

fn number(count: i64) -> u64 {
    u64::try_from(count).unwrap_or_default()
}
