//! The declarations that make a broker match the file, as data.
//!
//! The order is stable, and such that everything is declared before it is used: exchanges, queues,
//! then bindings. Print a [`Plan`] for a table, serialise it for JSON.
//!
//! ```
//! # use tierline::topology::plan::Plan;
//! let topology = tierline::Topology::load("topology/minimal.toml")?;
//! let plan = Plan::new(&topology, "4.3.6".parse()?, false)?;
//! assert_eq!(plan.exchanges[0].name, "shop.tasks");
//! assert_eq!(plan.tasks["email.send_receipt"].routing_key, "default");
//! # Ok::<(), tierline::Error>(())
//! ```

mod table;

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use super::delay::Level;
use super::tier::{Home, QueueType, Tier};
use super::{Names, Topology, Version};
use crate::Error;
use crate::error::BrokerError;

/// All the declarations of one topology, and the exchange, routing key and priority of every task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Plan {
    /// The app that all of it belongs to.
    pub app: String,
    /// The exchanges; all names begin with `{app}.`.
    pub exchanges: Vec<Exchange>,
    /// The queues; all names begin with `{app}.`.
    pub queues: Vec<Queue>,
    /// The bindings between them.
    pub bindings: Vec<Binding>,
    /// How to publish each task of a tier on the broker, for producers in any language.
    pub tasks: BTreeMap<String, PublishTarget>,
}

/// An exchange to declare.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Exchange {
    /// Its name.
    pub name: String,
    /// How it routes.
    #[serde(rename = "type")]
    pub kind: ExchangeKind,
    /// Whether it survives a restart of the broker: always.
    pub durable: bool,
    /// Whether the broker deletes it when it is no longer used: never.
    pub auto_delete: bool,
    /// Its arguments.
    pub arguments: Arguments,
}

/// How an exchange routes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ExchangeKind {
    /// By the exact routing key.
    Direct,
    /// By patterns over the words of the routing key.
    Topic,
    /// By the message's headers.
    Headers,
    /// To everything that is bound.
    Fanout,
}

impl ExchangeKind {
    /// The word that AMQP uses.
    pub fn as_str(self) -> &'static str {
        match self {
            ExchangeKind::Direct => "direct",
            ExchangeKind::Topic => "topic",
            ExchangeKind::Headers => "headers",
            ExchangeKind::Fanout => "fanout",
        }
    }
}

/// A queue to declare.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Queue {
    /// Its name.
    pub name: String,
    /// Whether it survives a restart of the broker: always.
    pub durable: bool,
    /// Whether the broker deletes it when it is no longer used: never.
    pub auto_delete: bool,
    /// Its arguments, always with `x-queue-type`.
    pub arguments: Arguments,
    /// Queues of one share belong on one node of a cluster: those of the map's first tier are share 0, of the second
    /// share 1, and so on.
    #[serde(skip)]
    pub(crate) share: usize,
}

/// A binding to declare.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Binding {
    /// The exchange that messages come from.
    pub source: String,
    /// The queue or exchange that they go to.
    pub destination: String,
    /// Which of the two it is.
    pub destination_type: DestinationType,
    /// The key or pattern; empty if the source ignores it.
    pub routing_key: String,
    /// Its arguments.
    pub arguments: Arguments,
}

/// The kind of object that a binding leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DestinationType {
    /// A queue.
    Queue,
    /// Another exchange.
    Exchange,
}

/// Arguments of a declaration, by name.
pub type Arguments = BTreeMap<String, Argument>;

/// The value of an argument.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Argument {
    /// A number, sent with 64 bits: a TTL of 30 days does not fit in 32.
    Int(i64),
    /// A text.
    Text(String),
}

/// How to publish a task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PublishTarget {
    /// The tier that the task runs in.
    pub tier: String,
    /// The exchange to publish to.
    pub exchange: String,
    /// The routing key to publish with.
    pub routing_key: String,
    /// The priority to set on the message. Always set it: what the broker takes for a message
    /// without one differs by queue type and version.
    pub priority: u8,
}

