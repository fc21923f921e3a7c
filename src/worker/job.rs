//! One delivery in a slot: from its start to what follows on it.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::mpsc::UnboundedSender;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;
use tracing::Instrument;

use super::transactions::GroupTransactions;
use super::watchdog::Report;
use super::{Shared, WIND_DOWN};
use crate::execute::Verdict;
use crate::message::{DeadReason, Failure, FailureKind, Message, Received};
use crate::observe::{Event, Observers, TaskRef};
use crate::source::{Handle, LeasedRun, Next, dead, processed, task_ref, unmapped, unreadable};
use crate::task::{
    CancelReason, Cancellation, TaskEnding, TaskOptions, TransactionUse, Transactions,
};

/// A delivery of a group: the index of its source, and its handle there.
pub(super) type JobKey = (usize, Handle);

/// Tells a group what follows on a delivery: its handler ended, or is past its hard limit and does not yield,
/// so that nothing can stop it.
#[derive(Debug)]
pub(super) struct JobEvent {
    pub(super) key: JobKey,
    pub(super) next: Next,
    /// Whether its handler was called.
    pub(super) has_started: bool,
}

/// Starts a job, and tells the group how it ends, whatever happens to it. It is dropped with what is
/// returned.
pub(super) fn start(
    shared: Arc<Shared>,
    group: GroupTransactions,
    received: Arc<Received>,
    lease: Option<LeasedRun>,
    key: JobKey,
    events: UnboundedSender<JobEvent>,
) -> AbortOnDropHandle<()> {
    let reporter = Reporter {
        key,
        events: Some(events),
    };
    AbortOnDropHandle::new(tokio::spawn(async move {
        let transactions = group.of(&received, lease.as_ref());
        let (begin, lost) = match lease {
            Some(LeasedRun { begin, lost, .. }) => (begin, Some(lost)),
            None => (None, None),
        };
        if let Some(begin) = begin
            && begin.await != Ok(true)
        {
            return reporter.ended(Next::Back, false);
        }
        // A row is there only as long as its task is not done.
        let startable = match lost.is_none() && group.is_done(&received).await {
            true => Err(already_done(&shared, &received)),
            false => check(&shared, &received),
        };
        let has_started = startable.is_ok();
        let next = match startable {
            Ok(message) => {
                let lost = lost.as_ref();
                run(&shared, &received, message, lost, &transactions, &reporter).await
            }
            Err(next) => next,
        };
        if lost.is_none() && matches!(next, Next::Done(_)) {
            // The source remembers what has ended by its key. Computed here, a large payload does not hold up
            // its ticks.
            received.key();
        }
        reporter.ended(next, has_started);
    }))
}

/// Tells the group of a job's end, even if the job panics.
struct Reporter {
    key: JobKey,
    events: Option<UnboundedSender<JobEvent>>,
}

impl Reporter {
    fn ended(mut self, next: Next, has_started: bool) {
        if let Some(events) = self.events.take() {
            // Without a receiver the worker has ended, and the broker takes the message back.
            let _ = events.send(JobEvent {
                key: self.key,
                next,
                has_started,
            });
        }
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        if let Some(events) = self.events.take() {
            let _ = events.send(JobEvent {
                key: self.key,
                next: Next::Back,
                has_started: true,
            });
        }
    }
}

/// The message of a delivery.
///
/// # Errors
/// Its handler cannot be called, and this follows on it instead.
fn check<'r>(shared: &Shared, received: &'r Received) -> Result<&'r Message, Next> {
    let message = received.message().map_err(|_| unreadable(received))?;
    let task = task_ref(message);
    let Some(goes_to) = shared.settings.goes_to(&message.task) else {
        return Err(unmapped(message));
    };
    let observers = &shared.settings.observers;
    // While a task is overridden, what waits in the tier of the map stays there.
    let is_of_map = || {
        let mapped = shared.settings.topology.task(&message.task);
        mapped.is_some_and(|mapped| mapped.tier == message.tier)
    };
    if goes_to.name != message.tier && !is_of_map() && !received.is_moved() {
        let mapped = &goes_to.name;
        tracing::debug!(task = message.task, tier = message.tier, %mapped, "a task of another tier");
        observers.emit(&Event::Strayed { task, mapped });
    }
    match shared.executor.refuses(message) {
        Some(verdict) => Err(next(shared, received, message, verdict, None)),
        None => Ok(message),
    }
}

