//! The settings of an app, and how it connects.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::Tierline;
use super::check::check_homes;
#[cfg(feature = "deadpool-lapin")]
use super::check::check_size;
#[cfg(feature = "deadpool-lapin")]
use super::connect::AppPool;
use super::connect::Connecting;
#[cfg(feature = "postgres")]
use super::database::DatabaseSettings;
use crate::Error;
#[cfg(all(feature = "management", feature = "postgres"))]
use crate::amqp::{Address, Management};
#[cfg(feature = "postgres")]
use crate::backlog::RowWriters;
use crate::control::{KnownControls, Limits};
#[cfg(feature = "postgres")]
use crate::dead::{DeadLetters, Outcomes, Triage};
#[cfg(feature = "prometheus")]
use crate::metrics::EventCounter;
use crate::observe::{Event, Observers};
use crate::publish::{Connections, Publisher, TraceContext};
#[cfg(feature = "postgres")]
use crate::rollup::Recorder;
use crate::secret::Secret;
#[cfg(feature = "otel")]
use crate::spans::Spans;
use crate::task::{AddedMiddleware, Data, Middleware, Registry};
use crate::topology::Topology;
use crate::topology::duration::{IntoDuration, Unreadable};
use crate::worker::WorkerParts;

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
    #[cfg(feature = "deadpool-lapin")]
    amqp_pool: Option<deadpool_lapin::Pool>,
    #[cfg(feature = "postgres")]
    pub(super) postgres: DatabaseSettings,
    #[cfg(feature = "postgres")]
    triage: Triage,
    name: String,
    on_connect: OnConnect,
    publish_connections: usize,
    observers: Observers,
    #[cfg(feature = "prometheus")]
    metrics: Option<EventCounter>,
    registry: Option<Registry>,
    middleware: AddedMiddleware,
    data: Data,
    version: String,
    trace: TraceContext,
    #[cfg(feature = "otel")]
    has_spans: bool,
    abort_when_hung: bool,
    connect_timeout: Duration,
    #[cfg(all(feature = "management", feature = "postgres"))]
    management: Option<Secret>,
    pub(super) unreadable: Unreadable,
}

/// Two: while one is made again, the other goes on.
const PUBLISH_CONNECTIONS: usize = 2;
/// Long enough for a broker that is started at the same time as the app.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

impl Builder {
    pub(super) fn new(topology: Topology) -> Self {
        Self {
            name: format!("tierline {}", topology.app()),
            topology,
            urls: Vec::new(),
            #[cfg(feature = "deadpool-lapin")]
            amqp_pool: None,
            #[cfg(feature = "postgres")]
            postgres: DatabaseSettings::default(),
            #[cfg(feature = "postgres")]
            triage: Triage::default(),
            on_connect: OnConnect::default(),
            publish_connections: PUBLISH_CONNECTIONS,
            observers: Observers::default(),
            #[cfg(feature = "prometheus")]
            metrics: None,
            registry: None,
            middleware: AddedMiddleware::default(),
            data: Data::new(),
            version: String::new(),
            trace: TraceContext::default(),
            #[cfg(feature = "otel")]
            has_spans: false,
            abort_when_hung: false,
            connect_timeout: CONNECT_TIMEOUT,
            #[cfg(all(feature = "management", feature = "postgres"))]
            management: None,
            unreadable: Unreadable::NONE,
        }
    }

    /// Adds the URL of a broker, or of one more node of its cluster. A map whose tiers are all in Postgres needs none.
    /// Queues that are missing are declared through all of
    /// them in turn, so that each node leads some, and each tier's connections begin at its node: name the nodes in the
    /// same order in all processes.
    ///
    /// `amqps://` trusts what the system trusts, or the certificates in the file that the environment
    /// variable `SSL_CERT_FILE` names.
    pub fn amqp(mut self, url: impl Into<String>) -> Self {
        self.urls.push(Secret::new(url));
        self
    }

    /// The broker's management API at `http://user:password@host:15672`, or `https://`, for [statistics](Tierline::stats):
    /// it knows how many messages are delayed, and how many are not acknowledged. The user needs the tag `monitoring` and
    /// permissions on the virtual host. Nothing else uses it.
    #[cfg(all(feature = "management", feature = "postgres"))]
    pub fn management(mut self, url: impl Into<String>) -> Self {
        self.management = Some(Secret::new(url));
        self
    }

