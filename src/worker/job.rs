//! One message in a slot: from its delivery to the moment when its outcome is durable.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::mpsc::UnboundedSender;
use tokio_util::task::AbortOnDropHandle;
use tracing::Instrument;

use super::gate::ALONE_FROM;
use super::settle::{Package, given_id};
use super::watchdog::Report;
use super::{Verdict, Workshop};
use crate::Error;
use crate::message::{DeadReason, Failure, FailureKind, Message};
use crate::observe::{Event, TaskRef};
use crate::random;
use crate::task::TaskOptions;

/// How long a copy of a message that goes back may take to be confirmed.
const COPY_LIMIT: Duration = Duration::from_millis(700);
/// How long a suspect that cannot run alone now waits before it is tried again, at least; four times
/// as long for every crash after which it was to run alone. The seldomer it is in hand, the seldomer
/// it is counted with another.
const AROUND: Duration = Duration::from_millis(500);
/// How long a slot rests before a message whose successor was not stored goes back.
const BACK_PAUSE: Duration = Duration::from_secs(1);

/// The number of a job within its group.
pub(super) type JobId = u64;

/// What is done with a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// It is run.
    Run,
    /// It is not run: its worker died with it, so its crash count goes up first.
    Suspect,
    /// It is not run: it must run alone, and cannot now.
    SendAround,
    /// It is a dead letter: it has not yielded since this long, past its hard limit.
    Hung(Duration),
}

/// How a job ended.
#[derive(Debug)]
pub(super) enum End {
    /// It ran to its end, and nothing follows.
    Completed,
    /// What follows on it is stored.
    Succeeded,
    /// Nothing is stored: it goes back to the broker.
    Back,
    /// Likewise, and nothing explains that it comes again: it is a suspect as before.
    StillSuspect,
}

/// What a group is told of its jobs.
#[derive(Debug)]
pub(super) enum News {
    Ended(JobId, End),
    Hung(JobId, Duration),
}

/// Begins a job, and tells the group how it ends, whatever happens to it. It is dropped with what is
/// returned.
pub(super) fn start(
    shop: Arc<Workshop>,
    package: Arc<Package>,
    id: JobId,
    kind: Kind,
    news: UnboundedSender<News>,
) -> AbortOnDropHandle<()> {
    let guard = Guard {
        id,
        news: Some(news),
    };
    AbortOnDropHandle::new(tokio::spawn(async move {
        let end = match kind {
            Kind::Run => run(&shop, &package, &guard).await,
            // In boxes, like all that is seldom: every job has room for the largest of them.
            Kind::Suspect => Box::pin(suspect(&shop, &package)).await,
            Kind::SendAround => Box::pin(send_around(&shop, &package)).await,
            Kind::Hung(since) => Box::pin(bury_hung(&shop, &package, since)).await,
        };
        if matches!(end, End::Completed) {
            // The group remembers what has ended by its key. Computed here, a large payload does not hold
            // up its turns.
            package.key();
        }
        guard.tell(end);
    }))
}

/// Tells the group of a job's end, even where the job panics.
struct Guard {
    id: JobId,
    news: Option<UnboundedSender<News>>,
}

