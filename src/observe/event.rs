use std::time::{Duration, SystemTime};

use crate::message::{DeadReason, Failure};
use crate::task::TaskId;

/// Something that happened. Told on the thread where it happened: an observer that blocks holds up
/// the work.
///
/// ```
/// use tierline::observe::Event;
///
/// fn print_dead_letters(event: &Event<'_>) {
///     if let Event::Dead { task, reason, failure } = event {
///         eprintln!("{} {} is a dead letter ({reason}): {failure}", task.name, task.id);
///     }
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A connection to the broker was made: the first, or again after it was lost.
    Connected {
        /// What it is for.
        purpose: Purpose,
        /// Where it leads, without the credentials.
        address: &'a str,
    },
    /// A connection was lost. It is made again until that succeeds.
    Disconnected {
        /// What it was for.
        purpose: Purpose,
        /// What happened.
        cause: &'a str,
    },
    /// A try to connect failed. The next one follows after a pause.
    ConnectFailed {
        /// What the connection is for.
        purpose: Purpose,
        /// What happened, and where.
        cause: &'a str,
    },

    /// A handler was started.
    Started {
        /// The task.
        task: TaskRef<'a>,
        /// The time since it was enqueued, fell due, or was redriven, whichever came last.
        waited: Duration,
    },
    /// A handler ended well, and the broker is told.
    Done {
        /// The task.
        task: TaskRef<'a>,
        /// How long the handler ran.
        ran: Duration,
    },
    /// An attempt failed, and the next one is stored by the broker.
    Retried {
        /// The task, with the attempt that failed.
        task: TaskRef<'a>,
        /// The time until the next attempt.
        after: Duration,
        /// Why it failed.
        failure: &'a Failure,
    },
    /// A handler asked to run later, and that is stored by the broker.
    Snoozed {
        /// The task.
        task: TaskRef<'a>,
        /// The time until it runs again.
        after: Duration,
    },
    /// A handler said that there is nothing to do any more.
    Discarded {
        /// The task.
        task: TaskRef<'a>,
        /// What the handler gave as the reason.
        reason: &'a str,
    },
    /// A task came too late and was not run.
    Expired {
        /// The task.
        task: TaskRef<'a>,
        /// By how much it was late.
        late: Duration,
    },
    /// A task is in its tier's dead-letter queue.
    Dead {
        /// The task.
        task: TaskRef<'a>,
        /// Why it is dead.
        reason: DeadReason,
        /// What went wrong last.
        failure: &'a Failure,
    },
    /// A task went back to its queue without having been run to its end, at no cost of an attempt.
    GivenBack {
        /// The task.
        task: TaskRef<'a>,
        /// Why.
        why: &'a str,
    },
    /// A task's worker died before, perhaps because of it: its crash count went up.
    Suspected {
        /// The task.
        task: TaskRef<'a>,
        /// How often a worker died with it.
        crashes: u32,
    },
    /// A task was run from the queue of a tier that the map no longer gives it.
    Strayed {
        /// The task, with the tier whose queue it was in.
        task: TaskRef<'a>,
        /// The tier that the map gives it today.
        mapped: &'a str,
    },
    /// A handler has not yielded for a while, and holds up a thread of the runtime.
    Stuck {
        /// The task.
        task: TaskRef<'a>,
        /// For how long.
        since: Duration,
    },

    /// A tier is consumed from: for the first time, or again after an interruption.
    Consuming {
        /// The group.
        group: &'a str,
        /// The tier.
        tier: &'a str,
    },
    /// A tier is not consumed from for now; this is mended as soon as possible.
    Interrupted {
        /// The group.
        group: &'a str,
        /// The tier.
        tier: &'a str,
        /// What happened: the broker cancelled the consumer or closed its channel, say.
        cause: &'a str,
    },
    /// Dead letters were logged in the database, and are out of their queues.
    Collected {
        /// How many rows are new.
        count: u64,
        /// How many were in the log already, from a try whose end was not seen.
        repeated: u64,
    },
    /// Dead letters could not be logged. They stay in their queues, and it is tried again.
    CollectFailed {
        /// What happened.
        cause: &'a str,
    },
    /// More messages of a tier died than the collector's limit allows.
    DeadLettersGrow {
        /// The tier.
        tier: &'a str,
        /// How many died.
        count: u64,
        /// Within which span of time.
        within: Duration,
    },
    /// A tier's queue was gone, and was declared again. What had been in it is lost.
    Redeclared {
        /// The tier.
        tier: &'a str,
    },

    /// A run of a schedule is stored by the broker.
    SchedulePublished {
        /// The schedule's name.
        schedule: &'a str,
        /// The run's identifier.
        id: &'a TaskId,
        /// When it was due.
        due: SystemTime,
        /// How much later it was published.
        late: Duration,
    },
    /// Runs of a schedule were given up: newer ones were due, they had expired, or no scheduler was
    /// running when they were due.
    ScheduleMissed {
        /// The schedule's name.
        schedule: &'a str,
        /// How many runs.
        count: u64,
        /// When the latest run was due, which may have been published.
        last_due: SystemTime,
    },
    /// This process has begun or ceased to lead the schedules.
    LeaderChanged {
        /// Whether it leads now.
        leads: bool,
        /// The number of its term of office, which rises with every change of leader.
        epoch: u64,
        /// At the beginning of a term: how long ago the last leader was last seen.
        gap: Duration,
    },
}

/// A task that an event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct TaskRef<'a> {
    /// The task's name.
    pub name: &'a str,
    /// Its identifier, the same in all attempts.
    pub id: &'a TaskId,
    /// The tier whose queue it was in.
    pub tier: &'a str,
    /// The attempt, from 1.
    pub attempt: u32,
    /// How often it was redriven.
    pub life: u32,
    /// The dead letter in the log that it was redriven from, if it was.
    pub redriven_from: Option<&'a str>,
}

/// What a connection to the broker is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Purpose {
    /// Publishing.
    Publish,
    /// Consuming, for a group of workers.
    Work,
    /// Collecting dead letters.
    Collect,
}
