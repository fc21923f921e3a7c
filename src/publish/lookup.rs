//! Whether the queues that messages are published to are there.

use std::collections::HashMap;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{Instant, timeout_at};

use super::attempt::SendFailure;
use super::pools::Pools;
use crate::amqp::QueueState;
use crate::topology::Topology;

/// How long an answer is used for other messages: a thousand that are returned at once ask the broker once.
const FRESH_FOR: Duration = Duration::from_millis(200);
/// How long the broker may take to answer. A queue without a leader may never answer.
const LIMIT: Duration = Duration::from_secs(2);

/// The last answers of the broker, by queue. Each has a lock of its own: a queue that does not answer holds up no
/// message for another.
#[derive(Debug)]
pub(super) struct QueueLookups(HashMap<String, Mutex<Option<Lookup>>>);

#[derive(Debug, Clone, Copy)]
struct Lookup {
    at: Instant,
    state: QueueState,
}

impl QueueLookups {
    /// For the queues of all tiers, now and before they moved, those of their dead letters, that of unrouted
    /// messages, and those of long delays.
    pub(super) fn new(topology: &Topology) -> Self {
        let names = topology.names();
        let tiers = topology.tiers_using_broker();
        let queues = tiers.clone();
        let queues =
            queues.flat_map(|tier| [names.queue(tier), names.dead_letter_queue(&tier.name)]);
        let former = tiers.filter_map(|tier| names.former_queue(tier));
        let queues = queues.chain(former).chain([names.unrouted()]);
        let queues = queues.chain(names.long_delay_levels());
        Self(queues.map(|queue| (queue, Mutex::default())).collect())
    }

    /// The state of a queue, as the broker says over a connection of the tier's group. One that is not known here
    /// is missing.
    ///
    /// # Errors
    /// Where the broker cannot be asked before the deadline.
    pub(super) async fn state(
        &self,
        pools: &Pools,
        tier: &str,
        queue: &str,
        deadline: Instant,
    ) -> Result<QueueState, SendFailure> {
        let Some(lookup) = self.0.get(queue) else {
            return Ok(QueueState::Missing);
        };
        let asking = async {
            let mut lookup = lookup.lock().await;
            if let Some(Lookup { at, state }) = *lookup
                && at.elapsed() < FRESH_FOR
            {
                return Ok(state);
            }
            let connection = pools.of(tier).connection(deadline).await?;
            let asked = connection.queue_state(queue, deadline.min(Instant::now() + LIMIT));
            let state = asked
                .await
                .map_err(|error| SendFailure::Down(error.to_string()))?;
            let at = Instant::now();
            *lookup = Some(Lookup { at, state });
            Ok(state)
        };
        // At the deadline another message still waits for the answer.
        let unanswered = || Ok(QueueState::Unreachable);
        timeout_at(deadline, asking)
            .await
            .unwrap_or_else(|_| unanswered())
    }
}
