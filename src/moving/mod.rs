//! Moves a tier from where its messages waited to where the map puts them now, without losing any.
//!
//! A tier with `formerly` in the map is moving. Its workers take from both places. [`Mover`] says how far the move is,
//! deletes what the broker had for the tier when nothing is left in it, and says when `formerly` can be removed. The
//! guide's page [changing a topology](crate::guide::changing_a_topology) has the steps in their order.
//!
//! `queue` deletes the queue that the tier had, `leftovers` what else the broker had for it.

mod leftovers;
mod queue;

use std::fmt;

use serde::Serialize;

use crate::Error;
use crate::amqp::Connection;
#[cfg(feature = "management")]
use crate::amqp::Management;
use crate::amqp::former::{Looked, look};
#[cfg(feature = "postgres")]
use crate::backlog::count_rows;
#[cfg(feature = "postgres")]
use crate::error::DatabaseError;
use crate::error::TopologyError;
#[cfg(feature = "postgres")]
use crate::postgres::Database;
use crate::topology::{Formerly, Names, Tier, Topology, near_miss};

/// Moves tiers; see [the module](self).
///
/// ```no_run
/// # async fn example() -> Result<(), tierline::Error> {
/// use tierline::amqp::Connection;
/// use tierline::moving::Mover;
///
/// let topology = tierline::Topology::load("topology.toml")?;
/// let connection = Connection::open("amqp://localhost", "move").await?;
/// let mover = Mover::new(&topology).broker(&connection);
/// for tier in mover.tiers() {
///     println!("{}", mover.dry_run(tier).await?);
/// }
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Mover<'a> {
    topology: &'a Topology,
    broker: Option<&'a Connection>,
    are_all_acknowledged: bool,
    #[cfg(feature = "management")]
    management: Option<&'a Management>,
    #[cfg(feature = "postgres")]
    database: Option<&'a Database>,
}

/// How far the move of a tier is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TierMove {
    /// The tier.
    pub tier: String,
    /// Where its messages waited, in words.
    pub from: String,
    /// Where they wait now.
    pub to: String,
    /// What the move consists of, in its order.
    pub steps: Vec<Step>,
}

/// One step of a move.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Step {
    /// How far it is.
    pub state: StepState,
    /// What was found or done.
    pub what: String,
    /// What to do about it; empty if there is nothing to do.
    pub help: String,
}

/// How far a step is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum StepState {
    /// It is as it should be, or was done now.
    Done,
    /// It can be done now: a dry run leaves it.
    Possible,
    /// It cannot be done yet: something would be lost.
    Waits,
}

/// Whether to change anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Look,
    Change,
}

impl<'a> Mover<'a> {
    /// Moves tiers of this map. What their homes need is still to be given.
    pub fn new(topology: &'a Topology) -> Self {
        Self {
            topology,
            broker: None,
            are_all_acknowledged: false,
            #[cfg(feature = "management")]
            management: None,
            #[cfg(feature = "postgres")]
            database: None,
        }
    }

    /// The broker, for tiers that are or were on it. The user needs the permission to configure what is deleted, and for
    /// [`run`](Self::run) also to bind and unbind the old queue: to write on it, and to read on its exchanges.
    pub fn broker(self, connection: &'a Connection) -> Self {
        Self {
            broker: Some(connection),
            ..self
        }
    }

    /// The broker's management API, which knows what workers and collectors hold and have not acknowledged. A queue is
    /// deleted only if that is nothing.
    #[cfg(feature = "management")]
    pub fn management(self, management: &'a Management) -> Self {
        Self {
            management: Some(management),
            ..self
        }
    }

    /// Deletes a queue also without the [management API](Self::management), which alone shows messages that a worker has
    /// not acknowledged after it cancelled its consumer, or that a collector has not logged. Call it only if no worker with
    /// the old map is shutting down, and no collector waits for its database: if one of them were killed after its queue is
    /// deleted, its last tasks or dead letters would be lost.
    pub fn assume_acknowledged(self) -> Self {
        Self {
            are_all_acknowledged: true,
            ..self
        }
    }

    /// The database, for tiers that are or were in Postgres.
    #[cfg(feature = "postgres")]
    pub fn database(self, database: &'a Database) -> Self {
        Self {
            database: Some(database),
            ..self
        }
    }

