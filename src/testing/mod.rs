//! Helpers for the tests of an application: run a handler as a worker would, check how it ended and which
//! tasks it published. No broker is needed.
//!
//! ```
//! use serde::{Deserialize, Serialize};
//! use tierline::testing::Tester;
//! use tierline::execute::Verdict;
//! use tierline::{Context, Registry, Task, TaskError};
//!
//! #[derive(Serialize, Deserialize)]
//! struct Charge { order: u64 }
//! # impl Task for Charge { const NAME: &'static str = "payment.charge"; }
//!
//! #[derive(Serialize, Deserialize)]
//! struct SendReceipt { order: u64 }
//! # impl Task for SendReceipt { const NAME: &'static str = "email.receipt"; }
//!
//! async fn charge(charge: Charge, cx: Context) -> Result<(), TaskError> {
//!     cx.publish(SendReceipt { order: charge.order }).await?;
//!     Ok(())
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), tierline::Error> {
//! let mut registry = Registry::new();
//! registry.register::<Charge, _>(charge)?;
//! let tester = Tester::builder().registry(registry).build();
//!
//! let run = tester.run(Charge { order: 1007 }).await;
//!
//! assert_eq!(run.verdict, Verdict::Done);
//! tester.assert_published(&SendReceipt { order: 1007 });
//! # Ok(())
//! # }
//! ```
//!
//! Limits apply as in production. A test that waits for one should pause tokio's clock, so that the wait
//! takes no time. Do not pause it for a `blocking` handler: tokio's paused clock does not advance
//! while a blocking thread works. As in production, a limit cannot stop a handler that never
//! yields.

mod difference;
mod recording;
mod timeline;

use std::fmt;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

#[cfg(feature = "postgres")]
use crate::Database;
use crate::Topology;
#[cfg(feature = "postgres")]
use crate::completion::Completions;
use crate::execute::{Executor, Verdict};
use crate::message::Message;
#[cfg(feature = "postgres")]
use crate::message::Received;
use crate::task::{
    AddedMiddleware, Cancellation, Context, Data, Middleware, PublishRequest, Registry, Task,
    Transactions,
};

pub use recording::{Published, RecordingPublisher};
use timeline::{Timeline, later};

/// How many runs [`Tester::drain`] and [`Tester::run_to_end`] do before they give up, unless
/// [`TesterBuilder::most_runs`] sets another number.
pub const MOST_RUNS: usize = 1_000;
/// How many transactions the handlers of a tester may have open at once.
#[cfg(feature = "postgres")]
const TRANSACTIONS: usize = 8;

/// Runs handlers as a worker would, and records the tasks that they publish.
#[derive(Debug)]
pub struct Tester {
    executor: Executor,
    publisher: Arc<RecordingPublisher>,
    timeline: Arc<Timeline>,
    /// The shutdown signal of the simulated process.
    shutdown: Mutex<Cancellation>,
    most_runs: usize,
    #[cfg(feature = "postgres")]
    completions: Option<Arc<Completions>>,
}

impl Tester {
    /// With every `#[task]` handler of the program, no map and no data.
    ///
    /// # Panics
    ///
    /// As [`TesterBuilder::build`].
    #[allow(
        clippy::new_without_default,
        reason = "it can panic, which a default should not"
    )]
    pub fn new() -> Self {
        Self::builder().build()
    }

    /// With what the builder is given.
    pub fn builder() -> TesterBuilder {
        TesterBuilder::default()
    }

    /// Runs one attempt of the task: its first, in the tier of the map.
    ///
    /// # Panics
    ///
    /// As [`message`](Self::message).
    #[track_caller]
    pub fn run<T: Task>(&self, payload: T) -> impl Future<Output = Run> {
        // Outside the future, so that a panic names the test's own line.
        let message = self.message(&payload);
        self.run_message(message)
    }

    /// Runs one attempt of a message, which may be any message that a queue could deliver.
    pub async fn run_message(&self, message: Message) -> Run {
        let executor = self.executor_now();
        let transactions = self.transactions(&message);
        let verdict = executor
            .execute(&message, &Cancellation::new(), &transactions)
            .await;
        Run { message, verdict }
    }

    /// Begins a shutdown, as a deploy does. Running handlers see it through
    /// [`Context::shutdown_started`], and are neither cancelled nor dropped. Later runs belong to the
    /// next process, which is not shutting down.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use serde::{Deserialize, Serialize};
    /// # use tierline::testing::Tester;
    /// # use tierline::execute::Verdict;
    /// # use tierline::{Context, Outcome, Registry, Task};
    /// # #[derive(Serialize, Deserialize)]
    /// # struct Export { contacts: u64 }
    /// # impl Task for Export { const NAME: &'static str = "contacts.export"; }
    /// async fn export(_: Export, cx: Context) -> Outcome {
    ///     cx.shutdown_started().await;
    ///     Outcome::Snooze(Duration::ZERO)
    /// }
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tierline::Error> {
    /// # let mut registry = Registry::new();
    /// # registry.register::<Export, _>(export)?;
    ///
    /// let tester = Tester::builder().registry(registry).build();
    /// let running = tester.run(Export { contacts: 50_000 });
    /// let (run, ()) = tokio::join!(running, async { tester.begin_shutdown() });
    /// assert_eq!(run.verdict, Verdict::Snooze { after: Duration::ZERO });
    /// # Ok(()) }
    /// ```
    pub fn begin_shutdown(&self) {
        let mut shutdown = self.shutdown.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *shutdown).cancel();
    }

    /// The executor of the simulated process.
    fn executor_now(&self) -> Executor {
        let shutdown = self.shutdown.lock().unwrap_or_else(PoisonError::into_inner);
        self.executor.clone().shutdown_signal(shutdown.clone())
    }

    /// The transactions that an attempt of this message may open.
    fn transactions(&self, message: &Message) -> Transactions {
        #[cfg(feature = "postgres")]
        if let Some(completions) = &self.completions {
            let received = Received::known(message.clone(), self.timeline.now());
            return completions.attempt(&Arc::new(received), None);
        }
        let _ = message;
        Transactions::default()
    }

    /// Runs the task until it is settled, including retries and snoozes, and returns every attempt.
    ///
    /// It does not wait between two attempts; for expiry that time counts as passed.
    ///
    /// # Errors
    ///
    /// [`Endless`] if it is not settled after [`MOST_RUNS`] runs, or the builder's number.
    ///
    /// # Panics
    ///
    /// As [`message`](Self::message).
    #[track_caller]
    pub fn run_to_end<T: Task>(
        &self,
        payload: T,
    ) -> impl Future<Output = Result<Vec<Run>, Endless>> {
        let message = self.message(&payload);
        let due = self.timeline.now();
        self.run_all(vec![(due, message)], Vec::new)
    }

    /// Runs all published tasks, and those that they publish in turn, until none is left.
    ///
    /// Delayed tasks, retries and snoozes run in the order in which they fall due, without waiting.
    /// [`published`](Self::published) keeps everything.
    ///
    /// # Errors
    ///
    /// [`Endless`] if there is more to do after [`MOST_RUNS`] runs, or the builder's number.
    pub async fn drain(&self) -> Result<Vec<Run>, Endless> {
        self.run_all(self.publisher.take_new(), || self.publisher.take_new())
            .await
    }

    async fn run_all(
        &self,
        mut waiting: Vec<(SystemTime, Message)>,
        more: impl Fn() -> Vec<(SystemTime, Message)>,
    ) -> Result<Vec<Run>, Endless> {
        let mut runs = Vec::new();
        while let Some(next) = earliest(&waiting) {
            if runs.len() >= self.most_runs {
                return Err(Endless::new(&runs, waiting.len()));
            }
            let (due, message) = waiting.remove(next);
            self.timeline.advance_to(due);
            let run = self.run_message(message).await;
            let now = self.timeline.now();
            match &run.verdict {
                Verdict::Retry { after, .. } => {
                    waiting.push((later(now, *after), run.message.clone().next_attempt()))
                }
                Verdict::Snooze { after } => {
                    waiting.push((later(now, *after), run.message.clone()))
                }
                _ => {}
            }
            waiting.extend(more());
            runs.push(run);
        }
        Ok(runs)
    }

    /// The message that publishing this payload would enqueue. Change it to test another attempt, a past
    /// expiry, or a payload that does not decode.
    ///
    /// # Panics
    ///
    /// If the payload has no JSON form, or the tester has a map without this task.
    #[track_caller]
    pub fn message<T: Task>(&self, payload: &T) -> Message {
        match PublishRequest::new(payload).and_then(|request| self.publisher.message(request)) {
            Ok(message) => message,
            Err(error) => panic!("{error}"),
        }
    }

    /// The context that the handler of this message would get, to call the function directly.
    ///
    /// # Panics
    ///
    /// If the task has no handler.
    #[track_caller]
    pub fn context(&self, message: &Message) -> Context {
        let transactions = self.transactions(message);
        match self.executor_now().context_for(message, &transactions) {
            Some(context) => context,
            None => panic!(
                "there is no context for task `{}`: it has no handler here",
                message.task
            ),
        }
    }

    /// Everything that was published so far, in order.
    pub fn published(&self) -> Vec<Published> {
        self.publisher.published()
    }

    /// Fails unless a task with this payload was published, and shows how the closest one differs.
    ///
    /// # Panics
    ///
    /// If no such task was published.
    #[track_caller]
    pub fn assert_published<T: Task>(&self, expected: &T) {
        self.publisher.assert_published(expected);
    }

    /// Fails if anything was published.
    ///
    /// # Panics
    ///
    /// If a task was published.
    #[track_caller]
    pub fn assert_nothing_published(&self) {
        self.publisher.assert_nothing_published();
    }
}

