use std::future::Future;

use tokio_util::sync::CancellationToken;

/// A signal to stop, which any number of parties can watch.
///
/// Cancelling it cancels its children, and not the other way round.
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
    /// A signal that nobody has given yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// A signal that is given together with this one, and that can be given alone.
    pub fn child(&self) -> Self {
        Self(self.0.child_token())
    }

    /// Gives the signal. It cannot be taken back.
    pub fn cancel(&self) {
        self.0.cancel();
    }

    /// Whether the signal was given.
    pub fn is_cancelled(&self) -> bool {
        self.0.is_cancelled()
    }

    /// Waits until the signal is given.
    pub fn cancelled(&self) -> impl Future<Output = ()> + Send + '_ {
        self.0.cancelled()
    }

    /// Waits until the signal is given, in a future that borrows nothing: for axum's
    /// `with_graceful_shutdown`, and for tasks of their own.
    pub fn cancelled_owned(self) -> impl Future<Output = ()> + Send + 'static {
        self.0.cancelled_owned()
    }
}
