//! Pauses between attempts at something that must succeed some day.

use std::time::Duration;

use tokio::time::Instant;

use crate::random;

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(1);
/// How often an attempt that fails again and again is worth a warning.
const WARN_EVERY: Duration = Duration::from_secs(300);
/// How long a connection must last before its loss counts as a new incident.
const STABLE: Duration = Duration::from_secs(10);

/// A pause that doubles each time, up to a second, and is never quite the same: processes that lost
/// the same broker must not return at once.
#[derive(Debug)]
pub(crate) struct Backoff {
    next: Duration,
    warned_at: Option<Instant>,
}

impl Backoff {
    pub(crate) fn new() -> Self {
        Self {
            next: FIRST,
            warned_at: None,
        }
    }

    /// Whether to log a failure as a warning: the first one, and then one in five minutes. A worker has a dozen connections,
    /// and each tries every second for as long as the broker is away.
    pub(crate) fn is_worth_a_warning(&mut self) -> bool {
        let is_due = self.warned_at.is_none_or(|at| at.elapsed() >= WARN_EVERY);
        if is_due {
            self.warned_at = Some(Instant::now());
        }
        is_due
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
        let pause = self.next.mul_f64(share);
        self.next = (self.next * 2).min(LONGEST);
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

    #[tokio::test(start_paused = true)]
    async fn a_failure_that_repeats_is_a_warning_every_five_minutes_and_after_a_success_at_once() {
        let mut backoff = Backoff::new();
        let mut warnings = 0;
        for _ in 0..500 {
            warnings += u32::from(backoff.is_worth_a_warning());
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        assert_eq!(warnings, 2);
        backoff.next_after(STABLE);
        assert!(backoff.is_worth_a_warning());
    }
}
