//! Notifications about rows. They are statements of their own after the commit: within a transaction a notification takes a
//! lock of the whole cluster. Workers also look by themselves, so a notification may be lost.

use std::time::Duration;

use crate::postgres::PgConnection;

/// The channel of notifications about rows. Their payload is the app and the tier, with a space between. A third word is
/// in how many milliseconds the first of the rows falls due, unless it is ready, or [`OLDER`].
pub(crate) const CHANNEL: &str = "tierline";

/// The rows are ready, and may be older than rows that were claimed before. Claims begin after those.
pub(crate) const OLDER: &str = "older";

/// Workers are told of scheduled rows that fall due sooner than this. They look for those every second.
pub(super) const NOTIFY_BELOW: Duration = Duration::from_millis(1_500);

/// The payload of a notification: a tier has rows that fall due after this time.
pub(super) fn notice(app: &str, tier: &str, after: Duration) -> String {
    match after.as_millis() {
        0 => format!("{app} {tier}"),
        after => format!("{app} {tier} {after}"),
    }
}

/// The payload of a notification: a tier has ready rows that may be older than what was claimed.
pub(super) fn notice_of_older(app: &str, tier: &str) -> String {
    format!("{app} {tier} {OLDER}")
}

pub(super) async fn notify(
    connection: &mut PgConnection<'_>,
    notices: &[String],
) -> Result<(), sqlx::Error> {
    sqlx::query("SELECT pg_notify($1, notice) FROM unnest($2::text[]) AS notice")
        .bind(CHANNEL)
        .bind(notices)
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
    notify(connection, &[notice_of_older(app, tier)]).await
}
