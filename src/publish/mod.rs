//! Publishing: the broker confirms every message, or the database commits its row, or the publish ends in a typed
//! error at its deadline.
//!
//! When a publish returns `Ok`, the broker or the database has stored the message. Every other publish returns an error
//! that says why, at the latest at its deadline, whatever the broker does. Until then the publisher
//! sends refused, lost and blocked messages again with the same id, so that a duplicate can be
//! recognised.
//!
//! Dropping the future of a publish is safe: the message may have been sent or not.
//!
//! `prepare` turns a request into a message with its destination. `attempt` sends one message until it is confirmed;
//! `lookup` asks whether the queue of a returned message is away for now or gone. `pools` has a `pool` of connections for each
//! worker group. A pool keeps its connections open (`connection`), each with a few channels in confirm mode
//! (`confirm_channel`). `returns` finds out which messages the broker returned as unroutable. `many` publishes a stream of
//! requests with a window of unconfirmed messages. `outcome` says how each publish ended. `rows` is the way into tiers in
//! Postgres.

mod attempt;
mod confirm_channel;
mod connection;
pub(crate) mod error;
mod lookup;
mod many;
mod outcome;
mod outgoing;
mod pool;
mod pools;
mod prepare;
mod returns;
#[cfg(feature = "postgres")]
mod rows;
#[cfg(feature = "postgres")]
mod within;

#[cfg(feature = "postgres")]
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

#[cfg(feature = "postgres")]
use futures_util::future::join_all;
use futures_util::stream::Stream;
use tokio::time::{Instant, timeout};
use tokio_util::task::TaskTracker;

use crate::amqp::{Connection, QueueState};
#[cfg(feature = "postgres")]
use crate::backlog::RowWriters;
use crate::control::KnownControls;
#[cfg(feature = "postgres")]
use crate::control::Override;
use crate::observe::Observers;
use crate::route::Servers;
use crate::spans::Spans;
use crate::task::{Publish, PublishFuture, PublishRequest, Receipt};
use crate::topology::Topology;
use crate::topology::Version;
use crate::{Error, TaskId};
use attempt::{Patience, PublishAttempt};
pub(crate) use connection::Connections;
use lookup::QueueLookups;
use outcome::Call;
pub(crate) use outgoing::{Content, Outgoing, OutgoingMessage};
use pools::{Broker, Pools};
use prepare::Confirmed;
#[cfg(feature = "postgres")]
use prepare::deadline;

/// How long a publish may take unless it says otherwise.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(5);

const LONGEST_DEADLINE: Duration = Duration::from_secs(365 * 86_400);

/// How long what is under way has to end when the app is closed.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// The version of a broker that has not been reached yet: the one with the fewest priorities.
const ASSUMED_VERSION: Version = Version::new(4, 0, 0);

/// Publishes tasks to their tiers. Cheap to clone; all clones share the same few connections.
#[derive(Clone)]
pub(crate) struct Publisher {
    inner: Arc<Inner>,
}

/// A publisher that this value does not keep open.
pub(crate) struct WeakPublisher(Weak<Inner>);

impl WeakPublisher {
    /// `None` after the last app was dropped or closed.
    pub(crate) fn upgrade(&self) -> Option<Publisher> {
        let inner = self.0.upgrade()?;
        (!inner.under_way.is_closed()).then_some(Publisher { inner })
    }
}

struct Inner {
    topology: Topology,
    pools: Pools,
    lookups: QueueLookups,
    /// What inserts rows, if the app has a database.
    #[cfg(feature = "postgres")]
    rows: Option<RowWriters>,
    /// The overrides in force.
    controls: KnownControls,
    /// How the names of the exchanges begin in which delays wait that are longer than a tier's own queues reach.
    long_delays: String,
    trace: TraceContext,
    observers: Observers,
    /// What is being published. Closed with the app: nothing begins any more.
    under_way: TaskTracker,
}

/// Whether a publisher can publish.
#[derive(Debug)]
pub(crate) enum PublisherStatus {
    Up,
    /// The broker has a memory or disk alarm.
    Blocked,
    /// With the cause.
    Down(String),
}

/// Gets the trace context of the caller that publishes.
#[derive(Clone, Default)]
pub(crate) struct TraceContext {
    current: Option<Arc<CurrentTrace>>,
    spans: Spans,
}

type CurrentTrace = dyn Fn() -> Option<String> + Send + Sync;

impl TraceContext {
    pub(crate) fn new(current: impl Fn() -> Option<String> + Send + Sync + 'static) -> Self {
        Self {
            current: Some(Arc::new(current)),
            spans: Spans::default(),
        }
    }

