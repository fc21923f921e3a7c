//! One channel in confirm mode, and the task that owns it.
//!
//! Publishers hand their messages to the owner, which has many under way at once: waiting for each
//! send before the next one halves the speed. It alone looks at the confirms, for two reasons. A
//! message that no queue takes is returned before its confirm, and lapin attaches the return to
//! whichever confirm completes next; so returns are matched with their letters here (`returns`). And
//! a confirm that nobody waits for any more stays with the channel for ever; so a publisher that
//! gives up leaves it to the owner.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures_util::stream::{FuturesUnordered, Stream};
use lapin::options::BasicPublishOptions;
use lapin::{BasicProperties, Channel};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::{Sleep, sleep, timeout};

use super::returns::{Ended, Returns};
use crate::message::Message;

/// How many messages of a lane may wait for their confirm. RabbitMQ is at its fastest from 200 on.
const WINDOW: usize = 1_000;
/// How long a channel may leave all its letters unanswered.
pub(super) const STUCK_AFTER: Duration = Duration::from_secs(2);
/// How old a channel is at least that is given up because it refuses. A full queue refuses too, and
/// a new channel does not help against that.
const REFUSING_AFTER: Duration = Duration::from_secs(1);
/// How long a channel that was given up may take to answer what is under way.
const LAST_ANSWERS: Duration = Duration::from_secs(60);
/// How long the broker may take to close a channel.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// A message ready to be sent.
#[derive(Debug)]
pub(crate) struct Letter {
    pub(crate) exchange: String,
    pub(crate) routing_key: String,
    pub(crate) content: Content,
}

/// What is sent.
#[derive(Debug)]
pub(crate) enum Content {
    /// A message on its first way. Its properties are written when it is sent: that costs no more
    /// than to copy them for the case that it must be sent again.
    New { message: Message, app: Arc<str> },
    /// What was delivered before, and goes on.
    Forwarded {
        payload: Vec<u8>,
        properties: BasicProperties,
    },
}

impl Letter {
    pub(super) fn payload(&self) -> &[u8] {
        match &self.content {
            Content::New { message, .. } => &message.payload,
            Content::Forwarded { payload, .. } => payload,
        }
    }

    pub(super) fn properties(&self) -> BasicProperties {
        match &self.content {
            Content::New { message, app } => message.properties(app),
            Content::Forwarded { properties, .. } => properties.clone(),
        }
    }

    /// The identifier that it has on the wire.
    pub(super) fn id(&self) -> Option<&str> {
        match &self.content {
            Content::New { message, .. } => Some(message.id.as_str()),
            Content::Forwarded { properties, .. } => {
                properties.message_id().as_ref().map(|id| id.as_str())
            }
        }
    }
}

/// What became of a letter.
#[derive(Debug)]
pub(super) enum Answer {
    Confirmed,
    /// No queue is bound for it.
    Unroutable,
    /// The broker said no: a queue is full, down, or electing a leader.
    Refused,
    /// The channel was lost before the confirm: it may be stored or not.
    Lost(String),
    /// The channel was gone already: it is not stored.
    NotSent,
}

/// A way to the owner of a channel.
#[derive(Debug)]
pub(super) struct Lane {
    channel: Channel,
    progress: Arc<Progress>,
    letters: mpsc::UnboundedSender<Order>,
    window: Arc<Semaphore>,
}

/// A letter under way. The permit is held until its confirm, whoever waits for that.
#[derive(Debug)]
struct Order {
    letter: Arc<Letter>,
    answer: oneshot::Sender<Answer>,
    permit: OwnedSemaphorePermit,
}

impl Lane {
    /// Takes over a channel that is in confirm mode.
    pub(super) fn new(channel: Channel) -> Self {
        let (sender, letters) = mpsc::unbounded_channel();
        let window = Arc::new(Semaphore::new(WINDOW));
        let progress = Arc::new(Progress::new());
        let (window_too, progress_too) = (Arc::clone(&window), Arc::clone(&progress));
        tokio::spawn(own(channel.clone(), letters, window_too, progress_too));
        Self {
            channel,
            progress,
            letters: sender,
            window,
        }
    }

    /// Whether the channel is gone, or was given up.
    pub(super) fn is_closed(&self) -> bool {
        self.window.is_closed() || !self.channel.status().connected()
    }

    /// Closes the channel if it has letters under way and none was answered for a while: then it may
    /// never answer again. One that is only slow goes on.
    pub(super) fn give_up_if_stuck(&self) {
        if self.progress.age() < STUCK_AFTER {
            return;
        }
        self.window.close();
        let channel = self.channel.clone();
        tokio::spawn(async move {
            let goodbye = channel.close(200, "a confirm is overdue".into());
            // Without an answer it ends with the connection.
            let _ = timeout(CLOSE_LIMIT, goodbye).await;
        });
    }

