use std::collections::BTreeMap;
use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::{IntoDuration, Task, TaskId};
use crate::error::Error;

/// A publish under way.
pub type PublishFuture<'a> = Pin<Box<dyn Future<Output = Result<Receipt, Error>> + Send + 'a>>;

/// Something that tasks can be published to: the broker, or a recording in a test.
pub trait Publish: Send + Sync + 'static {
    /// Publishes one task.
    fn publish(&self, request: PublishRequest) -> PublishFuture<'_>;
}

/// What a publisher is asked to enqueue.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PublishRequest {
    /// The task's name; the map says to which tier it goes.
    pub task: String,
    /// The payload as JSON.
    pub payload: Vec<u8>,
    /// The identifier that the caller gave. `None`: the publisher draws one.
    pub id: Option<TaskId>,
    /// How long to hold the task back.
    pub delay: Option<Duration>,
    /// The priority within the tier, higher is sooner. `None`: what the map says, which is 5 in a tier with
    /// [priorities](crate::topology#priorities) unless the task has one of its own.
    pub priority: Option<u8>,
    /// For how long, from now on, it is worth running.
    pub expires: Option<Duration>,
    /// The caller's own headers.
    pub headers: BTreeMap<String, String>,
    /// The W3C trace context that the task continues.
    pub traceparent: Option<String>,
    /// How long the publish may take. `None`: what the publisher takes for it.
    pub deadline: Option<Duration>,
    /// Whether a duplicate is worse than an error: what may have been stored is not sent again.
    pub once: bool,
}

impl PublishRequest {
    /// A request without options for the task of this payload.
    ///
    /// # Errors
    ///
    /// [`Error::PayloadNotEncodable`] where the payload has no JSON form.
    pub fn new<T: Task>(payload: &T) -> Result<Self, Error> {
        let bytes = serde_json::to_vec(payload).map_err(|cause| Error::PayloadNotEncodable {
            task: T::NAME,
            cause,
        })?;
        Ok(Self::named(T::NAME, bytes))
    }

    /// A request without options for a task by its name, for callers that have no type: gateways,
    /// schedules. The payload is JSON.
    pub fn named(task: impl Into<String>, payload: Vec<u8>) -> Self {
        Self {
            task: task.into(),
            payload,
            id: None,
            delay: None,
            priority: None,
            expires: None,
            headers: BTreeMap::new(),
            traceparent: None,
            deadline: None,
            once: false,
        }
    }
}

/// Proof that a task was taken.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Receipt {
    /// The task's identifier.
    pub id: TaskId,
    /// The tier it went to.
    pub tier: String,
    /// When it was confirmed.
    pub confirmed_at: SystemTime,
}

impl Receipt {
    /// For publishers: the task of this identifier was confirmed in this tier, at this time.
    pub fn new(id: TaskId, tier: impl Into<String>, confirmed_at: SystemTime) -> Self {
        Self {
            id,
            tier: tier.into(),
            confirmed_at,
        }
    }
}

/// A publish with its options; nothing happens until it is awaited.
///
/// ```
/// use tierline::{Context, Task, TaskError};
/// # #[derive(serde::Serialize, serde::Deserialize)]
/// # struct SendReceipt { order: u64 }
/// # impl Task for SendReceipt { const NAME: &'static str = "email.receipt"; }
/// # #[derive(serde::Serialize, serde::Deserialize)]
/// # struct Charge { order: u64 }
///
/// async fn charge(charge: Charge, cx: Context) -> Result<(), TaskError> {
///     cx.publish(SendReceipt { order: charge.order }).delay("10m").expires("1h").await?;
///     Ok(())
/// }
/// ```
#[must_use = "nothing is published until this is awaited"]
pub struct Publishing {
    publisher: Arc<dyn Publish>,
    request: Result<PublishRequest, Error>,
}

impl Publishing {
    /// The publish of this payload through this publisher.
    pub fn new<T: Task>(publisher: Arc<dyn Publish>, payload: &T) -> Self {
        Self {
            publisher,
            request: PublishRequest::new(payload),
        }
    }

    /// The publish of this request through this publisher.
    pub(crate) fn of(publisher: Arc<dyn Publish>, request: PublishRequest) -> Self {
        Self {
            publisher,
            request: Ok(request),
        }
    }

    /// Lets the publish take this long at most, in place of five seconds.
    pub fn deadline(self, deadline: impl IntoDuration) -> Self {
        self.with_duration(deadline, |request, deadline| {
            request.deadline = Some(deadline)
        })
    }

    /// Never sends again what may have been stored: where a duplicate is worse than an error.
    pub fn once(self) -> Self {
        self.with(|request| request.once = true)
    }

    /// Holds the task back for this time.
    pub fn delay(self, delay: impl IntoDuration) -> Self {
        self.with_duration(delay, |request, delay| request.delay = Some(delay))
    }

    /// Skips the task where it has not started after this time.
    pub fn expires(self, expires: impl IntoDuration) -> Self {
        self.with_duration(expires, |request, expires| request.expires = Some(expires))
    }

    /// Sets the priority within the tier, in place of what the map says. Higher is sooner. A classic tier has 0 to
    /// 10 unless the map says otherwise, a quorum tier none: see [priorities](crate::topology#priorities).
    pub fn priority(self, priority: u8) -> Self {
        self.with(|request| request.priority = Some(priority))
    }

    /// Gives the task this identifier, in place of one drawn at random.
    pub fn id(self, id: impl Into<TaskId>) -> Self {
        self.with(|request| request.id = Some(id.into()))
    }

    /// Adds a header of the caller's own.
    pub fn header(self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.with(|request| {
            request.headers.insert(name.into(), value.into());
        })
    }

    pub(crate) fn traceparent(self, traceparent: Option<&str>) -> Self {
        self.with(|request| request.traceparent = traceparent.map(str::to_owned))
    }

    fn with(mut self, change: impl FnOnce(&mut PublishRequest)) -> Self {
        if let Ok(request) = &mut self.request {
            change(request);
        }
        self
    }

    /// A duration that cannot be read is told where the caller awaits, like any other failure.
    fn with_duration(
        mut self,
        duration: impl IntoDuration,
        change: impl FnOnce(&mut PublishRequest, Duration),
    ) -> Self {
        match duration.into_duration() {
            Ok(duration) => self.with(|request| change(request, duration)),
            Err(error) => {
                self.request = self.request.and(Err(error));
                self
            }
        }
    }
}

impl IntoFuture for Publishing {
    type Output = Result<Receipt, Error>;
    type IntoFuture = PublishFuture<'static>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { self.publisher.publish(self.request?).await })
    }
}

impl fmt::Debug for Publishing {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Publishing")
            .field("request", &self.request)
            .finish_non_exhaustive()
    }
}
