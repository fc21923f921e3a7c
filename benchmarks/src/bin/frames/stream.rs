//! A stream that checks frames, and nothing else of what the library's does.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use async_rs::Tokio;
use async_rs::traits::Reactor;
use futures_io::{AsyncRead, AsyncWrite};
use lapin::AsyncTcpStream;

use crate::checking::frames::Frames;

type Inner = AsyncTcpStream<<Tokio as Reactor>::TcpStream>;

pub(crate) struct Checked {
    inner: Inner,
    frames: Frames,
}

impl Checked {
    pub(crate) fn new(inner: Inner, frame_max: u32) -> Self {
        Self {
            inner,
            frames: Frames::new(frame_max),
        }
    }

    fn poll_checked(
        &mut self,
        cx: &mut Context<'_>,
        mut hand_out: impl FnMut(&mut Frames) -> usize,
    ) -> Poll<io::Result<usize>> {
        loop {
            let length = hand_out(&mut self.frames);
            if length > 0 {
                return Poll::Ready(Ok(length));
            }
            match ready!(Pin::new(&mut self.inner).poll_read(cx, self.frames.room()))? {
                0 => return Poll::Ready(Ok(0)),
                length => self.frames.fill(length),
            }
            drop(self.frames.take_notes());
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
pub(crate) struct CheckedReactor(pub(crate) Tokio);

impl Reactor for CheckedReactor {
    type TcpStream = Checked;
    type Sleep = <Tokio as Reactor>::Sleep;

    fn register<H: Read + Write + Send + 'static>(
        &self,
        _socket: H,
    ) -> io::Result<impl AsyncRead + AsyncWrite + Send + Unpin + 'static> {
        Err::<Checked, _>(io::ErrorKind::Unsupported.into())
    }

    fn sleep(&self, duration: Duration) -> Self::Sleep {
        self.0.sleep(duration)
    }

    fn interval(
        &self,
        duration: Duration,
    ) -> impl futures_util::Stream<Item = Instant> + Send + 'static {
        self.0.interval(duration)
    }

    fn tcp_connect_addr(
        &self,
        address: SocketAddr,
    ) -> impl Future<Output = io::Result<Checked>> + Send + 'static {
        let connecting = self.0.tcp_connect_addr(address);
        async move {
            let stream = AsyncTcpStream::Plain(connecting.await?);
            Ok(Checked::new(stream, crate::FRAME_MAX))
        }
    }
}
