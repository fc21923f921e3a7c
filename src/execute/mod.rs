//! One message becomes a run of its handler, and the run a [`Verdict`]. Workers and test helpers share this
//! code; nothing here knows of a broker.

mod catch_panic;
mod verdict;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::{Instant, timeout_at};

use catch_panic::{Guarded, Panicked, guarded};
pub use verdict::Verdict;

use crate::message::{DeadReason, Failure, FailureKind, Message};
use crate::random;
use crate::spans::Spans;
use crate::task::{
    CancelReason, Cancellation, Context, ContextParts, Data, ErrorAdvice, Handling,
    MiddlewareChains, Outcome, Publish, Registration, Registry, RetryPolicy, TaskError,
    TaskOptions, TransactionUse, Transactions,
};

/// Executes messages: the one piece of code behind every worker and every test helper.
///
/// The steps: check the expiry, look up the handler, decode the payload, run under the limits,
/// classify. A task with middleware is decoded inside that, under the limits. Any of them may end the execution with its [`Verdict`]; what is then done with the
/// message is up to the caller. Nothing here knows of a broker.
///
/// A panic costs only its own attempt, unless the program is built with `panic = "abort"`.
#[derive(Clone)]
pub(crate) struct Executor {
    registry: Arc<Registry>,
    middleware: Arc<MiddlewareChains>,
    data: Arc<Data>,
    publisher: Arc<dyn Publish>,
    shutdown: Cancellation,
    clock: Arc<dyn Fn() -> SystemTime + Send + Sync>,
    random: Arc<dyn Fn() -> u32 + Send + Sync>,
    spans: Spans,
}

impl Executor {
    /// An executor of these handlers, with the application's data and publisher in their context.
    pub(crate) fn new(
        registry: Arc<Registry>,
        data: Arc<Data>,
        publisher: Arc<dyn Publish>,
    ) -> Self {
        Self {
            registry,
            middleware: Arc::default(),
            data,
            publisher,
            shutdown: Cancellation::new(),
            clock: Arc::new(SystemTime::now),
            random: Arc::new(random::number),
            spans: Spans::default(),
        }
    }

    /// What begins spans. Where a handler has one, what it publishes goes on from there. Default: no spans.
    pub(crate) fn spans(self, spans: Spans) -> Self {
        Self { spans, ..self }
    }

    /// Tells handlers by this signal that their process has begun to shut down: see
    /// [`Context::shutdown_started`]. Default: one that nobody gives.
    pub(crate) fn shutdown_signal(self, shutdown: Cancellation) -> Self {
        Self { shutdown, ..self }
    }

    /// Runs handlers inside this middleware. Default: none.
    pub(crate) fn middleware(self, middleware: Arc<MiddlewareChains>) -> Self {
        Self { middleware, ..self }
    }

