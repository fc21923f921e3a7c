//! The arguments of `tierline control`.

use clap::{Args, Subcommand, ValueEnum};

use crate::arguments::{Author, Input, Log, MapBroker};

#[derive(Debug, Subcommand)]
pub(crate) enum Control {
    /// List what is paused, limited and overridden
    #[command(after_help = "\
Lists the changes that operators have made and that are in force. The limits of the file itself are not
listed.

Example:
  tierline control list topology/hotel.toml")]
    List {
        #[command(flatten)]
        log: Log,
    },

    /// Pause a tier, a group or a task: nothing of it starts until it is resumed
    #[command(after_help = "\
What runs goes on to its end. What waits stays where it is, and is neither dead-lettered nor promoted,
except by the ttl of a queue on RabbitMQ, which the answer names.

Examples:
  tierline control pause topology/hotel.toml tier bulk --for 1h --because 'the provider is down'
  tierline control pause topology/hotel.toml group deferred
  tierline control pause topology/hotel.toml task contacts.export")]
    Pause {
        #[command(flatten)]
        one: One<Pausable>,
        #[command(flatten)]
        length: Length,
    },

    /// End a pause
    #[command(after_help = "\
The answer names other pauses that still keep tasks from starting.

Example:
  tierline control resume topology/hotel.toml tier bulk --because 'it is back'")]
    Resume {
        #[command(flatten)]
        one: One<Pausable>,
    },

    /// Limit how often the tasks of a tier, or a task, start, or how many of them run
    #[command(after_help = "\
The limit holds for all processes of the app together, in place of the limit that the file may have.
If the file has `per` for a task, --running is for each key.

Examples:
  tierline control limit topology/hotel.toml tier bulk --rate 50/m --burst 5 --for 2h
  tierline control limit topology/hotel.toml task contacts.export --running 2
  tierline control limit topology/hotel.toml tier bulk --none --for 1h")]
    Limit {
        #[command(flatten)]
        one: One<Limitable>,
        /// How often they may start, such as 100/m, 0.5/s or 5/10s
        #[arg(long, value_name = "RATE")]
        rate: Option<String>,
        /// How many may start at once after a rest; needs --rate [default: what the rate gives in a second]
        #[arg(long, value_name = "N")]
        burst: Option<u32>,
        /// How many may run at a time
        #[arg(long, value_name = "N")]
        running: Option<u32>,
        /// Lift the limit of the file
        #[arg(long)]
        none: bool,
        #[command(flatten)]
        length: Length,
    },

    /// End a limit that was set with `limit`: that of the file, if there is one, is in force again
    Unlimit {
        #[command(flatten)]
        one: One<Limitable>,
    },

    /// Give tasks another tier or priority
    #[command(after_help = "\
Publishes and retries of all processes follow within two seconds. Rows that wait are moved before the
command ends, in two minutes at most. Messages that wait in queues stay there; with --amqp the answer
says how many these are.

Examples:
  tierline control override topology/hotel.toml task contacts.export --tier low --for 7d
  tierline control override topology/hotel.toml prefix calendar. --tier normal --because 'the move'
  tierline control override topology/hotel.toml task email.receipt email.invoice --priority 9")]
    Override {
        #[command(flatten)]
        log: Log,
        #[command(flatten)]
        broker: MapBroker,
        #[command(flatten)]
        author: Author,
        /// What the names are
        #[arg(value_name = "WHAT")]
        what: Overridable,
        /// The tasks, or the beginning of their names
        #[arg(value_name = "NAME", required = true)]
        names: Vec<String>,
        /// The tier that they go to [default: that of the file]
        #[arg(long, value_name = "TIER")]
        tier: Option<String>,
        /// The priority that they have, whatever their publishers ask for
        #[arg(long, value_name = "N")]
        priority: Option<u8>,
        #[command(flatten)]
        length: Length,
    },

    /// End an override; what was moved stays where it is
    #[command(after_help = "\
Example:
  tierline control end-override topology/hotel.toml prefix calendar.")]
    EndOverride {
        #[command(flatten)]
        one: One<Overridable>,
    },

    /// List the live workers and relays that have the database
    Processes {
        #[command(flatten)]
        log: Log,
    },

    /// Show what operators did, the latest first
    #[command(after_help = "\
Example:
  tierline control audit topology/hotel.toml --limit 100 --before 4711")]
    Audit {
        #[command(flatten)]
        log: Log,
        /// The largest number of entries
        #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u16).range(1..=500))]
        limit: u16,
        /// Only entries before this one
        #[arg(long, value_name = "NUMBER")]
        before: Option<i64>,
    },

    /// Show how many slots each group wants to meet the SLO of its tiers
    #[command(after_help = "\
Example:
  tierline control scaling topology/hotel.toml --json")]
    Scaling {
        #[command(flatten)]
        log: Log,
        #[command(flatten)]
        broker: MapBroker,
    },
}

/// A change of one thing.
#[derive(Debug, Args)]
pub(crate) struct One<What: ValueEnum + Clone + Send + Sync + 'static> {
    #[command(flatten)]
    pub(crate) log: Log,
    #[command(flatten)]
    pub(crate) author: Author,
    /// What it is
    #[arg(value_name = "WHAT")]
    pub(crate) what: What,
    /// Its name
    #[arg(value_name = "NAME")]
    pub(crate) name: String,
}

#[derive(Debug, Args)]
pub(crate) struct Length {
    /// For how long, such as 90m or 7d; it ends by itself then [default: until somebody ends it]
    #[arg(long = "for", value_name = "TIME")]
    pub(crate) length: Option<String>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Pausable {
    Tier,
    Group,
    Task,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Limitable {
    Tier,
    Task,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum Overridable {
    Task,
    /// All tasks whose names begin like this
    Prefix,
}

impl Control {
    pub(crate) fn log(&self) -> &Log {
        match self {
            Control::List { log }
            | Control::Override { log, .. }
            | Control::Processes { log }
            | Control::Audit { log, .. }
            | Control::Scaling { log, .. } => log,
            Control::Pause { one, .. } | Control::Resume { one } => &one.log,
            Control::Limit { one, .. } | Control::Unlimit { one } => &one.log,
            Control::EndOverride { one } => &one.log,
        }
    }

    pub(crate) fn input(&self) -> &Input {
        &self.log().input
    }
}
