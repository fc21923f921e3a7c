//! Notifications about rows. They are statements of their own after the commit: within a transaction a notification takes a
//! lock of the whole cluster. Workers also look by themselves, so a notification may be lost.

use crate::postgres::PgConnection;

/// The channel of notifications about rows. Their payload is the app and the tier, with a space between. A third word is
/// in how many milliseconds the first of the rows falls due, unless it is ready, or [`OLDER`].
pub(crate) const CHANNEL: &str = "tierline";

/// The rows are ready, and may be older than rows that were claimed before. Claims begin after those.
pub(crate) const OLDER: &str = "older";

pub(super) async fn notify(
    connection: &mut PgConnection<'_>,
    payloads: Vec<String>,
) -> Result<(), sqlx::Error> {
    sqlx::query("SELECT pg_notify($1, payload) FROM unnest($2::text[]) AS payload")
        .bind(CHANNEL)
        .bind(payloads)
        .execute(connection)
        .await?;
    Ok(())
}

/// Tells workers of a tier that rows have moved to it.
pub(crate) async fn notify_of_older(
    connection: &mut PgConnection<'_>,
    app: &str,
    tier: &str,
) -> Result<(), sqlx::Error> {
    notify(connection, vec![format!("{app} {tier} {OLDER}")]).await
}
