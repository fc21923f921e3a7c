//! One channel in confirm mode, and the task that owns it.
//!
//! Publishers queue their messages, and the owner sends them without waiting for each confirm: to wait
//! halves the throughput. Only the owner polls the confirms, for two reasons. The broker returns an
//! unroutable message before it confirms it, and lapin attaches the return to the confirm that
//! completes next, so `returns` matches returns with messages. And lapin keeps a confirm that nobody
//! polls until the channel closes, so a publisher that gives up leaves its confirm to the owner.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures_util::stream::{FuturesUnordered, Stream};
use lapin::Channel;
use lapin::options::BasicPublishOptions;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::{Sleep, sleep, timeout};

use super::outgoing::OutgoingMessage;
use super::returns::{CompletedSend, Returns};

/// How many messages of a channel may be unconfirmed. RabbitMQ is fastest from 200 on.
const WINDOW: usize = 1_000;
/// How long a channel with unconfirmed messages may go without any confirm.
pub(super) const STUCK_AFTER: Duration = Duration::from_secs(2);
/// The age from which a channel is replaced because the broker refuses a message on it. A full queue
/// refuses too, and a new channel does not help against that.
const REPLACE_REFUSING_AFTER: Duration = Duration::from_secs(1);
/// How long a channel that is being replaced may take to confirm its last messages.
const LAST_CONFIRMS: Duration = Duration::from_secs(60);
/// How long the broker may take to close a channel.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// The outcome of one send.
#[derive(Debug)]
pub(super) enum SendOutcome {
    Confirmed,
    /// The broker returned it: no queue is bound for its routing key.
    Unroutable,
    /// The broker sent a nack: a queue is full, down, or electing a leader.
    Refused,
    /// The channel was lost before the confirm: the message may be stored or not.
    Lost(String),
    /// The channel was closed before the send: the message is not stored.
    NotSent,
}

/// A handle on the owner of a channel.
#[derive(Debug)]
pub(super) struct ConfirmChannel {
    channel: Channel,
    progress: Arc<Progress>,
    messages: mpsc::UnboundedSender<QueuedSend>,
    window: Arc<Semaphore>,
}

/// A message for the owner. It holds its permit of the window until its confirm, even if its
/// publisher gives up.
#[derive(Debug)]
struct QueuedSend {
    message: Arc<OutgoingMessage>,
    outcome: oneshot::Sender<SendOutcome>,
    permit: OwnedSemaphorePermit,
}

impl ConfirmChannel {
    /// Spawns the owner of a channel that is in confirm mode.
    pub(super) fn new(channel: Channel) -> Self {
        let (sender, messages) = mpsc::unbounded_channel();
        let window = Arc::new(Semaphore::new(WINDOW));
        let progress = Arc::new(Progress::new());
        let (window_too, progress_too) = (Arc::clone(&window), Arc::clone(&progress));
        tokio::spawn(own(channel.clone(), messages, window_too, progress_too));
        Self {
            channel,
            progress,
            messages: sender,
            window,
        }
    }

    /// Whether the channel is closed or being replaced.
    pub(super) fn is_closed(&self) -> bool {
        self.window.is_closed() || !self.channel.status().connected()
    }

    /// Closes the channel if it has unconfirmed messages and had no confirm for `STUCK_AFTER`: it may
    /// never confirm again. A slow channel stays open.
    pub(super) fn give_up_if_stuck(&self) {
        if self.progress.age() < STUCK_AFTER {
            return;
        }
        self.window.close();
        let channel = self.channel.clone();
        tokio::spawn(async move {
            let closing = channel.close(200, "a confirm is overdue".into());
            // If the broker does not reply, the channel ends with the connection.
            let _ = timeout(CLOSE_LIMIT, closing).await;
        });
    }

    /// Sends a message and waits for its outcome. Waits for room in the window first.
    pub(super) async fn send(&self, message: Arc<OutgoingMessage>) -> SendOutcome {
        let confirm = match self.try_send(message) {
            Ok(confirm) => confirm,
            // Boxed because it is rare, and the future of the common path should stay small.
            Err(message) => match Box::pin(Arc::clone(&self.window).acquire_owned()).await {
                Ok(permit) => self.enqueue(message, permit),
                Err(_) => return SendOutcome::NotSent,
            },
        };
        confirm.await
    }

    /// Sends a message, unless the window has no room.
    pub(super) fn try_send(
        &self,
        message: Arc<OutgoingMessage>,
    ) -> Result<PendingConfirm, Arc<OutgoingMessage>> {
        match Arc::clone(&self.window).try_acquire_owned() {
            Ok(permit) => Ok(self.enqueue(message, permit)),
            Err(_) => Err(message),
        }
    }

