//! Looks at queues that a tier had before it moved, and deletes them.

use std::time::Duration;

use tokio::time::Instant;
#[cfg(feature = "management")]
use tokio::time::sleep;

use super::apply::error as refusal_error;
use super::command::Command;
use super::connection::Connection;
#[cfg(feature = "management")]
use super::management::Management;
use super::run_commands::{self, Refusal};
use crate::Error;
use crate::topology::QueueType;
use crate::topology::plan::Binding;

/// How long all commands of one call may take.
const LIMIT: Duration = Duration::from_secs(60);
/// How long the management API may take to count a new queue; by default it counts every five seconds.
#[cfg(feature = "management")]
const COUNT_LIMIT: Duration = Duration::from_secs(30);
#[cfg(feature = "management")]
const COUNT_AGAIN: Duration = Duration::from_millis(200);

/// What the broker says of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Looked {
    Missing,
    /// It is there, and does not answer: its node is down, or it has no leader.
    Unreachable,
    Found {
        /// How many messages are ready in it.
        messages: u32,
        consumers: u32,
    },
}

/// Whether the broker deleted a queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Deleted {
    Yes,
    /// It is in use, or not empty. Says which, in the words of the broker.
    Refused(String),
}

/// Looks at queues, in their order.
///
/// # Errors
/// When the connection fails, or the broker refuses to say.
pub(crate) async fn look(connection: &Connection, queues: &[String]) -> Result<Vec<Looked>, Error> {
    let commands: Vec<_> = queues.iter().map(|it| Command::FindQueue(it)).collect();
    let results = run_commands::run(connection, &commands, Instant::now() + LIMIT).await?;
    let looked = commands.iter().zip(results).map(|(command, result)| {
        Ok(match result {
            Ok(counts) => Looked::Found {
                messages: counts.messages,
                consumers: counts.consumers,
            },
            Err(refusal) if refusal.is_unreachable() => Looked::Unreachable,
            Err(refusal) if refusal.is_missing() => Looked::Missing,
            Err(refusal) => return Err(refusal_error(connection, command, &refusal)),
        })
    });
    looked.collect()
}

/// Removes the bindings, if they are there.
///
/// # Errors
/// When the connection fails, or the broker refuses.
pub(crate) async fn unbind(connection: &Connection, bindings: &[Binding]) -> Result<(), Error> {
    let commands: Vec<_> = bindings.iter().map(Command::Unbind).collect();
    run_all(connection, &commands).await
}

/// Makes the bindings, where their exchanges and queues are there.
///
/// # Errors
/// When the connection fails, or the broker refuses.
pub(crate) async fn bind(connection: &Connection, bindings: &[Binding]) -> Result<(), Error> {
    let commands: Vec<_> = bindings.iter().map(Command::Bind).collect();
    run_all(connection, &commands).await
}

/// Deletes exchanges, if they are there, one after the other: RabbitMQ 3.10.8 ends the connection with an
/// `INTERNAL_ERROR` if two exchanges that are bound to each other are deleted at once.
///
/// # Errors
/// When the connection fails, or the broker refuses.
pub(crate) async fn delete_exchanges(
    connection: &Connection,
    exchanges: &[String],
) -> Result<(), Error> {
    for exchange in exchanges {
        run_all(connection, &[Command::DeleteExchange(exchange)]).await?;
    }
    Ok(())
}

/// Deletes a queue. A classic queue refuses while it has messages or consumers. A quorum queue is deleted with all that
/// it has: it does not support these conditions (RabbitMQ 3.10.8).
///
/// # Errors
/// When the connection fails, or the broker refuses for another reason.
pub(crate) async fn delete_queue(
    connection: &Connection,
    queue: &str,
    queue_type: QueueType,
) -> Result<Deleted, Error> {
    let command = Command::DeleteQueue {
        name: queue,
        only_if_unused: queue_type == QueueType::Classic,
    };
    let results = run_commands::run(connection, &[command], Instant::now() + LIMIT).await?;
    match results.into_iter().next() {
        Some(Err(refusal)) if refusal.is_missing() => Ok(Deleted::Yes),
        Some(Err(refusal)) if refusal.code == Refusal::PRECONDITION_FAILED => {
            Ok(Deleted::Refused(refusal.text))
        }
        Some(Err(refusal)) => Err(refusal_error(connection, &command, &refusal)),
        Some(Ok(_)) | None => Ok(Deleted::Yes),
    }
}

/// How many messages of a queue consumers hold unacknowledged, as of some seconds ago. `None`: the broker has not counted
/// them for [`COUNT_LIMIT`].
#[cfg(feature = "management")]
pub(crate) async fn unacknowledged(
    connection: &Connection,
    management: &Management,
    queue: &str,
) -> Result<Option<u64>, Error> {
    let virtual_host = connection.address().virtual_host();
    let columns = "name,messages_unacknowledged";
    let deadline = Instant::now() + COUNT_LIMIT;
    loop {
        let queues = management.list("queues", virtual_host, columns).await?;
        let Some(found) = queues.iter().find(|it| it["name"] == queue) else {
            return Ok(Some(0));
        };
        let held = found["messages_unacknowledged"].as_u64();
        if held.is_some() || Instant::now() >= deadline {
            return Ok(held);
        }
        sleep(COUNT_AGAIN).await;
    }
}

/// Runs commands. Something that is missing already is no error.
async fn run_all(connection: &Connection, commands: &[Command<'_>]) -> Result<(), Error> {
    let results = run_commands::run(connection, commands, Instant::now() + LIMIT).await?;
    for (command, result) in commands.iter().zip(results) {
        match result {
            Ok(_) => {}
            Err(refusal) if refusal.is_missing() => {}
            Err(refusal) => return Err(refusal_error(connection, command, &refusal)),
        }
    }
    Ok(())
}
