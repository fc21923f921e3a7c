//! Runs many commands at once, over a few channels.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::try_join_all;
use lapin::ErrorKind;
use lapin::protocol::AMQPErrorKind;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::command::{Command, Counts};
use super::connection::Connection;
use crate::Error;

/// The number of channels. Each runs one command at a time, because a refusal closes the channel and
/// must belong to one command. Eight keep a broker busy that starts quorum queues.
const CHANNELS: usize = 8;
const FIRST_PAUSE: Duration = Duration::from_millis(100);

/// How much time commands are given, and what ends them early.
#[derive(Debug, Clone, Copy)]
pub(super) struct Patience {
    /// How long the broker may take for one command.
    pub(super) limit: Duration,
    /// How often a command is tried that the broker refuses because a queue is unreachable.
    pub(super) attempts: u32,
    /// Whether no further command is begun once an object is missing.
    pub(super) until_missing: bool,
}

impl Patience {
    /// For commands whose result matters.
    const FULL: Self = Self {
        limit: Duration::from_secs(30),
        attempts: 6,
        until_missing: false,
    };
}

/// The broker's reply to a command.
pub(super) type CommandResult = Result<Counts, Refusal>;

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

    /// Whether the object does not exist.
    pub(super) fn is_missing(&self) -> bool {
        self.code == Self::NOT_FOUND && !self.is_unreachable()
    }

    /// Whether the queue exists and is unreachable, which may be temporary: the broker reports a queue
    /// that is electing a leader, or whose node is down, as "not found" with one of these texts.
    pub(super) fn is_unreachable(&self) -> bool {
        self.code == Self::NOT_FOUND
            // The text quotes the queue's name, which may contain any of these words.
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

/// Whether messages can be stored in a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QueueState {
    /// It answers, and this many messages are ready in it, and so many consumers take from it.
    Available {
        messages: u32,
        consumers: u32,
    },
    /// It exists and does not answer: its node is down, or it has no leader.
    Unreachable,
    Missing,
    /// The user may not ask. From RabbitMQ 4 on a passive declare needs a permission on the queue.
    NotAllowed,
}

/// Asks the broker for the state of a queue. A queue without an answer at the deadline is unreachable.
///
/// # Errors
/// When the connection fails.
pub(crate) async fn queue_state(
    connection: &Connection,
    queue: &str,
    deadline: Instant,
) -> Result<QueueState, Error> {
    let channel = connection.channel(deadline).await?;
    let command = Command::FindQueue(queue);
    let state = match timeout_at(deadline, command.run(&channel)).await {
        // The broker closes the channel of a command that it refuses.
        Ok(Err(error)) => {
            return match refusal(&error) {
                Some(refusal) if refusal.is_unreachable() => Ok(QueueState::Unreachable),
                Some(refusal) if refusal.is_missing() => Ok(QueueState::Missing),
                Some(refusal) if refusal.code == Refusal::ACCESS_REFUSED => {
                    Ok(QueueState::NotAllowed)
                }
                _ => Err(connection.failed(&command.to_string(), &error)),
            };
        }
        Ok(Ok(counts)) => QueueState::Available {
            messages: counts.messages,
            consumers: counts.consumers,
        },
        Err(_) => QueueState::Unreachable,
    };
    // The answer is here. If the broker does not close the channel, it ends with its connection.
    tokio::spawn(async move {
        let closing = channel.close(200, "done".into());
        let _ = timeout(Patience::FULL.limit, closing).await;
    });
    Ok(state)
}

/// Runs all commands, in no particular order. The results are in the order of the commands.
///
/// # Errors
/// When the connection fails, or a command takes too long or lasts beyond the deadline.
pub(super) async fn run(
    connection: &Connection,
    commands: &[Command<'_>],
    deadline: Instant,
) -> Result<Vec<CommandResult>, Error> {
    run_with(connection, commands, deadline, Patience::FULL).await
}

/// The same with less patience. If an object is missing and that ends the run, the results are those of the commands
/// that were begun.
pub(super) async fn run_with(
    connection: &Connection,
    commands: &[Command<'_>],
    deadline: Instant,
    patience: Patience,
) -> Result<Vec<CommandResult>, Error> {
    let next = AtomicUsize::new(0);
    let channels = (0..CHANNELS.min(commands.len()))
        .map(|_| run_on_channel(connection, commands, &next, deadline, patience));
    let mut results: Vec<_> = try_join_all(channels)
        .await?
        .into_iter()
        .flatten()
        .collect();
    results.sort_by_key(|(index, _)| *index);
    Ok(results.into_iter().map(|(_, result)| result).collect())
}

async fn run_on_channel(
    connection: &Connection,
    commands: &[Command<'_>],
    next: &AtomicUsize,
    deadline: Instant,
    patience: Patience,
) -> Result<Vec<(usize, CommandResult)>, Error> {
    let mut channel = connection.channel(deadline).await?;
    let mut results = Vec::new();
    loop {
        let index = next.fetch_add(1, Ordering::Relaxed);
        let Some(command) = commands.get(index) else {
            // All results are in, so an error of the connection does not matter.
            let _ = timeout_at(deadline, channel.close(200, "done".into())).await;
            return Ok(results);
        };
        let mut pause = FIRST_PAUSE;
        for attempt in 1.. {
            let limit = deadline.min(Instant::now() + patience.limit);
            let result = match timeout_at(limit, command.run(&channel)).await {
                Ok(Ok(counts)) => Ok(counts),
                Ok(Err(error)) => Err(refusal(&error)
                    .ok_or_else(|| connection.failed(&command.to_string(), &error))?),
                Err(_) => {
                    let cause = "the broker did not answer in time";
                    return Err(connection.failed(&command.to_string(), cause));
                }
            };
            if result.is_err() {
                channel = connection.channel(deadline).await?;
            }
            if attempt < patience.attempts && result.as_ref().is_err_and(Refusal::is_unreachable) {
                sleep(pause).await;
                pause *= 2;
                continue;
            }
            if patience.until_missing && result.as_ref().is_err_and(Refusal::is_missing) {
                next.store(commands.len(), Ordering::Relaxed);
            }
            results.push((index, result));
            break;
        }
    }
}

/// The refusal in an error that closes the channel; `None` for an error of the connection.
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
