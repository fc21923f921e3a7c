//! Removes what was kept for long enough: finished tasks of tiers with `keep`, completion marks,
//! keys, and empty lanes.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::RowSettings;
use crate::backlog::{connection, remove_empty_lanes, remove_expired_keys, remove_finished};
use crate::completion;

/// How often to look while there is nothing to remove.
const EVERY: Duration = Duration::from_secs(60);
/// The pause between two batches.
const PAUSE: Duration = Duration::from_millis(20);
/// How many tasks of each tier, marks, keys, or lanes one statement removes.
const AT_ONCE: i64 = 1_000;
/// How long a statement may take.
const LIMIT: Duration = Duration::from_secs(10);

/// What is removed.
enum Kept<'t> {
    /// Finished tasks of these tiers.
    Tasks(Vec<(&'t str, Duration)>),
    /// Completion marks of this age, keys whose time is over, and lanes that have been empty for a while.
    Leftovers(Duration),
}

/// Removes finished tasks that their tiers have kept for long enough.
pub(super) async fn remove_tasks(settings: Arc<RowSettings>, ending: CancellationToken) {
    let topology = &settings.consumer.topology;
    let tiers: Vec<(&str, Duration)> = settings
        .tiers
        .keys()
        .filter_map(|name| Some((name.as_str(), topology.tier(name)?.home.keep()?)))
        .collect();
    if !tiers.is_empty() {
        let removing = remove(&settings, Kept::Tasks(tiers));
        let _: Option<()> = ending.run_until_cancelled(removing).await;
    }
}

/// Removes completion marks that the app has kept for long enough, keys whose time is over, and empty lanes.
pub(super) async fn remove_leftovers(settings: Arc<RowSettings>, ending: CancellationToken) {
    let removing = remove(&settings, Kept::Leftovers(settings.keep_marks));
    let _: Option<()> = ending.run_until_cancelled(removing).await;
}

async fn remove(settings: &RowSettings, kept: Kept<'_>) {
    let mut connection = connection(&settings.database);
    let app = settings.app();
    let tried = match kept {
        Kept::Tasks(_) => "remove finished tasks",
        Kept::Leftovers(_) => "remove completion marks, keys and lanes",
    };
    loop {
        let removing = connection.within(LIMIT, tried, async |connection| match &kept {
            Kept::Tasks(tiers) => remove_finished(connection, app, tiers, AT_ONCE).await,
            Kept::Leftovers(keep) => {
                let marks = completion::remove_marks(connection, app, *keep, AT_ONCE).await?;
                let keys = remove_expired_keys(connection, AT_ONCE).await?;
                let lanes = remove_empty_lanes(connection, AT_ONCE).await?;
                Ok(marks.max(keys).max(lanes))
            }
        });
        let pause = match removing.await {
            Ok(count) if count >= AT_ONCE.unsigned_abs() => PAUSE,
            Ok(_) => EVERY,
            Err(error) => {
                tracing::debug!(%error, "trying again in a minute");
                EVERY
            }
        };
        sleep(pause).await;
    }
}
