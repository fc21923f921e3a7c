//! `[tiers.NAME]`: one urgency, one queue or the rows of a table.

use std::ops::RangeInclusive;
use std::time::Duration;

use serde::Serialize;

use super::delay;
use super::formerly::{self, CHOICES, Formerly};
use super::limit::{self, Limit, Of};
use super::names::{self, Names, RESERVED_TIERS};
use super::promotion::{self, Promotion, RulePlace};
use super::reader::{At, Reader};
use super::slo;
use super::source::Source;

/// A tier: tasks of one urgency, in one queue with a dead-letter queue of its own, or as rows in Postgres.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Tier {
    /// The name in `[tiers.NAME]`: letters, digits, `_` and `-`.
    pub name: String,
    /// Where the tier's messages wait: the key `queue`, and the keys that only this kind of queue has. It has no
    /// default.
    pub home: Home,
    /// The share of slots in a weighted group, relative to the group's other tiers: 0.001 to 1000.
    /// Default `None`, which only a strict group allows.
    pub weight: Option<f64>,
    /// How soon a task of this tier should start. Measured, never enforced. Default `None`: best effort.
    pub slo: Option<Duration>,
    /// The share of tasks that should start within `slo`; it counts for nothing without one. See [`Tier::objective`].
    pub(super) objective: f64,
    /// How long a message may wait in the queue before it is dead-lettered. Default `None`: for ever.
    pub ttl: Option<Duration>,
    /// How many messages may wait, from 1; the next is refused. In Postgres they are counted now and then, so that
    /// the limit holds within a few percent. Default `None`: no limit.
    pub max_length: Option<u32>,
    /// Where a task of this tier goes when it has waited for too long; only in Postgres. Default `None`: it stays.
    pub promote: Option<Promotion>,
    /// How often its tasks may start, and how many may run, over all processes. Default `None`: as there are slots.
    pub limit: Option<Limit>,
    /// The field of the payload whose values take turns when several have tasks that wait, as a path into JSON objects such
    /// as `customer`; only in Postgres. Default `None`: the tasks start in their order.
    pub fair: Option<String>,
    /// Which queue in succession serves the tier, 1 to 9999; default 1. A queue's arguments cannot
    /// change, so a tier whose arguments do gets its next generation.
    pub generation: u32,
    /// Where the tier's messages waited before it moved, while some may still be there. Default `None`.
    pub formerly: Option<Formerly>,
    /// Whether the tier has delay queues, which every delay, retry and snooze above zero needs. Default true.
    ///
    /// Without them the broker has 14 queues, 15 exchanges and 30 bindings less. A publish with a delay is then an
    /// error, and so is a worker whose handlers of this tier have retries. A task that is in quarantine because its
    /// workers died runs there without a pause.
    pub delays: bool,
    /// The tier's dead-letter queue.
    pub dlq: DeadLetterQueue,
}

/// The place in which a tier's messages wait, with the settings that only this kind has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Home {
    /// `"classic"`: a classic queue on one node of the broker.
    Classic {
        /// The highest priority of a message, 1 to 255; default 10. `None` (0 in the file): all
        /// messages are equal, first in, first out.
        max_priority: Option<u8>,
    },
    /// `"quorum"`: a queue that the broker replicates to several nodes.
    Quorum {
        /// The highest priority of a message, 1 to 31, which needs RabbitMQ 4.3. Default `None`: all
        /// messages are equal, first in, first out.
        max_priority: Option<u8>,
        /// How often the broker delivers a message before it dead-letters it; default 100, because
        /// on many versions every return counts.
        delivery_limit: u32,
    },
    /// `"postgres"`: rows of a table in the app's database. The broker has nothing of this tier.
    Postgres {
        /// The highest priority of a message, 1 to 255; default 10. `None` (0 in the file): all
        /// messages are equal, first in, first out.
        max_priority: Option<u8>,
        /// How long a task that a process has claimed stays its own after the last heartbeat of that process; default
        /// 30 s. A process sends one every third of it.
        lease: Duration,
        /// How long finished tasks are kept as a history. Default `None`: they are not.
        keep: Option<Duration>,
    },
}

impl Home {
    /// The type of the tier's queue on the broker; `None` if it has none.
    pub fn queue_type(self) -> Option<QueueType> {
        match self {
            Home::Classic { .. } => Some(QueueType::Classic),
            Home::Quorum { .. } => Some(QueueType::Quorum),
            Home::Postgres { .. } => None,
        }
    }

    /// Whether the tier's messages wait on the broker.
    pub fn is_on_broker(self) -> bool {
        self.queue_type().is_some()
    }

