//! What the servers said. A part is `None` where its server did not say it.

use std::collections::{HashMap, HashSet};

use super::report::{ScheduleStats, StatsProblem};
use crate::amqp::QueueState;
use crate::backlog::TierDepth;
use crate::control::{ControlEntry, Process};
use crate::dead::TierCount;
use crate::rollup::Recent;

/// All that is known.
#[derive(Debug, Default)]
pub(super) struct Known {
    /// By queue. A queue that is not there was not asked about.
    pub(super) queues: HashMap<String, Option<QueueState>>,
    /// By queue, where the management API was asked.
    pub(super) managed: Option<HashMap<String, ManagedQueue>>,
    /// By tier; one that is not there has no rows.
    pub(super) depths: Option<HashMap<String, TierDepth>>,
    pub(super) processes: Option<Vec<Process>>,
    pub(super) controls: Option<Vec<ControlEntry>>,
    pub(super) dead: Option<Vec<TierCount>>,
    pub(super) recent: Option<Recent>,
    /// The tiers of which a limit keeps tasks from starting.
    pub(super) saturated: Option<HashSet<String>>,
    pub(super) schedules: Option<ScheduleStats>,
    pub(super) problems: Vec<StatsProblem>,
}

/// What the management API says of a queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct ManagedQueue {
    /// Not acknowledged.
    pub(super) in_flight: u64,
    pub(super) messages: u64,
}
