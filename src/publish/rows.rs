//! Inserts the row of one message until it is committed, at the latest until its deadline.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::attempt::{Patience, PublishAttempt};
use super::{Confirmed, Inner};
use crate::backlog::{InsertFailure, Inserted, KEY_ATTEMPT, KeyProblem, NewRow};
use crate::error::{PublishError, TopologyError};
use crate::{Error, TaskId};

/// The pause before the next attempt. It doubles up to `LONGEST_PAUSE`.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

impl Inner {
    pub(super) async fn insert_until_committed(
        &self,
        attempt: &PublishAttempt,
        row: &Arc<NewRow>,
    ) -> Result<Confirmed, Error> {
        let Some(writers) = &self.rows else {
            let tiers = row.tier.as_str().into();
            return Err(Error::Topology(TopologyError::NoDatabase { tiers }));
        };
        let mut pause = FIRST_PAUSE;
        // An attempt without an answer may have stored the row, whatever the later ones say.
        let mut lost = None;
        // A tier that was full, or a key that was busy, is the cause, even if the last attempt came to nothing before the
        // deadline.
        let mut waited_for = None;
        loop {
            let was_busy = matches!(waited_for, Some(InsertFailure::Key(KeyProblem::Busy)));
            let failure = match writers.insert(row, was_busy, attempt.deadline).await {
                Ok(inserted) => return confirmed(row, inserted),
                Err(failure) => failure,
            };
            let is_lost = matches!(failure, InsertFailure::Lost(_));
            let reserve = match failure {
                InsertFailure::Key(_) => KEY_ATTEMPT,
                _ => Duration::ZERO,
            };
            let is_over = Instant::now() + pause + reserve >= attempt.deadline;
            let is_final = matches!(
                failure,
                InsertFailure::Refused(_) | InsertFailure::Key(KeyProblem::Mismatch { .. })
            );
            let is_once = attempt.patience == Patience::UnlessLost;
            if is_over || is_final || (is_once && is_lost) {
                let failure = match failure {
                    InsertFailure::NotSent(_) => waited_for.unwrap_or(failure),
                    failure => failure,
                };
                return Err(insert_error(
                    attempt.id.clone(),
                    row,
                    lost.unwrap_or(failure),
                ));
            }
            match failure {
                InsertFailure::Lost(_) => lost = Some(failure),
                InsertFailure::Full | InsertFailure::Key(_) => waited_for = Some(failure),
                _ => {}
            }
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}

/// What a publish of this row is told.
pub(super) fn confirmed(row: &NewRow, inserted: Inserted) -> Result<Confirmed, Error> {
    match (inserted, &row.key) {
        (Inserted::New, _) => Ok(Confirmed::Stored),
        (Inserted::Replaced(other), _) => Ok(Confirmed::Replaced(other)),
        (Inserted::Duplicate { first, .. }, Some(key)) if key.claim.refuses() => {
            Err(Error::Publish(PublishError::Duplicate {
                task: row.task.as_str().into(),
                key: key.claim.key.as_str().into(),
                first,
            }))
        }
        (Inserted::Duplicate { first, tier }, _) => Ok(Confirmed::Duplicate { first, tier }),
    }
}

/// The error of a publish whose row was not inserted, as far as that is known.
pub(super) fn insert_error(id: TaskId, row: &NewRow, failure: InsertFailure) -> Error {
    let text = |cause: Arc<str>| Box::from(&*cause);
    Error::Publish(match failure {
        InsertFailure::NotSent(cause) | InsertFailure::NotMigrated(cause) => {
            let cause = text(cause);
            PublishError::NotConnected { id, cause }
        }
        InsertFailure::Lost(cause) => {
            let cause = text(cause);
            PublishError::Unconfirmed { id, cause }
        }
        InsertFailure::Full => PublishError::Refused { id },
        InsertFailure::Key(problem) => key_error(id, row, problem),
        InsertFailure::Refused(cause) => PublishError::InvalidMessage {
            task: row.task.as_str().into(),
            problem: text(cause),
        },
    })
}

pub(super) fn key_error(id: TaskId, row: &NewRow, problem: KeyProblem) -> PublishError {
    let key = row.key.as_ref().map_or("", |key| key.claim.key.as_str());
    let busy = |problem: String| PublishError::KeyBusy {
        id: id.clone(),
        key: key.into(),
        problem: problem.into(),
    };
    match problem {
        KeyProblem::Full => PublishError::Refused { id },
        KeyProblem::Mismatch { first } => PublishError::IdempotencyMismatch {
            task: row.task.as_str().into(),
            key: key.into(),
            first,
        },
        KeyProblem::Busy => busy(format!(
            "a transaction that has not ended has taken its key {key:?}; publish it again, and keep transactions that \
             publish with keys short"
        )),
        KeyProblem::Stale => busy(format!(
            "another transaction has changed its key {key:?} since this one began; roll back, and run the transaction \
             again"
        )),
    }
}
