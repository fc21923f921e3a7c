//! Which limits keep something from starting, as the processes that share them say.

use std::collections::HashSet;

use super::share::Pool;
use crate::postgres::PgConnection;

/// The limits of an app's tiers of which a process has found nothing left within the last seconds. Each is one row.
pub(crate) async fn saturated_tiers(
    connection: &mut PgConnection<'_>,
    app: &str,
) -> Result<HashSet<String>, sqlx::Error> {
    let rows: Vec<(String, String, f64)> = sqlx::query_as(
        "SELECT name, state, extract(epoch FROM clock_timestamp())::float8 \
         FROM tierline.limits WHERE app = $1 AND kind = 'tier'",
    )
    .bind(app)
    .fetch_all(connection)
    .await?;
    let saturated = rows.into_iter().filter(|(_, state, now)| {
        // What a newer release wrote says nothing here.
        let pool: Result<Pool, _> = serde_json::from_str(state);
        pool.is_ok_and(|pool| pool.is_saturated(*now))
    });
    Ok(saturated.map(|(name, ..)| name).collect())
}
