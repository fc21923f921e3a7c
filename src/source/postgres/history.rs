//! Removes finished tasks that their tiers have kept for long enough, and keys whose time is over.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::RowSettings;
use crate::Error;
use crate::backlog::{connection, remove_expired_keys, remove_finished};

/// How often to look while there is nothing to remove.
const EVERY: Duration = Duration::from_secs(60);
/// The pause between two batches.
const PAUSE: Duration = Duration::from_millis(20);
/// How many keys, and how many tasks of each tier, one statement removes.
const AT_ONCE: i64 = 1_000;
/// How long a statement may take.
const LIMIT: Duration = Duration::from_secs(10);

/// Removes finished tasks.
pub(super) async fn remove_tasks(settings: Arc<RowSettings>, ending: CancellationToken) {
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
            pause_after(removing.await).await;
        }
    };
    let _: Option<()> = ending.run_until_cancelled(removing).await;
}

/// Removes keys.
pub(super) async fn remove_keys(settings: Arc<RowSettings>, ending: CancellationToken) {
    let database = &settings.database;
    let removing = async {
        loop {
            let removing = async {
                let mut connection = database.pool().acquire().await?;
                remove_expired_keys(&mut connection, AT_ONCE).await
            };
            let removed = database.within(LIMIT, "remove expired keys", removing);
            pause_after(removed.await).await;
        }
    };
    let _: Option<()> = ending.run_until_cancelled(removing).await;
}

/// Waits before the next batch.
async fn pause_after(removed: Result<u64, Error>) {
    let pause = match removed {
        Ok(count) if count >= AT_ONCE.unsigned_abs() => PAUSE,
        Ok(_) => EVERY,
        Err(error) => {
            tracing::debug!(%error, "cannot remove what is old, trying again in a minute");
            EVERY
        }
    };
    sleep(pause).await;
}