    /// Replaces the clock that expiry is checked against. Default: the system's.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn clock(self, clock: impl Fn() -> SystemTime + Send + Sync + 'static) -> Self {
        Self {
            clock: Arc::new(clock),
            ..self
        }
    }

    /// Replaces the source of random numbers for jitter. Default: one that nobody can predict.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn random(self, random: impl Fn() -> u32 + Send + Sync + 'static) -> Self {
        Self {
            random: Arc::new(random),
            ..self
        }
    }

    /// Executes one message. Its handler's context is cancelled together with `cancellation`, and may open
    /// `transactions`.
    ///
    /// Dropping the returned future drops the handler.
    pub(crate) async fn execute(
        &self,
        message: &Message,
        cancellation: &Cancellation,
        transactions: &Transactions,
    ) -> Verdict {
        self.steps(message, cancellation, transactions)
            .await
            .unwrap_or_else(|verdict| verdict)
    }

    async fn steps(
        &self,
        message: &Message,
        cancellation: &Cancellation,
        transactions: &Transactions,
    ) -> Result<Verdict, Verdict> {
        check_expiry(message, (self.clock)())?;
        let registration = look_up(&self.registry, message)?;
        let limits = Limits::from_now(registration, cancellation.child());
        let context = self.context(message, registration, &limits, transactions);
        let (running, handling) = self.start(registration, message, context)?;
        let ended = run_under_limits(running, &limits).await;
        match transactions.end() {
            TransactionUse::Completed => {
                report_ending_after_commit(message, ended);
                return Ok(Verdict::Done);
            }
            TransactionUse::NotCommitted if matches!(ended, Ok(Outcome::Done)) => {
                let (task, id) = (&message.task, &message.id);
                tracing::warn!(task, %id, "done, but its transaction was not committed: what it wrote there is rolled back");
            }
            TransactionUse::NotCommitted | TransactionUse::None => {}
        }
        if let Some(error) = handling.as_deref().and_then(Handling::undecodable) {
            return Err(undecodable(message, error));
        }
        let policy = &registration.options().retry;
        Ok(classify(ended, policy, message.attempt, (self.random)()))
    }

    /// Starts the handler, or the middleware around it. In that case the second value tells, after the
    /// run, whether the payload could be decoded.
    fn start(
        &self,
        registration: &Registration,
        message: &Message,
        context: Context,
    ) -> Result<(Guarded, Option<Arc<Handling>>), Verdict> {
        if !self.middleware.has_any(&message.tier, registration.name()) {
            return decode_and_start(registration, message, context).map(|it| (it, None));
        }
        let payload = message.payload.clone();
        let (running, handling) = self.middleware.start(registration, context, payload);
        Ok((Guarded::of(running), Some(handling)))
    }

    /// What becomes of a message that is not run at all: it has expired, or nobody here knows its task.
    pub(crate) fn refuses(&self, message: &Message) -> Option<Verdict> {
        check_expiry(message, (self.clock)())
            .and_then(|()| look_up(&self.registry, message))
            .err()
    }

    /// The options of a task's handler.
    pub(crate) fn options(&self, task: &str) -> Option<&TaskOptions> {
        self.registry.get(task).map(Registration::options)
    }

    /// The context that the handler of this message is given.
    fn context(
        &self,
        message: &Message,
        registration: &Registration,
        limits: &Limits,
        transactions: &Transactions,
    ) -> Context {
        Context::new(ContextParts {
            task: registration.name(),
            id: message.id.clone(),
            attempt: message.attempt,
            tier: message.tier.clone(),
            priority: message.priority,
            enqueued_at: message.enqueued_at,
            deadline: limits.hard.into_std(),
            headers: message.headers.clone(),
            traceparent: (self.spans.current_traceparent()).or_else(|| message.traceparent.clone()),
            cancellation: limits.cancellation.clone(),
            shutdown: self.shutdown.clone(),
            data: self.data.clone(),
            publisher: self.publisher.clone(),
            transactions: transactions.clone(),
        })
    }

    /// A context for the task of this message, as its handler would be given it.
    #[cfg(feature = "testing")]
    pub(crate) fn context_for(
        &self,
        message: &Message,
        transactions: &Transactions,
    ) -> Option<Context> {
        let registration = self.registry.get(&message.task)?;
        let limits = Limits::from_now(registration, Cancellation::new());
        Some(self.context(message, registration, &limits, transactions))
    }
}

impl fmt::Debug for Executor {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Executor")
            .field("registry", &self.registry)
            .finish_non_exhaustive()
    }
}

fn check_expiry(message: &Message, now: SystemTime) -> Result<(), Verdict> {
    match message
        .expires_at
        .map(|expires_at| now.duration_since(expires_at))
    {
        Some(Ok(late)) => Err(Verdict::Expired { late }),
        _ => Ok(()),
    }
}

fn look_up<'a>(registry: &'a Registry, message: &Message) -> Result<&'a Registration, Verdict> {
    registry.get(&message.task).ok_or_else(|| {
        parked(
            DeadReason::UnknownTask,
            format!(
                "no handler of task `{}` is in this program: deploy one that has it, \
                 then redrive the task",
                message.task
            ),
        )
    })
}

/// What cannot be decoded was never started, and costs no attempt.
fn decode_and_start(
    registration: &Registration,
    message: &Message,
    context: Context,
) -> Result<Guarded, Verdict> {
    Guarded::start(|| registration.call(&message.payload, context))
        .map_err(|error| undecodable(message, &error))
}