    /// The same, with spans around publishes.
    #[cfg(feature = "otel")]
    pub(crate) fn with_spans(self, spans: Spans) -> Self {
        Self { spans, ..self }
    }

    fn current(&self) -> Option<String> {
        self.current.as_ref().and_then(|current| current())
    }
}

impl fmt::Debug for TraceContext {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_set = self.current.is_some();
        out.debug_struct("TraceContext")
            .field("is_set", &is_set)
            .finish()
    }
}

impl Publisher {
    /// A publisher with `connections` connections for each worker group of the map. It publishes nothing before it is
    /// [ready](Self::ready).
    pub(crate) fn new(
        topology: Topology,
        from: Connections,
        connections: usize,
        #[cfg(feature = "postgres")] rows: Option<RowWriters>,
        controls: KnownControls,
        observers: Observers,
        trace: TraceContext,
    ) -> Self {
        let pools = Pools::new(&topology, from, connections, observers.clone());
        Self {
            inner: Arc::new(Inner {
                lookups: QueueLookups::new(&topology),
                long_delays: topology.names().long_delays(),
                topology,
                pools,
                #[cfg(feature = "postgres")]
                rows,
                controls,
                trace,
                observers,
                under_way: TaskTracker::new(),
            }),
        }
    }

    /// The app's queues are on the broker that this connection leads to. Publishing begins with it.
    pub(crate) fn ready(&self, connection: Connection) {
        self.inner.pools.ready(connection);
    }

    /// Waits until the app's queues are there, however long that takes.
    pub(crate) async fn until_ready(&self) {
        while self
            .inner
            .pools
            .until_ready(Instant::now() + LONGEST_DEADLINE)
            .await
            .is_err()
        {}
    }

    /// There is no broker with the app's queues yet. Publishes wait, and fail with this cause at their deadline.
    pub(crate) fn not_ready(&self, cause: &str) {
        self.inner.pools.not_ready(cause);
    }

    /// The publisher, as long as somebody else keeps it.
    pub(crate) fn downgrade(&self) -> WeakPublisher {
        WeakPublisher(Arc::downgrade(&self.inner))
    }

    /// Refuses what begins from now on, waits for what is under way, five seconds at most, and closes the
    /// connections.
    pub(crate) async fn close(&self) {
        self.inner.under_way.close();
        // What is cut off ends with an error of its own.
        let _ = timeout(CLOSE_LIMIT, self.inner.under_way.wait()).await;
        self.inner.pools.close().await;
    }

    /// # Errors
    /// [`Error::Closed`] after [`close`](Self::close).
    pub(crate) fn check_open(&self, tried: &str) -> Result<(), Error> {
        self.inner.begin(|| tried.into()).map(drop)
    }

    /// Sends a message that has its destination and its properties already (a retry, a dead letter, a
    /// redrive) until the broker confirms it, at the latest until the deadline.
    pub(crate) async fn forward(
        &self,
        message: impl Into<Outgoing>,
        id: &TaskId,
        deadline: Instant,
    ) -> Result<(), Error> {
        let message = message.into();
        let patience = Patience::Full;
        self.forward_attempt(message, id, deadline, patience).await
    }

    /// Likewise, but does not send the message again if its confirm is lost with a connection: it may be stored.
    pub(crate) async fn forward_once(
        &self,
        message: impl Into<Outgoing>,
        id: &TaskId,
        deadline: Instant,
    ) -> Result<(), Error> {
        let message = message.into();
        let patience = Patience::UnlessLost;
        self.forward_attempt(message, id, deadline, patience).await
    }

    /// Likewise, but returns at once if the broker refuses the message.
    #[cfg(feature = "postgres")]
    pub(crate) async fn forward_unless_refused(
        &self,
        message: impl Into<Outgoing>,
        id: &TaskId,
        deadline: Instant,
    ) -> Result<(), Error> {
        let message = message.into();
        let patience = Patience::UnlessRefused;
        self.forward_attempt(message, id, deadline, patience).await
    }

    async fn forward_attempt(
        &self,
        outgoing: Outgoing,
        id: &TaskId,
        deadline: Instant,
        patience: Patience,
    ) -> Result<(), Error> {
        let under_way = self.inner.begin(|| format!("publish {id}"))?;
        if outgoing.message().is_some() {
            self.inner.until_ready(id, deadline).await?;
        }
        let attempt = PublishAttempt {
            _under_way: under_way,
            outgoing,
            id: id.clone(),
            call: Call::again(),
            deadline,
            patience,
        };
        self.inner.send_until_confirmed(&attempt).await.map(drop)
    }

