//! The arguments of `tierline tasks`.

use clap::{Args, Subcommand};
use tierline::backlog::TaskState;

use crate::arguments::{Author, Input, Log, Operator};

#[derive(Debug, Subcommand)]
pub(crate) enum Tasks {
    /// List the tasks that wait or run in tiers in Postgres
    #[command(after_help = "\
Tasks that run come first, then those that are ready in the order in which they will run, then those
that are parked (they are due, and a pause or a limit holds them back), then those that are scheduled in
the order in which they fall due. A page looks at 10,000 tasks at most; the last line tells how to go on. Tasks that have ended are kept by tiers with `keep` alone, and are listed with
--state finished, the latest first.

Examples:
  tierline tasks list topology/shop.toml --tier exports --waiting-for 1h
  tierline tasks list topology/shop.toml --state scheduled --due-within 1d --json
  tierline tasks list topology/shop.toml --tier exports --state finished")]
    List {
        #[command(flatten)]
        log: Log,
        #[command(flatten)]
        filter: Filter,
        /// The largest number of tasks
        #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u16).range(1..=500))]
        limit: u16,
        /// Start where the previous page ended
        #[arg(long, value_name = "CURSOR")]
        after: Option<String>,
    },

    /// Show all that is known of a task
    Show {
        #[command(flatten)]
        log: Log,
        /// Its id
        #[arg(value_name = "ID")]
        id: String,
    },

    /// Cancel tasks that wait: one by its id, or all that a filter selects
    #[command(after_help = "\
Tasks that run are left alone. Every change is in the audit log.

Examples:
  tierline tasks cancel topology/shop.toml 81K65HRZ9TF9FB1H4JY5Q0HMXQ --because 'customer asked'
  tierline tasks cancel topology/shop.toml --tier exports --task report.export --yes")]
    Cancel {
        #[command(flatten)]
        log: Log,
        #[command(flatten)]
        operator: Operator,
        /// The id of one task
        #[arg(value_name = "ID")]
        id: Option<String>,
        #[command(flatten)]
        filter: Filter,
    },

    /// Move a task that waits to another tier
    #[command(after_help = "\
Workers of that tier take it in the order of its priority and due time, and it stays there when it is
retried. A task that runs is left alone. Every change is in the audit log.

Examples:
  tierline tasks escalate topology/shop.toml 81K65HRZ9TF9FB1H4JY5Q0HMXQ --to critical --because 'customer waits'
  tierline tasks escalate topology/shop.toml order-7 --to high --now")]
    Escalate {
        #[command(flatten)]
        log: Log,
        #[command(flatten)]
        author: Author,
        /// Its id
        #[arg(value_name = "ID")]
        id: String,
        /// The tier that it moves to, any of the map
        #[arg(long, value_name = "TIER")]
        to: String,
        /// Make a task due now that waits for its due time
        #[arg(long)]
        now: bool,
    },

    /// Show what operators did, the latest first
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
}

impl Tasks {
    pub(crate) fn log(&self) -> &Log {
        match self {
            Tasks::List { log, .. }
            | Tasks::Show { log, .. }
            | Tasks::Cancel { log, .. }
            | Tasks::Escalate { log, .. }
            | Tasks::Audit { log, .. } => log,
        }
    }

    pub(crate) fn input(&self) -> &Input {
        &self.log().input
    }
}

#[derive(Debug, Args)]
pub(crate) struct Filter {
    /// The tier
    #[arg(long)]
    pub(crate) tier: Option<String>,
    /// The task
    #[arg(long, value_name = "NAME")]
    pub(crate) task: Option<String>,
    /// Their state: running, ready, parked, scheduled or finished
    #[arg(long)]
    pub(crate) state: Option<TaskState>,
    /// They fell due this long ago, or longer
    #[arg(long, value_name = "TIME")]
    pub(crate) waiting_for: Option<String>,
    /// They fall due within this time, or fell due before
    #[arg(long, value_name = "TIME")]
    pub(crate) due_within: Option<String>,
}

impl Filter {
    pub(crate) fn is_empty(&self) -> bool {
        let Self {
            tier,
            task,
            state,
            waiting_for,
            due_within,
        } = self;
        tier.is_none()
            && task.is_none()
            && state.is_none()
            && waiting_for.is_none()
            && due_within.is_none()
    }
}
