//! `Control`: what operators call.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use tokio::time::Instant;

use super::change::Change;
use super::entry::{ControlEntry, Setting, Target};
use super::limit_change::LimitChange;
use super::overriding::Overriding;
use super::process::{Process, processes};
use super::table::in_force;
use crate::Error;
use crate::postgres::{AuditEntry, Database, STATEMENT_LIMIT};
use crate::topology::{Tier, Topology};

/// What can be changed while the app runs. Get it from [`Tierline::control`](crate::Tierline::control).
///
/// Every change says who made it and why, and is in the audit log. All processes of the app that have the database follow
/// within two seconds, and so does every process that starts later.
///
/// ```no_run
/// # async fn example(app: tierline::Tierline) -> Result<(), tierline::Error> {
/// let control = app.control()?;
/// let paused = control
///     .pause_tier("bulk")
///     .by("ada")
///     .because("the provider is down")
///     .lasting("1h")
///     .await?;
/// for note in &paused.notes {
///     println!("{note}");
/// }
/// control.resume_tier("bulk").by("ada").because("it is back").await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Control {
    pub(super) topology: Topology,
    pub(super) database: Database,
    pub(super) who: String,
    /// Asks the broker how many messages wait in the queue of a tier. `None`: there is no broker to be asked.
    pub(super) queue_depths: Option<Arc<QueueDepths>>,
}

/// `None`: the broker could not say before the deadline.
type QueueDepths = dyn Fn(Tier, Instant) -> BoxFuture<'static, Option<u32>> + Send + Sync;

impl Control {
    /// The changes of this map's app.
    pub fn new(topology: Topology, database: Database) -> Self {
        Self {
            topology,
            database,
            who: "somebody".into(),
            queue_depths: None,
        }
    }

    /// How to ask the broker how many messages wait in the queue of a tier.
    pub(crate) fn queue_depths(
        self,
        ask: impl Fn(Tier, Instant) -> BoxFuture<'static, Option<u32>> + Send + Sync + 'static,
    ) -> Self {
        Self {
            queue_depths: Some(Arc::new(ask)),
            ..self
        }
    }

    /// The operator who makes the changes that follow, for the audit log. Default: `somebody`.
    #[must_use]
    pub fn by(mut self, who: &str) -> Self {
        self.who = super::change::kept(who);
        self
    }

    /// Pauses a tier: none of its tasks starts, and what runs goes on to its end. Its messages stay in their queue, and
    /// its rows where they are; what its workers had prefetched goes back once. Nothing is dead-lettered or promoted
    /// for the time of the pause, except by the `ttl` of a queue on the broker, which the answer names.
    pub fn pause_tier(&self, tier: &str) -> Change {
        Change::begin(self, Target::Tier(tier.to_owned()), Setting::Pause)
    }

    /// Pauses all tiers of a group.
    pub fn pause_group(&self, group: &str) -> Change {
        Change::begin(self, Target::Group(group.to_owned()), Setting::Pause)
    }

    /// Pauses one task in whatever tier it is. The tier's other tasks go on. The task's rows leave those that are ready;
    /// its messages on the broker are stored as rows once, as they come, and start from there in their order.
    pub fn pause_task(&self, task: &str) -> Change {
        Change::begin(self, Target::Task(task.to_owned()), Setting::Pause)
    }

    /// Ends the pause of a tier. A pause of its group stays.
    pub fn resume_tier(&self, tier: &str) -> Change {
        Change::end(self, Target::Tier(tier.to_owned()), "pause")
    }

    /// Ends the pause of a group. Pauses of its tiers stay.
    pub fn resume_group(&self, group: &str) -> Change {
        Change::end(self, Target::Group(group.to_owned()), "pause")
    }

    /// Ends the pause of a task.
    pub fn resume_task(&self, task: &str) -> Change {
        Change::end(self, Target::Task(task.to_owned()), "pause")
    }

    /// Limits a tier in place of the limit that the map may have for it: how often its tasks start, or how many of them run,
    /// over all processes of the app that have the database. A tier at its limit takes no slot and holds up no other; its
    /// tasks stay where they are.
    ///
    /// ```no_run
    /// # async fn example(control: tierline::control::Control) -> Result<(), tierline::Error> {
    /// let slower = control.limit_tier("mail").rate("50/m").burst(5).running(2);
    /// slower.by("ada").because("the provider asks for it").lasting("2h").await?;
    /// control.unlimit_tier("mail").by("ada").because("they are well again").await?;
    /// // For an hour as if the map had no limit.
    /// control.limit_tier("exports").none().lasting("1h").await?;
    /// # Ok(()) }
    /// ```
    pub fn limit_tier(&self, tier: &str) -> LimitChange {
        LimitChange::new(self, Target::Tier(tier.to_owned()))
    }

    /// Limits a task in place of the limit that the map may have for it, in whatever tier it is. If the map has `per` for
    /// it, `running` is for each key. The tier's other tasks go on.
    pub fn limit_task(&self, task: &str) -> LimitChange {
        LimitChange::new(self, Target::Task(task.to_owned()))
    }

