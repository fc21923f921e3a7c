//! Many messages of one stream, a thousand of them under way at once.
//!
//! Outcomes are given in the order of the requests, so only the oldest message is waited for: its
//! confirm nearly always comes with those of many others. What is not simply confirmed goes on in a
//! future of its own.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, Stream};
use tokio::time::{Instant, Sleep, sleep_until};

use super::lane::{Answer, Lane, Posted};
use super::link::Live;
use super::{Inner, Obstacle, Parcel, overdue};
use crate::Error;
use crate::task::{PublishRequest, Receipt};

/// How many messages are under way at once.
const WINDOW: usize = 1_000;

/// The outcomes of a stream of requests.
pub(super) struct Many<S> {
    publisher: Arc<Inner>,
    requests: Pin<Box<S>>,
    has_ended: bool,
    entries: VecDeque<Entry>,
    /// The number of the oldest entry; they are numbered in the order of the requests.
    oldest: u64,
    persistent: Persistent,
    /// For the deadline of the oldest, and sometimes too early.
    timer: Option<Pin<Box<Sleep>>>,
}

type Persistent = FuturesUnordered<BoxFuture<'static, (u64, Outcome)>>;
type Outcome = Result<Receipt, Error>;

/// A message whose outcome has not been given yet.
enum Entry {
    /// On its first attempt.
    UnderWay(UnderWay),
    /// In a future of its own.
    Persistent,
    Ended(Outcome),
}

struct UnderWay {
    parcel: Parcel,
    posted: Posted,
    live: Arc<Live>,
    lane: Arc<Lane>,
}

impl<S: Stream<Item = PublishRequest>> Many<S> {
    pub(super) fn new(publisher: Arc<Inner>, requests: S) -> Self {
        Self {
            publisher,
            requests: Box::pin(requests),
            has_ended: false,
            entries: VecDeque::new(),
            oldest: 0,
            persistent: FuturesUnordered::new(),
            timer: None,
        }
    }

    /// Begins as many as the window has room for.
    fn fill(&mut self, cx: &mut Context<'_>) {
        while !self.has_ended && self.entries.len() < WINDOW {
            match self.requests.as_mut().poll_next(cx) {
                Poll::Ready(Some(request)) => {
                    let entry = self.begin(request);
                    self.entries.push_back(entry);
                }
                Poll::Ready(None) => self.has_ended = true,
                Poll::Pending => break,
            }
        }
    }

    fn begin(&mut self, request: PublishRequest) -> Entry {
        let parcel = match self.publisher.parcel(request) {
            Ok(parcel) => parcel,
            Err(error) => return Entry::Ended(Err(error)),
        };
        if let Some((live, lane)) = self.publisher.pool.lane_now()
            && let Ok(posted) = lane.post_now(parcel.letter.clone())
        {
            return Entry::UnderWay(UnderWay {
                parcel,
                posted,
                live,
                lane,
            });
        }
        let number = self.oldest + self.entries.len() as u64;
        let future = persist(self.publisher.clone(), number, parcel, None);
        self.persistent.push(Box::pin(future));
        Entry::Persistent
    }

    /// Notes down which of those in futures of their own have ended.
    fn look_at_persistent(&mut self, cx: &mut Context<'_>) {
        while let Poll::Ready(Some((number, outcome))) =
            Pin::new(&mut self.persistent).poll_next(cx)
        {
            let index = usize::try_from(number - self.oldest).ok();
            if let Some(entry) = index.and_then(|index| self.entries.get_mut(index)) {
                *entry = Entry::Ended(outcome);
            }
        }
    }

    /// Whatever befell the oldest has befallen others: they do not wait until it is their turn.
    fn go_on_with_failed(&mut self, oldest: Result<Answer, Obstacle>) {
        let mut met = Some(oldest);
        for (number, entry) in (self.oldest..).zip(&mut self.entries) {
            let Entry::UnderWay(under_way) = entry else {
                continue;
            };
            let Some(met) = met.take().or_else(|| under_way.failed()) else {
                continue;
            };
            if let Entry::UnderWay(failed) = std::mem::replace(entry, Entry::Persistent) {
                let publisher = self.publisher.clone();
                let future = persist(publisher, number, failed.parcel, Some(met));
                self.persistent.push(Box::pin(future));
            }
        }
    }
}

impl<S: Stream<Item = PublishRequest>> Stream for Many<S> {
    type Item = Outcome;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Outcome>> {
        let this = &mut *self;
        this.fill(cx);
        loop {
            this.look_at_persistent(cx);
            let met = match this.entries.pop_front() {
                None if this.has_ended => return Poll::Ready(None),
                None => return Poll::Pending,
                Some(Entry::Ended(outcome)) => {
                    this.oldest += 1;
                    return Poll::Ready(Some(outcome));
                }
                Some(Entry::Persistent) => {
                    this.entries.push_front(Entry::Persistent);
                    return Poll::Pending;
                }
                Some(Entry::UnderWay(mut oldest)) => {
                    let met = oldest.poll(&mut this.timer, cx);
                    if let Poll::Ready(Ok(Answer::Confirmed)) = met {
                        this.oldest += 1;
                        return Poll::Ready(Some(this.publisher.receipt(oldest.parcel, Ok(()))));
                    }
                    this.entries.push_front(Entry::UnderWay(oldest));
                    ready!(met)
                }
            };
            this.go_on_with_failed(met);
        }
    }
}

impl UnderWay {
    /// Its answer, or that its deadline has come without one.
    fn poll(
        &mut self,
        timer: &mut Option<Pin<Box<Sleep>>>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Answer, Obstacle>> {
        if let Poll::Ready(answer) = Pin::new(&mut self.posted).poll(cx) {
            return Poll::Ready(Ok(answer));
        }
        ready!(poll_deadline(timer, self.parcel.deadline, cx));
        Poll::Ready(Err(overdue(&self.live, &self.lane)))
    }

    /// Its answer, if it is there and not a confirm.
    fn failed(&mut self) -> Option<Result<Answer, Obstacle>> {
        match (&mut self.posted).now_or_never()? {
            Answer::Confirmed => {
                self.posted = Posted::Confirmed;
                None
            }
            answer => Some(Ok(answer)),
        }
    }
}

/// Goes on with a message until it is confirmed or its deadline has come.
async fn persist(
    publisher: Arc<Inner>,
    number: u64,
    parcel: Parcel,
    attempted: Option<Result<Answer, Obstacle>>,
) -> (u64, Outcome) {
    let delivered = publisher.persist(&parcel, attempted).await;
    (number, publisher.receipt(parcel, delivered))
}

/// Ready when the deadline has come.
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