    /// Publishes over connections of a pool that the app has already. Publishing takes
    /// [`publish_connections`](Self::publish_connections) of them for each worker group of the map and keeps them, so
    /// the pool must have at least so many, and as many more as the app itself takes at a time. A connection that is lost is
    /// given back, and the next one taken.
    ///
    /// [`amqp`](Self::amqp) is needed beside it, for the same virtual host. tierline asks that broker for its version
    /// and declares queues there when it connects. Workers and the collector always have connections of their own:
    /// those filter what lapin cannot parse before it reaches lapin, and must not
    /// stand still when the broker blocks connections that publish.
    ///
    /// ```no_run
    /// # async fn example(topology: tierline::Topology) -> Result<(), Box<dyn std::error::Error>> {
    /// # use tierline::Tierline;
    /// use deadpool_lapin::{Config, Runtime};
    /// use lapin::ConnectionProperties;
    ///
    /// let url = "amqp://localhost";
    /// let config = Config { url: Some(url.to_owned()), ..Config::default() };
    /// let pool = config.create_pool(ConnectionProperties::default, Runtime::Tokio1)?;
    /// let app = Tierline::builder(topology).amqp(url).amqp_pool(pool.clone()).connect().await?;
    /// # Ok(()) }
    /// ```
    #[cfg(feature = "deadpool-lapin")]
    pub fn amqp_pool(mut self, pool: deadpool_lapin::Pool) -> Self {
        self.amqp_pool = Some(pool);
        self
    }

    /// Whether a worker may abort the process when handlers that never yield hold every thread of the runtime and
    /// one of them is past its timeout. Default: no.
    ///
    /// A handler that computes or blocks without an `await` cannot be stopped. As long as the runtime has other
    /// threads, its task becomes a dead letter (`hung`) at its timeout, and one thread is lost. When all threads are
    /// lost, nothing of tierline runs any more, nor anything else on that runtime: no task, no heartbeat, no signal
    /// handler. The broker closes the connections after missing two heartbeats, and gives the messages to other
    /// workers. On a current-thread runtime a single such handler is enough.
    ///
    /// The watchdog is a thread of the operating system and notices this either way: it logs an error and emits
    /// [`Event::RuntimeHung`]. With `true` it then calls [`std::process::abort`], so that an orchestrator starts the
    /// process again and the task is counted as one that crashed its worker. Without it, the worker stays as it is:
    /// let a liveness probe end the process, such as an HTTP endpoint on the same runtime. Code that blocks belongs
    /// into [`blocking`](crate::task::blocking).
    pub fn abort_when_hung(self, abort_when_hung: bool) -> Self {
        Self {
            abort_when_hung,
            ..self
        }
    }

    /// How dead letters are assessed. Default: by the rules that come with tierline.
    #[cfg(feature = "postgres")]
    pub fn triage(self, triage: Triage) -> Self {
        Self { triage, ..self }
    }

    /// What to do about the broker's queues and exchanges, and the tables of tiers in Postgres. Default: [`OnConnect::Apply`].
    pub fn on_connect(self, on_connect: OnConnect) -> Self {
        Self { on_connect, ..self }
    }

    /// How long [`connect`](Self::connect) tries to reach a broker that does not answer, such as `"1m"`. Zero: once
    /// through all addresses. Default: 30 s.
    pub fn connect_timeout(mut self, limit: impl IntoDuration) -> Self {
        self.unreadable
            .set("connect_timeout", limit, &mut self.connect_timeout);
        self
    }

    /// How many connections publishing has for the tiers of each worker group, apart from those that consume. They
    /// are made by the first publish to a tier of the group. No two groups share one, so that a flood into the tiers
    /// of one group does not hold up publishes to another. At least 1. Default: 2.
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

