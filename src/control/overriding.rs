//! Another tier or priority for some tasks, for a while: checked, made and recorded in one transaction, and then carried
//! out on the rows that wait.
//!
//! `handlers` says whether the live processes can run the tasks, and `rows` moves the rows.

pub(super) mod handlers;
pub(super) mod rows;

use std::collections::BTreeSet;
use std::future::IntoFuture;
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::Control;
use super::change::{check_length, kept};
use super::entry::{ControlEntry, Setting, Target};
use super::process::processes;
use super::table::{Reason, begin, end, in_force, lock, snapshot_of, tiers_of_overrides};
use crate::Error;
use crate::backlog::add_backlogs;
use crate::error::{ControlError, DatabaseError, UnknownName};
use crate::postgres::{Action, STATEMENT_LIMIT, record};
use crate::task::IntoDuration;
use crate::topology::duration::Unreadable;
use crate::topology::{MappedTask, Tier, near_miss};
use handlers::{Unhandled, listed, older, partly_handled, too_long, unhandled};
use rows::RowsToMove;

/// How many names one change may have. All of them are written in one transaction.
const MOST_NAMES: usize = 500;
/// How long the broker may take to say how much waits.
const ASK_LIMIT: Duration = Duration::from_secs(3);

/// An override to be made: see [`Control::override_task`].
#[derive(Debug, Clone)]
#[must_use = "nothing happens until it is awaited"]
pub struct Overriding {
    control: Control,
    targets: Vec<Target>,
    tier: Option<String>,
    priority: Option<u8>,
    why: String,
    length: Option<Duration>,
    unreadable: Unreadable,
}

/// An override that was made.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Overridden {
    /// The overrides that were in force before for the same names.
    pub before: Vec<ControlEntry>,
    /// The overrides that are in force now, one for each name or prefix.
    pub after: Vec<ControlEntry>,
    /// How many waiting rows have moved, or have got another priority.
    pub moved: u64,
    /// The queues that hold messages of these tasks from before, as far as there are any. What waits there stays.
    pub waiting: Vec<WaitingQueue>,
    /// What an operator should know about it, in sentences.
    pub notes: Vec<String>,
}

/// A queue of a tier that tasks have left.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct WaitingQueue {
    /// The tier.
    pub tier: String,
    /// How many messages wait in its queue, of these and of other tasks. `None`: the broker did not say, or was not asked.
    pub messages: Option<u32>,
}

impl Overriding {
    pub(super) fn new(control: &Control, targets: Vec<Target>) -> Self {
        Self {
            control: control.clone(),
            targets,
            tier: None,
            priority: None,
            why: String::new(),
            length: None,
            unreadable: Unreadable::NONE,
        }
    }

    /// The tier that the tasks go to. Default: that of the map.
    pub fn tier(mut self, tier: &str) -> Self {
        self.tier = Some(tier.to_owned());
        self
    }

    /// The priority that the tasks have, whatever their publishers ask for. Default: as without the override, as far as
    /// the tier has it.
    pub fn priority(mut self, priority: u8) -> Self {
        self.priority = Some(priority);
        self
    }

    /// The operator, for the audit log. Default: that of the [`Control`].
    pub fn by(mut self, who: &str) -> Self {
        self.control.who = kept(who);
        self
    }

    /// The reason, for the audit log. Default: empty.
    pub fn because(mut self, why: &str) -> Self {
        self.why = kept(why);
        self
    }

    /// For how long, such as `"7d"`. It ends by itself then. Default: until somebody ends it.
    pub fn lasting(mut self, length: impl IntoDuration) -> Self {
        let mut read = Duration::ZERO;
        self.unreadable.set("lasting", length, &mut read);
        self.length = Some(read);
        self
    }

    async fn run(self) -> Result<Overridden, Error> {
        self.unreadable.check()?;
        if let Some(problem) = check_length(self.length) {
            return Err(self.invalid(problem));
        }
        self.check_names()?;
        self.check_tier()?;
        let stored = match self.check_and_store().await {
            // An app whose tiers are all on the broker may have no tables yet.
            Err(Error::Database(DatabaseError::NotMigrated { .. })) => {
                self.control.database.migrate().await?;
                self.check_and_store().await?
            }
            stored => stored?,
        };
        let Stored {
            before,
            after,
            numbers,
            mut rows,
            mut notes,
        } = stored;
        let moved = self.move_rows(&mut rows, &numbers, &mut notes).await;
        let waiting = self.waiting(&rows, &mut notes).await;
        notes.extend(self.notes_of_priority());
        notes.extend(self.notes_of_length());
        Ok(Overridden {
            before,
            after,
            moved,
            waiting,
            notes,
        })
    }

