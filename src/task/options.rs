use std::time::Duration;

use super::RetryPolicy;

/// The retries and limits of a task.
///
/// ```
/// use std::time::Duration;
/// use tierline::TaskOptions;
///
/// let options = TaskOptions::new().retries(5).timeout(Duration::from_secs(60));
/// assert_eq!(options.effective_soft_timeout(), Duration::from_secs(50));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct TaskOptions {
    /// When and how often a failed attempt is retried.
    pub retry: RetryPolicy,
    /// The hard limit: an attempt that exceeds it is dropped and counts as failed. Default 6 min.
    pub timeout: Duration,
    /// The soft limit: it cancels the context, and the handler has until the hard limit to end
    /// cleanly. `None`, the default, is five sixths of the hard limit.
    pub soft_timeout: Option<Duration>,
}

impl TaskOptions {
    /// The defaults: those of [`RetryPolicy`], a soft limit of 5 min and a hard limit of 6 min.
    pub const fn new() -> Self {
        Self {
            retry: RetryPolicy::DEFAULT,
            timeout: Duration::from_secs(360),
            soft_timeout: None,
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
    pub const fn backoff(mut self, backoff: Duration) -> Self {
        self.retry.backoff = backoff;
        self
    }

    /// Sets the longest delay before a retry.
    #[must_use]
    pub const fn backoff_max(mut self, backoff_max: Duration) -> Self {
        self.retry.backoff_max = backoff_max;
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
    pub const fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets the soft limit.
    #[must_use]
    pub const fn soft_timeout(mut self, soft_timeout: Duration) -> Self {
        self.soft_timeout = Some(soft_timeout);
        self
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
