//! Durations counted in buckets, on all threads at once.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The edges of all histograms: tasks may wait and run for milliseconds, and for an hour.
const EDGES: [u64; 18] = [
    1, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 30_000, 60_000, 120_000, 300_000,
    900_000, 3_600_000,
];
/// No duration adds more to a sum: a year. A clock that is centuries off must not spoil it.
const MOST: Duration = Duration::from_secs(365 * 86_400);

/// The upper edges of buckets, in order. A duration that is equal to an edge is below it, as in Prometheus.
#[derive(Debug)]
pub(super) struct Edges {
    edges: Box<[Duration]>,
    seconds: Box<[f64]>,
}

impl Edges {
    /// The usual edges, and these.
    pub(super) fn with(more: impl IntoIterator<Item = Duration>) -> Self {
        let usual = EDGES.into_iter().map(Duration::from_millis);
        let mut edges: Vec<Duration> = usual.chain(more).filter(|it| !it.is_zero()).collect();
        edges.sort_unstable();
        edges.dedup();
        Self {
            seconds: edges.iter().map(Duration::as_secs_f64).collect(),
            edges: edges.into(),
        }
    }

    fn bucket_of(&self, duration: Duration) -> usize {
        self.edges.partition_point(|edge| *edge < duration)
    }
}

/// Counts of durations between the edges.
#[derive(Debug)]
pub(super) struct AtomicHistogram {
    /// One for each edge, and one for what is longer than all.
    buckets: Box<[AtomicU64]>,
    sum_micros: AtomicU64,
}

/// The counts of a histogram as they were a moment ago.
#[derive(Debug)]
pub(super) struct Read {
    /// The upper edges in seconds, and how many durations are in each bucket. The last edge is infinite.
    pub(super) buckets: Vec<(f64, u64)>,
    pub(super) count: u64,
    /// In seconds.
    pub(super) sum: f64,
}

impl AtomicHistogram {
    pub(super) fn new(edges: &Edges) -> Self {
        let buckets = edges.edges.len() + 1;
        Self {
            buckets: (0..buckets).map(|_| AtomicU64::new(0)).collect(),
            sum_micros: AtomicU64::new(0),
        }
    }

    /// Counts a duration. `edges` are those that it was made with.
    pub(super) fn add(&self, edges: &Edges, duration: Duration) {
        if let Some(bucket) = self.buckets.get(edges.bucket_of(duration)) {
            bucket.fetch_add(1, Ordering::Relaxed);
        }
        let micros = duration.min(MOST).as_micros();
        let micros = u64::try_from(micros).unwrap_or_default();
        self.sum_micros.fetch_add(micros, Ordering::Relaxed);
    }

    pub(super) fn read(&self, edges: &Edges) -> Read {
        let seconds = edges.seconds.iter().copied().chain([f64::INFINITY]);
        let counts = self.buckets.iter().map(|it| it.load(Ordering::Relaxed));
        let buckets: Vec<(f64, u64)> = seconds.zip(counts).collect();
        Read {
            // Of the same loads, so that it is never below the last bucket.
            count: buckets.iter().map(|(_, count)| count).sum(),
            buckets,
            sum: self.sum_micros.load(Ordering::Relaxed) as f64 / 1e6,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_in_the_bucket_of_the_first_edge_that_it_does_not_exceed() {
        let edges = Edges::with([Duration::from_secs(7), Duration::from_millis(50)]);
        assert_eq!(edges.seconds.len(), EDGES.len() + 1, "50 ms is one already");
        let histogram = AtomicHistogram::new(&edges);
        let seven = Duration::from_secs(7);
        let durations = [seven, seven + Duration::from_nanos(1), Duration::MAX];
        for duration in durations {
            histogram.add(&edges, duration);
        }
        let read = histogram.read(&edges);
        let of = |edge: f64| read.buckets.iter().find(|it| it.0 == edge).unwrap().1;
        assert_eq!((of(7.0), of(10.0), of(f64::INFINITY)), (1, 1, 1));
        assert_eq!(read.count, 3);
        assert_eq!(read.sum, 14.0 + MOST.as_secs_f64());
    }
}
