//! `tierline control …`: each subcommand is a call into the library.

pub(crate) mod arguments;
mod show;

use std::time::Duration;

use clap::ValueEnum;
use serde_json::json;
use tierline::control::{Change, Changed, Control};
use tierline::{Error, Topology};

use crate::arguments::{Author, Log, MapBroker, read_duration};
use crate::audit::audit;
use crate::connect::{builder, needs_broker};
use crate::output::{Failure, Output};
use arguments::{Control as Command, Length, Limitable, One, Overridable, Pausable};

pub(crate) async fn run(command: Command) -> Result<Output, Failure> {
    let topology = Topology::load(&command.input().file)?;
    match command {
        Command::Pause { one, length } => {
            let change = one.pause(&one.control(topology)?);
            let change = match length.read()? {
                Some(length) => change.lasting(length),
                None => change,
            };
            made(change.because(&one.author.because)).await
        }
        Command::Resume { one } => {
            let change = one.resume(&one.control(topology)?);
            made(change.because(&one.author.because)).await
        }
        Command::Limit {
            one,
            rate,
            burst,
            running,
            none,
            length,
        } => {
            let control = one.control(topology)?;
            let mut change = match one.what {
                Limitable::Tier => control.limit_tier(&one.name),
                Limitable::Task => control.limit_task(&one.name),
            };
            if let Some(rate) = rate {
                change = change.rate(&rate);
            }
            if let Some(burst) = burst {
                change = change.burst(burst);
            }
            if let Some(running) = running {
                change = change.running(running);
            }
            if none {
                change = change.none();
            }
            if let Some(length) = length.read()? {
                change = change.lasting(length);
            }
            made(change.because(&one.author.because)).await
        }
        Command::Unlimit { one } => {
            let control = one.control(topology)?;
            let change = match one.what {
                Limitable::Tier => control.unlimit_tier(&one.name),
                Limitable::Task => control.unlimit_task(&one.name),
            };
            made(change.because(&one.author.because)).await
        }
        Command::Override {
            log,
            broker,
            author,
            what,
            names,
            tier,
            priority,
            length,
        } => {
            let control = with_broker(topology, &log, &broker, &author)?;
            let mut overriding = match (what, names.as_slice()) {
                (Overridable::Task, names) => control.override_tasks(names),
                (Overridable::Prefix, [prefix]) => control.override_prefix(prefix),
                (Overridable::Prefix, _) => {
                    return Err(Failure::Misused("name one prefix at a time".to_owned()));
                }
            };
            if let Some(tier) = tier {
                overriding = overriding.tier(&tier);
            }
            if let Some(priority) = priority {
                overriding = overriding.priority(priority);
            }
            if let Some(length) = length.read()? {
                overriding = overriding.lasting(length);
            }
            let overridden = overriding.because(&author.because).await?;
            Ok(Output::well(
                show::overridden(&overridden),
                json!(overridden),
            ))
        }
        Command::EndOverride { one } => {
            let control = one.control(topology)?;
            let change = match one.what {
                Overridable::Task => control.end_override_task(&one.name),
                Overridable::Prefix => control.end_override_prefix(&one.name),
            };
            made(change.because(&one.author.because)).await
        }
        Command::List { log } => {
            let entries = control(topology, &log)?.list().await?;
            let json = json!({ "controls": entries });
            Ok(Output::well(show::list(&entries), json))
        }
        Command::Processes { log } => {
            let processes = control(topology, &log)?.processes().await?;
            let json = json!({ "processes": processes });
            Ok(Output::well(show::processes(&processes), json))
        }
        Command::Audit { log, limit, before } => {
            let entries = control(topology, &log)?.audit_log(before, limit).await?;
            Ok(audit(&entries))
        }
        Command::Scaling { log, broker } => {
            // A broker that is away makes the figures estimates.
            let app = builder(topology, &broker, &log.database)?.connect_lazy()?;
            let groups = app.scaling().await?;
            let json = json!({ "groups": groups });
            Ok(Output::well(show::scaling(&groups), json))
        }
    }
}

async fn made(change: impl IntoFuture<Output = Result<Changed, Error>>) -> Result<Output, Failure> {
    let changed = change.await?;
    Ok(Output::well(show::changed(&changed), json!(changed)))
}

fn control(topology: Topology, log: &Log) -> Result<Control, Error> {
    Ok(Control::new(topology, log.database.open()?))
}

/// With the broker, if an address of it is given, to say how much waits in the queues that tasks leave. An override needs it
/// for nothing else, so it may be away.
fn with_broker(
    topology: Topology,
    log: &Log,
    broker: &MapBroker,
    author: &Author,
) -> Result<Control, Failure> {
    let control = match broker.amqp.is_some() && needs_broker(&topology) {
        true => builder(topology, broker, &log.database)?
            .connect_lazy()?
            .control()?,
        false => control(topology, log)?,
    };
    Ok(control.by(&author.by))
}

impl<What: ValueEnum + Clone + Send + Sync + 'static> One<What> {
    fn control(&self, topology: Topology) -> Result<Control, Error> {
        Ok(control(topology, &self.log)?.by(&self.author.by))
    }
}

impl One<Pausable> {
    fn pause(&self, control: &Control) -> Change {
        match self.what {
            Pausable::Tier => control.pause_tier(&self.name),
            Pausable::Group => control.pause_group(&self.name),
            Pausable::Task => control.pause_task(&self.name),
        }
    }

    fn resume(&self, control: &Control) -> Change {
        match self.what {
            Pausable::Tier => control.resume_tier(&self.name),
            Pausable::Group => control.resume_group(&self.name),
            Pausable::Task => control.resume_task(&self.name),
        }
    }
}

impl Length {
    fn read(&self) -> Result<Option<Duration>, Error> {
        let length = self.length.as_deref();
        length.map(|text| read_duration("--for", text)).transpose()
    }
}
