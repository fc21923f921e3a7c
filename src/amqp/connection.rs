//! One connection to the broker.

use std::fmt;
use std::io;
use std::ops::Deref;
use std::time::Duration;

use async_rs::util::RuntimeParts;
use async_rs::{Runtime, Tokio, TokioRuntime};
use futures_util::Stream;
use lapin::protocol::{AMQPErrorKind, AMQPHardError, AMQPSoftError};
use lapin::tcp::{AMQPUriTcpExt, OwnedTLSConfig};
use lapin::{AsyncTcpStream, Channel, ConnectionProperties, ErrorKind};
use tokio::time::{Instant, timeout, timeout_at};
use tokio_util::sync::CancellationToken;

use super::address::Address;
use super::stream::{Checked, CheckedReactor, ClosesGate, Opening, ReadBudget, ReadGate, Repairs};
use crate::Error;
use crate::error::{BrokerError, Cause};
use crate::secret::Secret;
use crate::topology::Version;

/// How long a connection may take to open, login included.
const OPEN_LIMIT: Duration = Duration::from_secs(10);
/// RabbitMQ's default `frame_max`. All headers of a message are in one frame, and tierline keeps the
/// headers that it adds within this limit.
const FRAME_MAX: u32 = 131_072;
/// How long a dropped connection may take to send its last frames and to close.
const END_AFTER_DROP: Duration = Duration::from_secs(2);
/// The shortest heartbeat, in seconds, of a connection with a read budget. It stops reading while its
/// budget is used up, and is lost after two heartbeats, so a database statement may take a minute.
const LIMITED_HEARTBEAT: u16 = 30;
/// How long the broker may take to close a connection.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);
/// How late the broker may answer a command that was given up. It was seen to take more than a minute.
const LATE_ANSWER: Duration = Duration::from_secs(300);

/// An open connection to a broker whose version is known. It closes when it is dropped.
///
/// ```no_run
/// # async fn example() -> Result<(), tierline::Error> {
/// use tierline::amqp::Connection;
///
/// let connection = Connection::open("amqp://localhost", "my service").await?;
/// println!("RabbitMQ {}", connection.version());
/// # Ok(()) }
/// ```
pub struct Connection {
    inner: Handle,
    address: Address,
    version: Version,
    repairs: Repairs,
    /// Ends the stream.
    abandoned: CancellationToken,
    /// Set if the connection reads only as far ahead of its consumers as its budget allows.
    gate: Option<ClosesGate>,
}

/// lapin's connection, and whose it is.
enum Handle {
    Own(lapin::Connection),
    /// It goes back to the app's pool when it is dropped.
    #[cfg(feature = "deadpool-lapin")]
    Pooled(deadpool_lapin::Object),
}

impl Deref for Handle {
    type Target = lapin::Connection;

    fn deref(&self) -> &lapin::Connection {
        match self {
            Self::Own(connection) => connection,
            #[cfg(feature = "deadpool-lapin")]
            Self::Pooled(object) => object,
        }
    }
}

impl Connection {
    /// Connects and logs in, within ten seconds. The broker's management shows the connection under
    /// `name`.
    ///
    /// # Errors
    /// [`BrokerError::InvalidUrl`]; [`BrokerError::Unreachable`], [`BrokerError::LoginRefused`] and
    /// [`BrokerError::VirtualHostRefused`]; [`BrokerError::UnknownVersion`] and
    /// [`BrokerError::UnsupportedVersion`].
    pub async fn open(url: &str, name: &str) -> Result<Self, Error> {
        Self::open_with(url, name, None).await
    }

    /// Opens a connection that reads ahead of its consumers by no more than `budget`.
    #[cfg(feature = "postgres")]
    pub(crate) async fn open_within(
        url: &str,
        name: &str,
        budget: &ReadBudget,
    ) -> Result<Self, Error> {
        Self::open_with(url, name, Some(budget.clone())).await
    }

    async fn open_with(url: &str, name: &str, budget: Option<ReadBudget>) -> Result<Self, Error> {
        let address: Address = url.parse()?;
        let gate = budget.map(ReadGate::new);
        let opening = Opening::behind(gate.clone());
        let unless_opened = opening.abandoned.clone().drop_guard();
        let connecting = connect(&address, name, &opening);
        let inner = match timeout(OPEN_LIMIT, connecting).await {
            Ok(Ok(inner)) => inner,
            Ok(Err(error)) => return Err(refused(&address, &error)),
            Err(_) => return Err(silent(&address)),
        };
        unless_opened.disarm();
        check_frame_max(&inner, &address);
        let reported = opening.version().unwrap_or_default();
        let version = reported.parse::<Version>()?.supported()?;
        Ok(Self {
            inner: Handle::Own(inner),
            address,
            version,
            repairs: opening.repairs,
            abandoned: opening.abandoned,
            gate: gate.map(ClosesGate),
        })
    }

