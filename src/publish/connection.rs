//! One connection for publishing, which is reopened for ever.

use std::fmt;
use std::pin::pin;
use std::sync::Arc;
#[cfg(feature = "deadpool-lapin")]
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::{Either, select};
use futures_util::stream::StreamExt;
use lapin::options::ConfirmSelectOptions;
use tokio::sync::{Mutex, Notify, watch};
use tokio::time::{Instant, timeout, timeout_at};

use super::confirm_channel::ConfirmChannel;
use super::pool::State;
use super::pools::Broker;
use crate::Error;
#[cfg(feature = "deadpool-lapin")]
use crate::amqp::Address;
use crate::amqp::{Connection, QueueState, queue_state};
use crate::backoff::Backoff;
#[cfg(feature = "deadpool-lapin")]
use crate::error::BrokerError;
use crate::error::Cause;
use crate::observe::{Event, ObservedConnection, Observers, Purpose};
use crate::secret::Secret;
use crate::topology::Version;

/// How many channels a connection has. While one is replaced, publishers use the other.
const CHANNELS: usize = 2;
/// How often the status of a connection without events is checked.
const CHECK_EVERY: Duration = Duration::from_millis(250);

/// How to connect, the observers of connection events, and what is known of the broker.
#[derive(Debug)]
pub(super) struct Settings {
    pub(super) from: Connections,
    pub(super) observers: Observers,
    pub(super) broker: watch::Sender<Broker>,
}

impl Settings {
    /// Another connection may lead to a broker of another version.
    fn note_version(&self, version: Version) {
        self.broker.send_if_modified(|broker| match broker {
            Broker::Ready(known) if *known != version => {
                *known = version;
                true
            }
            Broker::Ready(_) | Broker::NotReady(_) => false,
        });
    }
}

/// Where the connections come from.
pub(crate) enum Connections {
    /// Made to one of these addresses, under this name.
    Own { urls: Vec<Secret>, name: String },
    /// Taken from a pool of the app's, and kept.
    #[cfg(feature = "deadpool-lapin")]
    Pooled {
        pool: deadpool_lapin::Pool,
        /// Set before the first is taken.
        known: Arc<OnceLock<(Address, Version)>>,
    },
}

impl Connections {
    /// The next one; `turn` chooses the address.
    async fn next(&self, turn: usize) -> Result<Connection, Error> {
        match self {
            Self::Own { urls, name } => {
                Connection::open(urls[turn % urls.len()].expose(), name).await
            }
            #[cfg(feature = "deadpool-lapin")]
            Self::Pooled { pool, known } => match known.get() {
                Some(known) => Connection::from_pool(pool, known).await,
                None => Err(Error::Broker(BrokerError::InvalidPool {
                    problem: "its broker is not known yet".into(),
                })),
            },
        }
    }
}

/// Without the pool, whose `Debug` shows its URL with the password.
impl fmt::Debug for Connections {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Own { name, .. } => write!(out, "Own({name})"),
            #[cfg(feature = "deadpool-lapin")]
            Self::Pooled { known, .. } => {
                write!(out, "Pooled({:?})", known.get().map(|known| &known.0))
            }
        }
    }
}

/// An open connection and its confirm channels.
#[derive(Debug)]
pub(super) struct PublishConnection {
    connection: Connection,
    channels: [Mutex<Option<Arc<ConfirmChannel>>>; CHANNELS],
    next: AtomicUsize,
    /// Notifies `keep_open` that the broker does not answer on this connection.
    broken: Notify,
}

