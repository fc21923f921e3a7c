//! Makes a broker match a plan, by declaring what is missing.

use std::fmt;
use std::time::Duration;

use serde::Serialize;
use tokio::time::Instant;

use super::command::Command;
use super::connection::Connection;
use super::difference::{Difference, Mismatch, ObjectKind};
#[cfg(feature = "management")]
use super::doctor::{checks, snapshot::Snapshot};
#[cfg(feature = "management")]
use super::management::Management;
use super::run_commands::{self, CommandResult, Refusal};
use crate::Error;
use crate::error::BrokerError;
use crate::topology::plan::{Binding, DestinationType, Plan, Queue};

/// How long it may take in all. The 433 declarations of the hotel take a second.
const LIMIT: Duration = Duration::from_secs(120);

/// What is on the broker as the plan says, whether it was declared now or before.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Applied {
    /// How many exchanges.
    pub exchanges: usize,
    /// How many queues.
    pub queues: usize,
    /// How many bindings.
    pub bindings: usize,
    /// Queues that are there and cannot be reached, because their node is down or they have no leader.
    /// Neither their arguments nor their bindings were seen.
    pub unreachable: Vec<String>,
}

impl fmt::Display for Applied {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Applied {
            exchanges,
            queues,
            bindings,
            unreachable,
        } = self;
        write!(
            out,
            "{exchanges} exchanges, {queues} queues and {bindings} bindings are there"
        )?;
        if !unreachable.is_empty() {
            let names = unreachable.join(", ");
            write!(
                out,
                "; not reached, because their node is down or they have no leader: {names}"
            )?;
        }
        Ok(())
    }
}

/// Declares everything in `plan`.
///
/// What is there already stays as it is, so it may run at every start of every process, ten at
/// once too. Nothing is ever deleted. It ends within two minutes. A queue whose node is down is no
/// error, since all other tiers can go on without it: see [`Applied::unreachable`].
///
/// ```no_run
/// # async fn example() -> Result<(), tierline::Error> {
/// use tierline::amqp::{Connection, apply};
/// use tierline::topology::plan::Plan;
///
/// let topology = tierline::Topology::load("topology/hotel.toml")?;
/// let connection = Connection::open("amqp://localhost", "set-up").await?;
/// let plan = Plan::new(&topology, connection.version(), false)?;
/// println!("{}", apply(&connection, &plan).await?);
/// # Ok(()) }
/// ```
///
/// # Errors
/// [`BrokerError::Mismatch`] if something exists with other arguments: then all the rest has been
/// declared, and the error says what differs and what to do. [`BrokerError::AccessRefused`] if the user
/// lacks a permission, [`BrokerError::Refused`] if the broker refuses for another reason, and
/// [`BrokerError::Failed`] if the connection is lost or the broker does not answer.
pub async fn apply(connection: &Connection, plan: &Plan) -> Result<Applied, Error> {
    let deadline = Instant::now() + LIMIT;
    let exchanges: Vec<_> = plan
        .exchanges
        .iter()
        .map(Command::DeclareExchange)
        .collect();
    let queues: Vec<_> = plan.queues.iter().map(Command::DeclareQueue).collect();

    let mut refused = Refused::default();
    let declare = async |commands: &[Command<'_>], refused: &mut Refused| {
        let results = run_commands::run(connection, commands, deadline).await?;
        count(connection, plan, commands, results, refused)
    };
    let exchanges = declare(&exchanges, &mut refused).await?;
    let queues = declare(&queues, &mut refused).await?;
    // A queue that cannot be reached cannot be bound either, and keeps the bindings that it has.
    let can_be_bound = |binding: &&Binding| {
        binding.destination_type == DestinationType::Exchange
            || !refused.unreachable.contains(&binding.destination)
    };
    let bindings = plan.bindings.iter().filter(can_be_bound);
    let bindings: Vec<_> = bindings.map(Command::Bind).collect();
    let applied = Applied {
        exchanges,
        queues,
        bindings: declare(&bindings, &mut refused).await?,
        unreachable: refused.unreachable,
    };
    if refused.differences.is_empty() {
        return Ok(applied);
    }
    Err(Error::Broker(BrokerError::Mismatch(Box::new(Mismatch {
        differences: refused.differences,
        applied,
    }))))
}

/// Like [`apply`], but an [`BrokerError::Mismatch`] has every argument that differs: the broker itself
/// names one for each object, the management API knows them all.
///
/// # Errors
/// As [`apply`]; if the management API fails, the mismatch is what the broker says.
#[cfg(feature = "management")]
pub async fn apply_with(
    connection: &Connection,
    plan: &Plan,
    management: &Management,
) -> Result<Applied, Error> {
    let mut applied = apply(connection, plan).await;
    if let Err(Error::Broker(BrokerError::Mismatch(mismatch))) = &mut applied
        && let Ok(snapshot) = Snapshot::complete(connection, management).await
    {
        for seen in checks::differences(plan, &snapshot) {
            let said = mismatch.differences.iter_mut();
            let mut said = said.filter(|said| said.kind == seen.kind && said.name == seen.name);
            if let Some(said) = said.next() {
                *said = seen;
            }
        }
    }
    applied
}

/// What the broker refused to declare, and all the rest can do without.
#[derive(Default)]
struct Refused {
    differences: Vec<Difference>,
    unreachable: Vec<String>,
}

/// How many of the commands succeeded; adds what did not to `refused`.
fn count(
    connection: &Connection,
    plan: &Plan,
    commands: &[Command<'_>],
    results: Vec<CommandResult>,
    refused: &mut Refused,
) -> Result<usize, Error> {
    let mut succeeded = 0;
    for (command, answer) in commands.iter().zip(results) {
        let Err(refusal) = answer else {
            succeeded += 1;
            continue;
        };
        let (kind, name) = match command {
            Command::DeclareExchange(exchange) => (ObjectKind::Exchange, &exchange.name),
            Command::DeclareQueue(Queue { name, .. })
            | Command::Bind(Binding {
                destination: name, ..
            })
            | Command::Unbind(Binding {
                destination: name, ..
            }) if refusal.is_unreachable() => {
                if !refused.unreachable.contains(name) {
                    refused.unreachable.push(name.clone());
                }
                continue;
            }
            Command::DeclareQueue(queue) => (ObjectKind::Queue, &queue.name),
            _ => return Err(error(connection, command, &refusal)),
        };
        match Difference::refused(plan, kind, name, &refusal.text) {
            Some(difference) if refusal.code == Refusal::PRECONDITION_FAILED => {
                refused.differences.push(difference);
            }
            _ => return Err(error(connection, command, &refusal)),
        }
    }
    Ok(succeeded)
}

pub(super) fn error(connection: &Connection, command: &Command<'_>, refusal: &Refusal) -> Error {
    let address = connection.address();
    if refusal.code == Refusal::ACCESS_REFUSED {
        let user = address.user();
        return Error::Broker(BrokerError::AccessRefused {
            tried: format!("{command} on {address} as user {user:?}").into(),
            needed: command.permissions().into(),
        });
    }
    Error::Broker(BrokerError::Refused {
        tried: format!("{command} on {address}").into(),
        cause: refusal.text.as_str().into(),
    })
}