    /// Ends the limit of a tier that was set at run time. The limit of the map, if it has one, is in force again; to lift
    /// that for a time, set [`none`](LimitChange::none).
    pub fn unlimit_tier(&self, tier: &str) -> Change {
        Change::end(self, Target::Tier(tier.to_owned()), "limit")
    }

    /// Ends the limit of a task that was set at run time, as [`unlimit_tier`](Self::unlimit_tier) does.
    pub fn unlimit_task(&self, task: &str) -> Change {
        Change::end(self, Target::Task(task.to_owned()), "limit")
    }

    /// Gives a task another tier, or another priority, or both, for a while.
    ///
    /// All processes of the app that have its database publish and retry it there within two seconds, and so does one that
    /// starts later, from its first publish on. Then the rows that wait are moved, before this returns, in their order: from the
    /// tier of the map, and from those to which overrides have led in the last 32 days. Those stay that a rule or an operator has
    /// moved by itself. If this future is dropped meanwhile, the override is in force and the rest of the rows stays; to make it
    /// again moves them. Messages that wait in queues stay there and run there. The notes of the answer say what stays.
    ///
    /// It counts before an override of a prefix. When it ends, publishes and retries go by the map again, and rows that were
    /// moved stay where they are; an override to the tier of the map moves them back.
    ///
    /// ```no_run
    /// # async fn example(app: tierline::Tierline) -> Result<(), tierline::Error> {
    /// let overridden = app
    ///     .control()?
    ///     .override_task("report.export")
    ///     .tier("low")
    ///     .by("ada")
    ///     .because("the quarter's reports")
    ///     .lasting("7d")
    ///     .await?;
    /// println!("{} rows have moved", overridden.moved);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`ControlError::Unknown`](crate::error::ControlError::Unknown) where the map does not have the task or the tier;
    /// [`ControlError::Refused`](crate::error::ControlError::Refused) where neither tier nor priority is given, the tier does
    /// not have the priority, no live process that serves the tier has a handler for the task, the handler's timeout reaches the
    /// broker's `ack_timeout` there, or the tier has no delay queues and the map's tier has; as every use of the database.
    pub fn override_task(&self, task: &str) -> Overriding {
        Overriding::new(self, vec![Target::Task(task.to_owned())])
    }

    /// Overrides several tasks, as [`override_task`](Self::override_task) does one, all of them or none. At most 500.
    pub fn override_tasks<T: Into<String>>(
        &self,
        tasks: impl IntoIterator<Item = T>,
    ) -> Overriding {
        let tasks: BTreeSet<String> = tasks.into_iter().map(Into::into).collect();
        Overriding::new(self, tasks.into_iter().map(Target::Task).collect())
    }

    /// Overrides all tasks whose names begin like this, such as `calendar.`, as [`override_task`](Self::override_task) does
    /// one. A longer prefix counts before a shorter one.
    pub fn override_prefix(&self, prefix: &str) -> Overriding {
        Overriding::new(self, vec![Target::Prefix(prefix.to_owned())])
    }

    /// Ends the override of a task. One of a prefix that it begins with counts then, if there is any.
    pub fn end_override_task(&self, task: &str) -> Change {
        Change::end(self, Target::Task(task.to_owned()), "override")
    }

    /// Ends the override of a prefix. Overrides of its tasks stay.
    pub fn end_override_prefix(&self, prefix: &str) -> Change {
        Change::end(self, Target::Prefix(prefix.to_owned()), "override")
    }

    /// The changes that are in force, in the order in which they were made.
    ///
    /// # Errors
    /// As every use of the database.
    pub async fn list(&self) -> Result<Vec<ControlEntry>, Error> {
        let reading = async {
            let mut connection = self.database.pool().acquire().await?;
            in_force(&mut connection, self.topology.app()).await
        };
        self.database
            .within(STATEMENT_LIMIT, "read the controls", reading)
            .await
    }

    /// The workers and relays of the app that have its database, the oldest first.
    ///
    /// ```no_run
    /// # async fn example(control: tierline::control::Control) -> Result<(), tierline::Error> {
    /// for process in control.processes().await? {
    ///     let state = if process.is_alive { "lives" } else { "is silent" };
    ///     println!("{} {} {state}", process.name, process.version);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As every use of the database.
    pub async fn processes(&self) -> Result<Vec<Process>, Error> {
        let reading = async {
            let mut connection = self.database.pool().acquire().await?;
            processes(&mut connection, &self.topology).await
        };
        self.database
            .within(STATEMENT_LIMIT, "list the processes", reading)
            .await
    }

    /// The latest entries of the audit log, the newest first, at most `most`. `before` is the number of the last one of
    /// the page before.
    ///
    /// # Errors
    /// As every use of the database.
    pub async fn audit_log(
        &self,
        before: Option<i64>,
        most: u16,
    ) -> Result<Vec<AuditEntry>, Error> {
        let app = self.topology.app();
        self.database.audit_log(app, before, most).await
    }
}

impl fmt::Debug for Control {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Control")
            .field("app", &self.topology.app())
            .field("who", &self.who)
            .finish_non_exhaustive()
    }
}
