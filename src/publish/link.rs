//! One connection for publishing, kept up for ever.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::{Either, select};
use futures_util::stream::StreamExt;
use lapin::options::ConfirmSelectOptions;
use tokio::sync::{Mutex, Notify};
use tokio::time::{Instant, timeout, timeout_at};

use super::lane::Lane;
use super::pool::State;
use crate::Error;
use crate::amqp::Connection;
use crate::backoff::Backoff;
use crate::observe::{Event, Observers, Purpose};
use crate::secret::Secret;
use crate::topology::capabilities::Capabilities;

/// How many channels a connection has: enough that one which is being replaced stops nobody.
const LANES: usize = 2;
/// How often a connection of which nothing is heard is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// How connections are made, and who is told.
#[derive(Debug)]
pub(super) struct Settings {
    pub(super) urls: Vec<Secret>,
    pub(super) name: String,
    pub(super) observers: Observers,
}

/// A connection and its lanes.
#[derive(Debug)]
pub(super) struct Live {
    connection: Connection,
    lanes: [Mutex<Option<Arc<Lane>>>; LANES],
    next: AtomicUsize,
    /// Tells the keeper that the connection is not worth waiting for.
    broken: Notify,
}

impl Live {
    pub(super) fn new(connection: Connection) -> Self {
        Self {
            connection,
            lanes: [const { Mutex::const_new(None) }; LANES],
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

    pub(super) fn capabilities(&self) -> &Capabilities {
        self.connection.capabilities()
    }

    /// Has the connection replaced: it does not answer.
    pub(super) fn give_up(&self) {
        self.broken.notify_one();
    }

    /// The next lane in turn, if it is there and nobody is replacing it.
    pub(super) fn lane_now(&self) -> Option<Arc<Lane>> {
        let slot = self.next_slot().try_lock().ok()?;
        slot.as_ref().filter(|lane| !lane.is_closed()).cloned()
    }

    fn next_slot(&self) -> &Mutex<Option<Arc<Lane>>> {
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        &self.lanes[turn % LANES]
    }

    /// The next lane in turn. One whose channel is gone is replaced; what was under way on the
    /// others goes on.
    pub(super) async fn lane(&self) -> Result<Arc<Lane>, Error> {
        let mut slot = self.next_slot().lock().await;
        match &*slot {
            Some(lane) if !lane.is_closed() => Ok(lane.clone()),
            _ => {
                let lane = Arc::new(self.open_lane().await?);
                Ok(slot.insert(lane).clone())
            }
        }
    }

    async fn open_lane(&self) -> Result<Lane, Error> {
        let deadline = Instant::now() + Duration::from_secs(10);
        let channel = self.connection.channel(deadline).await?;
        let confirming = channel.confirm_select(ConfirmSelectOptions::default());
        let failed = |cause: &str| self.connection.failed("turn on confirms", cause);
        match timeout_at(deadline, confirming).await {
            Ok(Ok(())) => Ok(Lane::new(channel)),
            Ok(Err(error)) => Err(failed(&error.to_string())),
            Err(_) => Err(failed("the broker did not answer in time")),
        }
    }

    /// Waits until the connection is gone, and says why. What changes before that is told.
    async fn until_gone(self: &Arc<Self>, tell: &impl Fn(State)) -> String {
        let mut events = pin!(self.connection.events());
        let blocked = |is_blocked| match is_blocked {
            true => tell(State::Blocked(Arc::clone(self))),
            false => tell(State::Up(Arc::clone(self))),
        };
        if self.is_blocked() {
            blocked(true);
        }
        let mut cause = "the connection was lost".to_owned();
        while self.is_open() {
            let broken = pin!(self.broken.notified());
            let news = select(events.next(), broken);
            match timeout(LOOK_EVERY, news).await {
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

/// Keeps up one connection, beginning with `live` if it is there, and tells how it is.
pub(super) async fn keep(
    settings: Arc<Settings>,
    mut live: Option<Arc<Live>>,
    tell: impl Fn(State),
) {
    let purpose = Purpose::Publish;
    let mut next = 0;
    let mut backoff = Backoff::new();
    loop {
        let current = match live.take() {
            Some(live) => live,
            None => {
                let connecting = connect(&settings, &mut next, &mut backoff, &tell);
                Arc::new(Live::new(connecting.await))
            }
        };
        let connected_at = Instant::now();
        let address = current.connection.address().to_string();
        tracing::info!(%address, "connected to the broker for publishing");
        tell(State::Up(Arc::clone(&current)));
        settings.observers.emit(&Event::Connected {
            purpose,
            address: &address,
        });

        let cause = current.until_gone(&tell).await;
        tracing::warn!(%address, %cause, "a connection for publishing was lost");
        // A node that is frozen takes connections and says nothing: another one comes first.
        next += 1;
        tell(State::Down(cause.as_str().into()));
        settings.observers.emit(&Event::Disconnected {
            purpose,
            cause: &cause,
        });
        drop(current);
        backoff.pause_after(connected_at.elapsed()).await;
    }
}

/// Tries all addresses in turn until one answers.
async fn connect(
    settings: &Settings,
    next: &mut usize,
    backoff: &mut Backoff,
    tell: &impl Fn(State),
) -> Connection {
    loop {
        let url = &settings.urls[*next % settings.urls.len()];
        let cause = match Connection::open(url.expose(), &settings.name).await {
            Ok(connection) => return connection,
            Err(error) => error.to_string(),
        };
        tracing::warn!(%cause, "could not connect to the broker for publishing");
        tell(State::Down(cause.as_str().into()));
        settings.observers.emit(&Event::ConnectFailed {
            purpose: Purpose::Publish,
            cause: &cause,
        });
        *next += 1;
        backoff.pause().await;
    }
}
