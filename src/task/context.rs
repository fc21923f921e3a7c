use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use super::{
    CancelReason, Cancellation, Data, Publish, PublishBuilder, Task, TaskId, Transactions,
};

/// A handler's view of its task and of the application.
///
/// Taken by value as the second argument of a handler; cheap to clone.
///
/// ```
/// use tierline::{Context, TaskError};
/// # #[derive(serde::Serialize, serde::Deserialize)]
/// # struct SendOtp { phone: String }
/// struct Sms;
///
/// impl Sms {
///     async fn send(&self, phone: &str) -> std::io::Result<()> {
/// #       let _ = phone;
///         Ok(())
///     }
/// }
///
/// async fn send_otp(otp: SendOtp, cx: Context) -> Result<(), TaskError> {
///     cx.data::<Sms>().send(&otp.phone).await?;
///     Ok(())
/// }
/// ```
#[derive(Clone)]
pub struct Context(Arc<ContextParts>);

/// The fields of a context.
pub(crate) struct ContextParts {
    pub(crate) task: &'static str,
    pub(crate) id: TaskId,
    pub(crate) attempt: u32,
    pub(crate) tier: String,
    pub(crate) priority: u8,
    pub(crate) enqueued_at: SystemTime,
    pub(crate) deadline: Instant,
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) traceparent: Option<String>,
    pub(crate) cancellation: Cancellation,
    pub(crate) shutdown: Cancellation,
    pub(crate) data: Arc<Data>,
    pub(crate) publisher: Arc<dyn Publish>,
    #[cfg_attr(
        not(feature = "postgres"),
        expect(dead_code, reason = "transactions are in Postgres")
    )]
    pub(crate) transactions: Transactions,
}

impl Context {
    pub(crate) fn new(parts: ContextParts) -> Self {
        Self(Arc::new(parts))
    }

    #[cfg(feature = "postgres")]
    pub(super) fn transactions(&self) -> &Transactions {
        &self.0.transactions
    }

    /// The task's name.
    pub fn task(&self) -> &'static str {
        self.0.task
    }

    /// The id of this task, the same in all its attempts.
    pub fn id(&self) -> &TaskId {
        &self.0.id
    }

    /// The number of this attempt; the first is 1.
    pub fn attempt(&self) -> u32 {
        self.0.attempt
    }

    /// The tier whose queue delivered the task.
    pub fn tier(&self) -> &str {
        &self.0.tier
    }

    /// The task's priority within its tier.
    pub fn priority(&self) -> u8 {
        self.0.priority
    }

    /// When the task was first enqueued; retries do not change it.
    pub fn enqueued_at(&self) -> SystemTime {
        self.0.enqueued_at
    }

    /// The time of the hard limit, at which this attempt is dropped.
    pub fn deadline(&self) -> Instant {
        self.0.deadline
    }

    /// How long this attempt may still run; zero once the hard limit is reached.
    pub fn time_left(&self) -> Duration {
        self.0
            .deadline
            .saturating_duration_since(tokio::time::Instant::now().into_std())
    }

    /// The header of this name that the publisher added.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.0.headers.get(name).map(String::as_str)
    }

    /// The headers that the publisher added, by name.
    pub fn headers(&self) -> impl Iterator<Item = (&str, &str)> {
        let headers = self.0.headers.iter();
        headers.map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// The W3C trace context that this task continues.
    pub fn traceparent(&self) -> Option<&str> {
        self.0.traceparent.as_deref()
    }

    /// Whether the worker has begun to shut down. The handler may still finish: it has the
    /// worker's [grace period](crate::worker::Worker::grace), and [`is_cancelled`](Self::is_cancelled) is true
    /// when that is over.
    pub fn is_shutting_down(&self) -> bool {
        self.0.shutdown.is_cancelled()
    }

    /// Waits until the worker begins to shut down, at the start of its
    /// [grace period](crate::worker::Worker::grace). A handler that cannot finish within that period saves its
    /// progress, and the next process continues:
    ///
    /// ```
    /// use tierline::{Context, Outcome};
    /// # #[derive(serde::Serialize, serde::Deserialize)]
    /// # struct Export { contacts: u64 }
    /// # async fn export_page(_: u64) {}
    /// # async fn pages_done(_: &Context) -> u64 { 0 }
    /// # async fn save(_: &Context, _: u64) {}
    ///
    /// async fn export(export: Export, cx: Context) -> Outcome {
    ///     for page in pages_done(&cx).await..export.contacts / 100 {
    ///         if cx.is_shutting_down() {
    ///             save(&cx, page).await;
    ///             // The same attempt again, in another process.
    ///             return Outcome::Snooze(std::time::Duration::ZERO);
    ///         }
    ///         export_page(page).await;
    ///     }
    ///     Outcome::Done
    /// }
    /// ```
    ///
    /// The guide has a page on [tasks that outlast a deploy](crate::guide::long_tasks_across_deploys).
    pub fn shutdown_started(&self) -> impl Future<Output = ()> + Send + '_ {
        self.0.shutdown.cancelled()
    }

    /// The signal behind [`shutdown_started`](Self::shutdown_started), to pass to futures that the handler
    /// starts.
    pub fn shutdown_signal(&self) -> &Cancellation {
        &self.0.shutdown
    }

    /// Whether the handler should end now: it has reached its soft limit, the grace period of a shutdown is over, or
    /// its lease is lost.
    pub fn is_cancelled(&self) -> bool {
        self.0.cancellation.is_cancelled()
    }

    /// Why the handler should end; `None` until it should.
    pub fn cancel_reason(&self) -> Option<CancelReason> {
        self.0.cancellation.reason()
    }

    /// Waits until the handler should end: at its soft limit, when the grace period of a shutdown is over, or when
    /// the task's lease is lost ([`cancel_reason`](Self::cancel_reason)). It is then dropped at its hard limit, or half
    /// a second after the other two.
    pub fn cancelled(&self) -> impl Future<Output = ()> + Send + '_ {
        self.0.cancellation.cancelled()
    }

    /// The signal behind [`cancelled`](Self::cancelled), to pass to futures that the handler starts.
    pub fn cancellation(&self) -> &Cancellation {
        &self.0.cancellation
    }

    /// The application's value of this type, from the builder's `data`.
    ///
    /// # Panics
    ///
    /// If the builder has no such value. The attempt then fails with a message that names
    /// the type; see [`try_data`](Self::try_data) for a value that may be absent.
    #[track_caller]
    pub fn data<T: Send + Sync + 'static>(&self) -> &T {
        self.try_data().unwrap_or_else(|| {
            let name = std::any::type_name::<T>();
            panic!(
                "task `{}` asked for data of type `{name}`, and the app has none: \
                 add `.data(…)` with a value of that type where the app (or the test) is built",
                self.task(),
            )
        })
    }

    /// The application's value of this type, if the builder has one.
    pub fn try_data<T: Send + Sync + 'static>(&self) -> Option<&T> {
        self.0.data.get()
    }

    /// Publishes a follow-up task, which continues this one's trace.
    ///
    /// Awaitable as it is, or with options: see [`PublishBuilder`].
    pub fn publish<T: Task>(&self, payload: T) -> PublishBuilder {
        PublishBuilder::new(self.0.publisher.clone(), &payload).traceparent(self.traceparent())
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Context")
            .field("task", &self.0.task)
            .field("id", &self.0.id)
            .field("attempt", &self.0.attempt)
            .field("tier", &self.0.tier)
            .field("shutting_down", &self.is_shutting_down())
            .field("cancelled", &self.is_cancelled())
            .finish_non_exhaustive()
    }
}
