//! Looks through the tasks in Postgres, and cancels them.

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use serde_json::json;
use uuid::Uuid;

use super::find::{
    LIST_PARKED, LIST_READY, LIST_RUNNING, LIST_SCHEDULED, find_one, limit_lock_waits,
};
use super::finished::{LIST_FINISHED, cancel};
use super::task::{
    BacklogPage, BacklogTask, BacklogTaskDetails, FoundRow, Place, TaskFilter, TaskState,
};
use crate::error::BacklogError;
use crate::postgres::{Action, AuditEntry, Database, PgConnection, STATEMENT_LIMIT, Time, record};
use crate::topology::Topology;
use crate::{Error, TaskId};

/// How many rows one query looks at.
const AT_ONCE: i64 = 500;
/// How many rows one page looks at.
const LOOKED_AT: usize = 10_000;
/// The longest operator name and reason that are kept, in bytes.
const LONGEST: usize = 200;

/// The tasks that wait or run in tiers in Postgres. Get it from [`Tierline::backlog`](crate::Tierline::backlog).
///
/// ```no_run
/// # async fn example(app: tierline::Tierline) -> Result<(), tierline::Error> {
/// use tierline::backlog::TaskFilter;
///
/// let backlog = app.backlog()?.by("ada").because("the customer withdrew the order");
/// let exports = TaskFilter::default().tier("exports").task("report.export");
/// for task in backlog.list(&exports, None, 50).await?.tasks {
///     println!("{} {} attempt {}", task.id, task.state, task.attempt);
///     backlog.cancel(&task.id).await?;
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Backlog {
    pub(super) topology: Topology,
    pub(super) database: Database,
    who: Arc<str>,
    why: Arc<str>,
}

impl Backlog {
    /// The tasks of this map's app.
    pub fn new(topology: Topology, database: Database) -> Self {
        Self {
            topology,
            database,
            who: "somebody".into(),
            why: "".into(),
        }
    }

    /// The operator who makes the changes that follow, for the audit log. Default: `somebody`.
    #[must_use]
    pub fn by(mut self, who: &str) -> Self {
        self.who = kept(who);
        self
    }

    /// The reason for these changes, for the audit log. Default: empty.
    #[must_use]
    pub fn because(mut self, why: &str) -> Self {
        self.why = kept(why);
        self
    }

    /// The tasks that a filter means, at most `size`. `start` is [`next`](BacklogPage::next) of the page before.
    ///
    /// # Errors
    /// [`BacklogError::InvalidFilter`]; as every use of the database.
    pub async fn list(
        &self,
        filter: &TaskFilter,
        start: Option<&str>,
        size: u16,
    ) -> Result<BacklogPage, Error> {
        let start = start.map(str::parse::<Place>).transpose()?;
        let (found, next) = self.find(filter, start, size.into()).await?;
        let now = SystemTime::now();
        let tasks = found.into_iter().map(|row| row.into_details(now).summary);
        Ok(BacklogPage {
            tasks: tasks.collect(),
            next: next.map(|place| place.to_string()),
        })
    }

    /// One task with everything that is known of it.
    ///
    /// # Errors
    /// [`BacklogError::NotFound`]; as every use of the database.
    pub async fn get(&self, id: &TaskId) -> Result<BacklogTaskDetails, Error> {
        let reading = async {
            let mut connection = self.database.pool().acquire().await?;
            find_one(&mut connection, self.topology.app(), id).await
        };
        let tried = "look for a task";
        let found = self
            .database
            .within(STATEMENT_LIMIT, tried, reading)
            .await?;
        match found {
            Some((row, _)) => Ok(row.into_details(SystemTime::now())),
            None => Err(Error::Backlog(BacklogError::NotFound { id: id.clone() })),
        }
    }

