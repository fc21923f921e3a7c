//! Publishes the messages of a stream, with up to a thousand unconfirmed at once.
//!
//! The stream yields outcomes in the order of the requests, so it polls only the oldest message: the
//! broker nearly always confirms many messages with one acknowledgement. A message whose first send
//! fails is retried in a future of its own.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, Stream};
use tokio::time::{Instant, Sleep, sleep_until};

use super::attempt::{PublishAttempt, SendFailure, overdue};
use super::confirm_channel::{ConfirmChannel, PendingConfirm, SendOutcome};
use super::connection::PublishConnection;
use super::outgoing::OutgoingMessage;
use super::pools::Broker;
use super::{Confirmed, Inner};
use crate::Error;
use crate::task::{PublishRequest, Receipt};

/// How many messages may be unconfirmed at once.
const WINDOW: usize = 1_000;

/// The outcomes of a stream of requests.
pub(super) struct PublishMany<S> {
    publisher: Arc<Inner>,
    requests: Pin<Box<S>>,
    has_ended: bool,
    entries: VecDeque<Entry>,
    /// The number of the oldest entry; they are numbered in the order of the requests.
    oldest: u64,
    retries: Retries,
    /// For the deadline of the oldest message. It may fire too early.
    timer: Option<Pin<Box<Sleep>>>,
}

type Retries = FuturesUnordered<BoxFuture<'static, (u64, Outcome)>>;
type Outcome = Result<Receipt, Error>;

/// A message whose outcome the stream has not yielded yet.
enum Entry {
    /// Sent once, and not confirmed.
    Unconfirmed(Unconfirmed),
    /// Retried in a future of its own.
    Retrying,
    Finished(Outcome),
}

struct Unconfirmed {
    attempt: PublishAttempt,
    message: Arc<OutgoingMessage>,
    confirm: PendingConfirm,
    connection: Arc<PublishConnection>,
    channel: Arc<ConfirmChannel>,
}

impl<S: Stream<Item = PublishRequest>> PublishMany<S> {
    pub(super) fn new(publisher: Arc<Inner>, requests: S) -> Self {
        Self {
            publisher,
            requests: Box::pin(requests),
            has_ended: false,
            entries: VecDeque::new(),
            oldest: 0,
            retries: FuturesUnordered::new(),
            timer: None,
        }
    }

    /// Sends requests until the window is full.
    fn fill(&mut self, cx: &mut Context<'_>) {
        while !self.has_ended && self.entries.len() < WINDOW {
            match self.requests.as_mut().poll_next(cx) {
                Poll::Ready(Some(request)) => {
                    let entry = self.send(request);
                    self.entries.push_back(entry);
                }
                Poll::Ready(None) => self.has_ended = true,
                Poll::Pending => break,
            }
        }
    }

    fn send(&mut self, request: PublishRequest) -> Entry {
        let prepared = match self.publisher.broker_if_overrides_are_known(&request) {
            Broker::Ready(version) => self.publisher.prepare(request, version),
            Broker::NotReady(_) => {
                let number = self.oldest + self.entries.len() as u64;
                let future = send_when_ready(self.publisher.clone(), number, request);
                self.retries.push(Box::pin(future));
                return Entry::Retrying;
            }
        };
        let attempt = match prepared {
            Ok(attempt) => attempt,
            Err(error) => return Entry::Finished(Err(error)),
        };
        if let Some(message) = attempt.outgoing.message()
            && !self.publisher.is_long_delay(message)
            && let Some((connection, channel)) =
                self.publisher.pools.of(&message.tier).ready_channel()
            && let Ok(confirm) = channel.try_send(message.clone())
        {
            return Entry::Unconfirmed(Unconfirmed {
                message: message.clone(),
                attempt,
                confirm,
                connection,
                channel,
            });
        }
        let number = self.oldest + self.entries.len() as u64;
        let future = send(self.publisher.clone(), number, attempt);
        self.retries.push(Box::pin(future));
        Entry::Retrying
    }

    /// Stores the outcomes of the retries that have finished.
    fn poll_retries(&mut self, cx: &mut Context<'_>) {
        while let Poll::Ready(Some((number, outcome))) = Pin::new(&mut self.retries).poll_next(cx) {
            let index = usize::try_from(number - self.oldest).ok();
            if let Some(entry) = index.and_then(|index| self.entries.get_mut(index)) {
                *entry = Entry::Finished(outcome);
            }
        }
    }

