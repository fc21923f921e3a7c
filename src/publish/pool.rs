//! The connections for publishing to the tiers of one worker group: a few, reopened for ever.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use super::confirm_channel::{ConfirmChannel, STUCK_AFTER};
use super::connection::{self, PublishConnection, Settings};
use crate::amqp::Connection;
use crate::service::Service;

/// Connections that are reopened whenever they are lost, as long as this value lives.
#[derive(Debug)]
pub(super) struct Pool {
    states: watch::Receiver<Vec<State>>,
    changed: Arc<watch::Sender<Vec<State>>>,
    next: AtomicUsize,
    tasks: Mutex<JoinSet<()>>,
}

/// The state of one connection.
#[derive(Debug, Clone)]
pub(super) enum State {
    Up(Arc<PublishConnection>),
    /// The broker does not read from it, because of a memory or disk alarm.
    Blocked(Arc<PublishConnection>),
    /// With the cause: why it was lost, or why the last attempt to open it failed.
    Down(Arc<str>),
}

/// Why there is no channel.
pub(super) enum NoChannel {
    /// No connection is open, with the cause.
    Down(String),
    /// The broker has blocked all connections, because of a memory or disk alarm.
    Blocked,
}

impl Pool {
    /// Keeps `size` connections open, of which `first`, if given, is open already. `address` is the index of the address
    /// that comes first.
    pub(super) fn open(
        settings: &Arc<Settings>,
        size: usize,
        address: usize,
        mut first: Option<Connection>,
    ) -> Self {
        let not_yet = State::Down("the connection is being made".into());
        let (sender, states) = watch::channel(vec![not_yet; size.max(1)]);
        let sender = Arc::new(sender);
        let mut tasks = JoinSet::new();
        for index in 0..size.max(1) {
            let sender = Arc::clone(&sender);
            let report = move |state| sender.send_modify(|states| states[index] = state);
            // The first publish must find the open connection.
            let begin = first
                .take()
                .map(|connection| Arc::new(PublishConnection::new(connection)));
            if let Some(connection) = &begin {
                report(State::Up(Arc::clone(connection)));
            }
            let service = Service::new("publish connection", &settings.observers);
            let (settings, mut begin) = (Arc::clone(settings), begin);
            tasks.spawn(async move {
                let keep_open = || {
                    let settings = Arc::clone(&settings);
                    connection::keep_open(settings, address, begin.take(), &report)
                };
                service.run(keep_open).await;
            });
        }
        Self {
            states,
            changed: sender,
            next: AtomicUsize::new(0),
            tasks: Mutex::new(tasks),
        }
    }

    /// Closes the connections, within five seconds, or gives them back to the app's pool. None is opened again.
    pub(super) async fn close(&self) {
        let mut tasks = std::mem::take(&mut *self.lock_tasks());
        tasks.shutdown().await;
        let mut open = Vec::new();
        self.changed.send_modify(|states| {
            let closed = State::Down("the app was closed".into());
            for state in states {
                match std::mem::replace(state, closed.clone()) {
                    State::Up(connection) | State::Blocked(connection) => open.push(connection),
                    State::Down(_) => {}
                }
            }
        });
        let closing = open.iter().map(|connection| connection.close());
        futures_util::future::join_all(closing).await;
    }

    fn lock_tasks(&self) -> MutexGuard<'_, JoinSet<()>> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a connection accepts messages now.
    pub(super) fn status(&self) -> Result<(), NoChannel> {
        self.choose(&self.states.borrow()).map(drop)
    }

    /// A channel that is open already, which is nearly always there.
    pub(super) fn ready_channel(&self) -> Option<(Arc<PublishConnection>, Arc<ConfirmChannel>)> {
        let connection = self.choose(&self.states.borrow()).ok()?;
        let channel = connection.ready_channel()?;
        Some((connection, channel))
    }

    /// A channel to publish on, before the deadline.
    pub(super) async fn channel(
        &self,
        deadline: Instant,
    ) -> Result<(Arc<PublishConnection>, Arc<ConfirmChannel>), NoChannel> {
        let connection = self.connection(deadline).await?;
        let begin = Instant::now();
        match timeout_at(deadline, connection.channel()).await {
            Ok(Ok(channel)) => Ok((connection, channel)),
            Ok(Err(error)) => Err(NoChannel::Down(error.to_string())),
            // A channel that does not open in time is a sign of a connection that is half open or
            // stuck, unless the deadline was near.
            Err(_) => {
                if begin.elapsed() >= STUCK_AFTER {
                    connection.give_up();
                }
                Err(NoChannel::Down(
                    "the broker did not open a channel in time".to_owned(),
                ))
            }
        }
    }

    /// A connection that accepts messages, before the deadline.
    pub(super) async fn connection(
        &self,
        deadline: Instant,
    ) -> Result<Arc<PublishConnection>, NoChannel> {
        let mut states = self.states.clone();
        loop {
            let why = match self.choose(&states.borrow_and_update()) {
                Ok(connection) => return Ok(connection),
                Err(why) => why,
            };
            match timeout_at(deadline, states.changed()).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return Err(NoChannel::Down("the app was closed".to_owned())),
                Err(_) => return Err(why),
            }
        }
    }

    /// The next connection, round-robin, that accepts messages.
    fn choose(&self, states: &[State]) -> Result<Arc<PublishConnection>, NoChannel> {
        let turn = self.next.fetch_add(1, Ordering::Relaxed) % states.len();
        let (before, after) = states.split_at(turn);
        let mut why = NoChannel::Down("the connection was lost".to_owned());
        for state in after.iter().chain(before) {
            match state {
                State::Up(connection) if connection.is_open() => return Ok(Arc::clone(connection)),
                State::Up(_) => {}
                State::Blocked(_) => why = NoChannel::Blocked,
                State::Down(cause) if matches!(why, NoChannel::Down(_)) => {
                    why = NoChannel::Down(cause.to_string());
                }
                State::Down(_) => {}
            }
        }
        Err(why)
    }
}
