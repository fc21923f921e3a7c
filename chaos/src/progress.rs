//! Measures progress: pure, over the times at which tasks ended.

use std::time::Duration;

use crate::ledger::Millis;

/// The share of the former throughput that counts as recovered.
const RECOVERED: f64 = 0.9;
/// The window over which throughput is measured.
const WINDOW: Millis = 1_000;

/// The longest time between `from` and `to` in which no task ended. `times` are sorted.
pub(crate) fn longest_gap(times: &[Millis], from: Millis, to: Millis) -> Duration {
    let inside = within(times, from, to);
    let mut last = from;
    let mut longest = 0;
    for time in inside.iter().copied().chain([to]) {
        longest = longest.max(time.saturating_sub(last));
        last = time;
    }
    Duration::from_millis(longest)
}

/// Ended tasks per second.
pub(crate) fn rate(times: &[Millis], from: Millis, to: Millis) -> f64 {
    let span = to.saturating_sub(from).max(1);
    within(times, from, to).len() as f64 * 1_000.0 / span as f64
}

/// How long after `since` the throughput first reached 0.9 of `former` for a second.
pub(crate) fn recovery(
    times: &[Millis],
    since: Millis,
    until: Millis,
    former: f64,
) -> Option<Duration> {
    let starts = (since..until.saturating_sub(WINDOW)).step_by(100);
    starts
        .into_iter()
        .find(|from| rate(times, *from, from + WINDOW) >= RECOVERED * former)
        .map(|from| Duration::from_millis(from + WINDOW - since))
}

fn within(times: &[Millis], from: Millis, to: Millis) -> &[Millis] {
    let begin = times.partition_point(|time| *time < from);
    let end = times.partition_point(|time| *time < to);
    &times[begin..end.max(begin)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_gap_may_be_at_the_beginning_in_the_middle_or_at_the_end() {
        let milliseconds = Duration::from_millis;
        assert_eq!(longest_gap(&[40, 50, 60], 0, 70), milliseconds(40));
        assert_eq!(longest_gap(&[10, 50, 60], 0, 70), milliseconds(40));
        assert_eq!(longest_gap(&[10, 20, 30], 0, 70), milliseconds(40));
        assert_eq!(longest_gap(&[], 0, 70), milliseconds(70));
        assert_eq!(longest_gap(&[5, 90], 10, 70), milliseconds(60));
    }

    #[test]
    fn recovery_is_when_a_whole_second_went_at_nearly_the_former_rate() {
        // A hundred a second, nothing from 10 s to 15 s, then half of it, and all of it from 18 s on.
        let steady = (0..10_000).step_by(10);
        let half = (15_000..18_000).step_by(20);
        let full = (18_000..30_000).step_by(10);
        let times: Vec<Millis> = steady.chain(half).chain(full).collect();
        let former = rate(&times, 0, 10_000);
        let took = recovery(&times, 14_000, 30_000, former).unwrap_or_default();
        assert!(took >= Duration::from_millis(4_700) && took <= Duration::from_millis(5_000));
        assert_eq!(recovery(&times, 14_000, 17_000, former), None);
    }
}