impl Plan {
    /// Plans `topology` for a broker of this version, and for processes with or without a database: with one, long
    /// delays are rows, and [need no queues](super#long-delays) unless the map has `long_delays = true`.
    ///
    /// The declarations are the same on every version; the version only decides whether the
    /// broker has what the file asks for.
    ///
    /// # Errors
    /// [`BrokerError::UnsupportedVersion`]; [`BrokerError::UnsupportedPriorities`] for a quorum tier with priorities on a broker before 4.3.
    pub fn new(topology: &Topology, broker: Version, has_database: bool) -> Result<Self, Error> {
        let broker = broker.supported()?;
        let names = topology.names();
        let mut plan = Self {
            app: topology.app().to_owned(),
            exchanges: Vec::new(),
            queues: Vec::new(),
            bindings: Vec::new(),
            tasks: BTreeMap::new(),
        };
        plan.exchange(names.tasks_exchange(), ExchangeKind::Direct, []);
        let tiers = || topology.broker_tiers().enumerate();
        for (share, tier) in tiers() {
            check_priorities(tier, broker)?;
            plan.tier(&names, tier, share);
        }
        for group in topology.groups() {
            // With the first tier of the group, so that the node of another one does not stop it.
            let mut queues = group
                .tiers
                .iter()
                .filter(|tier| topology.tier(tier).is_some_and(Tier::uses_broker));
            if let Some(first) = queues.next() {
                plan.quarantine(&names, &group.name, topology.share_of(first));
            }
        }
        let of_no_tier = tiers().count();
        plan.unrouted(&names, of_no_tier);
        let delayed = tiers().filter(|(_, it)| it.delays);
        if delayed.clone().next().is_some() && topology.has_long_delay_queues(has_database) {
            plan.long_ladder(&names, delayed.clone().map(|(_, tier)| tier), of_no_tier);
        }
        for (share, tier) in delayed {
            plan.short_ladder(&names, tier, share);
        }
        let tasks = topology.tasks().iter();
        plan.tasks = tasks
            .filter(|task| topology.is_on_broker(&task.tier))
            .filter_map(|task| {
                let tier = topology.tier(&task.tier)?;
                Some((task.name.clone(), publishing(&names, task, tier)))
            })
            .collect();
        Ok(plan)
    }

    /// The tier's queue, and the exchange and queue for its dead letters.
    fn tier(&mut self, names: &Names<'_>, tier: &Tier, share: usize) {
        let queue = names.queue(tier);
        let dead_letters = names.dead_letter_exchange(&tier.name);
        let Some(queue_type) = tier.home.queue_type() else {
            return;
        };
        let arguments = tier_arguments(tier, &dead_letters);
        self.queue(queue.clone(), queue_type, arguments, share);
        let key = names.routing_key(tier);
        self.bind_queue(&names.tasks_exchange(), &queue, &key);

        // A headers exchange, because its kind cannot change later and only headers
        // distinguish an expired message from a rejected one. Matching all of no headers takes everything.
        self.exchange(dead_letters.clone(), ExchangeKind::Headers, []);
        let dead_letter_queue = names.dead_letter_queue(&tier.name);
        let expiry = ("x-message-ttl", milliseconds(tier.dlq.expiry));
        self.last_resort(dead_letter_queue.clone(), tier.dlq.queue, [expiry], share);
        self.bind(
            &dead_letters,
            &dead_letter_queue,
            DestinationType::Queue,
            "",
            [("x-match", text("all"))],
        );
    }

    /// Where a group's tasks wait that may kill their worker. Workers take them one at a time.
    fn quarantine(&mut self, names: &Names<'_>, group: &str, share: usize) {
        let queue = names.quarantine(group);
        let overflow = ("x-overflow", text("reject-publish"));
        self.last_resort(queue.clone(), QueueType::Quorum, [overflow], share);
        self.bind_queue(
            &names.tasks_exchange(),
            &queue,
            &names.quarantine_key(group),
        );
    }

    /// The exchange and queue for delayed messages whose tier no longer exists: without them such
    /// messages would stay in their delay level.
    fn unrouted(&mut self, names: &Names<'_>, share: usize) {
        let unrouted = names.unrouted();
        self.exchange(unrouted.clone(), ExchangeKind::Fanout, []);
        self.last_resort(unrouted.clone(), QueueType::Quorum, [], share);
        self.bind_queue(&unrouted, &unrouted, "");
    }

