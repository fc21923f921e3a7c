//! The connections for publishing: a few, each kept up for ever, shared by all who publish.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use super::lane::{Lane, STUCK_AFTER};
use super::link::{self, Live, Settings};
use crate::amqp::Connection;
use crate::topology::capabilities::Capabilities;

/// Connections that are made again whenever they are lost, as long as this value lives.
#[derive(Debug)]
pub(super) struct Pool {
    states: watch::Receiver<States>,
    next: AtomicUsize,
    _keepers: JoinSet<()>,
}

/// The state of every connection, and what is known of the broker.
#[derive(Debug)]
struct States {
    connections: Vec<State>,
    /// Of the latest connection, so that a message for a broker that is away right now is addressed
    /// for its version too.
    capabilities: Capabilities,
}

impl States {
    fn set(&mut self, index: usize, state: State) {
        match &state {
            State::Up(live) | State::Blocked(live) => {
                self.capabilities = live.capabilities().clone();
            }
            State::Down(_) => {}
        }
        self.connections[index] = state;
    }
}

/// How a connection is.
#[derive(Debug, Clone)]
pub(super) enum State {
    Up(Arc<Live>),
    /// The broker takes nothing from it: a memory or disk alarm.
    Blocked(Arc<Live>),
    /// With what the last attempt met.
    Down(Arc<str>),
}

/// Why there is no lane.
pub(super) enum NoLane {
    /// There is no connection, and this is why.
    Down(String),
    /// The broker has blocked all connections: a memory or disk alarm.
    Blocked,
}

impl Pool {
    /// Keeps up `size` connections, beginning with one that is open already.
    pub(super) fn keep(settings: Settings, size: usize, first: Connection) -> Self {
        let not_yet = State::Down("the connection is being made".into());
        let (sender, states) = watch::channel(States {
            connections: vec![not_yet; size.max(1)],
            capabilities: first.capabilities().clone(),
        });
        let (sender, settings) = (Arc::new(sender), Arc::new(settings));
        let mut keepers = JoinSet::new();
        let mut first = Some(first);
        for index in 0..size.max(1) {
            let sender = Arc::clone(&sender);
            let tell = move |state| sender.send_modify(|states| states.set(index, state));
            // Known before anybody publishes.
            let begin = first
                .take()
                .map(|connection| Arc::new(Live::new(connection)));
            if let Some(live) = &begin {
                tell(State::Up(Arc::clone(live)));
            }
            keepers.spawn(link::keep(Arc::clone(&settings), begin, tell));
        }
        Self {
            states,
            next: AtomicUsize::new(0),
            _keepers: keepers,
        }
    }

    /// A lane that is there already, as nearly always.
    pub(super) fn lane_now(&self) -> Option<(Arc<Live>, Arc<Lane>)> {
        let live = self.choose(&self.states.borrow().connections).ok()?;
        let lane = live.lane_now()?;
        Some((live, lane))
    }

    /// A lane to publish on, before the deadline.
    pub(super) async fn lane(&self, deadline: Instant) -> Result<(Arc<Live>, Arc<Lane>), NoLane> {
        let live = self.live(deadline).await?;
        let begin = Instant::now();
        match timeout_at(deadline, live.lane()).await {
            Ok(Ok(lane)) => Ok((live, lane)),
            Ok(Err(error)) => Err(NoLane::Down(error.to_string())),
            // A channel that does not open in time: the connection is half open, or stuck; unless the
            // deadline was near.
            Err(_) => {
                if begin.elapsed() >= STUCK_AFTER {
                    live.give_up();
                }
                Err(NoLane::Down(
                    "the broker did not open a channel in time".to_owned(),
                ))
            }
        }
    }

    async fn live(&self, deadline: Instant) -> Result<Arc<Live>, NoLane> {
        let mut states = self.states.clone();
        loop {
            let why = match self.choose(&states.borrow_and_update().connections) {
                Ok(live) => return Ok(live),
                Err(why) => why,
            };
            match timeout_at(deadline, states.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return Err(NoLane::Down("the app was closed".to_owned())),
                Err(_) => return Err(why),
            }
        }
    }

    /// The next connection in turn that can be published on.
    fn choose(&self, states: &[State]) -> Result<Arc<Live>, NoLane> {
        let turn = self.next.fetch_add(1, Ordering::Relaxed) % states.len();
        let (before, after) = states.split_at(turn);
        let mut why = NoLane::Down("the connection was lost".to_owned());
        for state in after.iter().chain(before) {
            match state {
                State::Up(live) if live.is_open() => return Ok(Arc::clone(live)),
                State::Up(_) => {}
                State::Blocked(_) => why = NoLane::Blocked,
                State::Down(cause) if matches!(why, NoLane::Down(_)) => {
                    why = NoLane::Down(cause.to_string());
                }
                State::Down(_) => {}
            }
        }
        Err(why)
    }

    /// The capabilities of the broker, as of the latest connection to it.
    pub(super) fn capabilities(&self) -> Capabilities {
        self.states.borrow().capabilities.clone()
    }
}
