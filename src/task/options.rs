use std::time::Duration;

use super::{IntoDuration, RetryPolicy};
use crate::error::Error;
use crate::topology::duration::Unreadable;

/// The retries and limits of a task.
///
/// A text that is no span of time is refused where the options are
/// [registered](crate::Registry::register_with).
///
/// ```
/// use std::time::Duration;
/// use tierline::TaskOptions;
///
/// let options = TaskOptions::new().retries(5).timeout("60s");
/// assert_eq!(options.effective_soft_timeout(), Duration::from_secs(50));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct TaskOptions {
    /// When and how often a failed attempt is retried.
    pub retry: RetryPolicy,
    /// The hard limit: an attempt that exceeds it is dropped and counts as failed. Default 6 min.
    pub timeout: Duration,
    /// The soft limit: it cancels the context, and the handler has until the hard limit to end
    /// cleanly. `None`, the default, is five sixths of the hard limit.
    pub soft_timeout: Option<Duration>,
    unreadable: Unreadable,
}

impl TaskOptions {
    /// The defaults: those of [`RetryPolicy`], a soft limit of 5 min and a hard limit of 6 min.
    pub const fn new() -> Self {
        Self {
            retry: RetryPolicy::DEFAULT,
            timeout: Duration::from_secs(360),
            soft_timeout: None,
            unreadable: Unreadable::NONE,
        }
    }

    /// Sets how many times the task runs again after its first attempt.
    #[must_use]
    pub const fn retries(mut self, retries: u32) -> Self {
        self.retry.retries = retries;
        self
    }

    /// Sets the delay before the first retry.
    #[must_use]
    pub fn backoff(mut self, backoff: impl IntoDuration) -> Self {
        let place = &mut self.retry.backoff;
        self.unreadable.set("backoff", backoff, place);
        self
    }

    /// Sets the longest delay before a retry.
    #[must_use]
    pub fn backoff_max(mut self, backoff_max: impl IntoDuration) -> Self {
        let place = &mut self.retry.backoff_max;
        self.unreadable.set("backoff_max", backoff_max, place);
        self
    }

    /// Sets whether delays have random jitter.
    #[must_use]
    pub const fn jitter(mut self, jitter: bool) -> Self {
        self.retry.jitter = jitter;
        self
    }

    /// Sets the hard limit.
    #[must_use]
    pub fn timeout(mut self, timeout: impl IntoDuration) -> Self {
        let place = &mut self.timeout;
        self.unreadable.set("timeout", timeout, place);
        self
    }

    /// Sets the soft limit.
    #[must_use]
    pub fn soft_timeout(mut self, soft_timeout: impl IntoDuration) -> Self {
        let place = self.soft_timeout.get_or_insert_default();
        self.unreadable.set("soft_timeout", soft_timeout, place);
        self
    }

    /// # Errors
    /// [`Error::InvalidDuration`] where one of them could not be read.
    pub(super) fn check(&self) -> Result<(), Error> {
        self.unreadable.check()
    }

    /// The soft limit in effect: the configured one, or five sixths of the hard limit.
    pub fn effective_soft_timeout(&self) -> Duration {
        self.soft_timeout.unwrap_or(self.timeout / 6 * 5)
    }
}

impl Default for TaskOptions {
    fn default() -> Self {
        Self::new()
    }
}
