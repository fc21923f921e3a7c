//! How the schedules of an app are doing, in a few figures.

use std::time::SystemTime;

use crate::postgres::{PgConnection, Time};

/// The schedules of an app, those in the file and those that code has added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Overview {
    pub(crate) count: u32,
    pub(crate) paused: u32,
    pub(crate) has_leader: bool,
    pub(crate) next_due: Option<SystemTime>,
}

/// Reads it. The table has a row for each schedule.
pub(crate) async fn overview(
    connection: &mut PgConnection<'_>,
    app: &str,
) -> Result<Overview, sqlx::Error> {
    let (count, paused, next_due, has_leader): (i64, i64, Option<Time>, bool) = sqlx::query_as(
        "SELECT count(*), count(*) FILTER (WHERE paused_at IS NOT NULL), min(next_due), \
            EXISTS (SELECT FROM tierline.schedule_leaders WHERE app = $1 AND expires_at > clock_timestamp()) \
         FROM tierline.schedules WHERE app = $1 AND gone_at IS NULL",
    )
    .bind(app)
    .fetch_one(connection)
    .await?;
    let number = |count: i64| u32::try_from(count).unwrap_or(u32::MAX);
    Ok(Overview {
        count: number(count),
        paused: number(paused),
        has_leader,
        next_due: next_due.map(|Time(due)| due),
    })
}
