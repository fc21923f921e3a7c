//! `tierline topology …`: each subcommand is a call into the library.

use serde_json::json;
use tierline::amqp::{Connection, Management, apply, apply_with, doctor, doctor_with, spread};
use tierline::topology::export::{Definitions, Permission, least_permissions};
use tierline::topology::plan::Plan;
use tierline::topology::{QUORUM_PRIORITIES_SINCE, Version};
use tierline::{Error, Topology};

use crate::arguments;
use crate::output::{Output, count};
use crate::secret::Secret;

/// The connection name that the management UI shows.
const NAME: &str = "tierline command";

pub(crate) async fn run(command: arguments::Topology) -> Result<Output, Error> {
    use arguments::Topology as Command;
    let topology = Topology::load(&command.input().file)?;
    match command {
        Command::Check { .. } => Ok(check(&topology)),
        Command::Plan {
            broker_version,
            broker,
            ..
        } => {
            let version = match (broker_version, broker.amqp) {
                (Some(version), _) => version,
                (None, Some(url)) => ask(url.expose()).await?,
                // No newer version has a feature that a file can ask for.
                (None, None) => QUORUM_PRIORITIES_SINCE,
            };
            let plan = Plan::new(&topology, version)?;
            Ok(Output::well(plan.to_string(), json!(plan)))
        }
        Command::Apply {
            nodes, management, ..
        } => run_apply(&topology, &nodes, &management).await,
        Command::Doctor {
            broker, management, ..
        } => run_doctor(&topology, &broker, &management).await,
        Command::Export {
            vhost,
            permissions: true,
            ..
        } => Ok(permissions(&topology, &vhost)),
        Command::Export {
            vhost, no_users, ..
        } => export(&topology, &vhost, no_users),
    }
}

fn check(topology: &Topology) -> Output {
    let (app, tiers) = (topology.app(), topology.tiers().len());
    let (groups, tasks) = (topology.groups().len(), topology.tasks().len());
    let schedules = topology.schedules().len();
    let parts = [(tiers, "tier"), (groups, "group"), (tasks, "task")].into_iter();
    let parts = parts.chain((schedules > 0).then_some((schedules, "schedule")));
    let parts: Vec<String> = parts.map(|(number, thing)| count(number, thing)).collect();
    let text = format!("{app} is valid: {}", parts.join(", "));
    let json = json!({
        "app": app, "tiers": tiers, "groups": groups, "tasks": tasks, "schedules": schedules,
    });
    Output::well(text, json)
}

async fn run_apply(
    topology: &Topology,
    nodes: &arguments::Nodes,
    management: &arguments::Management,
) -> Result<Output, Error> {
    let management = management.open()?;
    let urls: Vec<_> = nodes.amqp.iter().map(Secret::expose).collect();
    let connection = open_any(&urls).await?;
    let plan = Plan::new(topology, connection.version())?;
    spread(&connection, &urls, NAME, &plan).await;
    let applied = match &management {
        Some(management) => apply_with(&connection, &plan, management).await,
        None => apply(&connection, &plan).await,
    };
    connection.close().await;
    applied.map(|applied| Output {
        text: applied.to_string(),
        json: json!(applied),
        is_well: applied.unreachable.is_empty(),
    })
}

async fn run_doctor(
    topology: &Topology,
    broker: &arguments::Broker,
    management: &arguments::Management,
) -> Result<Output, Error> {
    let management = management.open()?;
    let connection = Connection::open(broker.amqp.expose(), NAME).await?;
    let report = match &management {
        Some(management) => doctor_with(&connection, topology, management).await,
        None => doctor(&connection, topology).await,
    };
    connection.close().await;
    report.map(|report| Output {
        text: report.to_string(),
        json: json!(report),
        is_well: report.is_well(),
    })
}

fn export(topology: &Topology, vhost: &str, no_users: bool) -> Result<Output, Error> {
    let plan = Plan::new(topology, QUORUM_PRIORITIES_SINCE)?;
    let mut definitions = Definitions::new(topology, &plan, vhost);
    if no_users {
        definitions.users.clear();
        definitions.permissions.clear();
    }
    let json = json!(definitions);
    Ok(Output::well(format!("{json:#}"), json))
}

fn permissions(topology: &Topology, vhost: &str) -> Output {
    let permissions = least_permissions(topology, vhost);
    let commands: Vec<String> = permissions.iter().map(set_permissions).collect();
    Output::well(commands.join("\n"), json!(permissions))
}

/// The command for a shell.
fn set_permissions(permission: &Permission) -> String {
    let Permission {
        user,
        vhost,
        configure,
        write,
        read,
        ..
    } = permission;
    let words = [vhost, user, configure, write, read];
    let quoted = words.map(|word| format!("'{}'", word.replace('\'', r"'\''")));
    format!("rabbitmqctl set_permissions -p {}", quoted.join(" "))
}

impl arguments::Management {
    fn open(&self) -> Result<Option<Management>, Error> {
        let url = self.management.as_ref();
        url.map(|url| Management::new(url.expose())).transpose()
    }
}

/// Connects to the first node that answers. Clap has made sure that there is one.
async fn open_any(urls: &[&str]) -> Result<Connection, Error> {
    let first = urls.first().copied().unwrap_or_default();
    let mut opened = Connection::open(first, NAME).await;
    for url in urls.iter().skip(1) {
        if opened.is_err() {
            opened = Connection::open(url, NAME).await;
        }
    }
    opened
}

async fn ask(url: &str) -> Result<Version, Error> {
    let connection = Connection::open(url, NAME).await?;
    let version = connection.version();
    connection.close().await;
    Ok(version)
}
