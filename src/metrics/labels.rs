//! The label values that stand for kinds of things. Each set is fixed.

use crate::error::ErrorKind;
use crate::message::DeadReason;
use crate::observe::{PublishResult, Purpose};

/// How a delivery of a task ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Done,
    Retried,
    Snoozed,
    Discarded,
    Expired,
    Dead,
    GivenBack,
}

impl Outcome {
    pub(super) const ALL: [Self; 7] = [
        Self::Done,
        Self::Retried,
        Self::Snoozed,
        Self::Discarded,
        Self::Expired,
        Self::Dead,
        Self::GivenBack,
    ];

    pub(super) fn label(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Retried => "retried",
            Self::Snoozed => "snoozed",
            Self::Discarded => "discarded",
            Self::Expired => "expired",
            Self::Dead => "dead",
            Self::GivenBack => "given_back",
        }
    }
}

/// The results of a publish: `stored`, `replaced`, `duplicate`, and the kinds of errors.
pub(super) const RESULTS: [&str; 15] = [
    "stored",
    "replaced",
    "duplicate",
    "configuration",
    "invalid",
    "not_found",
    "conflict",
    "connection",
    "overloaded",
    "permission",
    "mismatch",
    "unsupported",
    "refused",
    "closed",
    "system",
];

/// The index of a result in [`RESULTS`].
pub(super) fn result_index(result: PublishResult) -> usize {
    match result {
        PublishResult::Stored => 0,
        PublishResult::Replaced => 1,
        PublishResult::Duplicate => 2,
        PublishResult::Failed(kind) => match kind {
            ErrorKind::Configuration => 3,
            ErrorKind::Invalid => 4,
            ErrorKind::NotFound => 5,
            ErrorKind::Conflict => 6,
            ErrorKind::Connection => 7,
            ErrorKind::Overloaded => 8,
            ErrorKind::Permission => 9,
            ErrorKind::Mismatch => 10,
            ErrorKind::Unsupported => 11,
            ErrorKind::Refused => 12,
            ErrorKind::Closed => 13,
            ErrorKind::System => 14,
        },
    }
}

/// The reasons of dead letters: those of tierline, in their order, and one for those that the broker made by itself.
pub(super) const REASONS: [&str; DeadReason::ALL.len() + 1] = [
    "retries_exhausted",
    "permanent_error",
    "unknown_task",
    "undecodable_payload",
    "crash_loop",
    "hung",
    "no_delays",
    "unroutable",
    "expired",
    "unpublishable",
    "broker",
];

/// The index of a reason in [`REASONS`].
pub(super) fn reason_index(reason: DeadReason) -> usize {
    let position = DeadReason::ALL.iter().position(|it| *it == reason);
    position.unwrap_or(BY_BROKER)
}

/// The index of those that the broker made by itself.
pub(super) const BY_BROKER: usize = REASONS.len() - 1;

/// What connections are for, in the order of their label values.
pub(super) const PURPOSES: [Purpose; 3] = [Purpose::Publish, Purpose::Work, Purpose::Collect];

pub(super) fn purpose_label(purpose: Purpose) -> &'static str {
    match purpose {
        Purpose::Publish => "publish",
        Purpose::Work => "work",
        Purpose::Collect => "collect",
    }
}

/// The index of a purpose in [`PURPOSES`].
pub(super) fn purpose_index(purpose: Purpose) -> usize {
    match purpose {
        Purpose::Publish => 0,
        Purpose::Work => 1,
        Purpose::Collect => 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_reason_has_its_own_words_as_label() {
        for reason in DeadReason::ALL {
            let words = reason.as_str().replace(' ', "_");
            assert_eq!(REASONS[reason_index(reason)], words);
        }
    }

    #[test]
    fn each_error_kind_has_its_own_name_as_label() {
        let failed = |kind| RESULTS[result_index(PublishResult::Failed(kind))];
        for (kind, label) in [
            (ErrorKind::NotFound, "not_found"),
            (ErrorKind::Connection, "connection"),
            (ErrorKind::Overloaded, "overloaded"),
            (ErrorKind::System, "system"),
        ] {
            assert_eq!(failed(kind), label);
        }
        for (index, purpose) in PURPOSES.into_iter().enumerate() {
            assert_eq!(purpose_index(purpose), index);
        }
    }
}
