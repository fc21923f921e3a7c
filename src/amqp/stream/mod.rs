//! The stream under lapin, which checks the broker's frames before lapin reads them.
//!
//! lapin does not expose the server properties with the broker's version. It closes the connection, or
//! overflows its stack, when it parses some properties that RabbitMQ accepts from any producer. So this
//! stream reads the version from the first frame, and rewrites such properties into ones that lapin can
//! parse (`frames`, `content_header`). It keeps the originals for the consumer of the delivery
//! (`repaired`).

mod content_header;
mod frames;
#[allow(dead_code, reason = "only the collector needs it: feature `postgres`")]
mod inflow;
mod repaired;

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use async_rs::Tokio;
use async_rs::traits::Reactor;
use futures_io::{AsyncRead, AsyncWrite};
use lapin::AsyncTcpStream;
use lapin::protocol::{AMQPClass, connection, parse_class};
use lapin::types::AMQPValue;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use self::frames::{Frames, Note};
pub(crate) use self::inflow::{ClosesGate, ReadBudget, ReadGate};
pub(crate) use self::repaired::Repairs;
use crate::message::Repaired;

/// The state that a connection shares with its stream, from the moment it opens.
#[derive(Debug, Clone, Default)]
pub(super) struct Opening {
    /// The server's first method.
    greeting: Arc<OnceLock<Vec<u8>>>,
    /// Ends the stream of a connection that is no longer used. lapin gives each connection a thread, and
    /// would keep the thread and the socket as long as a silent server keeps the socket.
    pub(super) abandoned: CancellationToken,
    /// The properties that were rewritten on this connection.
    pub(super) repairs: Repairs,
    /// Checked before each read of a connection with a read budget.
    gate: Option<ReadGate>,
}

impl Opening {
    /// A connection that reads only while its gate is open.
    pub(super) fn behind(gate: Option<ReadGate>) -> Self {
        Self {
            gate,
            ..Self::default()
        }
    }

    /// Whether it reads only while its gate is open.
    pub(super) fn is_limited(&self) -> bool {
        self.gate.is_some()
    }

    fn note(&self, note: Note) {
        match note {
            // Only the first one counts.
            Note::Greeting(greeting) => drop(self.greeting.set(greeting)),
            Note::ChannelOpened(channel) => self.repairs.forget(channel),
            Note::Rewritten {
                channel,
                tag,
                original,
                problem,
                is_unreadable,
            } => {
                tracing::warn!(problem, "the properties of a message are malformed");
                let repaired = Repaired {
                    problem,
                    is_unreadable,
                    original,
                };
                // What the broker returns has no tag, and nobody asks for it.
                if tag != 0 {
                    self.repairs.keep(channel, tag, repaired);
                }
            }
        }
    }

    /// The version that the broker reported, if it has reported one.
    pub(super) fn version(&self) -> Option<String> {
        let (_, class) = parse_class(self.greeting.get()?.as_slice()).ok()?;
        let AMQPClass::Connection(connection::AMQPMethod::Start(start)) = class else {
            return None;
        };
        match start.server_properties.inner().get("version")? {
            AMQPValue::LongString(version) => Some(version.to_string()),
            _ => None,
        }
    }
}

/// A stream, plain or with TLS, of which lapin reads what was checked.
pub(super) struct Checked {
    inner: Inner,
    frames: Frames,
    opening: Opening,
    abandoned: Pin<Box<WaitForCancellationFutureOwned>>,
}

type Inner = AsyncTcpStream<<Tokio as Reactor>::TcpStream>;

impl Checked {
    /// `frame_max` is what is asked of the broker.
    pub(super) fn new(inner: Inner, frame_max: u32, opening: Opening) -> Self {
        Self {
            inner,
            frames: Frames::new(frame_max),
            abandoned: Box::pin(opening.abandoned.clone().cancelled_owned()),
            opening,
        }
    }

    /// Reads until something is checked that lapin may have; `0` where the stream has ended.
    fn poll_checked(
        &mut self,
        cx: &mut Context<'_>,
        mut hand_out: impl FnMut(&mut Frames) -> usize,
    ) -> Poll<io::Result<usize>> {
        self.poll_abandoned(cx)?;
        loop {
            let length = hand_out(&mut self.frames);
            if length > 0 {
                return Poll::Ready(Ok(length));
            }
            if let Some(gate) = &self.opening.gate {
                ready!(gate.poll_may_read(cx))?;
            }
            match ready!(Pin::new(&mut self.inner).poll_read(cx, self.frames.room()))? {
                0 => return Poll::Ready(Ok(0)),
                length => {
                    self.frames.fill(length);
                    if let Some(gate) = &self.opening.gate {
                        gate.has_read(length);
                    }
                }
            }
            for note in self.frames.take_notes() {
                self.opening.note(note);
            }
        }
    }

    fn poll_abandoned(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        match self.abandoned.as_mut().poll(cx) {
            Poll::Ready(()) => Err(io::ErrorKind::ConnectionAborted.into()),
            Poll::Pending => Ok(()),
        }
    }
}

impl AsyncRead for Checked {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_checked(cx, |frames| frames.hand_out(buffer))
    }

    fn poll_read_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_checked(cx, |frames| {
            buffers.iter_mut().map(|out| frames.hand_out(out)).sum()
        })
    }
}

impl AsyncWrite for Checked {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, buffer)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, buffers)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_close(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_close(cx)
    }
}

/// Tokio, with streams that are checked: lapin takes its type of stream from the reactor.
#[derive(Debug, Clone)]
pub(super) struct CheckedReactor {
    pub(super) tokio: Tokio,
    pub(super) frame_max: u32,
    pub(super) opening: Opening,
}

impl Reactor for CheckedReactor {
    type TcpStream = Checked;
    type Sleep = <Tokio as Reactor>::Sleep;

    /// Not for sockets that others made: lapin has none, and Tokio's bound on them is private.
    fn register<H: Read + Write + Send + 'static>(
        &self,
        _socket: H,
    ) -> io::Result<impl AsyncRead + AsyncWrite + Send + Unpin + 'static> {
        Err::<Checked, _>(io::ErrorKind::Unsupported.into())
    }

    fn sleep(&self, duration: Duration) -> Self::Sleep {
        self.tokio.sleep(duration)
    }

    fn interval(
        &self,
        duration: Duration,
    ) -> impl futures_util::Stream<Item = Instant> + Send + 'static {
        self.tokio.interval(duration)
    }

    fn tcp_connect_addr(
        &self,
        address: SocketAddr,
    ) -> impl Future<Output = io::Result<Checked>> + Send + 'static {
        let connecting = self.tokio.tcp_connect_addr(address);
        let (frame_max, opening) = (self.frame_max, self.opening.clone());
        async move {
            let stream = AsyncTcpStream::Plain(connecting.await?);
            Ok(Checked::new(stream, frame_max, opening))
        }
    }
}

#[cfg(test)]
mod tests;