    /// The tiers that are moving: those with `formerly` in the map.
    pub fn tiers(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        let tiers = self.topology.tiers().iter();
        let moving = tiers.filter(|tier| tier.formerly.is_some());
        moving.map(|tier| tier.name.as_str())
    }

    /// Says how far the move of a tier is, and what [`run`](Self::run) would do now. Changes nothing.
    ///
    /// # Errors
    /// [`TopologyError::NotMoving`] for a tier without `formerly`; [`TopologyError::NoBroker`] and
    /// [`TopologyError::NoDatabase`] if a server was not given; as every use of the servers.
    pub async fn dry_run(&self, tier: &str) -> Result<TierMove, Error> {
        self.go(tier, Mode::Look).await
    }

    /// Does what can be done now, and says what cannot. Nothing is deleted that has messages or consumers, or of which
    /// consumers may hold messages; only a dead-letter queue may have consumers, because collectors stay. It may be run
    /// again at any time.
    ///
    /// If it is dropped on the way, or its process dies, run it again: the old queue may be unbound, so that messages which
    /// old processes publish to it are refused. A run binds the queue again unless it can delete it.
    ///
    /// # Errors
    /// As [`dry_run`](Self::dry_run).
    pub async fn run(&self, tier: &str) -> Result<TierMove, Error> {
        self.go(tier, Mode::Change).await
    }

    async fn go(&self, tier: &str, mode: Mode) -> Result<TierMove, Error> {
        let (tier, formerly) = self.find(tier)?;
        let names = self.topology.names();
        let mut moved = TierMove {
            tier: tier.name.clone(),
            from: former_home(&names, tier, formerly),
            to: home(&names, tier),
            steps: Vec::new(),
        };
        let arrived = self.new_home(tier).await?;
        let has_arrived = arrived.state == StepState::Done;
        moved.steps.push(arrived);
        match formerly {
            Formerly::Postgres => moved.steps.push(self.rows(tier).await?),
            Formerly::Queue { .. } if !has_arrived => {}
            Formerly::Queue { queue, generation } => {
                let old = self.former_queue(tier, queue, generation);
                moved.steps.push(old.end(mode).await?);
                let is_queue_gone = moved.is_over();
                let left = self.leftovers(tier, mode, is_queue_gone).await?;
                moved.steps.extend(left);
            }
        }
        Ok(moved)
    }

    fn find(&self, tier: &str) -> Result<(&'a Tier, Formerly), Error> {
        let found = self.topology.tier(tier);
        let formerly = found.and_then(|it| it.formerly);
        found.zip(formerly).ok_or_else(|| {
            let moving: Vec<_> = self.tiers().collect();
            let near = match found {
                Some(_) => None,
                None => near_miss(tier, self.topology.tiers().iter().map(|it| &*it.name)),
            };
            Error::Topology(TopologyError::NotMoving {
                tier: tier.into(),
                near: near.map(Into::into),
                moving: moving.join(", ").into(),
            })
        })
    }

    /// Whether messages can be stored where the tier is now.
    async fn new_home(&self, tier: &Tier) -> Result<Step, Error> {
        let place = home(&self.topology.names(), tier);
        if !tier.home.is_on_broker() {
            #[cfg(not(feature = "postgres"))]
            return Err(no_database(tier));
            #[cfg(feature = "postgres")]
            return match self.need_database(tier)?.check_backlog().await {
                Ok(()) => Ok(Step::done(format!("tables for {place} are there"))),
                Err(Error::Database(DatabaseError::NotMigrated { .. })) => Ok(Step::waits(
                    format!("tables for {place} are not there"),
                    "run `tierline migrate`, or start a process with this file, and run this again",
                )),
                Err(error) => Err(error),
            };
        }
        let queue = self.topology.names().queue(tier);
        let looked = look(self.need_broker(tier)?, &[queue]).await?;
        Ok(match looked.first() {
            Some(Looked::Found { .. }) => Step::done(format!("{place} is there")),
            Some(Looked::Unreachable) => Step::waits(
                format!("{place} cannot be reached"),
                "start its node, and run this again",
            ),
            Some(Looked::Missing) | None => Step::waits(
                format!("{place} is not there"),
                "apply the file (`tierline topology apply`), and run this again",
            ),
        })
    }

