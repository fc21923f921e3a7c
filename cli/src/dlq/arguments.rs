//! The arguments of `tierline dlq`.

use clap::{Args, Subcommand};

use crate::arguments::{Log, MapBroker, Operator};

#[derive(Debug, Subcommand)]
pub(crate) enum Dlq {
    /// List dead letters, the latest death first
    #[command(after_help = "\
Examples:
  tierline dlq list topology/hotel.toml --tier critical --since 24h
  tierline dlq list topology/hotel.toml --text 'connection refused' --since 1h --json")]
    List {
        #[command(flatten)]
        log: Log,
        #[command(flatten)]
        filter: Filter,
        /// The largest number of rows
        #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u16).range(1..=500))]
        limit: u16,
        /// Start after this cursor of the previous page
        #[arg(long, value_name = "CURSOR")]
        after: Option<String>,
    },

    /// Show all fields of a dead letter
    Show {
        #[command(flatten)]
        log: Log,
        /// Its id
        #[arg(value_name = "ID")]
        id: i64,
    },

    /// Group equal failures, with their probable cause and what to do
    #[command(after_help = "\
Example:
  tierline dlq groups topology/hotel.toml --since 24h")]
    Groups {
        #[command(flatten)]
        log: Log,
        #[command(flatten)]
        filter: Filter,
        /// The largest number of groups
        #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u16).range(1..=500))]
        limit: u16,
    },

    /// Show how many dead letters each tier has
    Tiers {
        #[command(flatten)]
        log: Log,
    },

    /// Publish dead letters again: one by its id, or all dead ones that a filter selects
    #[command(after_help = "\
Publishes each to the tier that the file gives its task today, waits for the confirm, and marks it.
Skips those that were already redriven: if one died again, it is a new dead letter.

Examples:
  tierline dlq redrive topology/hotel.toml 4711 --because 'customer asked'
  tierline dlq redrive topology/hotel.toml --fingerprint 696d4bea8bd92d42 --canary 10 --rate 50
  tierline dlq redrive topology/hotel.toml --resume 3")]
    Redrive {
        #[command(flatten)]
        log: Log,
        #[command(flatten)]
        broker: MapBroker,
        #[command(flatten)]
        operator: Operator,
        /// The id of one dead letter
        #[arg(value_name = "ID")]
        id: Option<i64>,
        #[command(flatten)]
        filter: Filter,
        /// The largest number per second
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
        rate: Option<u32>,
        /// Redrive this many first, and the rest only if enough of them succeed
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
        canary: Option<u32>,
        /// The share of the canary that must succeed, from 0 to 1
        #[arg(long, value_name = "SHARE", default_value_t = 0.9, requires = "canary")]
        canary_success: f64,
        /// How long to wait for the outcome of the canary
        #[arg(long, value_name = "TIME", default_value = "10m", requires = "canary")]
        canary_wait: String,
        /// Resume a redrive that was stopped or whose process died
        #[arg(long, value_name = "OPERATION", conflicts_with_all = ["id", "canary", "rate"])]
        resume: Option<i64>,
        /// Stop a redrive after its batch, in whichever process it runs
        #[arg(long, value_name = "OPERATION", conflicts_with_all = ["id", "canary", "rate", "resume"])]
        stop: Option<i64>,
    },

    /// Mark dead letters as not needed: one by its id, or all dead ones that a filter selects
    Discard {
        #[command(flatten)]
        log: Log,
        #[command(flatten)]
        operator: Operator,
        /// The id of one dead letter
        #[arg(value_name = "ID")]
        id: Option<i64>,
        #[command(flatten)]
        filter: Filter,
    },

    /// Delete all rows that a filter selects from the log, in any state
    Purge {
        #[command(flatten)]
        log: Log,
        #[command(flatten)]
        operator: Operator,
        #[command(flatten)]
        filter: Filter,
    },
}

impl Dlq {
    pub(crate) fn log(&self) -> &Log {
        match self {
            Dlq::List { log, .. }
            | Dlq::Show { log, .. }
            | Dlq::Groups { log, .. }
            | Dlq::Tiers { log }
            | Dlq::Redrive { log, .. }
            | Dlq::Discard { log, .. }
            | Dlq::Purge { log, .. } => log,
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct Filter {
    /// The tier in which they died; "unrouted": those without a tier in the map
    #[arg(long)]
    pub(crate) tier: Option<String>,
    /// The task
    #[arg(long, value_name = "NAME")]
    pub(crate) task: Option<String>,
    /// The reason for their death, such as "retries exhausted"
    #[arg(long)]
    pub(crate) reason: Option<tierline::dead::Reason>,
    /// The fingerprint of their group
    #[arg(long)]
    pub(crate) fingerprint: Option<String>,
    /// Their state: dead, redriving, redriven or discarded
    #[arg(long)]
    pub(crate) state: Option<tierline::dead::State>,
    /// They died at this time or later: 24h for 24 hours ago, or 2026-01-31T10:00:00Z
    #[arg(long, value_name = "TIME")]
    pub(crate) since: Option<String>,
    /// They died before this time, in the same form
    #[arg(long, value_name = "TIME")]
    pub(crate) until: Option<String>,
    /// A text in their error, id or payload; needs --since
    #[arg(long)]
    pub(crate) text: Option<String>,
}
