//! Pauses between attempts at something that must succeed some day.

use std::time::Duration;

use crate::random;

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(1);
/// How long a connection must last before its loss counts as a new incident.
const STABLE: Duration = Duration::from_secs(10);

/// A pause that doubles each time, up to a second, and is never quite the same: processes that lost
/// the same broker must not return at once.
#[derive(Debug)]
pub(crate) struct Backoff(Duration);

impl Backoff {
    pub(crate) fn new() -> Self {
        Self(FIRST)
    }

    pub(crate) async fn pause(&mut self) {
        let share = 0.5 + f64::from(random::number()) / f64::from(u32::MAX) / 2.0;
        let pause = self.0.mul_f64(share);
        self.0 = (self.0 * 2).min(LONGEST);
        tokio::time::sleep(pause).await;
    }

    /// Pauses after a connection that `lasted` this long was lost. One that is made and lost again at
    /// once backs off like one that cannot be made: whatever closed it would close the next one too.
    pub(crate) async fn pause_after(&mut self, lasted: Duration) {
        if lasted >= STABLE {
            *self = Self::new();
        }
        self.pause().await;
    }
}
