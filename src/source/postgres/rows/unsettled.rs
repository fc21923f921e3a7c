//! What is known of a row that is claimed and not settled.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::OwnedSemaphorePermit;

use super::OrderKey;
use super::parked::RowOrigin;
use crate::backlog::RunKey;
use crate::message::{DeadReason, Failure, Message, Received};
use crate::source::Handle;
use crate::source::suspects::Running;

/// A dead letter to be stored.
pub(in crate::source::postgres) struct PendingDeadLetter {
    pub(super) handle: Handle,
    pub(in crate::source::postgres) run: RunKey,
    pub(in crate::source::postgres) received: Arc<Received>,
    pub(in crate::source::postgres) message: Option<Box<Message>>,
    pub(in crate::source::postgres) reason: DeadReason,
    pub(in crate::source::postgres) failure: Failure,
}

/// A row that is claimed and not settled.
pub(super) struct Unsettled {
    pub(super) run: RunKey,
    pub(super) place: OrderKey,
    pub(super) received: Arc<Received>,
    pub(super) bytes: usize,
    pub(super) is_held: bool,
    pub(super) origin: RowOrigin,
    pub(super) state: State,
    /// While a task runs that may have killed a worker.
    pub(super) _running: Option<Running>,
    pub(super) _quarantined: Option<OwnedSemaphorePermit>,
    /// What follows, for events.
    pub(super) follows: Option<(Duration, Option<Failure>)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Prefetched,
    /// Its handler runs.
    Taken,
    /// What follows on it is being stored.
    Settling,
}
