use std::collections::BTreeMap;
use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use super::{IdempotencyKey, IntoDuration, KeyClaim, Task, TaskId, TaskKey, Unique};
#[cfg(feature = "postgres")]
use crate::error::DatabaseError;
use crate::error::Error;
use crate::error::PublishError;

/// The future of a publish.
pub type PublishFuture<'a> = Pin<Box<dyn Future<Output = Result<Receipt, Error>> + Send + 'a>>;

/// A destination of tasks: an app's servers, or a recording in a test.
pub trait Publish: Send + Sync + 'static {
    /// Publishes one task.
    fn publish(&self, request: PublishRequest) -> PublishFuture<'_>;

    /// Publishes one task within a transaction of the caller, on this connection: it runs if that commits.
    ///
    /// This default is for publishers without a database, and refuses.
    #[cfg(feature = "postgres")]
    fn publish_within<'c>(
        &'c self,
        request: PublishRequest,
        connection: &'c mut sqlx::PgConnection,
    ) -> PublishFuture<'c> {
        let _ = (request, connection);
        let tried = "publish within a transaction".into();
        Box::pin(async { Err(Error::Database(DatabaseError::NotConfigured { tried })) })
    }
}

/// A request to enqueue a task.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PublishRequest {
    /// The task's name; the map gives its tier.
    pub task: String,
    /// The payload as JSON.
    pub payload: Vec<u8>,
    /// The caller's id for the task. `None`: the publisher draws one.
    pub id: Option<TaskId>,
    /// The delay of the task.
    pub delay: Option<Duration>,
    /// The priority within the tier, higher is sooner. `None`: the map's, which is 5 in a tier with
    /// [priorities](crate::topology#priorities) unless the task has its own.
    pub priority: Option<u8>,
    /// The time from now on after which the task expires.
    pub expires: Option<Duration>,
    /// The caller's own headers.
    pub headers: BTreeMap<String, String>,
    /// The W3C trace context that the task continues.
    pub traceparent: Option<String>,
    /// How long the publish may take. `None`: the publisher's default.
    pub deadline: Option<Duration>,
    /// Whether a duplicate is worse than an error: a message that may be stored is not sent again.
    pub once: bool,
    /// The key of unique work. See [`PublishBuilder::unique`].
    pub unique: Option<Unique>,
    /// The key of a request that may be repeated. See [`PublishBuilder::idempotency_key`].
    pub idempotency_key: Option<IdempotencyKey>,
    /// The key that a limit with `per` counts it under. See [`PublishBuilder::limit_key`].
    pub limit_key: Option<String>,
}

impl PublishRequest {
    /// A request without options for this payload's task.
    ///
    /// # Errors
    ///
    /// [`PublishError::PayloadNotEncodable`] if the payload has no JSON form.
    pub fn new<T: Task>(payload: &T) -> Result<Self, Error> {
        let bytes = serde_json::to_vec(payload).map_err(|cause| {
            Error::Publish(PublishError::PayloadNotEncodable {
                task: T::NAME,
                cause,
            })
        })?;
        Ok(Self::named(T::NAME, bytes))
    }

    /// A request without options for a task by its name, for callers without its type: gateways,
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
            unique: None,
            idempotency_key: None,
            limit_key: None,
        }
    }

    /// The key that the task is published with.
    ///
    /// # Errors
    /// [`PublishError::InvalidKey`] and [`Error::InvalidDuration`].
    pub(crate) fn key_claim(&self) -> Result<Option<KeyClaim>, Error> {
        let (unique, idempotency) = (self.unique.as_ref(), self.idempotency_key.as_ref());
        KeyClaim::new(&self.task, unique, idempotency)
    }

    /// The key alone, unchecked.
    pub(crate) fn task_key(&self) -> Option<TaskKey> {
        let unique = self.unique.as_ref().map(Unique::task_key);
        let idempotency = self.idempotency_key.as_ref();
        unique.or_else(|| idempotency.map(IdempotencyKey::task_key))
    }

    /// Whether the task has a key, which only a row in Postgres can have.
    pub(crate) fn has_key(&self) -> bool {
        self.unique.is_some() || self.idempotency_key.is_some()
    }
}

