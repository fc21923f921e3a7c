use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use serde_json::Value;

use super::difference::differences;
use super::timeline::{Timeline, later};
use crate::message::Message;
use crate::route::{self, RouteRequest, Servers};
use crate::task::{IdempotencyKey, Publish, PublishFuture, PublishRequest, Receipt, Task, Unique};
use crate::topology::QUORUM_PRIORITIES_SINCE;
use crate::{Error, Topology};

/// A publisher that records requests.
///
/// A [`Tester`](super::Tester) has its own; this one is for testing code that publishes outside of
/// handlers.
///
/// ```
/// use std::sync::Arc;
/// use tierline::Task;
/// use tierline::task::PublishBuilder;
/// use tierline::testing::RecordingPublisher;
/// # #[derive(serde::Serialize, serde::Deserialize)]
/// # struct Greet { name: String }
/// # impl Task for Greet { const NAME: &'static str = "greet"; }
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tierline::Error> {
/// let publisher = Arc::new(RecordingPublisher::new());
/// PublishBuilder::new(publisher.clone(), &Greet { name: "Ada".into() }).delay("10m").await?;
/// publisher.assert_published(&Greet { name: "Ada".into() });
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Default)]
pub struct RecordingPublisher {
    timeline: Arc<Timeline>,
    topology: Option<Topology>,
    record: Mutex<Record>,
}

#[derive(Debug, Default)]
struct Record {
    published: Vec<Published>,
    taken: usize,
}

impl RecordingPublisher {
    /// Without a map: every task goes to the tier `test`.
    pub fn new() -> Self {
        Self::default()
    }

    /// With a map: refuses tasks that are not in it.
    pub fn with_topology(topology: Topology) -> Self {
        Self {
            topology: Some(topology),
            ..Self::default()
        }
    }

    pub(super) fn on(timeline: Arc<Timeline>, topology: Option<Topology>) -> Self {
        Self {
            timeline,
            topology,
            record: Mutex::default(),
        }
    }

    /// Everything that was published so far, in order.
    pub fn published(&self) -> Vec<Published> {
        self.record().published.clone()
    }

    /// Fails unless a task with this payload was published, and shows how the closest one differs.
    ///
    /// # Panics
    ///
    /// If no such task was published.
    #[track_caller]
    pub fn assert_published<T: Task>(&self, expected: &T) {
        // Through text, like the published payload: a value made directly keeps other digits of an
        // `f32`, and cannot hold an `u128`.
        let expected = match PublishRequest::new(expected) {
            Ok(request) => json(&request.payload),
            Err(error) => panic!("{error}"),
        };
        let published = self.published();
        let candidates = published
            .iter()
            .filter(|published| published.message.task == T::NAME);
        let closest = candidates
            .map(|candidate| (differences(&expected, &candidate.json()), candidate))
            .min_by_key(|(differences, _)| differences.len());
        match closest {
            Some((differences, _)) if differences.is_empty() => {}
            Some((differences, candidate)) => panic!(
                "no published `{task}` is the expected one\n  expected  {expected}\n  closest   {closest}\n{}\n{}",
                differences.join("\n"),
                Summary(&published),
                task = T::NAME,
                closest = candidate.json(),
            ),
            None => panic!(
                "no `{}` was published\n  expected  {expected}\n{}",
                T::NAME,
                Summary(&published)
            ),
        }
    }

    /// Fails if anything was published.
    ///
    /// # Panics
    ///
    /// If a task was published.
    #[track_caller]
    pub fn assert_nothing_published(&self) {
        let published = self.published();
        assert!(
            published.is_empty(),
            "expected no published task\n{}",
            Summary(&published)
        );
    }

    /// The tasks that were published since the last call, with their due times.
    pub(super) fn take_new(&self) -> Vec<(SystemTime, Message)> {
        let mut record = self.record();
        let new = record.published[record.taken..]
            .iter()
            .map(|published| {
                let due = later(
                    published.message.enqueued_at,
                    published.delay.unwrap_or_default(),
                );
                (due, published.message.clone())
            })
            .collect();
        record.taken = record.published.len();
        new
    }

    /// The message that the request becomes.
    pub(super) fn message(&self, request: PublishRequest) -> Result<Message, Error> {
        self.message_of(request, false)
    }

    /// `is_row` says that it is published as a row, whatever the home of its tier.
    fn message_of(&self, request: PublishRequest, is_row: bool) -> Result<Message, Error> {
        request.key_claim()?;
        let Some(topology) = &self.topology else {
            return Ok(Message::first(request, "test", 5, self.timeline.now()));
        };
        let route_request = RouteRequest::Publish {
            priority: request.priority,
            is_row: is_row || request.has_key(),
        };
        // As an app with both servers: what it refuses, every app refuses.
        let servers = Servers {
            broker: QUORUM_PRIORITIES_SINCE,
            has_database: true,
        };
        let delay = request.delay.unwrap_or_default();
        let task = &request.task;
        let route = route::destination(topology, None, servers, task, route_request, delay)?;
        route::check_size(topology, &request.task, &request.payload)?;
        let (tier, priority) = (&route.tier, route.priority);
        Ok(Message::first(request, tier, priority, self.timeline.now()))
    }

    fn add(&self, request: PublishRequest, is_row: bool) -> Result<Receipt, Error> {
        let delay = request.delay;
        let (unique, idempotency_key) = (request.unique.clone(), request.idempotency_key.clone());
        let message = self.message_of(request, is_row)?;
        let receipt = Receipt::new(message.id.clone(), &message.tier, message.enqueued_at);
        self.record().published.push(Published {
            message,
            delay,
            unique,
            idempotency_key,
        });
        Ok(receipt)
    }

    fn record(&self) -> MutexGuard<'_, Record> {
        self.record.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Publish for RecordingPublisher {
    fn publish(&self, request: PublishRequest) -> PublishFuture<'_> {
        Box::pin(async move { self.add(request, false) })
    }

    /// Records the task at once: a recording does not know whether the transaction commits.
    #[cfg(feature = "postgres")]
    fn publish_within<'c>(
        &'c self,
        request: PublishRequest,
        _: &'c mut sqlx::PgConnection,
    ) -> PublishFuture<'c> {
        Box::pin(async move { self.add(request, true) })
    }
}

/// A task that was published.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Published {
    /// The message that was enqueued.
    pub message: Message,
    /// Its delay.
    pub delay: Option<Duration>,
    /// The key of unique work. Nothing is compared with it: each publish is recorded, and runs.
    pub unique: Option<Unique>,
    /// The key of a request that may be repeated. Nothing is compared with it either.
    pub idempotency_key: Option<IdempotencyKey>,
}

impl Published {
    /// The payload, if this is the task `T` and its payload decodes.
    pub fn payload<T: Task>(&self) -> Option<T> {
        (self.message.task == T::NAME)
            .then(|| serde_json::from_slice(&self.message.payload).ok())?
    }

    fn json(&self) -> Value {
        json(&self.message.payload)
    }
}

fn json(payload: &[u8]) -> Value {
    serde_json::from_slice(payload)
        .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(payload).into_owned()))
}

/// How many of each task were published.
struct Summary<'a>(&'a [Published]);

impl fmt::Display for Summary<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for published in self.0 {
            *counts.entry(&published.message.task).or_default() += 1;
        }
        if counts.is_empty() {
            return formatter.write_str("published in all: nothing");
        }
        let counts: Vec<String> = counts
            .iter()
            .map(|(task, count)| format!("{count} × {task}"))
            .collect();
        write!(formatter, "published in all: {}", counts.join(", "))
    }
}
