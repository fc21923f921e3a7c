//! Where a worker's deliveries come from.
//!
//! A worker group knows only [`Source`]s. Each serves one tier: its queue on the broker, its rows in Postgres, or the
//! group's quarantine on the broker, which serves the tier of the message that it has. A source keeps its own connection up,
//! prefetches deliveries, stores what follows on each of them, and settles it. Nothing that a source does waits
//! for another source.

pub(crate) mod amqp;
mod crash;
mod parked_tasks;
#[cfg(feature = "postgres")]
pub(crate) mod postgres;
mod suspects;

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::BoxFuture;
use tokio::sync::oneshot;
use tokio::time::Instant;

#[cfg(feature = "postgres")]
use crate::completion::RunningRow;
use crate::control::Permit;
use crate::message::{DeadReason, Death, Failure, FailureKind, Message, Received};
use crate::observe::{Event, Observers, TaskRef};
use crate::spans::Processed;
use crate::task::{Cancellation, TaskEnding};

pub(crate) use parked_tasks::ParkedTasks;
pub(crate) use suspects::Suspects;

/// The number of a delivery within its source. It is never used again.
pub(crate) type Handle = u64;

/// A message that may run now.
#[derive(Debug)]
pub(crate) struct Delivery {
    pub(crate) handle: Handle,
    pub(crate) received: Arc<Received>,
    /// Held while it runs, if its task has a limit.
    pub(crate) permit: Option<Permit>,
    /// What its run must heed, if it has a lease. A delivery of the broker has none.
    pub(crate) lease: Option<LeasedRun>,
}

/// A run that another process takes over when its lease ends.
#[derive(Debug)]
pub(crate) struct LeasedRun {
    /// The handler begins when this says `true`. If it does not, the run is given back.
    pub(crate) begin: Option<oneshot::Receiver<bool>>,
    /// Cancelled when the lease is lost, and when the grace period of a shutdown is over.
    pub(crate) lost: Cancellation,
    #[cfg(feature = "postgres")]
    pub(crate) row: RunningRow,
}

/// What follows on a delivery.
#[derive(Debug)]
pub(crate) enum Next {
    /// Nothing: the task is over.
    #[cfg_attr(
        not(feature = "postgres"),
        expect(dead_code, reason = "only tiers in Postgres keep how a task ended")
    )]
    Done(TaskEnding),
    /// This message, after a delay.
    Later {
        message: Box<Message>,
        after: Duration,
        /// Why the attempt failed; `None` if the handler asked for the delay.
        failure: Option<Failure>,
    },
    /// A dead letter.
    Dead {
        /// The message with its history, if it can be read.
        message: Option<Box<Message>>,
        reason: DeadReason,
        failure: Failure,
    },
    /// The same message again, as if it had never been delivered.
    Back,
}

/// What a source can give a free slot of its tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Supply {
    /// A delivery is here.
    Ready,
    /// No delivery is here, and this many are expected to arrive at once.
    Coming(usize),
    /// No delivery is here, and none is expected.
    Empty,
}

/// Deliveries of a tier, from where they wait until they are settled.
pub(crate) trait Source: Send {
    /// The tier, as its index in the group, whose deliveries it gives now.
    fn tier(&self) -> Option<usize>;

    /// Receives what has arrived, and settles each delivery after what follows on it is stored. Returns a
    /// delivery that was settled, or `Pending` after the waker of `cx` is registered for everything that may
    /// happen next, except for [`wake_at`](Self::wake_at).
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Handle>;

    /// When to poll again although nothing has happened.
    fn wake_at(&self) -> Option<Instant>;

    fn supply(&mut self) -> Supply;

    /// The next delivery. It stays with the source until it is [settled](Self::settle).
    fn take(&mut self) -> Option<Delivery>;

    /// The group keeps a slot free for this source, which said [`Supply::Coming`]. Returns until when, unless
    /// something happens before; `None` if the slot is not needed after all.
    fn hold(&mut self, cx: &mut Context<'_>) -> Option<Instant>;

    /// Stores what follows on a delivery, and then settles it. `Done` takes effect at once; everything else is
    /// answered by [`poll`](Self::poll).
    fn settle(&mut self, handle: Handle, next: Next);

    /// Acknowledges what is done, or leaves it for the next call if more may be done until then (`is_quiet`
    /// is false). Returns whether the next call must follow at once.
    fn flush(&mut self, is_quiet: bool) -> bool;

    /// While its tier is paused, a source receives nothing, and puts back what was not taken. What runs goes on.
    fn set_paused(&mut self, is_paused: bool);

    /// Receives no more deliveries, and puts back those that were not taken.
    fn drain(&mut self);

    /// Whether everything but what was taken is settled, after [`drain`](Self::drain).
    fn is_drained(&self) -> bool;

    /// Sends the last acknowledgements and closes the connection.
    fn close(self: Box<Self>) -> BoxFuture<'static, ()>;
}

/// The task of a message, for events.
pub(crate) fn task_ref(message: &Message) -> TaskRef<'_> {
    TaskRef {
        name: &message.task,
        id: &message.id,
        tier: &message.tier,
        attempt: message.attempt,
        life: message.life,
        redriven_from: message.redriven.as_ref().map(|it| it.from.as_str()),
    }
}