/// Runs a delivery. `lost` is cancelled when its lease is lost, and when the grace period of a shutdown is over.
async fn run(
    shared: &Arc<Shared>,
    received: &Arc<Received>,
    message: &Message,
    lost: Option<&Cancellation>,
    transactions: &Transactions,
    reporter: &Reporter,
) -> Next {
    let task = task_ref(message);
    let observers = &shared.settings.observers;
    let due_at = message.due_at.unwrap_or(message.enqueued_at);
    let waited = SystemTime::now()
        .duration_since(due_at.max(message.enqueued_at))
        .unwrap_or_default();
    let begin = Instant::now();
    let _run = ObservedRun::start(observers, task, waited, begin);
    let spans = shared.settings.publisher.spans();
    let traceparent = message.traceparent.as_deref();
    let span = received.begin_span(|| spans.process(processed(task), traceparent));
    let cancelled = lost.unwrap_or(&shared.cancelled);
    let mut watched = pin!(watched(
        shared,
        received,
        message,
        cancelled,
        transactions,
        reporter
    ));
    let verdict = match lost {
        None => watched.await,
        Some(lost) => tokio::select! {
            verdict = &mut watched => verdict,
            // The handler is told by its context, and dropped a moment later.
            () = lost.cancelled() => timeout(WIND_DOWN, watched).await.ok().flatten(),
        },
    };
    // A handler that was dropped may have committed before.
    let verdict = verdict.or_else(|| match transactions.end() {
        TransactionUse::Completed => Some(Verdict::Done),
        TransactionUse::NotCommitted | TransactionUse::None => None,
    });
    let (outcome, error) = verdict.as_ref().map_or(("given_back", None), labels);
    span.ended(outcome, error);
    let is_lost = cancelled.reason() == Some(CancelReason::LeaseLost);
    match verdict {
        // A handler that was told to stop has not failed. If it is done all the same, and no other worker has taken
        // the task over, it need not run again.
        Some(verdict) if !is_lost || matches!(verdict, Verdict::Done) => {
            next(shared, received, message, verdict, Some(begin.elapsed()))
        }
        _ => {
            let why = match is_lost {
                true => "its lease is lost",
                false => "the worker shuts down",
            };
            let ran = Some(begin.elapsed());
            observers.emit(&Event::GivenBack { task, why, ran });
            Next::Back
        }
    }
}

/// Emits the start of a run and its end, also if the run is dropped or panics.
struct ObservedRun<'a> {
    observers: &'a Observers,
    task: TaskRef<'a>,
    begin: Instant,
}

impl<'a> ObservedRun<'a> {
    fn start(
        observers: &'a Observers,
        task: TaskRef<'a>,
        waited: Duration,
        begin: Instant,
    ) -> Self {
        observers.emit(&Event::Started { task, waited });
        Self {
            observers,
            task,
            begin,
        }
    }
}

impl Drop for ObservedRun<'_> {
    fn drop(&mut self) {
        let (task, ran) = (self.task, self.begin.elapsed());
        self.observers.emit(&Event::Ended { task, ran });
    }
}

/// The handler's verdict; `None` if the shutdown did not wait for it.
async fn watched(
    shared: &Arc<Shared>,
    received: &Arc<Received>,
    message: &Message,
    cancelled: &Cancellation,
    transactions: &Transactions,
    reporter: &Reporter,
) -> Option<Verdict> {
    let span = tracing::info_span!(
        "task",
        name = message.task,
        tier = message.tier,
        id = %message.id,
        attempt = message.attempt
    );
    let options = shared.executor.options(&message.task);
    let limit = options.unwrap_or(&TaskOptions::new()).timeout;
    let watching = shared.watchdog.add(limit, {
        let (shared, received) = (Arc::downgrade(shared), received.clone());
        let (key, events) = (reporter.key, reporter.events.clone());
        let (transactions, begin) = (transactions.clone(), Instant::now());
        move |report| {
            let Ok(message) = received.message() else {
                return;
            };
            let Some(shared) = shared.upgrade() else {
                return;
            };
            emit_report(&shared, message, report);
            if let (Report::Hung(since), Some(events)) = (report, &events) {
                let next = match transactions.end() {
                    TransactionUse::Completed => {
                        let ran = Some(begin.elapsed());
                        next(&shared, &received, message, Verdict::Done, ran)
                    }
                    TransactionUse::NotCommitted | TransactionUse::None => {
                        received.set_ran(begin.elapsed());
                        hung(message, since)
                    }
                };
                // Without a receiver nobody waits for it either.
                let has_started = true;
                let _ = events.send(JobEvent {
                    key,
                    next,
                    has_started,
                });
            }
        }
    });
    let handler = pin!(shared.executor.execute(message, cancelled, transactions));
    let handler = watching.watch(handler).instrument(span);
    let handler = async {
        match received.span() {
            Some(span) => span.around(handler).await,
            None => handler.await,
        }
    };
    shared.dropped.run_until_cancelled(handler).await
}