fn undecodable(message: &Message, error: &serde_json::Error) -> Verdict {
    parked(
        DeadReason::Undecodable,
        format!(
            "the payload is not what task `{}` reads ({error}): \
             deploy a handler that reads it, then redrive the task",
            message.task
        ),
    )
}

/// How long a handler may run, and the signal that the soft limit gives.
struct Limits {
    soft: Instant,
    hard: Instant,
    timeout: Duration,
    cancellation: Cancellation,
}

impl Limits {
    fn from_now(registration: &Registration, cancellation: Cancellation) -> Self {
        let now = Instant::now();
        let options = registration.options();
        Self {
            soft: later(now, options.effective_soft_timeout()),
            hard: later(now, options.timeout),
            timeout: options.timeout,
            cancellation,
        }
    }
}

/// A limit that no clock can hold is one that is never reached; a century stands for it.
fn later(now: Instant, limit: Duration) -> Instant {
    const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
    now + limit.min(CENTURY)
}

async fn run_under_limits(mut running: Guarded, limits: &Limits) -> Result<Outcome, Failure> {
    if let Ok(ended) = timeout_at(limits.soft, &mut running).await {
        return ended.map_err(Failure::from);
    }
    limits.cancellation.cancel_because(CancelReason::SoftLimit);
    match timeout_at(limits.hard, &mut running).await {
        Ok(ended) => ended.map_err(Failure::from),
        Err(_) => {
            let message = format!(
                "it was still running after its timeout of {:?}",
                limits.timeout
            );
            Err(Failure::new(FailureKind::TimedOut, message))
        }
    }
}

/// A task is done as soon as its transaction is committed, whatever its handler says after that.
fn report_ending_after_commit(message: &Message, ended: Result<Outcome, Failure>) {
    let (task, id) = (&message.task, &message.id);
    let failure = match ended {
        Ok(Outcome::Done) => return,
        Ok(Outcome::Retry(error) | Outcome::Dead(error)) => describe(error).to_string(),
        Ok(Outcome::Snooze(_)) => "it asked to run later".to_owned(),
        Ok(Outcome::Discard(reason)) => format!("it was discarded: {reason}"),
        Err(failure) => failure.to_string(),
    };
    tracing::warn!(task, %id, failure, "its transaction is committed, so it is done: what its handler says does not count");
}

fn classify(
    ended: Result<Outcome, Failure>,
    policy: &RetryPolicy,
    attempt: u32,
    random: u32,
) -> Verdict {
    let (failure, advice) = match ended {
        Ok(Outcome::Done) => return Verdict::Done,
        Ok(Outcome::Snooze(after)) => return Verdict::Snooze { after },
        Ok(Outcome::Discard(reason)) => return Verdict::Discarded { reason },
        Ok(Outcome::Dead(error)) => (describe(error), ErrorAdvice::Permanent),
        Ok(Outcome::Retry(error)) => {
            let advice = error.advice();
            (describe(error), advice)
        }
        Err(failure) => (failure, ErrorAdvice::AsThePolicySays),
    };
    match (advice, policy.delay_after(attempt, random)) {
        (ErrorAdvice::Permanent, _) => Verdict::Dead {
            reason: DeadReason::Permanent,
            failure,
        },
        (_, None) => Verdict::Dead {
            reason: DeadReason::RetriesExhausted,
            failure,
        },
        (ErrorAdvice::RetryAfter(after), Some(_)) => Verdict::Retry { after, failure },
        (ErrorAdvice::AsThePolicySays, Some(after)) => Verdict::Retry { after, failure },
    }
}

/// The error's own code writes its message, and may panic like any other code of the handler.
fn describe(error: TaskError) -> Failure {
    guarded(move || Failure::from(&error)).unwrap_or_else(Failure::from)
}

fn parked(reason: DeadReason, message: String) -> Verdict {
    Verdict::Dead {
        reason,
        failure: Failure::new(FailureKind::NotStarted, message),
    }
}

impl From<Panicked> for Failure {
    fn from(Panicked(message): Panicked) -> Self {
        Failure::new(FailureKind::Panic, format!("it panicked: {message}"))
    }
}

#[cfg(test)]
#[cfg(feature = "testing")]
mod tests;