    async fn check_and_store(&self) -> Result<Stored, Error> {
        let notes = self.check_processes().await?;
        let mut stored = self.store().await?;
        stored.notes.splice(0..0, notes);
        Ok(stored)
    }

    /// The tasks of the map that the targets name.
    fn tasks(&self) -> impl Iterator<Item = &MappedTask> {
        let tasks = self.control.topology.tasks().iter();
        tasks.filter(|task| self.targets.iter().any(|target| target.has(&task.name)))
    }

    fn setting(&self) -> Setting {
        Setting::Override {
            tier: self.tier.clone(),
            priority: self.priority,
        }
    }

    /// Refuses names that the map does not have.
    fn check_names(&self) -> Result<(), Error> {
        let topology = &self.control.topology;
        if self.targets.is_empty() || self.targets.len() > MOST_NAMES {
            return Err(self.invalid(format!(
                "a list has 1 to {MOST_NAMES} names, and this one has {}; a prefix has any number",
                self.targets.len()
            )));
        }
        if self.targets.contains(&Target::Prefix(String::new())) {
            return Err(self.invalid(
                "the prefix is empty, which would override every task; name the tasks, or a prefix of them".to_owned(),
            ));
        }
        let mapped = |target: &&Target| topology.tasks().iter().any(|it| target.has(&it.name));
        let Some(unknown) = self.targets.iter().find(|target| !mapped(target)) else {
            return Ok(());
        };
        let name = unknown.name();
        let names = topology.tasks().iter().map(|task| task.name.as_str());
        if let Target::Prefix(_) = unknown {
            return Err(self.unknown("task that begins with", name, names.flat_map(prefixes)));
        }
        Err(self.unknown("task", name, names))
    }

    /// Refuses what the tier cannot do.
    fn check_tier(&self) -> Result<(), Error> {
        let topology = &self.control.topology;
        if self.tier.is_none() && self.priority.is_none() {
            let problem = "neither a tier nor a priority was given; give one of them, or both";
            return Err(self.invalid(problem.to_owned()));
        }
        if let Some(name) = &self.tier
            && topology.tier(name).is_none()
        {
            let names = topology.tiers().iter().map(|tier| tier.name.as_str());
            return Err(self.unknown("tier", name, names));
        }
        for task in self.tasks() {
            let (Some(home), Some(tier)) = (topology.tier(&task.tier), self.tier_of(task)) else {
                continue;
            };
            let (name, highest) = (&tier.name, tier.home.max_priority());
            match (self.priority, highest) {
                (Some(priority), Some(highest)) if priority > highest => {
                    return Err(self.refused(format!(
                        "the priority {priority} is too high for tier {name}, which takes 0 to {highest}"
                    )));
                }
                (Some(_), None) => {
                    return Err(self.refused(format!(
                        "tier {name} of task {:?} has no priorities; leave the priority out",
                        task.name
                    )));
                }
                _ => {}
            }
            let has_delays = |tier: &Tier| tier.delays || !tier.home.is_on_broker();
            if has_delays(home) && !has_delays(tier) {
                return Err(self.refused(format!(
                    "tier {name} has no delay queues (delays = false), so retries of task {:?} would be dead letters, and \
                     publishes with a delay errors; choose a tier with delays",
                    task.name
                )));
            }
        }
        Ok(())
    }

