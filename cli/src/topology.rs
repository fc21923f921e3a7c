//! `tierline topology …`: each subcommand is a call into the library.

use std::time::Duration;

use serde_json::json;
use tierline::amqp::{
    Applied, Connection, Management, Report, apply, apply_with, doctor, doctor_with, spread,
};
use tierline::control::Control;
use tierline::moving::{Mover, TierMove};
use tierline::topology::export::{
    Definitions, Permission, RuleSettings, Rules, dashboard, least_permissions,
};
use tierline::topology::plan::Plan;
use tierline::topology::{QUORUM_PRIORITIES_SINCE, Version};
use tierline::{Database, Error, Topology, backlog};

use crate::arguments::{self, read_duration};
use crate::connect::{NAME, needs_broker, no_broker};
use crate::output::{Failure, Output, Partial, count};
use crate::secret::Secret;

pub(crate) async fn run(command: arguments::Topology) -> Result<Output, Failure> {
    use arguments::Topology as Command;
    let topology = Topology::load(&command.input().file)?;
    match command {
        Command::Check { .. } => Ok(check(&topology)),
        Command::Plan {
            broker_version,
            broker,
            database,
            ..
        } => run_plan(&topology, broker_version, &broker, &database).await,
        Command::Apply {
            nodes,
            management,
            database,
            ..
        } => run_apply(&topology, &nodes, &management, &database).await,
        Command::Doctor {
            broker,
            management,
            database,
            long_transaction,
            ..
        } => {
            let long_transaction = read_duration("--long-transaction", &long_transaction)?;
            let has_database = database.is_given();
            let broker = examine_broker(&topology, &broker, &management, has_database).await?;
            let database = examine_database(&topology, &database, long_transaction).await?;
            let report = broker.and(database);
            Ok(Output {
                text: report.to_string(),
                json: json!(report),
                is_well: report.is_well(),
            })
        }
        Command::Move {
            tier,
            dry_run,
            assume_acknowledged,
            broker,
            management,
            database,
            ..
        } => {
            let mut mover = Mover::new(&topology);
            if assume_acknowledged {
                mover = mover.assume_acknowledged();
            }
            let servers = (&broker, &management, &database);
            run_move(mover, tier.as_deref(), dry_run, servers).await
        }
        Command::Export {
            vhost,
            permissions: true,
            ..
        } => Ok(permissions(&topology, &vhost)),
        Command::Export {
            prometheus,
            grafana,
            selector,
            shorten,
            runbook,
            ..
        } if prometheus || grafana => {
            let mut settings = RuleSettings::new(&topology).shortened_by(shorten);
            settings.selector = selector.unwrap_or(settings.selector);
            settings.runbook = runbook.unwrap_or(settings.runbook);
            if grafana {
                let dashboard = dashboard(&topology, &settings);
                return Ok(Output::well(format!("{dashboard:#}"), dashboard));
            }
            let rules = Rules::new(&topology, &settings);
            Ok(Output::well(rules.to_string(), json!(rules)))
        }
        Command::Export {
            vhost,
            no_users,
            database,
            ..
        } => Ok(export(&topology, &vhost, no_users, database.is_given())?),
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

async fn run_plan(
    topology: &Topology,
    broker_version: Option<Version>,
    broker: &arguments::OptionalBroker,
    database: &arguments::OptionalDatabase,
) -> Result<Output, Failure> {
    let mut texts = Vec::new();
    let mut json = json!({ "app": topology.app() });
    if needs_broker(topology) {
        let version = match (broker_version, &broker.amqp) {
            (Some(version), _) => version,
            (None, Some(url)) => ask(url.expose()).await?,
            // No newer version has a feature that a file can ask for.
            (None, None) => QUORUM_PRIORITIES_SINCE,
        };
        let plan = Plan::new(topology, version, database.is_given())?;
        texts.push(plan.to_string());
        json = json!(plan);
    }
    let opened = database.open()?;
    if needs_database(topology) || opened.is_some() {
        let (text, planned) = match opened {
            Some(database) => {
                let plan = backlog::plan(&database, topology).await?;
                (plan.to_string(), json!(plan))
            }
            None => {
                let tiers = postgres_tiers(topology);
                let count = count(tiers.len(), "tier");
                let names = tiers.join(", ");
                let rules = promotions(topology);
                let text =
                    format!("{count} in Postgres: {names}\n{rules}not checked: {GIVE_DATABASE}\n");
                (
                    text,
                    json!({ "tiers": tiers, "not_checked": GIVE_DATABASE }),
                )
            }
        };
        texts.push(text);
        json["postgres"] = planned;
    }
    Ok(Output::well(texts.join("\n"), json))
}

async fn run_apply(
    topology: &Topology,
    nodes: &arguments::Nodes,
    management: &arguments::Management,
    database: &arguments::OptionalDatabase,
) -> Result<Output, Failure> {
    let management = management.open()?;
    let has_database = database.is_given();
    // A tier on the broker may have rows too, and producers that publish by SQL need the map's tasks.
    let database = database.open()?;
    if database.is_none() && needs_database(topology) {
        return Err(no_database(topology));
    }
    if needs_broker(topology) && nodes.amqp.is_empty() {
        return Err(no_broker(topology));
    }
    let mut output = Output::well(String::new(), json!({}));
    // The database first: a broker with other arguments ends the command.
    let is_database_first = needs_database(topology);
    if is_database_first {
        apply_database(topology, database.as_ref(), &mut output).await?;
    }
    if needs_broker(topology) {
        let applied = apply_broker(topology, nodes, management.as_ref(), has_database).await?;
        output.text = format!("{applied}\n{}", output.text);
        output.is_well = applied.unreachable.is_empty();
        let postgres = output.json["postgres"].take();
        output.json = json!(applied);
        if !postgres.is_null() {
            output.json["postgres"] = postgres;
        }
    }
    if !is_database_first
        && let Err(error) = apply_database(topology, database.as_ref(), &mut output).await
    {
        // What was declared on the broker is to be told all the same.
        let done = output;
        return Err(Failure::Partly(Box::new(Partial { done, error })));
    }
    Ok(output)
}

async fn apply_database(
    topology: &Topology,
    database: Option<&Database>,
    output: &mut Output,
) -> Result<(), Error> {
    let Some(database) = database else {
        return Ok(());
    };
    let applied = backlog::apply(database, topology).await?;
    output.text.push_str(&applied.to_string());
    output.json["postgres"] = json!(applied);
    Ok(())
}

async fn apply_broker(
    topology: &Topology,
    nodes: &arguments::Nodes,
    management: Option<&Management>,
    has_database: bool,
) -> Result<Applied, Error> {
    let urls: Vec<_> = nodes.amqp.iter().map(Secret::expose).collect();
    let connection = open_any(&urls).await?;
    let plan = Plan::new(topology, connection.version(), has_database)?;
    spread(&connection, &urls, NAME, &plan).await;
    let applied = match management {
        Some(management) => apply_with(&connection, &plan, management).await,
        None => apply(&connection, &plan).await,
    };
    connection.close().await;
    applied
}

/// The report is empty if no tier is on the broker.
async fn examine_broker(
    topology: &Topology,
    broker: &arguments::OptionalBroker,
    management: &arguments::Management,
    has_database: bool,
) -> Result<Report, Failure> {
    let management = management.open()?;
    if !needs_broker(topology) {
        return Ok(Report::default());
    }
    let url = broker.amqp.as_ref().ok_or_else(|| no_broker(topology))?;
    let connection = Connection::open(url.expose(), NAME).await?;
    let report = match &management {
        Some(management) => doctor_with(&connection, topology, has_database, management).await,
        None => doctor(&connection, topology, has_database).await,
    };
    connection.close().await;
    Ok(report?)
}

/// Without tiers in Postgres the database may still have tasks of tiers that were there.
async fn examine_database(
    topology: &Topology,
    database: &arguments::OptionalDatabase,
    long_transaction: Duration,
) -> Result<Report, Failure> {
    let needs_database = needs_database(topology);
    let mut report = Report::default();
    match database.open()? {
        Some(database) => match backlog::doctor(&database, topology, long_transaction).await {
            Ok(found) => {
                let control = Control::new(topology.clone(), database);
                report = match control.doctor().await {
                    Ok(overrides) => found.and(overrides),
                    Err(error) => {
                        let mut found = found;
                        found.not_checked.push(format!("overrides: {error}"));
                        found
                    }
                };
            }
            Err(error) if needs_database => return Err(error.into()),
            Err(error) => {
                let not_checked = format!("tasks left in Postgres: {error}");
                report.not_checked.push(not_checked);
            }
        },
        None if needs_database && needs_broker(topology) => {
            let not_checked = format!("the tiers in Postgres: {GIVE_DATABASE}");
            report.not_checked.push(not_checked);
        }
        None if needs_database => return Err(no_database(topology)),
        None => {
            let not_checked = format!("rows of tiers on the broker: {GIVE_DATABASE}");
            report.not_checked.push(not_checked);
        }
    }
    Ok(report)
}

const GIVE_DATABASE: &str = "give their database with --postgres or DATABASE_URL";

fn no_database(topology: &Topology) -> Failure {
    let tiers = postgres_tiers(topology).join(", ");
    Failure::Misused(format!(
        "the file has tiers in Postgres ({tiers}): {GIVE_DATABASE}"
    ))
}

fn needs_database(topology: &Topology) -> bool {
    !postgres_tiers(topology).is_empty()
}

fn postgres_tiers(topology: &Topology) -> Vec<&str> {
    let tiers = topology.tiers_using_postgres();
    tiers.map(|tier| tier.name.as_str()).collect()
}

/// A line for each tier with `promote`.
fn promotions(topology: &Topology) -> String {
    let rules = topology.tiers().iter().filter_map(|tier| {
        let rule = tier.promote.as_ref()?;
        Some(format!("{} promotes {rule}\n", tier.name))
    });
    rules.collect()
}

async fn run_move(
    mut mover: Mover<'_>,
    tier: Option<&str>,
    dry_run: bool,
    (broker, management, database): (
        &arguments::OptionalBroker,
        &arguments::Management,
        &arguments::OptionalDatabase,
    ),
) -> Result<Output, Failure> {
    let management = management.open()?;
    let connection = match &broker.amqp {
        Some(url) => Some(Connection::open(url.expose(), NAME).await?),
        None => None,
    };
    let database = database.open()?;
    if let Some(connection) = &connection {
        mover = mover.broker(connection);
    }
    if let Some(management) = &management {
        mover = mover.management(management);
    }
    if let Some(database) = &database {
        mover = mover.database(database);
    }
    let (moved, failed) = move_all(mover, tier, dry_run).await;
    if let Some(connection) = connection {
        connection.close().await;
    }
    if moved.is_empty() {
        if let Some(error) = failed {
            return Err(error.into());
        }
        let text = "no tier of the file has formerly: nothing moves";
        return Ok(Output::well(text.to_owned(), json!([])));
    }
    let texts: Vec<_> = moved.iter().map(ToString::to_string).collect();
    let done = Output {
        text: texts.join("\n"),
        is_well: !moved.iter().any(TierMove::waits),
        json: json!(moved),
    };
    match failed {
        Some(error) => Err(Failure::Partly(Box::new(Partial { done, error }))),
        None => Ok(done),
    }
}

/// The tiers that were moved, and the error that ended the moves.
async fn move_all(
    mover: Mover<'_>,
    tier: Option<&str>,
    dry_run: bool,
) -> (Vec<TierMove>, Option<Error>) {
    let tiers: Vec<&str> = match tier {
        Some(tier) => vec![tier],
        None => mover.tiers().collect(),
    };
    let mut moved = Vec::new();
    for tier in tiers {
        let result = match dry_run {
            true => mover.dry_run(tier).await,
            false => mover.run(tier).await,
        };
        match result {
            Ok(done) => moved.push(done),
            Err(error) => return (moved, Some(error)),
        }
    }
    (moved, None)
}

fn export(
    topology: &Topology,
    vhost: &str,
    no_users: bool,
    has_database: bool,
) -> Result<Output, Error> {
    let plan = Plan::new(topology, QUORUM_PRIORITIES_SINCE, has_database)?;
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

/// Connects to the first node that answers. There is one.
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
