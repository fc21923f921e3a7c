//! What a request becomes: a message with its destination and its deadline, and in the end a receipt.

use std::time::SystemTime;

use tokio::time::Instant;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::attempt::{Patience, PublishAttempt, SendFailure};
use super::outgoing::{Content, Outgoing};
use super::pools::Broker;
use super::{ASSUMED_VERSION, DEFAULT_DEADLINE, Inner, LONGEST_DEADLINE};
use crate::error::PublishError;
use crate::message::Message;
use crate::route::{self, Address, Destination, RouteRequest, Servers};
use crate::task::{PublishRequest, Receipt};
use crate::topology::Version;
use crate::{Error, TaskId};

impl Inner {
    /// What is known of the broker, if the overrides in force are known too.
    pub(super) fn broker_if_overrides_are_known(&self, request: &PublishRequest) -> Broker {
        match self.controls.must_wait_for_overrides() {
            true => {
                Broker::NotReady("the database has not said which overrides are in force".into())
            }
            false => self.broker_for(request),
        }
    }

    /// What is known of the broker. A task that becomes a row needs none.
    fn broker_for(&self, request: &PublishRequest) -> Broker {
        match self.pools.broker() {
            Broker::NotReady(cause) => match self.route(request, ASSUMED_VERSION) {
                Ok(route) if matches!(route.address, Address::Row { .. }) => {
                    Broker::Ready(ASSUMED_VERSION)
                }
                _ => Broker::NotReady(cause),
            },
            ready => ready,
        }
    }

    pub(super) fn has_database(&self) -> bool {
        #[cfg(feature = "postgres")]
        return self.rows.is_some();
        #[cfg(not(feature = "postgres"))]
        false
    }

    pub(super) fn servers(&self, broker: Version) -> Servers {
        Servers {
            broker,
            has_database: self.has_database(),
        }
    }

    /// Turns a request into a message with its destination and deadline, once the overrides in force, and the broker's
    /// version if it goes there, are known. A request that cannot be published on any broker fails at once.
    pub(super) async fn prepare_when_ready(
        &self,
        request: PublishRequest,
    ) -> Result<PublishAttempt, Error> {
        let begin = Instant::now();
        let deadline = deadline(&request, begin);
        let version = self.refused(
            self.announce(&request, begin),
            self.version_when_ready(&request, deadline).await,
        )?;
        let attempt = self.prepare(request, version)?;
        Ok(PublishAttempt {
            call: attempt.call.since(begin),
            deadline,
            ..attempt
        })
    }

    async fn version_when_ready(
        &self,
        request: &PublishRequest,
        deadline: Instant,
    ) -> Result<Version, Error> {
        let _under_way = self.begin(|| format!("publish task `{}`", request.task))?;
        self.route(request, ASSUMED_VERSION)?;
        self.controls.wait_until_known(deadline).await;
        match self.broker_for(request) {
            Broker::Ready(version) => Ok(version),
            Broker::NotReady(_) => {
                let id = request.id.clone().unwrap_or_else(TaskId::random);
                self.until_ready(&id, deadline).await
            }
        }
    }

    /// Waits until the app's queues are there, and gives the broker's version.
    pub(super) async fn until_ready(
        &self,
        id: &TaskId,
        deadline: Instant,
    ) -> Result<Version, Error> {
        let ready = self.pools.until_ready(deadline).await;
        ready.map_err(|cause| SendFailure::Down(cause.to_string()).into_error(id.clone()))
    }

    /// Turns a request into a message with its destination and deadline.
    pub(super) fn prepare(
        &self,
        request: PublishRequest,
        broker: Version,
    ) -> Result<PublishAttempt, Error> {
        let begin = Instant::now();
        let announced = self.announce(&request, begin);
        self.refused(announced, self.attempt(request, broker, begin))
    }

    fn attempt(
        &self,
        mut request: PublishRequest,
        broker: Version,
        begin: Instant,
    ) -> Result<PublishAttempt, Error> {
        let under_way = self.begin(|| format!("publish task `{}`", request.task))?;
        let deadline = deadline(&request, begin);
        let call = self.call(&mut request, begin);
        let patience = match request.once {
            true => Patience::UnlessLost,
            false => Patience::Full,
        };
        let (outgoing, id) = self.address(request, broker)?;
        Ok(PublishAttempt {
            outgoing,
            id,
            call,
            deadline,
            patience,
            _under_way: under_way,
        })
    }

