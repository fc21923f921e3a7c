//! What the broker says about itself when a connection opens: its version.
//!
//! AMQP has it in the server's first frame, and lapin drops it. So lapin is given a stream that
//! keeps a copy of that frame: no second connection, nothing more on the wire, and the version is
//! that of the very node the connection leads to.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use async_rs::Tokio;
use async_rs::traits::Reactor;
use futures_io::{AsyncRead, AsyncWrite};
use lapin::AsyncTcpStream;
use lapin::protocol::{AMQPClass, connection, parse_class};
use lapin::types::AMQPValue;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use super::inflow::ReadGate;

/// Far above what any broker says of itself: what is longer is no greeting.
const LONGEST: usize = 64 << 10;

/// A frame is its type, its channel and its length, then that many bytes and an end mark.
const FRAME_HEAD: usize = 7;

/// The copy of the server's first frame, filled while the connection opens.
#[derive(Debug, Clone, Default)]
pub(super) struct Greeting {
    received: Arc<Mutex<Vec<u8>>>,
    /// Ends the stream of a connection that nobody waits for any more. lapin gives each a thread,
    /// and would keep it, and the socket, for as long as a silent server does.
    pub(super) abandoned: CancellationToken,
    is_open: Arc<AtomicBool>,
    /// Asked before each read, where reading is limited.
    gate: Option<ReadGate>,
}

impl Greeting {
    /// The greeting of a connection that reads only when its gate is open.
    pub(super) fn behind(gate: Option<ReadGate>) -> Self {
        Self {
            gate,
            ..Self::default()
        }
    }

    /// Lets the stream step aside: the connection is open, and nobody abandons it any more.
    pub(super) fn opened(&self) {
        self.is_open.store(true, Ordering::Relaxed);
    }

    /// The version that the broker reported, if it has reported one.
    pub(super) fn version(&self) -> Option<String> {
        let received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        let frame = received.get(FRAME_HEAD..frame_end(&received)?)?;
        let (_, class) = parse_class(frame).ok()?;
        let AMQPClass::Connection(connection::AMQPMethod::Start(start)) = class else {
            return None;
        };
        match start.server_properties.inner().get("version")? {
            AMQPValue::LongString(version) => Some(version.to_string()),
            _ => None,
        }
    }

    /// Takes more of it, and says whether more is needed.
    fn keep(&self, bytes: &[u8]) -> bool {
        let mut received = self.received.lock().unwrap_or_else(PoisonError::into_inner);
        received.extend_from_slice(bytes);
        let is_complete = frame_end(&received).is_some_and(|end| received.len() >= end);
        !is_complete && received.len() < LONGEST
    }
}

/// Where the first frame ends, once its length is known.
fn frame_end(received: &[u8]) -> Option<usize> {
    let length = received.get(3..FRAME_HEAD)?.try_into().ok()?;
    usize::try_from(u32::from_be_bytes(length))
        .ok()?
        .checked_add(FRAME_HEAD)
}

/// A stream, plain or with TLS, that keeps a copy of the greeting.
pub(super) struct Listening {
    inner: Inner,
    /// Until it is complete.
    greeting: Option<Greeting>,
    /// Until the connection is open.
    abandoned: Option<Abandoned>,
    gate: Option<ReadGate>,
}

struct Abandoned {
    waiting: Pin<Box<WaitForCancellationFutureOwned>>,
    is_open: Arc<AtomicBool>,
}

type Inner = AsyncTcpStream<<Tokio as Reactor>::TcpStream>;

impl Listening {
    pub(super) fn new(inner: Inner, greeting: Greeting) -> Self {
        Self {
            inner,
            abandoned: Some(Abandoned {
                waiting: Box::pin(greeting.abandoned.clone().cancelled_owned()),
                is_open: Arc::clone(&greeting.is_open),
            }),
            gate: greeting.gate.clone(),
            greeting: Some(greeting),
        }
    }

    fn poll_abandoned(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        let Some(abandoned) = &mut self.abandoned else {
            return Ok(());
        };
        if abandoned.is_open.load(Ordering::Relaxed) {
            self.abandoned = None;
            return Ok(());
        }
        match abandoned.waiting.as_mut().poll(cx) {
            Poll::Ready(()) => Err(io::ErrorKind::ConnectionAborted.into()),
            Poll::Pending => Ok(()),
        }
    }

