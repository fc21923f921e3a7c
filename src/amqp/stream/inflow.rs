//! Limits how many bytes connections may read ahead of their consumer.
//!
//! lapin reads everything that the socket has and keeps each delivery until the consumer takes it.
//! Prefetch bounds the number of deliveries, not their size: a thousand of 1 MiB are a gibibyte. So a
//! consumer of messages of any size opens its connections with a [`ReadBudget`]. When the budget is used up, the
//! stream under lapin stops reading, TCP stops the broker, and the messages wait there.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use tokio::sync::Notify;

/// How much a closing connection may still read, to get the broker's reply to the close.
const GOODBYE: usize = 1 << 20;

/// The number of bytes that one or more connections may read ahead of their consumer.
/// Cheap to clone.
///
/// It bounds what lapin keeps to the limit, one message, and what a connection has in its receive
/// buffer (4 MiB at most).
#[derive(Debug, Clone)]
pub(crate) struct ReadBudget(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    limit: usize,
    state: Mutex<State>,
    /// Notified when a connection stops reading.
    used_up: Notify,
}

#[derive(Debug)]
struct State {
    left: usize,
    /// The connections that have stopped reading.
    stopped: Vec<Waker>,
}

impl ReadBudget {
    pub(crate) fn new(limit: usize) -> Self {
        Self(Arc::new(Shared {
            limit,
            state: Mutex::new(State {
                left: limit,
                stopped: Vec::new(),
            }),
            used_up: Notify::new(),
        }))
    }

    /// Returns the bytes of messages that the consumer has taken.
    pub(crate) fn give_back(&self, bytes: usize) {
        self.grant(|left| left.saturating_add(bytes).min(self.0.limit));
    }

    /// Gives back everything. Only for a caller who has just seen that there is no message to take:
    /// then what was read is a part of a message, or something else than a message.
    pub(crate) fn reset(&self) {
        self.grant(|_| self.0.limit);
    }

    /// Completes when a connection has stopped reading.
    pub(crate) async fn used_up(&self) {
        self.0.used_up.notified().await;
    }

