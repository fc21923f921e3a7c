//! The app: the only place where the rooms are wired together.

use std::fmt;
use std::sync::Arc;

use futures_util::stream::Stream;
use serde_json::Value;

use crate::Error;
use crate::amqp::{Connection, Severity, apply, doctor};
#[cfg(feature = "postgres")]
use crate::dead::{Collector, DeadLetters, Outcomes, Triage};
use crate::error::{BrokerError, DatabaseError};
use crate::observe::{Event, Observers};
#[cfg(feature = "postgres")]
use crate::postgres::Database;
use crate::publish::{Publisher, TraceContext};
#[cfg(feature = "postgres")]
use crate::schedule::{Scheduler, Schedules};
use crate::secret::Secret;
use crate::task::{
    AddedMiddleware, Data, Middleware, Publish, PublishBuilder, PublishRequest, Receipt, Registry,
    Task,
};
use crate::topology::Topology;
use crate::topology::plan::Plan;
use crate::worker::{Worker, WorkerParts};

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
}

/// What is done about the broker's queues and exchanges when the app connects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnConnect {
    /// Declares what is missing, and fails where something differs. Goes on without a queue whose node
    /// is down: its tasks cannot be published, and run when it is back. The default.
    #[default]
    Apply,
    /// Declares nothing, and fails where something is missing or cannot be reached.
    Verify,
    /// Takes it that somebody else has done it.
    Nothing,
}

/// Settings of an app that is about to connect; see [`Tierline::builder`].
pub struct Builder {
    topology: Topology,
    urls: Vec<Secret>,
    #[cfg(feature = "postgres")]
    postgres: Option<Secret>,
    #[cfg(feature = "postgres")]
    triage: Triage,
    name: String,
    on_connect: OnConnect,
    publish_connections: usize,
    observers: Observers,
    registry: Option<Registry>,
    middleware: AddedMiddleware,
    data: Data,
    version: String,
    trace: TraceContext,
}

/// Two: what one loses is mended while the other goes on.
const PUBLISH_CONNECTIONS: usize = 2;