    fn poll_may_read(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &self.gate {
            Some(gate) => gate.poll_may_read(cx),
            None => Poll::Ready(Ok(())),
        }
    }

    fn has_read(&self, bytes: usize) {
        if let Some(gate) = &self.gate {
            gate.has_read(bytes);
        }
    }

    fn heard(&mut self, bytes: &[u8]) {
        self.greeting = self.greeting.take().filter(|greeting| greeting.keep(bytes));
    }
}

impl AsyncRead for Listening {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_abandoned(cx)?;
        ready!(self.poll_may_read(cx))?;
        let answer = Pin::new(&mut self.inner).poll_read(cx, buffer);
        if let Poll::Ready(Ok(length)) = answer {
            self.has_read(length);
            self.heard(&buffer[..length]);
        }
        answer
    }

    fn poll_read_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_abandoned(cx)?;
        ready!(self.poll_may_read(cx))?;
        let answer = Pin::new(&mut self.inner).poll_read_vectored(cx, buffers);
        if let Poll::Ready(Ok(mut length)) = answer {
            self.has_read(length);
            for buffer in buffers.iter() {
                let filled = length.min(buffer.len());
                self.heard(&buffer[..filled]);
                length -= filled;
            }
        }
        answer
    }
}

impl AsyncWrite for Listening {
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

/// Tokio, with streams that listen: lapin takes its type of stream from the reactor.
#[derive(Debug, Clone)]
pub(super) struct ListeningReactor {
    pub(super) tokio: Tokio,
    pub(super) greeting: Greeting,
}

impl Reactor for ListeningReactor {
    type TcpStream = Listening;
    type Sleep = <Tokio as Reactor>::Sleep;

    /// Not for sockets that others made: lapin has none, and Tokio's bound on them is private.
    fn register<H: Read + Write + Send + 'static>(
        &self,
        _socket: H,
    ) -> io::Result<impl AsyncRead + AsyncWrite + Send + Unpin + 'static> {
        Err::<Listening, _>(io::ErrorKind::Unsupported.into())
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
    ) -> impl Future<Output = io::Result<Listening>> + Send + 'static {
        let connecting = self.tokio.tcp_connect_addr(address);
        let greeting = self.greeting.clone();
        async move {
            let stream = AsyncTcpStream::Plain(connecting.await?);
            Ok(Listening::new(stream, greeting))
        }
    }
}

#[cfg(test)]
mod tests {
    use lapin::protocol::connection::{AMQPMethod, Start};
    use lapin::types::FieldTable;

    use super::*;

    /// The first frame of a broker that reports `version`.
    fn frame(version: &str) -> Vec<u8> {
        let mut server_properties = FieldTable::default();
        server_properties.insert("version".into(), AMQPValue::LongString(version.into()));
        let start = Start {
            version_major: 0,
            version_minor: 9,
            server_properties,
            mechanisms: "PLAIN".into(),
            locales: "en_US".into(),
        };
        let class = AMQPClass::Connection(AMQPMethod::Start(start));
        let write = lapin::protocol::gen_class(&class);
        let payload = write(Vec::new().into()).unwrap().into_inner().0;
        let length = u32::try_from(payload.len()).unwrap();
        [&[1, 0, 0][..], &length.to_be_bytes(), &payload, &[0xCE]].concat()
    }

    #[test]
    fn the_version_is_read_in_whatever_pieces_it_arrives() {
        let frame = frame("4.3.6");
        for size in [1, 6, 7, 8, frame.len()] {
            let greeting = Greeting::default();
            let wants_more: Vec<_> = frame
                .chunks(size)
                .map(|piece| greeting.keep(piece))
                .collect();
            assert_eq!(greeting.version().as_deref(), Some("4.3.6"));
            assert!(!wants_more.last().unwrap());
        }
    }

    #[test]
    fn junk_has_no_version_and_is_not_kept_for_ever() {
        let greeting = Greeting::default();
        assert_eq!(greeting.version(), None);
        while greeting.keep(&[0xFF; 1024]) {}
        assert_eq!(greeting.version(), None);

        let greeting = Greeting::default();
        assert!(!greeting.keep(&[0; 50]));
        assert_eq!(greeting.version(), None);
    }
}