fn earliest(waiting: &[(SystemTime, Message)]) -> Option<usize> {
    (0..waiting.len()).min_by_key(|&index| waiting[index].0)
}

/// Builds a [`Tester`].
#[derive(Debug, Default)]
pub struct TesterBuilder {
    registry: Option<Registry>,
    topology: Option<Topology>,
    middleware: AddedMiddleware,
    data: Data,
    most_runs: Option<usize>,
    #[cfg(feature = "postgres")]
    database: Option<Database>,
}

impl TesterBuilder {
    /// Uses these handlers. Default: every `#[task]` handler of the program.
    #[must_use]
    pub fn registry(self, registry: Registry) -> Self {
        Self {
            registry: Some(registry),
            ..self
        }
    }

    /// Uses the tiers and priorities of this map, and refuses to publish tasks that are not in it. Default:
    /// every task is in the tier `test`.
    #[must_use]
    pub fn topology(self, topology: Topology) -> Self {
        Self {
            topology: Some(topology),
            ..self
        }
    }

    /// Adds a middleware around every handler, as [`Builder::middleware`](crate::Builder::middleware) does.
    #[must_use]
    pub fn middleware(mut self, middleware: impl Middleware) -> Self {
        self.middleware.add(middleware);
        self
    }

    /// Adds a middleware around the handlers of a group, as
    /// [`Builder::group_middleware`](crate::Builder::group_middleware) does. It needs a
    /// [map](Self::topology).
    #[must_use]
    pub fn group_middleware(
        mut self,
        group: impl Into<String>,
        middleware: impl Middleware,
    ) -> Self {
        self.middleware.add_to_group(group.into(), middleware);
        self
    }