    /// Connects to the first of `urls` that answers.
    pub(crate) async fn open_any(urls: &[Secret], name: &str) -> Result<Self, Error> {
        let mut refused = None;
        for url in urls {
            match Self::open(url.expose(), name).await {
                Ok(connection) => return Ok(connection),
                Err(error) => refused = Some(error),
            }
        }
        Err(refused.unwrap_or_else(|| {
            Error::Broker(BrokerError::InvalidUrl {
                problem: "there is none".into(),
            })
        }))
    }

    /// The next free connection of the app's pool, for publishing. What `known` tells of the broker holds for it
    /// too: lapin does not hand on what the broker says of itself.
    #[cfg(feature = "deadpool-lapin")]
    pub(crate) async fn from_pool(
        pool: &deadpool_lapin::Pool,
        known: &(Address, Version),
    ) -> Result<Self, Error> {
        let (address, version) = known.clone();
        let failed = |cause: String| {
            Error::Broker(BrokerError::Unreachable {
                address: format!("{address}, over the pool of AMQP connections").into(),
                cause: cause.into(),
                source: None,
            })
        };
        let inner = match timeout(OPEN_LIMIT, pool.get()).await {
            Ok(Ok(object)) => object,
            Ok(Err(error)) => return Err(failed(error.to_string())),
            Err(_) => {
                let limit = OPEN_LIMIT.as_secs();
                return Err(failed(format!("none was made or free within {limit} s")));
            }
        };
        let (found, wanted) = (inner.status().vhost(), address.virtual_host());
        if found.as_str() != wanted {
            return Err(Error::Broker(BrokerError::InvalidPool {
                problem: format!(
                    "it connects to the virtual host {found:?}, and .amqp(…) of the builder to {wanted:?}; give \
                     both the same"
                )
                .into(),
            }));
        }
        check_frame_max(&inner, &address);
        Ok(Self {
            inner: Handle::Pooled(inner),
            address,
            version,
            repairs: Repairs::default(),
            abandoned: CancellationToken::new(),
            gate: None,
        })
    }

    /// The version that the broker reported when the connection opened.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The address of the broker.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Closes the connection, so that the broker does not log it as lost.
    pub async fn close(self) {
        self.end().await;
    }

    /// The same where others still refer to it. Nothing can be done on it any more. One of the app's pool is
    /// replaced there.
    pub(crate) async fn end(&self) {
        if let Some(ClosesGate(gate)) = &self.gate {
            gate.close();
        }
        let closing = self.inner.close(200, "done".into());
        // Without a reply it is dropped, which closes it too.
        let _ = timeout(CLOSE_LIMIT, closing).await;
    }

    /// Whether it goes back to the app's pool when it is dropped.
    pub(crate) fn is_pooled(&self) -> bool {
        !matches!(self.inner, Handle::Own(_))
    }

    /// The malformed properties that were corrected in deliveries on this connection.
    pub(crate) fn repairs(&self) -> &Repairs {
        &self.repairs
    }

    /// Whether the connection is open.
    pub(crate) fn is_open(&self) -> bool {
        self.inner.status().connected()
    }

    /// Whether the broker has stopped reading from it, because of a memory or disk alarm.
    pub(crate) fn is_blocked(&self) -> bool {
        self.inner.status().blocked()
    }

    /// lapin's events: alarms, and the end of the connection. Only one listener at a time: two would each
    /// get a part of the events.
    pub(crate) fn events(&self) -> impl Stream<Item = lapin::Event> + Send + 'static {
        self.inner.events_listener()
    }

    pub(crate) async fn channel(&self, deadline: Instant) -> Result<Channel, Error> {
        match timeout_at(deadline, self.inner.create_channel()).await {
            Ok(Ok(channel)) => Ok(channel),
            Ok(Err(error)) => Err(self.failed("open a channel", &error)),
            Err(_) => Err(self.failed("open a channel", "the broker did not answer in time")),
        }
    }

    /// The error for something that was tried on this connection.
    pub(crate) fn failed(&self, tried: &str, cause: impl Into<Cause>) -> Error {
        let Cause { text, source } = cause.into();
        Error::Broker(BrokerError::Failed {
            tried: format!("{tried} on {}", self.address).into(),
            cause: text,
            source,
        })
    }
}

