//! Durations counted in buckets whose edges are powers of two. Pure.

use std::time::Duration;

use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};

/// How many edges there are: 1 ms, 2 ms, 4 ms … 2^22 ms, which is 70 minutes.
const EDGES: usize = 23;
/// One bucket below each edge, and one above the last.
pub(super) const BUCKETS: usize = EDGES + 1;

/// Durations, counted in buckets with fixed edges: below 1 ms, below 2 ms, below 4 ms and so on to 70 minutes, and one
/// for all that are longer.
///
/// Histograms of processes and minutes add up without loss. What is read from the buckets is an estimate:
/// [`quantile`](Self::quantile) is in the same bucket as the true value, so it is off by a factor of two at most. The
/// [`mean`](Self::mean) is exact.
///
/// ```
/// use std::time::Duration;
/// use tierline::rollup::Histogram;
///
/// let mut waits = Histogram::default();
/// for milliseconds in [3, 5, 6, 100] {
///     waits.add(Duration::from_millis(milliseconds));
/// }
/// assert_eq!(waits.count(), 4);
/// assert_eq!(waits.mean(), Some(Duration::from_micros(28_500)));
/// let median = waits.quantile(0.5).unwrap();
/// assert!((4..8).contains(&median.as_millis()));
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Histogram {
    pub(super) buckets: [u64; BUCKETS],
    pub(super) sum_micros: u64,
}

impl Histogram {
    /// Counts one duration.
    pub fn add(&mut self, duration: Duration) {
        if let Some(bucket) = self.buckets.get_mut(bucket_of(duration)) {
            *bucket = bucket.saturating_add(1);
        }
        let micros = u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        // A clock that is centuries off must not spoil the sums of others in the database.
        self.sum_micros = self
            .sum_micros
            .saturating_add(micros.min(MOST_MICROS))
            .min(LARGEST_SUM);
    }

    /// Counts all that another histogram has counted.
    pub fn merge(&mut self, other: &Self) {
        for (bucket, more) in self.buckets.iter_mut().zip(other.buckets) {
            *bucket = bucket.saturating_add(more);
        }
        self.sum_micros = self
            .sum_micros
            .saturating_add(other.sum_micros)
            .min(LARGEST_SUM);
    }

    /// How many durations were counted.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// The sum of all durations.
    pub fn sum(&self) -> Duration {
        Duration::from_micros(self.sum_micros)
    }

    /// The mean; `None` if nothing was counted.
    pub fn mean(&self) -> Option<Duration> {
        let mean = self.sum_micros.checked_div(self.count())?;
        Some(Duration::from_micros(mean))
    }

    /// The duration that this share of all does not exceed, 0.95 for the 95th percentile: estimated, as if the durations
    /// of a bucket were evenly spread over it. `None` if nothing was counted. One that is above the last edge is given
    /// as that edge, 70 minutes.
    pub fn quantile(&self, share: f64) -> Option<Duration> {
        let count = self.count();
        if count == 0 {
            return None;
        }
        let wanted = share.clamp(0.0, 1.0) * count as f64;
        let mut below = 0.0;
        for (index, bucket) in self.buckets.iter().enumerate() {
            let here = *bucket as f64;
            if here > 0.0 && below + here >= wanted {
                let (low, high) = edges_of(index);
                let within = ((wanted - below) / here).clamp(0.0, 1.0);
                return Some(low + (high - low).mul_f64(within));
            }
            below += here;
        }
        None
    }

    /// The buckets: the edge below which its durations are, and how many there are. The last one has no edge.
    pub fn buckets(&self) -> impl Iterator<Item = (Option<Duration>, u64)> {
        let edge = |index| (index < EDGES).then(|| edges_of(index).1);
        let counts = self.buckets.iter().enumerate();
        counts.map(move |(index, count)| (edge(index), *count))
    }

    /// The counts without the empty buckets at the end.
    pub(super) fn trimmed(&self) -> &[u64] {
        let used = self.buckets.iter().rposition(|count| *count > 0);
        self.buckets
            .get(..used.map_or(0, |last| last + 1))
            .unwrap_or_default()
    }
}

