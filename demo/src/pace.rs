//! The duration of the night. A short night has shorter handlers, a long one has more of the usual
//! traffic.

use std::time::Duration;

/// The length that the story is written for.
const WRITTEN_FOR: f64 = 60.0;

/// The shortest retry that the broker's delays can tell from none.
const SHORTEST_BACKOFF: Duration = Duration::from_millis(100);

#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    seconds: f64,
}

impl Pace {
    pub(crate) fn of(seconds: u32) -> Self {
        Self {
            seconds: f64::from(seconds),
        }
    }

    /// The time at this share of the night.
    pub(crate) fn at(self, share: f64) -> Duration {
        Duration::from_secs_f64(self.seconds * share)
    }

    /// For how many milliseconds a handler runs that takes `milliseconds` in the story.
    pub(crate) fn run(self, milliseconds: f64) -> u64 {
        (milliseconds * self.shortened()).max(1.0) as u64
    }

    /// The pause before a first retry that is `milliseconds` in the story.
    pub(crate) fn backoff(self, milliseconds: u64) -> Duration {
        Duration::from_millis(milliseconds)
            .mul_f64(self.shortened())
            .max(SHORTEST_BACKOFF)
    }

    /// How many tasks of the usual traffic there are where the story has `count`.
    pub(crate) fn usual(self, count: usize) -> usize {
        (count as f64 * (self.seconds / WRITTEN_FOR).max(1.0)) as usize
    }

    /// When a night that has not ended counts as failed, even on a slow machine.
    pub(crate) fn limit(self) -> Duration {
        Duration::from_secs(120) + self.at(4.0)
    }

    fn shortened(self) -> f64 {
        (self.seconds / WRITTEN_FOR).min(1.0)
    }
}
