//! The app: the only place where the modules are wired together.

mod builder;
mod check;
mod connect;
#[cfg(feature = "postgres")]
mod database;
mod health;

use std::fmt;
use std::sync::Arc;
#[cfg(feature = "postgres")]
use std::time::Duration;

#[cfg(all(feature = "prometheus", feature = "postgres"))]
use futures_util::future::BoxFuture;
use futures_util::stream::Stream;
use serde_json::Value;

use crate::Error;
#[cfg(all(feature = "management", feature = "postgres"))]
use crate::amqp::Management;
#[cfg(feature = "postgres")]
use crate::amqp::QueueState;
#[cfg(feature = "postgres")]
use crate::backlog::Backlog;
#[cfg(feature = "postgres")]
use crate::control::Control;
#[cfg(feature = "postgres")]
use crate::dead::{Collector, DeadLetters, Outcomes};
#[cfg(feature = "postgres")]
use crate::error::DatabaseError;
#[cfg(feature = "prometheus")]
use crate::metrics::Metrics;
#[cfg(feature = "postgres")]
use crate::postgres::Database;
use crate::publish::{Publisher, PublisherStatus};
#[cfg(feature = "postgres")]
use crate::relay::Relay;
#[cfg(feature = "postgres")]
use crate::rollup::Rollups;
#[cfg(feature = "postgres")]
use crate::scaling::{self, GroupScaling, scaling};
#[cfg(feature = "postgres")]
use crate::schedule::{Scheduler, Schedules};
#[cfg(feature = "postgres")]
use crate::stats::{self, Stats, stats};
use crate::task::{Publish, PublishBuilder, PublishRequest, Receipt, Task};
use crate::topology::Topology;
use crate::worker::{Worker, WorkerParts};
pub use builder::{Builder, OnConnect};
pub use health::{Health, HealthState};

/// How long the end of an app waits for the last rollups.
#[cfg(feature = "postgres")]
const FLUSH_LIMIT: Duration = Duration::from_secs(3);

/// A running app: publishes the tasks of its map.
///
/// ```no_run
/// # async fn example() -> Result<(), tierline::Error> {
/// # use serde::{Deserialize, Serialize};
/// # #[derive(Serialize, Deserialize)]
/// # struct SendOtp { phone: String, code: String }
/// # impl tierline::Task for SendOtp { const NAME: &'static str = "email.send_otp"; }
/// use tierline::{Tierline, Topology};
///
/// let app = Tierline::builder(Topology::load("topology/hotel.toml")?)
///     .amqp("amqp://localhost")
///     .connect()
///     .await?;
/// let receipt = app.publish(SendOtp { phone: "+39…".into(), code: "1234".into() }).await?;
/// println!("{} is in {}", receipt.id, receipt.tier);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Tierline {
    publisher: Publisher,
    work: WorkerParts,
    #[cfg(feature = "postgres")]
    letters: Option<DeadLetters>,
    #[cfg(feature = "postgres")]
    outcomes: Option<Outcomes>,
    #[cfg(feature = "prometheus")]
    metrics: Option<Metrics>,
    /// The management API, and the virtual host of the app.
    #[cfg(all(feature = "management", feature = "postgres"))]
    management: Option<(Management, String)>,
}

impl Tierline {
    /// An app with this map.
    pub fn builder(topology: Topology) -> Builder {
        Builder::new(topology)
    }

    /// Publishes a task to the tier that the map gives it. Awaitable as it is, or with options.
    pub fn publish<T: Task>(&self, payload: T) -> PublishBuilder {
        PublishBuilder::new(Arc::new(self.publisher.clone()), &payload)
    }

    /// Publishes a task by its name, for callers that have no type: gateways, schedules.
    pub fn publish_named(&self, task: &str, payload: &Value) -> PublishBuilder {
        let request = PublishRequest::named(task, payload.to_string().into_bytes());
        PublishBuilder::of(Arc::new(self.publisher.clone()), request)
    }

    /// Publishes many tasks, many at once, and gives each one's outcome in their order.
    pub fn publish_many<S>(
        &self,
        requests: S,
    ) -> impl Stream<Item = Result<Receipt, Error>> + use<S>
    where
        S: Stream<Item = PublishRequest>,
    {
        self.publisher.publish_many(requests)
    }

