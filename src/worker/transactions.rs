//! The transactions of a group's handlers, if the app has a database.

use std::sync::Arc;

#[cfg(feature = "postgres")]
use crate::completion::Completions;
use crate::message::Received;
use crate::source::LeasedRun;
use crate::source::amqp::ConsumerSettings;
use crate::task::Transactions;
use crate::topology;

#[derive(Clone)]
pub(super) struct GroupTransactions {
    #[cfg(feature = "postgres")]
    completions: Option<Arc<Completions>>,
}

#[cfg(feature = "postgres")]
impl GroupTransactions {
    pub(super) fn new(settings: &ConsumerSettings, group: &topology::Group) -> Self {
        let (app, slots) = (settings.topology.app(), group.concurrency.into());
        let database = settings.database.as_ref();
        Self {
            completions: database.map(|database| Completions::new(database, app, slots)),
        }
    }

    /// The transactions of a delivery's attempt.
    pub(super) fn of(&self, received: &Arc<Received>, lease: Option<&LeasedRun>) -> Transactions {
        match &self.completions {
            Some(it) => it.attempt(received, lease.map(|lease| lease.row.clone())),
            None => Transactions::default(),
        }
    }

    /// Whether a message of the broker was done before, as far as that can be found out in a moment. A first delivery is
    /// not asked about.
    pub(super) async fn is_done(&self, received: &Received) -> bool {
        match &self.completions {
            // Boxed: few deliveries need it, and a job's future is small.
            Some(completions) if received.may_be_done() => {
                Box::pin(completions.is_done(received)).await
            }
            _ => false,
        }
    }
}

#[cfg(not(feature = "postgres"))]
impl GroupTransactions {
    pub(super) fn new(_: &ConsumerSettings, _: &topology::Group) -> Self {
        Self {}
    }

    pub(super) fn of(&self, _: &Arc<Received>, _: Option<&LeasedRun>) -> Transactions {
        Transactions::default()
    }

    pub(super) async fn is_done(&self, _: &Received) -> bool {
        false
    }
}
