//! The face of control: what an operator calls.

use std::fmt;

use super::change::Change;
use super::entry::{ControlEntry, Setting, Target};
use super::process::{Process, processes};
use super::table::in_force;
use crate::Error;
use crate::postgres::{AuditEntry, Database, STATEMENT_LIMIT};
use crate::topology::Topology;

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
}

impl Control {
    /// The changes of this map's app.
    pub fn new(topology: Topology, database: Database) -> Self {
        Self {
            topology,
            database,
            who: "somebody".into(),
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
