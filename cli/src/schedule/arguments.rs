//! The arguments of `tierline schedule`.

use clap::{Args, Subcommand};

use crate::arguments::{Input, Log, MapBroker, OptionalDatabase};

#[derive(Debug, Subcommand)]
pub(crate) enum Schedule {
    /// List the schedules with their state: next and last due times, published and missed runs
    #[command(after_help = "\
Lists the schedules in the database: those of the file as of the last start of a scheduler, and those
that code added.

Example:
  tierline schedule list topology/hotel.toml --postgres postgres://localhost/hotel")]
    List {
        #[command(flatten)]
        log: Log,
    },

    /// Show when the next runs are due
    #[command(after_help = "\
With a database it shows the schedules in effect; without one, those of the file, so that you can
try out a new expression. Times are in the schedule's time zone.

Examples:
  tierline schedule next topology/hotel.toml
  tierline schedule next topology/hotel.toml nightly-report --count 10")]
    Next {
        #[command(flatten)]
        input: Input,
        #[command(flatten)]
        database: OptionalDatabase,
        /// The schedule [default: all]
        #[arg(value_name = "NAME")]
        name: Option<String>,
        /// How many runs of each
        #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1000))]
        count: u16,
    },

    /// Publish a run now, even if the schedule is paused
    #[command(after_help = "\
Example:
  tierline schedule run topology/hotel.toml nightly-report --by ada")]
    Run {
        #[command(flatten)]
        one: One,
        #[command(flatten)]
        broker: MapBroker,
    },

    /// Pause a schedule until it is resumed, also across restarts
    Pause {
        #[command(flatten)]
        one: One,
    },

    /// Resume a paused schedule with its next run
    Resume {
        #[command(flatten)]
        one: One,
    },
}

/// One schedule, and the operator.
#[derive(Debug, Args)]
pub(crate) struct One {
    #[command(flatten)]
    pub(crate) log: Log,
    /// The schedule
    #[arg(value_name = "NAME")]
    pub(crate) name: String,
    /// The operator, for the history
    #[arg(long, value_name = "NAME", env = "USER", default_value = "somebody")]
    pub(crate) by: String,
}

impl Schedule {
    pub(crate) fn input(&self) -> &Input {
        match self {
            Schedule::List { log } => &log.input,
            Schedule::Next { input, .. } => input,
            Schedule::Run { one, .. } | Schedule::Pause { one } | Schedule::Resume { one } => {
                &one.log.input
            }
        }
    }
}
