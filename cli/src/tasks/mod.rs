//! `tierline tasks …`: each subcommand is a call into the library.

pub(crate) mod arguments;

use serde_json::{Value, json};
use tierline::backlog::{
    Backlog, BacklogPage, BacklogTask, BacklogTaskDetails, TaskFilter, TaskState,
};
use tierline::{TaskId, Topology};

use crate::dlq::confirm::confirm_change;
use crate::output::{self, Failure, Output};
use crate::table::table;
use arguments::{Filter, Tasks};

/// How many tasks of each state are counted for a confirmation.
const LARGEST_PREVIEW: u16 = 500;

pub(crate) async fn run(command: Tasks) -> Result<Output, Failure> {
    let topology = Topology::load(&command.input().file)?;
    let database = command.log().database.open()?;
    let backlog = Backlog::new(topology, database);
    match command {
        Tasks::List {
            filter,
            limit,
            after,
            ..
        } => {
            let page = backlog
                .list(&filter.read(), after.as_deref(), limit)
                .await?;
            Ok(Output::well(list(&page), json!(page)))
        }
        Tasks::Show { id, .. } => {
            let details = backlog.get(&TaskId::from(id)).await?;
            Ok(Output::well(show(&details), json!(details)))
        }
        Tasks::Cancel {
            operator,
            id,
            filter,
            ..
        } => {
            let author = &operator.author;
            let backlog = backlog.by(&author.by).because(&author.because);
            match id {
                Some(id) if filter.is_empty() => {
                    let task = backlog.cancel(&TaskId::from(id)).await?;
                    let text = format!("{} of tier {} is cancelled", task.id, task.tier);
                    Ok(Output::well(text, json!({ "cancelled": 1, "task": task })))
                }
                None if !filter.is_empty() => {
                    let count = preview(&backlog, &filter).await?;
                    confirm_change(&operator, "cancel", &count)?;
                    let count = backlog.cancel_all(&filter.read()).await?;
                    let text = format!("{count} cancelled");
                    Ok(Output::well(text, json!({ "cancelled": count })))
                }
                Some(_) => Err(Failure::Misused(
                    "name an id or a filter, not both".to_owned(),
                )),
                None => Err(Failure::Misused(
                    "name an id, or a filter such as --tier exports".to_owned(),
                )),
            }
        }
        Tasks::Escalate {
            author,
            id,
            to,
            now,
            ..
        } => {
            let backlog = backlog.by(&author.by).because(&author.because);
            let mut escalating = backlog.escalate(&TaskId::from(id), &to);
            if now {
                escalating = escalating.at_once();
            }
            let escalated = escalating.await?;
            let (before, after) = (&escalated.before, &escalated.after);
            let due = time(&json!(after)["due_at"]);
            let text = format!(
                "{} is in tier {} now, after {}: {}, due {due}",
                after.id, after.tier, before.tier, after.state
            );
            Ok(Output::well(text, json!(escalated)))
        }
        Tasks::Audit { limit, before, .. } => {
            let entries = backlog.audit_log(before, limit).await?;
            let rows: Vec<Vec<String>> = entries
                .iter()
                .map(|entry| {
                    vec![
                        entry.id.to_string(),
                        time(&json!(entry)["at"]),
                        entry.who.clone(),
                        entry.action.clone(),
                        entry.subject.to_string(),
                        entry.why.clone(),
                    ]
                })
                .collect();
            let text = match rows.is_empty() {
                true => "there are no entries".to_owned(),
                false => table(&["NUMBER", "AT", "WHO", "WHAT", "OF", "WHY"], &rows),
            };
            Ok(Output::well(text, json!({ "entries": entries })))
        }
    }
}

