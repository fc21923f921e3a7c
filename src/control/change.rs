//! One change by an operator: checked, made and recorded in one transaction.

use std::future::IntoFuture;
use std::time::Duration;

use futures_util::future::BoxFuture;
use serde::Serialize;
use serde_json::json;

use super::Control;
use super::entry::{ControlEntry, Setting, Target};
use super::overriding::prefixes;
use super::overriding::rows::note_of_end;
use super::snapshot::Snapshot;
use super::table::{Reason, begin, end, in_force, lock, snapshot_of};
use crate::Error;
use crate::error::{ControlError, DatabaseError, UnknownName};
use crate::postgres::{Action, STATEMENT_LIMIT, record};
use crate::task::IntoDuration;
use crate::topology::duration::Unreadable;
use crate::topology::{Limit, Tier, Topology, near_miss, show_duration};

/// The longest operator name and reason that are kept, in bytes.
const LONGEST: usize = 200;
/// The longest time that a change may last by itself.
const LONGEST_TIME: Duration = Duration::from_secs(10 * 365 * 86_400);

/// A change to be made: see [`Control`].
#[derive(Debug, Clone)]
#[must_use = "nothing happens until it is awaited"]
pub struct Change {
    pub(super) control: Control,
    pub(super) target: Target,
    pub(super) kind: Kind,
    why: String,
    length: Option<Duration>,
    unreadable: Unreadable,
}

/// Whether a change begins or ends.
#[derive(Debug, Clone)]
pub(super) enum Kind {
    Begin(Setting),
    /// With the kind of setting that ends.
    End(&'static str),
}

/// What a change did in the database.
struct Stored {
    before: Option<ControlEntry>,
    after: Option<ControlEntry>,
    /// All that is in force now, for what was paused or resumed.
    now: Vec<ControlEntry>,
}

/// A change that was made.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Changed {
    /// What was in force before for the same target.
    pub before: Option<ControlEntry>,
    /// What is in force now.
    pub after: Option<ControlEntry>,
    /// What an operator should know about it, in sentences.
    pub notes: Vec<String>,
}

impl Change {
    pub(super) fn begin(control: &Control, target: Target, setting: Setting) -> Self {
        Self::new(control, target, Kind::Begin(setting))
    }

    pub(super) fn end(control: &Control, target: Target, kind: &'static str) -> Self {
        Self::new(control, target, Kind::End(kind))
    }