    fn enqueue(
        &self,
        message: Arc<OutgoingMessage>,
        permit: OwnedSemaphorePermit,
    ) -> PendingConfirm {
        let (outcome, receiver) = oneshot::channel();
        let queued = QueuedSend {
            message,
            outcome,
            permit,
        };
        match self.messages.send(queued) {
            Ok(()) => PendingConfirm::Waiting(receiver),
            Err(_) => PendingConfirm::NotSent,
        }
    }
}

/// The outcome of a message that was queued.
#[derive(Debug)]
pub(super) enum PendingConfirm {
    Waiting(oneshot::Receiver<SendOutcome>),
    Confirmed,
    NotSent,
}

impl Future for PendingConfirm {
    type Output = SendOutcome;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<SendOutcome> {
        match &mut *self {
            Self::Confirmed => Poll::Ready(SendOutcome::Confirmed),
            Self::NotSent => Poll::Ready(SendOutcome::NotSent),
            Self::Waiting(receiver) => Pin::new(receiver).poll(cx).map(|outcome| {
                outcome.unwrap_or_else(|_| SendOutcome::Lost("the channel was closed".to_owned()))
            }),
        }
    }
}

async fn own(
    channel: Channel,
    mut messages: mpsc::UnboundedReceiver<QueuedSend>,
    window: Arc<Semaphore>,
    progress: Arc<Progress>,
) {
    let mut unconfirmed = FuturesUnordered::new();
    let mut returns = Returns::default();
    let mut completed = Vec::new();
    let mut end: Option<Pin<Box<Sleep>>> = None;
    std::future::poll_fn(|cx| {
        let mut is_last = false;
        while let Poll::Ready(queued) = messages.poll_recv(cx) {
            match queued {
                Some(queued) => {
                    // While the channel is idle, no confirm is overdue.
                    if unconfirmed.is_empty() {
                        progress.record();
                    }
                    unconfirmed.push(send(&channel, queued));
                }
                None => {
                    is_last = true;
                    break;
                }
            }
        }
        while let Poll::Ready(Some(send)) = pin!(&mut unconfirmed).poll_next(cx) {
            completed.push(send);
        }
        if !completed.is_empty() {
            progress.record();
            if completed.iter().any(CompletedSend::is_refused)
                && progress.since_begin() >= REPLACE_REFUSING_AFTER
            {
                // On RabbitMQ 3.10 a channel whose first message to a quorum queue met a leader that
                // had just gone refuses for ever what a new channel accepts. So this channel takes
                // no more messages and waits for its last confirms.
                window.close();
                end.get_or_insert_with(|| Box::pin(sleep(LAST_CONFIRMS)));
            }
            returns.resolve(&mut completed);
        }
        if let Some(end) = &mut end
            && end.as_mut().poll(cx).is_ready()
        {
            return Poll::Ready(());
        }
        let is_over = is_last || !channel.status().connected();
        match unconfirmed.is_empty() && is_over {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
    .await;
    // Publishers that wait for room, and later ones, take another channel.
    window.close();
}

/// The time of a channel's last progress.
#[derive(Debug)]
struct Progress {
    begin: Instant,
    /// Milliseconds since `begin`.
    last: AtomicU64,
}

impl Progress {
    fn new() -> Self {
        Self {
            begin: Instant::now(),
            last: AtomicU64::new(0),
        }
    }

    fn since_begin(&self) -> Duration {
        self.begin.elapsed()
    }

    fn record(&self) {
        let now = u64::try_from(self.begin.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(now, Ordering::Relaxed);
    }

    fn age(&self) -> Duration {
        let last = Duration::from_millis(self.last.load(Ordering::Relaxed));
        self.begin.elapsed().saturating_sub(last)
    }
}

async fn send(channel: &Channel, queued: QueuedSend) -> CompletedSend {
    let QueuedSend {
        message,
        outcome,
        permit,
    } = queued;
    if !channel.status().connected() {
        return CompletedSend::not_sent(message, outcome);
    }
    let options = BasicPublishOptions {
        mandatory: true,
        immediate: false,
    };
    let sent = channel
        .basic_publish(
            message.exchange.as_str().into(),
            message.routing_key.as_str().into(),
            options,
            message.payload(),
            message.properties(),
        )
        .await;
    let result = match sent {
        Ok(confirm) => confirm.await,
        Err(error) => Err(error),
    };
    drop(permit);
    CompletedSend::new(message, outcome, result)
}
