//! Sees to it that the database knows the tiers of the map, before the first row is inserted.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::Mutex;

use super::add_backlogs;
use super::writer::RowWriters;
use crate::Error;
use crate::postgres::{Database, DedicatedConnection};

/// How long the statement may take.
const LIMIT: Duration = Duration::from_secs(10);

/// Whether the database is known to have the tiers of the map.
#[derive(Debug, Default)]
pub(super) struct TiersKnown {
    are_known: AtomicBool,
    /// Locked by the one that asks.
    asking: Mutex<()>,
}

impl RowWriters {
    /// Sees to it that the database knows the tiers of the map.
    ///
    /// This is done on a connection of its own. In the caller's transaction, others that publish to the tier for the first
    /// time would wait for its commit. And the pool may be the caller's: all its connections may have transactions that
    /// wait for this.
    pub(super) async fn prepare(&self) -> Result<(), Error> {
        let known = &self.tiers_known;
        let is_prepared = || known.are_known.load(Ordering::Acquire);
        if is_prepared() {
            return Ok(());
        }
        let _asking = known.asking.lock().await;
        if is_prepared() {
            return Ok(());
        }
        let mut connection = DedicatedConnection::to(&self.database);
        // An app all of whose tiers are on the broker starts without its database.
        if self.may_migrate {
            Database::migrate_on(&mut connection).await?;
        }
        self.add_tiers(&mut connection).await?;
        known.are_known.store(true, Ordering::Release);
        Ok(())
    }

    /// The database does not know a tier: it was restored, perhaps.
    pub(super) fn prepare_again(&self) {
        self.tiers_known.are_known.store(false, Ordering::Release);
    }

    async fn add_tiers(&self, connection: &mut DedicatedConnection) -> Result<(), Error> {
        let tiers: Vec<&str> = self.tiers.keys().map(String::as_str).collect();
        let adding = connection.within(LIMIT, "add the tiers of the map", async |connection| {
            add_backlogs(connection, &self.app, &tiers).await
        });
        adding.await.map(drop)
    }
}
