//! The connection of a tier, which the first tier of a group shares with its quarantine: made, lost, and made again.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::ConsumerSettings;
use crate::amqp::Connection;
use crate::backoff::Backoff;
use crate::observe::{Event, ObservedConnection, Purpose};

/// How often to look whether the connection is open. No consumer may be on it that ends with it.
const CHECK_EVERY: Duration = Duration::from_secs(1);
/// How many reports of a lost connection are kept. One is enough; more say the same.
const REPORTS: usize = 8;

/// A connection that is kept up until the last clone is dropped.
#[derive(Clone)]
pub(super) struct ConsumerConnection {
    shared: Arc<Shared>,
    current: watch::Receiver<Current>,
}

struct Shared {
    reports: mpsc::Sender<String>,
    /// Cancelled when a lost connection need not be made again.
    draining: CancellationToken,
    _task: AbortOnDropHandle<()>,
}

type Current = Option<Arc<Connection>>;

impl ConsumerConnection {
    /// Connects in the background, for ever. The node that leads the tier's queue comes first.
    pub(super) fn keep(settings: Arc<ConsumerSettings>, group: &str, tier: &str) -> Self {
        let (sender, current) = watch::channel(None);
        let (reports, reported) = mpsc::channel(REPORTS);
        let draining = CancellationToken::new();
        let keep_connected = KeepConnected {
            name: format!("{} {group} {tier}", settings.connection_name),
            group: group.to_owned(),
            tier: tier.to_owned(),
            next_url: settings.topology.share_of(tier),
            backoff: Backoff::new(),
            settings,
            sender,
            reported,
            draining: draining.clone(),
        };
        Self {
            shared: Arc::new(Shared {
                reports,
                draining,
                _task: AbortOnDropHandle::new(tokio::spawn(keep_connected.run())),
            }),
            current,
        }
    }

    /// The connection, while there is one.
    pub(super) fn current(&self) -> Current {
        self.current.borrow().clone()
    }

    /// A connection, as soon as there is one.
    pub(super) async fn opened(&mut self) -> Option<Arc<Connection>> {
        let current = self.current.wait_for(Option::is_some).await.ok()?;
        current.clone()
    }

    /// Completes when the connection is made or lost after this call.
    pub(super) fn changed(&self) -> BoxFuture<'static, ()> {
        let mut current = self.current.clone();
        current.mark_unchanged();
        Box::pin(async move {
            if current.changed().await.is_err() {
                std::future::pending().await
            }
        })
    }

    /// Tells that the connection does not work any more.
    pub(super) fn report_lost(&self, cause: &str) {
        // Without room for it, others have said the same.
        let _ = self.shared.reports.try_send(cause.to_owned());
    }

    /// A connection that is lost from now on is not made again: what runs cannot be settled on a new one.
    pub(super) fn drain(&self) {
        self.shared.draining.cancel();
    }

    /// Closes the connection, if this is the last clone.
    pub(super) async fn close(self) {
        let Self { shared, current } = self;
        let connection = current.borrow().clone();
        drop(current);
        if let Some(shared) = Arc::into_inner(shared) {
            // The task holds the connection too.
            shared._task.abort();
            let _ = shared._task.await;
            if let Some(connection) = connection.and_then(Arc::into_inner) {
                connection.close().await;
            }
        }
    }
}

/// The task that keeps the connection up.
struct KeepConnected {
    settings: Arc<ConsumerSettings>,
    name: String,
    group: String,
    tier: String,
    /// Which of the broker's addresses is tried next.
    next_url: usize,
    /// It outlives connections: one that is made and lost again at once must not be made again at once.
    backoff: Backoff,
    sender: watch::Sender<Current>,
    reported: mpsc::Receiver<String>,
    draining: CancellationToken,
}

impl KeepConnected {
    async fn run(mut self) {
        loop {
            let draining = self.draining.clone();
            let Some(opened) = draining.run_until_cancelled(self.connect()).await else {
                return std::future::pending().await;
            };
            let Some(connection) = opened else {
                self.backoff.pause().await;
                continue;
            };
            let connected_at = Instant::now();
            let settings = self.settings.clone();
            let address = connection.address().to_string();
            let observed = ObservedConnection::opened(&settings.observers, Purpose::Work, &address);
            let connection = Arc::new(connection);
            // What was reported before is about an earlier connection.
            while self.reported.try_recv().is_ok() {}
            self.sender.send_replace(Some(connection.clone()));
            let cause = self.lost(&connection).await;
            drop(connection);
            self.sender.send_replace(None);
            // A node that is frozen accepts connections and says nothing: another comes first.
            self.next_url += 1;
            let (group, tier) = (&self.group, &self.tier);
            tracing::warn!(group, tier, cause, "the connection is lost");
            observed.lost(&cause);
            self.backoff.pause_after(connected_at.elapsed()).await;
        }
    }

    async fn connect(&mut self) -> Option<Connection> {
        let urls = &self.settings.urls;
        let url = &urls[self.next_url % urls.len()];
        let (purpose, observers) = (Purpose::Work, &self.settings.observers);
        match Connection::open(url.expose(), &self.name).await {
            Ok(connection) => {
                let address = &connection.address().to_string();
                tracing::info!(group = self.group, tier = self.tier, address, "connected");
                Some(connection)
            }
            Err(error) => {
                let cause = &error.to_string();
                let (group, tier) = (&self.group, &self.tier);
                match self.backoff.is_worth_a_warning() {
                    true => tracing::warn!(group, tier, cause, "cannot connect, trying again"),
                    false => tracing::debug!(group, tier, cause, "cannot connect, trying again"),
                }
                observers.emit(&Event::ConnectFailed { purpose, cause });
                self.next_url += 1;
                None
            }
        }
    }

    /// Waits until the connection is lost, and says why.
    async fn lost(&mut self, connection: &Connection) -> String {
        loop {
            let reported = timeout(CHECK_EVERY, self.reported.recv()).await;
            if !connection.is_open() {
                let cause = reported.ok().flatten();
                return cause.unwrap_or_else(|| "the connection was closed".to_owned());
            }
            if let Ok(None) = reported {
                // Nobody uses the connection any more.
                sleep(CHECK_EVERY).await;
            }
        }
    }
}

/// Polls a future that tells of changes, and arms it again.
pub(super) fn poll_changed(
    changed: &mut BoxFuture<'static, ()>,
    connection: &ConsumerConnection,
    cx: &mut Context<'_>,
) -> bool {
    let mut has_changed = false;
    while let Poll::Ready(()) = changed.as_mut().poll(cx) {
        *changed = connection.changed();
        has_changed = true;
    }
    has_changed
}