    /// Publishes many tasks within the caller's own transaction, as [`within`](PublishBuilder::within) does with one: all of
    /// them if it commits, else none. Gives their receipts in order.
    ///
    /// Every task is checked before the first is stored, so a task that could never be published changes nothing.
    ///
    /// ```no_run
    /// # #[derive(serde::Serialize, serde::Deserialize)]
    /// # struct SendReceipt { order: i64 }
    /// # impl tierline::Task for SendReceipt { const NAME: &'static str = "email.receipt"; }
    /// # async fn example(app: tierline::Tierline, pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
    /// use tierline::task::PublishRequest;
    ///
    /// let mut tx = pool.begin().await?;
    /// let requests: Result<Vec<_>, _> = (1..=100)
    ///     .map(|order| PublishRequest::new(&SendReceipt { order }))
    ///     .collect();
    /// app.publish_many_within(requests?, &mut tx).await?;
    /// tx.commit().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Of the first task that cannot be published; else as [`within`](PublishBuilder::within). If it is a key that is not
    /// to be had, the tasks with other keys are stored in the transaction: roll it back.
    #[cfg(feature = "postgres")]
    pub async fn publish_many_within(
        &self,
        requests: impl IntoIterator<Item = PublishRequest>,
        connection: &mut sqlx::PgConnection,
    ) -> Result<Vec<Receipt>, Error> {
        self.publisher
            .publish_many_within(requests, connection)
            .await
    }

    /// Ends publishing, for all clones of the app, within ten seconds; a later publish fails with
    /// [`Error::Closed`]. What is under way has five seconds for its confirm. Then the connections are closed, and
    /// those of pools that the app handed over are given back. With a database, what is known of redriven tasks, and the
    /// last [rollups](crate::rollup), are written first.
    ///
    /// End workers, collectors and schedulers before. Without this call nothing that was confirmed is lost, but the
    /// broker logs connections that ended without a word.
    ///
    /// ```no_run
    /// # async fn example(app: tierline::Tierline) -> Result<(), tierline::Error> {
    /// app.work(["urgent"]).until_terminated().await?;
    /// app.close().await;
    /// # Ok(()) }
    /// ```
    pub async fn close(&self) {
        #[cfg(feature = "postgres")]
        let outcomes = async {
            if let Some(outcomes) = &self.outcomes {
                outcomes.flush().await;
            }
        };
        #[cfg(not(feature = "postgres"))]
        let outcomes = async {};
        tokio::join!(self.publisher.close(), outcomes);
        #[cfg(feature = "postgres")]
        {
            self.work.controls.close();
            // After the last publish.
            if let Some(recorder) = &self.work.recorder {
                recorder.flush(FLUSH_LIMIT).await;
            }
            if let Some(letters) = &self.letters {
                letters.database().close().await;
            }
        }
    }

    /// What is up: the broker, and the database if there is one. Answers within two seconds, for the route of a
    /// readiness probe. A liveness probe needs less: any route that answers shows that the runtime is not stuck, and a
    /// broker that is away is no reason to restart the process.
    ///
    /// ```no_run
    /// # async fn example(app: tierline::Tierline) {
    /// let health = app.health().await;
    /// let status = if health.is_ready() { 200 } else { 503 };
    /// println!("{status}\n{health}");
    /// # }
    /// ```
    pub async fn health(&self) -> Health {
        Health {
            broker: self.topology().tiers_using_broker().next().map(|_| {
                match self.publisher.status() {
                    PublisherStatus::Up => HealthState::Up,
                    PublisherStatus::Blocked => HealthState::Blocked,
                    PublisherStatus::Down(why) => HealthState::Down(why),
                }
            }),
            #[cfg(feature = "postgres")]
            database: match &self.letters {
                Some(letters) => Some(match letters.database().check().await {
                    Ok(()) => HealthState::Up,
                    Err(error) => HealthState::Down(error.to_string()),
                }),
                None => None,
            },
            #[cfg(not(feature = "postgres"))]
            database: None,
        }
    }

    /// The scheduler, which publishes what is due. Any number of processes may run it: one leads.
    ///
    /// # Errors
    /// [`DatabaseError::NotConfigured`] where the builder was given none.
    #[cfg(feature = "postgres")]
    pub fn scheduler(&self) -> Result<Scheduler, Error> {
        Ok(Scheduler::new(
            self.work.topology.clone(),
            self.log("run the scheduler")?.database().clone(),
            self.publisher(),
            self.work.observers.clone(),
            &self.work.connection_name,
        ))
    }

    /// The schedules: list, pause, resume, run, change.
    ///
    /// # Errors
    /// [`DatabaseError::NotConfigured`] where the builder was given none.
    #[cfg(feature = "postgres")]
    pub fn schedules(&self) -> Result<Schedules, Error> {
        let database = self.log("use the schedules")?.database();
        let schedules = Schedules::new(self.work.topology.clone(), database.clone());
        let schedules = schedules.by(&self.work.connection_name);
        Ok(schedules.publisher(self.publisher()))
    }

