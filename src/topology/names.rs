//! The names that everything on the broker has, built in one place from app and tier.

use super::delay::Level;
use super::reader::quoted;
use super::tier::Tier;

/// The longest name and routing key that AMQP carries, in bytes.
pub(super) const LONGEST: usize = 255;

/// Tiers may not have these names: the app uses them for itself.
pub(super) const RESERVED_TIERS: [&str; 4] = ["tasks", "delay", "long", "unrouted"];

/// The names of an app's exchanges, queues and users. Get it from
/// [`Topology::names`](super::Topology::names).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Names<'a> {
    app: &'a str,
}

impl<'a> Names<'a> {
    pub(super) fn new(app: &'a str) -> Self {
        Self { app }
    }

    /// `{app}.tasks`: the exchange that every task is published to. The routing key is
    /// [`routing_key`](Self::routing_key).
    pub fn tasks_exchange(&self) -> String {
        format!("{}.tasks", self.app)
    }

    /// `{app}.{tier}`, and `{app}.{tier}.g2` for the tier's second generation.
    pub fn queue(&self, tier: &Tier) -> String {
        self.generation(&tier.name, tier.generation)
    }

    /// `{tier}`, and `{tier}:g2` for the tier's second generation: the routing key on `{app}.tasks`, and the first word
    /// of routing keys of delayed messages.
    ///
    /// Each generation has its own, so that a message reaches one queue, also while programs with two versions of the
    /// map publish. No tier has a name with a colon, and to a topic exchange it is one word.
    pub fn routing_key(&self, tier: &Tier) -> String {
        routing_key(&tier.name, tier.generation)
    }

    /// The queue that a tier had before it moved, if it was on the broker.
    pub fn former_queue(&self, tier: &Tier) -> Option<String> {
        let generation = tier.former_generation()?;
        Some(self.generation(&tier.name, generation))
    }

    /// The queue of any generation of a tier.
    pub(crate) fn generation(&self, tier: &str, generation: u32) -> String {
        match generation {
            1 => format!("{}.{tier}", self.app),
            generation => format!("{}.{tier}.g{generation}", self.app),
        }
    }

    /// Which generation of the tier's queue this is; `None` if it is another queue.
    pub(crate) fn generation_number(&self, tier: &str, queue: &str) -> Option<u32> {
        let rest = queue.strip_prefix(&self.generation(tier, 1))?;
        match rest.is_empty() {
            true => Some(1),
            false => rest.strip_prefix(".g")?.parse().ok(),
        }
    }

    /// The routing key of any generation of a tier.
    pub(crate) fn key_of_generation(&self, tier: &str, generation: u32) -> String {
        routing_key(tier, generation)
    }

    /// The exchanges, and the queues, of the tier's own delays: those with the longest wait first.
    pub(crate) fn delay_levels(&self, tier: &str) -> Vec<String> {
        let levels = Level::short();
        levels.map(|level| self.delay_level(tier, level)).collect()
    }

    /// The exchanges, and the queues, of the delays that all tiers share.
    pub(crate) fn long_delay_levels(&self) -> Vec<String> {
        Level::long()
            .map(|level| self.delay_level("", level))
            .collect()
    }

    /// `{app}.delay.long.`: how the names of everything begin in which delays of all tiers wait.
    pub(crate) fn long_delays(&self) -> String {
        format!("{}.delay.long.", self.app)
    }

    /// Whether this is an exchange or queue of the tier's own delays.
    pub(crate) fn is_delay_of(&self, tier: &str, name: &str) -> bool {
        name.starts_with(&format!("{}.delay.{tier}.", self.app))
    }

    /// `{app}.{tier}.dlx`: the exchange for the dead letters of a tier.
    pub fn dead_letter_exchange(&self, tier: &str) -> String {
        format!("{}.{tier}.dlx", self.app)
    }

    /// `{app}.{tier}.dlq`: the queue for the dead letters of a tier.
    pub fn dead_letter_queue(&self, tier: &str) -> String {
        format!("{}.{tier}.dlq", self.app)
    }

    /// `{app}.{group}.quarantine`: the queue for tasks of a group that may kill their worker.
    pub fn quarantine(&self, group: &str) -> String {
        format!("{}.{}", self.app, self.quarantine_key(group))
    }

    /// `{group}.quarantine`: the routing key that leads to it. No tier has a name with a dot.
    pub(crate) fn quarantine_key(&self, group: &str) -> String {
        format!("{group}.quarantine")
    }

    /// `{app}.unrouted`: the exchange, and the queue, for delayed messages whose
    /// tier no longer exists.
    pub fn unrouted(&self) -> String {
        format!("{}.unrouted", self.app)
    }

    /// `{app}.delay.{tier}.NN` or `{app}.delay.long.NN`: the exchange, and the queue, in which
    /// messages for `tier` wait at `level`.
    pub(super) fn delay_level(&self, tier: &str, level: Level) -> String {
        let ladder = if level.is_long() { "long" } else { tier };
        format!("{}.delay.{ladder}.{:02}", self.app, level.number())
    }

    /// `{app}.delay.{tier}.out`: the last exchange of a tier's own ladder.
    pub(crate) fn delay_out(&self, tier: &str) -> String {
        format!("{}.delay.{tier}.out", self.app)
    }

    /// `{app}.delay.long.out`: the last exchange of the ladder that all tiers share.
    pub(super) fn long_delay_out(&self) -> String {
        self.delay_out("long")
    }

    /// `{app}.publisher`: the user of a service that only publishes.
    ///
    /// App and group names have no dots, so two apps on one broker never share a user.
    pub fn publisher_user(&self) -> String {
        format!("{}.publisher", self.app)
    }

    /// `{app}.worker.{group}`: the user of a group's workers.
    pub fn worker_user(&self, group: &str) -> String {
        format!("{}.worker.{group}", self.app)
    }
}

/// The routing key of any generation of a tier.
pub(super) fn routing_key(tier: &str, generation: u32) -> String {
    match generation {
        1 => tier.to_owned(),
        generation => format!("{tier}:g{generation}"),
    }
}

/// The mistake in the name of an app, a tier or a group (`kind`), and the help for it.
/// `longest` is the length of the longest name that it becomes a part of.
pub(super) fn mistake(kind: &str, name: &str, longest: usize) -> Option<(String, String)> {
    let shown = quoted(name);
    if !is_plain(name) {
        let message =
            format!("the {kind} name {shown} is not made of letters, digits, _ and - alone");
        let help = "names on the broker are built from it, with dots between their parts";
        return Some((message, help.to_owned()));
    }
    if longest > LONGEST {
        let message = format!(
            "the {kind} name {shown} makes a name of {longest} bytes, and AMQP carries {LONGEST}"
        );
        return Some((message, format!("shorten it by {}", longest - LONGEST)));
    }
    None
}

/// Whether names on the broker can be built from `name`.
pub(super) fn is_plain(name: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    !name.is_empty() && name.chars().all(allowed)
}