/// Proof that a task is stored, by the broker or in Postgres.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Receipt {
    /// The task's id. Of a [duplicate](Self::is_duplicate): that of the first.
    pub id: TaskId,
    /// The tier it went to. Of a duplicate: the tier that the first was published to, wherever it is now.
    pub tier: String,
    /// When it was confirmed.
    pub confirmed_at: SystemTime,
    /// Whether the task was there already, under the same [unique](PublishBuilder::unique) or
    /// [idempotency](PublishBuilder::idempotency_key) key: nothing was stored.
    pub is_duplicate: bool,
    /// The id of the waiting task whose place it took, which will not run: see [`Unique::or_replace`].
    pub replaced: Option<TaskId>,
}

impl Receipt {
    /// For publishers: the task with this id was confirmed in this tier, at this time.
    pub fn new(id: TaskId, tier: impl Into<String>, confirmed_at: SystemTime) -> Self {
        Self {
            id,
            tier: tier.into(),
            confirmed_at,
            is_duplicate: false,
            replaced: None,
        }
    }
}

/// A publish with its options. It does nothing until it is awaited.
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
pub struct PublishBuilder {
    publisher: Arc<dyn Publish>,
    request: Result<PublishRequest, Error>,
}

impl PublishBuilder {
    /// Publishes this payload through this publisher.
    pub fn new<T: Task>(publisher: Arc<dyn Publish>, payload: &T) -> Self {
        Self {
            publisher,
            request: PublishRequest::new(payload),
        }
    }

    /// Publishes this request through this publisher.
    pub(crate) fn of(publisher: Arc<dyn Publish>, request: PublishRequest) -> Self {
        Self {
            publisher,
            request: Ok(request),
        }
    }

    /// Sets the longest time that the publish may take. Default: five seconds.
    pub fn deadline(self, deadline: impl IntoDuration) -> Self {
        self.with_duration("deadline", deadline, |request, deadline| {
            request.deadline = Some(deadline)
        })
    }

    /// Never sends a message again that may be stored: for tasks whose duplicate is worse than an error.
    pub fn once(self) -> Self {
        self.with(|request| request.once = true)
    }

    /// Delays the task by this time.
    pub fn delay(self, delay: impl IntoDuration) -> Self {
        self.with_duration("delay", delay, |request, delay| request.delay = Some(delay))
    }

    /// Skips the task if it has not started after this time.
    pub fn expires(self, expires: impl IntoDuration) -> Self {
        self.with_duration("expires", expires, |request, expires| {
            request.expires = Some(expires)
        })
    }

    /// Sets the priority within the tier, in place of the map's. Higher is sooner. By default a classic tier has 0 to
    /// 10 and a quorum tier none: see [priorities](crate::topology#priorities).
    pub fn priority(self, priority: u8) -> Self {
        self.with(|request| request.priority = Some(priority))
    }

    /// Gives the task this id, in place of a random one.
    pub fn id(self, id: impl Into<TaskId>) -> Self {
        self.with(|request| request.id = Some(id.into()))
    }

    /// Adds one of the caller's own headers.
    pub fn header(self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.with(|request| {
            request.headers.insert(name.into(), value.into());
        })
    }