/// How many tasks a filter would cancel: those that wait.
async fn preview(backlog: &Backlog, filter: &Filter) -> Result<String, Failure> {
    let states = match filter.state {
        None => vec![TaskState::Ready, TaskState::Parked, TaskState::Scheduled],
        Some(state @ (TaskState::Ready | TaskState::Parked | TaskState::Scheduled)) => vec![state],
        Some(_) => {
            return Err(Failure::Misused(
                "only tasks that wait can be cancelled: use --state ready, parked or scheduled, or leave it out"
                    .to_owned(),
            ));
        }
    };
    let (mut number, mut are_more) = (0, false);
    for state in states {
        let filter = filter.read().state(state);
        let page = backlog.list(&filter, None, LARGEST_PREVIEW).await?;
        number += page.tasks.len();
        are_more |= page.next.is_some();
    }
    let count = output::count(number, "task");
    Ok(match are_more {
        true => format!("{count} or more"),
        false => count,
    })
}

impl Filter {
    fn read(&self) -> TaskFilter {
        let mut filter = TaskFilter::default();
        if let Some(tier) = &self.tier {
            filter = filter.tier(tier);
        }
        if let Some(task) = &self.task {
            filter = filter.task(task);
        }
        if let Some(state) = self.state {
            filter = filter.state(state);
        }
        if let Some(time) = &self.waiting_for {
            filter = filter.waiting_for(time.as_str());
        }
        if let Some(time) = &self.due_within {
            filter = filter.due_within(time.as_str());
        }
        filter
    }
}

fn list(page: &BacklogPage) -> String {
    let rows: Vec<Vec<String>> = page
        .tasks
        .iter()
        .map(|task| {
            let quarantine = if task.is_quarantined {
                ", quarantined"
            } else {
                ""
            };
            let state = match task.ending {
                Some(ending) => format!("{}, {ending}", task.state),
                None => format!("{}{quarantine}", task.state),
            };
            vec![
                task.id.to_string(),
                task.task.clone(),
                tier(task),
                state,
                task.priority.to_string(),
                task.attempt.to_string(),
                time(&json!(task)["due_at"]),
                task.worker.clone().unwrap_or_else(|| "-".to_owned()),
            ]
        })
        .collect();
    let head = [
        "ID", "TASK", "TIER", "STATE", "PRIORITY", "ATTEMPT", "DUE", "WORKER",
    ];
    let mut text = match rows.is_empty() {
        true => "no tasks".to_owned(),
        false => table(&head, &rows),
    };
    if let Some(next) = &page.next {
        text.push_str(&format!("\nthere may be more: --after {next}"));
    }
    text
}

fn show(details: &BacklogTaskDetails) -> String {
    let (task, json) = (&details.summary, json!(details));
    let mut lines = vec![
        format!("id:        {}", task.id),
        format!("task:      {}", task.task),
        format!("tier:      {}", tier(task)),
        format!("state:     {}", task.state),
        format!("priority:  {}", task.priority),
        format!("attempt:   {}", task.attempt),
        format!("crashes:   {}", task.crashes),
        format!("enqueued:  {}", time(&json["enqueued_at"])),
        format!("due:       {}", time(&json["due_at"])),
        format!("expires:   {}", time(&json["expires_at"])),
    ];
    lines.extend(task.worker.as_ref().map(|it| format!("worker:    {it}")));
    if let Some(ending) = task.ending {
        lines.push(format!(
            "ended:     {ending} at {}",
            time(&json["finished_at"])
        ));
    }
    lines.extend(details.key.as_ref().map(|it| format!("key:       {it}")));
    for (name, value) in &details.headers {
        lines.push(format!("header:    {name}: {value}"));
    }
    for (index, failed) in details.history.iter().enumerate() {
        let at = time(&json["history"][index]["at"]);
        let (attempt, error) = (failed.attempt, &failed.error);
        lines.push(format!("failed:    attempt {attempt} at {at}: {error}"));
    }
    let payload = String::from_utf8_lossy(&details.payload);
    lines.push(format!("payload:   {payload}"));
    lines.join("\n")
}

/// The tier of a task, and that which it was published to if it has moved since.
fn tier(task: &BacklogTask) -> String {
    match &task.first_tier {
        Some(first) => format!("{} (first {first})", task.tier),
        None => task.tier.clone(),
    }
}

/// A time as JSON has it.
fn time(json: &Value) -> String {
    json.as_str().unwrap_or("-").to_owned()
}