    /// Cancels a task that waits: it will not run, and is gone, unless its tier keeps finished tasks. A task that runs is
    /// left alone.
    ///
    /// # Errors
    /// [`BacklogError::NotFound`]; [`BacklogError::Refused`] if it runs or has ended; as every use of the database.
    pub async fn cancel(&self, id: &TaskId) -> Result<BacklogTask, Error> {
        let cancelling = async {
            let mut connection = self.database.pool().acquire().await?;
            let mut transaction = connection.begin().await?;
            limit_lock_waits(&mut transaction).await?;
            let found = find_one(&mut transaction, self.topology.app(), id).await?;
            let Some((found, is_one_of_many)) = found else {
                return Ok(None);
            };
            if is_one_of_many {
                return Ok(Some((found.into_details(SystemTime::now()).summary, None)));
            }
            let (state, key) = (found.state, found.claimed.key.id);
            let is_gone = self.delete(&mut transaction, state, &[key]).await? > 0;
            let task = found.into_details(SystemTime::now()).summary;
            if is_gone {
                let before = serde_json::to_value(&task).ok();
                let subject = json!({ "task": id.as_str() });
                let action = self.action("cancel task", subject, before, None);
                record(&mut transaction, &action).await?;
                transaction.commit().await?;
            }
            Ok(Some((task, Some(is_gone))))
        };
        let tried = "cancel a task";
        let cancelled = self.database.within(STATEMENT_LIMIT, tried, cancelling);
        match cancelled.await? {
            Some((task, Some(true))) => Ok(task),
            Some((_, None)) => Err(Error::Backlog(BacklogError::Refused {
                id: id.clone(),
                problem: "several tasks have this id, which does not say which one to cancel".into(),
            })),
            Some((task, Some(false))) if task.state == TaskState::Finished => {
                Err(Error::Backlog(BacklogError::Refused {
                    id: id.clone(),
                    problem: "it has ended; its tier only keeps it for a time".into(),
                }))
            }
            Some((_, Some(false))) => Err(Error::Backlog(BacklogError::Refused {
                id: id.clone(),
                problem: "a worker has claimed it, and it runs or is about to; cancel it when it waits for a retry".into(),
            })),
            None => Err(Error::Backlog(BacklogError::NotFound { id: id.clone() })),
        }
    }

    /// Cancels all waiting tasks that a filter means, and returns how many. Tasks that run are left alone, and so are
    /// tasks that are published meanwhile behind those that it has looked at.
    ///
    /// # Errors
    /// [`BacklogError::InvalidFilter`]; as every use of the database. What was cancelled before the error stays
    /// cancelled, and is in the audit log.
    pub async fn cancel_all(&self, filter: &TaskFilter) -> Result<u64, Error> {
        let mut count = 0;
        // In the order in which a task moves, so that one that falls due meanwhile is not missed.
        for state in [TaskState::Scheduled, TaskState::Ready, TaskState::Parked] {
            if filter.state.is_none_or(|meant| meant == state) {
                count += self.cancel_all_in(filter, state).await?;
            }
        }
        Ok(count)
    }

    async fn cancel_all_in(&self, filter: &TaskFilter, state: TaskState) -> Result<u64, Error> {
        let of_state = filter.clone().state(state);
        let (mut start, mut count) = (None, 0);
        loop {
            let (found, next) = self.find(&of_state, start, AT_ONCE as usize).await?;
            let ids = found.iter().map(|row| row.claimed.key.id).collect();
            count += self.cancel_rows(filter, state, ids).await?;
            match next {
                Some(next) => start = Some(next),
                None => return Ok(count),
            }
        }
    }

    async fn cancel_rows(
        &self,
        filter: &TaskFilter,
        state: TaskState,
        ids: Vec<Uuid>,
    ) -> Result<u64, Error> {
        if ids.is_empty() {
            return Ok(0);
        }
        let cancelling = async {
            let mut connection = self.database.pool().acquire().await?;
            let mut transaction = connection.begin().await?;
            limit_lock_waits(&mut transaction).await?;
            let gone = self.delete(&mut transaction, state, &ids).await?;
            if gone > 0 {
                let subject = json!({
                    "tier": filter.tier,
                    "task": filter.task,
                    "state": state,
                    "waiting_for_seconds": filter.waiting_for.map(|it| it.as_secs_f64()),
                    "due_within_seconds": filter.due_within.map(|it| it.as_secs_f64()),
                });
                let before = Some(json!({ "count": gone }));
                let action = self.action("cancel tasks", subject, before, None);
                record(&mut transaction, &action).await?;
            }
            transaction.commit().await?;
            Ok(gone)
        };
        let tried = "cancel tasks";
        self.database
            .within(STATEMENT_LIMIT, tried, cancelling)
            .await
    }

    /// What operators did, the latest first: at most `size` entries, and only those before the entry `before`.
    ///
    /// # Errors
    /// As every use of the database.
    pub async fn audit_log(
        &self,
        before: Option<i64>,
        size: u16,
    ) -> Result<Vec<AuditEntry>, Error> {
        let app = self.topology.app();
        self.database.audit_log(app, before, size).await
    }

    /// Deletes rows that wait, and keeps those whose tier does. Returns how many there were.
    async fn delete(
        &self,
        connection: &mut PgConnection<'_>,
        state: TaskState,
        ids: &[Uuid],
    ) -> Result<u64, sqlx::Error> {
        let keeping = self.topology.tiers_using_postgres();
        let keeping = keeping.filter(|tier| tier.home.keep().is_some());
        let keeping: Vec<&str> = keeping.map(|tier| tier.name.as_str()).collect();
        cancel(connection, state, ids, self.topology.app(), &keeping).await
    }