    /// Retries every message that has failed. A failure of the oldest message, such as a lost channel,
    /// usually hits others too, and they must not wait until they are the oldest.
    fn retry_failed(&mut self, oldest: Result<SendOutcome, SendFailure>) {
        let mut met = Some(oldest);
        for (number, entry) in (self.oldest..).zip(&mut self.entries) {
            let Entry::Unconfirmed(unconfirmed) = entry else {
                continue;
            };
            let Some(met) = met.take().or_else(|| unconfirmed.failed()) else {
                continue;
            };
            if let Entry::Unconfirmed(failed) = std::mem::replace(entry, Entry::Retrying) {
                let publisher = self.publisher.clone();
                let future = retry(publisher, number, failed, met);
                self.retries.push(Box::pin(future));
            }
        }
    }
}

impl<S: Stream<Item = PublishRequest>> Stream for PublishMany<S> {
    type Item = Outcome;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Outcome>> {
        let this = &mut *self;
        this.fill(cx);
        loop {
            this.poll_retries(cx);
            let met = match this.entries.pop_front() {
                None if this.has_ended => return Poll::Ready(None),
                None => return Poll::Pending,
                Some(Entry::Finished(outcome)) => {
                    this.oldest += 1;
                    return Poll::Ready(Some(outcome));
                }
                Some(Entry::Retrying) => {
                    this.entries.push_front(Entry::Retrying);
                    return Poll::Pending;
                }
                Some(Entry::Unconfirmed(mut oldest)) => {
                    let met = oldest.poll(&mut this.timer, cx);
                    if let Poll::Ready(Ok(SendOutcome::Confirmed)) = met {
                        this.oldest += 1;
                        let receipt = this
                            .publisher
                            .receipt(oldest.attempt, Ok(Confirmed::Stored));
                        return Poll::Ready(Some(receipt));
                    }
                    this.entries.push_front(Entry::Unconfirmed(oldest));
                    ready!(met)
                }
            };
            this.retry_failed(met);
        }
    }
}

impl Unconfirmed {
    /// The outcome of the send, or a failure at the deadline.
    fn poll(
        &mut self,
        timer: &mut Option<Pin<Box<Sleep>>>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<SendOutcome, SendFailure>> {
        if let Poll::Ready(answer) = Pin::new(&mut self.confirm).poll(cx) {
            return Poll::Ready(Ok(answer));
        }
        ready!(poll_deadline(timer, self.attempt.deadline, cx));
        Poll::Ready(Err(overdue(&self.connection, &self.channel)))
    }

    /// The outcome of the send, if it is known and not a confirm.
    fn failed(&mut self) -> Option<Result<SendOutcome, SendFailure>> {
        match (&mut self.confirm).now_or_never()? {
            SendOutcome::Confirmed => {
                self.confirm = PendingConfirm::Confirmed;
                None
            }
            answer => Some(Ok(answer)),
        }
    }
}

/// Sends the message of a request once there is a broker.
async fn send_when_ready(
    publisher: Arc<Inner>,
    number: u64,
    request: PublishRequest,
) -> (u64, Outcome) {
    match publisher.prepare_when_ready(request).await {
        Ok(attempt) => send(publisher, number, attempt).await,
        Err(error) => (number, Err(error)),
    }
}

/// Sends a message, or inserts its row.
async fn send(publisher: Arc<Inner>, number: u64, attempt: PublishAttempt) -> (u64, Outcome) {
    let sent = publisher.send_until_confirmed(&attempt).await;
    (number, publisher.receipt(attempt, sent))
}

/// Sends a message again until the broker confirms it, at the latest until its deadline.
async fn retry(
    publisher: Arc<Inner>,
    number: u64,
    failed: Unconfirmed,
    met: Result<SendOutcome, SendFailure>,
) -> (u64, Outcome) {
    let Unconfirmed {
        attempt, message, ..
    } = failed;
    let sent = publisher.retry_until_deadline(&attempt, &message, Some(met));
    let sent = sent.await;
    (number, publisher.receipt(attempt, sent))
}

/// Ready at the deadline.
fn poll_deadline(
    timer: &mut Option<Pin<Box<Sleep>>>,
    deadline: Instant,
    cx: &mut Context<'_>,
) -> Poll<()> {
    let timer = timer.get_or_insert_with(|| Box::pin(sleep_until(deadline)));
    if deadline < timer.deadline() {
        timer.as_mut().reset(deadline);
    }
    while Instant::now() < deadline {
        ready!(timer.as_mut().poll(cx));
        timer.as_mut().reset(deadline);
    }
    Poll::Ready(())
}
