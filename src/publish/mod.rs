//! The way in: every publish is confirmed by the broker, or ends in a typed error in time.

mod lane;
mod link;
mod many;
mod pool;
mod returns;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::stream::Stream;
use tokio::time::{Instant, sleep, timeout_at};

use crate::amqp::Connection;
use crate::message::Message;
use crate::observe::Observers;
use crate::route::{self, Origin};
use crate::secret::Secret;
use crate::task::{Publish, PublishFuture, PublishRequest, Receipt};
use crate::topology::Topology;
use crate::topology::capabilities::Capabilities;
use crate::{Error, TaskId};
use lane::{Answer, Lane};
pub(crate) use lane::{Content, Letter};
use link::{Live, Settings};
use pool::{NoLane, Pool};

/// How long a publish may take unless it says otherwise.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(5);

const LONGEST_DEADLINE: Duration = Duration::from_secs(365 * 86_400);

/// The pause before a refused or lost message is sent again; it doubles up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// Publishes tasks to their tiers. Cheap to clone; all clones share the same few connections.
///
/// A publish that answers `Ok` is stored by the broker. Every other one ends in an error that says
/// why, at the latest at its deadline, whatever the broker does. Refused, lost and blocked messages
/// are sent again until then with the same id, so a duplicate can be recognised.
///
/// Dropping a publish that is under way is safe: the message may have been sent or not.
#[derive(Clone)]
pub struct Publisher {
    inner: Arc<Inner>,
}

struct Inner {
    topology: Topology,
    app: Arc<str>,
    pool: Pool,
    trace: TraceContext,
}

/// Asks the caller's tracing for the context of where it publishes.
#[derive(Clone, Default)]
pub(crate) struct TraceContext {
    current: Option<Arc<CurrentTrace>>,
}

type CurrentTrace = dyn Fn() -> Option<String> + Send + Sync;

impl TraceContext {
    pub(crate) fn new(current: impl Fn() -> Option<String> + Send + Sync + 'static) -> Self {
        Self {
            current: Some(Arc::new(current)),
        }
    }

    fn current(&self) -> Option<String> {
        self.current.as_ref().and_then(|current| current())
    }
}

impl fmt::Debug for TraceContext {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_set = self.current.is_some();
        out.debug_struct("TraceContext")
            .field("is_set", &is_set)
            .finish()
    }
}

impl Publisher {
    /// A publisher on `connections` connections that begins with one that is open, and reconnects to
    /// one of `urls` for ever.
    pub(crate) fn new(
        topology: Topology,
        urls: Vec<Secret>,
        name: String,
        first: Connection,
        connections: usize,
        observers: Observers,
        trace: TraceContext,
    ) -> Self {
        let settings = Settings {
            urls,
            name,
            observers,
        };
        let pool = Pool::keep(settings, connections, first);
        Self {
            inner: Arc::new(Inner {
                app: topology.app().into(),
                topology,
                pool,
                trace,
            }),
        }
    }

    /// Sends what has its address and its properties already (a retry, a dead letter, a redrive)
    /// until it is confirmed, at the latest until the deadline.
    pub(crate) async fn forward(
        &self,
        letter: Letter,
        id: &TaskId,
        deadline: Instant,
    ) -> Result<(), Error> {
        let parcel = Parcel {
            letter: Arc::new(letter),
            id: id.clone(),
            tier: String::new(),
            deadline,
            is_once: false,
        };
        self.inner.deliver(&parcel).await
    }

    /// The capabilities of the broker, as of the latest connection to it.
    pub(crate) fn capabilities(&self) -> Capabilities {
        self.inner.pool.capabilities()
    }

    /// Publishes many tasks, with a thousand of them under way at once, and gives each one's outcome
    /// in the order of the requests. Only what is under way is held in memory.
    pub fn publish_many<S>(
        &self,
        requests: S,
    ) -> impl Stream<Item = Result<Receipt, Error>> + use<S>
    where
        S: Stream<Item = PublishRequest>,
    {
        many::Many::new(self.inner.clone(), requests)
    }
}

impl Publish for Publisher {
    fn publish(&self, request: PublishRequest) -> PublishFuture<'_> {
        Box::pin(self.inner.publish(request))
    }
}

impl fmt::Debug for Publisher {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Publisher")
            .field("app", &self.inner.topology.app())
            .finish_non_exhaustive()
    }
}

/// A letter, and what its publisher wants of it.
struct Parcel {
    letter: Arc<Letter>,
    id: TaskId,
    /// The tier that the map gives its task; empty where it has its address already.
    tier: String,
    deadline: Instant,
    is_once: bool,
}

/// What an attempt met, for the error at the deadline.
enum Obstacle {
    Refused,
    /// It may be stored or not.
    Lost(String),
    Blocked,
    Down(String),
}

impl Inner {
    async fn publish(&self, request: PublishRequest) -> Result<Receipt, Error> {
        let parcel = self.parcel(request)?;
        let delivered = self.deliver(&parcel).await;
        self.receipt(parcel, delivered)
    }

    /// What a request comes to on the wire.
    fn parcel(&self, mut request: PublishRequest) -> Result<Parcel, Error> {
        if request.traceparent.is_none() {
            request.traceparent = self.trace.current();
        }
        let limit = request.deadline.unwrap_or(DEFAULT_DEADLINE);
        // A limit that no clock can hold would overflow it.
        let deadline = Instant::now() + limit.min(LONGEST_DEADLINE);
        let is_once = request.once;
        let (letter, id, tier) = self.address(request)?;
        Ok(Parcel {
            letter: Arc::new(letter),
            id,
            tier,
            deadline,
            is_once,
        })
    }

