//! The envelope: what travels with a payload.

mod death;
mod identity;
#[cfg(feature = "postgres")]
pub(crate) mod properties;
mod received;
mod repaired;
pub mod wire;

use std::collections::BTreeMap;
use std::time::SystemTime;

pub use death::{DeadReason, Death, FailedAttempt, Failure, FailureKind};
pub(crate) use identity::Key;
#[cfg(feature = "postgres")]
pub(crate) use identity::{CompletionKey, Unidentified};
pub(crate) use received::Received;
pub(crate) use repaired::Repaired;

use crate::task::{PublishRequest, TaskId, TaskKey};

/// From this crash count on a task runs from quarantine.
pub(crate) const QUARANTINE_FROM: u32 = 2;

/// One task on its way, as a worker receives it.
///
/// ```
/// use std::time::SystemTime;
/// use tierline::Task;
/// use tierline::message::Message;
/// use tierline::task::PublishRequest;
/// # #[derive(serde::Serialize, serde::Deserialize)]
/// # struct Greet { name: String }
/// # impl Task for Greet { const NAME: &'static str = "greet"; }
///
/// let request = PublishRequest::new(&Greet { name: "Ada".into() })?;
/// let message = Message::first(request, "normal", 5, SystemTime::now());
/// assert_eq!((message.task.as_str(), message.attempt), ("greet", 1));
/// assert_eq!(message.payload, br#"{"name":"Ada"}"#);
/// # Ok::<(), tierline::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Message {
    /// The task's name.
    pub task: String,
    /// The same in all attempts.
    pub id: TaskId,
    /// The payload as JSON.
    pub payload: Vec<u8>,
    /// The number of the attempt to come; the first is 1.
    pub attempt: u32,
    /// The tier whose queue it is in.
    pub tier: String,
    /// The priority within the tier.
    pub priority: u8,
    /// When it was first enqueued; retries keep it.
    pub enqueued_at: SystemTime,
    /// When it falls due, where it was delayed by its publisher or before a retry, or redriven.
    pub due_at: Option<SystemTime>,
    /// When it is no longer worth running.
    pub expires_at: Option<SystemTime>,
    /// The publisher's own headers.
    pub headers: BTreeMap<String, String>,
    /// The W3C trace context that the task continues.
    pub traceparent: Option<String>,
    /// How often it was redriven.
    pub life: u32,
    /// How often a worker died with it in its hands.
    pub crashes: u32,
    /// The attempts of this life that failed, the latest last; the oldest may be left out.
    pub history: Vec<FailedAttempt>,
    /// Where it came from, if it was redriven.
    pub redriven: Option<Redriven>,
    /// The unique or idempotency key that it was published with.
    pub key: Option<TaskKey>,
    /// The key that a limit with `per` counts it under, if its publisher named one. Else the payload has it.
    pub limit_key: Option<String>,
}

/// The longest [`limit_key`](Message::limit_key) that a publisher may name, in bytes.
pub(crate) const MAX_LIMIT_KEY: usize = 200;

/// Where a redriven message came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Redriven {
    /// The dead letter's row in the log.
    pub from: String,
    /// Who redrove it.
    pub by: String,
}

impl Message {
    /// The first attempt of what was asked for, enqueued at `now` in this tier.
    ///
    /// An identifier is drawn at `now` where the request has none. The request's delay is part of the message
    /// only as the time when it falls due: whoever sends it holds it back.
    pub fn first(request: PublishRequest, tier: &str, priority: u8, now: SystemTime) -> Self {
        Self {
            key: request.task_key(),
            limit_key: request.limit_key,
            task: request.task,
            id: request.id.unwrap_or_else(|| TaskId::drawn_at(now)),
            payload: request.payload,
            attempt: 1,
            tier: tier.to_owned(),
            priority: request.priority.unwrap_or(priority),
            enqueued_at: now,
            due_at: request.delay.and_then(|delay| now.checked_add(delay)),
            // A time that no clock can hold is one that never comes.
            expires_at: request.expires.and_then(|expires| now.checked_add(expires)),
            headers: request.headers,
            traceparent: request.traceparent,
            life: 0,
            crashes: 0,
            history: Vec::new(),
            redriven: None,
        }
    }

    /// This message with one more failed attempt in its history.
    #[must_use]
    pub(crate) fn failed(mut self, failure: &Failure) -> Self {
        self.history.push(FailedAttempt {
            attempt: self.attempt,
            at: SystemTime::now(),
            kind: failure.kind,
            error: failure.to_string(),
        });
        self
    }

    /// The attempt after this one.
    pub(crate) fn next_attempt(self) -> Self {
        Self {
            attempt: self.attempt.saturating_add(1),
            ..self
        }
    }
}
