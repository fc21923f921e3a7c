use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

/// The system's time, and what a test has skipped of it.
#[derive(Debug, Default)]
pub(super) struct Timeline {
    skipped: Mutex<Duration>,
}

impl Timeline {
    pub(super) fn now(&self) -> SystemTime {
        let skipped = *self.skipped.lock().unwrap_or_else(PoisonError::into_inner);
        SystemTime::now() + skipped
    }

    /// Skips the time until `due`, if it has not come yet.
    pub(super) fn advance_to(&self, due: SystemTime) {
        if let Ok(missing) = due.duration_since(self.now()) {
            *self.skipped.lock().unwrap_or_else(PoisonError::into_inner) += missing;
        }
    }
}

/// A delay that no clock can hold is one that never ends; a century stands for it.
pub(super) fn later(now: SystemTime, delay: Duration) -> SystemTime {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
    now + delay.min(CENTURY)
}
