use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

/// The system's time plus the time that a test has skipped.
#[derive(Debug, Default)]
pub(super) struct Timeline {
    skipped: Mutex<Duration>,
}

impl Timeline {
    pub(super) fn now(&self) -> SystemTime {
        let skipped = *self.skipped.lock().unwrap_or_else(PoisonError::into_inner);
        SystemTime::now() + skipped
    }

    /// Skips the time until `due`, if that is in the future.
    pub(super) fn advance_to(&self, due: SystemTime) {
        if let Ok(missing) = due.duration_since(self.now()) {
            *self.skipped.lock().unwrap_or_else(PoisonError::into_inner) += missing;
        }
    }
}

/// A delay that no clock can hold is replaced by a century.
pub(super) fn later(now: SystemTime, delay: Duration) -> SystemTime {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
    now + delay.min(CENTURY)
}