    /// How long a claimed task stays with its process after its last heartbeat; `None` on the broker, which notices
    /// lost connections itself.
    pub fn lease(self) -> Option<Duration> {
        match self {
            Home::Classic { .. } | Home::Quorum { .. } => None,
            Home::Postgres { lease, .. } => Some(lease),
        }
    }

    /// How long finished tasks are kept as a history; `None`: they are not.
    pub fn keep(self) -> Option<Duration> {
        match self {
            Home::Classic { .. } | Home::Quorum { .. } => None,
            Home::Postgres { keep, .. } => keep,
        }
    }

    /// The highest priority of a message; `None`: all messages are equal.
    pub fn max_priority(self) -> Option<u8> {
        match self {
            Home::Classic { max_priority }
            | Home::Quorum { max_priority, .. }
            | Home::Postgres { max_priority, .. } => max_priority,
        }
    }

    /// How often the broker delivers a message before it dead-letters it; `None`: no limit.
    pub fn delivery_limit(self) -> Option<u32> {
        match self {
            Home::Classic { .. } | Home::Postgres { .. } => None,
            Home::Quorum { delivery_limit, .. } => Some(delivery_limit),
        }
    }
}

/// The type of a queue on the broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum QueueType {
    /// `"classic"`: on one node, with priorities on every version. Lost with its node's disk.
    Classic,
    /// `"quorum"`: replicated by Raft over the cluster's nodes.
    Quorum,
}

impl QueueType {
    const CHOICES: [(&'static str, QueueType); 2] = [
        ("classic", QueueType::Classic),
        ("quorum", QueueType::Quorum),
    ];

    /// The word that the file and `x-queue-type` use.
    pub fn as_str(self) -> &'static str {
        match self {
            QueueType::Classic => "classic",
            QueueType::Quorum => "quorum",
        }
    }

    /// Whether the queue survives the loss of one node's disk.
    pub fn is_replicated(self) -> bool {
        match self {
            QueueType::Classic => false,
            QueueType::Quorum => true,
        }
    }
}

/// `[tiers.NAME.dlq]`: the queue in which a tier's dead letters wait for the collector.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeadLetterQueue {
    /// Default quorum, because a dead letter is the last copy.
    pub queue: QueueType,
    /// The time after which the broker drops a dead letter that no collector took. Default 30 days.
    pub expiry: Duration,
}

impl Default for DeadLetterQueue {
    fn default() -> Self {
        Self {
            queue: QueueType::Quorum,
            expiry: Duration::from_secs(30 * 86_400),
        }
    }
}

impl Tier {
    /// The share of the tier's tasks that should start within [`slo`](Self::slo), 0.5 to 0.99999; default 0.99. The rest is
    /// the error budget, which alerts and dashboards count. `None` for a tier without `slo`.
    ///
    /// ```
    /// # let map = r#"
    /// # app = "hotel"
    /// # [tiers.critical]
    /// # queue = "classic"
    /// # slo = { start = "5s", objective = 0.999 }
    /// # [groups.all]
    /// # tiers = ["critical"]
    /// # concurrency = 1
    /// # [tasks]
    /// # "#;
    /// let topology = tierline::Topology::parse(map)?;
    /// let critical = topology.tier("critical").unwrap();
    /// assert_eq!(critical.objective(), Some(0.999));
    /// # Ok::<(), tierline::Error>(())
    /// ```
    pub fn objective(&self) -> Option<f64> {
        self.slo.map(|_| self.objective)
    }

    /// The priority that `wanted` becomes in this tier; `None` is a task that asks for nothing.
    pub(super) fn priority(&self, wanted: Option<u8>) -> u8 {
        match self.home.max_priority() {
            Some(highest) => wanted.unwrap_or(DEFAULT_PRIORITY).min(highest),
            None => UNORDERED_PRIORITY,
        }
    }

    /// The priority of a task that asks for none.
    #[cfg(feature = "postgres")]
    pub(crate) fn usual_priority(&self) -> u8 {
        self.priority(None)
    }

    /// The priorities that tasks of another tier may have in this one. The nearest of them is that of a task that moves
    /// here.
    pub(crate) fn priorities_from(&self, other: &Tier) -> RangeInclusive<u8> {
        match (other.home.max_priority(), self.home.max_priority()) {
            (Some(_), Some(highest)) => 0..=highest,
            // All tasks of the other tier are equal, or all of this one: each has the priority of a task that asks for none.
            _ => self.priority(None)..=self.priority(None),
        }
    }

    /// The generation of the queue that the tier had on the broker before it moved, if it had one.
    pub(crate) fn former_generation(&self) -> Option<u32> {
        self.formerly.and_then(Formerly::generation)
    }