    /// The levels that all tiers share; they hand over to the top of each tier's own.
    fn long_ladder<'t>(
        &mut self,
        names: &Names<'_>,
        tiers: impl Iterator<Item = &'t Tier>,
        share: usize,
    ) {
        let out = names.long_delay_out();
        for level in Level::long() {
            self.level(level, |level| names.delay_level("", level), &out, share);
        }
        self.ladder_end(names, &out);
        for tier in tiers {
            let top = names.delay_level(&tier.name, Level::TOP_OF_SHORT);
            self.bind_exchange(&out, &top, &format!("{}.#", names.routing_key(tier)));
        }
    }

    /// The tier's own levels; they end in its queue.
    fn short_ladder(&mut self, names: &Names<'_>, tier: &Tier, share: usize) {
        let out = names.delay_out(&tier.name);
        for level in Level::short() {
            let name = |level| names.delay_level(&tier.name, level);
            self.level(level, name, &out, share);
        }
        self.ladder_end(names, &out);
        // Another generation of the tier has another key, so that no message reaches both.
        let key = format!("{}.#", names.routing_key(tier));
        self.bind_queue(&out, &names.queue(tier), &key);
    }

    fn level(&mut self, level: Level, name: impl Fn(Level) -> String, out: &str, share: usize) {
        let here = name(level);
        let below = level.below().map_or_else(|| out.to_owned(), name);
        self.exchange(here.clone(), ExchangeKind::Topic, []);
        let arguments = [
            ("x-message-ttl", milliseconds(level.wait())),
            ("x-overflow", text("reject-publish")),
            ("x-dead-letter-exchange", text(&below)),
            ("x-dead-letter-strategy", text("at-least-once")),
        ];
        self.queue(here.clone(), QueueType::Quorum, arguments, share);
        self.bind_queue(&here, &here, &level.binding_key(true));
        self.bind_exchange(&here, &below, &level.binding_key(false));
    }

    fn ladder_end(&mut self, names: &Names<'_>, out: &str) {
        self.exchange(
            out.to_owned(),
            ExchangeKind::Topic,
            [("alternate-exchange", text(&names.unrouted()))],
        );
    }

    /// A queue whose messages have no other copy. From RabbitMQ 4.0 on a quorum queue without a
    /// delivery limit has one of 20, and without a dead-letter exchange drops what exceeds it: a
    /// collector that gives messages back while its database is down would lose them.
    fn last_resort<const N: usize>(
        &mut self,
        name: String,
        queue: QueueType,
        arguments: [(&str, Argument); N],
        share: usize,
    ) {
        let limit = match queue {
            QueueType::Classic => None,
            QueueType::Quorum => Some(("x-delivery-limit", Argument::Int(i32::MAX.into()))),
        };
        self.queue(name, queue, arguments.into_iter().chain(limit), share);
    }

    fn exchange<const N: usize>(
        &mut self,
        name: String,
        kind: ExchangeKind,
        arguments: [(&str, Argument); N],
    ) {
        self.exchanges.push(Exchange {
            name,
            kind,
            durable: true,
            auto_delete: false,
            arguments: collect(arguments),
        });
    }

    fn queue<'n>(
        &mut self,
        name: String,
        queue: QueueType,
        arguments: impl IntoIterator<Item = (&'n str, Argument)>,
        share: usize,
    ) {
        let mut arguments = collect(arguments);
        // Without it the type is the virtual host's default, which may differ or change.
        arguments.insert("x-queue-type".to_owned(), text(queue.as_str()));
        self.queues.push(Queue {
            name,
            durable: true,
            auto_delete: false,
            arguments,
            share,
        });
    }

    fn bind_queue(&mut self, source: &str, queue: &str, routing_key: &str) {
        self.bind(source, queue, DestinationType::Queue, routing_key, []);
    }

    fn bind_exchange(&mut self, source: &str, exchange: &str, routing_key: &str) {
        self.bind(source, exchange, DestinationType::Exchange, routing_key, []);
    }

    fn bind<const N: usize>(
        &mut self,
        source: &str,
        destination: &str,
        destination_type: DestinationType,
        routing_key: &str,
        arguments: [(&str, Argument); N],
    ) {
        self.bindings.push(Binding {
            source: source.to_owned(),
            destination: destination.to_owned(),
            destination_type,
            routing_key: routing_key.to_owned(),
            arguments: collect(arguments),
        });
    }
}

fn check_priorities(tier: &Tier, broker: Version) -> Result<(), Error> {
    let needs_quorum_priorities = match tier.home {
        Home::Classic { .. } | Home::Postgres { .. } => None,
        Home::Quorum { max_priority, .. } => max_priority,
    };
    match needs_quorum_priorities {
        Some(max_priority) if !broker.has_quorum_priorities() => {
            Err(Error::Broker(BrokerError::UnsupportedPriorities {
                tier: tier.name.clone(),
                max_priority,
                version: broker,
            }))
        }
        Some(_) | None => Ok(()),
    }
}

fn tier_arguments<'n>(tier: &Tier, dead_letters: &str) -> Vec<(&'n str, Argument)> {
    let mut arguments = vec![
        ("x-overflow", text("reject-publish")),
        ("x-dead-letter-exchange", text(dead_letters)),
    ];
    match tier.home {
        Home::Classic { max_priority } => {
            arguments.extend(
                max_priority.map(|highest| ("x-max-priority", Argument::Int(highest.into()))),
            );
        }
        // No x-max-priority: quorum queues refuse it, those of 4.3 have priorities without it.
        Home::Quorum { delivery_limit, .. } => {
            arguments.push(("x-dead-letter-strategy", text("at-least-once")));
            arguments.push(("x-delivery-limit", Argument::Int(delivery_limit.into())));
        }
        Home::Postgres { .. } => {}
    }
    arguments.extend(tier.ttl.map(|ttl| ("x-message-ttl", milliseconds(ttl))));
    arguments.extend(
        tier.max_length
            .map(|length| ("x-max-length", Argument::Int(length.into()))),
    );
    arguments
}

fn publishing(names: &Names<'_>, task: &super::MappedTask, tier: &Tier) -> PublishTarget {
    PublishTarget {
        tier: task.tier.clone(),
        exchange: names.tasks_exchange(),
        routing_key: names.routing_key(tier),
        priority: task.priority,
    }
}

fn collect<'n>(arguments: impl IntoIterator<Item = (&'n str, Argument)>) -> Arguments {
    arguments
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
}

fn text(value: &str) -> Argument {
    Argument::Text(value.to_owned())
}

fn milliseconds(duration: Duration) -> Argument {
    Argument::Int(i64::try_from(duration.as_millis()).unwrap_or(i64::MAX))
}
