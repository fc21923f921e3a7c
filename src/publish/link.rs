//! The connection for publishing, kept up for ever.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use lapin::options::ConfirmSelectOptions;
use tokio::sync::{Mutex, Notify, watch};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::lane::Lane;
use crate::Error;
use crate::broker::Connection;
use crate::observe::{Event, Observers, Purpose};
use crate::random;
use crate::topology::capabilities::Capabilities;

/// How many channels a connection has: enough that one which is being replaced stops nobody.
const LANES: usize = 2;
/// The pause before the second attempt to connect; it doubles up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// How often a connection that nobody complains about is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// A connection that is made again whenever it is lost, as long as this value lives.
#[derive(Debug)]
pub(super) struct Link {
    state: watch::Receiver<State>,
    /// Tells the keeper that the connection is not worth waiting for.
    broken: Arc<Notify>,
    keeper: tokio::task::JoinHandle<()>,
}

#[derive(Debug, Clone)]
enum State {
    Up(Arc<Live>),
    /// With what the last attempt met.
    Down(Arc<str>),
}

/// A connection and its lanes.
#[derive(Debug)]
pub(super) struct Live {
    connection: Connection,
    lanes: [Mutex<Option<Lane>>; LANES],
    next: AtomicUsize,
}

/// Why there is no lane.
pub(super) enum NoLane {
    /// There is no connection, and this is why.
    Down(String),
    /// The broker has blocked the connection: a memory or disk alarm.
    Blocked,
}

impl Link {
    /// Keeps up a connection to one of `urls`, beginning with one that is open already.
    pub(super) fn keep(
        urls: Vec<String>,
        name: String,
        first: Connection,
        observers: Observers,
    ) -> Self {
        let address = first.address().to_string();
        observers.tell(&Event::Connected {
            purpose: Purpose::Publish,
            address: &address,
        });
        let (sender, state) = watch::channel(State::Up(Arc::new(Live::new(first))));
        let broken = Arc::new(Notify::new());
        let keeper = tokio::spawn(keep(urls, name, sender, Arc::clone(&broken), observers));
        Self {
            state,
            broken,
            keeper,
        }
    }

    /// A lane to publish on, before the deadline.
    pub(super) async fn lane(&self, deadline: Instant) -> Result<(Arc<Live>, Lane), NoLane> {
        let live = self.live(deadline).await?;
        while live.connection.is_blocked() {
            if Instant::now() >= deadline {
                return Err(NoLane::Blocked);
            }
            let soon = (Instant::now() + Duration::from_millis(20)).min(deadline);
            tokio::time::sleep_until(soon).await;
        }
        match timeout_at(deadline, live.lane()).await {
            Ok(Ok(lane)) => Ok((live, lane)),
            Ok(Err(error)) => Err(NoLane::Down(error.to_string())),
            // A channel that does not open in time: the connection is half open, or stuck.
            Err(_) => {
                self.broken.notify_one();
                Err(NoLane::Down(
                    "the broker did not open a channel in time".to_owned(),
                ))
            }
        }
    }

    async fn live(&self, deadline: Instant) -> Result<Arc<Live>, NoLane> {
        let mut state = self.state.clone();
        loop {
            let why = match &*state.borrow_and_update() {
                State::Up(live) if live.connection.is_open() => return Ok(Arc::clone(live)),
                State::Up(_) => "the connection was lost".to_owned(),
                State::Down(why) => why.to_string(),
            };
            match timeout_at(deadline, state.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return Err(NoLane::Down("the app was closed".to_owned())),
                Err(_) => return Err(NoLane::Down(why)),
            }
        }
    }

    /// What the broker can do, as of the last connection.
    pub(super) fn capabilities(&self) -> Option<Capabilities> {
        match &*self.state.borrow() {
            State::Up(live) => Some(live.connection.capabilities().clone()),
            State::Down(_) => None,
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

impl Live {
    fn new(connection: Connection) -> Self {
        Self {
            connection,
            lanes: [const { Mutex::const_new(None) }; LANES],
            next: AtomicUsize::new(0),
        }
    }

    pub(super) fn is_blocked(&self) -> bool {
        self.connection.is_blocked()
    }

    async fn lane(&self) -> Result<Lane, Error> {
        let index = self.next.fetch_add(1, Ordering::Relaxed) % LANES;
        let mut slot = self.lanes[index].lock().await;
        match &*slot {
            Some(lane) if !lane.is_closed() => Ok(lane.clone()),
            _ => {
                let lane = self.open_lane().await?;
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
}

/// Waits until the connection is gone, and makes a new one, for ever.
async fn keep(
    urls: Vec<String>,
    name: String,
    state: watch::Sender<State>,
    broken: Arc<Notify>,
    observers: Observers,
) {
    let purpose = Purpose::Publish;
    let mut next = 0;
    loop {
        loop {
            let is_open = match &*state.borrow() {
                State::Up(live) => live.connection.is_open(),
                State::Down(_) => false,
            };
            if !is_open || timeout(LOOK_EVERY, broken.notified()).await.is_ok() {
                break;
            }
        }
        let cause = "the connection was lost";
        state.send_replace(State::Down(cause.into()));
        observers.tell(&Event::Disconnected { purpose, cause });
        let mut pause = FIRST_PAUSE;
        loop {
            let url = &urls[next % urls.len()];
            match Connection::open(url, &name).await {
                Ok(connection) => {
                    let address = connection.address().to_string();
                    observers.tell(&Event::Connected {
                        purpose,
                        address: &address,
                    });
                    state.send_replace(State::Up(Arc::new(Live::new(connection))));
                    break;
                }
                Err(error) => {
                    let cause = error.to_string();
                    observers.tell(&Event::ConnectFailed {
                        purpose,
                        cause: &cause,
                    });
                    state.send_replace(State::Down(cause.into()));
                    next += 1;
                }
            }
            sleep(pause.mul_f64(jitter())).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}

/// Between a half and one, so that processes that lost the same broker do not return at once.
fn jitter() -> f64 {
    0.5 + f64::from(random::number()) / f64::from(u32::MAX) / 2.0
}