    /// Whether workers take messages of the tier from the broker: it is there, or was before it moved.
    pub(crate) fn uses_broker(&self) -> bool {
        self.home.is_on_broker() || self.former_generation().is_some()
    }

    /// Whether messages of the tier are rows in Postgres, or may be left there since before it moved.
    pub(crate) fn uses_postgres(&self) -> bool {
        !self.home.is_on_broker() || self.formerly == Some(Formerly::Postgres)
    }
}

const DEFAULT_PRIORITY: u8 = 5;

/// The priority in tiers without priorities. A quorum queue of RabbitMQ 4.3 gives it to a message that
/// has none, and it is the highest that 4.0 to 4.2 treat as normal. All messages have the same, so the
/// order stays when the broker is upgraded under waiting messages.
pub(crate) const UNORDERED_PRIORITY: u8 = 4;

/// The word of `queue` for a tier that has no queue on the broker.
pub(super) const POSTGRES: &str = "postgres";
const CLASSIC_PRIORITIES: RangeInclusive<u8> = 0..=255;
const QUORUM_PRIORITIES: RangeInclusive<u8> = 1..=31;
const DEFAULT_CLASSIC_PRIORITIES: u8 = 10;
const WEIGHTS: RangeInclusive<f64> = 0.001..=1000.0;
pub(super) const GENERATIONS: RangeInclusive<u32> = 1..=9_999;
const COUNTS: RangeInclusive<u32> = 1..=i32::MAX as u32;
const DEFAULT_DELIVERY_LIMIT: u32 = 100;
/// A shorter lease would end in a pause of the process or the database.
const LEASES: RangeInclusive<Duration> = Duration::from_secs(2)..=Duration::from_secs(86_400);
/// The lease of a tier whose table does not say one, and of rows of a tier on the broker.
pub(crate) const DEFAULT_LEASE: Duration = Duration::from_secs(30);
const KEEPS: RangeInclusive<Duration> =
    Duration::from_secs(1)..=Duration::from_secs(3_650 * 86_400);

/// RabbitMQ's timers end at 2^32 - 1 ms, some hours after day 49.
pub(super) const TIMES: RangeInclusive<Duration> =
    Duration::from_millis(1)..=Duration::from_secs(49 * 86_400);

pub(super) fn read(root: &mut Reader<'_>, app: Option<&str>) -> Vec<At<Tier>> {
    let Some(section) = root.table("tiers") else {
        return Vec::new();
    };
    if section.entries().is_empty() {
        let help =
            "write [tiers.NAME] and queue = \"quorum\", \"classic\" or \"postgres\" below it";
        let message = "[tiers] is empty, and every task needs a tier";
        section.source().report(section.span(), message, Some(help));
    }
    let (mut tiers, mut rules) = (Vec::new(), Vec::new());
    for (name, table) in section.tables() {
        let (tier, rule) = read_tier(name.get_ref(), table);
        check_name(&name, tier.generation, app, section.source());
        rules.extend(rule.map(|place| (tier.name.clone(), place)));
        tiers.push(At::new(name.span(), tier));
    }
    promotion::check(&tiers, &rules, section.source());
    tiers
}

/// A tier, and the place of its `promote` in the file.
fn read_tier(name: &str, mut table: Reader<'_>) -> (Tier, Option<RulePlace>) {
    let home = read_home(&mut table);
    let (promote, rule) = promotion::read(&mut table, home).unzip();
    let (slo, objective) = slo::read(&mut table);
    let generation = table.integer("generation", GENERATIONS).unwrap_or(1);
    let tier = Tier {
        name: name.to_owned(),
        home,
        // A wrong weight is reported once, and not again as missing.
        weight: table
            .number("weight", WEIGHTS)
            .or(table.has("weight").then_some(1.0)),
        slo,
        objective,
        ttl: table.duration("ttl", TIMES),
        max_length: table.integer("max_length", COUNTS),
        promote,
        limit: limit::read(&mut table, Of::Tier),
        fair: limit::read_fair(&mut table, home),
        generation,
        formerly: formerly::read(&mut table, home, generation),
        delays: table.boolean("delays").unwrap_or(true),
        dlq: read_dlq(&mut table),
    };
    let how = "write queue = \"quorum\" (replicated), \"classic\" (one node, priorities) or \"postgres\" (rows)";
    if !tier.home.is_on_broker() {
        reject_broker_keys(&table);
    }
    table.finish(&[("queue", how)]);
    (tier, rule)
}