    /// Refuses a tier whose workers could not run the tasks. Returns what only some of them cannot do.
    async fn check_processes(&self) -> Result<Vec<String>, Error> {
        let topology = &self.control.topology;
        let reading = async {
            let mut connection = self.control.database.pool().acquire().await?;
            processes(&mut connection, topology).await
        };
        let reading = self
            .control
            .database
            .within(STATEMENT_LIMIT, "list the processes", reading);
        let processes = reading.await?;
        let mut notes: Vec<String> = older(&processes).into_iter().collect();
        let Some(tier) = &self.tier else {
            return Ok(notes);
        };
        let names: Vec<&str> = self.tasks().map(|task| task.name.as_str()).collect();
        match unhandled(&processes, tier, &names) {
            None => {}
            Some(Unhandled::NoProcess) => {
                return Err(self.refused(format!(
                    "no live process serves tier {tier}, so its tasks would not run; start workers of {} that have \
                     this database first",
                    self.group_of(tier)
                )));
            }
            Some(Unhandled::Tasks(tasks)) => {
                return Err(self.refused(format!(
                    "no live process that serves tier {tier} has a handler for {}; deploy the handlers to workers of {} \
                     first, or choose a tier whose workers have them",
                    listed(&tasks),
                    self.group_of(tier)
                )));
            }
        }
        if let Some(problem) = too_long(topology, &processes, tier, &names) {
            return Err(self.refused(format!(
                "{problem}; choose a tier in Postgres, or give the tasks shorter timeouts"
            )));
        }
        let partly = partly_handled(&processes, tier, &names);
        notes.extend(partly.map(|problem| format!("{problem}; deploy the handlers to them")));
        Ok(notes)
    }

    fn group_of(&self, tier: &str) -> String {
        let group = self.control.topology.group_of(tier);
        group.map_or_else(|| "its group".to_owned(), |it| format!("group {}", it.name))
    }

    /// Puts the overrides in force.
    async fn store(&self) -> Result<Stored, Error> {
        let Control {
            topology,
            database,
            who,
            ..
        } = &self.control;
        let (app, setting, for_sql) = (topology.app(), self.setting(), self.setting_for_sql());
        let reason = Reason {
            who,
            why: &self.why,
            length: self.length,
        };
        let storing = async {
            let mut connection = database.pool().acquire().await?;
            let mut transaction = connection.begin().await?;
            lock(&mut transaction, app).await?;
            if let Some(tier) = &self.tier {
                // The SQL function tierline.publish looks it up.
                add_backlogs(&mut transaction, app, &[tier]).await?;
            }
            let (mut before, mut after, mut numbers) = (Vec::new(), Vec::new(), Vec::new());
            for target in &self.targets {
                let ended = end(&mut transaction, app, setting.kind(), target).await?;
                let (number, begun) =
                    begin(&mut transaction, app, target, &setting, &for_sql, reason).await?;
                let action = Action {
                    app,
                    who,
                    why: &self.why,
                    action: &format!("override {}", target.kind()),
                    subject: json!({ target.kind(): target.name() }),
                    before: ended.as_ref().and_then(|it| serde_json::to_value(it).ok()),
                    after: serde_json::to_value(&begun).ok(),
                };
                record(&mut transaction, &action).await?;
                before.extend(ended);
                after.push(begun);
                numbers.push(number);
            }
            let now = in_force(&mut transaction, app).await?;
            let overridden = tiers_of_overrides(&mut transaction, app).await?;
            transaction.commit().await?;
            Ok(Stored {
                before,
                after,
                numbers,
                notes: self.notes_of_tier(&now),
                rows: self.rows_to_move(&overridden, &snapshot_of(topology, &now)),
            })
        };
        database
            .within(STATEMENT_LIMIT, &self.tried(), storing)
            .await
    }

    /// As it is stored, with what `tierline.publish` must know of the tier.
    fn setting_for_sql(&self) -> Value {
        let mut stored = self.setting().to_json();
        let tier = self.tier.as_ref();
        if let Some(tier) = tier.and_then(|tier| self.control.topology.tier(tier)) {
            stored["max_priority"] = json!(tier.home.max_priority());
            stored["usual_priority"] = json!(tier.usual_priority());
        }
        stored
    }