    fn new(control: &Control, target: Target, kind: Kind) -> Self {
        Self {
            control: control.clone(),
            target,
            kind,
            why: String::new(),
            length: None,
            unreadable: Unreadable::NONE,
        }
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

    /// For how long, such as `"1h"`. It ends by itself then. Default: until somebody ends it.
    pub fn lasting(mut self, length: impl IntoDuration) -> Self {
        let mut read = Duration::ZERO;
        self.unreadable.set("lasting", length, &mut read);
        self.length = Some(read);
        self
    }

    async fn run(self) -> Result<Changed, Error> {
        self.unreadable.check()?;
        self.check()?;
        let Stored { before, after, now } = match self.store().await {
            // An app whose tiers are all on the broker may have no tables yet.
            Err(Error::Database(DatabaseError::NotMigrated { .. })) => {
                self.control.database.migrate().await?;
                self.store().await?
            }
            stored => stored?,
        };
        let mut notes = match &self.kind {
            Kind::Begin(Setting::Pause) => self.notes_of_pause(&now),
            Kind::End("override") if before.is_some() => {
                let mut notes = vec![
                    "publishes and retries go by the map again; rows that have moved stay where they are"
                        .to_owned(),
                ];
                notes.extend(self.note_of_rows(before.as_ref()).await);
                notes
            }
            Kind::Begin(Setting::Limit(limit)) => self.notes_of_limit(before.as_ref(), Some(limit)),
            Kind::End("limit") if before.is_some() => self.notes_of_limit(before.as_ref(), None),
            Kind::End("pause") => self.notes_of_resume(&now),
            _ => Vec::new(),
        };
        if after.is_none() && before.is_none() {
            // What is in force for a name that the map has lost can be ended. This was not.
            self.check_name()?;
            let note = format!("{} was not {}", self.target, self.kind.participle());
            notes.insert(0, note);
        }
        Ok(Changed {
            before,
            after,
            notes,
        })
    }

    async fn store(&self) -> Result<Stored, Error> {
        let database = &self.control.database;
        let changing = async {
            let mut connection = database.pool().acquire().await?;
            let mut transaction = connection.begin().await?;
            let app = self.control.topology.app();
            lock(&mut transaction, app).await?;
            let before = end(&mut transaction, app, self.kind.as_str(), &self.target).await?;
            let (who, why) = (self.control.who.as_str(), self.why.as_str());
            let after = match &self.kind {
                Kind::End(_) => None,
                Kind::Begin(setting) => {
                    let reason = Reason {
                        who,
                        why,
                        length: self.length,
                    };
                    let (target, stored) = (&self.target, setting.to_json());
                    let entry = begin(&mut transaction, app, target, setting, &stored, reason);
                    let (_, entry) = entry.await?;
                    Some(entry)
                }
            };
            if before.is_some() || after.is_some() {
                let action = Action {
                    app,
                    who,
                    why,
                    action: &self.words(),
                    subject: json!({ self.target.kind(): self.target.name() }),
                    before: before.as_ref().and_then(|it| serde_json::to_value(it).ok()),
                    after: after.as_ref().and_then(|it| serde_json::to_value(it).ok()),
                };
                record(&mut transaction, &action).await?;
            }
            let now = match self.kind {
                Kind::Begin(Setting::Pause) | Kind::End("pause") => {
                    in_force(&mut transaction, app).await?
                }
                _ => Vec::new(),
            };
            transaction.commit().await?;
            Ok(Stored { before, after, now })
        };
        let tried = format!("{} {:?}", self.words(), self.target.name());
        database.within(STATEMENT_LIMIT, &tried, changing).await
    }

    /// Refuses what the map does not have, and times that make no sense.
    fn check(&self) -> Result<(), Error> {
        if let Some(problem) = check_length(self.length) {
            return Err(self.invalid(problem));
        }
        if self.target.name().contains('\0') {
            return Err(self.invalid("a name has no NUL in it".to_owned()));
        }
        match self.kind {
            Kind::Begin(_) => self.check_name(),
            Kind::End(_) => Ok(()),
        }
    }

    /// Refuses a name that the map does not have.
    fn check_name(&self) -> Result<(), Error> {
        let topology = &self.control.topology;
        let name = self.target.name();
        let names: Vec<&str> = match &self.target {
            Target::Tier(_) => topology.tiers().iter().map(|it| it.name.as_str()).collect(),
            Target::Group(_) => topology
                .groups()
                .iter()
                .map(|it| it.name.as_str())
                .collect(),
            Target::Task(_) => topology.tasks().iter().map(|it| it.name.as_str()).collect(),
            Target::Prefix(prefix) => {
                let tasks = topology.tasks().iter();
                let tasks = tasks.map(|it| it.name.as_str());
                if tasks.clone().any(|it| it.starts_with(prefix.as_str())) {
                    return Ok(());
                }
                tasks.flat_map(prefixes).collect()
            }
        };
        if names.contains(&name) {
            return Ok(());
        }
        Err(Error::Control(ControlError::Unknown(Box::new(
            UnknownName {
                tried: self.words().into(),
                what: match self.target {
                    Target::Prefix(_) => "task that begins with",
                    _ => self.target.kind(),
                },
                name: name.into(),
                near: near_miss(name, names.iter().copied()).map(Into::into),
                app: topology.app().into(),
            },
        ))))
    }

    /// How many rows stay in the tier to which an override led that has ended.
    async fn note_of_rows(&self, ended: Option<&ControlEntry>) -> Option<String> {
        let Setting::Override {
            tier: Some(tier), ..
        } = &ended?.setting
        else {
            return None;
        };
        let Control {
            topology, database, ..
        } = &self.control;
        let now = match self.control.list().await {
            Ok(now) => snapshot_of(topology, &now),
            Err(error) => {
                return Some(format!(
                    "how many rows stay in tier {tier} is not known: {error}"
                ));
            }
        };
        note_of_end(topology, database, &self.target, tier, &now).await
    }

    /// The tiers whose queue on the broker dead-letters what waits for too long, paused or not.
    fn notes_of_pause(&self, now: &[ControlEntry]) -> Vec<String> {
        let now = snapshot_of(&self.control.topology, now);
        let tiers = self.tiers(&now).into_iter();
        let notes = tiers.filter(|tier| tier.home.is_on_broker()).filter_map(|tier| {
            let (name, ttl) = (&tier.name, show_duration(tier.ttl?));
            Some(format!(
                "the broker goes on to dead-letter what waits in the queue of tier {name} for longer than its ttl of {ttl}"
            ))
        });
        notes.collect()
    }

    /// The other pauses that keep what was resumed, or a part of it, from starting.
    fn notes_of_resume(&self, now: &[ControlEntry]) -> Vec<String> {
        let topology = &self.control.topology;
        let overrides = snapshot_of(topology, now);
        let tiers = self.tiers(&overrides);
        let has = |name: &String| tiers.iter().any(|tier| tier.name == *name);
        let is_related = |target: &Target| match target {
            Target::Tier(tier) => has(tier),
            Target::Group(group) => topology
                .group(group)
                .is_some_and(|it| it.tiers.iter().any(has)),
            Target::Task(task) => {
                let mut of_task = tiers_of_task(topology, task, &overrides);
                of_task.any(|tier| has(&tier.name))
            }
            Target::Prefix(_) => false,
        };
        let is_sibling =
            |target: &Target| matches!((target, &self.target), (Target::Task(_), Target::Task(_)));
        let paused = now
            .iter()
            .filter(|it| it.setting == Setting::Pause && is_related(&it.target))
            .filter(|it| !is_sibling(&it.target));
        let notes = paused.map(|it| format!("{} is still paused, by {}", it.target, it.who));
        notes.collect()
    }

    /// What becomes of the limit of the map.
    fn notes_of_limit(&self, before: Option<&ControlEntry>, set: Option<&Limit>) -> Vec<String> {
        let topology = &self.control.topology;
        let of_map = match &self.target {
            Target::Tier(tier) => topology.tier(tier).and_then(|it| it.limit.as_ref()),
            Target::Task(task) => topology.task(task).and_then(|it| it.limit.as_ref()),
            _ => None,
        };
        let Some(of_map) = of_map else {
            return Vec::new();
        };
        let mut notes = vec![match set {
            Some(_) => format!("it replaces the limit of the map, {of_map}, for its time"),
            None => format!("the limit of the map is in force again: {of_map}"),
        }];
        let Some(per) = &of_map.per else {
            return notes;
        };
        let has_running = |limit: &Limit| limit.running.is_some();
        let before = match before.map(|it| &it.setting) {
            Some(Setting::Limit(before)) => before,
            _ => of_map,
        };
        if set.is_some_and(has_running) {
            notes.push(format!("running is for each {per}, as in the map"));
        }
        match (has_running(before), has_running(set.unwrap_or(of_map))) {
            (true, false) => notes.push(format!(
                "tasks of one {per} run beside each other now; when running is in force again, one more may start beside \
                 each that still runs"
            )),
            (false, true) => notes.push(format!(
                "what runs now is not counted: one more task of the same {per} may start beside each"
            )),
            _ => {}
        }
        notes
    }

    /// The tiers that the target has, or is in.
    fn tiers(&self, now: &Snapshot) -> Vec<&Tier> {
        let topology = &self.control.topology;
        match &self.target {
            Target::Tier(tier) => topology.tier(tier).into_iter().collect(),
            Target::Group(group) => {
                let tiers = topology.group(group).into_iter().flat_map(|it| &it.tiers);
                tiers.filter_map(|name| topology.tier(name)).collect()
            }
            Target::Task(task) => tiers_of_task(topology, task, now).collect(),
            Target::Prefix(_) => Vec::new(),
        }
    }

    pub(super) fn invalid(&self, problem: String) -> Error {
        Error::Control(ControlError::Invalid {
            tried: format!("{} {:?}", self.words(), self.target.name()).into(),
            problem: problem.into(),
        })
    }

    /// `pause tier`, `resume task`.
    fn words(&self) -> String {
        let verb = match &self.kind {
            Kind::Begin(Setting::Pause) => "pause",
            Kind::Begin(Setting::Limit(_)) => "limit",
            Kind::Begin(Setting::Override { .. }) => "override",
            Kind::End("pause") => "resume",
            Kind::End("limit") => "unlimit",
            Kind::End(_) => "end override of",
        };
        format!("{verb} {}", self.target.kind())
    }
}

impl Kind {
    fn as_str(&self) -> &'static str {
        match self {
            Kind::Begin(setting) => setting.kind(),
            Kind::End(kind) => kind,
        }
    }

