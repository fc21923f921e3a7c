//! Stores what follows on a run: its next attempt, or its dead letter, in the transaction that ends the run.

use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::RowSettings;
use crate::Error;
use crate::backlog::{Later, RunKey, hold_keys_to_the_end, rank};
use crate::dead::{Entry, insert_entries};
use crate::error::DatabaseError;
use crate::message::{DeadReason, Death, Failure, FailureKind, Message, Received, properties};
use crate::postgres::{DedicatedConnection, PgConnection};
use crate::publish::{Content, Outgoing};
use crate::route::{self, Address, RouteRequest};
use crate::source::emit_dead;

/// How long a transaction may take.
const LIMIT: Duration = Duration::from_secs(10);

/// Where the next attempt of a task goes.
pub(super) enum NextAttempt {
    /// It stays a row.
    Row(Later),
    /// To a tier on the broker, which has moved there from Postgres.
    Message(Outgoing),
}

impl RowSettings {
    /// The next attempt of a run, as the map and its overrides say now. One that was promoted or escalated stays in its tier.
    pub(super) fn next_attempt(
        &self,
        run: RunKey,
        received: &Received,
        message: Message,
        after: Duration,
    ) -> Result<NextAttempt, Error> {
        let crashes = match self.is_relay {
            true => message.crashes,
            // It came to an end: it did not kill the worker that died before.
            false => 0,
        };
        let message = Message {
            crashes,
            due_at: SystemTime::now().checked_add(after),
            ..message
        };
        if received.is_moved() {
            let sent = received.successor(&message);
            return Ok(NextAttempt::Row(Later {
                run,
                rank: rank(message.priority, message.crashes),
                tier: message.tier,
                after,
                properties: properties::encode(&sent),
                is_held: false,
            }));
        }
        let request = RouteRequest::RetryRow {
            tier: &message.tier,
            priority: message.priority,
        };
        let servers = self.consumer.publisher.servers();
        let (topology, task) = (&self.consumer.topology, &message.task);
        let overridden = self.consumer.controls.override_of(task);
        let overridden = overridden.as_deref();
        let route = route::destination(topology, overridden, servers, task, request, after)?;
        let priority = route.priority;
        let sent = received.successor(&message).with_priority(priority);
        match route.address {
            Address::Row { after } => Ok(NextAttempt::Row(Later {
                run,
                tier: route.tier,
                rank: rank(priority, message.crashes),
                after,
                properties: properties::encode(&sent),
                is_held: false,
            })),
            Address::Exchange { .. } => {
                let content = Content::Forwarded {
                    payload: message.payload,
                    properties: sent,
                };
                let outgoing = Outgoing::new(route, &message.id, content)?;
                Ok(NextAttempt::Message(outgoing))
            }
        }
    }

    /// Stores a dead letter and ends the run, in one transaction. `Ok(false)`: the run belongs to another process now.
    pub(super) async fn store_dead(
        &self,
        connection: &mut DedicatedConnection,
        run: RunKey,
        received: &Received,
        message: Option<&Message>,
        reason: DeadReason,
        failure: Failure,
    ) -> Result<bool, Error> {
        let death = self.death(reason, failure);
        let mut entry = self.entry(received, message, &death);
        let is_ours = loop {
            let storing = connection.within(LIMIT, "store a dead letter", async |connection| {
                let mut transaction = connection.begin().await?;
                let is_ours = end_run(&mut transaction, run).await?;
                if is_ours {
                    let entries = std::slice::from_ref(&entry);
                    insert_entries(&mut transaction, self.app(), entries).await?;
                }
                transaction.commit().await?;
                Ok(is_ours)
            });
            match storing.await {
                Err(Error::Database(DatabaseError::Refused { cause, .. })) if entry.reduce() => {
                    tracing::warn!(%cause, "Postgres refuses a dead letter; writing it with less in it");
                }
                stored => break stored?,
            }
        };
        if is_ours {
            emit_dead(&self.consumer.observers, received, received.tier(), &death);
        }
        Ok(is_ours)
    }

    pub(super) fn death(&self, reason: DeadReason, failure: Failure) -> Death {
        Death {
            reason,
            failure,
            at: SystemTime::now(),
            worker: self.consumer.worker.clone(),
            version: self.consumer.version.clone(),
        }
    }

    /// The row of a dead letter in the log.
    pub(super) fn entry(
        &self,
        received: &Received,
        message: Option<&Message>,
        death: &Death,
    ) -> Entry {
        let sent = received.dead_letter(death, message);
        let payload = received.payload().to_vec();
        let (topology, tier) = (&self.consumer.topology, received.tier());
        Entry::of_tier(topology, tier, &sent, payload, SystemTime::now())
    }

    /// Publishes the next attempt of a task whose tier has moved to the broker.
    pub(super) async fn forward(
        &self,
        run: RunKey,
        outgoing: Outgoing,
        received: &Received,
    ) -> Result<(), Error> {
        let deadline = Instant::now() + LIMIT;
        let publisher = &self.consumer.publisher;
        let forwarding = publisher.forward(outgoing, received.id(), deadline);
        forwarding.await?;
        if received.message().is_ok_and(|it| it.key.is_some()) {
            // On the broker nobody knows when the task is done.
            let mut connection = DedicatedConnection::to(self.database());
            let holding = connection.within(LIMIT, "hold the key of a task", async |connection| {
                hold_keys_to_the_end(connection, &[run.id]).await
            });
            if let Err(error) = holding.await {
                // It is stored: to send it again would double it.
                let id = received.id();
                tracing::warn!(%id, %error, "the key of a task that went to the broker may be free too soon");
            }
        }
        Ok(())
    }
}

/// Why a task is dead that has waited for longer than its tier's `ttl`.
pub(super) fn waited_too_long() -> Failure {
    Failure::new(
        FailureKind::NotStarted,
        "it waited in its queue for longer than the queue allows",
    )
}

/// Ends a run. Whether it was still ours.
async fn end_run(connection: &mut PgConnection<'_>, run: RunKey) -> Result<bool, sqlx::Error> {
    let ended = sqlx::query("DELETE FROM tierline.running WHERE id = $1 AND token = $2")
        .bind(run.id)
        .bind(run.token)
        .execute(connection)
        .await?;
    Ok(ended.rows_affected() > 0)
}