impl Guard {
    fn tell(mut self, end: End) {
        if let Some(news) = self.news.take() {
            // Nobody listens any more: the worker has ended, and the broker takes it back.
            let _ = news.send(News::Ended(self.id, end));
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(news) = self.news.take() {
            let _ = news.send(News::Ended(self.id, End::Back));
        }
    }
}

async fn run(shop: &Arc<Workshop>, package: &Arc<Package>, guard: &Guard) -> End {
    let now = SystemTime::now();
    let message = match package.open(now) {
        Ok(message) => Arc::new(message),
        Err(problem) => return Box::pin(bury_unreadable(shop, package, problem)).await,
    };
    let task = task_ref(&message);
    let Some(route) = shop.topology.task(&message.task) else {
        let problem = format!(
            "task `{}` is not mapped to a tier: add it to [tasks] in the map, then redrive it",
            message.task
        );
        let failure = Failure::new(FailureKind::NotStarted, problem);
        let verdict = Verdict::Dead {
            reason: DeadReason::UnknownTask,
            failure,
        };
        return Box::pin(follow(shop, package, &message, verdict)).await;
    };
    if route.tier != package.tier {
        let mapped = &route.tier;
        tracing::debug!(task = message.task, tier = package.tier, %mapped, "a task of another tier");
        shop.observers.emit(&Event::Strayed { task, mapped });
    }
    if let Some(verdict) = shop.executor.refuses(&message) {
        return match is_over(shop, &message, &verdict, Duration::ZERO) {
            true => End::Completed,
            false => Box::pin(follow(shop, package, &message, verdict)).await,
        };
    }
    let due_at = message.due_at.unwrap_or(message.enqueued_at);
    let waited = now
        .duration_since(due_at.max(message.enqueued_at))
        .unwrap_or_default();
    shop.observers.emit(&Event::Started { task, waited });
    let begin = Instant::now();
    let ended = watched(shop, &message, guard).await;
    if shop.is_abandoned.load(Ordering::Acquire) {
        // The handler may have ended because its context was cancelled. The group never acknowledges the
        // message: with a retry or a dead letter it would be there twice.
        return End::Back;
    }
    match ended {
        Some(verdict) if is_over(shop, &message, &verdict, begin.elapsed()) => End::Completed,
        Some(verdict) => Box::pin(follow(shop, package, &message, verdict)).await,
        None => Box::pin(give_up_slot(shop, package, &message)).await,
    }
}

/// The handler's verdict; `None` where the shutdown did not wait for it.
async fn watched(shop: &Arc<Workshop>, message: &Arc<Message>, guard: &Guard) -> Option<Verdict> {
    let span = tracing::info_span!(
        "task",
        name = message.task,
        tier = message.tier,
        id = %message.id,
        attempt = message.attempt
    );
    let options = shop.executor.options(&message.task);
    let limit = options.unwrap_or(&TaskOptions::new()).timeout;
    let watching = shop.watchdog.add(limit, {
        let (shop, message) = (Arc::downgrade(shop), message.clone());
        let (id, news) = (guard.id, guard.news.clone());
        move |report| {
            if let Some(shop) = shop.upgrade() {
                tell_report(&shop, &message, report);
            }
            if let (Report::Hung(since), Some(news)) = (report, &news) {
                // Nobody listens any more: then nobody waits for it either.
                let _ = news.send(News::Hung(id, since));
            }
        }
    });
    let handler = pin!(shop.executor.execute(message, &shop.cancelled));
    let handler = watching.watch(handler).instrument(span);
    shop.dropped.run_until_cancelled(handler).await
}

/// Tells of an outcome on which nothing follows; whether it is one.
fn is_over(shop: &Workshop, message: &Message, verdict: &Verdict, ran: Duration) -> bool {
    let task = task_ref(message);
    let (name, id) = (task.name, task.id);
    match verdict {
        Verdict::Done => shop.observers.emit(&Event::Done { task, ran }),
        Verdict::Discarded { reason } => {
            tracing::info!(task = name, %id, reason, "discarded");
            shop.observers.emit(&Event::Discarded { task, reason });
        }
        Verdict::Expired { late } => {
            tracing::info!(task = name, %id, ?late, "expired, not run");
            shop.observers.emit(&Event::Expired { task, late: *late });
        }
        Verdict::Snooze { .. } | Verdict::Retry { .. } | Verdict::Dead { .. } => return false,
    }
    true
}

/// Makes what follows on the message durable, or else has a copy take its place.
async fn follow(shop: &Workshop, package: &Package, message: &Message, verdict: Verdict) -> End {
    let task = task_ref(message);
    let end = match verdict {
        Verdict::Done | Verdict::Discarded { .. } | Verdict::Expired { .. } => End::Completed,
        Verdict::Snooze { after } => {
            let stored = shop.snooze(package, message.clone(), after).await;
            shop.ended(task, stored, || Event::Snoozed { task, after })
                .await
        }
        Verdict::Retry { after, failure } => {
            let stored = shop.retry(package, message.clone(), &failure, after).await;
            let failure = &failure;
            if stored.is_ok() {
                let (id, attempt) = (&message.id, message.attempt);
                tracing::warn!(task = message.task, %id, attempt, ?after, error = %failure, "failed, will be retried");
            }
            let event = || Event::Retried {
                task,
                after,
                failure,
            };
            shop.ended(task, stored, event).await
        }
        Verdict::Dead { reason, failure } => bury(shop, package, message, reason, failure).await,
    };
    // It came to an end: whatever killed its worker before was not this.
    let message = Message {
        crashes: 0,
        ..message.clone()
    };
    end.or_copy(shop, package, message).await
}

async fn bury(
    shop: &Workshop,
    package: &Package,
    message: &Message,
    reason: DeadReason,
    failure: Failure,
) -> End {
    let stored = shop
        .bury(package, Some(message.clone()), reason, &failure)
        .await;
    let task = task_ref(message);
    if stored.is_ok() {
        let (task, id) = (&message.task, &message.id);
        tracing::warn!(task, %id, %reason, %failure, "a dead letter");
    }
    let failure = &failure;
    let event = || Event::Dead {
        task,
        reason,
        failure,
    };
    shop.ended(task, stored, event).await
}

async fn bury_unreadable(shop: &Workshop, package: &Package, problem: String) -> End {
    let reason = DeadReason::Undecodable;
    let failure = Failure::new(FailureKind::NotStarted, problem);
    let stored = shop.bury(package, None, reason, &failure).await;
    let id = given_id(&package.properties);
    let kind = package.properties.kind().as_ref();
    let task = TaskRef {
        name: kind.map_or("", |kind| kind.as_str()),
        id: &id,
        tier: &package.tier,
        attempt: 1,
        life: 0,
        redriven_from: None,
    };
    let failure = &failure;
    if stored.is_ok() {
        let (task, tier) = (task.name, task.tier);
        tracing::warn!(task, %id, tier, %reason, %failure, "a dead letter");
    }
    let event = || Event::Dead {
        task,
        reason,
        failure,
    };
    shop.ended(task, stored, event).await
}

async fn bury_hung(shop: &Workshop, package: &Package, since: Duration) -> End {
    match package.open(SystemTime::now()) {
        Ok(message) => {
            let problem = format!(
                "it is past its timeout and has not yielded for {since:.1?}, so it cannot be \
                 stopped and holds a thread until its process ends; move blocking code to \
                 spawn_blocking"
            );
            let failure = Failure::new(FailureKind::TimedOut, problem);
            bury(shop, package, &message, DeadReason::Hung, failure).await
        }
        Err(problem) => bury_unreadable(shop, package, problem).await,
    }
}

/// Counts a crash, before anything else is done with the message.
///
/// While nothing can be stored, a message that was never counted is given the benefit of the doubt: a
/// broker with an alarm takes no messages until its queues are worked off.
async fn suspect(shop: &Workshop, package: &Package) -> End {
    let message = match package.open(SystemTime::now()) {
        Ok(message) => message,
        Err(problem) => return bury_unreadable(shop, package, problem).await,
    };
    let was_counted = message.crashes > 0;
    match count_crash(shop, package, message).await {
        End::Back if was_counted => End::StillSuspect,
        end => end,
    }
}

async fn count_crash(shop: &Workshop, package: &Package, mut message: Message) -> End {
    message.crashes = message.crashes.saturating_add(1);
    let crashes = message.crashes;
    if crashes >= shop.condemned_at {
        let problem = format!(
            "{crashes} workers died while it was in their hands, although it runs alone since the \
             second; look for what ends the process: an abort, a stack overflow, too much memory"
        );
        let failure = Failure::new(FailureKind::Crash, problem);
        return bury(shop, package, &message, DeadReason::CrashLoop, failure).await;
    }
    let stored = shop.again(package, message.clone(), Duration::ZERO).await;
    let task = task_ref(&message);
    if stored.is_ok() {
        let (name, id) = (task.name, task.id);
        match crashes {
            // It may have been given back by a worker that shut down.
            0..ALONE_FROM => tracing::info!(task = name, %id, crashes, "it came back unfinished"),
            _ => tracing::warn!(task = name, %id, crashes, "workers die with it, it runs alone"),
        }
    }
    shop.ended(task, stored, || Event::Suspected { task, crashes })
        .await
}

async fn send_around(shop: &Workshop, package: &Package) -> End {
    match package.open(SystemTime::now()) {
        Ok(message) => {
            let jitter = f64::from(random::number()) / f64::from(u32::MAX);
            let patience = 4_u32.pow(message.crashes.saturating_sub(ALONE_FROM).min(3));
            let after = (AROUND * patience).mul_f64(1.0 + jitter);
            let stored = shop.again(package, message.clone(), after).await;
            let task = task_ref(&message);
            let event = || Event::Snoozed { task, after };
            let end = shop.ended(task, stored, event).await;
            end.or_copy(shop, package, message.clone()).await
        }
        Err(problem) => bury_unreadable(shop, package, problem).await,
    }
}

/// The shutdown did not wait for the handler.
async fn give_up_slot(shop: &Workshop, package: &Package, message: &Message) -> End {
    let (task, why) = (task_ref(message), "the worker shuts down");
    shop.observers.emit(&Event::GivenBack { task, why });
    End::Back.or_copy(shop, package, message.clone()).await
}

impl End {
    /// Puts a copy in the place of a message that goes back. Whoever got the message itself would take
    /// it for the victim of a crash.
    async fn or_copy(self, shop: &Workshop, package: &Package, message: Message) -> End {
        match self {
            End::Back => match shop.interrupted(package, message, COPY_LIMIT).await {
                Ok(()) => End::Succeeded,
                Err(_) => End::Back,
            },
            end => end,
        }
    }
}

impl Workshop {
    /// Tells what was stored, or that nothing was and the message goes back.
    async fn ended<'a>(
        &self,
        task: TaskRef<'a>,
        stored: Result<(), Error>,
        event: impl FnOnce() -> Event<'a>,
    ) -> End {
        let Err(error) = stored else {
            self.observers.emit(&event());
            return End::Succeeded;
        };
        let (name, id) = (task.name, task.id);
        tracing::warn!(task = name, %id, %error, "what follows on it was not stored, it goes back");
        let why = &error.to_string();
        self.observers.emit(&Event::GivenBack { task, why });
        if matches!(error, Error::Unroutable { .. }) {
            self.mend().await;
        }
        // It will be back at once; what refused its successor may not be well so soon.
        tokio::time::sleep(BACK_PAUSE).await;
        End::Back
    }
}

fn tell_report(shop: &Workshop, message: &Message, report: Report) {
    let (name, id) = (&message.task, &message.id);
    match report {
        Report::Stuck(since) => {
            tracing::warn!(task = name, %id, ?since, "a handler does not yield");
            let task = task_ref(message);
            shop.observers.emit(&Event::Stuck { task, since });
        }
        Report::Hung(since) => {
            tracing::error!(task = name, %id, ?since, "a handler is past its timeout and never yields");
        }
        Report::Ending => {
            tracing::error!(task = name, %id, "handlers that never yield hold every thread: the process ends");
        }
    }
}

pub(super) fn task_ref(message: &Message) -> TaskRef<'_> {
    TaskRef {
        name: &message.task,
        id: &message.id,
        tier: &message.tier,
        attempt: message.attempt,
        life: message.life,
        redriven_from: message.redriven.as_ref().map(|it| it.from.as_str()),
    }
}
