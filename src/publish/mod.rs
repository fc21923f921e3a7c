//! The way in: every publish is confirmed by the broker, or ends in a typed error in time.

mod lane;
mod link;
mod pool;
mod returns;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::stream::{Stream, StreamExt};
use tokio::time::{Instant, sleep, timeout_at};

use crate::broker::Connection;
use crate::message::Message;
use crate::observe::Observers;
use crate::task::{Publish, PublishFuture, PublishRequest, Receipt};
use crate::topology::{QueueType, Route, Tier, Topology, delay};
use crate::{Error, TaskId};
use lane::Answer;
pub(crate) use lane::Letter;
use link::Settings;
use pool::{NoLane, Pool};

/// How long a publish may take unless it says otherwise.
pub const DEFAULT_DEADLINE: Duration = Duration::from_secs(5);

const LONGEST_DEADLINE: Duration = Duration::from_secs(365 * 86_400);

/// How many messages of one `publish_many` are under way at once.
const MANY: usize = 1_000;
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
    pool: Pool,
}

impl Publisher {
    /// A publisher on `connections` connections that begins with one that is open, and reconnects to
    /// one of `urls` for ever.
    pub(crate) fn new(
        topology: Topology,
        urls: Vec<String>,
        name: String,
        first: Connection,
        connections: usize,
        observers: Observers,
    ) -> Self {
        let settings = Settings {
            urls,
            name,
            observers,
        };
        let pool = Pool::keep(settings, connections, first);
        Self {
            inner: Arc::new(Inner { topology, pool }),
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
        self.inner.deliver(letter, id, deadline, false).await
    }

    /// The priority that a message may have in a quorum queue, delay levels included.
    pub(crate) fn bearable_in_quorum(&self, priority: u8) -> u8 {
        self.inner.bearable_in_quorum(priority)
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
        let publisher = self.clone();
        requests
            .map(move |request| {
                let publisher = publisher.clone();
                async move { publisher.inner.publish(request).await }
            })
            .buffered(MANY)
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
        let limit = request.deadline.unwrap_or(DEFAULT_DEADLINE);
        // A limit that no clock can hold would overflow it.
        let deadline = Instant::now() + limit.min(LONGEST_DEADLINE);
        let is_once = request.once;
        let (letter, id, tier) = self.address(request)?;
        match self.deliver(letter, &id, deadline, is_once).await {
            Ok(()) => Ok(Receipt::new(id, tier, SystemTime::now())),
            Err(Error::Unroutable { id, .. }) => {
                let queue = self.queue_of(&tier);
                Err(Error::Unroutable { id, queue })
            }
            Err(error) => Err(error),
        }
    }

    /// Sends a letter until it is confirmed, at the latest until the deadline.
    async fn deliver(
        &self,
        letter: Letter,
        id: &TaskId,
        deadline: Instant,
        is_once: bool,
    ) -> Result<(), Error> {
        let letter = Arc::new(letter);
        let mut pause = FIRST_PAUSE;
        // Whatever follows: an attempt without an answer may have stored it.
        let mut lost = None;
        loop {
            let obstacle = match self.attempt(&letter, deadline).await {
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
            if Instant::now() + pause >= deadline || (is_once && is_lost) {
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
        match timeout_at(deadline, lane.send(Arc::clone(letter))).await {
            Ok(answer) => Ok(answer),
            Err(_) if live.is_blocked() => Err(Obstacle::Blocked),
            Err(_) => {
                lane.give_up_if_stuck();
                Err(Obstacle::Lost(
                    "the broker did not confirm it in time".to_owned(),
                ))
            }
        }
    }

    /// The queue that serves a tier today, for messages.
    fn queue_of(&self, tier: &str) -> Box<str> {
        let tier = self.topology.tier(tier);
        let queue = tier.map(|tier| self.topology.names().queue(tier));
        queue.unwrap_or_default().into()
    }

    /// Where a request goes, as the map says, and what is sent there.
    fn address(&self, request: PublishRequest) -> Result<(Letter, TaskId, String), Error> {
        let Some(route) = self.topology.route(&request.task) else {
            return Err(Error::UnmappedTask { task: request.task });
        };
        let app = self.topology.app();
        let limit = self.topology.broker().max_message_size;
        if request.payload.len() as u64 > limit {
            return Err(Error::TooLarge {
                task: request.task.into(),
                size: request.payload.len() as u64,
                limit,
            });
        }
        let (exchange, routing_key) =
            match delay::route(app, &route.tier, request.delay.unwrap_or_default())? {
                Some(delayed) => (delayed.exchange, delayed.routing_key),
                None => (self.topology.names().tasks_exchange(), route.tier.clone()),
            };
        let is_delayed = exchange != self.topology.names().tasks_exchange();
        let priority = self.priority(route, request.priority, is_delayed)?;
        let mut message = Message::first(request, &route.tier, priority, SystemTime::now());
        message.priority = priority;
        let properties = message.properties(app)?;
        let letter = Letter {
            exchange,
            routing_key,
            payload: message.payload.into(),
            properties,
        };
        Ok((letter, message.id, route.tier.clone()))
    }

    /// The priority on the wire: what was asked for or what the map says, and in a quorum queue,
    /// the delay levels included, no more than the broker's version bears.
    fn priority(&self, route: &Route, wanted: Option<u8>, is_delayed: bool) -> Result<u8, Error> {
        let tier = self.topology.tier(&route.tier);
        let highest = tier.and_then(|tier| tier.max_priority);
        let priority = match (wanted, highest) {
            (Some(wanted), Some(highest)) if wanted <= highest => wanted,
            (None, _) => route.priority,
            (Some(wanted), highest) => {
                return Err(Error::InvalidPriority {
                    task: route.task.as_str().into(),
                    priority: wanted,
                    highest,
                });
            }
        };
        let is_quorum =
            is_delayed || tier.is_some_and(|tier: &Tier| tier.queue == QueueType::Quorum);
        Ok(match is_quorum {
            true => self.bearable_in_quorum(priority),
            false => priority,
        })
    }

    fn bearable_in_quorum(&self, priority: u8) -> u8 {
        let bearable = self
            .pool
            .capabilities()
            .map_or(u8::MAX, |capabilities| capabilities.highest_quorum_priority);
        priority.min(bearable)
    }
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
