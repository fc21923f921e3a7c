//! Inserts the row of one message until it is committed, at the latest until its deadline.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::Inner;
use super::attempt::{Patience, PublishAttempt};
use crate::Error;
use crate::backlog::{InsertFailure, NewRow};
use crate::error::{PublishError, TopologyError};

/// The pause before the next attempt. It doubles up to `LONGEST_PAUSE`.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

impl Inner {
    pub(super) async fn insert_until_committed(
        &self,
        attempt: &PublishAttempt,
        row: &Arc<NewRow>,
    ) -> Result<(), Error> {
        let Some(writers) = &self.rows else {
            let tiers = row.tier.as_str().into();
            return Err(Error::Topology(TopologyError::NoDatabase { tiers }));
        };
        let mut pause = FIRST_PAUSE;
        // An attempt without an answer may have stored the row, whatever the later ones say.
        let mut lost = None;
        // A tier that was full is the cause, even if the last attempt came to nothing before the deadline.
        let mut full = None;
        loop {
            let failure = match writers.insert(row, attempt.deadline).await {
                Ok(()) => return Ok(()),
                Err(failure) => failure,
            };
            let is_lost = matches!(failure, InsertFailure::Lost(_));
            let is_over = Instant::now() + pause >= attempt.deadline;
            let is_final = matches!(failure, InsertFailure::Refused(_));
            let is_once = attempt.patience == Patience::UnlessLost;
            if is_over || is_final || (is_once && is_lost) {
                let failure = match failure {
                    InsertFailure::NotSent(_) => full.unwrap_or(failure),
                    failure => failure,
                };
                return Err(error(attempt, row, lost.unwrap_or(failure)));
            }
            match failure {
                InsertFailure::Lost(_) => lost = Some(failure),
                InsertFailure::Full => full = Some(failure),
                _ => {}
            }
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}

fn error(attempt: &PublishAttempt, row: &NewRow, failure: InsertFailure) -> Error {
    let id = attempt.id.clone();
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
        InsertFailure::Refused(cause) => PublishError::InvalidMessage {
            task: row.task.as_str().into(),
            problem: text(cause),
        },
    })
}
