//! Moves a task that waits to another tier, because an operator says so.

use std::future::IntoFuture;
use std::time::SystemTime;

use futures_util::future::BoxFuture;
use serde::Serialize;
use serde_json::json;

use super::find::{find_one, limit_lock_waits, lock_waiting};
use super::parked::{lock_lanes_of, place_lanes};
use super::row::rank_among;
use super::task::{BacklogTask, FoundRow, TaskState};
use super::{Backlog, add_backlogs, notify_of_older};
use crate::error::BacklogError;
use crate::postgres::{PgConnection, STATEMENT_LIMIT, record};
use crate::topology::{Tier, near_miss, show_duration};
use crate::{Error, TaskId};

/// How often to look again for a task that was on its way from one state to the next.
const ROUNDS: u32 = 5;

impl Backlog {
    /// Moves a task that waits to another tier, where the workers of that tier take it. It keeps its id, payload,
    /// headers, attempt, enqueue time and due time, and its priority as far as the tier has it. It stays there when it is
    /// retried. Who did it and why is in the audit log.
    ///
    /// ```no_run
    /// # async fn example(app: tierline::Tierline, id: tierline::TaskId) -> Result<(), tierline::Error> {
    /// let escalating = app.backlog()?.escalate(&id, "critical");
    /// let escalated = escalating.by("ada").because("the customer waits").await?;
    /// println!("it was in {}, and is in {}", escalated.before.tier, escalated.after.tier);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`BacklogError::UnknownTier`]; [`BacklogError::NotFound`]; [`BacklogError::Refused`] if the task runs, has ended, is
    /// in that tier already, has waited for longer than that tier's `ttl`, or if several tasks have this id; as every use
    /// of the database.
    pub fn escalate(&self, id: &TaskId, tier: &str) -> Escalation {
        Escalation {
            backlog: self.clone(),
            id: id.clone(),
            tier: tier.to_owned(),
            is_at_once: false,
        }
    }
}

/// A task to be moved: see [`Backlog::escalate`].
#[derive(Debug, Clone)]
#[must_use = "nothing happens until it is awaited"]
pub struct Escalation {
    backlog: Backlog,
    id: TaskId,
    tier: String,
    is_at_once: bool,
}

/// A task that was moved.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Escalated {
    /// What it was.
    pub before: BacklogTask,
    /// What it is.
    pub after: BacklogTask,
}

impl Escalation {
    /// The operator, for the audit log. Default: that of the [`Backlog`].
    pub fn by(mut self, who: &str) -> Self {
        self.backlog = self.backlog.by(who);
        self
    }

    /// The reason, for the audit log. Default: that of the [`Backlog`].
    pub fn because(mut self, why: &str) -> Self {
        self.backlog = self.backlog.because(why);
        self
    }

    /// A task that waits for its due time is due now. Without this it keeps its due time.
    pub fn at_once(mut self) -> Self {
        self.is_at_once = true;
        self
    }

    async fn run(self) -> Result<Escalated, Error> {
        let Some(tier) = self.backlog.topology.tier(&self.tier) else {
            return Err(self.unknown_tier());
        };
        let database = &self.backlog.database;
        let moving = async {
            let mut connection = database.pool().acquire().await?;
            for _ in 0..ROUNDS {
                let moved = self.attempt(&mut connection, tier).await?;
                if !matches!(moved, Attempt::Changed) {
                    return Ok(moved);
                }
            }
            Ok(Attempt::Changed)
        };
        let tried = "escalate a task";
        let problem = match database.within(STATEMENT_LIMIT, tried, moving).await? {
            Attempt::Moved(escalated) => {
                self.notify().await;
                return Ok(*escalated);
            }
            Attempt::NotFound => {
                let id = self.id.clone();
                return Err(Error::Backlog(BacklogError::NotFound { id }));
            }
            Attempt::Refused(problem) => problem,
            Attempt::Changed => "its state changes all the time; try again".to_owned(),
        };
        Err(Error::Backlog(BacklogError::Refused {
            id: self.id.clone(),
            problem: problem.into(),
        }))
    }

    /// Moves the task in one transaction. A claim that comes first has the row, and this one finds it running; a claim that
    /// comes later finds it in its new tier.
    async fn attempt(
        &self,
        connection: &mut PgConnection<'_>,
        tier: &Tier,
    ) -> Result<Attempt, sqlx::Error> {
        let app = self.backlog.topology.app();
        let mut transaction = connection.begin().await?;
        limit_lock_waits(&mut transaction).await?;
        let found = match find_one(&mut transaction, app, &self.id).await? {
            None => return Ok(Attempt::NotFound),
            Some((_, true)) => return Ok(Attempt::refused(SEVERAL)),
            Some((found, false)) => found,
        };
        let (state, id) = (found.state, found.claimed.key.id);
        match state {
            TaskState::Running => return Ok(Attempt::refused(RUNS)),
            TaskState::Finished => return Ok(Attempt::refused(ENDED)),
            TaskState::Ready | TaskState::Parked | TaskState::Scheduled => {}
        }
        let lanes = match state {
            TaskState::Parked => lock_lanes_of(&mut transaction, &[id]).await?,
            _ => Vec::new(),
        };
        let Some(before) = lock_waiting(&mut transaction, state, id).await? else {
            return Ok(Attempt::Changed);
        };
        if let Some(problem) = self.problem(&before, tier) {
            return Ok(Attempt::Refused(problem));
        }
        add_backlogs(&mut transaction, app, &[&tier.name]).await?;
        let rank = self.rank(&before, tier);
        let is_due = state == TaskState::Scheduled && self.is_at_once;
        let statement = match state {
            TaskState::Scheduled if is_due => MOVE_AT_ONCE,
            TaskState::Scheduled => MOVE_SCHEDULED,
            // Its workers park it again if they have to.
            TaskState::Parked => MOVE_PARKED,
            _ => MOVE_READY,
        };
        sqlx::query(statement)
            .bind(id)
            .bind(app)
            .bind(&tier.name)
            .bind(rank)
            .execute(&mut *transaction)
            .await?;
        place_lanes(&mut transaction, &lanes).await?;
        let is_ready = is_due || state == TaskState::Parked;
        let state = if is_ready { TaskState::Ready } else { state };
        let Some(after) = lock_waiting(&mut transaction, state, id).await? else {
            return Ok(Attempt::Changed);
        };
        let now = SystemTime::now();
        let escalated = Escalated {
            before: before.into_details(now).summary,
            after: after.into_details(now).summary,
        };
        let subject = json!({ "task": self.id.as_str(), "to": tier.name });
        let before = serde_json::to_value(&escalated.before).ok();
        let after = serde_json::to_value(&escalated.after).ok();
        let action = self.backlog.action("escalate task", subject, before, after);
        record(&mut transaction, &action).await?;
        transaction.commit().await?;
        Ok(Attempt::Moved(Box::new(escalated)))
    }

