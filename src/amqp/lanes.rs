//! Many operations at once, over a few channels.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::try_join_all;
use lapin::ErrorKind;
use lapin::protocol::AMQPErrorKind;
use tokio::time::{Instant, sleep, timeout_at};

use super::connection::Connection;
use super::operation::{Counts, Operation};
use crate::Error;

/// Each lane is a channel that has one operation under way, so that a refusal, which closes the
/// channel, is that operation's own. Eight keep a broker busy that starts quorum queues.
const LANES: usize = 8;
/// How long the broker may take for one operation.
const OPERATION_LIMIT: Duration = Duration::from_secs(30);
/// How often an operation is tried that the broker refuses for a reason that passes.
const ATTEMPTS: u32 = 6;
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// What the broker answered: yes, or a refusal.
pub(super) type Answer = Result<Counts, Refusal>;

/// The broker's reason to close a channel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) code: u16,
    pub(super) text: String,
}

impl Refusal {
    pub(super) const ACCESS_REFUSED: u16 = 403;
    pub(super) const NOT_FOUND: u16 = 404;
    pub(super) const PRECONDITION_FAILED: u16 = 406;

    /// Whether it is of a queue that is there and cannot be reached, which may pass: one whose leader
    /// is being elected or whose node is down is "not found" in these words.
    pub(super) fn is_unreachable(&self) -> bool {
        self.code == Self::NOT_FOUND
            // The text quotes the queue's name, which may have any of the words.
            && !self.text.contains("no queue '")
            && [
                "timeout",
                "inaccessible",
                "process is stopped",
                "unavailable",
            ]
            .iter()
            .any(|reason| self.text.contains(reason))
    }
}

/// Runs all operations, in no particular order. The answers are in the order of the operations.
///
/// # Errors
/// When the connection fails, or an operation takes too long or lasts beyond the deadline.
pub(super) async fn run(
    connection: &Connection,
    operations: &[Operation<'_>],
    deadline: Instant,
) -> Result<Vec<Answer>, Error> {
    let next = AtomicUsize::new(0);
    let lanes =
        (0..LANES.min(operations.len())).map(|_| lane(connection, operations, &next, deadline));
    let mut answers: Vec<_> = try_join_all(lanes).await?.into_iter().flatten().collect();
    answers.sort_by_key(|(index, _)| *index);
    Ok(answers.into_iter().map(|(_, answer)| answer).collect())
}

async fn lane(
    connection: &Connection,
    operations: &[Operation<'_>],
    next: &AtomicUsize,
    deadline: Instant,
) -> Result<Vec<(usize, Answer)>, Error> {
    let mut channel = connection.channel(deadline).await?;
    let mut answers = Vec::new();
    loop {
        let index = next.fetch_add(1, Ordering::Relaxed);
        let Some(operation) = operations.get(index) else {
            // An error here would be the connection's, and all answers are in.
            let _ = timeout_at(deadline, channel.close(200, "done".into())).await;
            return Ok(answers);
        };
        let mut pause = FIRST_PAUSE;
        for attempt in 1.. {
            let limit = deadline.min(Instant::now() + OPERATION_LIMIT);
            let answer = match timeout_at(limit, operation.run(&channel)).await {
                Ok(Ok(counts)) => Ok(counts),
                Ok(Err(error)) => Err(refusal(&error).ok_or_else(|| {
                    connection.failed(&operation.to_string(), &error.to_string())
                })?),
                Err(_) => {
                    let cause = "the broker did not answer in time";
                    return Err(connection.failed(&operation.to_string(), cause));
                }
            };
            if answer.is_err() {
                channel = connection.channel(deadline).await?;
            }
            if attempt < ATTEMPTS && answer.as_ref().is_err_and(Refusal::is_unreachable) {
                sleep(pause).await;
                pause *= 2;
                continue;
            }
            answers.push((index, answer));
            break;
        }
    }
}

/// The refusal in an error, if it is one of the channel and not of the connection.
fn refusal(error: &lapin::Error) -> Option<Refusal> {
    match error.kind() {
        ErrorKind::ProtocolError(said) if matches!(said.kind(), AMQPErrorKind::Soft(_)) => {
            Some(Refusal {
                code: said.get_id(),
                text: said.get_message().to_string(),
            })
        }
        _ => None,
    }
}
