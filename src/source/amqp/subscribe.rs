//! Makes a tier's subscription, and its queue where that is gone, for as long as it takes.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::sleep;

use super::ConsumerSettings;
use super::subscription::{NoSubscription, Subscription};
use crate::Error;
use crate::amqp::Connection;
use crate::backoff::Backoff;
use crate::topology::plan::Plan;

/// The pause before a queue that was perhaps deleted is declared or consumed from again. A quorum queue that is
/// declared while its deletion is under way neither cancels its consumers nor delivers to them (RabbitMQ 3.10), and a
/// consumer on it costs the whole connection (4.3).
pub(super) const AFTER_A_LOSS: Duration = Duration::from_millis(300);
/// The first pause after a consumer that cost its own connection, or got no answer on it. It doubles each
/// time.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// The longest of these pauses. The tier may be the most urgent one, and gets its leader back some time.
const LONGEST_PAUSE: Duration = Duration::from_secs(8);

/// A subscription that is being made.
pub(super) struct Subscribing {
    future: Pin<Box<dyn Future<Output = Result<Subscribed, NotSubscribed>> + Send>>,
    has_failed: Arc<AtomicBool>,
}

pub(super) struct Subscribed {
    pub(super) subscription: Subscription,
    /// Whether the queue was gone.
    pub(super) was_declared: bool,
}

/// Why a subscription is not made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NotSubscribed {
    /// The connection of the tier is gone.
    Lost,
    /// The queue is one that the tier had before it moved, and is gone.
    NoFormerQueue,
}

/// What to consume from, and how.
#[derive(Clone)]
pub(super) struct QueueToConsume {
    pub(super) queue: String,
    pub(super) window: u16,
    pub(super) tag: String,
    /// Whether the tier had the queue before it moved: it is never declared again.
    pub(super) is_former: bool,
}

/// Where to consume.
pub(super) enum ConsumeOn {
    /// On the connection of the tier. A consumer that gets no answer there is tried again on a connection
    /// of its own.
    TierConnection(Arc<Connection>, Addresses),
    /// On a connection of its own.
    OwnConnection(Addresses),
}

/// How a tier connects that must not consume on the connection of the others.
pub(super) struct Addresses {
    /// The name that the broker's management shows.
    pub(super) name: String,
    /// Which of the broker's addresses is tried next.
    pub(super) next_url: usize,
}

impl Subscribing {
    /// A subscription that is begun after a while.
    pub(super) fn new(
        settings: &Arc<ConsumerSettings>,
        target: QueueToConsume,
        consume_on: ConsumeOn,
        after: Duration,
    ) -> Self {
        let settings = settings.clone();
        let has_failed = Arc::new(AtomicBool::new(false));
        let failed = has_failed.clone();
        let future = Box::pin(async move {
            sleep(after).await;
            let mut attempts = Attempts::new(settings, target, consume_on);
            loop {
                match attempts.next().await {
                    Ok(subscribed) => return Ok(subscribed),
                    Err(Failed::Again(pause)) => {
                        failed.store(true, Ordering::Relaxed);
                        sleep(pause).await;
                    }
                    Err(Failed::For(reason)) => return Err(reason),
                }
            }
        });
        Self { future, has_failed }
    }

    /// The subscription, or why there will be none.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Subscribed, NotSubscribed>> {
        self.future.as_mut().poll(cx)
    }

    /// Whether an attempt has failed, and another follows.
    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }
}

/// The attempts to subscribe.
struct Attempts {
    settings: Arc<ConsumerSettings>,
    target: QueueToConsume,
    /// The connection of the tier, where that is used.
    shared: Option<Arc<Connection>>,
    addresses: Addresses,
    /// A connection of its own, which is kept while it does no harm.
    own: Option<Arc<Connection>>,
    backoff: Backoff,
    /// The next pause after a connection of its own was lost.
    pause: Duration,
    was_declared: bool,
    /// A queue that could not be reached may be there without its bindings.
    is_doubtful: bool,
}

/// What follows on an attempt that failed.
enum Failed {
    /// Another one, after this pause.
    Again(Duration),
    /// None.
    For(NotSubscribed),
}

