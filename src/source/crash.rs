//! What becomes of a task whose worker died while it held the task.

use std::time::Duration;

use crate::message::{Failure, FailureKind, QUARANTINE_FROM};
use crate::random;

/// The pause before a message runs again after its first crash. Without it, another process may start the counted copy
/// before the delivery that it replaces is acknowledged, and a connection that is cut then leaves both.
const FIRST_CRASH_DELAY: Duration = Duration::from_millis(300);
/// The pause before a suspect is put into quarantine, at least. It is four times as long after each crash there.
/// A killer that is not in quarantine yet has killed again by then, while this message is not held.
const QUARANTINE_DELAY: Duration = Duration::from_millis(500);

/// Why a task with this crash count is a dead letter.
pub(super) fn crash_loop(crashes: u32) -> Failure {
    let problem = format!(
        "{crashes} workers died while they held this task, and since the second death it ran from \
         quarantine; look for what ends the process: an abort, a stack overflow, too much memory"
    );
    Failure::new(FailureKind::Crash, problem)
}

/// How long a message with this crash count waits before it runs again.
pub(super) fn delay_after_crash(crashes: u32) -> Duration {
    if crashes < QUARANTINE_FROM {
        return FIRST_CRASH_DELAY;
    }
    let jitter = f64::from(random::number()) / f64::from(u32::MAX);
    let factor = 4_u32.pow((crashes - QUARANTINE_FROM).min(3));
    (QUARANTINE_DELAY * factor).mul_f64(1.0 + jitter)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_first_crash_costs_a_moment_and_each_crash_in_quarantine_more() {
        assert_eq!(delay_after_crash(1), FIRST_CRASH_DELAY);
        let mut longest = FIRST_CRASH_DELAY;
        for crashes in 2..6 {
            let delay = delay_after_crash(crashes);
            assert!(delay > longest, "{crashes} {delay:?}");
            longest = QUARANTINE_DELAY * 4_u32.pow(crashes - 2) * 2;
        }
        assert!(delay_after_crash(u32::MAX) <= QUARANTINE_DELAY * 128);
    }
}
