//! The way through: which message a free slot takes, how it becomes a run of its handler, and what
//! becomes of it then.
//!
//! Read in this order: `worker` is the face, `group` the turns of a pool and `group/jobs` what runs
//! in its slots, `order` whose turn it is, `tier` what a tier has in hand, `subscription` its channel and
//! `resubscribe` how that is made, `acks` its acknowledgements, `job` a message in a slot,
//! `execute` the steps of a run, `settle` what follows on it, `mend` what is done
//! where nothing takes that, `identity` and `memory` what is known of a message that comes again, `gate`
//! and `group/hands` the protection against tasks that kill their process, `watchdog` that against those
//! which hang.

mod acks;
mod check;
mod gate;
mod group;
mod identity;
mod job;
mod memory;
mod mend;
mod order;
mod resubscribe;
mod settle;
mod subscription;
mod tier;
mod watchdog;
mod worker;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

pub(crate) use gate::Gate;
pub use worker::Worker;
pub(crate) use worker::WorkerParts;

use crate::execute::{Executor, Verdict};
use crate::observe::Observers;
use crate::publish::Publisher;
use crate::secret::Secret;
use crate::task::Cancellation;
use crate::topology::Topology;

/// What all groups of a worker share.
struct Workshop {
    topology: Topology,
    urls: Vec<Secret>,
    connection_name: String,
    publisher: Publisher,
    executor: Executor,
    observers: Observers,
    watchdog: Arc<watchdog::Watchdog>,
    gate: Arc<Gate>,
    /// Host and process, and the version of the program, for dead letters.
    worker: String,
    version: String,
    /// Whether a queue that is gone may be declared again.
    may_declare: bool,
    mended: mend::Mended,
    /// How long the successor of a message may take to be confirmed.
    settle_limit: Duration,
    /// The crash count at which a task is a dead letter.
    condemned_at: u32,
    /// Given when the grace period of a shutdown is over: handlers should end.
    cancelled: Cancellation,
    /// Given after that: handlers are dropped.
    dropped: CancellationToken,
    /// Set before `cancelled` is given where the worker's future is dropped: nothing is acknowledged any
    /// more, so nothing may follow on a message.
    is_abandoned: AtomicBool,
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