/// No duration counts for more than this: a year.
const MOST_MICROS: u64 = 365 * 86_400 * 1_000_000;
/// What a sum may be at most: far above what can happen, and far below what a bigint holds.
const LARGEST_SUM: u64 = 1 << 60;

fn bucket_of(duration: Duration) -> usize {
    let millis = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    let bits = u64::BITS - millis.leading_zeros();
    usize::try_from(bits).unwrap_or(EDGES).min(EDGES)
}

/// The edges of a bucket; those of the last one are the same.
fn edges_of(index: usize) -> (Duration, Duration) {
    let edge = |index: usize| Duration::from_millis(1 << index.min(EDGES - 1));
    match index {
        0 => (Duration::ZERO, edge(0)),
        index => (edge(index - 1), edge(index)),
    }
}

/// As what people and charts want of it, in milliseconds; the buckets are the counts in order.
impl Serialize for Histogram {
    fn serialize<S: Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        let millis = |it: Option<Duration>| it.map(|it| it.as_secs_f64() * 1_000.0);
        let mut fields = out.serialize_struct("Histogram", 6)?;
        fields.serialize_field("count", &self.count())?;
        fields.serialize_field("mean_ms", &millis(self.mean()))?;
        fields.serialize_field("p50_ms", &millis(self.quantile(0.5)))?;
        fields.serialize_field("p95_ms", &millis(self.quantile(0.95)))?;
        fields.serialize_field("p99_ms", &millis(self.quantile(0.99)))?;
        fields.serialize_field("buckets", self.trimmed())?;
        fields.end()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(millis: impl IntoIterator<Item = u64>) -> Histogram {
        let mut histogram = Histogram::default();
        for millis in millis {
            histogram.add(Duration::from_millis(millis));
        }
        histogram
    }

    #[test]
    fn a_duration_is_below_the_edge_of_its_bucket_and_not_below_the_one_before() {
        for (millis, bucket) in [
            (0, 0),
            (1, 1),
            (2, 2),
            (3, 2),
            (4, 3),
            (1_023, 10),
            (1_024, 11),
        ] {
            assert_eq!(bucket_of(Duration::from_millis(millis)), bucket, "{millis}");
        }
        assert_eq!(bucket_of(Duration::from_micros(999)), 0);
        assert_eq!(bucket_of(Duration::from_secs(3_600)), EDGES - 1);
        assert_eq!(bucket_of(Duration::from_secs(5_000)), EDGES);
        assert_eq!(bucket_of(Duration::MAX), EDGES);
    }

    #[test]
    fn an_empty_histogram_has_no_mean_and_no_quantile() {
        let empty = Histogram::default();
        assert_eq!((empty.mean(), empty.quantile(0.5)), (None, None));
        assert!(empty.trimmed().is_empty());
    }

    #[test]
    fn durations_that_no_clock_measures_do_not_overflow() {
        let mut histogram = Histogram::default();
        for _ in 0..3 {
            histogram.add(Duration::MAX);
        }
        let mut twice = histogram.clone();
        twice.merge(&histogram);
        assert_eq!(twice.count(), 6);
        assert!(twice.sum_micros <= LARGEST_SUM);
        assert_eq!(twice.quantile(1.0), Some(Duration::from_millis(1 << 22)));
    }

    proptest! {
        #[test]
        fn an_estimate_is_off_by_a_factor_of_two_at_most(
            mut millis in prop::collection::vec(1_u64..4_000_000, 1..200),
            share in 0.01_f64..1.0,
        ) {
            let histogram = of(millis.iter().copied());
            millis.sort_unstable();
            let rank = (share * millis.len() as f64).ceil() as usize;
            let truth = Duration::from_millis(millis[rank.clamp(1, millis.len()) - 1]);
            let estimate = histogram.quantile(share).unwrap();
            prop_assert!(estimate <= truth * 2 && estimate * 2 >= truth, "{estimate:?} {truth:?}");
        }

        #[test]
        fn histograms_of_parts_add_up_to_that_of_the_whole(
            left in prop::collection::vec(0_u64..10_000_000, 0..50),
            right in prop::collection::vec(0_u64..10_000_000, 0..50),
        ) {
            let mut merged = of(left.iter().copied());
            merged.merge(&of(right.iter().copied()));
            prop_assert_eq!(merged, of(left.into_iter().chain(right)));
        }
    }
}