    /// Counts something as under way, unless the app was closed.
    pub(super) fn begin(&self, tried: impl FnOnce() -> String) -> Result<TaskTrackerToken, Error> {
        // Counted first: what `close` does not wait for sees that it is closed.
        let token = self.under_way.token();
        match self.under_way.is_closed() {
            true => Err(Error::Closed {
                tried: tried().into(),
            }),
            false => Ok(token),
        }
    }

    /// The destination of a request, whose size is checked too.
    pub(super) fn route(
        &self,
        request: &PublishRequest,
        broker: Version,
    ) -> Result<Destination, Error> {
        let route_request = RouteRequest::Publish {
            priority: request.priority,
            is_row: request.has_key() || self.is_limited_per_key(&request.task),
        };
        self.destination(request, route_request, broker)
    }

    /// Whether a task has a limit per key, which only rows can heed. Without a database the task goes to the broker, and its
    /// worker makes it a row.
    fn is_limited_per_key(&self, task: &str) -> bool {
        let limit = self
            .topology
            .task(task)
            .and_then(|task| task.limit.as_ref());
        self.has_database() && limit.is_some_and(|limit| limit.per.is_some())
    }

    pub(super) fn destination(
        &self,
        request: &PublishRequest,
        route_request: RouteRequest<'_>,
        broker: Version,
    ) -> Result<Destination, Error> {
        let (topology, task) = (&self.topology, &request.task);
        let delay = request.delay.unwrap_or_default();
        let servers = self.servers(broker);
        let overridden = self.controls.override_of(task);
        let overridden = overridden.as_deref();
        let route = route::destination(topology, overridden, servers, task, route_request, delay)?;
        route::check_size(topology, task, &request.payload)?;
        Ok(route)
    }

    /// The message that a request becomes, with its destination.
    pub(super) fn address(
        &self,
        request: PublishRequest,
        broker: Version,
    ) -> Result<(Outgoing, TaskId), Error> {
        let route = self.route(&request, broker)?;
        let claim = request.key_claim()?;
        if claim.is_some() && !self.has_database() {
            return Err(Error::Publish(PublishError::KeyWithoutDatabase {
                task: request.task.into(),
            }));
        }
        let is_id_drawn = request.id.is_none();
        let mut message = Message::first(request, &route.tier, route.priority, SystemTime::now());
        message.priority = route.priority;
        message.check()?;
        let id = message.id.clone();
        let content = Content::New {
            message,
            is_id_drawn,
            claim,
        };
        Ok((Outgoing::new(route, &id, content)?, id))
    }
}

/// What was confirmed or committed.
pub(super) enum Confirmed {
    /// The message is stored.
    Stored,
    /// It is stored in the place of this task.
    #[cfg(feature = "postgres")]
    Replaced(TaskId),
    /// Nothing was stored: this task has its key.
    #[cfg(feature = "postgres")]
    Duplicate { first: TaskId, tier: String },
}

impl Confirmed {
    /// The receipt, where `new` is that of the message if it was stored.
    pub(super) fn receipt(self, new: Receipt) -> Receipt {
        match self {
            Self::Stored => new,
            #[cfg(feature = "postgres")]
            Self::Replaced(other) => Receipt {
                replaced: Some(other),
                ..new
            },
            #[cfg(feature = "postgres")]
            Self::Duplicate { first, tier } => Receipt {
                is_duplicate: true,
                ..Receipt::new(first, tier, new.confirmed_at)
            },
        }
    }
}

/// When a publish that was called at `begin` has to be confirmed.
pub(super) fn deadline(request: &PublishRequest, begin: Instant) -> Instant {
    let limit = request.deadline.unwrap_or(DEFAULT_DEADLINE);
    // A limit that no clock can hold would overflow it.
    begin + limit.min(LONGEST_DEADLINE)
}
