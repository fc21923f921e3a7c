//! The arguments of `tierline top`.

use clap::Args;

use crate::stats::arguments::Observed;

#[derive(Debug, Args)]
pub(crate) struct Top {
    #[command(flatten)]
    pub(crate) app: Observed,
    /// The operator, for the history of pauses
    #[arg(long, value_name = "NAME", env = "USER", default_value = "somebody")]
    pub(crate) by: String,
    /// How often to ask
    #[arg(long, value_name = "TIME", default_value = "2s")]
    pub(crate) every: String,
}