    pub(super) fn action(
        &self,
        action: &'static str,
        subject: serde_json::Value,
        before: Option<serde_json::Value>,
        after: Option<serde_json::Value>,
    ) -> Action<'_> {
        Action {
            app: self.topology.app(),
            who: &self.who,
            why: &self.why,
            action,
            subject,
            before,
            after,
        }
    }

    /// The first rows that a filter means after `start`, and where to go on.
    async fn find(
        &self,
        filter: &TaskFilter,
        start: Option<Place>,
        size: usize,
    ) -> Result<(Vec<FoundRow>, Option<Place>), Error> {
        filter.unreadable.clone().check()?;
        let lists = self.lists(filter)?;
        let first = match &start {
            Some(start) => lists
                .iter()
                .position(|(state, tier)| (*state, *tier) == (start.state, start.tier.as_str()))
                .ok_or_else(|| BacklogError::InvalidFilter {
                    problem: "the start of the page belongs to another filter".into(),
                })?,
            None => 0,
        };
        let (mut found, mut looked_at) = (Vec::new(), 0);
        let mut start = start;
        let now = SystemTime::now();
        for (state, tier) in &lists[first..] {
            loop {
                let rows = self.rows(*state, tier, start.as_ref()).await?;
                let is_last = rows.len() < AT_ONCE as usize;
                for row in rows {
                    let place = row.place();
                    looked_at += 1;
                    if filter.matches(&row, now) {
                        found.push(row);
                    }
                    if found.len() == size || looked_at == LOOKED_AT {
                        return Ok((found, Some(place)));
                    }
                    start = Some(place);
                }
                if is_last {
                    break;
                }
            }
            start = None;
        }
        Ok((found, None))
    }

    /// The states and tiers that a filter means, in the order of lists.
    fn lists(&self, filter: &TaskFilter) -> Result<Vec<(TaskState, &str)>, Error> {
        // Also one on the broker may have rows: what was promoted or escalated to it.
        let tiers = self.topology.tiers().iter().map(|tier| tier.name.as_str());
        let is_meant = |tier: &&str| filter.tier.as_deref().is_none_or(|it| it == *tier);
        let meant: Vec<&str> = tiers.clone().filter(is_meant).collect();
        if let (Some(tier), true) = (&filter.tier, meant.is_empty()) {
            let known: Vec<&str> = tiers.collect();
            let known = known.join(", ");
            let problem = format!("there is no tier {tier:?} in the map; its tiers are {known}");
            return Err(Error::Backlog(BacklogError::InvalidFilter {
                problem: problem.into(),
            }));
        }
        let states = TaskState::ALL.into_iter();
        let states = states.filter(|state| match filter.state {
            Some(meant) => meant == *state,
            None => *state != TaskState::Finished,
        });
        let lists = states.flat_map(|state| meant.iter().map(move |tier| (state, *tier)));
        Ok(lists.collect())
    }

    async fn rows(
        &self,
        state: TaskState,
        tier: &str,
        start: Option<&Place>,
    ) -> Result<Vec<FoundRow>, Error> {
        let reading = async {
            let listing = sqlx::query(match state {
                TaskState::Running => LIST_RUNNING,
                TaskState::Ready => LIST_READY,
                TaskState::Parked => LIST_PARKED,
                TaskState::Scheduled => LIST_SCHEDULED,
                TaskState::Finished => LIST_FINISHED,
            });
            let listing = listing
                .bind(self.topology.app())
                .bind(tier)
                .bind(AT_ONCE)
                .bind(match (start, state) {
                    (Some(start), _) => start.id,
                    (None, TaskState::Finished) => Uuid::max(),
                    (None, _) => Uuid::nil(),
                });
            let due_at = start.map_or(SystemTime::UNIX_EPOCH, |it| it.due_at);
            let listing = match state {
                TaskState::Running => listing,
                TaskState::Scheduled => listing.bind(Time(due_at)),
                TaskState::Finished => listing.bind(start.map(|it| Time(it.due_at))),
                TaskState::Ready | TaskState::Parked => listing
                    .bind(Time(due_at))
                    .bind(start.map_or(i16::MIN, |it| it.rank)),
            };
            let rows = listing.fetch_all(self.database.pool()).await?;
            rows.iter()
                .map(|row| FoundRow::read(row, state))
                .collect::<Result<Vec<_>, _>>()
        };
        self.database
            .within(STATEMENT_LIMIT, "list tasks", reading)
            .await
    }
}

fn kept(text: &str) -> Arc<str> {
    let text = text.replace('\0', "\u{fffd}");
    text[..text.floor_char_boundary(LONGEST)].into()
}

impl fmt::Debug for Backlog {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Backlog")
            .field("app", &self.topology.app())
            .field("database", &self.database)
            .field("who", &self.who)
            .finish_non_exhaustive()
    }
}