    /// Adds a middleware around the handler of a task, as
    /// [`Builder::task_middleware`](crate::Builder::task_middleware) does.
    #[must_use]
    pub fn task_middleware(mut self, task: impl Into<String>, middleware: impl Middleware) -> Self {
        self.middleware.add_to_task(task.into(), middleware);
        self
    }

    /// Adds a value that handlers take with [`Context::data`].
    #[must_use]
    pub fn data<T: Send + Sync + 'static>(mut self, value: T) -> Self {
        self.data.insert(value);
        self
    }

    /// The database of [`Context::transaction`], which must be [migrated](Database::migrate). Transactions
    /// are real: a commit writes, and completes the task as it does in a worker for a message of the broker. Default:
    /// none, and `transaction` fails with
    /// [`TransactionError::NoDatabase`](crate::error::TransactionError::NoDatabase).
    #[cfg(feature = "postgres")]
    #[must_use]
    pub fn database(self, database: Database) -> Self {
        Self {
            database: Some(database),
            ..self
        }
    }

    /// Sets after how many runs [`Tester::drain`] and [`Tester::run_to_end`] give up. Default:
    /// [`MOST_RUNS`].
    #[must_use]
    pub fn most_runs(self, most_runs: usize) -> Self {
        Self {
            most_runs: Some(most_runs),
            ..self
        }
    }

    /// Builds the tester.
    ///
    /// # Panics
    ///
    /// If two handlers of the program are for one task, or a middleware is for a group that the map does not
    /// have, or for a task that neither the map nor the handlers have.
    #[track_caller]
    pub fn build(self) -> Tester {
        let registry = match self.registry.map_or_else(Registry::collected, Ok) {
            Ok(registry) => registry,
            Err(error) => panic!("{error}"),
        };
        let mapped = self.topology.iter().flat_map(Topology::tasks);
        let tasks: Vec<_> = mapped
            .map(|task| task.name.as_str())
            .chain(registry.iter().map(|it| -> &str { it.name() }))
            .collect();
        let middleware = match self.middleware.resolve(self.topology.as_ref(), &tasks) {
            Ok(middleware) => Arc::new(middleware),
            Err(error) => panic!("{error}"),
        };
        #[cfg(feature = "postgres")]
        let completions = {
            let app = self.topology.as_ref().map_or("test", Topology::app);
            let database = self.database.as_ref();
            database.map(|database| Completions::new(database, app, TRANSACTIONS))
        };
        let timeline = Arc::new(Timeline::default());
        let publisher = Arc::new(RecordingPublisher::on(timeline.clone(), self.topology));
        let clock = timeline.clone();
        let executor = Executor::new(Arc::new(registry), Arc::new(self.data), publisher.clone())
            .middleware(middleware)
            .clock(move || clock.now())
            // Jitter only shortens a delay, and this number shortens it by nothing: delays are exact.
            .random(|| u32::MAX);
        Tester {
            executor,
            publisher,
            timeline,
            shutdown: Mutex::default(),
            most_runs: self.most_runs.unwrap_or(MOST_RUNS),
            #[cfg(feature = "postgres")]
            completions,
        }
    }
}

/// One attempt, as it was run.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Run {
    /// The message that ran.
    pub message: Message,
    /// How it ended.
    pub verdict: Verdict,
}

/// The allowed number of runs did not suffice: tasks publish each other, or one snoozes for
/// ever.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endless {
    runs: usize,
    last: Vec<String>,
    waiting: usize,
}

impl Endless {
    fn new(runs: &[Run], waiting: usize) -> Self {
        let last = runs
            .iter()
            .rev()
            .take(5)
            .rev()
            .map(|run| run.message.task.clone())
            .collect();
        Self {
            runs: runs.len(),
            last,
            waiting,
        }
    }
}

impl fmt::Display for Endless {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{} still to be run after {} runs, the last of which were {}: look for tasks that \
             publish each other, or that snooze for ever, or allow more with `most_runs`",
            self.waiting,
            self.runs,
            self.last.join(", ")
        )
    }
}

impl std::error::Error for Endless {}
