//! How an app comes to its broker: a connection, and then queues and exchanges in the state of the map.

#[cfg(feature = "deadpool-lapin")]
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::time::Instant;

use super::OnConnect;
use crate::Error;
use crate::amqp::{Address, Connection, Severity, apply, doctor, spread};
#[cfg(feature = "postgres")]
use crate::backlog::store_tasks;
use crate::backoff::Backoff;
use crate::error::BrokerError;
use crate::observe::{Event, Observers, Purpose};
#[cfg(feature = "postgres")]
use crate::postgres::Database;
use crate::publish::WeakPublisher;
use crate::secret::Secret;
use crate::topology::Topology;
#[cfg(feature = "deadpool-lapin")]
use crate::topology::Version;
use crate::topology::plan::Plan;

/// What it takes to connect.
pub(super) struct Connecting {
    pub(super) topology: Topology,
    pub(super) urls: Vec<Secret>,
    pub(super) name: String,
    pub(super) on_connect: OnConnect,
    pub(super) observers: Observers,
    /// The database, if the map has tiers in Postgres, or limits that need it.
    #[cfg(feature = "postgres")]
    pub(super) database: Option<Database>,
    /// Whether the app has a database, whether the map needs one or not.
    pub(super) has_database: bool,
    #[cfg(feature = "deadpool-lapin")]
    pub(super) pool: Option<AppPool>,
}

/// A pool of the app's, and what is learned of its broker.
#[cfg(feature = "deadpool-lapin")]
pub(super) struct AppPool {
    pub(super) pool: deadpool_lapin::Pool,
    pub(super) known: Arc<OnceLock<(Address, Version)>>,
}

impl Connecting {
    /// # Errors
    /// Where an address cannot be read.
    pub(super) fn check(&self) -> Result<(), Error> {
        let mut urls = self.urls.iter();
        urls.try_for_each(|url| url.expose().parse::<Address>().map(drop))
    }

    /// Whether any tier of the map is on the broker, or was before it moved.
    fn needs_broker(&self) -> bool {
        self.topology.tiers_using_broker().next().is_some()
    }

    /// Prepares the database if the map needs one, and tries all addresses of the broker in turn until one answers, for
    /// `limit`. `None`: the map needs no broker.
    ///
    /// # Errors
    /// What the last attempt met. A failure that does not pass by itself is returned at once.
    pub(super) async fn within(&self, limit: Duration) -> Result<Option<Connection>, Error> {
        let begin = Instant::now();
        let mut backoff = Backoff::new();
        loop {
            let error = match self.attempt().await {
                Ok(connected) => return Ok(connected),
                Err(error) => error,
            };
            let pause = backoff.next();
            if !error.is_transient() || begin.elapsed() + pause >= limit {
                return Err(error);
            }
            self.report(&error, &mut backoff);
            tokio::time::sleep(pause).await;
        }
    }

    /// Tries until it succeeds, whatever fails, or until the app is closed or dropped. Then publishing begins. Neither
    /// server waits for the other.
    pub(super) async fn until_ready(self, publisher: WeakPublisher) {
        #[cfg(feature = "postgres")]
        let database = self.database_until_ready(&publisher);
        #[cfg(not(feature = "postgres"))]
        let database = async {};
        tokio::join!(database, self.broker_until_ready(&publisher));
    }

    async fn broker_until_ready(&self, publisher: &WeakPublisher) {
        if !self.needs_broker() {
            return;
        }
        let mut backoff = Backoff::new();
        loop {
            let attempted = self.attempt_broker().await;
            let Some(publisher) = publisher.upgrade() else {
                return;
            };
            match attempted {
                Ok(connection) => return publisher.ready(connection),
                Err(error) => {
                    self.report(&error, &mut backoff);
                    publisher.not_ready(&error.to_string());
                }
            }
            drop(publisher);
            backoff.pause().await;
        }
    }

    #[cfg(feature = "postgres")]
    async fn database_until_ready(&self, publisher: &WeakPublisher) {
        let mut backoff = Backoff::new();
        while let Err(error) = self.prepare_database().await {
            match backoff.is_worth_a_warning() {
                true => tracing::warn!(%error, "cannot prepare the database, trying again"),
                false => tracing::debug!(%error, "cannot prepare the database, trying again"),
            }
            if publisher.upgrade().is_none() {
                return;
            }
            backoff.pause().await;
        }
    }

    fn report(&self, error: &Error, backoff: &mut Backoff) {
        let cause = error.to_string();
        match backoff.is_worth_a_warning() {
            true => tracing::warn!(%cause, "cannot connect to the broker, trying again"),
            false => tracing::debug!(%cause, "cannot connect to the broker, trying again"),
        }
        self.observers.emit(&Event::ConnectFailed {
            purpose: Purpose::Publish,
            cause: &cause,
        });
    }

    /// Prepares the database and the broker, whichever of them the map needs.
    async fn attempt(&self) -> Result<Option<Connection>, Error> {
        #[cfg(feature = "postgres")]
        self.prepare_database().await?;
        match self.needs_broker() {
            true => self.attempt_broker().await.map(Some),
            false => Ok(None),
        }
    }

    /// Connects to the first address that answers, and prepares the broker.
    async fn attempt_broker(&self) -> Result<Connection, Error> {
        let connection = Connection::open_any(&self.urls, &self.name).await?;
        self.prepare(&connection).await?;
        #[cfg(feature = "deadpool-lapin")]
        if let Some(AppPool { pool, known }) = &self.pool {
            let known = known.get_or_init(|| (connection.address().clone(), connection.version()));
            let pooled = Connection::from_pool(pool, known).await?;
            connection.close().await;
            return Ok(pooled);
        }
        Ok(connection)
    }

    /// Brings the tables of tiers in Postgres up to date, or checks that they are there.
    #[cfg(feature = "postgres")]
    async fn prepare_database(&self) -> Result<(), Error> {
        let Some(database) = &self.database else {
            return Ok(());
        };
        match self.on_connect {
            OnConnect::Apply => {
                let migrated = database.migrate().await?;
                tracing::debug!(%migrated);
                store_tasks(database, &self.topology).await
            }
            OnConnect::Verify | OnConnect::Nothing => database.check_backlog().await,
        }
    }

    async fn prepare(&self, connection: &Connection) -> Result<(), Error> {
        match self.on_connect {
            OnConnect::Apply => {
                let plan = Plan::new(&self.topology, connection.version(), self.has_database)?;
                let urls: Vec<_> = self.urls.iter().map(Secret::expose).collect();
                spread(connection, &urls, &self.name, &plan).await;
                let applied = apply(connection, &plan).await?;
                if !applied.unreachable.is_empty() {
                    let queues = applied.unreachable.join(", ");
                    tracing::warn!(
                        queues,
                        "on a node that is down, or without a leader: going on without them"
                    );
                }
            }
            OnConnect::Verify => {
                let mut report = doctor(connection, &self.topology, self.has_database).await?;
                if !report.is_well() {
                    report
                        .findings
                        .retain(|finding| finding.severity > Severity::Note);
                    report.not_checked.clear();
                    return Err(Error::Broker(BrokerError::NotVerified(Box::new(report))));
                }
            }
            OnConnect::Nothing => {
                Plan::new(&self.topology, connection.version(), self.has_database)?;
            }
        }
        Ok(())
    }
}