    /// The app's database.
    ///
    /// # Errors
    /// [`DatabaseError::NotConfigured`] where the builder was given none.
    #[cfg(feature = "postgres")]
    pub fn database(&self) -> Result<&Database, Error> {
        Ok(self.log("use the database")?.database())
    }

    /// The tasks that wait or run in tiers in Postgres: list, show, cancel.
    ///
    /// # Errors
    /// [`DatabaseError::NotConfigured`] where the builder was given none.
    #[cfg(feature = "postgres")]
    pub fn backlog(&self) -> Result<Backlog, Error> {
        let database = self.log("use the tasks in Postgres")?.database();
        let backlog = Backlog::new(self.topology().clone(), database.clone());
        Ok(backlog.by(&self.work.connection_name))
    }

    /// What can be changed while the app runs: pause and resume tiers, groups and tasks.
    ///
    /// # Errors
    /// [`DatabaseError::NotConfigured`] where the builder was given none.
    #[cfg(feature = "postgres")]
    pub fn control(&self) -> Result<Control, Error> {
        let database = self.log("control the app")?.database();
        let control = Control::new(self.topology().clone(), database.clone());
        let (publisher, topology) = (self.publisher.clone(), self.topology().clone());
        let control = control.queue_depths(move |tier, deadline| {
            let (publisher, queue) = (publisher.clone(), topology.names().queue(&tier));
            Box::pin(async move {
                match publisher.queue_state(&tier.name, &queue, deadline).await {
                    Some(QueueState::Available { messages, .. }) => Some(messages),
                    _ => None,
                }
            })
        });
        Ok(control.by(&self.work.connection_name))
    }

    /// What happened in each minute, by tier and task: see [`rollup`](crate::rollup).
    ///
    /// # Errors
    /// [`DatabaseError::NotConfigured`] where the builder was given none.
    #[cfg(feature = "postgres")]
    pub fn rollups(&self) -> Result<Rollups, Error> {
        let database = self.log("read the rollups")?.database();
        Ok(Rollups::new(self.topology(), database.clone()))
    }

    /// The metrics of this process, for a route of yours that Prometheus scrapes: see [`metrics`](crate::metrics).
    ///
    /// # Errors
    /// [`Error::NoMetrics`] where the [builder](Builder::metrics) was not asked to count.
    #[cfg(feature = "prometheus")]
    pub fn metrics(&self) -> Result<Metrics, Error> {
        self.metrics.clone().ok_or(Error::NoMetrics)
    }

