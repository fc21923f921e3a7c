//! The map: one file of tiers, groups, tasks and schedules, parsed and validated, and the plan that
//! follows from it.
//!
//! All of it is pure: [`Topology::load`] reads the file, and nothing here talks to a broker.
//! A topology and the broker's [`Version`] make a
//! [`Plan`](plan::Plan), the declarations as data.
//!
//! # The file
//! ```toml
#![doc = include_str!("../../topology/minimal.toml")]
//! ```
//!
//! | key | meaning | values | default |
//! |---|---|---|---|
//! | `app` | first part of every name on the broker | letters, digits, `_`, `-` | required |
//! | **`[broker]`** | settings of the broker that a client cannot query | | |
//! | `ack_timeout` | how long the broker waits for an acknowledgement | `"1s"` to `"365d"` | `"30m"` |
//! | `max_message_size` | the largest message the broker takes | `"1KiB"` to `"512MiB"` | `"16MiB"` |
//! | `long_delays` | whether delays of more than 27 minutes wait in the broker although the app has a database; see below | `true`, `false` | `false` |
//! | **`[tiers.NAME]`** | one urgency, one queue or the rows of a table | at least one tier | |
//! | `queue` | where the tier's messages wait: in a queue of this type, or as rows in Postgres | `"classic"`, `"quorum"`, `"postgres"` | required |
//! | `max_priority` | the highest priority of a message | classic and postgres 0 (all are equal) to 255; quorum 1 to 31, from RabbitMQ 4.3 | classic and postgres 10; quorum none |
//! | `weight` | share of slots in a weighted group | 0.001 to 1000 | none |
//! | `slo` | how soon a task should start, and which share of the tasks has to; measured, not enforced | `"1ms"` to `"49d"`, or `{ start = "5s", objective = 0.999 }` with `objective` from 0.5 to 0.99999, by default 0.99 | best effort |
//! | `ttl` | how long a message may wait before it is dead-lettered | `"1ms"` to `"49d"` | for ever |
//! | `max_length` | how many messages may wait; the next is refused | 1 to 2147483647 | no limit |
//! | `delivery_limit` | deliveries before a message is dead-lettered; quorum only | 1 to 2147483647 | 100 |
//! | `lease` | how long a claimed task stays with its process after its last heartbeat; postgres only | `"2s"` to `"24h"` | `"30s"` |
//! | `keep` | how long finished tasks are kept as a history; postgres only | `"1s"` to `"3650d"` | not at all |
//! | `promote` | where a task goes that has waited for too long; postgres only. See the guide's page on aging and escalation | `{ after = "60m", to = "TIER" }`, with `after` from `"1s"` to `"365d"` | it stays |
//! | `limit` | how often its tasks may start, and how many may run; see below | `{ rate = "100/m", burst = 20, running = 4 }` | as there are slots |
//! | `fair` | the field of the payload whose values take turns when several have tasks that wait; postgres only | a path such as `"customer"` | tasks start in their order |
//! | `generation` | which queue in succession serves the tier; not postgres | 1 to 9999 | 1 |
//! | `formerly` | where the tier's messages waited before it moved; workers take from there too | `"classic"`, `"quorum"`, `"postgres"`, or `{ queue = "quorum", generation = 2 }` | it has not moved |
//! | `delays` | whether the tier has delay queues, which delays, retries and snoozes need; not postgres, which always has delays | `true`, `false` | `true` |
//! | `dlq.queue` | the type of the dead-letter queue; not postgres, whose dead letters go to the log at once | `"classic"`, `"quorum"` | `"quorum"` |
//! | `dlq.expiry` | after how long an uncollected dead letter is dropped; not postgres | `"1ms"` to `"49d"` | `"30d"` |
//! | **`[groups.NAME]`** | the tiers that one pool serves | every tier in exactly one group | |
//! | `tiers` | names of tiers; in a strict group the first comes first | at least one | required |
//! | `order` | which tier a free slot takes from | `"strict"`, `"weighted"` | `"strict"` |
//! | `concurrency` | tasks that a process runs at once | 1 to 65535 | required |
//! | `prefetch` | messages of a tier held per slot, the running one included | 1 to 65535, times `concurrency` at most 65535 | 1 |
//! | **`[tasks]`** | the one tier of every task | required, may be empty | |
//! | `"NAME"` | `"tier"`, or `{ tier = "tier", priority = 9, limit = { rate = "100/m" } }` | priority 0 to the tier's `max_priority` | priority: see below |
//! | **`[schedules.NAME]`** | a task that comes due by itself | | |
//! | `task` | the task to publish | a name in `[tasks]` | required |
//! | `cron` | when: minute, hour, day, month, weekday, with the second before them if there are six | a cron expression that fits some day | this or `every` |
//! | `timezone` | whose clock `cron` goes by | a name of the IANA database | `"UTC"` |
//! | `every` | when: again and again after this time | `"1s"` to `"366d"` | this or `cron` |
//! | `payload` | the payload of every run | any value | `null` |
//! | `expires` | how long after its due time a run is worth running | `"1s"` to the shortest time between two runs, or a minute | required |
//! | `missed` | what becomes of runs that came due while no scheduler ran | `"skip"`, `"once"` | `"skip"` |
//!
//! Durations are numbers with units (`ms`, `s`, `m`, `h`, `d`, `w`) or words for these, in whole milliseconds:
//! `"100ms"`, `"1h30m"`, `"5 sec"`; see [`IntoDuration`](crate::task::IntoDuration). Sizes are one number with `B`, `KiB`, `MiB` or `GiB`. A key that is not in this table
//! is an error. All the mistakes of a file are reported at once, each with its line and column.
//!
//! # Limits
//! A tier and a task may have a `limit`, with at least one of `rate` and `running`. Where both have one, both hold. An
//! operator may replace it while the app runs, with [`Control`](crate::control).
//!
//! | key of `limit` | meaning | values | default |
//! |---|---|---|---|
//! | `rate` | how often tasks start: in any time T, at most the rate times T, and `burst` more | `"100/m"`, `"0.5/s"`, `"5/10s"`: from one in a year to 1,000,000 in a second | no limit |
//! | `burst` | how many may start at once after a rest; with `rate` only | 1 to 1000000 | what the rate gives in one second, rounded up |
//! | `running` | how many may run at a time; with `per`, of each key | 1 to 1000000 | no limit |
//! | `per` | the field of the payload whose values are the keys that `running` is for; tasks only | a path into JSON objects, such as `"customer"` or `"order.customer"` | `running` is for all |
//! | `scope` | whether it holds for all processes of the app together, which needs the database, or for each by itself | `"app"`, `"process"` | `"app"` |
//!
//! `rate` and `burst` are always those of the whole tier or task. A tier at its limit starts nothing and holds up no
//! other tier of its group; its messages stay where they are. The tasks of a task at its limit wait as rows in Postgres,
//! so the limit of a task, unlike that of a tier, needs the database with every `scope`.
//!
//! # Long delays
//! A tier on the broker has delay queues of its own for delays of up to 27 minutes, for publishes, retries and
//! snoozes alike. Where longer ones wait depends on what the process has that sends the task:
//!
//! | the process | `long_delays` | up to 30 days | above |
//! |---|---|---|---|
//! | has a database ([`Builder::postgres`](crate::Builder)) | `false` | a row of the tier | a row of the tier |
//! | has a database | `true` | in queues that all tiers share | a row of the tier |
//! | has none | either | in queues that all tiers share | refused: [`DelayTooLong`](crate::error::PublishError::DelayTooLong) |
//!
//! A row needs somebody who takes it when it is due: a worker of its tier with the same database, or else a relay,
//! which publishes it to the tier's queue. So an app whose publishers have a database and whose workers have none runs
//! a relay, or sets `long_delays = true`.
//!
//! The shared queues, `{app}.delay.long.14` to `.24`, are declared by processes without a database, and with
//! `long_delays = true` by all. If a process without a database declares nothing ([`OnConnect`](crate::OnConnect)) and
//! they are missing, a publish with a long delay is [`NoLongDelays`](crate::error::PublishError::NoLongDelays). If they
//! are there from before, what is in them reaches its tier as ever, and the doctor says which of them can be deleted.
//!
//! # Priorities
//! The broker delivers messages with a higher priority first. The range of priorities, and the default
//! priority of a task, depend on the tier's queue:
//!
//! | the tier | its priorities | the priority of a task that names none |
//! |---|---|---|
//! | `queue = "classic"` | 0 to 10 | 5 |
//! | the same with `max_priority = N` | 0 to N | 5, or N where that is lower |
//! | the same with `max_priority = 0` | none: first in, first out | 4, which orders nothing |
//! | `queue = "postgres"` | as classic | as classic |
//! | `queue = "quorum"` | none: first in, first out | 4, which orders nothing |
//! | the same with `max_priority = N`, which needs RabbitMQ 4.3 | 0 to N | 5, or N where that is lower |
//!
//! A priority that its tier does not have is a mistake in the file, and an error when publishing. In a tier
//! without priorities every message carries 4: RabbitMQ 4.3 takes that for a message of a quorum queue that has
//! none, and it is the highest that 4.0 to 4.2 treat as normal there. So the order stays when the broker is
//! upgraded under waiting messages. On RabbitMQ 4.0 to 4.2 a delayed message carries at most 4, since it waits in
//! quorum queues. A producer without tierline must set the priority itself: the broker takes a missing one for 0
//! in a classic queue.