    /// What the publisher is told in the end.
    fn receipt(&self, parcel: Parcel, delivered: Result<(), Error>) -> Result<Receipt, Error> {
        match delivered {
            Ok(()) => Ok(Receipt::new(parcel.id, parcel.tier, SystemTime::now())),
            Err(Error::Unroutable { id, .. }) => {
                let queue = self.queue_of(&parcel.tier);
                Err(Error::Unroutable { id, queue })
            }
            Err(error) => Err(error),
        }
    }

    /// Sends a letter until it is confirmed, at the latest until the deadline.
    async fn deliver(&self, parcel: &Parcel) -> Result<(), Error> {
        let mut attempted = None;
        // Nearly all go this way, so it is kept short: a thousand of its futures are alive at once.
        if let Some((live, lane)) = self.pool.lane_now() {
            match send(&live, &lane, &parcel.letter, parcel.deadline).await {
                Ok(Answer::Confirmed) => return Ok(()),
                met => attempted = Some(met),
            }
        }
        Box::pin(self.persist(parcel, attempted)).await
    }

    /// Goes on after a first attempt, if there was one.
    async fn persist(
        &self,
        parcel: &Parcel,
        mut attempted: Option<Result<Answer, Obstacle>>,
    ) -> Result<(), Error> {
        let Parcel {
            letter,
            id,
            deadline,
            is_once,
            ..
        } = parcel;
        let mut pause = FIRST_PAUSE;
        // Whatever follows: an attempt without an answer may have stored it.
        let mut lost = None;
        loop {
            let met = match attempted.take() {
                Some(met) => met,
                None => self.attempt(letter, *deadline).await,
            };
            let obstacle = match met {
                Ok(Answer::Confirmed) => return Ok(()),
                Ok(Answer::Unroutable) => {
                    return Err(Error::Unroutable {
                        id: id.clone(),
                        queue: letter.exchange.as_str().into(),
                    });
                }
                Ok(Answer::Refused) => Obstacle::Refused,
                Ok(Answer::Lost(cause)) => Obstacle::Lost(cause),
                Ok(Answer::NotSent) => Obstacle::Down("the channel was closed".to_owned()),
                Err(obstacle) => obstacle,
            };
            let is_lost = matches!(obstacle, Obstacle::Lost(_));
            if Instant::now() + pause >= *deadline || (*is_once && is_lost) {
                return Err(lost.unwrap_or(obstacle).into_error(id.clone()));
            }
            if is_lost {
                lost = Some(obstacle);
            }
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    async fn attempt(&self, letter: &Arc<Letter>, deadline: Instant) -> Result<Answer, Obstacle> {
        let (live, lane) = self.pool.lane(deadline).await.map_err(|why| match why {
            NoLane::Blocked => Obstacle::Blocked,
            NoLane::Down(why) => Obstacle::Down(why),
        })?;
        send(&live, &lane, letter, deadline).await
    }

    /// The queue that serves a tier today, for messages.
    fn queue_of(&self, tier: &str) -> Box<str> {
        let tier = self.topology.tier(tier);
        let queue = tier.map(|tier| self.topology.names().queue(tier));
        queue.unwrap_or_default().into()
    }

    /// The message that a request becomes, with its destination.
    fn address(&self, request: PublishRequest) -> Result<(Letter, TaskId, String), Error> {
        route::check_size(&self.topology, &request.task, &request.payload)?;
        let origin = Origin::Publish {
            priority: request.priority,
        };
        let delay = request.delay.unwrap_or_default();
        let capabilities = self.pool.capabilities();
        let route =
            route::destination(&self.topology, &capabilities, &request.task, origin, delay)?;
        let mut message = Message::first(request, &route.tier, route.priority, SystemTime::now());
        message.priority = route.priority;
        message.check()?;
        let id = message.id.clone();
        let app = Arc::clone(&self.app);
        let letter = Letter {
            exchange: route.exchange,
            routing_key: route.routing_key,
            content: Content::New { message, app },
        };
        Ok((letter, id, route.tier))
    }
}

/// One attempt on one lane.
async fn send(
    live: &Live,
    lane: &Lane,
    letter: &Arc<Letter>,
    deadline: Instant,
) -> Result<Answer, Obstacle> {
    match timeout_at(deadline, lane.send(Arc::clone(letter))).await {
        Ok(answer) => Ok(answer),
        Err(_) => Err(overdue(live, lane)),
    }
}

/// No answer has come by the deadline.
fn overdue(live: &Live, lane: &Lane) -> Obstacle {
    if live.is_blocked() {
        return Obstacle::Blocked;
    }
    lane.give_up_if_stuck();
    Obstacle::Lost("the broker did not confirm it in time".to_owned())
}

impl Obstacle {
    fn into_error(self, id: TaskId) -> Error {
        match self {
            Obstacle::Refused => Error::Refused { id },
            Obstacle::Blocked => Error::Blocked { id },
            Obstacle::Down(cause) => Error::NotConnected {
                id,
                cause: cause.into(),
            },
            Obstacle::Lost(cause) => Error::Unconfirmed {
                id,
                cause: cause.into(),
            },
        }
    }
}
