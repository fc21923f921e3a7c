//! Keeps a handler's panics to itself, wherever they happen: in its code or while it is dropped.

use std::any::Any;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context as PollContext, Poll};

use crate::task::{Outcome, OutcomeFuture};

/// A handler that panicked, with its message.
#[derive(Debug)]
pub(super) struct Panicked(pub(super) String);

/// Runs a function, and turns its panic into a value.
// A panic leaves nothing half-done behind that is looked at again: what `run` owns is dropped.
pub(super) fn guarded<T>(run: impl FnOnce() -> T) -> Result<T, Panicked> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|payload| {
        let message = message_of(&*payload);
        drop_quietly(payload);
        Panicked(message)
    })
}

/// A handler that was started: its panics are values, and it can be dropped at any time. Empty once
/// it has ended.
pub(super) struct Guarded(Option<Result<OutcomeFuture, Panicked>>);

impl Guarded {
    /// Starts a handler. Its code up to the first `await` may run, and panic, here already.
    pub(super) fn start<E>(start: impl FnOnce() -> Result<OutcomeFuture, E>) -> Result<Self, E> {
        let started = match guarded(start) {
            Ok(started) => Ok(started?),
            Err(panicked) => Err(panicked),
        };
        Ok(Self(Some(started)))
    }

    /// A handler whose code has not run at all yet.
    pub(super) fn of(running: OutcomeFuture) -> Self {
        Self(Some(Ok(running)))
    }
}

impl Future for Guarded {
    type Output = Result<Outcome, Panicked>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut PollContext<'_>) -> Poll<Self::Output> {
        let mut running = match self.0.take() {
            Some(Ok(running)) => running,
            Some(Err(panicked)) => return Poll::Ready(Err(panicked)),
            None => return Poll::Pending,
        };
        let ended = match guarded(|| running.as_mut().poll(cx)) {
            Ok(Poll::Pending) => {
                self.0 = Some(Ok(running));
                return Poll::Pending;
            }
            Ok(Poll::Ready(outcome)) => Ok(outcome),
            Err(panicked) => Err(panicked),
        };
        drop_quietly(running);
        Poll::Ready(ended)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        drop_quietly(self.0.take());
    }
}

/// Values of the handler may panic when dropped; by then the attempt has its outcome.
fn drop_quietly<T>(value: T) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(|| drop(value))) {
        // A panic whose own payload panics when dropped: leaking it is the only way to end this.
        std::mem::forget(payload);
    }
}

fn message_of(payload: &(dyn Any + Send)) -> String {
    if let Some(message) = payload.downcast_ref::<&str>() {
        (*message).to_owned()
    } else if let Some(message) = payload.downcast_ref::<String>() {
        message.clone()
    } else {
        "a value that is not text".to_owned()
    }
}
