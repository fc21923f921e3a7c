use std::time::Duration;

use crate::message::{DeadReason, Failure};

/// What is to become of a message after its execution.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It succeeded.
    Done,
    /// It failed, and its next attempt is due after this time.
    Retry {
        /// The time until the next attempt.
        after: Duration,
        /// Why this attempt failed.
        failure: Failure,
    },
    /// It asked to run later; this costs no attempt.
    Snooze {
        /// The time until it runs again.
        after: Duration,
    },
    /// It said that there is nothing to do any more. Counted and logged, not kept.
    Discarded {
        /// What the handler gave as the reason.
        reason: String,
    },
    /// It came too late and was not run. Counted and logged, not kept.
    Expired {
        /// By how much it was late.
        late: Duration,
    },
    /// It is kept as a dead letter, payload intact.
    Dead {
        /// Why it is dead.
        reason: DeadReason,
        /// What went wrong last.
        failure: Failure,
    },
}