    /// Publishes the task within the caller's own transaction, as a row of its tier, whatever the tier's `queue` is: it
    /// runs if the transaction commits, and never if it rolls back. All options and checks are as for any other publish;
    /// a delay may have any length.
    ///
    /// Takes a `&mut` [`Transaction`](sqlx::Transaction) or `&mut` [`PgConnection`](sqlx::PgConnection) to the app's own
    /// database. Workers that have this database take the row from there. Where they do not, a relay sends it to the
    /// broker. The guide's page [the outbox](crate::guide::the_outbox) has the whole story.
    ///
    /// ```no_run
    /// # #[derive(serde::Serialize, serde::Deserialize)]
    /// # struct SendReceipt { order: i64 }
    /// # impl tierline::Task for SendReceipt { const NAME: &'static str = "email.receipt"; }
    /// # async fn example(app: tierline::Tierline, pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
    /// let mut tx = pool.begin().await?;
    /// sqlx::query("INSERT INTO orders (id) VALUES (7)").execute(&mut *tx).await?;
    /// app.publish(SendReceipt { order: 7 }).within(&mut tx).await?;
    /// tx.commit().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As for any publish; [`DatabaseError::NotConfigured`] if the app has no database. After an error of the database
    /// the transaction can only be rolled back, as after any other statement of it that fails. So roll it back after
    /// [`PublishError::Unconfirmed`]: the database did not answer before the deadline, and may still insert the row.
    #[cfg(feature = "postgres")]
    pub fn within<'c>(self, connection: &'c mut sqlx::PgConnection) -> PublishFuture<'c> {
        Box::pin(async move {
            let publisher = self.publisher;
            publisher.publish_within(self.request?, connection).await
        })
    }

    /// Publishes the task unless another one of the app has this key: while that one waits or runs, the receipt is the
    /// other task's, with [`is_duplicate`](Receipt::is_duplicate). [`Unique`] has more: how long the key is held, and what
    /// a second publish does.
    ///
    /// The task is a row in Postgres, whichever home its tier has. Key and row are one commit, also
    /// [`within`](Self::within) a transaction. Needs a database.
    ///
    /// ```no_run
    /// # async fn example(app: tierline::Tierline) -> Result<(), tierline::Error> {
    /// # #[derive(serde::Serialize, serde::Deserialize)]
    /// # struct Report { customer: u64 }
    /// # impl tierline::Task for Report { const NAME: &'static str = "report.export"; }
    /// use tierline::task::Unique;
    ///
    /// let receipt = app.publish(Report { customer: 42 }).unique("report:42").await?;
    /// if receipt.is_duplicate {
    ///     println!("{} makes it already", receipt.id);
    /// }
    /// let unique = Unique::key("report:42").until_started().at_most("6h");
    /// app.publish(Report { customer: 42 }).unique(unique).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`PublishError::InvalidKey`], [`PublishError::KeyWithoutDatabase`]; [`PublishError::Duplicate`] if the publish
    /// [refuses](Unique::or_refuse) to be one; [`PublishError::KeyBusy`].
    pub fn unique(self, unique: impl Into<Unique>) -> Self {
        self.with(|request| request.unique = Some(unique.into()))
    }

    /// Publishes the task once, however often the caller tries: within 24 hours, or the key's own
    /// [window](IdempotencyKey::window), each further publish with this key gets a receipt for the first task, with
    /// [`is_duplicate`](Receipt::is_duplicate), whatever became of that task.
    ///
    /// The task is a row in Postgres, whichever home its tier has. Key and row are one commit. Needs a database.
    ///
    /// ```no_run
    /// # async fn example(app: tierline::Tierline) -> Result<(), tierline::Error> {
    /// # #[derive(serde::Serialize, serde::Deserialize)]
    /// # struct Charge { order: u64 }
    /// # impl tierline::Task for Charge { const NAME: &'static str = "payment.charge"; }
    /// let request_id = "7d1c"; // For example the header Idempotency-Key of a request.
    /// let receipt = app.publish(Charge { order: 7 }).idempotency_key(request_id).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`PublishError::InvalidKey`], [`PublishError::KeyWithoutDatabase`]; [`PublishError::IdempotencyMismatch`] if the key was
    /// used for another task or payload; [`PublishError::KeyBusy`].
    pub fn idempotency_key(self, key: impl Into<IdempotencyKey>) -> Self {
        self.with(|request| request.idempotency_key = Some(key.into()))
    }

    /// The key that a limit with `per` in the map counts the task under, such as a customer's number: at most so many tasks
    /// of each key run at once. Also the key that takes its turn in a tier with `fair`. Default: the field of the payload
    /// that the map names. At most 200 bytes.
    ///
    /// # Errors
    /// [`PublishError::InvalidMessage`] if it is longer.
    pub fn limit_key(self, key: impl Into<String>) -> Self {
        self.with(|request| request.limit_key = Some(key.into()))
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

    /// An invalid duration is reported when the caller awaits, like any other failure.
    fn with_duration(
        mut self,
        setting: &'static str,
        duration: impl IntoDuration,
        change: impl FnOnce(&mut PublishRequest, Duration),
    ) -> Self {
        match duration.into_duration() {
            Ok(duration) => self.with(|request| change(request, duration)),
            Err(invalid) => {
                self.request = self.request.and(Err(invalid.of(setting).into()));
                self
            }
        }
    }
}

impl IntoFuture for PublishBuilder {
    type Output = Result<Receipt, Error>;
    type IntoFuture = PublishFuture<'static>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { self.publisher.publish(self.request?).await })
    }
}

impl fmt::Debug for PublishBuilder {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("PublishBuilder")
            .field("request", &self.request)
            .finish_non_exhaustive()
    }
}
