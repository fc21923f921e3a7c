use std::time::Duration;

/// When a failed task runs again: after `backoff`, twice that, four times that, up to
/// `backoff_max`, and at most `retries` times.
///
/// ```
/// use tierline::task::RetryPolicy;
///
/// let patient = RetryPolicy { retries: 20, ..RetryPolicy::default() };
/// assert_eq!(patient.backoff_max.as_secs(), 600);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RetryPolicy {
    /// How many times the task runs again after its first attempt. 0 for never. Default 3.
    pub retries: u32,
    /// The delay before the first retry, doubled for each one after it. Default 1 s.
    pub backoff: Duration,
    /// No delay is longer than this. Default 10 min.
    pub backoff_max: Duration,
    /// Whether a delay is drawn from its upper half, so that tasks that failed together do not retry
    /// together. Default true.
    pub jitter: bool,
}

impl RetryPolicy {
    /// 3 retries, from 1 s to at most 10 min, with jitter.
    pub const DEFAULT: Self = Self {
        retries: 3,
        backoff: Duration::from_secs(1),
        backoff_max: Duration::from_secs(600),
        jitter: true,
    };

    /// The delay after the attempt of this number (1 is the first) has failed. `None` if
    /// no retry is left.
    ///
    /// Pure: `random` is any number, drawn anew for each call; without jitter it has no effect.
    pub(crate) fn delay_after(&self, attempt: u32, random: u32) -> Option<Duration> {
        if attempt > self.retries {
            return None;
        }
        let delay = self.doubled(attempt.saturating_sub(1));
        Some(if self.jitter {
            upper_half(delay, random)
        } else {
            delay
        })
    }

    fn doubled(&self, times: u32) -> Duration {
        // From the 33rd retry on the delay no longer grows: 2^32 times any sensible backoff is far above any
        // cap.
        let factor = 1_u32.checked_shl(times).unwrap_or(u32::MAX);
        self.backoff.saturating_mul(factor).min(self.backoff_max)
    }
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// At least half of the delay remains, so that a struggling service is never called again at once.
fn upper_half(delay: Duration, random: u32) -> Duration {
    let half = delay / 2;
    let share = u128::from(random) * half.as_nanos() / u128::from(u32::MAX);
    half + Duration::from_nanos_u128(share)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_policy() -> impl Strategy<Value = RetryPolicy> {
        (
            any::<u32>(),
            any::<Duration>(),
            any::<Duration>(),
            any::<bool>(),
        )
            .prop_map(|(retries, backoff, backoff_max, jitter)| RetryPolicy {
                retries,
                backoff,
                backoff_max,
                jitter,
            })
    }

    proptest! {
        #[test]
        fn no_delay_is_above_the_cap(policy in any_policy(), attempt: u32, random: u32) {
            if let Some(delay) = policy.delay_after(attempt, random) {
                prop_assert!(delay <= policy.backoff_max);
            }
        }

        #[test]
        fn jitter_keeps_at_least_half_and_adds_nothing(
            policy in any_policy(), attempt: u32, random: u32,
        ) {
            let exact = RetryPolicy { jitter: false, ..policy };
            let jittered = RetryPolicy { jitter: true, ..policy };
            let exact = exact.delay_after(attempt, random);
            let jittered = jittered.delay_after(attempt, random);
            prop_assert_eq!(exact.is_some(), jittered.is_some());
            if let (Some(exact), Some(jittered)) = (exact, jittered) {
                prop_assert!(exact / 2 <= jittered && jittered <= exact);
            }
        }

        #[test]
        fn delays_never_shrink_from_one_attempt_to_the_next(
            policy in any_policy(), attempt in 1..u32::MAX,
        ) {
            let policy = RetryPolicy { jitter: false, ..policy };
            if let Some(next) = policy.delay_after(attempt + 1, 0) {
                prop_assert!(policy.delay_after(attempt, 0) <= Some(next));
            }
        }

        #[test]
        fn exactly_the_allowed_number_of_retries_is_given(policy in any_policy(), attempt: u32) {
            prop_assert_eq!(policy.delay_after(attempt, 0).is_some(), attempt <= policy.retries);
        }
    }

    #[test]
    fn the_billionth_attempt_waits_as_long_as_the_cap() {
        let policy = RetryPolicy {
            retries: u32::MAX,
            jitter: false,
            ..RetryPolicy::DEFAULT
        };
        assert_eq!(
            policy.delay_after(1_000_000_000, 0),
            Some(Duration::from_secs(600))
        );
    }

    #[test]
    fn jitter_spreads_over_the_upper_half() {
        let policy = RetryPolicy {
            retries: 10,
            ..RetryPolicy::DEFAULT
        };
        let tenths: std::collections::BTreeSet<u128> = (0..1000)
            .filter_map(|step| policy.delay_after(10, step * (u32::MAX / 1000)))
            .map(|delay| delay.as_millis() / 25_600)
            .collect();
        assert_eq!(tenths, (10..20).collect());
    }

    #[test]
    fn the_defaults_are_three_retries_of_one_two_and_four_seconds() {
        let policy = RetryPolicy {
            jitter: false,
            ..RetryPolicy::DEFAULT
        };
        let delays: Vec<_> = (1..=4)
            .map(|attempt| policy.delay_after(attempt, 0))
            .collect();
        let seconds = |seconds| Some(Duration::from_secs(seconds));
        assert_eq!(delays, [seconds(1), seconds(2), seconds(4), None]);
    }
}