impl Tierline {
    /// An app with this map.
    pub fn builder(topology: Topology) -> Builder {
        Builder {
            name: format!("tierline {}", topology.app()),
            topology,
            urls: Vec::new(),
            #[cfg(feature = "postgres")]
            postgres: None,
            #[cfg(feature = "postgres")]
            triage: Triage::default(),
            on_connect: OnConnect::default(),
            publish_connections: PUBLISH_CONNECTIONS,
            observers: Observers::default(),
            registry: None,
            middleware: AddedMiddleware::default(),
            data: Data::new(),
            version: String::new(),
            trace: TraceContext::default(),
        }
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

    /// The log of dead letters: list, group, redrive, discard.
    ///
    /// # Errors
    /// [`DatabaseError::NotConfigured`] where the builder was given none.
    #[cfg(feature = "postgres")]
    pub fn dead_letters(&self) -> Result<DeadLetters, Error> {
        self.log("use the log of dead letters").cloned()
    }

    /// What takes dead letters from their queues into the log, on a connection of its own.
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

    #[cfg(feature = "postgres")]
    fn log(&self, tried: &str) -> Result<&DeadLetters, Error> {
        self.letters.as_ref().ok_or_else(|| {
            Error::Database(DatabaseError::NotConfigured {
                tried: tried.into(),
            })
        })
    }

    /// A worker for these groups of the map: a pool of slots for each. It begins with
    /// [`until`](Worker::until).
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
            parts.companion = Some(Arc::new(move |shutdown| {
                let collector = app.collector();
                Box::pin(async move {
                    if let Ok(collector) = collector {
                        collector.until(shutdown).await;
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

impl Builder {
    /// Adds the URL of a broker, or of one more node of its cluster; the first that answers is used.
    ///
    /// `amqps://` trusts what the system trusts, or the certificates in the file that the environment
    /// variable `SSL_CERT_FILE` names.
    pub fn amqp(mut self, url: impl Into<String>) -> Self {
        self.urls.push(Secret::new(url));
        self
    }

    /// The URL of the database for dead letters; see [`Database::new`]. It need not be up when the
    /// app connects. Prepare it once with [`Database::migrate`] or `tierline migrate`.
    #[cfg(feature = "postgres")]
    pub fn postgres(mut self, url: impl Into<String>) -> Self {
        self.postgres = Some(Secret::new(url));
        self
    }

    /// How dead letters are assessed. Default: by the rules that come with tierline.
    #[cfg(feature = "postgres")]
    pub fn triage(self, triage: Triage) -> Self {
        Self { triage, ..self }
    }

    /// What to do about the broker's queues and exchanges. Default: [`OnConnect::Apply`].
    pub fn on_connect(self, on_connect: OnConnect) -> Self {
        Self { on_connect, ..self }
    }

    /// How many connections publishing has, apart from those that consume. At least 1. Default: 2.
    pub fn publish_connections(self, count: usize) -> Self {
        Self {
            publish_connections: count.max(1),
            ..self
        }
    }

    /// Adds somebody who is told of everything that happens. Any number may be added. They must not
    /// block: they are called where it happens.
    pub fn observe(mut self, observer: impl Fn(&Event<'_>) + Send + Sync + 'static) -> Self {
        self.observers.add(observer);
        self
    }

    /// The handlers that workers run. Default: every `#[task]` handler that is linked into the
    /// program.
    pub fn registry(self, registry: Registry) -> Self {
        Self {
            registry: Some(registry),
            ..self
        }
    }

    /// Adds a middleware around every handler that workers run, inside those that were added before. See
    /// [`Middleware`].
    pub fn middleware(mut self, middleware: impl Middleware) -> Self {
        self.middleware.add(middleware);
        self
    }

    /// Adds a middleware around every handler that runs in this group of the map, inside those of the app.
    /// A group that the map does not have is an error of [`connect`](Self::connect).
    pub fn group_middleware(
        mut self,
        group: impl Into<String>,
        middleware: impl Middleware,
    ) -> Self {
        self.middleware.add_to_group(group.into(), middleware);
        self
    }

    /// Adds a middleware around the handler of this task, inside those of the app and of the group. A task
    /// that the map does not have is an error of [`connect`](Self::connect).
    pub fn task_middleware(mut self, task: impl Into<String>, middleware: impl Middleware) -> Self {
        self.middleware.add_to_task(task.into(), middleware);
        self
    }

    /// Adds a value that handlers take with [`Context::data`](crate::Context::data), in place of an
    /// earlier one of the same type.
    pub fn data<T: Send + Sync + 'static>(mut self, value: T) -> Self {
        self.data.insert(value);
        self
    }

    /// The version of the program, which dead letters carry: `env!("CARGO_PKG_VERSION")`, say.
    /// Default: none.
    pub fn version(self, version: impl Into<String>) -> Self {
        Self {
            version: version.into(),
            ..self
        }
    }

    /// How to learn the W3C trace context (`traceparent`) of where a task is published. Called for each
    /// publish that is given none, in the caller's own task; the handler continues that trace. Without
    /// it no context is added, since `tracing` alone has none.
    ///
    /// ```
    /// # use tierline::{Tierline, Topology};
    /// # fn current_traceparent() -> Option<String> { None }
    /// # let map = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/topology/minimal.toml"));
    /// # let topology = Topology::parse(map).unwrap();
    /// // For example OpenTelemetry's propagator, asked for the context of the current span.
    /// let builder = Tierline::builder(topology).trace_context(current_traceparent);
    /// ```
    pub fn trace_context(
        self,
        current: impl Fn() -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        Self {
            trace: TraceContext::new(current),
            ..self
        }
    }

    /// The name under which the broker's management shows the connections. Default: `tierline` and
    /// the app's name.
    pub fn connection_name(self, name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            ..self
        }
    }

    /// Connects to the first broker that answers, within ten seconds for each, and brings its queues
    /// and exchanges into the state of the map, as [`on_connect`](Self::on_connect) says.
    ///
    /// # Errors
    /// As [`Connection::open`], [`apply`], [`doctor`] and [`Database::new`]; [`BrokerError::NotVerified`] where something is
    /// missing and must not be declared; [`WorkerError::MiddlewareWithoutTarget`](crate::error::WorkerError::MiddlewareWithoutTarget) where the map does not have the group or
    /// the task of a middleware.
    pub async fn connect(self) -> Result<Tierline, Error> {
        let Self {
            topology,
            mut urls,
            #[cfg(feature = "postgres")]
            postgres,
            #[cfg(feature = "postgres")]
            triage,
            name,
            on_connect,
            publish_connections,
            #[cfg_attr(not(feature = "postgres"), expect(unused_mut))]
            mut observers,
            registry,
            middleware,
            data,
            version,
            trace,
        } = self;
        let tasks = topology.tasks().iter().map(|task| task.name.as_str());
        let middleware = middleware.resolve(Some(&topology), &tasks.collect::<Vec<_>>())?;
        #[cfg(feature = "postgres")]
        let database = postgres.map(|url| Database::new(url.expose()));
        #[cfg(feature = "postgres")]
        let database = database.transpose()?;
        #[cfg(feature = "postgres")]
        if let Some(database) = &database {
            let outcomes = Outcomes::start(database.clone(), topology.app());
            observers.add(move |event| outcomes.handle(event));
        }
        let (answered, connection) = Connection::open_any(&urls, &name).await?;
        // Reconnecting begins with it.
        urls.rotate_left(answered);
        match on_connect {
            OnConnect::Apply => {
                let plan = Plan::new(&topology, connection.version())?;
                let applied = apply(&connection, &plan).await?;
                if !applied.unreachable.is_empty() {
                    let queues = applied.unreachable.join(", ");
                    tracing::warn!(
                        queues,
                        "on a node that is down, or without a leader: going on without them"
                    );
                }
            }
            OnConnect::Verify => {
                let mut report = doctor(&connection, &topology).await?;
                if !report.is_well() {
                    report
                        .findings
                        .retain(|finding| finding.severity > Severity::Note);
                    report.not_checked.clear();
                    return Err(Error::Broker(BrokerError::NotVerified(Box::new(report))));
                }
            }
            OnConnect::Nothing => {
                Plan::new(&topology, connection.version())?;
            }
        }
        let publisher = Publisher::new(
            topology.clone(),
            urls.clone(),
            name.clone(),
            connection,
            publish_connections,
            observers.clone(),
            trace,
        );
        #[cfg(feature = "postgres")]
        let letters = database.map(|database| {
            DeadLetters::new(topology.clone(), database, publisher.clone(), triage)
        });
        let registry = registry.map_or_else(Registry::collected, Ok);
        Ok(Tierline {
            publisher: publisher.clone(),
            #[cfg(feature = "postgres")]
            letters,
            work: WorkerParts {
                topology,
                urls,
                connection_name: name,
                publisher,
                registry: registry.map(Arc::new).map_err(Arc::new),
                middleware: Arc::new(middleware),
                data: Arc::new(data),
                observers,
                version,
                may_declare: on_connect == OnConnect::Apply,
                suspects: Arc::default(),
                companion: None,
            },
        })
    }
}

impl fmt::Debug for Tierline {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Tierline")
            .field("app", &self.work.topology.app())
            .finish_non_exhaustive()
    }
}

/// Without the URLs: they may hold passwords.
impl fmt::Debug for Builder {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Builder")
            .field("app", &self.topology.app())
            .field("on_connect", &self.on_connect)
            .finish_non_exhaustive()
    }
}