mod broker;
pub mod delay;
pub(crate) mod duration;
pub(crate) mod error;
pub mod export;
mod file;
mod formerly;
mod group;
pub(crate) mod limit;
mod names;
pub mod plan;
pub mod problem;
mod promotion;
mod reader;
pub(crate) mod schedule;
mod slo;
mod source;
mod task;
mod tier;
pub(crate) mod timing;
mod units;
mod version;

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

pub use broker::BrokerSettings;
pub use formerly::Formerly;
pub use group::{Group, Order};
pub use limit::{InvalidRate, Limit, LimitScope, Rate};
pub use names::Names;
pub use promotion::Promotion;
pub(crate) use reader::near_miss;
pub use schedule::{Missed, Schedule};
pub use task::MappedTask;
#[cfg(feature = "postgres")]
pub(crate) use tier::DEFAULT_LEASE;
pub(crate) use tier::UNORDERED_PRIORITY;
pub use tier::{DeadLetterQueue, Home, QueueType, Tier};
pub use timing::Timing;
#[cfg(feature = "admin")]
pub(crate) use units::DURATION_PATTERN;
#[cfg(feature = "postgres")]
pub(crate) use units::parse_duration;
#[cfg(feature = "postgres")]
pub(crate) use units::show_duration;
pub use version::{MINIMUM_VERSION, QUORUM_PRIORITIES_SINCE, Version};

