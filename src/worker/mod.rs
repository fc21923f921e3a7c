//! Workers: which delivery a free slot takes, how it becomes a run of its handler, and what follows.
//!
//! Read in this order: `serve` is the public face, `check` refuses what cannot work, `group` is a pool of slots,
//! `order` decides which tier is next, `gates` which of them may start something, `job` is one delivery in a slot, `transactions` are those of its handler, and `watchdog` reports handlers that hang.
//! Deliveries come from the module `source`, and `execute` runs them.

mod check;
pub(crate) mod error;
mod gates;
mod group;
mod job;
mod order;
mod serve;
mod transactions;
mod watchdog;

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

#[cfg(feature = "postgres")]
pub(crate) use serve::DEFAULT_CRASH_BUDGET;
pub use serve::Worker;
pub(crate) use serve::WorkerParts;

use crate::execute::Executor;
use crate::source::Source;
use crate::source::amqp::{self, ConsumerSettings};
#[cfg(feature = "postgres")]
use crate::source::postgres::{self, RowSettings};
use crate::task::Cancellation;
use crate::topology;

/// How long cancelled handlers have to end well.
const WIND_DOWN: Duration = Duration::from_millis(500);

/// What all groups of a worker share.
struct Shared {
    settings: Arc<ConsumerSettings>,
    /// For tiers in Postgres, if the worker serves any.
    #[cfg(feature = "postgres")]
    rows: Option<Arc<RowSettings>>,
    executor: Executor,
    watchdog: Arc<watchdog::Watchdog>,
    /// Given when the grace period of a shutdown is over: handlers should end.
    cancelled: Cancellation,
    /// Given after that: handlers are dropped.
    dropped: CancellationToken,
}

impl Shared {
    /// Where the deliveries of a group come from.
    fn sources(&self, group: &topology::Group) -> Vec<Box<dyn Source>> {
        #[cfg_attr(not(feature = "postgres"), expect(unused_mut))]
        let mut sources = amqp::sources(&self.settings, group);
        #[cfg(feature = "postgres")]
        sources.extend(postgres::sources(self.rows.as_ref(), group));
        sources
    }
}

/// How far a shutdown has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Work,
    /// Nothing is started any more.
    Drain,
    /// Nothing is waited for any more.
    Leave,
}
