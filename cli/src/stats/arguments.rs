//! The arguments of `tierline stats` and `tierline top`.

use clap::Args;

use crate::arguments::{Log, Management, MapBroker};

#[derive(Debug, Args)]
pub(crate) struct Stats {
    #[command(flatten)]
    pub(crate) app: Observed,
    /// Ask again every 2 s, or this often, until Ctrl-C; with --json, one document for each line
    #[arg(long, value_name = "TIME", num_args = 0..=1, default_missing_value = "2s", require_equals = true)]
    pub(crate) watch: Option<String>,
}

/// An app whose statistics are read.
#[derive(Debug, Args)]
pub(crate) struct Observed {
    #[command(flatten)]
    pub(crate) log: Log,
    #[command(flatten)]
    pub(crate) broker: MapBroker,
    #[command(flatten)]
    pub(crate) management: Management,
}
