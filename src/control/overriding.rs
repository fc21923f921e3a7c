//! Another tier or priority for some tasks, for a while: checked, made and recorded in one transaction, and then carried
//! out on the rows that wait.

use std::collections::{BTreeMap, BTreeSet};
use std::future::IntoFuture;
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use super::Control;
use super::change::{check_length, kept};
use super::entry::{ControlEntry, Setting, Target};
use super::known::EVERY;
use super::process::{Process, processes};
use super::snapshot::Snapshot;
use super::table::{Reason, begin, end, in_force, lock, snapshot_of};
use crate::Error;
use crate::backlog::{Reassigned, Reassignment, add_backlogs, reassign};
use crate::error::{ControlError, DatabaseError, UnknownName};
use crate::postgres::{Action, STATEMENT_LIMIT, record};
use crate::task::IntoDuration;
use crate::topology::duration::Unreadable;
use crate::topology::{MappedTask, Tier, near_miss, show_duration};

/// How many names one change may have. All of them are written in one transaction.
const MOST_NAMES: usize = 500;
/// How many names an error or a note lists.
const NAMED: usize = 10;
/// How long waiting rows are moved before the answer comes. At some 50,000 rows a second that is a backlog of millions.
const LONGEST_MOVE: Duration = Duration::from_secs(120);
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
        let (before, after, mut affected) = match self.check_and_store().await {
            // An app whose tiers are all on the broker may have no tables yet.
            Err(Error::Database(DatabaseError::NotMigrated { .. })) => {
                self.control.database.migrate().await?;
                self.check_and_store().await?
            }
            stored => stored?,
        };
        let mut notes = Vec::new();
        let moved = self.move_rows(&mut affected, &mut notes).await;
        let waiting = self.waiting(&affected, &mut notes).await;
        notes.extend(self.notes_of_priority());
        notes.extend(self.notes_of_keys());
        Ok(Overridden {
            before,
            after,
            moved,
            waiting,
            notes,
        })
    }

    async fn check_and_store(
        &self,
    ) -> Result<(Vec<ControlEntry>, Vec<ControlEntry>, Vec<Affected>), Error> {
        self.check_processes().await?;
        self.store().await
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

    /// Refuses a tier whose workers could not run the tasks.
    async fn check_processes(&self) -> Result<(), Error> {
        let Some(tier) = &self.tier else {
            return Ok(());
        };
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
        let names = self.tasks().map(|task| task.name.as_str());
        match unhandled(&processes, tier, names) {
            None => Ok(()),
            Some(Unhandled::NoProcess) => Err(self.refused(format!(
                "no live process serves tier {tier}, so its tasks would wait for nobody; start workers of {} that have \
                 this database first",
                self.group_of(tier)
            ))),
            Some(Unhandled::Tasks(tasks)) => Err(self.refused(format!(
                "no live process that serves tier {tier} has a handler for {}; deploy the handlers to workers of {} \
                 first, or choose a tier whose workers have them",
                listed(&tasks),
                self.group_of(tier)
            ))),
        }
    }

    fn group_of(&self, tier: &str) -> String {
        let mut groups = self.control.topology.groups().iter();
        let group = groups.find(|group| group.tiers.iter().any(|it| it == tier));
        group.map_or_else(|| "its group".to_owned(), |it| format!("group {}", it.name))
    }

    /// Puts the overrides in force. Returns what was in force before and is now for the same names, and where the rows of
    /// the tasks are to be moved.
    async fn store(&self) -> Result<(Vec<ControlEntry>, Vec<ControlEntry>, Vec<Affected>), Error> {
        let Control {
            topology,
            database,
            who,
            ..
        } = &self.control;
        let (app, setting, stored) = (topology.app(), self.setting(), self.stored());
        let reason = Reason {
            who,
            why: &self.why,
            length: self.length,
        };
        let storing = async {
            let mut connection = database.pool().acquire().await?;
            let mut transaction = connection.begin().await?;
            lock(&mut transaction, app).await?;
            let all_before = in_force(&mut transaction, app).await?;
            if let Some(tier) = &self.tier {
                // The SQL function tierline.publish looks it up.
                add_backlogs(&mut transaction, app, &[tier]).await?;
            }
            let (mut before, mut after) = (Vec::new(), Vec::new());
            for target in &self.targets {
                let ended = end(&mut transaction, app, setting.kind(), target).await?;
                let begun = begin(&mut transaction, app, target, &setting, &stored, reason).await?;
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
            }
            let all_after = in_force(&mut transaction, app).await?;
            transaction.commit().await?;
            let (then, now) = (
                snapshot_of(topology, &all_before),
                snapshot_of(topology, &all_after),
            );
            Ok((before, after, self.affected(&then, &now)))
        };
        database
            .within(STATEMENT_LIMIT, &self.tried(), storing)
            .await
    }

    /// As it is stored, with what `tierline.publish` must know of the tier.
    fn stored(&self) -> Value {
        let mut stored = self.setting().to_json();
        let tier = self.tier.as_ref();
        if let Some(tier) = tier.and_then(|tier| self.control.topology.tier(tier)) {
            stored["max_priority"] = json!(tier.home.max_priority());
            stored["usual_priority"] = json!(tier.usual_priority());
        }
        stored
    }

    /// The tasks that this override is about, unless a more specific one is in force, by the tiers in which their rows
    /// wait: that of the map, and that of the override before.
    fn affected(&self, before: &Snapshot, after: &Snapshot) -> Vec<Affected> {
        let topology = &self.control.topology;
        let mut tasks: BTreeMap<(String, String), BTreeSet<String>> = BTreeMap::new();
        for task in self.tasks() {
            let now = after.override_of(&task.name);
            let is_ours =
                now.is_some_and(|it| it.tier == self.tier && it.priority == self.priority);
            let Some(to) = self.tier_of(task).filter(|_| is_ours) else {
                continue;
            };
            let then = before.override_of(&task.name);
            let then = then.and_then(|it| it.tier.as_ref());
            let then = then.filter(|tier| topology.tier(tier).is_some());
            for from in [Some(&task.tier), then].into_iter().flatten() {
                if *from == to.name && self.priority.is_none() {
                    continue;
                }
                let tiers = (from.clone(), to.name.clone());
                tasks.entry(tiers).or_default().insert(task.name.clone());
            }
        }
        let affected = tasks.into_iter().map(|((from, to), tasks)| Affected {
            from,
            to,
            tasks: tasks.into_iter().collect(),
        });
        affected.collect()
    }

    /// Moves the waiting rows. The override is in force by now, so a failure is a note. The more urgent tiers of the map
    /// come first.
    async fn move_rows(&self, affected: &mut [Affected], notes: &mut Vec<String>) -> u64 {
        let topology = &self.control.topology;
        let in_file = |name: &str| topology.tiers().iter().position(|it| it.name == name);
        affected.sort_by_key(|it| in_file(&it.to));
        if !affected.is_empty() {
            // Until every process that reaches the database knows the override: what publishers have meanwhile stored by the
            // map is moved too, and no worker sends what has moved back by the map.
            sleep(EVERY * 2).await;
        }
        let end = Instant::now() + LONGEST_MOVE;
        let mut moved = 0;
        for affected in &*affected {
            let (Some(from), Some(to)) =
                (topology.tier(&affected.from), topology.tier(&affected.to))
            else {
                continue;
            };
            let reassignment = Reassignment {
                app: topology.app(),
                tasks: affected.tasks.iter().map(String::as_str).collect(),
                from: &from.name,
                to: &to.name,
                priorities: match self.priority {
                    Some(priority) => priority..=priority,
                    None => to.priorities_from(from),
                },
                ttl: to.ttl.filter(|_| from.name != to.name),
            };
            let mut reassigned = Reassigned::default();
            let done = reassign(&self.control.database, &reassignment, end, &mut reassigned);
            let again = "set the override again to move the rest";
            match done.await {
                Ok(true) => {}
                Ok(false) => notes.push(format!(
                    "not all rows of tier {} have moved within {}; {again}",
                    from.name,
                    show_duration(LONGEST_MOVE)
                )),
                Err(error) => notes.push(format!(
                    "the override is in force, and not all rows of tier {} have moved: {error}; {again}",
                    from.name
                )),
            }
            moved += reassigned.moved;
            if reassigned.too_old > 0 {
                notes.push(format!(
                    "{} rows stay in tier {}: they have waited for longer than the ttl of tier {}, where they would expire",
                    reassigned.too_old, from.name, to.name
                ));
            }
        }
        moved
    }

    /// How much waits in the queues that the tasks have left.
    async fn waiting(&self, affected: &[Affected], notes: &mut Vec<String>) -> Vec<WaitingQueue> {
        let topology = &self.control.topology;
        let left = affected.iter().filter(|it| it.from != it.to);
        let left: BTreeSet<&str> = left.map(|it| it.from.as_str()).collect();
        let left = left.into_iter().filter_map(|tier| topology.tier(tier));
        let left: Vec<&Tier> = left.filter(|tier| tier.home.is_on_broker()).collect();
        let mut waiting = Vec::new();
        for tier in left {
            let messages = match &self.control.queue_depths {
                Some(depths) => depths(tier.clone(), Instant::now() + ASK_LIMIT).await,
                None => None,
            };
            notes.push(match (messages, &self.control.queue_depths) {
                (Some(0), _) => format!("the queue of tier {} is empty", tier.name),
                (Some(count), _) => format!(
                    "{count} messages wait in the queue of tier {}; those of the overridden tasks stay there",
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

    fn notes_of_priority(&self) -> Option<String> {
        let priority = self.priority?;
        Some(format!(
            "every publish and retry of these tasks has the priority {priority}, whatever it asks for; those that keep \
             waiting when the override ends keep it"
        ))
    }

    /// Each tier counts the runs of a key by itself.
    fn notes_of_keys(&self) -> Option<String> {
        let has_keys = |task: &&MappedTask| {
            let limit = task.limit.as_ref();
            limit.is_some_and(|limit| limit.per.is_some()) && self.tier.as_ref() != Some(&task.tier)
        };
        let tasks: Vec<&str> = self
            .tasks()
            .filter(has_keys)
            .map(|task| task.name.as_str())
            .collect();
        (self.tier.is_some() && !tasks.is_empty()).then(|| {
            format!(
                "while tasks of both tiers run, as many of each key may run in each: {}",
                listed(&tasks)
            )
        })
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

/// Tasks whose rows in one tier are to be in another.
struct Affected {
    from: String,
    to: String,
    tasks: Vec<String>,
}

/// Why the workers of a tier cannot run some tasks.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unhandled<'t> {
    /// None lives.
    NoProcess,
    /// None has a handler for these.
    Tasks(Vec<&'t str>),
}

/// Which of these tasks no live process that serves a tier could run; `None`: there are no such tasks.
pub(super) fn unhandled<'t>(
    processes: &[Process],
    tier: &str,
    tasks: impl Iterator<Item = &'t str>,
) -> Option<Unhandled<'t>> {
    let serving = |process: &&Process| process.is_alive && process.serves(tier);
    let serving: Vec<&Process> = processes.iter().filter(serving).collect();
    if serving.is_empty() {
        return Some(Unhandled::NoProcess);
    }
    let is_unhandled = |task: &&str| !serving.iter().any(|process| process.has_handler(task));
    let tasks: Vec<&str> = tasks.filter(is_unhandled).collect();
    (!tasks.is_empty()).then_some(Unhandled::Tasks(tasks))
}

/// The beginnings of a name that end with a dot: `mail.` and `mail.news.` of `mail.news.weekly`.
fn prefixes(name: &str) -> impl Iterator<Item = &str> + Clone {
    name.match_indices('.').map(|(dot, _)| &name[..=dot])
}

/// Some names, and how many more there are.
pub(super) fn listed(names: &[&str]) -> String {
    let shown = names[..names.len().min(NAMED)].join(", ");
    match names.len().saturating_sub(NAMED) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}
