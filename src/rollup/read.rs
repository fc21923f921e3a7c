//! Reads rollups.

use std::fmt;
use std::future::IntoFuture;
use std::time::{Duration, SystemTime};

use futures_util::future::BoxFuture;
use serde::Serialize;

use super::RollupTotals;
use super::table::{Arrivals, Selection, Span, Sum, arrivals, sum};
use crate::Error;
use crate::error::ControlError;
use crate::postgres::{Database, STATEMENT_LIMIT};
use crate::task::IntoDuration;
use crate::topology::Topology;
use crate::topology::duration::Unreadable;

/// How many sums one query gives at most.
const MOST: i64 = 20_000;
/// The shortest step, and all steps are multiples of it.
const MINUTE: Duration = Duration::from_secs(60);

/// What happened, minute by minute. Get it from [`Tierline::rollups`](crate::Tierline::rollups).
///
/// Processes add to it about every ten seconds, so the last moments are missing.
///
/// ```no_run
/// # async fn example(app: tierline::Tierline) -> Result<(), tierline::Error> {
/// let rollups = app.rollups()?;
/// for tier in rollups.last("1h").await? {
///     let p95 = tier.totals.wait.quantile(0.95).unwrap_or_default();
///     println!("{}: {} done, 95 % waited less than {p95:?}", tier.tier, tier.totals.done);
/// }
/// // A chart of one task.
/// for point in rollups.last("1d").task("mail.send").every("10m").await? {
///     println!("{:?} {} published", point.since, point.totals.published);
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Rollups {
    app: String,
    database: Database,
}

impl Rollups {
    /// The rollups of this map's app.
    pub fn new(topology: &Topology, database: Database) -> Self {
        Self {
            app: topology.app().to_owned(),
            database,
        }
    }

    /// Sums up the minutes of this time before now, by the clock of the database.
    pub fn last(&self, span: impl IntoDuration) -> RollupQuery {
        let (mut read, mut unreadable) = (Duration::ZERO, Unreadable::NONE);
        unreadable.set("last", span, &mut read);
        RollupQuery {
            unreadable,
            ..self.query(Span::Last(read))
        }
    }

    /// Sums up the minutes from `since` on and before `until`.
    pub fn between(&self, since: SystemTime, until: SystemTime) -> RollupQuery {
        self.query(Span::Between(since, until))
    }

    /// What has come in within the last ten minutes, by tier and task.
    pub(crate) async fn arrivals(&self) -> Result<Vec<Arrivals>, Error> {
        let reading = async {
            let mut connection = self.database.pool().acquire().await?;
            arrivals(&mut connection, &self.app).await
        };
        let tried = "read how many tasks come in";
        self.database.within(STATEMENT_LIMIT, tried, reading).await
    }

    fn query(&self, span: Span) -> RollupQuery {
        RollupQuery {
            rollups: self.clone(),
            span,
            tier: None,
            task: None,
            by_task: false,
            step: None,
            unreadable: Unreadable::NONE,
        }
    }
}

impl fmt::Debug for Rollups {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Rollups")
            .field("app", &self.app)
            .finish_non_exhaustive()
    }
}

/// What to sum up; see [`Rollups`]. It gives one sum for each tier that has any, unless it is asked for more.
#[derive(Debug, Clone)]
#[must_use = "nothing is read until it is awaited"]
pub struct RollupQuery {
    rollups: Rollups,
    span: Span,
    tier: Option<String>,
    task: Option<String>,
    by_task: bool,
    step: Option<Duration>,
    unreadable: Unreadable,
}

impl RollupQuery {
    /// Of this tier alone.
    pub fn tier(mut self, tier: &str) -> Self {
        self.tier = Some(tier.to_owned());
        self
    }

    /// Of this task alone.
    pub fn task(mut self, task: &str) -> Self {
        self.task = Some(task.to_owned());
        self
    }

    /// A sum for each task of each tier.
    pub fn by_task(mut self) -> Self {
        self.by_task = true;
        self
    }

    /// A sum for each span of this length, such as `"1m"`: whole minutes, rounded up. The spans begin at multiples of
    /// their length since 1970.
    pub fn every(mut self, step: impl IntoDuration) -> Self {
        let mut read = MINUTE;
        self.unreadable.set("every", step, &mut read);
        let minutes = read.as_secs().saturating_add(59) / 60;
        self.step = Some(Duration::from_secs(minutes.max(1).saturating_mul(60)));
        self
    }

    async fn run(self) -> Result<Vec<Rollup>, Error> {
        self.unreadable.check()?;
        let selection = Selection {
            app: &self.rollups.app,
            span: self.span,
            tier: self.tier.as_deref(),
            task: self.task.as_deref(),
            by_task: self.by_task,
            step: self.step,
            most: MOST + 1,
        };
        let database = &self.rollups.database;
        let reading = async {
            let mut connection = database.pool().acquire().await?;
            sum(&mut connection, &selection).await
        };
        let sums = database
            .within(STATEMENT_LIMIT, "read the rollups", reading)
            .await?;
        if i64::try_from(sums.len()).is_ok_and(|count| count > MOST) {
            return Err(Error::Control(ControlError::Refused {
                tried: "read the rollups".into(),
                problem: format!(
                    "there are more than {MOST} sums; ask for a shorter time, longer steps, or one tier or task"
                )
                .into(),
            }));
        }
        Ok(sums.into_iter().map(Rollup::from).collect())
    }
}

impl IntoFuture for RollupQuery {
    type Output = Result<Vec<Rollup>, Error>;
    type IntoFuture = BoxFuture<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}

/// A sum of rollups.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Rollup {
    /// When its span begins, if the query asked for spans. Spans in which nothing happened are left out.
    #[serde(serialize_with = "crate::postgres::time::serialize_some")]
    pub since: Option<SystemTime>,
    /// The tier; [`UNKNOWN`](super::UNKNOWN) for all that the map does not have.
    pub tier: String,
    /// The task, if the query asked for tasks; [`UNKNOWN`](super::UNKNOWN) for all that the map does not have.
    pub task: Option<String>,
    /// What happened.
    #[serde(flatten)]
    pub totals: RollupTotals,
}

impl From<Sum> for Rollup {
    fn from(sum: Sum) -> Self {
        Self {
            since: sum.since,
            tier: sum.tier,
            task: sum.task,
            totals: sum.totals,
        }
    }
}