    /// Why this task cannot move to this tier, if it cannot.
    fn problem(&self, row: &FoundRow, tier: &Tier) -> Option<String> {
        if row.tier == tier.name {
            return Some(format!("it is in the tier {} already", tier.name));
        }
        let ttl = tier.ttl?;
        let is_suspect = row.claimed.rank > 0;
        let waited = SystemTime::now().duration_since(row.claimed.due_at).ok()?;
        (row.state != TaskState::Scheduled && !is_suspect && waited >= ttl).then(|| {
            let (name, ttl) = (&tier.name, show_duration(ttl));
            format!(
                "it has waited for {} s, and the tier {name} dead-letters what has waited for {ttl}; choose another tier",
                waited.as_secs()
            )
        })
    }

    fn rank(&self, row: &FoundRow, tier: &Tier) -> i16 {
        let from = self.backlog.topology.tier(&row.tier);
        // A tier that is no longer in the map had priorities of its own, perhaps.
        let priorities = tier.priorities_from(from.unwrap_or(tier));
        rank_among(row.claimed.rank, &priorities)
    }

    fn unknown_tier(self) -> Error {
        let tiers = self.backlog.topology.tiers().iter();
        let names: Vec<&str> = tiers.map(|tier| tier.name.as_str()).collect();
        Error::Backlog(BacklogError::UnknownTier {
            near: near_miss(&self.tier, names.iter().copied()).map(Into::into),
            known: names.join(", ").into(),
            tier: self.tier.into(),
        })
    }

    async fn notify(&self) {
        let (app, tier) = (self.backlog.topology.app(), self.tier.as_str());
        let database = &self.backlog.database;
        let notifying = async {
            let mut connection = database.pool().acquire().await?;
            notify_of_older(&mut connection, app, tier).await
        };
        let notified = database.within(STATEMENT_LIMIT, "notify workers", notifying);
        if let Err(error) = notified.await {
            tracing::debug!(%error, "cannot notify workers of an escalated task; they look every second");
        }
    }
}

impl IntoFuture for Escalation {
    type Output = Result<Escalated, Error>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}

/// What became of a transaction.
enum Attempt {
    Moved(Box<Escalated>),
    NotFound,
    Refused(String),
    /// The task went from one state to the next meanwhile.
    Changed,
}

impl Attempt {
    fn refused(problem: &str) -> Self {
        Self::Refused(problem.to_owned())
    }
}

const SEVERAL: &str = "several tasks have this id, which does not say which one to escalate";
const RUNS: &str =
    "a worker has claimed it, and it runs or is about to; escalate it when it waits for a retry";
const ENDED: &str = "it has ended; its tier only keeps it for a time";

/// Moves the row $1, which is locked, to the tier $3 of the app $2.
macro_rules! move_within {
    ($table:literal) => {
        concat!(
            "UPDATE tierline.",
            $table,
            " AS row SET backlog = target.id, rank = $4, \
                first_backlog = nullif(coalesce(row.first_backlog, row.backlog), target.id) \
             FROM tierline.backlogs AS target WHERE row.id = $1 AND target.app = $2 AND target.tier = $3"
        )
    };
}

const MOVE_READY: &str = move_within!("ready");
const MOVE_SCHEDULED: &str = move_within!("scheduled");

const MOVE_PARKED: &str = "WITH taken AS (DELETE FROM tierline.parked WHERE id = $1 RETURNING parked.*) \
     INSERT INTO tierline.ready (id, due_at, rank, is_held, backlog, first_backlog, task, name, properties, payload) \
     SELECT taken.id, due_at, $4, is_held, target.id, nullif(coalesce(first_backlog, backlog), target.id), task, name, \
         properties, payload \
     FROM taken CROSS JOIN tierline.backlogs AS target WHERE target.app = $2 AND target.tier = $3 \
     ON CONFLICT (id) DO NOTHING";

const MOVE_AT_ONCE: &str = "WITH taken AS (DELETE FROM tierline.scheduled WHERE id = $1 RETURNING scheduled.*) \
     INSERT INTO tierline.ready (id, due_at, rank, is_held, backlog, first_backlog, task, name, properties, payload) \
     SELECT taken.id, now(), $4, is_held, target.id, nullif(coalesce(first_backlog, backlog), target.id), task, name, \
         properties, payload \
     FROM taken CROSS JOIN tierline.backlogs AS target WHERE target.app = $2 AND target.tier = $3 \
     ON CONFLICT (id) DO NOTHING";