    fn grant(&self, left: impl FnOnce(usize) -> usize) {
        let mut state = self.0.lock();
        state.left = left(state.left);
        let stopped = match state.left {
            0 => Vec::new(),
            _ => std::mem::take(&mut state.stopped),
        };
        drop(state);
        for connection in stopped {
            connection.wake();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Decides whether the stream of one connection may read. All clones are the same gate.
#[derive(Debug, Clone)]
pub(crate) struct ReadGate(Arc<Gate>);

#[derive(Debug)]
struct Gate {
    budget: ReadBudget,
    is_closing: AtomicBool,
    /// How much may be read while the connection closes.
    goodbye: AtomicUsize,
}

impl ReadGate {
    pub(crate) fn new(budget: ReadBudget) -> Self {
        Self(Arc::new(Gate {
            budget,
            is_closing: AtomicBool::new(false),
            goodbye: AtomicUsize::new(GOODBYE),
        }))
    }

    /// `Pending` while the budget is used up. A closing connection does not wait, because its messages
    /// have no consumer any more. It reads a little more, for an orderly close, and then fails.
    pub(crate) fn poll_may_read(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shared = &self.0.budget.0;
        let mut state = shared.lock();
        if self.0.is_closing.load(Ordering::Acquire) {
            return Poll::Ready(match self.0.goodbye.load(Ordering::Relaxed) {
                0 => Err(io::ErrorKind::ConnectionAborted.into()),
                _ => Ok(()),
            });
        }
        if state.left > 0 {
            return Poll::Ready(Ok(()));
        }
        if !state
            .stopped
            .iter()
            .any(|known| known.will_wake(cx.waker()))
        {
            state.stopped.push(cx.waker().clone());
        }
        drop(state);
        shared.used_up.notify_one();
        Poll::Pending
    }

    /// Records how many bytes were read.
    pub(crate) fn has_read(&self, bytes: usize) {
        if self.0.is_closing.load(Ordering::Acquire) {
            let left = self.0.goodbye.load(Ordering::Relaxed);
            let left = left.saturating_sub(bytes);
            self.0.goodbye.store(left, Ordering::Relaxed);
            return;
        }
        let mut state = self.0.budget.0.lock();
        state.left = state.left.saturating_sub(bytes);
    }

    /// The connection is about to be closed, or was dropped.
    pub(crate) fn close(&self) {
        let mut state = self.0.budget.0.lock();
        self.0.is_closing.store(true, Ordering::Release);
        // All of them are asked again; those of other connections stop again.
        let stopped = std::mem::take(&mut state.stopped);
        drop(state);
        for connection in stopped {
            connection.wake();
        }
    }
}

/// Closes the gate when its connection is dropped.
#[derive(Debug)]
pub(crate) struct ClosesGate(pub(crate) ReadGate);

impl Drop for ClosesGate {
    fn drop(&mut self) {
        self.0.close();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Counting(AtomicU32);

    impl Wake for Counting {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn may_read(gate: &ReadGate, waker: &Waker) -> Poll<Result<(), io::ErrorKind>> {
        let answer = gate.poll_may_read(&mut Context::from_waker(waker));
        answer.map_err(|error| error.kind())
    }

    #[test]
    fn connections_share_a_budget_and_go_on_when_messages_were_taken() {
        let budget = ReadBudget::new(100);
        let (one, other) = (ReadGate::new(budget.clone()), ReadGate::new(budget.clone()));
        let woken = Arc::new(Counting::default());
        let waker = Waker::from(Arc::clone(&woken));
        assert_eq!(may_read(&one, &waker), Poll::Ready(Ok(())));
        one.has_read(130);
        assert_eq!(may_read(&one, &waker), Poll::Pending);
        let another = Arc::new(Counting::default());
        assert_eq!(may_read(&other, &another.clone().into()), Poll::Pending);
        budget.give_back(10);
        assert_eq!(
            (
                woken.0.load(Ordering::Relaxed),
                another.0.load(Ordering::Relaxed)
            ),
            (1, 1)
        );
        assert_eq!(may_read(&other, &waker), Poll::Ready(Ok(())));
        other.has_read(10);
        budget.give_back(1_000);
        one.has_read(99);
        assert_eq!(
            may_read(&one, &waker),
            Poll::Ready(Ok(())),
            "100 and no more"
        );
        one.has_read(1);
        assert_eq!(may_read(&one, &waker), Poll::Pending);
        budget.reset();
        assert_eq!(may_read(&one, &waker), Poll::Ready(Ok(())));
    }

    #[tokio::test]
    async fn whoever_takes_messages_hears_of_a_connection_that_has_stopped() {
        let budget = ReadBudget::new(1);
        let gate = ReadGate::new(budget.clone());
        gate.has_read(1);
        assert!(may_read(&gate, Waker::noop()).is_pending());
        budget.used_up().await;
    }

    #[test]
    fn a_connection_that_is_closed_reads_a_little_on_and_then_breaks() {
        let budget = ReadBudget::new(1);
        let (gate, other) = (ReadGate::new(budget.clone()), ReadGate::new(budget));
        gate.has_read(1);
        let woken = Arc::new(Counting::default());
        let waker = Waker::from(Arc::clone(&woken));
        assert!(may_read(&gate, &waker).is_pending());
        drop(ClosesGate(gate.clone()));
        assert_eq!(woken.0.load(Ordering::Relaxed), 1);
        assert_eq!(may_read(&gate, &waker), Poll::Ready(Ok(())));
        gate.has_read(GOODBYE);
        let broken = Poll::Ready(Err(io::ErrorKind::ConnectionAborted));
        assert_eq!(may_read(&gate, &waker), broken);
        assert!(may_read(&other, &waker).is_pending());
    }
}
