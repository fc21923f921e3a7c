use std::time::{Duration, SystemTime};

use crate::error::ErrorKind;
use crate::message::{DeadReason, Failure};
use crate::task::TaskId;

/// Something that happened. Observers run on the thread where it happened, so an observer that blocks
/// holds up the work.
///
/// ```
/// use tierline::observe::Event;
///
/// fn print_dead_letters(event: &Event<'_>) {
///     if let Event::Dead { task, reason, failure, .. } = event {
///         eprintln!("{} {} is a dead letter ({reason}): {failure}", task.name, task.id);
///     }
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A connection to the broker was opened, for the first time or again after it was lost.
    Connected {
        /// What it is for.
        purpose: Purpose,
        /// The broker's address, without the credentials.
        address: &'a str,
    },
    /// A connection was lost. tierline reconnects until that succeeds.
    Disconnected {
        /// What it was for.
        purpose: Purpose,
        /// What happened.
        cause: &'a str,
    },
    /// A connection was closed because it is needed no more.
    ConnectionClosed {
        /// What it was for.
        purpose: Purpose,
    },
    /// An attempt to connect failed. The next one follows after a pause.
    ConnectFailed {
        /// What the connection is for.
        purpose: Purpose,
        /// What happened, with the address.
        cause: &'a str,
    },

    /// A publish has ended: its task is stored, or it is not. Emitted for every publish of this process, from handlers
    /// and the scheduler too, but not for retries and redrives. A publish whose future is dropped has no event, nor has one
    /// within a transaction that is refused because the app has no database or is closed.
    Published {
        /// The task's name.
        name: &'a str,
        /// The task's identifier; that of the task that has the key, if it is a duplicate. `None` where the publish
        /// failed before the task had one.
        id: Option<&'a TaskId>,
        /// The tier that it went to, or would have; the first one's, if it is a duplicate. `None` where the map has no such
        /// task.
        tier: Option<&'a str>,
        /// What became of it.
        result: PublishResult,
        /// The delay that it asked for.
        delay: Duration,
        /// How long the publish took, from the call to its outcome.
        took: Duration,
    },
    /// A handler was started.
    Started {
        /// The task.
        task: TaskRef<'a>,
        /// The time since it was enqueued, fell due, or was redriven, whichever came last.
        waited: Duration,
    },
    /// A handler that was [started](Event::Started) runs no more, in whatever way it ended: each start has one such event. What
    /// became of its task is another event, which comes a moment before or after this one; there is none if the
    /// process ends before it is stored.
    Ended {
        /// The task.
        task: TaskRef<'a>,
        /// How long the handler ran.
        ran: Duration,
    },
    /// A handler succeeded, and its delivery is acknowledged.
    Done {
        /// The task.
        task: TaskRef<'a>,
        /// How long the handler ran.
        ran: Duration,
    },
    /// A copy of a task came whose handler has [committed](crate::Context::transaction) before. It was not run, and its
    /// delivery is acknowledged.
    AlreadyDone {
        /// The task.
        task: TaskRef<'a>,
    },
    /// An attempt failed, and the next one is stored.
    Retried {
        /// The task, with the attempt that failed.
        task: TaskRef<'a>,
        /// The time until the next attempt.
        after: Duration,
        /// Why it failed.
        failure: &'a Failure,
        /// How long its handler ran. `None` where this process ran none.
        ran: Option<Duration>,
    },
    /// A handler asked to run later, and the message for then is stored.
    Snoozed {
        /// The task.
        task: TaskRef<'a>,
        /// The time until it runs again.
        after: Duration,
        /// How long its handler ran. `None` where none did.
        ran: Option<Duration>,
    },
    /// A handler discarded its task.
    Discarded {
        /// The task.
        task: TaskRef<'a>,
        /// The handler's reason.
        reason: &'a str,
        /// How long the handler ran.
        ran: Option<Duration>,
    },
    /// A task had expired when a worker got it, and was not run.
    Expired {
        /// The task.
        task: TaskRef<'a>,
        /// The time since it expired.
        late: Duration,
    },
    /// A task was stored in its tier's dead-letter queue.
    Dead {
        /// The task.
        task: TaskRef<'a>,
        /// Why it was dead-lettered.
        reason: DeadReason,
        /// What went wrong last.
        failure: &'a Failure,
        /// How long the handler of its last attempt ran. `None` where this process ran none: the task has waited for too
        /// long, say, or its worker died.
        ran: Option<Duration>,
    },
    /// A task went back to its queue before its handler ended. This does not count as an attempt.
    GivenBack {
        /// The task.
        task: TaskRef<'a>,
        /// Why.
        why: &'a str,
        /// How long its handler ran. `None` where none did.
        ran: Option<Duration>,
    },
    /// A dead letter was redriven: it is published again, or could not be.
    Redriven {
        /// Its number in the log.
        dead_letter: i64,
        /// The task's name. `None` where nobody can read it.
        name: Option<&'a str>,
        /// The task's identifier. `None` where it could not be published.
        id: Option<&'a TaskId>,
        /// The tier that it went to; where it could not be published, the one in which it died.
        tier: &'a str,
        /// What became of it: stored or failed.
        result: PublishResult,
    },
    /// A worker died while it held this task, perhaps because of it: the task's crash count went up.
    Suspected {
        /// The task.
        task: TaskRef<'a>,
        /// How many workers died while they held it.
        crashes: u32,
    },
    /// A worker could not extend the lease of a task in a Postgres tier, and cancels its handler: another worker may run
    /// the task now.
    LeaseLost {
        /// The task.
        task: TaskRef<'a>,
    },
    /// A delayed task fell due while its tier's queue was away. The queue is there again, and the broker has stored
    /// the task in it.
    Rerouted {
        /// The task.
        task: TaskRef<'a>,
    },
    /// The relay published a row of a tier on the broker to the tier's queue, and the broker has stored it.
    Relayed {
        /// The task.
        task: TaskRef<'a>,
    },
    /// A worker got a task from the queue of a tier that the map no longer gives it.
    Strayed {
        /// The task, with the tier whose queue it was in.
        task: TaskRef<'a>,
        /// The tier that the map gives it today.
        mapped: &'a str,
    },
    /// Tasks had waited for too long in a tier with `promote`, and have moved to another one.
    Promoted {
        /// The tier in which they waited.
        from: &'a str,
        /// The tier that they moved to.
        to: &'a str,
        /// How many.
        count: u64,
    },
    /// A handler has not yielded for a while, and holds up a thread of the runtime.
    Stuck {
        /// The task.
        task: TaskRef<'a>,
        /// The time since it last yielded.
        since: Duration,
    },

    /// A worker began to work for a group.
    GroupStarted {
        /// The group.
        group: &'a str,
        /// How many handlers it runs at once.
        slots: usize,
    },
    /// A worker that worked for a group has ended. Each start has one such event.
    GroupEnded {
        /// The group.
        group: &'a str,
        /// How many handlers it ran at once.
        slots: usize,
    },
    /// A worker starts nothing of a tier any more, because an operator has paused the tier or its group.
    Paused {
        /// The group.
        group: &'a str,
        /// The tier.
        tier: &'a str,
    },
    /// A worker starts tasks of a tier again that was paused.
    Resumed {
        /// The group.
        group: &'a str,
        /// The tier.
        tier: &'a str,
    },
    /// The limit of a tier holds back a task that a worker has a free slot for. While it does, there is one such event a
    /// second at most for each worker and tier.
    Limited {
        /// The group.
        group: &'a str,
        /// The tier.
        tier: &'a str,
    },
    /// A worker subscribed to a tier's queue, for the first time or again after an interruption.
    Consuming {
        /// The group.
        group: &'a str,
        /// The tier.
        tier: &'a str,
    },
    /// The broker said that a tier's queue was empty. A worker asks when the queue has been quiet for ten seconds, and when a
    /// burst of messages has ended.
    QueueEmpty {
        /// The tier.
        tier: &'a str,
    },
    /// A worker lost its subscription to a tier's queue. It resubscribes as soon as possible.
    Interrupted {
        /// The group.
        group: &'a str,
        /// The tier.
        tier: &'a str,
        /// What happened, for example that the broker cancelled the consumer or closed its channel.
        cause: &'a str,
    },
    /// The collector stored dead letters in the database and removed them from their queues.
    Collected {
        /// How many rows are new.
        count: u64,
        /// How many were in the log already, from an earlier attempt that was interrupted.
        repeated: u64,
    },
    /// The collector stored dead letters that the broker had made by itself: no worker has emitted [`Event::Dead`] for them.
    DeadByBroker {
        /// The task's name. Empty: nobody can read it.
        name: &'a str,
        /// The tier in whose dead-letter queue they were.
        tier: &'a str,
        /// Whether they had waited for longer than the `ttl` of the tier.
        has_expired: bool,
        /// How many.
        count: u64,
    },
    /// The collector could not store dead letters. They stay in their queues, and it tries again.
    CollectFailed {
        /// What happened.
        cause: &'a str,
    },
    /// A tier got more dead letters than the collector's limit allows.
    DeadLettersGrow {
        /// The tier.
        tier: &'a str,
        /// How many dead letters.
        count: u64,
        /// Within which span of time.
        within: Duration,
    },
    /// A tier's queue did not exist any more, and was declared again. Its messages are lost.
    Redeclared {
        /// The tier.
        tier: &'a str,
    },

    /// A long-running part of the app panicked, which is a bug, and is started again after a pause. No task is
    /// lost: what the part had not settled is delivered again.
    Restarted {
        /// The part: `group NAME` of a worker, `collector`, `collector housekeeping`, `scheduler` or
        /// `publish connection`.
        service: &'a str,
        /// The message of the panic.
        cause: &'a str,
        /// The pause.
        after: Duration,
    },
    /// Handlers that never yield hold every thread of the runtime, and at least one is past its timeout. Nothing
    /// else runs in this process until one of them ends: no task, no heartbeat, no answer to a signal. Emitted on
    /// the watchdog's own thread, once for each time it happens.
    RuntimeHung {
        /// How long the runtime has run nothing else.
        silent: Duration,
        /// Whether the process is aborted next, which
        /// [`Builder::abort_when_hung`](crate::Builder::abort_when_hung) allows.
        aborts: bool,
    },

    /// A run of a schedule is stored.
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
    /// Runs of a schedule were skipped: newer runs were due, they had expired, or no scheduler was
    /// running when they were due.
    ScheduleMissed {
        /// The schedule's name.
        schedule: &'a str,
        /// How many runs.
        count: u64,
        /// When the latest run was due, which may have been published.
        last_due: SystemTime,
    },
    /// This process became, or is no longer, the leader that publishes due runs.
    LeaderChanged {
        /// Whether it leads now.
        leads: bool,
        /// The number of the leader's term, which rises with every change of leader.
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

/// What became of a publish.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PublishResult {
    /// The broker has confirmed the task, or the database has committed it. Of a publish
    /// [within](crate::task::PublishBuilder::within) a transaction: its row is inserted, and stays if the transaction
    /// commits.
    Stored,
    /// The task is stored in the place of another one with the same key.
    Replaced,
    /// Nothing was stored: another task has its key.
    Duplicate,
    /// It failed with an error of this kind.
    Failed(ErrorKind),
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