impl PublishConnection {
    pub(super) fn new(connection: Connection) -> Self {
        Self {
            connection,
            channels: [const { Mutex::const_new(None) }; CHANNELS],
            next: AtomicUsize::new(0),
            broken: Notify::new(),
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.connection.is_open()
    }

    pub(super) fn is_blocked(&self) -> bool {
        self.connection.is_blocked()
    }

    /// Asks for the state of a queue, on a channel of its own.
    pub(super) async fn queue_state(
        &self,
        queue: &str,
        deadline: Instant,
    ) -> Result<QueueState, Error> {
        queue_state(&self.connection, queue, deadline).await
    }

    /// Lets go of the connection, for good: closes it, or gives it back to the app's pool.
    pub(super) async fn close(&self) {
        if !self.connection.is_pooled() {
            // Before its channels: lapin logs an error for each that is being closed when its connection is.
            self.connection.end().await;
        }
        for slot in &self.channels {
            // A channel that is being replaced has nothing under way.
            if let Ok(mut slot) = slot.try_lock() {
                slot.take();
            }
        }
    }

    /// Has the connection replaced, because the broker does not answer on it.
    pub(super) fn give_up(&self) {
        self.broken.notify_one();
    }

    /// The next channel, round-robin, if it is open and not being replaced.
    pub(super) fn ready_channel(&self) -> Option<Arc<ConfirmChannel>> {
        let slot = self.next_slot().try_lock().ok()?;
        slot.as_ref()
            .filter(|channel| !channel.is_closed())
            .cloned()
    }

    fn next_slot(&self) -> &Mutex<Option<Arc<ConfirmChannel>>> {
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        &self.channels[turn % CHANNELS]
    }

    /// The next channel, round-robin. A closed channel is replaced; the others keep their unconfirmed
    /// messages.
    pub(super) async fn channel(&self) -> Result<Arc<ConfirmChannel>, Error> {
        let mut slot = self.next_slot().lock().await;
        match &*slot {
            Some(channel) if !channel.is_closed() => Ok(channel.clone()),
            _ => {
                let channel = Arc::new(self.open_confirm_channel().await?);
                Ok(slot.insert(channel).clone())
            }
        }
    }

    async fn open_confirm_channel(&self) -> Result<ConfirmChannel, Error> {
        let deadline = Instant::now() + Duration::from_secs(10);
        let channel = self.connection.channel(deadline).await?;
        let confirming = channel.confirm_select(ConfirmSelectOptions::default());
        let failed = |cause: Cause| self.connection.failed("turn on confirms", cause);
        match timeout_at(deadline, confirming).await {
            Ok(Ok(())) => Ok(ConfirmChannel::new(channel)),
            Ok(Err(error)) => Err(failed(Cause::from(&error))),
            Err(_) => Err(failed("the broker did not answer in time".into())),
        }
    }

    /// Waits until the connection is lost, and returns the cause. Reports when the broker blocks or
    /// unblocks it.
    async fn until_lost(self: &Arc<Self>, report: &impl Fn(State)) -> String {
        let mut events = pin!(self.connection.events());
        let blocked = |is_blocked| match is_blocked {
            true => report(State::Blocked(Arc::clone(self))),
            false => report(State::Up(Arc::clone(self))),
        };
        if self.is_blocked() {
            blocked(true);
        }
        let mut cause = "the connection was lost".to_owned();
        while self.is_open() {
            let broken = pin!(self.broken.notified());
            let event = select(events.next(), broken);
            match timeout(CHECK_EVERY, event).await {
                Ok(Either::Left((Some(event), _))) => match event {
                    lapin::Event::ConnectionBlocked(reason) => {
                        tracing::warn!(%reason, "the broker has an alarm and takes no messages");
                        blocked(true);
                    }
                    lapin::Event::ConnectionUnblocked => {
                        tracing::info!("the broker takes messages again");
                        blocked(false);
                    }
                    lapin::Event::Error(error) => cause = error.to_string(),
                    _ => {}
                },
                Ok(Either::Left((None, _))) => break,
                Ok(Either::Right(_)) => return "the broker does not answer on it".to_owned(),
                Err(_) => {}
            }
        }
        cause
    }
}

/// Keeps one connection open, at first `connection` if there is one, and reports its state. `next` is the index of the
/// address that comes first.
pub(super) async fn keep_open(
    settings: Arc<Settings>,
    mut next: usize,
    mut connection: Option<Arc<PublishConnection>>,
    report: impl Fn(State),
) {
    let purpose = Purpose::Publish;
    let mut backoff = Backoff::new();
    loop {
        let current = match connection.take() {
            Some(connection) => connection,
            None => {
                let connecting = connect(&settings, &mut next, &mut backoff, &report);
                Arc::new(PublishConnection::new(connecting.await))
            }
        };
        let connected_at = Instant::now();
        let address = current.connection.address().to_string();
        tracing::info!(%address, "connected to the broker for publishing");
        settings.note_version(current.connection.version());
        report(State::Up(Arc::clone(&current)));
        let observed = ObservedConnection::opened(&settings.observers, purpose, &address);

        let cause = current.until_lost(&report).await;
        tracing::warn!(%address, %cause, "a connection for publishing was lost");
        // A frozen node accepts connections and never answers, so another address comes first.
        next += 1;
        report(State::Down(cause.as_str().into()));
        observed.lost(&cause);
        if current.connection.is_pooled() {
            // One that does not answer looks well to the pool. Ended first, it is not lent again.
            tokio::spawn(async move { current.connection.end().await });
        } else {
            drop(current);
        }
        backoff.pause_after(connected_at.elapsed()).await;
    }
}

/// Tries all addresses, round-robin, until one answers.
async fn connect(
    settings: &Settings,
    next: &mut usize,
    backoff: &mut Backoff,
    report: &impl Fn(State),
) -> Connection {
    loop {
        let cause = match settings.from.next(*next).await {
            Ok(connection) => return connection,
            Err(error) => error.to_string(),
        };
        match backoff.is_worth_a_warning() {
            true => tracing::warn!(%cause, "cannot connect for publishing, trying again"),
            false => tracing::debug!(%cause, "cannot connect for publishing, trying again"),
        }
        report(State::Down(cause.as_str().into()));
        settings.observers.emit(&Event::ConnectFailed {
            purpose: Purpose::Publish,
            cause: &cause,
        });
        *next += 1;
        backoff.pause().await;
    }
}
