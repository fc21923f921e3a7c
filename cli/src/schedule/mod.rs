//! `tierline schedule …`: each subcommand is a call into the library.

pub(crate) mod arguments;

use std::time::SystemTime;

use serde_json::json;
use tierline::schedule::{ScheduleState, Schedules};
use tierline::topology::Schedule;
use tierline::{Database, Error, Topology};

use crate::connect::builder;
use crate::output::{Failure, Output};
use crate::table::table;
use arguments::{One, Schedule as Command};

pub(crate) async fn run(command: Command) -> Result<Output, Failure> {
    let topology = Topology::load(&command.input().file)?;
    match command {
        Command::List { log } => {
            let schedules = Schedules::new(topology, log.database.open()?);
            let states = schedules.list().await?;
            Ok(Output::well(list(&states), json!({ "schedules": states })))
        }
        Command::Next {
            database,
            name,
            count,
            ..
        } => {
            let schedules = match database.open()? {
                Some(database) => in_force(topology, database, name.as_deref()).await?,
                None => in_the_file(&topology, name.as_deref())?,
            };
            Ok(next(&schedules, count.into()))
        }
        Command::Run { one, broker } => {
            let app = builder(topology, &broker, &one.log.database)?
                .connect_timeout("0s")
                .connect()
                .await?;
            let schedules = app.schedules()?.by(&one.by);
            let receipt = schedules.run_now(&one.name).await?;
            let text = format!("{} is in tier {} as {}", one.name, receipt.tier, receipt.id);
            let json = json!({
                "schedule": one.name, "message_id": receipt.id.as_str(), "tier": receipt.tier,
            });
            Ok(Output::well(text, json))
        }
        Command::Pause { one } => {
            let state = one.schedules(topology)?.pause(&one.name).await?;
            let by = state.paused.as_ref().map_or("", |paused| &paused.by);
            let text = format!("{} is paused by {by}", one.name);
            Ok(Output::well(text, json!(state)))
        }
        Command::Resume { one } => {
            let state = one.schedules(topology)?.resume(&one.name).await?;
            let due = local(&state.schedule, state.next_due);
            let text = format!("{} is resumed, and next due at {due}", one.name);
            Ok(Output::well(text, json!(state)))
        }
    }
}

impl One {
    fn schedules(&self, topology: Topology) -> Result<Schedules, Error> {
        let database = self.log.database.open()?;
        Ok(Schedules::new(topology, database).by(&self.by))
    }
}

async fn in_force(
    topology: Topology,
    database: Database,
    name: Option<&str>,
) -> Result<Vec<Schedule>, Error> {
    let schedules = Schedules::new(topology, database);
    let states = match name {
        Some(name) => vec![schedules.get(name).await?],
        None => schedules.list().await?,
    };
    Ok(states.into_iter().map(|state| state.schedule).collect())
}

fn in_the_file(topology: &Topology, name: Option<&str>) -> Result<Vec<Schedule>, Error> {
    let Some(name) = name else {
        return Ok(topology.schedules().to_vec());
    };
    Ok(vec![topology.schedule(name)?.clone()])
}

fn next(schedules: &[Schedule], count: usize) -> Output {
    let now = SystemTime::now();
    let runs: Vec<(&Schedule, Vec<String>)> = schedules
        .iter()
        .map(|schedule| {
            let runs = schedule.upcoming(now, count).into_iter();
            let runs = runs.map(|run| schedule.timing.local_time(run));
            (schedule, runs.collect())
        })
        .collect();
    let rows: Vec<Vec<String>> = runs
        .iter()
        .flat_map(|(schedule, runs)| {
            let row = |run: &String| {
                vec![
                    schedule.name.clone(),
                    run.clone(),
                    schedule.timing.to_string(),
                ]
            };
            runs.iter().map(row).collect::<Vec<_>>()
        })
        .collect();
    let json: Vec<_> = runs
        .iter()
        .map(|(schedule, runs)| json!({ "schedule": schedule.name, "runs": runs }))
        .collect();
    let text = match rows.is_empty() {
        true => "there are no schedules".to_owned(),
        false => table(&["SCHEDULE", "DUE", "WHEN"], &rows),
    };
    Output::well(text, json!({ "next": json }))
}

fn list(states: &[ScheduleState]) -> String {
    if states.is_empty() {
        return "there are no schedules".to_owned();
    }
    let rows: Vec<Vec<String>> = states.iter().map(row).collect();
    let head = [
        "SCHEDULE",
        "TASK",
        "NEXT DUE",
        "LAST DUE",
        "PUBLISHED",
        "MISSED",
        "FROM",
        "WHEN",
    ];
    table(&head, &rows)
}

fn row(state: &ScheduleState) -> Vec<String> {
    let schedule = &state.schedule;
    let next = match (&state.paused, state.gone) {
        (_, Some(_)) => "gone from the file".to_owned(),
        (Some(paused), _) => format!("paused by {}", paused.by),
        _ => local(schedule, state.next_due),
    };
    let origin = json!(state.origin);
    let changed = if state.is_changed { ", changed" } else { "" };
    vec![
        schedule.name.clone(),
        schedule.task.clone(),
        next,
        local(schedule, state.last_due),
        state.published.to_string(),
        state.missed.to_string(),
        format!("{}{changed}", origin.as_str().unwrap_or_default()),
        schedule.timing.to_string(),
    ]
}

fn local(schedule: &Schedule, time: Option<SystemTime>) -> String {
    time.map_or_else(|| "-".to_owned(), |time| schedule.timing.local_time(time))
}