fn read_home(table: &mut Reader<'_>) -> Home {
    let default_classic = Some(DEFAULT_CLASSIC_PRIORITIES);
    let home = table.choice("queue", &CHOICES);
    if home.is_some_and(|queue| queue != Some(QueueType::Quorum)) {
        reject_delivery_limit(table);
    }
    if let Some(Some(_)) = home {
        reject_postgres_keys(table);
    }
    match home {
        Some(Some(QueueType::Classic)) => Home::Classic {
            max_priority: read_max_priority(table, CLASSIC_PRIORITIES, default_classic),
        },
        Some(Some(QueueType::Quorum)) => Home::Quorum {
            max_priority: read_max_priority(table, QUORUM_PRIORITIES, None),
            delivery_limit: read_delivery_limit(table),
        },
        Some(None) => Home::Postgres {
            max_priority: read_max_priority(table, CLASSIC_PRIORITIES, default_classic),
            lease: table.duration("lease", LEASES).unwrap_or(DEFAULT_LEASE),
            keep: table.duration("keep", KEEPS),
        },
        // A wrong queue type is reported once, and not again for each key that only some types have.
        None => {
            let _ = table.duration("lease", LEASES);
            let _ = table.duration("keep", KEEPS);
            Home::Quorum {
                max_priority: read_max_priority(table, CLASSIC_PRIORITIES, Some(u8::MAX)),
                delivery_limit: read_delivery_limit(table),
            }
        }
    }
}

fn read_max_priority(
    table: &mut Reader<'_>,
    range: RangeInclusive<u8>,
    default: Option<u8>,
) -> Option<u8> {
    table
        .integer("max_priority", range)
        .or(match table.has("max_priority") {
            true => Some(u8::MAX),
            false => default,
        })
        // Zero in the file is a classic tier without priorities.
        .filter(|highest| *highest > 0)
}

fn read_delivery_limit(table: &mut Reader<'_>) -> u32 {
    let limit = table.integer("delivery_limit", COUNTS);
    limit.unwrap_or(DEFAULT_DELIVERY_LIMIT)
}

fn reject_delivery_limit(table: &mut Reader<'_>) {
    if table.integer("delivery_limit", COUNTS).is_some() {
        let what = table.what();
        table.reject(
            "delivery_limit",
            format!("delivery_limit in {what} is for quorum queues, and this tier has none"),
            Some("only a quorum queue counts deliveries; remove it or set queue = \"quorum\""),
        );
    }
}

/// Refuses the keys of a Postgres tier that RabbitMQ has no use for.
fn reject_postgres_keys(table: &mut Reader<'_>) {
    let keys = [
        (
            "lease",
            LEASES,
            "the broker notices lost connections itself",
        ),
        (
            "keep",
            KEEPS,
            "a queue forgets a message that is acknowledged",
        ),
    ];
    for (key, range, why) in keys {
        if table.duration(key, range).is_some() {
            let what = table.what();
            let message =
                format!("{key} in {what} is for tiers in Postgres, and this tier is on the broker");
            let help = format!("{why}; remove it or set queue = \"postgres\"");
            table.reject(key, message, Some(&help));
        }
    }
}

/// Refuses the keys of a tier on the broker that Postgres has no use for.
fn reject_broker_keys(table: &Reader<'_>) {
    let keys = [
        ("generation", "rows have no arguments that could change"),
        ("delays", "every tier in Postgres has delays"),
        (
            "dlq",
            "its dead letters go to the log in the same transaction",
        ),
    ];
    for (key, why) in keys {
        if table.has(key) {
            let what = table.what();
            let message = format!(
                "{key} in {what} is for queues on the broker, and this tier is in Postgres"
            );
            table.reject(key, message, Some(&format!("remove it: {why}")));
        }
    }
}

fn read_dlq(tier: &mut Reader<'_>) -> DeadLetterQueue {
    let mut dlq = DeadLetterQueue::default();
    if let Some(mut table) = tier.table("dlq") {
        dlq.queue = table
            .choice("queue", &QueueType::CHOICES)
            .unwrap_or(dlq.queue);
        dlq.expiry = table.duration("expiry", TIMES).unwrap_or(dlq.expiry);
        table.finish(&[]);
    }
    dlq
}

fn check_name(name: &At<&str>, generation: u32, app: Option<&str>, source: &Source<'_>) {
    let tier = *name.get_ref();
    let longest_name = Names::new(app.unwrap_or_default()).delay_out(tier).len();
    let key = names::routing_key(tier, generation);
    let longest = longest_name.max(delay::routing_key(&key, 0).len());
    if let Some((message, help)) = names::mistake("tier", tier, longest) {
        source.report(&name.span(), message, Some(&help));
    } else if RESERVED_TIERS.contains(&tier) {
        let message = format!("a tier may not be called {tier:?}: tierline uses the name itself");
        let help = format!("choose another; {} are taken", RESERVED_TIERS.join(", "));
        source.report(&name.span(), message, Some(&help));
    }
}
