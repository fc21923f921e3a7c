//! `tierline topology …`: each subcommand is a call into the library.

use serde_json::json;
use tierline::broker::{Connection, apply};
use tierline::topology::capabilities::{Capabilities, QUORUM_PRIORITIES_SINCE};
use tierline::topology::plan::Plan;
use tierline::{Error, Topology};

use crate::arguments;
use crate::output::Output;

/// How the broker's management lists the command's connections.
const NAME: &str = "tierline command";

pub(crate) async fn run(command: arguments::Topology) -> Result<Output, Error> {
    use arguments::Topology::{Apply, Check, Plan};
    let (Check { input } | Plan { input, .. } | Apply { input, .. }) = &command;
    let topology = Topology::load(&input.file)?;
    match command {
        Check { .. } => Ok(check(&topology)),
        Plan {
            broker_version,
            broker,
            ..
        } => {
            let capabilities = match (broker_version, broker.amqp) {
                (Some(version), _) => Capabilities::of(version)?,
                (None, Some(url)) => ask(&url).await?,
                (None, None) => newest()?,
            };
            plan(&topology, &capabilities)
        }
        Apply { broker, .. } => {
            let connection = Connection::open(&broker.amqp, NAME).await?;
            let plan = tierline::topology::plan::Plan::new(&topology, connection.capabilities())?;
            let applied = apply(&connection, &plan).await;
            connection.close().await;
            let applied = applied?;
            Ok(Output {
                text: applied.to_string(),
                json: json!(applied),
                is_well: true,
            })
        }
    }
}

fn check(topology: &Topology) -> Output {
    let (tiers, groups, tasks) = (
        topology.tiers().len(),
        topology.groups().len(),
        topology.tasks().len(),
    );
    let app = topology.app();
    Output {
        text: format!("{app} is well: {tiers} tiers, {groups} groups, {tasks} tasks"),
        json: json!({ "app": app, "tiers": tiers, "groups": groups, "tasks": tasks }),
        is_well: true,
    }
}

fn plan(topology: &Topology, capabilities: &Capabilities) -> Result<Output, Error> {
    let plan = Plan::new(topology, capabilities)?;
    Ok(Output {
        text: plan.to_string(),
        json: json!(plan),
        is_well: true,
    })
}

async fn ask(url: &str) -> Result<Capabilities, Error> {
    let connection = Connection::open(url, NAME).await?;
    let capabilities = connection.capabilities().clone();
    connection.close().await;
    Ok(capabilities)
}

/// No version since has had anything that a file can ask for.
fn newest() -> Result<Capabilities, Error> {
    Capabilities::of(QUORUM_PRIORITIES_SINCE)
}
