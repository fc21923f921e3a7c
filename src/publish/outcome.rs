//! How a publish ended: the receipt or error for its caller, and the event for observers.

use std::borrow::Cow;
use std::time::SystemTime;

use tokio::time::Instant;

use super::attempt::PublishAttempt;
use super::outgoing::{Content, Outgoing};
use super::{Confirmed, Inner};
use crate::observe::{Event, PublishResult};
use crate::task::Receipt;
use crate::{Error, TaskId};

/// What is known of a publish before its task has a destination, for the event if it fails.
pub(super) struct Announced<'a> {
    name: Cow<'a, str>,
    tier: Option<&'a str>,
    begin: Instant,
}

impl Inner {
    /// Notes what an event needs before a request is taken apart. `None`: nobody observes.
    pub(super) fn announce(&self, task: &str, begin: Instant) -> Option<Announced<'_>> {
        if self.observers.is_empty() {
            return None;
        }
        // The map has the name of nearly every task: nothing is copied.
        Some(match self.topology.task(task) {
            Some(mapped) => Announced {
                name: Cow::Borrowed(&mapped.name),
                tier: Some(&mapped.tier),
                begin,
            },
            None => Announced {
                name: Cow::Owned(task.to_owned()),
                tier: None,
                begin,
            },
        })
    }

    /// Emits the failure of a publish that came to no attempt, and passes it on.
    pub(super) fn refused<T>(
        &self,
        announced: Option<Announced<'_>>,
        prepared: Result<T, Error>,
    ) -> Result<T, Error> {
        if let (Some(announced), Err(error)) = (announced, &prepared) {
            self.observers.emit(&Event::Published {
                name: &announced.name,
                id: None,
                tier: announced.tier,
                result: PublishResult::Failed(error.kind()),
                took: announced.begin.elapsed(),
            });
        }
        prepared
    }

    /// The outcome for the caller of a publish.
    pub(super) fn receipt(
        &self,
        attempt: PublishAttempt,
        sent: Result<Confirmed, Error>,
    ) -> Result<Receipt, Error> {
        let PublishAttempt {
            outgoing,
            id,
            begin,
            ..
        } = attempt;
        match sent {
            Ok(confirmed) => {
                let new = Receipt::new(id, outgoing.tier(), SystemTime::now());
                let receipt = confirmed.receipt(new);
                self.emit_stored(task_of(&outgoing), begin, &receipt);
                Ok(receipt)
            }
            Err(error) => {
                let name = task_of(&outgoing);
                self.emit_failed(name, begin, &id, outgoing.tier(), &error);
                Err(error)
            }
        }
    }

    /// Emits the end of a publish that was answered.
    pub(super) fn emit_stored(&self, name: &str, begin: Instant, receipt: &Receipt) {
        if self.observers.is_empty() {
            return;
        }
        let result = match receipt {
            Receipt {
                is_duplicate: true, ..
            } => PublishResult::Duplicate,
            Receipt {
                replaced: Some(_), ..
            } => PublishResult::Replaced,
            _ => PublishResult::Stored,
        };
        self.observers.emit(&Event::Published {
            name,
            id: Some(&receipt.id),
            tier: Some(&receipt.tier),
            result,
            took: begin.elapsed(),
        });
    }

    /// Emits the failure of a publish of a task that had an id and a tier.
    pub(super) fn emit_failed(
        &self,
        name: &str,
        begin: Instant,
        id: &TaskId,
        tier: &str,
        error: &Error,
    ) {
        if self.observers.is_empty() {
            return;
        }
        self.observers.emit(&Event::Published {
            name,
            id: Some(id),
            tier: Some(tier),
            result: PublishResult::Failed(error.kind()),
            took: begin.elapsed(),
        });
    }
}

/// The name of the task that was to be published.
fn task_of(outgoing: &Outgoing) -> &str {
    match outgoing {
        Outgoing::Message(message) => match &message.content {
            Content::New { message, .. } => &message.task,
            // What was published before is no publish.
            Content::Forwarded { .. } => "",
        },
        #[cfg(feature = "postgres")]
        Outgoing::Row(row) => &row.task,
    }
}