use crate::Error;
use crate::error::TopologyError;
use file::Content;

/// The largest topology file, in bytes: room for some 80,000 tasks.
pub const MAX_FILE_SIZE: usize = 4 << 20;

/// A validated topology: the tiers, groups, tasks and schedules of one file.
///
/// It cannot change and is cheap to clone: all clones share one copy.
///
/// ```
/// # use tierline::Topology;
/// let topology = Topology::parse(r#"
///     app = "hotel"
///     [tiers.critical]
///     queue = "classic"
///     [groups.urgent]
///     tiers = ["critical"]
///     concurrency = 8
///     [tasks]
///     "email.send_otp" = "critical"
/// "#)?;
/// let task = topology.task("email.send_otp").unwrap();
/// assert_eq!((task.tier.as_str(), task.priority), ("critical", 5));
/// # Ok::<(), tierline::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Topology {
    content: Arc<Content>,
}

impl Topology {
    /// Reads and checks the file at `path`.
    ///
    /// # Errors
    /// [`TopologyError::Unreadable`] if it cannot be read, [`TopologyError::Invalid`] with every mistake
    /// if it contains any or is larger than [`MAX_FILE_SIZE`].
    pub fn load(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let read = || {
            let mut content = Vec::new();
            // One byte more tells a file that is too large without reading all of it.
            File::open(path)?
                .take(MAX_FILE_SIZE as u64 + 1)
                .read_to_end(&mut content)?;
            Ok(content)
        };
        let content = read().map_err(|cause| {
            Error::Topology(TopologyError::Unreadable {
                path: path.to_owned(),
                cause,
            })
        })?;
        Self::parse_named(&path.to_string_lossy(), content)
    }

    /// Checks the text of a file, which messages then call `<text>`.
    ///
    /// # Errors
    /// [`TopologyError::Invalid`] with every mistake.
    pub fn parse(text: impl AsRef<[u8]>) -> Result<Self, Error> {
        Self::parse_named("<text>", text)
    }

    /// Checks the text of a file, which messages then call `file`.
    ///
    /// # Errors
    /// [`TopologyError::Invalid`] with every mistake.
    pub fn parse_named(file: &str, text: impl AsRef<[u8]>) -> Result<Self, Error> {
        file::parse(file, text.as_ref())
            .map(|content| Self {
                content: Arc::new(content),
            })
            .map_err(|invalid| Error::Topology(TopologyError::Invalid(Box::new(invalid))))
    }

    /// The app's name, the first part of every name on the broker.
    pub fn app(&self) -> &str {
        &self.content.app
    }