    /// The same with the state of the whole app, from its [statistics](Self::stats): what waits, consumers, dead letters,
    /// pauses. Each scrape may ask both servers, within two seconds and at most every five. Keep it, and let few processes show it:
    /// one is enough.
    ///
    /// # Errors
    /// As [`metrics`](Self::metrics), and [`DatabaseError::NotConfigured`] where the builder was given no database.
    #[cfg(all(feature = "prometheus", feature = "postgres"))]
    pub fn metrics_with_stats(&self) -> Result<Metrics, Error> {
        self.log("read the statistics")?;
        let app = self.clone();
        let ask = move || -> BoxFuture<'static, Result<Stats, Error>> {
            let app = app.clone();
            Box::pin(async move { app.stats().await })
        };
        Ok(self.metrics()?.with_state(ask))
    }

    /// How many slots each worker group wants to meet the SLO of its tiers, with the present backlog and run times: see
    /// [`scaling`](crate::scaling) for the formula. Answers within two seconds.
    ///
    /// ```no_run
    /// # async fn example(app: tierline::Tierline) -> Result<(), tierline::Error> {
    /// for group in app.scaling().await? {
    ///     println!("{}: {} processes, {} wanted", group.group, group.processes, group.processes_wanted);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`DatabaseError::NotConfigured`] where the builder was given none; as every use of the database.
    #[cfg(feature = "postgres")]
    pub async fn scaling(&self) -> Result<Vec<GroupScaling>, Error> {
        let database = self.log("compute how many slots are wanted")?.database();
        scaling(scaling::Sources {
            topology: self.topology(),
            database,
            publisher: &self.publisher,
            controls: &self.work.controls,
        })
        .await
    }

    /// How the app is doing, tier by tier: see [`stats`](crate::stats). Answers within two seconds; what a server did not say
    /// is in [`problems`](Stats::problems).
    ///
    /// ```no_run
    /// # async fn example(app: tierline::Tierline) -> Result<(), tierline::Error> {
    /// for tier in app.stats().await?.tiers {
    ///     let waiting = tier.waiting.map_or("unknown".to_owned(), |it| it.to_string());
    ///     println!("{}: {waiting} wait", tier.tier);
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`DatabaseError::NotConfigured`] where the builder was given none, and [`Error::Closed`] after [`close`](Self::close).
    #[cfg(feature = "postgres")]
    pub async fn stats(&self) -> Result<Stats, Error> {
        let database = self.log("read the statistics")?.database();
        let sources = stats::Sources {
            topology: self.topology(),
            database,
            publisher: &self.publisher,
            #[cfg(feature = "management")]
            management: self
                .management
                .as_ref()
                .map(|(management, virtual_host)| (management, virtual_host.as_str())),
        };
        Ok(stats(sources).await)
    }

    /// The log of dead letters: list, group, redrive, discard.
    ///
    /// # Errors
    /// [`DatabaseError::NotConfigured`] where the builder was given none.
    #[cfg(feature = "postgres")]
    pub fn dead_letters(&self) -> Result<DeadLetters, Error> {
        self.log("use the log of dead letters").cloned()
    }

    /// What takes dead letters from their queues into the log, on a connection of its own, deletes old ones and reports
    /// their growth. If all tiers of the map are in Postgres, dead letters are in the log already, and it does the rest.
    ///
    /// # Errors
    /// [`DatabaseError::NotConfigured`] where the builder was given none.
    #[cfg(feature = "postgres")]
    pub fn collector(&self) -> Result<Collector, Error> {
        let database = self.log("collect dead letters")?.database();
        Ok(Collector::new(
            self.work.topology.clone(),
            self.work.urls.clone(),
            &self.work.connection_name,
            database.clone(),
            self.work.observers.clone(),
        ))
    }

    /// What publishes rows of tiers on the broker to the queues of their tiers, for workers that do not have the app's
    /// database. Any number of processes may run it.
    ///
    /// ```no_run
    /// # async fn example(app: tierline::Tierline) -> Result<(), tierline::Error> {
    /// app.relay()?.until_terminated().await?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// [`DatabaseError::NotConfigured`] where the builder was given none.
    #[cfg(feature = "postgres")]
    pub fn relay(&self) -> Result<Relay, Error> {
        let database = self.log("run the relay")?.database();
        Ok(Relay::new(self.work.clone(), database.clone()))
    }

    #[cfg(feature = "postgres")]
    fn log(&self, tried: &str) -> Result<&DeadLetters, Error> {
        self.publisher.check_open(tried)?;
        self.letters.as_ref().ok_or_else(|| {
            Error::Database(DatabaseError::NotConfigured {
                tried: tried.into(),
            })
        })
    }

    /// A worker for these groups of the map: a pool of slots for each. It begins where it is awaited, with
    /// [`until_terminated`](Worker::until_terminated) or [`until`](Worker::until).
    ///
    /// ```no_run
    /// # async fn example(app: tierline::Tierline) -> Result<(), tierline::Error> {
    /// app.work(["urgent", "calls"]).until_terminated().await?;
    /// # Ok(()) }
    /// ```
    pub fn work<G: Into<String>>(&self, groups: impl IntoIterator<Item = G>) -> Worker {
        let groups = groups.into_iter().map(Into::into).collect();
        #[cfg_attr(not(feature = "postgres"), expect(unused_mut))]
        let mut parts = self.work.clone();
        #[cfg(feature = "postgres")]
        if self.letters.is_some() {
            let app = self.clone();
            parts.collector = Some(Arc::new(move |shutdown| {
                let collector = app.collector();
                Box::pin(async move {
                    let ended = match collector {
                        Ok(collector) => collector.until(shutdown).await,
                        Err(error) => Err(error),
                    };
                    if let Err(error) = ended {
                        tracing::error!(%error, "the worker collects no dead letters");
                    }
                })
            }));
        }
        Worker::new(parts, groups)
    }

    /// The map.
    pub fn topology(&self) -> &Topology {
        &self.work.topology
    }

    /// The publisher alone, for code that takes any [`Publish`].
    pub fn publisher(&self) -> Arc<dyn Publish> {
        Arc::new(self.publisher.clone())
    }
}

impl fmt::Debug for Tierline {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Tierline")
            .field("app", &self.work.topology.app())
            .finish_non_exhaustive()
    }
}