    /// How much waits in the queues that the tasks have left.
    async fn waiting(&self, rows: &[RowsToMove], notes: &mut Vec<String>) -> Vec<WaitingQueue> {
        let topology = &self.control.topology;
        let left = rows.iter().filter(|it| it.from != it.to);
        let left: BTreeSet<&str> = left.map(|it| it.from.as_str()).collect();
        let left = left.into_iter().filter_map(|tier| topology.tier(tier));
        let left: Vec<&Tier> = left.filter(|tier| tier.home.is_on_broker()).collect();
        let mut waiting = Vec::new();
        for tier in left {
            let messages = match &self.control.queue_depths {
                Some(depths) => depths(tier.clone(), Instant::now() + ASK_LIMIT).await,
                None => None,
            };
            let delayed = match tier.delays {
                true => "; delayed messages may come to it",
                false => "",
            };
            notes.push(match (messages, &self.control.queue_depths) {
                (Some(0), _) => format!("the queue of tier {} is empty{delayed}", tier.name),
                (Some(count), _) => format!(
                    "{count} messages wait in the queue of tier {}; those of the overridden tasks stay there{delayed}",
                    tier.name
                ),
                (None, Some(_)) => format!(
                    "the broker did not say how many messages wait in the queue of tier {}; they stay there",
                    tier.name
                ),
                (None, None) => format!(
                    "the broker was not asked how many messages wait in the queue of tier {}; they stay there",
                    tier.name
                ),
            });
            waiting.push(WaitingQueue {
                tier: tier.name.clone(),
                messages,
            });
        }
        waiting
    }

    /// What keeps the tasks waiting in the tier that they go to.
    fn notes_of_tier(&self, now: &[ControlEntry]) -> Vec<String> {
        let Some(tier) = &self.tier else {
            return Vec::new();
        };
        let group = self.control.topology.group_of(tier);
        let notes = now.iter().filter_map(|entry| {
            let (target, who) = (&entry.target, &entry.who);
            match (target, &entry.setting) {
                (Target::Tier(name), Setting::Pause) if name == tier => {}
                (Target::Group(name), Setting::Pause)
                    if group.is_some_and(|it| it.name == *name) => {}
                (Target::Tier(name), Setting::Limit(limit)) if name == tier => {
                    return Some(format!("{target} is limited to {limit}, by {who}"));
                }
                _ => return None,
            }
            Some(format!(
                "{target} is paused, by {who}: the tasks wait there"
            ))
        });
        notes.collect()
    }

    fn notes_of_priority(&self) -> Option<String> {
        let priority = self.priority?;
        Some(format!(
            "every publish and retry of these tasks has the priority {priority}, whatever it asks for; those that keep \
             waiting when the override ends keep it"
        ))
    }

    /// Rows that move are not counted against the `max_length` of their new tier.
    fn notes_of_length(&self) -> Option<String> {
        let tier = self.control.topology.tier(self.tier.as_ref()?)?;
        let most = tier.max_length?;
        Some(format!(
            "tier {} takes {most} tasks (max_length) and then refuses publishes; rows move there all the same",
            tier.name
        ))
    }

    /// The tier that a task goes to under this override.
    fn tier_of(&self, task: &MappedTask) -> Option<&Tier> {
        let tier = self.tier.as_ref().unwrap_or(&task.tier);
        self.control.topology.tier(tier)
    }

    fn unknown<'n>(
        &self,
        what: &'static str,
        name: &str,
        names: impl Iterator<Item = &'n str> + Clone,
    ) -> Error {
        Error::Control(ControlError::Unknown(Box::new(UnknownName {
            tried: self.tried().into(),
            what,
            name: name.into(),
            near: near_miss(name, names).map(Into::into),
            app: self.control.topology.app().into(),
        })))
    }

    fn invalid(&self, problem: String) -> Error {
        Error::Control(ControlError::Invalid {
            tried: self.tried().into(),
            problem: problem.into(),
        })
    }

    fn refused(&self, problem: String) -> Error {
        Error::Control(ControlError::Refused {
            tried: self.tried().into(),
            problem: problem.into(),
        })
    }

    /// `override task "report.export"`.
    fn tried(&self) -> String {
        match self.targets.as_slice() {
            [one] => format!("override {} {:?}", one.kind(), one.name()),
            [first, more @ ..] => {
                format!("override task {:?} and {} more", first.name(), more.len())
            }
            [] => "override tasks".to_owned(),
        }
    }
}

impl IntoFuture for Overriding {
    type Output = Result<Overridden, Error>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}

/// What was put in force.
struct Stored {
    /// What was in force before for the same names.
    before: Vec<ControlEntry>,
    after: Vec<ControlEntry>,
    /// Of `after`.
    numbers: Vec<i64>,
    rows: Vec<RowsToMove>,
    notes: Vec<String>,
}

/// The beginnings of a name that end with a dot: `mail.` and `mail.news.` of `mail.news.weekly`.
pub(super) fn prefixes(name: &str) -> impl Iterator<Item = &str> + Clone {
    name.match_indices('.').map(|(dot, _)| &name[..=dot])
}