    /// The names of everything that the app has on the broker.
    pub fn names(&self) -> Names<'_> {
        Names::new(self.app())
    }

    /// The settings of the broker in the file.
    pub fn broker(&self) -> &BrokerSettings {
        &self.content.broker
    }

    /// The tiers, in the order of the file.
    pub fn tiers(&self) -> &[Tier] {
        &self.content.tiers
    }

    /// The tier of that name.
    pub fn tier(&self, name: &str) -> Option<&Tier> {
        self.tiers().iter().find(|tier| tier.name == name)
    }

    /// The tiers whose messages wait in queues of the broker.
    pub fn broker_tiers(&self) -> impl Iterator<Item = &Tier> + Clone {
        self.tiers().iter().filter(|tier| tier.home.is_on_broker())
    }

    /// The tiers whose messages wait as rows in Postgres.
    pub fn postgres_tiers(&self) -> impl Iterator<Item = &Tier> + Clone {
        self.tiers().iter().filter(|tier| !tier.home.is_on_broker())
    }

    /// The tiers of which workers take messages from the broker: those on it, and those that were before they moved. An app
    /// whose map has none of them needs no broker.
    pub fn tiers_using_broker(&self) -> impl Iterator<Item = &Tier> + Clone {
        self.tiers().iter().filter(|tier| tier.uses_broker())
    }

    /// The tiers of which workers take rows: those in Postgres, and those that were before they moved. An app whose map has
    /// any of them needs a database.
    pub fn tiers_using_postgres(&self) -> impl Iterator<Item = &Tier> + Clone {
        self.tiers().iter().filter(|tier| tier.uses_postgres())
    }

    /// Whether processes need the tables from the beginning: tiers live there, or limits are divided there, or tasks that
    /// have a limit wait there.
    #[cfg(feature = "postgres")]
    pub(crate) fn needs_tables(&self) -> bool {
        let mut tiers = self.tiers().iter().filter_map(|tier| tier.limit.as_ref());
        self.tiers_using_postgres().next().is_some()
            || tiers.any(Limit::needs_database)
            || self.tasks().iter().any(|task| task.limit.is_some())
    }

    /// Whether the messages of this tier wait on the broker.
    pub(crate) fn is_on_broker(&self, tier: &str) -> bool {
        self.tier(tier).is_some_and(|tier| tier.home.is_on_broker())
    }

    /// Whether a process with or without a database has the delays that are longer than a tier's own delay queues reach
    /// in queues of the broker. In a map with tiers in Postgres every process has a database.
    pub(crate) fn has_long_delay_queues(&self, has_database: bool) -> bool {
        let has_database = has_database || self.tiers_using_postgres().next().is_some();
        self.broker().long_delays || !has_database
    }

    /// Which of a cluster's nodes the queues of a tier are declared through, and its clients connect to first: the tier's
    /// place among those of the broker, counted round the addresses of the nodes.
    pub(crate) fn share_of(&self, tier: &str) -> usize {
        let place = self.broker_tiers().position(|it| it.name == tier);
        place.unwrap_or_default()
    }

    /// The groups, in the order of the file.
    pub fn groups(&self) -> &[Group] {
        &self.content.groups
    }

    /// The group of that name.
    pub fn group(&self, name: &str) -> Option<&Group> {
        self.groups().iter().find(|group| group.name == name)
    }

    #[cfg(any(feature = "postgres", feature = "prometheus"))]
    /// The group that serves a tier.
    pub(crate) fn group_of(&self, tier: &str) -> Option<&Group> {
        let mut groups = self.groups().iter();
        groups.find(|group| group.tiers.iter().any(|it| it == tier))
    }

    /// Whether a message of a tier could wait prefetched, and then run for as long as its timeout allows, for longer than
    /// the broker waits for its acknowledgement. A lease is extended for as long as it takes. But a task from the queue of
    /// before a move has none.
    pub(crate) fn reaches_ack_timeout(
        &self,
        timeout: Duration,
        group: &Group,
        tier: &Tier,
    ) -> bool {
        let in_hand = timeout.saturating_mul(group.prefetch.into());
        tier.uses_broker() && in_hand >= self.broker().ack_timeout
    }

    /// Every task with its tier, in the order of the file.
    pub fn tasks(&self) -> &[MappedTask] {
        &self.content.tasks
    }

    /// The schedules, in the order of the file.
    pub fn schedules(&self) -> &[Schedule] {
        &self.content.schedules
    }

    /// The schedule of that name.
    ///
    /// # Errors
    /// [`TopologyError::UnknownSchedule`], with the name that was probably meant.
    pub fn schedule(&self, name: &str) -> Result<&Schedule, Error> {
        let found = self
            .schedules()
            .iter()
            .find(|schedule| schedule.name == name);
        found.ok_or_else(|| {
            let names = self
                .schedules()
                .iter()
                .map(|schedule| schedule.name.as_str());
            Error::Topology(TopologyError::UnknownSchedule {
                schedule: name.into(),
                near: near_miss(name, names).map(Into::into),
            })
        })
    }

    /// The task of that name. `None`: the map does not have it, so it can be neither published nor
    /// run.
    pub fn task(&self, name: &str) -> Option<&MappedTask> {
        let index = self.content.task_index.get(name)?;
        self.content.tasks.get(*index)
    }
}