    /// Whether messages can be published now.
    pub(crate) fn status(&self) -> PublisherStatus {
        match self.inner.pools.broker() {
            Broker::Ready(_) => self.inner.pools.status(),
            Broker::NotReady(cause) => PublisherStatus::Down(cause.to_string()),
        }
    }

    /// The state of a queue of the app, as the broker says over a connection of the tier's group. `None`: the broker
    /// could not be asked before the deadline.
    pub(crate) async fn queue_state(
        &self,
        tier: &str,
        queue: &str,
        deadline: Instant,
    ) -> Option<QueueState> {
        let Inner { lookups, pools, .. } = &*self.inner;
        lookups.state(pools, tier, queue, deadline).await.ok()
    }

    /// The states of queues of the app, all asked at once; each is named with a tier, over whose group's connection the broker
    /// is asked. `None`: the broker did not say before the deadline.
    #[cfg(feature = "postgres")]
    pub(crate) async fn queue_states<'a>(
        &self,
        queues: impl IntoIterator<Item = (&'a str, String)>,
        deadline: Instant,
    ) -> HashMap<String, Option<QueueState>> {
        let asking = queues.into_iter().map(|(tier, queue)| async move {
            let state = self.queue_state(tier, &queue, deadline).await;
            (queue, state)
        });
        join_all(asking).await.into_iter().collect()
    }

    /// The version of the broker, as of the latest connection to it.
    pub(crate) fn broker_version(&self) -> Version {
        match self.inner.pools.broker() {
            Broker::Ready(version) => version,
            Broker::NotReady(_) => ASSUMED_VERSION,
        }
    }

    /// Whether messages can be stored as rows.
    pub(crate) fn has_database(&self) -> bool {
        self.inner.has_database()
    }

    /// What decides where a message goes, beside the map.
    pub(crate) fn servers(&self) -> Servers {
        self.inner.servers(self.broker_version())
    }

    /// What begins spans.
    pub(crate) fn spans(&self) -> &Spans {
        &self.inner.trace.spans
    }

    /// Who is told of what happens.
    #[cfg(feature = "postgres")]
    pub(crate) fn observers(&self) -> &Observers {
        &self.inner.observers
    }

    /// Waits until the overrides in force are known, as long as a publish with this deadline would.
    #[cfg(feature = "postgres")]
    pub(crate) async fn until_overrides_are_known(&self, deadline: Instant) {
        self.inner.controls.wait_until_known(deadline).await;
    }

    #[cfg(feature = "postgres")]
    /// The override of a task that is in force.
    pub(crate) fn override_of(&self, task: &str) -> Option<Arc<Override>> {
        self.inner.controls.override_of(task)
    }

    /// Publishes many tasks, with up to a thousand unconfirmed at once, and yields their outcomes in
    /// the order of the requests. Only unconfirmed messages are held in memory.
    pub(crate) fn publish_many<S>(
        &self,
        requests: S,
    ) -> impl Stream<Item = Result<Receipt, Error>> + use<S>
    where
        S: Stream<Item = PublishRequest>,
    {
        many::PublishMany::new(self.inner.clone(), requests)
    }

    /// Publishes tasks within a transaction of the caller: all of them or none.
    #[cfg(feature = "postgres")]
    pub(crate) async fn publish_many_within(
        &self,
        requests: impl IntoIterator<Item = PublishRequest>,
        connection: &mut sqlx::PgConnection,
    ) -> Result<Vec<Receipt>, Error> {
        self.inner.publish_many_within(requests, connection).await
    }
}

impl Publish for Publisher {
    fn publish(&self, request: PublishRequest) -> PublishFuture<'_> {
        Box::pin(async move {
            let attempt = match self.inner.broker_if_overrides_are_known(&request) {
                Broker::Ready(version) => self.inner.prepare(request, version)?,
                Broker::NotReady(_) => Box::pin(self.inner.prepare_when_ready(request)).await?,
            };
            let sent = self.inner.send_until_confirmed(&attempt).await;
            self.inner.receipt(attempt, sent)
        })
    }

    #[cfg(feature = "postgres")]
    fn publish_within<'c>(
        &'c self,
        request: PublishRequest,
        connection: &'c mut sqlx::PgConnection,
    ) -> PublishFuture<'c> {
        Box::pin(self.inner.publish_within(request, connection))
    }
}

impl fmt::Debug for Publisher {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Publisher")
            .field("app", &self.inner.topology.app())
            .finish_non_exhaustive()
    }
}
