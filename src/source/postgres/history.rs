//! Removes finished tasks that their tiers have kept for long enough.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::RowSettings;
use crate::backlog::{connection, remove_finished};

/// How often to look while there is nothing to remove.
const EVERY: Duration = Duration::from_secs(60);
/// The pause between two batches.
const PAUSE: Duration = Duration::from_millis(20);
/// How many tasks of each tier one statement removes.
const AT_ONCE: i64 = 1_000;
/// How long a statement may take.
const LIMIT: Duration = Duration::from_secs(10);

pub(super) async fn run(settings: Arc<RowSettings>, ending: CancellationToken) {
    let topology = &settings.consumer.topology;
    let tiers: Vec<(&str, Duration)> = settings
        .tiers
        .keys()
        .filter_map(|name| Some((name.as_str(), topology.tier(name)?.home.keep()?)))
        .collect();
    if tiers.is_empty() {
        return;
    }
    let mut connection = connection(&settings.database);
    let removing = async {
        loop {
            let app = settings.app();
            let removing = connection.within(LIMIT, "remove finished tasks", async |connection| {
                remove_finished(connection, app, &tiers, AT_ONCE).await
            });
            let pause = match removing.await {
                Ok(count) if count >= AT_ONCE.unsigned_abs() => PAUSE,
                Ok(_) => EVERY,
                Err(error) => {
                    tracing::debug!(%error, "cannot remove finished tasks, trying again in a minute");
                    EVERY
                }
            };
            sleep(pause).await;
        }
    };
    let _: Option<()> = ending.run_until_cancelled(removing).await;
}
