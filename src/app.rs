//! The app: the only place where the rooms are wired together.

use std::fmt;
use std::sync::Arc;

use futures_util::stream::Stream;
use serde_json::Value;

use crate::Error;
use crate::broker::{Connection, Severity, apply, doctor};
#[cfg(feature = "postgres")]
use crate::database::Database;
#[cfg(feature = "postgres")]
use crate::dead::{Collector, DeadLetters, Triage};
use crate::observe::{Event, Observers};
use crate::publish::Publisher;
use crate::task::{Publish, PublishRequest, Publishing, Receipt, Task};
use crate::topology::Topology;
use crate::topology::plan::Plan;

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
#[derive(Debug, Clone)]
pub struct Tierline {
    publisher: Publisher,
    #[cfg(feature = "postgres")]
    log: Option<Log>,
}

/// What the log of dead letters needs.
#[cfg(feature = "postgres")]
#[derive(Debug, Clone)]
struct Log {
    letters: DeadLetters,
    urls: Arc<[String]>,
    name: String,
    observers: Observers,
}

/// What is done about the broker's queues and exchanges when the app connects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnConnect {
    /// Declares what is missing, and fails where something differs. The default.
    #[default]
    Apply,
    /// Declares nothing, and fails where something is missing.
    Verify,
    /// Takes it that somebody else has done it.
    Nothing,
}

/// Settings of an app that is about to connect; see [`Tierline::builder`].
#[derive(Clone)]
pub struct Builder {
    topology: Topology,
    urls: Vec<String>,
    #[cfg(feature = "postgres")]
    postgres: Option<String>,
    #[cfg(feature = "postgres")]
    triage: Triage,
    name: String,
    on_connect: OnConnect,
    observers: Observers,
}

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
            observers: Observers::default(),
        }
    }

    /// Publishes a task to the tier that the map gives it. Awaitable as it is, or with options.
    pub fn publish<T: Task>(&self, payload: T) -> Publishing {
        Publishing::new(Arc::new(self.publisher.clone()), &payload)
    }

    /// Publishes a task by its name, for callers that have no type: gateways, schedules.
    pub fn publish_named(&self, task: &str, payload: &Value) -> Publishing {
        let request = PublishRequest::named(task, payload.to_string().into_bytes());
        Publishing::of(Arc::new(self.publisher.clone()), request)
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

    /// The app's database.
    ///
    /// # Errors
    /// [`Error::NoDatabase`] where the builder was given none.
    #[cfg(feature = "postgres")]
    pub fn database(&self) -> Result<&Database, Error> {
        Ok(self.log("use the database")?.letters.database())
    }

    /// The log of dead letters: list, group, redrive, discard.
    ///
    /// # Errors
    /// [`Error::NoDatabase`] where the builder was given none.
    #[cfg(feature = "postgres")]
    pub fn dead_letters(&self) -> Result<DeadLetters, Error> {
        Ok(self.log("use the log of dead letters")?.letters.clone())
    }

    /// What takes dead letters from their queues into the log, on a connection of its own.
    ///
    /// # Errors
    /// [`Error::NoDatabase`] where the builder was given none.
    #[cfg(feature = "postgres")]
    pub fn collector(&self) -> Result<Collector, Error> {
        let log = self.log("collect dead letters")?;
        let (topology, database) = (log.letters.topology(), log.letters.database());
        Ok(Collector::new(
            topology.clone(),
            log.urls.to_vec(),
            &log.name,
            database.clone(),
            log.observers.clone(),
        ))
    }

    #[cfg(feature = "postgres")]
    fn log(&self, tried: &str) -> Result<&Log, Error> {
        self.log.as_ref().ok_or_else(|| Error::NoDatabase {
            tried: tried.into(),
        })
    }

    /// The publisher alone, for code that takes any [`Publish`].
    pub fn publisher(&self) -> Arc<dyn Publish> {
        Arc::new(self.publisher.clone())
    }
}

impl Builder {
    /// Adds the URL of a broker, or of one more node of its cluster; the first that answers is used.
    pub fn amqp(mut self, url: impl Into<String>) -> Self {
        self.urls.push(url.into());
        self
    }

    /// The URL of the database for dead letters; see [`Database::new`]. It need not be up when the
    /// app connects. Prepare it once with [`Database::migrate`] or `tierline migrate`.
    #[cfg(feature = "postgres")]
    pub fn postgres(mut self, url: impl Into<String>) -> Self {
        self.postgres = Some(url.into());
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

    /// Adds somebody who is told of everything that happens. Any number may be added. They must not
    /// block: they are called where it happens.
    pub fn observe(mut self, observer: impl Fn(&Event<'_>) + Send + Sync + 'static) -> Self {
        self.observers.add(observer);
        self
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
    /// As [`Connection::open`], [`apply`], [`doctor`] and [`Database::new`]; [`Error::NotVerified`] where something is
    /// missing and must not be declared.
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
            observers,
        } = self;
        #[cfg(feature = "postgres")]
        let database = postgres.as_deref().map(Database::new).transpose()?;
        let connection = open_any(&mut urls, &name).await?;
        match on_connect {
            OnConnect::Apply => {
                let plan = Plan::new(&topology, connection.capabilities())?;
                apply(&connection, &plan).await?;
            }
            OnConnect::Verify => {
                let mut report = doctor(&connection, &topology).await?;
                if !report.is_well() {
                    report
                        .findings
                        .retain(|finding| finding.severity > Severity::Note);
                    report.not_checked.clear();
                    return Err(Error::NotVerified(Box::new(report)));
                }
            }
            OnConnect::Nothing => {
                Plan::new(&topology, connection.capabilities())?;
            }
        }
        #[cfg(feature = "postgres")]
        let for_log = (
            topology.clone(),
            urls.clone(),
            name.clone(),
            observers.clone(),
        );
        let publisher = Publisher::new(topology, urls, name, connection, observers);
        #[cfg(feature = "postgres")]
        let log = database.map(|database| {
            let (topology, urls, name, observers) = for_log;
            Log {
                letters: DeadLetters::new(topology, database, publisher.clone(), triage),
                urls: urls.into(),
                name,
                observers,
            }
        });
        Ok(Tierline {
            publisher,
            #[cfg(feature = "postgres")]
            log,
        })
    }
}

/// Without the URLs: they may hold passwords.
impl fmt::Debug for Builder {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Builder")
            .field("app", &self.topology.app())
            .field("name", &self.name)
            .field("on_connect", &self.on_connect)
            .finish_non_exhaustive()
    }
}

/// Connects to the first of `urls` that answers, and puts it first: reconnecting begins with it.
async fn open_any(urls: &mut [String], name: &str) -> Result<Connection, Error> {
    let mut refused = Error::InvalidBrokerUrl {
        problem: "none was given: call .amqp(…) on the builder".into(),
    };
    for index in 0..urls.len() {
        match Connection::open(&urls[index], name).await {
            Ok(connection) => {
                urls.rotate_left(index);
                return Ok(connection);
            }
            Err(error) => refused = error,
        }
    }
    Err(refused)
}
