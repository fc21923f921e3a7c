//! The relay: publishes rows of tiers on the broker to the queues of their tiers.
//!
//! A tier on the broker may have rows: tasks that were published within a transaction, or with a delay that is longer
//! than its delay queues reach. Its workers take them where they have the same database. Where they have none, the relay
//! does: it claims rows as a worker does, publishes each under its task's id, and deletes those that the broker has
//! confirmed. The guide has a [page](crate::guide::relay) on it.
//!
//! `tier` relays one tier, `keys` holds the unique keys of what was relayed, `message` turns a row into a message, `pace`
//! is how much is sent to a queue that refuses, and `burst` gives way to tiers that have few rows.
//! Every tier is relayed by itself: it has its own task, its own connections to the database, and the connections of its
//! group to the broker. So a flood, or a queue that refuses, holds up no other tier.

mod burst;
mod keys;
mod message;
mod pace;
mod tier;

use std::fmt;
use std::future::{Future, IntoFuture, pending};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::Error;
use crate::error::TopologyError;
use crate::postgres::Database;
use crate::service::{Service, Termination};
use crate::source::amqp::ConsumerSettings;
use crate::source::postgres::RowSettings;
use crate::topology::{Topology, near_miss};
use crate::worker::{DEFAULT_CRASH_BUDGET, WorkerParts};
use burst::Activity;
use tier::RelayedTier;

/// How long rows stay with a relay after its last heartbeat. It holds each for no longer than a publish takes.
const LEASE: Duration = Duration::from_secs(10);
/// How long what was sent to the broker may take to be confirmed and deleted after shutdown was requested.
const LONGEST_STOP: Duration = Duration::from_secs(9);
/// How long the relay may take to say that it ends.
const LEAVE_LIMIT: Duration = Duration::from_secs(1);

/// Publishes rows of tiers on the broker to their queues. See [`Tierline::relay`].
///
/// It runs [until a future completes](Self::until), [until the process is asked to end](Self::until_terminated),
/// or for ever where it is awaited as it is. Any number of processes may run it at once: no row is taken by two of them.
///
/// [`Tierline::relay`]: crate::Tierline::relay
#[must_use = "a relay does nothing until it is awaited"]
pub struct Relay {
    parts: WorkerParts,
    database: Database,
    /// `None`: all that are on the broker.
    tiers: Option<Vec<String>>,
}

impl Relay {
    pub(crate) fn new(parts: WorkerParts, database: Database) -> Self {
        Self {
            parts,
            database,
            tiers: None,
        }
    }

    /// Relays only these tiers. Default: all tiers of the map on the broker.
    ///
    /// ```no_run
    /// # async fn example(app: tierline::Tierline) -> Result<(), tierline::Error> {
    /// app.relay()?.tiers(["critical", "high"]).until_terminated().await?;
    /// # Ok(()) }
    /// ```
    pub fn tiers<T: Into<String>>(mut self, tiers: impl IntoIterator<Item = T>) -> Self {
        self.tiers = Some(tiers.into_iter().map(Into::into).collect());
        self
    }

    /// Relays until `shutdown` completes. From then on nothing is sent. What was sent has five seconds for its confirm,
    /// and all other rows are given back at once. It ends within ten seconds.
    ///
    /// Whatever is away, the broker, a queue or the database, it waits and goes on when it is back. If the returned future
    /// is dropped, or the process dies, another relay or worker takes the rows over that it held, ten seconds later; those
    /// that the broker had stored by then are published twice, under the same id.
    ///
    /// # Errors
    /// [`TopologyError::NotOnBroker`] and [`Error::Closed`], before anything is begun.
    pub async fn until(self, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
        let Self {
            parts,
            database,
            tiers,
        } = self;
        parts.publisher.check_open("start a relay")?;
        let tiers = relayed_tiers(&parts.topology, tiers)?;
        parts.controls.loaded().await;
        let keep_marks = parts.keep_marks;
        let consumer = Arc::new(parts.consumer_settings(Arc::default(), DEFAULT_CRASH_BUDGET));
        let rows = RowSettings::of_relay(&consumer, &database, &tiers, LEASE, keep_marks);
        let (stopping, leaving) = (CancellationToken::new(), CancellationToken::new());
        let leases = tokio::spawn(rows.clone().serve(leaving.clone()));
        let leases = AbortOnDropHandle::new(leases);
        let activity: Arc<Activity> = Arc::default();
        let mut relaying = JoinSet::new();
        for tier in tiers {
            relaying.spawn(relay(
                consumer.clone(),
                rows.clone(),
                tier,
                activity.clone(),
                stopping.clone(),
            ));
        }
        shutdown.await;
        stopping.cancel();
        let ended = async { while relaying.join_next().await.is_some() {} };
        let _ = timeout(LONGEST_STOP, ended).await;
        leaving.cancel();
        let _ = timeout(LEAVE_LIMIT, leases).await;
        Ok(())
    }

    /// Relays until the process is asked to end, with SIGTERM or Ctrl-C; on Windows with Ctrl-C.
    ///
    /// # Errors
    /// As [`until`](Self::until); [`Error::NoSignals`] where the system does not pass them on.
    pub async fn until_terminated(self) -> Result<(), Error> {
        let termination = Termination::listen()?;
        self.until(termination.asked(1)).await
    }
}

impl IntoFuture for Relay {
    type Output = Result<(), Error>;
    type IntoFuture = BoxFuture<'static, Result<(), Error>>;

    /// Relays for ever: as [`until`](Relay::until) with a shutdown that never comes.
    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.until(pending()))
    }
}

impl fmt::Debug for Relay {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Relay")
            .field("app", &self.parts.topology.app())
            .field("tiers", &self.tiers)
            .finish_non_exhaustive()
    }
}

/// The tiers to relay, each once.
fn relayed_tiers(topology: &Topology, wanted: Option<Vec<String>>) -> Result<Vec<String>, Error> {
    let on_broker = || topology.broker_tiers().map(|tier| tier.name.clone());
    let Some(wanted) = wanted else {
        return Ok(on_broker().collect());
    };
    let mut tiers: Vec<String> = Vec::new();
    for tier in wanted {
        if !topology.is_on_broker(&tier) {
            let names: Vec<String> = on_broker().collect();
            return Err(Error::Topology(TopologyError::NotOnBroker {
                near: near_miss(&tier, names.iter().map(String::as_str)).map(Into::into),
                tier: tier.into(),
                on_broker: names.join(", ").into(),
            }));
        }
        if !tiers.contains(&tier) {
            tiers.push(tier);
        }
    }
    Ok(tiers)
}

/// Relays a tier until shutdown is requested. After a panic it is begun anew, and what it held goes back.
async fn relay(
    consumer: Arc<ConsumerSettings>,
    rows: Arc<RowSettings>,
    tier: String,
    activity: Arc<Activity>,
    stopping: CancellationToken,
) {
    // Rows that are claimed before there is a broker would only wait.
    let ready = consumer.publisher.until_ready();
    if stopping.run_until_cancelled(ready).await.is_none() {
        return;
    }
    let service = Service::new(format!("relay of {tier}"), &consumer.observers);
    let relaying = service.run(async || {
        let relayed = RelayedTier::new(consumer.clone(), &rows, &tier, &activity, stopping.clone());
        if let Some(relayed) = relayed {
            relayed.run().await;
        }
    });
    relaying.await;
}
