use std::future::Future;
use std::sync::{Arc, OnceLock};

use tokio_util::sync::CancellationToken;

/// A cancellation signal that any number of tasks can wait for.
///
/// Cancelling it cancels its children, but not its parent.
///
/// ```
/// use tierline::task::Cancellation;
///
/// let shutdown = Cancellation::new();
/// let one_task = shutdown.child();
///
/// one_task.cancel();
/// assert!(!shutdown.is_cancelled());
/// ```
#[derive(Debug, Clone, Default)]
pub struct Cancellation {
    token: CancellationToken,
    why: Arc<Why>,
}

/// Why a handler should end; see [`Context::cancel_reason`](crate::Context::cancel_reason).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CancelReason {
    /// It has reached its soft limit.
    SoftLimit,
    /// The grace period of a shutdown is over.
    Shutdown,
    /// Its worker could not extend the lease of the task, which is in a Postgres tier: another worker may run the
    /// task now. A failure that this run returns does not count any more; that it is done counts if no other worker has
    /// taken the task over.
    LeaseLost,
}

#[derive(Debug, Default)]
struct Why {
    reason: OnceLock<CancelReason>,
    parent: Option<Arc<Why>>,
}

impl Cancellation {
    /// A signal that is not cancelled.
    pub fn new() -> Self {
        Self::default()
    }

    /// A child signal. It is cancelled together with this one, and can be cancelled alone.
    pub fn child(&self) -> Self {
        Self {
            token: self.token.child_token(),
            why: Arc::new(Why {
                reason: OnceLock::new(),
                parent: Some(self.why.clone()),
            }),
        }
    }

    /// Cancels the signal. This cannot be undone.
    pub fn cancel(&self) {
        self.token.cancel();
    }

    /// Cancels the signal, and says why.
    pub(crate) fn cancel_because(&self, reason: CancelReason) {
        // The first reason counts.
        let _ = self.why.reason.set(reason);
        self.token.cancel();
    }

    /// Why the signal was cancelled, if that was said: the reason of the signal itself, else that of its parent.
    pub(crate) fn reason(&self) -> Option<CancelReason> {
        let mut why = Some(&self.why);
        while let Some(it) = why {
            if let Some(reason) = it.reason.get() {
                return Some(*reason);
            }
            why = it.parent.as_ref();
        }
        None
    }

    /// Whether the signal is cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.token.is_cancelled()
    }

    /// Waits until the signal is cancelled.
    pub fn cancelled(&self) -> impl Future<Output = ()> + Send + '_ {
        self.token.cancelled()
    }

    /// Waits until the signal is cancelled, in a future that borrows nothing: for axum's
    /// `with_graceful_shutdown`, and for spawned tasks.
    pub fn cancelled_owned(self) -> impl Future<Output = ()> + Send + 'static {
        self.token.cancelled_owned()
    }
}
