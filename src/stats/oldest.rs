//! For how long the oldest message of a queue on the broker has waited: an estimate. Pure.

use std::time::Duration;

use crate::rollup::{Minute, Seen};

/// See [the module](super). `None`: nothing is known. `minutes` are those of the last hour, the latest first.
pub(super) fn estimate(messages: u64, seen: Option<&Seen>, minutes: &[Minute]) -> Option<Duration> {
    if messages == 0 {
        return None;
    }
    let started = seen.and_then(|seen| seen.last_enqueued);
    let empty = seen.and_then(|seen| seen.empty);
    let bounds = [started, empty, nth_last_arrival(messages, minutes)];
    bounds.into_iter().flatten().min()
}

/// How long ago the minute began in which the nth last task came in.
fn nth_last_arrival(number: u64, minutes: &[Minute]) -> Option<Duration> {
    let mut arrived = 0;
    for minute in minutes {
        arrived += minute.arrived;
        if arrived >= number {
            return Some(minute.age);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn secs(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn minutes(arrived: &[u64]) -> Vec<Minute> {
        let ages = (0..).map(|place| secs(30 + 60 * place));
        let minutes = arrived.iter().zip(ages).map(|(arrived, age)| Minute {
            age,
            arrived: *arrived,
            ..Minute::default()
        });
        minutes.collect()
    }

    fn seen(started: Option<u64>, empty: Option<u64>) -> Seen {
        Seen {
            last_enqueued: started.map(secs),
            empty: empty.map(secs),
            ..Seen::default()
        }
    }

    #[test]
    fn an_empty_queue_has_no_oldest_message() {
        assert_eq!(estimate(0, Some(&seen(Some(5), Some(1))), &[]), None);
    }

    #[test]
    fn nothing_waits_for_longer_than_what_started_last_or_since_the_queue_was_empty() {
        assert_eq!(
            estimate(3, Some(&seen(Some(40), None)), &[]),
            Some(secs(40))
        );
        assert_eq!(
            estimate(3, Some(&seen(Some(400), Some(7))), &[]),
            Some(secs(7))
        );
        assert_eq!(estimate(3, None, &[]), None);
    }

    #[test]
    fn a_tier_whose_workers_are_gone_is_as_old_as_what_came_in_since() {
        // Nothing has started for an hour, and then three came in.
        let long_ago = seen(Some(3_600), Some(3_500));
        assert_eq!(
            estimate(3, Some(&long_ago), &minutes(&[0, 2, 1, 0, 50])),
            Some(secs(150))
        );
        assert_eq!(
            estimate(2, Some(&long_ago), &minutes(&[0, 2, 1])),
            Some(secs(90))
        );
        // More wait than are known to have come in.
        assert_eq!(
            estimate(9, Some(&long_ago), &minutes(&[0, 2, 1])),
            Some(secs(3_500))
        );
    }
}
