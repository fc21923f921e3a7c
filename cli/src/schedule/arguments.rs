//! What `tierline schedule` understands.

use clap::{Args, Subcommand};

use crate::arguments::{Broker, Input, Log};
use crate::secret::Secret;

#[derive(Debug, Subcommand)]
pub(crate) enum Schedule {
    /// List the schedules with their state: when they are due, when they ran, what was missed
    #[command(after_help = "\
Lists what the database has: the schedules of the file as of the last start of a scheduler, and those
that were added by code.

Example:
  tierline schedule list topology/hotel.toml --postgres postgres://localhost/hotel")]
    List {
        #[command(flatten)]
        log: Log,
    },

    /// Show when the next runs are due
    #[command(after_help = "\
With a database, of the schedules as they are in force; without one, of those in the file, so that a
new expression can be tried out. Times are on the clock of the schedule's time zone.

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

    /// Publish a run now, whatever the time, also of a schedule that is paused
    #[command(after_help = "\
Example:
  tierline schedule run topology/hotel.toml nightly-report --by ada")]
    Run {
        #[command(flatten)]
        one: One,
        #[command(flatten)]
        broker: Broker,
    },

    /// Stop a schedule until it is resumed, also through restarts
    Pause {
        #[command(flatten)]
        one: One,
    },

    /// Go on with a schedule that was paused, from its next run on
    Resume {
        #[command(flatten)]
        one: One,
    },
}

/// One schedule, and who does something to it.
#[derive(Debug, Args)]
pub(crate) struct One {
    #[command(flatten)]
    pub(crate) log: Log,
    /// The schedule
    #[arg(value_name = "NAME")]
    pub(crate) name: String,
    /// Who does it, for the record
    #[arg(long, value_name = "NAME", env = "USER", default_value = "somebody")]
    pub(crate) by: String,
}

#[derive(Debug, Args)]
pub(crate) struct OptionalDatabase {
    /// The database: postgres://user:password@host:5432/database
    #[arg(long, value_name = "URL", env = "DATABASE_URL", hide_env_values = true)]
    pub(crate) postgres: Option<Secret>,
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