impl Attempts {
    fn new(settings: Arc<ConsumerSettings>, target: QueueToConsume, consume_on: ConsumeOn) -> Self {
        let (shared, addresses) = match consume_on {
            ConsumeOn::TierConnection(connection, addresses) => (Some(connection), addresses),
            ConsumeOn::OwnConnection(addresses) => (None, addresses),
        };
        Self {
            settings,
            target,
            shared,
            addresses,
            own: None,
            backoff: Backoff::new(),
            pause: FIRST_PAUSE,
            was_declared: false,
            is_doubtful: false,
        }
    }

    async fn next(&mut self) -> Result<Subscribed, Failed> {
        let connection = match self.connection().await {
            Ok(connection) => connection,
            Err(error) => {
                tracing::warn!(%error, queue = self.target.queue, "cannot connect for a queue alone");
                return Err(Failed::Again(self.next_pause()));
            }
        };
        let queue = self.target.queue.clone();
        loop {
            let own = self.own.clone();
            let begin = Subscription::begin(&connection, own, self.target.clone());
            match begin.await {
                Ok(subscription) => {
                    if self.is_doubtful {
                        declare(&self.settings, &connection, &queue).await;
                    }
                    return Ok(Subscribed {
                        subscription,
                        was_declared: self.was_declared,
                    });
                }
                Err(NoSubscription::NoQueue) if self.target.is_former => {
                    return Err(Failed::For(NotSubscribed::NoFormerQueue));
                }
                Err(NoSubscription::NoQueue) if self.settings.may_declare => {
                    // A queue that is gone each time it was declared is not declared in a row.
                    let is_first = !self.was_declared;
                    self.was_declared = declare(&self.settings, &connection, &queue).await;
                    self.is_doubtful = !self.was_declared;
                    if self.was_declared && is_first {
                        continue;
                    }
                }
                Err(NoSubscription::NoQueue) => {
                    tracing::error!(queue, "the queue does not exist: apply the topology");
                }
                Err(NoSubscription::Failed(error)) => tracing::warn!(%error),
                Err(NoSubscription::NoAnswer(error)) => {
                    // The broker may answer it later with the end of the connection.
                    tracing::warn!(%error, "it gets a connection of its own");
                    self.shared = None;
                    return Err(self.after_lost_connection(connection));
                }
            }
            return Err(match (connection.is_open(), &self.shared) {
                (true, _) => Failed::Again(self.backoff.next()),
                (false, Some(_)) => Failed::For(NotSubscribed::Lost),
                (false, None) => self.after_lost_connection(connection),
            });
        }
    }

    /// The connection to consume on.
    async fn connection(&mut self) -> Result<Arc<Connection>, Error> {
        if let Some(connection) = self.shared.as_ref().or(self.own.as_ref()) {
            return Ok(connection.clone());
        }
        let Addresses { name, next_url } = &mut self.addresses;
        let url = &self.settings.urls[*next_url % self.settings.urls.len()];
        *next_url += 1;
        let connection = Arc::new(Connection::open(url.expose(), name).await?);
        self.own = Some(connection.clone());
        Ok(connection)
    }

    /// The queue cost a connection, or will: the next attempt is made on another one, after a longer pause.
    fn after_lost_connection(&mut self, connection: Arc<Connection>) -> Failed {
        self.own = None;
        if let Some(connection) = Arc::into_inner(connection) {
            tokio::spawn(connection.close());
        }
        Failed::Again(self.next_pause())
    }

    fn next_pause(&mut self) -> Duration {
        let pause = self.pause;
        self.pause = (pause * 2).min(LONGEST_PAUSE);
        pause
    }
}

/// Declares the queue again; all else too, if that is gone as well.
async fn declare(settings: &ConsumerSettings, connection: &Connection, queue: &str) -> bool {
    let declared = async {
        let has_database = settings.publisher.has_database();
        let whole = Plan::new(&settings.topology, connection.version(), has_database)?;
        let mut plan = whole.clone();
        plan.exchanges.clear();
        plan.queues.retain(|it| it.name == queue);
        plan.bindings.retain(|it| it.destination == queue);
        match settings.declare(connection, &plan).await {
            Ok(applied) => Ok(applied),
            Err(_) => settings.declare(connection, &whole).await,
        }
    };
    match declared.await {
        Ok(applied) if applied.unreachable.iter().any(|it| it == queue) => {
            tracing::warn!(
                queue,
                "the queue is on a node that is down, or has no leader"
            );
            false
        }
        Ok(_) => true,
        Err(error) => {
            tracing::error!(%error, queue, "the queue is gone, and cannot be declared again");
            false
        }
    }
}
