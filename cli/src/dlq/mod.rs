//! `tierline dlq …`: each subcommand is a call into the library.

pub(crate) mod arguments;
pub(crate) mod confirm;
mod show;

use serde_json::json;
use tierline::dead::{Canary, DeadLetters, Filter, Operation, OperationState, Page};
use tierline::{Error, Topology};

use crate::arguments::{Database, read_duration};
use crate::connect::builder;
use crate::output::{Failure, Output};
use arguments::Dlq;
use confirm::{Bar, confirm};

pub(crate) async fn migrate(database: &Database) -> Result<Output, Failure> {
    let database = database.open()?;
    let migrated = database.migrate().await;
    database.close().await;
    let migrated = migrated?;
    let json = json!({ "applied": migrated.applied });
    Ok(Output::well(migrated.to_string(), json))
}

pub(crate) async fn run(command: Dlq) -> Result<Output, Failure> {
    let topology = Topology::load(&command.log().input.file)?;
    let database = command.log().database.clone();
    match command {
        Dlq::Redrive { .. } => redrive(command, topology).await,
        Dlq::Discard { .. } | Dlq::Purge { .. } => remove(command, topology, &database).await,
        command => read(command, topology, &database).await,
    }
}

/// The subcommands that only read.
async fn read(command: Dlq, topology: Topology, database: &Database) -> Result<Output, Failure> {
    let letters = DeadLetters::without_broker(topology, database.open()?);
    match command {
        Dlq::List {
            filter,
            limit,
            after,
            ..
        } => {
            let page = match after {
                Some(cursor) => Page::after(limit, cursor.parse()?),
                None => Page::first(limit),
            };
            let filter = filter.check(&letters).await?;
            let listed = letters.list(&filter, page).await?;
            Ok(Output::well(show::list(&listed), json!(listed)))
        }
        Dlq::Show { id, .. } => {
            let letter = letters.get(id).await?;
            let assessment = letters.assess(&letter.summary).await;
            let text = show::letter(&letter, &assessment);
            let mut json = json!(letter);
            json["assessment"] = json!(assessment);
            Ok(Output::well(text, json))
        }
        Dlq::Groups { filter, limit, .. } => {
            let filter = filter.check(&letters).await?;
            let groups = letters.groups(&filter, limit).await?;
            Ok(Output::well(
                show::groups(&groups),
                json!({ "groups": groups }),
            ))
        }
        _ => {
            let tiers = letters.by_tier().await?;
            Ok(Output::well(show::tiers(&tiers), json!({ "tiers": tiers })))
        }
    }
}

async fn redrive(command: Dlq, topology: Topology) -> Result<Output, Failure> {
    let Dlq::Redrive {
        log,
        broker,
        operator,
        id,
        filter,
        rate,
        canary,
        canary_success,
        canary_wait,
        resume,
        stop,
    } = command
    else {
        return Err(Failure::Misused("not a redrive".to_owned()));
    };
    // Refused before anything is connected to.
    let canary_wait = read_duration("--canary-wait", &canary_wait)?;
    let app = builder(topology, &broker, &log.database)?
        .connect_timeout("0s")
        .connect()
        .await?;
    let letters = app
        .dead_letters()?
        .by(&operator.author.by)
        .because(&operator.author.because);
    if let Some(operation) = stop {
        letters.stop(operation).await?;
        let json = json!({ "operation": operation, "state": "stopping" });
        return Ok(Output::well(
            format!("operation {operation} stops after its batch"),
            json,
        ));
    }
    if let Some(operation) = resume {
        return Ok(ended(&letters.resume(operation).await?));
    }
    if let Some(id) = id {
        filter.must_be_empty()?;
        let receipt = letters.redrive(id).await?;
        let text = format!("{id} is in tier {} as {}", receipt.tier, receipt.id);
        let json = json!({ "id": id, "message_id": receipt.id.as_str(), "tier": receipt.tier });
        return Ok(Output::well(text, json));
    }
    let filter = filter.check(&letters).await?;
    let count = count(&letters, &filter).await?;
    confirm(&operator, "redrive", count)?;
    let bar = Bar::new(count, log.input.json);
    let mut bulk = letters
        .redrive_all(filter)
        .on_progress(move |operation| bar.show(operation.done));
    if let Some(rate) = rate {
        bulk = bulk.rate(rate);
    }
    if let Some(count) = canary {
        bulk = bulk.canary(Canary::of(count).success(canary_success).wait(canary_wait));
    }
    Ok(ended(&bulk.run().await?))
}

async fn remove(command: Dlq, topology: Topology, database: &Database) -> Result<Output, Failure> {
    let letters = DeadLetters::without_broker(topology, database.open()?);
    match command {
        Dlq::Discard {
            operator,
            id: Some(id),
            filter,
            ..
        } => {
            filter.must_be_empty()?;
            let letters = letters
                .by(&operator.author.by)
                .because(&operator.author.because);
            letters.discard(id).await?;
            Ok(Output::well(
                format!("{id} is discarded"),
                json!({ "id": id }),
            ))
        }
        Dlq::Discard {
            operator, filter, ..
        } => {
            let letters = letters
                .by(&operator.author.by)
                .because(&operator.author.because);
            let filter = filter.check(&letters).await?;
            confirm(&operator, "discard", count(&letters, &filter).await?)?;
            Ok(ended(&letters.discard_all(&filter).await?))
        }
        Dlq::Purge {
            operator, filter, ..
        } => {
            let letters = letters
                .by(&operator.author.by)
                .because(&operator.author.because);
            let filter = filter.check(&letters).await?;
            confirm(&operator, "delete", letters.count(&filter).await?)?;
            Ok(ended(&letters.purge(&filter).await?))
        }
        _ => Err(Failure::Misused("nothing to remove".to_owned())),
    }
}

/// How many dead rows a filter selects.
async fn count(letters: &DeadLetters, filter: &Filter) -> Result<u64, Error> {
    let state = filter.state.unwrap_or(tierline::dead::State::Dead);
    letters.count(&filter.clone().state(state)).await
}

fn ended(operation: &Operation) -> Output {
    Output {
        text: show::operation(operation),
        json: json!(operation),
        is_well: operation.state == OperationState::Done,
    }
}

impl arguments::Filter {
    /// Reads the filter, and refuses an unknown tier, which would select nothing without an error.
    async fn check(self, letters: &DeadLetters) -> Result<Filter, Failure> {
        let filter = self.read()?;
        if let Some(tier) = &filter.tier {
            letters.check_tier(tier).await?;
        }
        Ok(filter)
    }

    fn read(self) -> Result<Filter, Failure> {
        let mut filter = Filter::default();
        filter.tier = self.tier;
        filter.task = self.task;
        filter.reason = self.reason;
        filter.fingerprint = self.fingerprint;
        filter.state = self.state;
        filter.text = self.text;
        if let Some(since) = self.since {
            filter = filter.since_text(&since)?;
        }
        if let Some(until) = self.until {
            filter = filter.until_text(&until)?;
        }
        Ok(filter)
    }

    fn must_be_empty(self) -> Result<(), Failure> {
        match self.read()? == Filter::default() {
            true => Ok(()),
            false => Err(Failure::Misused(
                "give the id of one dead letter or a filter, not both".to_owned(),
            )),
        }
    }
}
