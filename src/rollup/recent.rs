//! What statistics read: the last hour by tier and minute, the waits of the last minutes, and the reports of processes.

use std::collections::HashMap;
use std::time::Duration;

use sqlx::Row;

use super::table::{Selection, Span, sum};
use super::{Histogram, UNKNOWN};
use crate::postgres::PgConnection;

/// Reports are about this old at most while a process lives; older ones say nothing of what runs.
const REPORTS_COUNT_FOR: Duration = Duration::from_secs(40);
/// More tiers than a map has.
const MOST: i64 = 20_000;

/// What happened of late.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Recent {
    /// The minutes of the last hour in which something happened in a tier, the latest first.
    pub(crate) minutes: HashMap<String, Vec<Minute>>,
    /// How long ago the first minute began that the app has.
    pub(crate) known_for: Duration,
    /// How many starts met their SLO in the time that budgets are for, and how many count.
    pub(crate) budgets: HashMap<String, (u64, u64)>,
    pub(crate) waits: HashMap<String, Histogram>,
    pub(crate) seen: HashMap<String, Seen>,
}

/// A minute of a tier.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Minute {
    /// How long ago it began.
    pub(crate) age: Duration,
    /// What came in to start now.
    pub(crate) arrived: u64,
    /// Attempts that ended, and what expired.
    pub(crate) ended: u64,
    pub(crate) dead: u64,
    pub(crate) slo_met: u64,
    pub(crate) slo_counted: u64,
}

/// What processes have reported of a tier.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Seen {
    /// How many of its tasks run.
    pub(crate) running: u64,
    /// How long ago the latest of what has started was enqueued.
    pub(crate) last_enqueued: Option<Duration>,
    /// How long ago the broker last said that its queue was empty.
    pub(crate) empty: Option<Duration>,
}

/// Reads it. `window` is for waits, `budget` for the counts of budgets.
pub(crate) async fn recent(
    connection: &mut PgConnection<'_>,
    app: &str,
    window: Duration,
    budget: Duration,
) -> Result<Recent, sqlx::Error> {
    let mut recent = Recent::default();
    read_minutes(connection, app, &mut recent).await?;
    let budgets: Vec<(String, i64, i64)> = sqlx::query_as(
        "SELECT tier, sum(slo_met)::bigint, sum(slo_counted)::bigint FROM tierline.rollups \
         WHERE app = $1 AND minute >= statement_timestamp() - make_interval(secs => $2) AND slo_counted > 0 GROUP BY tier",
    )
    .bind(app)
    .bind(budget.as_secs_f64())
    .fetch_all(&mut *connection)
    .await?;
    let budgets = budgets
        .into_iter()
        .map(|(tier, met, counted)| (tier, (met.unsigned_abs(), counted.unsigned_abs())));
    recent.budgets = budgets.collect();
    let selection = Selection {
        app,
        span: Span::Last(window),
        tier: None,
        task: None,
        by_task: false,
        step: None,
        most: MOST,
    };
    let waits = sum(connection, &selection).await?.into_iter();
    recent.waits = waits.map(|it| (it.tier, it.totals.wait)).collect();
    recent.minutes.remove(UNKNOWN);
    recent.seen = read_reports(connection, app).await?;
    Ok(recent)
}

async fn read_minutes(
    connection: &mut PgConnection<'_>,
    app: &str,
    recent: &mut Recent,
) -> Result<(), sqlx::Error> {
    let rows = sqlx::query(
        "SELECT tier, extract(epoch FROM statement_timestamp() - minute)::float8 AS age, \
            sum(published - delayed + retried + snoozed)::bigint AS arrived, \
            sum(done + retried + snoozed + discarded + expired + dead)::bigint AS ended, sum(dead)::bigint AS dead, \
            sum(slo_met)::bigint AS slo_met, sum(slo_counted)::bigint AS slo_counted, \
            extract(epoch FROM statement_timestamp() - \
                (SELECT minute FROM tierline.rollups WHERE app = $1 ORDER BY minute LIMIT 1))::float8 AS known_for \
         FROM tierline.rollups \
         WHERE app = $1 AND minute >= date_trunc('minute', statement_timestamp() - interval '1 hour') \
         GROUP BY tier, minute ORDER BY tier, minute DESC LIMIT $2",
    )
    .bind(app)
    .bind(MOST)
    .fetch_all(connection)
    .await?;
    for row in rows {
        // What is delayed may be counted in another minute than what is published.
        let number = |column: &str| -> Result<u64, sqlx::Error> {
            Ok(u64::try_from(row.try_get::<i64, _>(column)?).unwrap_or_default())
        };
        recent.known_for = seconds(row.try_get("known_for")?);
        let minute = Minute {
            age: seconds(row.try_get("age")?),
            arrived: number("arrived")?,
            ended: number("ended")?,
            dead: number("dead")?,
            slo_met: number("slo_met")?,
            slo_counted: number("slo_counted")?,
        };
        let minutes = recent.minutes.entry(row.try_get("tier")?).or_default();
        minutes.push(minute);
    }
    Ok(())
}

async fn read_reports(
    connection: &mut PgConnection<'_>,
    app: &str,
) -> Result<HashMap<String, Seen>, sqlx::Error> {
    let rows: Vec<(String, i64, Option<f64>, Option<f64>)> = sqlx::query_as(
        "SELECT tier, \
            coalesce(sum(running) FILTER (WHERE reported_at > statement_timestamp() - make_interval(secs => $2)), 0)::bigint, \
            extract(epoch FROM statement_timestamp() - max(last_enqueued))::float8, \
            extract(epoch FROM statement_timestamp() - max(empty_at))::float8 \
         FROM tierline.tier_reports WHERE app = $1 GROUP BY tier",
    )
    .bind(app)
    .bind(REPORTS_COUNT_FOR.as_secs_f64())
    .fetch_all(connection)
    .await?;
    let rows = rows.into_iter().map(|(tier, running, enqueued, empty)| {
        let seen = Seen {
            running: running.unsigned_abs(),
            last_enqueued: enqueued.map(seconds),
            empty: empty.map(seconds),
        };
        (tier, seen)
    });
    Ok(rows.collect())
}

/// A clock that went back gives no time.
fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}