    fn participle(&self) -> &'static str {
        match self.as_str() {
            "pause" => "paused",
            "limit" => "limited at run time",
            _ => "overridden",
        }
    }
}

impl IntoFuture for Change {
    type Output = Result<Changed, Error>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}

/// The tiers in which tasks of a name wait: that of the map, and the one to which an override sends them.
fn tiers_of_task<'t>(
    topology: &'t Topology,
    task: &str,
    now: &Snapshot,
) -> impl Iterator<Item = &'t Tier> {
    let of_map = topology.task(task).and_then(|it| topology.tier(&it.tier));
    let overridden = now.override_of(task).and_then(|it| it.tier.as_ref());
    let overridden = overridden.and_then(|tier| topology.tier(tier));
    let overridden = overridden.filter(|it| of_map.is_none_or(|of_map| of_map.name != it.name));
    of_map.into_iter().chain(overridden)
}

/// What is wrong with the time that a change is to last.
pub(super) fn check_length(length: Option<Duration>) -> Option<String> {
    let is_wrong = length.is_some_and(|it| it.is_zero() || it > LONGEST_TIME);
    is_wrong.then(|| "the time must be longer than zero and at most ten years".to_owned())
}

/// A name or a reason as it is kept: not too long, and without NUL, which Postgres refuses.
pub(super) fn kept(text: &str) -> String {
    let end = text.floor_char_boundary(LONGEST);
    text[..end].replace('\0', "\u{fffd}")
}
