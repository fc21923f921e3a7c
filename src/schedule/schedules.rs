//! Schedules at run time: list, pause, change.

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use jiff::Timestamp;

use super::run;
use super::state::{Origin, ScheduleChange, ScheduleState};
use super::store::Store;
use crate::Error;
use crate::error::TopologyError;
use crate::postgres::Database;
use crate::task::{Publish, Receipt};
use crate::topology::{Schedule, Topology, near_miss};

/// The schedules of an app, at run time. See [`Tierline::schedules`].
///
/// The database stores every change with its operator and time. It takes effect in all processes within
/// a second.
///
/// ```no_run
/// # async fn example(app: tierline::Tierline) -> Result<(), tierline::Error> {
/// let schedules = app.schedules()?.by("ada");
/// schedules.pause("nightly-report").await?;
/// schedules.run_now("calendar-sync").await?;
/// for state in schedules.list().await? {
///     println!("{} is due {:?}", state.schedule.name, state.next_due);
/// }
/// # Ok(()) }
/// ```
///
/// [`Tierline::schedules`]: crate::Tierline::schedules
#[derive(Clone)]
pub struct Schedules {
    store: Store,
    topology: Topology,
    publisher: Option<Arc<dyn Publish>>,
    by: String,
}

impl Schedules {
    /// The schedules of this map's app for programs that do not publish. It does everything except
    /// [`run_now`](Self::run_now).
    pub fn new(topology: Topology, database: Database) -> Self {
        Self {
            store: Store::new(database, topology.app()),
            by: format!("tierline {}", topology.app()),
            topology,
            publisher: None,
        }
    }

    pub(crate) fn publisher(mut self, publisher: Arc<dyn Publish>) -> Self {
        self.publisher = Some(publisher);
        self
    }

    /// The operator, for the history. Default: the app.
    pub fn by(mut self, who: impl Into<String>) -> Self {
        self.by = who.into();
        self
    }