/// What spans call a verdict, and the kind of its failure.
fn labels(verdict: &Verdict) -> (&'static str, Option<&str>) {
    match verdict {
        Verdict::Done => ("done", None),
        Verdict::Discarded { .. } => ("discarded", None),
        Verdict::Expired { .. } => ("expired", None),
        Verdict::Snooze { .. } => ("snoozed", None),
        Verdict::Retry { failure, .. } => ("retried", Some(error_type(failure))),
        Verdict::Dead { failure, .. } => ("dead", Some(error_type(failure))),
    }
}

fn error_type(failure: &Failure) -> &str {
    let known = failure.error_type.as_deref();
    known.unwrap_or(failure.kind.as_str())
}

/// Another run of the task has committed.
fn already_done(shared: &Shared, received: &Received) -> Next {
    if let Ok(message) = received.message() {
        let task = task_ref(message);
        let (name, id) = (task.name, task.id);
        tracing::info!(task = name, %id, "done before, not run");
        let observers = &shared.settings.observers;
        observers.emit(&Event::AlreadyDone { task });
    }
    Next::Done(TaskEnding::Done)
}

/// What follows on a verdict; `ran` is how long the handler ran, if it did. Emits the events of those on which nothing
/// follows.
fn next(
    shared: &Shared,
    received: &Received,
    message: &Message,
    verdict: Verdict,
    ran: Option<Duration>,
) -> Next {
    if let Some(ran) = ran {
        received.set_ran(ran);
    }
    let task = task_ref(message);
    let (name, id) = (task.name, task.id);
    let observers = &shared.settings.observers;
    match verdict {
        Verdict::Done => {
            let ran = ran.unwrap_or_default();
            observers.emit(&Event::Done { task, ran });
            if let Some(span) = received.span() {
                span.settled("ack", processed(task));
            }
            Next::Done(TaskEnding::Done)
        }
        Verdict::Discarded { reason } => {
            tracing::info!(task = name, %id, reason, "discarded");
            let reason = &reason;
            observers.emit(&Event::Discarded { task, reason, ran });
            Next::Done(TaskEnding::Discarded)
        }
        Verdict::Expired { late } => {
            tracing::info!(task = name, %id, ?late, "expired, not run");
            observers.emit(&Event::Expired { task, late });
            Next::Done(TaskEnding::Expired)
        }
        Verdict::Snooze { after } => Next::Later {
            message: Box::new(message.clone()),
            after,
            failure: None,
        },
        Verdict::Retry { after, failure } => Next::Later {
            message: Box::new(message.clone().failed(&failure).next_attempt()),
            after,
            failure: Some(failure),
        },
        Verdict::Dead { reason, failure } => dead(message, reason, failure),
    }
}

fn hung(message: &Message, since: Duration) -> Next {
    let problem = format!(
        "it is past its timeout and has not yielded for {since:.1?}, so it cannot be stopped and \
         holds a thread until its process ends; move blocking code to spawn_blocking"
    );
    let failure = Failure::new(FailureKind::TimedOut, problem);
    dead(message, DeadReason::Hung, failure)
}

fn emit_report(shared: &Shared, message: &Message, report: Report) {
    let (name, id) = (&message.task, &message.id);
    match report {
        Report::Stuck(since) => {
            tracing::warn!(task = name, %id, ?since, "a handler does not yield");
            let task = task_ref(message);
            let observers = &shared.settings.observers;
            observers.emit(&Event::Stuck { task, since });
        }
        Report::Hung(since) => {
            tracing::error!(task = name, %id, ?since, "a handler is past its timeout and never yields");
        }
        Report::Ending => {
            tracing::error!(task = name, %id, "handlers that never yield hold every thread: the process ends");
        }
    }
}