    /// The rows that a tier on the broker still has.
    #[cfg(feature = "postgres")]
    async fn rows(&self, tier: &Tier) -> Result<Step, Error> {
        let database = self.need_database(tier)?;
        let rows = count_rows(database, self.topology.app(), &tier.name).await?;
        if rows.all() == 0 {
            return Ok(Step::done("no row of it is left in Postgres".to_owned()));
        }
        Ok(Step::waits(
            format!(
                "in Postgres: {} ready, {} parked, {} scheduled and {} running tasks",
                rows.ready, rows.parked, rows.scheduled, rows.running
            ),
            "workers with this file take them; run this again when they are done. Delays of more than 27 minutes stay \
             rows: if the tier has such tasks all the time and its workers keep this database, or a relay runs, \
             formerly can be removed before",
        ))
    }

    #[cfg(not(feature = "postgres"))]
    async fn rows(&self, tier: &Tier) -> Result<Step, Error> {
        Err(no_database(tier))
    }

    fn need_broker(&self, tier: &Tier) -> Result<&'a Connection, Error> {
        self.broker.ok_or_else(|| {
            let tiers = tier.name.as_str().into();
            Error::Topology(TopologyError::NoBroker { tiers })
        })
    }

    #[cfg(feature = "postgres")]
    fn need_database(&self, tier: &Tier) -> Result<&'a Database, Error> {
        self.database.ok_or_else(|| no_database(tier))
    }
}

fn no_database(tier: &Tier) -> Error {
    let tiers = tier.name.as_str().into();
    Error::Topology(TopologyError::NoDatabase { tiers })
}

impl TierMove {
    /// Whether nothing is left to do: `formerly` can be removed from the map. What the tier shared with others may still be
    /// on the broker; a step names it.
    pub fn is_over(&self) -> bool {
        self.steps.iter().all(|step| step.state == StepState::Done)
    }

    /// Whether something cannot be done yet.
    pub fn waits(&self) -> bool {
        let mut steps = self.steps.iter();
        steps.any(|step| step.state == StepState::Waits)
    }
}

impl Step {
    fn done(what: String) -> Self {
        Self {
            state: StepState::Done,
            what,
            help: String::new(),
        }
    }

    fn possible(what: String) -> Self {
        Self {
            state: StepState::Possible,
            what,
            help: String::new(),
        }
    }

    /// It is as it should be, and leaves something to do by hand.
    fn done_with_help(what: String, help: String) -> Self {
        Self {
            help,
            ..Self::done(what)
        }
    }

    fn waits(what: String, help: &str) -> Self {
        Self {
            state: StepState::Waits,
            what,
            help: help.to_owned(),
        }
    }
}

fn home(names: &Names<'_>, tier: &Tier) -> String {
    match tier.home.queue_type() {
        Some(queue) => format!("the {} queue {}", queue.as_str(), names.queue(tier)),
        None => "rows in Postgres".to_owned(),
    }
}

fn former_home(names: &Names<'_>, tier: &Tier, formerly: Formerly) -> String {
    match formerly {
        Formerly::Postgres => "rows in Postgres".to_owned(),
        Formerly::Queue { queue, generation } => {
            let name = names.generation(&tier.name, generation);
            format!("the {} queue {name}", queue.as_str())
        }
    }
}

/// A number and what it counts: `1 message`, `2 messages`.
fn count(number: u64, what: &str) -> String {
    match number {
        1 => format!("1 {what}"),
        number => format!("{number} {what}s"),
    }
}

/// `1 message waits`, `2 messages wait`.
fn waiting(messages: u64) -> String {
    let verb = if messages == 1 { "waits" } else { "wait" };
    format!("{} {verb}", count(messages, "message"))
}

/// A line for the tier, one for each step, and what to do in the end.
impl fmt::Display for TierMove {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { tier, from, to, .. } = self;
        writeln!(out, "tier {tier}: from {from} to {to}")?;
        for step in &self.steps {
            writeln!(out, "  {}: {}", step.state, step.what)?;
            if !step.help.is_empty() {
                writeln!(out, "      help: {}", step.help)?;
            }
        }
        match (self.is_over(), self.waits()) {
            (true, _) => write!(
                out,
                "  the move is over: remove formerly from [tiers.{tier}] when no process has the old file"
            ),
            (false, true) => write!(out, "  the move is not over"),
            (false, false) => write!(out, "  `tierline topology move` can do this now"),
        }
    }
}

impl fmt::Display for StepState {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Done => "done",
            Self::Possible => "to do",
            Self::Waits => "waits",
        })
    }
}