/// The task of a delivery, for events. One that cannot be read has what could be found out.
fn received_task<'a>(received: &'a Received, tier: &'a str) -> TaskRef<'a> {
    match received.message() {
        Ok(message) => task_ref(message),
        Err(unreadable) => TaskRef {
            name: &unreadable.task,
            id: &unreadable.id,
            tier,
            attempt: 1,
            life: 0,
            redriven_from: None,
        },
    }
}

/// What follows on a message that cannot be read.
pub(crate) fn unreadable(received: &Received) -> Next {
    let problem = received.message().err();
    let problem = problem.map(|unreadable| unreadable.problem.clone());
    Next::Dead {
        message: None,
        reason: DeadReason::Undecodable,
        failure: Failure::new(FailureKind::NotStarted, problem.unwrap_or_default()),
    }
}

/// The dead letter of a message whose history has this failure too.
pub(crate) fn dead(message: &Message, reason: DeadReason, failure: Failure) -> Next {
    Next::Dead {
        message: Some(Box::new(message.clone().failed(&failure))),
        reason,
        failure,
    }
}

/// What follows on a message whose task the map does not have.
pub(crate) fn unmapped(message: &Message) -> Next {
    let problem = format!(
        "task `{}` is not mapped to a tier: add it to [tasks] in the map, then redrive it",
        message.task
    );
    let failure = Failure::new(FailureKind::NotStarted, problem);
    dead(message, DeadReason::UnknownTask, failure)
}

/// The failure of a task that was to run again later in a tier without delay queues; `failure` is that of its
/// attempt, if it failed.
pub(crate) fn no_delays(tier: &str, failure: Option<Failure>) -> Failure {
    let cause = format!("its tier {tier:?} has delays = false in the map");
    match failure {
        Some(failure) => Failure {
            message: format!("{}; it is not retried, because {cause}", failure.message),
            ..failure
        },
        None => {
            let problem = format!("its handler asked to run again later, which it cannot: {cause}");
            Failure::new(FailureKind::Error, problem)
        }
    }
}

/// An attempt, for its spans.
pub(crate) fn processed(task: TaskRef<'_>) -> Processed<'_> {
    Processed {
        name: task.name,
        id: task.id.as_str(),
        tier: task.tier,
        attempt: task.attempt,
    }
}

/// Ends the span of what follows on a run: it is stored.
fn settled(received: &Received, operation: &'static str, task: TaskRef<'_>) {
    if let Some(span) = received.span() {
        span.settled(operation, processed(task));
    }
}

/// Says that the next attempt of a task is stored. `failure` is why the last one failed; `None`: its handler asked for
/// the delay.
pub(crate) fn emit_later(
    observers: &Observers,
    received: &Received,
    after: Duration,
    failure: Option<&Failure>,
) {
    let Ok(before) = received.message() else {
        return;
    };
    let (task, ran) = (task_ref(before), received.ran());
    settled(
        received,
        if failure.is_some() { "retry" } else { "snooze" },
        task,
    );
    match failure {
        Some(failure) => {
            let (name, id, attempt) = (task.name, task.id, task.attempt);
            tracing::warn!(task = name, %id, attempt, ?after, error = %failure, "failed, will be retried");
            observers.emit(&Event::Retried {
                task,
                after,
                failure,
                ran,
            });
        }
        None => observers.emit(&Event::Snoozed { task, after, ran }),
    }
}

/// Says that a dead letter is stored.
pub(crate) fn emit_dead(observers: &Observers, received: &Received, tier: &str, death: &Death) {
    let (reason, failure) = (death.reason, &death.failure);
    let task = received_task(received, tier);
    settled(received, "dead_letter", task);
    let (name, id) = (task.name, task.id);
    tracing::warn!(task = name, %id, tier, %reason, %failure, "a dead letter");
    observers.emit(&Event::Dead {
        task,
        reason,
        failure,
        ran: received.ran(),
    });
}