/// Without lapin's own `Debug`, which contains the user's name and may be long.
impl fmt::Debug for Connection {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Connection")
            .field("address", &self.address)
            .field("version", &self.version)
            .field("is_open", &self.is_open())
            .finish_non_exhaustive()
    }
}

impl Drop for Connection {
    /// lapin closes a connection when its last handle is dropped. A future that was dropped while it
    /// opened a channel leaks a handle, and the broker then keeps the messages of the consumers. So the
    /// stream is ended a little later, whatever lapin does.
    fn drop(&mut self) {
        let abandoned = self.abandoned.clone();
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn(async move {
                tokio::time::sleep(END_AFTER_DROP).await;
                abandoned.cancel();
            })),
            Err(_) => abandoned.cancel(),
        }
    }
}

/// Closes a channel whose last command got no answer. Otherwise the broker may carry the command out later: a consumer that
/// no code reads from would keep as many messages as its prefetch allows, for as long as its connection lives.
pub(crate) fn close_unanswered(channel: Channel) {
    tokio::spawn(async move {
        let closing = channel.close(200, "no answer".into());
        let _ = timeout(LATE_ANSWER, closing).await;
    });
}

fn check_frame_max(connection: &lapin::Connection, address: &Address) {
    let frame_max = connection.configuration().frame_max();
    if frame_max < FRAME_MAX {
        tracing::warn!(
            %address,
            frame_max,
            "the broker's frame_max is below {FRAME_MAX}: a retry or a dead letter with large headers may \
             not fit into a frame, and would cost the connection; raise it"
        );
    }
}

async fn connect(
    address: &Address,
    name: &str,
    opening: &Opening,
) -> lapin::Result<lapin::Connection> {
    let tokio = Tokio::current();
    let frame_max = address.uri().query.frame_max.unwrap_or_default();
    let reactor = CheckedReactor {
        tokio: tokio.clone(),
        frame_max,
        opening: opening.clone(),
    };
    let opening = opening.clone();
    let mut uri = address.uri().clone();
    if opening.is_limited() {
        // A connection that does not read does not see heartbeats either.
        let heartbeat = uri.query.heartbeat.unwrap_or_default();
        uri.query.heartbeat = Some(heartbeat.max(LIMITED_HEARTBEAT));
    }
    lapin::Connection::connector(
        uri,
        Runtime::new(RuntimeParts::new(tokio, reactor)),
        async move |uri, _| {
            let tls = OwnedTLSConfig::default();
            let tokio = TokioRuntime::tokio_current();
            let connecting = uri.connect_with_config_async(tls.as_ref(), &tokio);
            let stream = opening.abandoned.run_until_cancelled(connecting).await;
            let abandoned = || io::Error::from(io::ErrorKind::ConnectionAborted);
            let stream = stream.ok_or_else(abandoned)??;
            Ok(AsyncTcpStream::Plain(Checked::new(
                stream,
                frame_max,
                opening.clone(),
            )))
        },
        ConnectionProperties::default().with_connection_name(name.into()),
    )
    .await
}

fn silent(address: &Address) -> Error {
    let limit = OPEN_LIMIT.as_secs();
    unreachable(address, format!("no answer within {limit} s"))
}

fn unreachable(address: &Address, cause: impl Into<Cause>) -> Error {
    let Cause { text, source } = cause.into();
    Error::Broker(BrokerError::Unreachable {
        address: address.to_string().into(),
        cause: text,
        source,
    })
}

fn refused(address: &Address, error: &lapin::Error) -> Error {
    match error.kind() {
        ErrorKind::ProtocolError(said) => match said.kind() {
            AMQPErrorKind::Soft(AMQPSoftError::ACCESSREFUSED) => {
                Error::Broker(BrokerError::LoginRefused {
                    address: address.to_string().into(),
                    user: address.user().into(),
                })
            }
            AMQPErrorKind::Hard(AMQPHardError::NOTALLOWED) => {
                Error::Broker(BrokerError::VirtualHostRefused {
                    virtual_host: format!("{:?} of {address}", address.virtual_host()).into(),
                    cause: said.get_message().as_str().into(),
                })
            }
            _ => unreachable(address, said.to_string()),
        },
        _ => unreachable(address, error),
    }
}
