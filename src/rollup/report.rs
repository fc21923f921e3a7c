//! What a process sees of the tiers that it serves: how many of their tasks it runs, since when what it started last had
//! waited, and when the broker last said that a queue was empty. Statistics estimate from it for how long the oldest message
//! of a queue has waited, which no broker says.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use uuid::Uuid;

use crate::postgres::PgConnection;

/// A later time that is no later than this is the same: each start would else write what all threads read.
const SAME: i64 = 50;
/// Reports of processes that have been silent for so long become one.
const SILENT: Duration = Duration::from_secs(600);

/// A tier as this process sees it. Times are milliseconds since 1970; 0: never.
#[derive(Debug, Default)]
pub(super) struct Watch {
    running: AtomicI64,
    last_enqueued: AtomicI64,
    empty_at: AtomicI64,
}

/// What is to be reported of a tier.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct TierReport {
    pub(super) running: i64,
    last_enqueued: i64,
    empty_at: i64,
}

impl Watch {
    pub(super) fn began(&self) {
        self.running.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn ended(&self) {
        self.running.fetch_sub(1, Ordering::Relaxed);
    }

    /// A task was started that had waited for so long.
    pub(super) fn started(&self, waited: Duration) {
        let enqueued = SystemTime::now().checked_sub(waited);
        raise(&self.last_enqueued, enqueued.map_or(0, millis));
    }

    pub(super) fn was_empty(&self) {
        raise(&self.empty_at, millis(SystemTime::now()));
    }

    pub(super) fn report(&self) -> TierReport {
        TierReport {
            running: self.running.load(Ordering::Relaxed),
            last_enqueued: self.last_enqueued.load(Ordering::Relaxed),
            empty_at: self.empty_at.load(Ordering::Relaxed),
        }
    }
}

fn raise(known: &AtomicI64, time: i64) {
    if time > known.load(Ordering::Relaxed) + SAME {
        known.fetch_max(time, Ordering::Relaxed);
    }
}

fn millis(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// How many seconds ago that was; `None`: never.
fn ago(time: i64, now: i64) -> Option<f64> {
    (time > 0).then(|| (now - time).max(0) as f64 / 1_000.0)
}

/// Writes reports of a process. Times are told as how long ago they were, so that the clock of the server counts for all.
pub(super) async fn write_reports(
    connection: &mut PgConnection<'_>,
    process: Uuid,
    app: &str,
    reports: &[(&str, TierReport)],
) -> Result<(), sqlx::Error> {
    let now = millis(SystemTime::now());
    let column = |of: fn(&TierReport) -> i64| {
        let agos = reports.iter().map(|(_, report)| ago(of(report), now));
        agos.collect::<Vec<Option<f64>>>()
    };
    let tiers: Vec<&str> = reports.iter().map(|(tier, _)| *tier).collect();
    let running = reports
        .iter()
        .map(|(_, report)| i32::try_from(report.running.max(0)).unwrap_or(i32::MAX));
    sqlx::query(
        "INSERT INTO tierline.tier_reports AS known (app, tier, process, running, last_enqueued, empty_at) \
         SELECT $1, tier, $2, running, statement_timestamp() - make_interval(secs => enqueued), \
            statement_timestamp() - make_interval(secs => empty) \
         FROM unnest($3::text[], $4::int[], $5::float8[], $6::float8[]) AS report (tier, running, enqueued, empty) \
         ORDER BY tier COLLATE \"C\" \
         ON CONFLICT (app, tier, process) DO UPDATE SET running = excluded.running, \
            last_enqueued = greatest(known.last_enqueued, excluded.last_enqueued), \
            empty_at = greatest(known.empty_at, excluded.empty_at), reported_at = excluded.reported_at",
    )
    .bind(app)
    .bind(process)
    .bind(tiers)
    .bind(running.collect::<Vec<_>>())
    .bind(column(|report| report.last_enqueued))
    .bind(column(|report| report.empty_at))
    .execute(connection)
    .await
    .map(drop)
}

/// Joins the reports of processes that have been silent for long, tier by tier.
pub(super) async fn join_old_reports(
    connection: &mut PgConnection<'_>,
    app: &str,
    most: i64,
) -> Result<(), sqlx::Error> {
    sqlx::query(
        "WITH silent AS MATERIALIZED ( \
            SELECT tier, process FROM tierline.tier_reports \
            WHERE app = $1 AND process <> $2 AND reported_at < statement_timestamp() - make_interval(secs => $3) \
            LIMIT $4 FOR UPDATE SKIP LOCKED \
         ), removed AS ( \
            DELETE FROM tierline.tier_reports AS known USING silent \
            WHERE known.app = $1 AND known.tier = silent.tier AND known.process = silent.process \
            RETURNING known.tier, known.last_enqueued, known.empty_at \
         ) \
         INSERT INTO tierline.tier_reports AS known (app, tier, process, running, last_enqueued, empty_at) \
         SELECT $1, tier, $2, 0, max(last_enqueued), max(empty_at) FROM removed GROUP BY tier ORDER BY tier COLLATE \"C\" \
         ON CONFLICT (app, tier, process) DO UPDATE SET \
            last_enqueued = greatest(known.last_enqueued, excluded.last_enqueued), \
            empty_at = greatest(known.empty_at, excluded.empty_at), reported_at = excluded.reported_at",
    )
    .bind(app)
    .bind(Uuid::nil())
    .bind(SILENT.as_secs_f64())
    .bind(most)
    .execute(connection)
    .await
    .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_started_last_is_what_was_enqueued_last() {
        let watch = Watch::default();
        assert_eq!(watch.report(), TierReport::default());
        watch.started(Duration::from_secs(60));
        let first = watch.report().last_enqueued;
        // A retry that has waited for longer than others says nothing of those.
        watch.started(Duration::from_secs(3_600));
        assert_eq!(watch.report().last_enqueued, first);
        watch.started(Duration::from_secs(1));
        assert!(watch.report().last_enqueued > first + 50_000);
    }

    #[test]
    fn what_never_happened_is_not_reported() {
        assert_eq!(ago(0, 5_000), None);
        assert_eq!(ago(3_000, 5_000), Some(2.0));
        // The clock of this machine went back.
        assert_eq!(ago(9_000, 5_000), Some(0.0));
    }
}
