//! What is counted, and what an event adds to it. Pure.

use serde::Serialize;

use super::Histogram;

/// What happened to tasks within some time, in counts.
///
/// Each start has one outcome in the end, in a later minute perhaps: done, retried, snoozed, discarded, dead or given
/// back. If its process dies it has none, and the task starts again. Expired tasks, and dead ones that have waited for too
/// long or whose worker died, were not started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct RollupTotals {
    /// Tasks that were published and stored by processes of the app. Those that the SQL function `tierline.publish` or other
    /// programs publish are not among them. A task that was published within a transaction counts also if the
    /// transaction rolled back.
    pub published: u64,
    /// Of [`published`](Self::published), those with a delay.
    pub delayed: u64,
    /// Publishes that stored no further task: another one had the key, or was replaced.
    pub duplicates: u64,
    /// Publishes that failed.
    pub unpublished: u64,
    /// Handlers that were started.
    pub started: u64,
    /// Handlers that succeeded.
    pub done: u64,
    /// Attempts that failed, and whose next one is stored.
    pub retried: u64,
    /// Handlers that asked to run later.
    pub snoozed: u64,
    /// Tasks that their handlers discarded.
    pub discarded: u64,
    /// Tasks that were not started, because the `expires` of their publisher had passed.
    pub expired: u64,
    /// Dead letters. Those that the broker makes by itself, such as of messages that waited for longer than the `ttl`, are
    /// counted when the collector stores them.
    pub dead: u64,
    /// Deliveries that went back to their queue.
    pub given_back: u64,
    /// Of [`slo_counted`](Self::slo_counted), those that met the tier's `slo`: they were started within it. The time for
    /// which their tier or task was paused does not count.
    pub slo_met: u64,
    /// Starts, and tasks that waited until they expired, of a tier with `slo`.
    pub slo_counted: u64,
    /// Whether the tier or the task was paused at some time of it.
    pub is_paused: bool,
    /// How long tasks had waited when they were started, from when they were enqueued, fell due or were redriven.
    pub wait: Histogram,
    /// How long handlers ran, whatever the outcome.
    pub run: Histogram,
}

impl RollupTotals {
    /// Adds other totals to these.
    pub fn merge(&mut self, other: &Self) {
        for (count, more) in self.counts_mut().into_iter().zip(other.counts()) {
            *count = count.saturating_add(more);
        }
        self.is_paused |= other.is_paused;
        self.wait.merge(&other.wait);
        self.run.merge(&other.run);
    }

    /// The share of starts that met the SLO; `None` where none counts.
    pub fn slo_share(&self) -> Option<f64> {
        (self.slo_counted > 0).then(|| self.slo_met as f64 / self.slo_counted as f64)
    }

    /// The counts in the order of the table's columns.
    pub(super) fn counts(&self) -> [u64; 14] {
        [
            self.published,
            self.delayed,
            self.duplicates,
            self.unpublished,
            self.started,
            self.done,
            self.retried,
            self.snoozed,
            self.discarded,
            self.expired,
            self.dead,
            self.given_back,
            self.slo_met,
            self.slo_counted,
        ]
    }

    pub(super) fn counts_mut(&mut self) -> [&mut u64; 14] {
        [
            &mut self.published,
            &mut self.delayed,
            &mut self.duplicates,
            &mut self.unpublished,
            &mut self.started,
            &mut self.done,
            &mut self.retried,
            &mut self.snoozed,
            &mut self.discarded,
            &mut self.expired,
            &mut self.dead,
            &mut self.given_back,
            &mut self.slo_met,
            &mut self.slo_counted,
        ]
    }
}

/// The columns of the counts, in the same order.
pub(super) const COLUMNS: [&str; 14] = [
    "published",
    "delayed",
    "duplicates",
    "unpublished",
    "started",
    "done",
    "retried",
    "snoozed",
    "discarded",
    "expired",
    "dead",
    "given_back",
    "slo_met",
    "slo_counted",
];
