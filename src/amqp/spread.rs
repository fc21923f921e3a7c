//! Declares new queues over several nodes of a cluster, so that no node leads all of them.
//!
//! A queue is led by the node that it was declared through, unless the broker is configured otherwise. A queue's leader
//! cannot be a part of its arguments: every queue that exists without it would differ.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::{Instant, timeout};

use super::address::Address;
use super::command::Command;
use super::connection::Connection;
use super::run_commands::{self, Patience, Refusal};
use crate::topology::plan::Plan;

/// How long one more connection may take: a node that is frozen must not hold up a start.
const OPEN_LIMIT: Duration = Duration::from_secs(3);
/// How long the declarations may take in all. A cluster that is busy needs seconds for a hundred quorum queues.
const LIMIT: Duration = Duration::from_secs(60);
/// How long it waits for the connections to close.
const CLOSE_LIMIT: Duration = Duration::from_secs(1);

/// Nothing depends on these commands, so none is tried twice.
const IMPATIENT: Patience = Patience {
    limit: Duration::from_secs(5),
    attempts: 1,
    until_missing: false,
};
/// The first queue that is missing is answer enough. The broker logs an error for each.
const UNTIL_MISSING: Patience = Patience {
    until_missing: true,
    ..IMPATIENT
};

/// Declares the queues of `plan` over one connection to each of `urls` in turn, if one of them is missing. Call it
/// before [`apply`](super::apply), which declares all that this did not, and reports what is wrong.
///
/// `urls` are the nodes of one cluster. The queues of a tier, with its dead letters and delays, are declared over the same
/// connection, and those of the next tier over the next one. So if a node hangs, the tiers on the other nodes continue.
/// Queues that exist stay where they are. With one address, nothing happens. An address that does not answer within three
/// seconds is left out, and so is one of another virtual host.
///
/// ```no_run
/// # async fn example() -> Result<(), tierline::Error> {
/// use tierline::amqp::{Connection, apply, spread};
/// use tierline::topology::plan::Plan;
///
/// let topology = tierline::Topology::load("topology/hotel.toml")?;
/// let nodes = ["amqp://node-1", "amqp://node-2", "amqp://node-3"];
/// let connection = Connection::open(nodes[0], "set-up").await?;
/// let plan = Plan::new(&topology, connection.version(), false)?;
/// spread(&connection, &nodes, "set-up", &plan).await;
/// println!("{}", apply(&connection, &plan).await?);
/// # Ok(()) }
/// ```
pub async fn spread(connection: &Connection, urls: &[&str], name: &str, plan: &Plan) {
    if urls.len() < 2 || !is_queue_missing(connection, plan).await {
        return;
    }
    let nodes = urls.iter().map(|url| open(connection, url, name));
    let nodes = join_all(nodes).await;
    let answered: Vec<usize> = (0..nodes.len()).filter(|it| nodes[*it].is_some()).collect();
    // By its place among all addresses, where clients look for it first. The shares of nodes that do not answer are
    // spread over the others.
    let index_of = |share: usize| match share % nodes.len() {
        index if nodes[index].is_some() => index,
        _ => answered[share % answered.len()],
    };
    if answered.len() > 1 {
        let shares = nodes.iter().enumerate().filter_map(|(index, node)| {
            let node = node.as_ref()?;
            let queues = plan.queues.iter();
            let queues = queues.filter(|it| index_of(it.share) == index);
            Some((node, queues.collect::<Vec<_>>()))
        });
        let shares = shares.map(|(node, queues)| {
            let queues = queues.into_iter();
            declare(
                node.connection(),
                queues.map(Command::DeclareQueue).collect(),
            )
        });
        join_all(shares).await;
    }
    let others = nodes.into_iter().flatten().filter_map(|node| match node {
        Node::Main(_) => None,
        Node::Other(connection) => Some(connection.close()),
    });
    // A node that hangs does not answer. The connection then closes by itself.
    let _ = timeout(CLOSE_LIMIT, join_all(others)).await;
}

/// A connection to one of the addresses.
enum Node<'a> {
    /// The one that the caller has.
    Main(&'a Connection),
    Other(Box<Connection>),
}

impl Node<'_> {
    fn connection(&self) -> &Connection {
        match self {
            Node::Main(connection) => connection,
            Node::Other(connection) => connection,
        }
    }
}

/// Whether the broker says so; `false` if it does not answer, which is the next caller's to report.
async fn is_queue_missing(connection: &Connection, plan: &Plan) -> bool {
    let queues = plan.queues.iter();
    let queues: Vec<_> = queues.map(|it| Command::FindQueue(&it.name)).collect();
    let deadline = Instant::now() + LIMIT;
    match run_commands::run_with(connection, &queues, deadline, UNTIL_MISSING).await {
        Ok(results) => results
            .iter()
            .any(|it| it.as_ref().is_err_and(Refusal::is_missing)),
        Err(_) => false,
    }
}

async fn open<'a>(main: &'a Connection, url: &str, name: &str) -> Option<Node<'a>> {
    let address: Address = url.parse().ok()?;
    if address == *main.address() {
        return Some(Node::Main(main));
    }
    if address.virtual_host() != main.address().virtual_host() {
        return None;
    }
    let cause = match timeout(OPEN_LIMIT, Connection::open(url, name)).await {
        Ok(Ok(connection)) => return Some(Node::Other(Box::new(connection))),
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("no answer within {} s", OPEN_LIMIT.as_secs()),
    };
    tracing::warn!(%address, cause, "cannot connect, so the node will lead none of the new queues");
    None
}

/// Declares what it can. What is refused or not answered is declared again over the main connection, and reported there.
async fn declare(connection: &Connection, queues: Vec<Command<'_>>) {
    let deadline = Instant::now() + LIMIT;
    let declared = run_commands::run_with(connection, &queues, deadline, IMPATIENT);
    if let Err(error) = declared.await {
        tracing::warn!(%error, "the node may lead fewer queues than the others");
    }
}