    /// Every schedule in the database, by name.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn list(&self) -> Result<Vec<ScheduleState>, Error> {
        self.store.list().await
    }

    /// One schedule.
    ///
    /// # Errors
    /// [`TopologyError::UnknownSchedule`], and those of the database.
    pub async fn get(&self, name: &str) -> Result<ScheduleState, Error> {
        let state = self.store.get(name).await;
        self.known(state).await
    }

    /// The due times of the next `count` runs of a schedule, whether it is paused or not.
    ///
    /// # Errors
    /// [`TopologyError::UnknownSchedule`], and those of the database.
    pub async fn next(&self, name: &str, count: usize) -> Result<Vec<SystemTime>, Error> {
        let state = self.get(name).await?;
        Ok(state
            .schedule
            .upcoming(self.store.now().await?.into(), count))
    }

    /// The history of a schedule: changes with operator and time, the latest first. A removed schedule keeps
    /// its history.
    ///
    /// # Errors
    /// Those of the database.
    pub async fn history(&self, name: &str, count: u32) -> Result<Vec<ScheduleChange>, Error> {
        self.store.history(name, count).await
    }

    /// Pauses a schedule until it is resumed, also across restarts. Runs that would be due meanwhile do not
    /// count as missed.
    ///
    /// # Errors
    /// [`TopologyError::UnknownSchedule`], and those of the database.
    pub async fn pause(&self, name: &str) -> Result<ScheduleState, Error> {
        let state = self.store.pause(name, &self.by).await;
        self.known(state).await
    }

    /// Resumes a paused schedule with its next run.
    ///
    /// # Errors
    /// [`TopologyError::UnknownSchedule`], and those of the database.
    pub async fn resume(&self, name: &str) -> Result<ScheduleState, Error> {
        let next = self.next_of(&self.get(name).await?.schedule).await?;
        let state = self.store.resume(name, &self.by, next).await;
        self.known(state).await
    }

    /// Publishes a run of a schedule now, even if it is paused. Its due time is now; the next due time does
    /// not change.
    ///
    /// # Errors
    /// [`TopologyError::UnknownSchedule`], those of publishing, and those of the database.
    pub async fn run_now(&self, name: &str) -> Result<Receipt, Error> {
        let schedule = self.get(name).await?.schedule;
        let Some(publisher) = &self.publisher else {
            return Err(Error::Topology(TopologyError::InvalidSchedule {
                schedule: name.into(),
                problem: "it cannot run here, because a run is published: use Tierline::schedules of a connected app".into(),
            }));
        };
        let now = self.store.now().await?;
        self.store.note_run(name, &self.by).await?;
        publisher.publish(run::request(&schedule, now, now)).await
    }

    /// Adds a schedule. Call it at every start: if the definition is the same as last time, nothing changes;
    /// if it differs, the new definition takes effect.
    ///
    /// # Errors
    /// [`TopologyError::InvalidSchedule`] if the file's rules refuse it, or the file already has it;
    /// those of the database.
    pub async fn add(&self, schedule: &Schedule) -> Result<ScheduleState, Error> {
        schedule.check(&self.topology)?;
        let now = self.store.now().await?;
        let schedules = std::slice::from_ref(schedule);
        self.store
            .declare(schedules, Origin::Code, &self.by, now)
            .await?;
        let state = self.store.get(&schedule.name).await?;
        match state.origin {
            Origin::Code => Ok(state),
            Origin::File => Err(in_the_file(&schedule.name, "give this one another name")),
        }
    }

    /// Replaces the definition of the schedule of this name. It holds until the file, or the code that adds
    /// the schedule, declares something new. A run that is due stays due unless the
    /// timing differs.
    ///
    /// ```no_run
    /// # async fn example(app: tierline::Tierline) -> Result<(), tierline::Error> {
    /// use std::time::Duration;
    /// use tierline::topology::Timing;
    ///
    /// let schedules = app.schedules()?.by("ada");
    /// let mut sync = schedules.get("calendar-sync").await?.schedule;
    /// sync.timing = Timing::every("10m")?;
    /// schedules.change(&sync).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`TopologyError::InvalidSchedule`] if the file's rules refuse it, [`TopologyError::UnknownSchedule`],
    /// and those of the database.
    pub async fn change(&self, schedule: &Schedule) -> Result<ScheduleState, Error> {
        schedule.check(&self.topology)?;
        let next = self.next_of(schedule).await?;
        let state = self.store.change(schedule, &self.by, next).await;
        self.known(state).await
    }

    /// Removes a schedule that code added, or one that is gone from the file.
    ///
    /// # Errors
    /// [`TopologyError::InvalidSchedule`] if it is in the file, [`TopologyError::UnknownSchedule`], and those of
    /// the database.
    pub async fn remove(&self, name: &str) -> Result<ScheduleState, Error> {
        match self.store.remove(name, &self.by).await {
            Err(Error::Topology(TopologyError::UnknownSchedule { .. })) => {
                self.get(name).await?;
                Err(in_the_file(name, "remove it there, or pause it"))
            }
            other => other,
        }
    }

    async fn next_of(&self, schedule: &Schedule) -> Result<Option<Timestamp>, Error> {
        let now = self.store.now().await?;
        Ok(schedule.timing.next_after(now, &schedule.name))
    }

    /// Suggests the nearest name in the error for an unknown schedule.
    async fn known(&self, state: Result<ScheduleState, Error>) -> Result<ScheduleState, Error> {
        let Err(Error::Topology(TopologyError::UnknownSchedule { schedule, .. })) = state else {
            return state;
        };
        let states = self.store.list().await?;
        let names = states.iter().map(|state| state.schedule.name.as_str());
        let near = near_miss(&schedule, names).map(Box::from);
        Err(Error::Topology(TopologyError::UnknownSchedule {
            schedule,
            near,
        }))
    }
}

fn in_the_file(name: &str, help: &str) -> Error {
    Error::Topology(TopologyError::InvalidSchedule {
        schedule: name.into(),
        problem: format!("it is in the topology file; {help}").into(),
    })
}

impl fmt::Debug for Schedules {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Schedules")
            .field("app", &self.topology.app())
            .field("by", &self.by)
            .finish_non_exhaustive()
    }
}
