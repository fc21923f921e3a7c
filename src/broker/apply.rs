//! Makes a broker match a plan, by declaring what is missing.

use std::fmt;
use std::time::Duration;

use serde::Serialize;
use tokio::time::Instant;

use super::connection::Connection;
use super::difference::{Difference, Mismatch, ObjectKind};
#[cfg(feature = "management")]
use super::doctor::{checks, snapshot::Snapshot};
use super::lanes::{self, Answer, Refusal};
#[cfg(feature = "management")]
use super::management::Management;
use super::operation::Operation;
use crate::Error;
use crate::topology::plan::Plan;

/// How long it may take in all. The 433 declarations of the hotel take a second.
const LIMIT: Duration = Duration::from_secs(120);

/// What is on the broker as the plan says, whether it was declared now or before.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Applied {
    /// How many exchanges.
    pub exchanges: usize,
    /// How many queues.
    pub queues: usize,
    /// How many bindings.
    pub bindings: usize,
    /// How many bindings of earlier generations are not there any more.
    pub retired: usize,
}

impl fmt::Display for Applied {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Applied {
            exchanges,
            queues,
            bindings,
            retired,
        } = self;
        write!(
            out,
            "{exchanges} exchanges, {queues} queues and {bindings} bindings are there"
        )?;
        match retired {
            0 => Ok(()),
            retired => write!(out, ", {retired} of earlier generations are unbound"),
        }
    }
}

/// Declares everything in `plan`, and unbinds the earlier generations of its tiers.
///
/// What is there already stays as it is, so it may run at every start of every process, ten at
/// once too. Nothing is ever deleted. It ends within two minutes.
///
/// ```no_run
/// # async fn example() -> Result<(), tierline::Error> {
/// use tierline::broker::{Connection, apply};
/// use tierline::topology::plan::Plan;
///
/// let topology = tierline::Topology::load("topology/hotel.toml")?;
/// let connection = Connection::open("amqp://localhost", "set-up").await?;
/// let plan = Plan::new(&topology, connection.capabilities())?;
/// println!("{}", apply(&connection, &plan).await?);
/// # Ok(()) }
/// ```
///
/// # Errors
/// [`Error::Mismatch`] if something exists with other arguments: then all the rest has been
/// declared, and the error says what differs and what to do. [`Error::AccessRefused`] if the user
/// lacks a permission, [`Error::OperationRefused`] if the broker refuses for another reason, and
/// [`Error::BrokerFailed`] if the connection is lost or the broker does not answer.
pub async fn apply(connection: &Connection, plan: &Plan) -> Result<Applied, Error> {
    let deadline = Instant::now() + LIMIT;
    let exchanges: Vec<_> = plan
        .exchanges
        .iter()
        .map(Operation::DeclareExchange)
        .collect();
    let queues: Vec<_> = plan.queues.iter().map(Operation::DeclareQueue).collect();
    let bindings: Vec<_> = plan.bindings.iter().map(Operation::Bind).collect();
    let retired: Vec<_> = plan.retired.iter().map(Operation::Unbind).collect();

    let mut differences = Vec::new();
    let mut declare = async |operations: &[Operation<'_>]| {
        let answers = lanes::run(connection, operations, deadline).await?;
        count(connection, plan, operations, answers, &mut differences)
    };
    let applied = Applied {
        exchanges: declare(&exchanges).await?,
        queues: declare(&queues).await?,
        bindings: declare(&bindings).await?,
        // Last: for a moment both generations get what is published, but never none.
        retired: declare(&retired).await?,
    };
    if differences.is_empty() {
        return Ok(applied);
    }
    Err(Error::Mismatch(Box::new(Mismatch {
        differences,
        applied,
    })))
}

/// Like [`apply`], but an [`Error::Mismatch`] has every argument that differs: the broker itself
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
    if let Err(Error::Mismatch(mismatch)) = &mut applied
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

/// How many of the operations succeeded; adds what differs to `differences`.
fn count(
    connection: &Connection,
    plan: &Plan,
    operations: &[Operation<'_>],
    answers: Vec<Answer>,
    differences: &mut Vec<Difference>,
) -> Result<usize, Error> {
    let mut succeeded = 0;
    for (operation, answer) in operations.iter().zip(answers) {
        let Err(refusal) = answer else {
            succeeded += 1;
            continue;
        };
        let (kind, name) = match operation {
            Operation::DeclareExchange(exchange) => (ObjectKind::Exchange, &exchange.name),
            Operation::DeclareQueue(queue) => (ObjectKind::Queue, &queue.name),
            _ => return Err(refused(connection, operation, &refusal)),
        };
        match Difference::refused(plan, kind, name, &refusal.text) {
            Some(difference) if refusal.code == Refusal::PRECONDITION_FAILED => {
                differences.push(difference);
            }
            _ => return Err(refused(connection, operation, &refusal)),
        }
    }
    Ok(succeeded)
}

fn refused(connection: &Connection, operation: &Operation<'_>, refusal: &Refusal) -> Error {
    let address = connection.address();
    if refusal.code == Refusal::ACCESS_REFUSED {
        let user = address.user();
        return Error::AccessRefused {
            tried: format!("{operation} on {address} as user {user:?}").into(),
            needed: operation.permissions().into(),
        };
    }
    Error::OperationRefused {
        tried: format!("{operation} on {address}").into(),
        cause: refusal.text.as_str().into(),
    }
}