    /// Counts what happens, for [`Tierline::metrics`] and `/metrics` of the admin API. Default: nothing is counted.
    #[cfg(feature = "prometheus")]
    pub fn metrics(self) -> Self {
        Self {
            metrics: Some(EventCounter::default()),
            ..self
        }
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

    /// Makes spans of OpenTelemetry, through the tracer provider that is the global one when the app connects: for each
    /// publish, each run of a handler, what follows on it (`ack`, `retry`, `snooze`, `dead_letter`), and each redrive. Default: none.
    ///
    /// A message carries the context of the span that published it as W3C `traceparent`. The span of its handler is a
    /// child of that one, also in later attempts, and is the current one in the handler: what that publishes, and what
    /// else it calls, belongs to the same trace without a line of code. Whether a trace is sampled is decided where it begins.
    ///
    /// The library uses the API of OpenTelemetry alone. The example `traces` sends spans to a collector.
    #[cfg(feature = "otel")]
    pub fn open_telemetry(self) -> Self {
        Self {
            has_spans: true,
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

    /// Reaches the servers that the map needs: connects to the first broker that answers, and brings its queues and exchanges into the state of the map, as
    /// [`on_connect`](Self::on_connect) says. Tries all addresses in turn, ten seconds each at most, until the
    /// [`connect_timeout`](Self::connect_timeout) is over; a failure that does not pass by itself, such as a refused
    /// login, ends it at once.
    ///
    /// # Errors
    /// [`TopologyError::NoBroker`](crate::error::TopologyError::NoBroker) and [`TopologyError::NoDatabase`](crate::error::TopologyError::NoDatabase) where the map has tiers on a server that has no address;
    /// as [`Connection::open`](crate::amqp::Connection::open), [`apply`](crate::amqp::apply), [`doctor`](crate::amqp::doctor) and [`Database::new`](crate::Database::new); [`BrokerError::NotVerified`](crate::error::BrokerError::NotVerified) where something is
    /// missing and must not be declared; [`WorkerError::MiddlewareWithoutTarget`](crate::error::WorkerError::MiddlewareWithoutTarget) where the map does not have the group or
    /// the task of a middleware; [`BrokerError::InvalidPool`](crate::error::BrokerError::InvalidPool) where the pool of AMQP connections is too
    /// small, or leads to another virtual host; [`Error::InvalidDuration`].
    pub async fn connect(self) -> Result<Tierline, Error> {
        let limit = self.connect_timeout;
        let (app, connecting) = self.build()?;
        if let Some(connection) = connecting.within(limit).await? {
            app.publisher.ready(connection);
        }
        app.work.controls.loaded().await;
        Ok(app)
    }

    /// An app that returns at once and connects while it runs, for programs that must start whether the broker is
    /// there or not. Publishes wait for the broker until their own deadline, and workers until it is there. The app
    /// tries for ever, also where the broker refuses the login or a queue differs from the map: look at
    /// [`Tierline::health`] and the log.
    ///
    /// ```no_run
    /// # async fn example(topology: tierline::Topology) -> Result<(), tierline::Error> {
    /// # use tierline::Tierline;
    /// let app = Tierline::builder(topology).amqp("amqp://localhost").connect_lazy()?;
    /// println!("{}", app.health().await);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Mistakes that need no broker to be found: no address or one that cannot be read, and as
    /// [`connect`](Self::connect) for the database, the middleware, the size of a pool, and durations.
    ///
    /// # Panics
    /// Outside of a Tokio runtime.
    pub fn connect_lazy(self) -> Result<Tierline, Error> {
        let (app, connecting) = self.build()?;
        connecting.check()?;
        tokio::spawn(connecting.until_ready(app.publisher.downgrade()));
        Ok(app)
    }

    /// The app, which is not connected yet, and what connects it.
    fn build(self) -> Result<(Tierline, Connecting), Error> {
        let Self {
            topology,
            urls,
            #[cfg(feature = "deadpool-lapin")]
            amqp_pool,
            #[cfg(feature = "postgres")]
            postgres,
            #[cfg(feature = "postgres")]
            triage,
            name,
            on_connect,
            publish_connections,
            #[cfg_attr(
                not(any(feature = "postgres", feature = "prometheus")),
                expect(unused_mut)
            )]
            mut observers,
            #[cfg(feature = "prometheus")]
            metrics,
            registry,
            middleware,
            data,
            version,
            trace,
            #[cfg(feature = "otel")]
            has_spans,
            abort_when_hung,
            connect_timeout: _,
            #[cfg(all(feature = "management", feature = "postgres"))]
            management,
            unreadable,
        } = self;
        unreadable.check()?;
        #[cfg(feature = "otel")]
        let trace = match has_spans {
            true => trace.with_spans(Spans::new(&topology)),
            false => trace,
        };
        let tasks = topology.tasks().iter().map(|task| task.name.as_str());
        let middleware = middleware.resolve(Some(&topology), &tasks.collect::<Vec<_>>())?;
        #[cfg(feature = "deadpool-lapin")]
        if let Some(pool) = &amqp_pool {
            check_size(pool, publish_connections, topology.groups().len())?;
        }
        #[cfg(feature = "postgres")]
        let (keep_marks, keep_rollups) = (postgres.keep_marks, postgres.keep_rollups);
        #[cfg(feature = "postgres")]
        let database = postgres.database()?;
        #[cfg(feature = "postgres")]
        let outcomes = database.as_ref().map(|database| {
            let outcomes = Outcomes::start(database.clone(), topology.app());
            let recorder = outcomes.clone();
            observers.add(move |event| recorder.handle(event));
            outcomes
        });
        #[cfg(feature = "postgres")]
        let has_database = database.is_some();
        #[cfg(not(feature = "postgres"))]
        let has_database = false;
        check_homes(&topology, !urls.is_empty(), has_database)?;
        #[cfg(feature = "postgres")]
        let rows = database
            .clone()
            .map(|it| RowWriters::new(it, &topology, on_connect == OnConnect::Apply));
        let from = Connections::Own {
            urls: urls.clone(),
            name: name.clone(),
        };
        #[cfg(feature = "deadpool-lapin")]
        let (from, pool) = match amqp_pool {
            Some(pool) => {
                let known = Arc::default();
                let (pool_too, known_too) = (pool.clone(), Arc::clone(&known));
                let from = Connections::Pooled {
                    pool: pool_too,
                    known: known_too,
                };
                (from, Some(AppPool { pool, known }))
            }
            None => (from, None),
        };
        // What runs for the controls is observed without what knows the controls: that would keep them alive for ever.
        #[cfg(feature = "postgres")]
        #[cfg_attr(not(feature = "prometheus"), expect(unused_mut))]
        let mut early_observers = observers.clone();
        #[cfg(all(feature = "postgres", feature = "prometheus"))]
        if let Some(metrics) = &metrics {
            early_observers.add(metrics.early());
        }
        let limits = Limits::new(
            &topology,
            #[cfg(feature = "postgres")]
            database.as_ref(),
            #[cfg(feature = "postgres")]
            &early_observers,
        );
        #[cfg(feature = "postgres")]
        let controls = match &database {
            Some(database) => KnownControls::watch(database, &topology, &limits, &early_observers),
            None => KnownControls::none(&topology),
        };
        #[cfg(not(feature = "postgres"))]
        let controls = KnownControls::none(&topology);
        #[cfg(feature = "postgres")]
        let recorder = database.as_ref().map(|database| {
            let (known, keep) = (controls.clone(), keep_rollups);
            let recorder = Recorder::start(database, &topology, keep, &early_observers, known);
            let counting = recorder.clone();
            observers.add(move |event| counting.handle(event));
            recorder
        });
        #[cfg(feature = "prometheus")]
        let metrics = metrics.map(|counter| {
            let (metrics, observer) = counter.start(&topology, controls.clone());
            observers.add_first(observer);
            metrics
        });
        let publisher = Publisher::new(
            topology.clone(),
            from,
            publish_connections,
            #[cfg(feature = "postgres")]
            rows,
            controls.clone(),
            observers.clone(),
            trace,
        );
        #[cfg(feature = "postgres")]
        let letters = database.clone().map(|database| {
            DeadLetters::new(topology.clone(), database, publisher.clone(), triage)
        });
        let registry = registry.map_or_else(Registry::collected, Ok);
        let connecting = Connecting {
            topology: topology.clone(),
            urls: urls.clone(),
            name: name.clone(),
            on_connect,
            observers: observers.clone(),
            #[cfg(feature = "postgres")]
            database: database.clone().filter(|_| topology.needs_tables()),
            has_database,
            #[cfg(feature = "deadpool-lapin")]
            pool,
        };
        #[cfg(all(feature = "management", feature = "postgres"))]
        let management = match (management, urls.first()) {
            (Some(url), Some(broker)) => {
                let broker: Address = broker.expose().parse()?;
                let management = Management::new(url.expose())?;
                Some((management, broker.virtual_host().to_owned()))
            }
            _ => None,
        };
        let app = Tierline {
            #[cfg(all(feature = "management", feature = "postgres"))]
            management,
            publisher: publisher.clone(),
            #[cfg(feature = "postgres")]
            letters,
            #[cfg(feature = "postgres")]
            outcomes,
            #[cfg(feature = "prometheus")]
            metrics,
            work: WorkerParts {
                topology,
                urls,
                connection_name: name,
                publisher,
                #[cfg(feature = "postgres")]
                database,
                #[cfg(feature = "postgres")]
                keep_marks,
                #[cfg(feature = "postgres")]
                recorder,
                registry: registry.map(Arc::new).map_err(Arc::new),
                middleware: Arc::new(middleware),
                data: Arc::new(data),
                observers,
                version,
                may_declare: on_connect == OnConnect::Apply,
                abort_when_hung,
                suspects: Arc::default(),
                controls,
                limits,
                collector: None,
            },
        };
        Ok((app, connecting))
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
