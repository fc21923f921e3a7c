//! How a publish ended: the receipt or error for its caller, and the event for observers.

use std::borrow::Cow;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::attempt::PublishAttempt;
use super::outgoing::{Content, Outgoing};
use super::{Confirmed, Inner};
use crate::observe::{Event, PublishResult};
use crate::route;
use crate::spans::PublishSpan;
use crate::task::{PublishRequest, Receipt};
use crate::{Error, TaskId};

/// What the event of a publish says of its call.
#[derive(Debug, Clone)]
pub(super) struct Call {
    pub(super) begin: Instant,
    delay: Duration,
    span: PublishSpan,
}

impl Call {
    /// That of a message that was published before, which has no event.
    pub(super) fn again() -> Self {
        Self::without_span(Instant::now())
    }

    /// The same, from an earlier time on.
    pub(super) fn since(self, begin: Instant) -> Self {
        Self { begin, ..self }
    }

    fn without_span(begin: Instant) -> Self {
        Self {
            begin,
            delay: Duration::ZERO,
            span: PublishSpan::default(),
        }
    }
}

/// What is known of a publish before its task has a destination, for the event if it fails.
pub(super) struct Announced<'a> {
    name: Cow<'a, str>,
    call: Call,
}

impl Inner {
    /// Begins the call of a publish, and gives its message the context of its trace.
    pub(super) fn call(&self, request: &mut PublishRequest, begin: Instant) -> Call {
        if request.traceparent.is_none() {
            request.traceparent = self.trace.current();
        }
        let span = self
            .trace
            .spans
            .publish(&request.task, request.traceparent.as_deref());
        request.traceparent = span.traceparent().or(request.traceparent.take());
        Call {
            begin,
            delay: request.delay.unwrap_or_default(),
            span,
        }
    }

    /// Notes what an event needs before a request is taken apart. `None`: nobody observes.
    pub(super) fn announce(
        &self,
        request: &PublishRequest,
        begin: Instant,
    ) -> Option<Announced<'_>> {
        if self.observers.is_empty() {
            return None;
        }
        // The map has the name of nearly every task: nothing is copied.
        let name = match self.topology.task(&request.task) {
            Some(mapped) => Cow::Borrowed(mapped.name.as_str()),
            None => Cow::Owned(request.task.clone()),
        };
        let call = Call {
            delay: request.delay.unwrap_or_default(),
            ..Call::without_span(begin)
        };
        Some(Announced { name, call })
    }

    /// Emits the failure of a publish that came to no attempt, and passes it on.
    pub(super) fn refused<T>(
        &self,
        announced: Option<Announced<'_>>,
        prepared: Result<T, Error>,
    ) -> Result<T, Error> {
        if let (Some(announced), Err(error)) = (announced, &prepared) {
            self.emit_refused(&announced, error);
        }
        prepared
    }

    /// Emits the failure of a publish whose task had no destination.
    pub(super) fn emit_refused(&self, announced: &Announced<'_>, error: &Error) {
        let Announced { name, call } = announced;
        let overridden = self.controls.override_of(name);
        let tier = route::tier_of(&self.topology, overridden.as_deref(), name);
        self.observers.emit(&Event::Published {
            name,
            id: None,
            tier: tier.map(|tier| tier.name.as_str()),
            result: PublishResult::Failed(error.kind()),
            delay: call.delay,
            took: call.begin.elapsed(),
        });
    }

    /// The outcome for the caller of a publish.
    pub(super) fn receipt(
        &self,
        attempt: PublishAttempt,
        sent: Result<Confirmed, Error>,
    ) -> Result<Receipt, Error> {
        let PublishAttempt {
            outgoing, id, call, ..
        } = attempt;
        match sent {
            Ok(confirmed) => {
                let new = Receipt::new(id, outgoing.tier(), SystemTime::now());
                let receipt = confirmed.receipt(new);
                self.emit_stored(task_of(&outgoing), call, &receipt);
                Ok(receipt)
            }
            Err(error) => {
                let name = task_of(&outgoing);
                self.emit_failed(name, call, &id, outgoing.tier(), &error);
                Err(error)
            }
        }
    }

    /// Emits the end of a publish that was answered.
    pub(super) fn emit_stored(&self, name: &str, call: Call, receipt: &Receipt) {
        call.span.ended(&receipt.id, &receipt.tier, None);
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
            delay: call.delay,
            took: call.begin.elapsed(),
        });
    }

    /// Emits the failure of a publish of a task that had an id and a tier.
    pub(super) fn emit_failed(
        &self,
        name: &str,
        call: Call,
        id: &TaskId,
        tier: &str,
        error: &Error,
    ) {
        call.span.ended(id, tier, Some(error.kind().as_str()));
        if self.observers.is_empty() {
            return;
        }
        self.observers.emit(&Event::Published {
            name,
            id: Some(id),
            tier: Some(tier),
            result: PublishResult::Failed(error.kind()),
            delay: call.delay,
            took: call.begin.elapsed(),
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
