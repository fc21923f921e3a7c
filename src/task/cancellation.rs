use std::future::Future;

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
pub struct Cancellation(CancellationToken);

impl Cancellation {
    /// A signal that is not cancelled.
    pub fn new() -> Self {
        Self::default()
    }

    /// A child signal. It is cancelled together with this one, and can be cancelled alone.
    pub fn child(&self) -> Self {
        Self(self.0.child_token())
    }

    /// Cancels the signal. This cannot be undone.
    pub fn cancel(&self) {
        self.0.cancel();
    }

    /// Whether the signal is cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.0.is_cancelled()
    }

    /// Waits until the signal is cancelled.
    pub fn cancelled(&self) -> impl Future<Output = ()> + Send + '_ {
        self.0.cancelled()
    }

    /// Waits until the signal is cancelled, in a future that borrows nothing: for axum's
    /// `with_graceful_shutdown`, and for spawned tasks.
    pub fn cancelled_owned(self) -> impl Future<Output = ()> + Send + 'static {
        self.0.cancelled_owned()
    }
}
