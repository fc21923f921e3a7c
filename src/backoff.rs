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
        tokio::time::sleep(self.next()).await;
    }

    /// Pauses after a connection that `lasted` this long was lost. One that is made and lost again at
    /// once backs off like one that cannot be made: whatever closed it would close the next one too.
    pub(crate) async fn pause_after(&mut self, lasted: Duration) {
        tokio::time::sleep(self.next_after(lasted)).await;
    }

    /// How long the next [`pause`](Self::pause) is.
    pub(crate) fn next(&mut self) -> Duration {
        let share = 0.5 + f64::from(random::number()) / f64::from(u32::MAX) / 2.0;
        let pause = self.0.mul_f64(share);
        self.0 = (self.0 * 2).min(LONGEST);
        pause
    }

    /// How long the next [`pause_after`](Self::pause_after) is.
    pub(crate) fn next_after(&mut self, lasted: Duration) -> Duration {
        if lasted >= STABLE {
            *self = Self::new();
        }
        self.next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_that_are_lost_at_once_are_made_ever_more_seldom_up_to_a_second() {
        let mut backoff = Backoff::new();
        let longest = [100, 200, 400, 800, 1_000, 1_000].map(Duration::from_millis);
        for longest in longest {
            let pause = backoff.next_after(Duration::from_secs(1));
            assert!((longest / 2..=longest).contains(&pause), "{pause:?}");
        }
    }

    #[test]
    fn a_connection_that_lasted_is_made_again_as_soon_as_the_first() {
        let mut backoff = Backoff::new();
        let _pauses: Vec<_> = (0..10).map(|_| backoff.next()).collect();
        assert!(backoff.next_after(STABLE) <= FIRST);
    }
}