    /// Sends a letter and waits for what becomes of it; the first wait is for room in the window.
    pub(super) async fn send(&self, letter: Arc<Letter>) -> Answer {
        let posted = match self.post_now(letter) {
            Ok(posted) => posted,
            // Seldom, and in a box so that the way of most stays small.
            Err(letter) => match Box::pin(Arc::clone(&self.window).acquire_owned()).await {
                Ok(permit) => self.post(letter, permit),
                Err(_) => return Answer::NotSent,
            },
        };
        posted.await
    }

    /// Sends a letter, unless the window has no room.
    pub(super) fn post_now(&self, letter: Arc<Letter>) -> Result<Posted, Arc<Letter>> {
        match Arc::clone(&self.window).try_acquire_owned() {
            Ok(permit) => Ok(self.post(letter, permit)),
            Err(_) => Err(letter),
        }
    }

    fn post(&self, letter: Arc<Letter>, permit: OwnedSemaphorePermit) -> Posted {
        let (answer, answered) = oneshot::channel();
        let order = Order {
            letter,
            answer,
            permit,
        };
        match self.letters.send(order) {
            Ok(()) => Posted::UnderWay(answered),
            Err(_) => Posted::NotSent,
        }
    }
}

/// A letter that was handed over: what becomes of it.
#[derive(Debug)]
pub(super) enum Posted {
    UnderWay(oneshot::Receiver<Answer>),
    Confirmed,
    NotSent,
}

impl Future for Posted {
    type Output = Answer;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Answer> {
        match &mut *self {
            Self::Confirmed => Poll::Ready(Answer::Confirmed),
            Self::NotSent => Poll::Ready(Answer::NotSent),
            Self::UnderWay(answered) => Pin::new(answered).poll(cx).map(|answer| {
                answer.unwrap_or_else(|_| Answer::Lost("the channel was closed".to_owned()))
            }),
        }
    }
}

async fn own(
    channel: Channel,
    mut letters: mpsc::UnboundedReceiver<Order>,
    window: Arc<Semaphore>,
    progress: Arc<Progress>,
) {
    let mut under_way = FuturesUnordered::new();
    let mut returns = Returns::default();
    let mut completed = Vec::new();
    let mut end: Option<Pin<Box<Sleep>>> = None;
    std::future::poll_fn(|cx| {
        let mut is_last = false;
        while let Poll::Ready(order) = letters.poll_recv(cx) {
            match order {
                Some(order) => {
                    // An idle channel owes nobody an answer.
                    if under_way.is_empty() {
                        progress.made();
                    }
                    under_way.push(publish(&channel, order));
                }
                None => {
                    is_last = true;
                    break;
                }
            }
        }
        while let Poll::Ready(Some(ended)) = pin!(&mut under_way).poll_next(cx) {
            completed.push(ended);
        }
        if !completed.is_empty() {
            progress.made();
            if completed.iter().any(Ended::is_refused) && progress.since_begin() >= REFUSING_AFTER {
                // The channel may refuse for ever what another one would take: its first message to
                // a quorum queue met a leader that was just gone (RabbitMQ 3.10). What is under way
                // comes to its end, and the next letter takes a new one.
                window.close();
                end.get_or_insert_with(|| Box::pin(sleep(LAST_ANSWERS)));
            }
            returns.answer(&mut completed);
        }
        if let Some(end) = &mut end
            && end.as_mut().poll(cx).is_ready()
        {
            return Poll::Ready(());
        }
        let is_over = is_last || !channel.status().connected();
        match under_way.is_empty() && is_over {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
    .await;
    // Whoever comes later, or still waits for room, learns that there is none.
    window.close();
}

/// When a channel last did something.
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

    fn made(&self) {
        let now = u64::try_from(self.begin.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(now, Ordering::Relaxed);
    }

    fn age(&self) -> Duration {
        let last = Duration::from_millis(self.last.load(Ordering::Relaxed));
        self.begin.elapsed().saturating_sub(last)
    }
}

async fn publish(channel: &Channel, order: Order) -> Ended {
    let Order {
        letter,
        answer,
        permit,
    } = order;
    if !channel.status().connected() {
        return Ended::not_sent(letter, answer);
    }
    let options = BasicPublishOptions {
        mandatory: true,
        immediate: false,
    };
    let sent = channel
        .basic_publish(
            letter.exchange.as_str().into(),
            letter.routing_key.as_str().into(),
            options,
            letter.payload(),
            letter.properties(),
        )
        .await;
    let result = match sent {
        Ok(confirm) => confirm.await,
        Err(error) => Err(error),
    };
    drop(permit);
    Ended::new(letter, answer, result)
}
