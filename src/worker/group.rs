//! A pool of slots, and the tiers that it serves.
//!
//! All decisions of a group are made in one task, in turns: take in what has arrived and what has
//! ended, acknowledge, give free slots away. The handlers run in tasks of their own.

mod channels;
mod hands;
mod jobs;

use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, Sleep, sleep, timeout};

use self::hands::Hands;
use self::jobs::{Running, adopt};
use super::gate::{ALONE_FROM, Claim};
use super::job::{self, JobId, Kind, News};
use super::order::{Order, Supply, Turn};
use super::resubscribe::Resubscribing;
use super::tier::{Held, Tier};
use super::{Phase, Workshop};
use crate::amqp::Connection;
use crate::backoff::Backoff;
use crate::message::Message;
use crate::observe::{Event, Purpose};
use crate::topology;

/// How long the broker may take to say goodbye.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);
/// A message that waits for a slot goes back when this part of the broker's patience is used up.
const PATIENCE_PARTS: u32 = 3;
/// How often to look whether the connection is there, where a tier does not use it: it may have no
/// consumer that ends with it.
const LOOK_EVERY: Duration = Duration::from_secs(1);

pub(super) struct Group {
    shop: Arc<Workshop>,
    name: String,
    slots: usize,
    order: Order,
    tiers: Vec<Tier>,
    /// Tiers whose channel is being made again, by their index.
    resubscribing: Vec<Option<Resubscribing>>,
    running: HashMap<JobId, Running>,
    next_job: JobId,
    sender: mpsc::UnboundedSender<News>,
    news: mpsc::UnboundedReceiver<News>,
    phase: watch::Receiver<Phase>,
    /// Completes when the shutdown moves on.
    moved_on: Pin<Box<dyn Future<Output = ()> + Send>>,
    hands: Hands,
    /// A message that waits until it can run alone in the process.
    alone: Option<(usize, Held, Claim)>,
    timer: Pin<Box<Sleep>>,
    /// When to look again although nothing happens.
    wake_at: Option<Instant>,
    is_draining: bool,
    /// The connection, while there is one.
    connection: Option<Arc<Connection>>,
    /// Which of the broker's addresses is tried next.
    next_url: usize,
    /// The pauses between connections, made or not. It outlives them: one that is made and lost again
    /// at once must not be made again at once.
    backoff: Backoff,
    /// Used again in every turn.
    supplies: Vec<Supply>,
}

/// Why a group's turns ended.
enum Exit {
    Lost(String),
    Finished,
}

impl Group {
    pub(super) fn new(
        shop: Arc<Workshop>,
        group: &topology::Group,
        phase: watch::Receiver<Phase>,
    ) -> Self {
        let window = group.concurrency.saturating_mul(group.prefetch);
        let specs = group
            .tiers
            .iter()
            .filter_map(|name| shop.topology.tier(name));
        let weights = specs.clone().map(|tier| tier.weight.unwrap_or(1.0));
        let order = Order::new(group.order, weights);
        let tiers: Vec<_> = specs
            .map(|tier| {
                let queue = shop.topology.names().queue(tier);
                Tier::new(tier.name.clone(), queue, window)
            })
            .collect();
        let (sender, news) = mpsc::unbounded_channel();
        Self {
            name: group.name.clone(),
            slots: group.concurrency.into(),
            order,
            resubscribing: tiers.iter().map(|_| None).collect(),
            supplies: Vec::with_capacity(tiers.len()),
            tiers,
            running: HashMap::new(),
            next_job: 0,
            sender,
            news,
            moved_on: Box::pin(moved_on(phase.clone())),
            phase,
            hands: Hands::new(&shop.gate),
            alone: None,
            timer: Box::pin(tokio::time::sleep(Duration::ZERO)),
            wake_at: None,
            is_draining: false,
            connection: None,
            next_url: 0,
            backoff: Backoff::new(),
            shop,
        }
    }

    /// Works until the shutdown is over.
    pub(super) async fn run(mut self) {
        while let Some(connection) = self.connect().await {
            let connection = Arc::new(connection);
            self.connection = Some(connection.clone());
            let connected_at = Instant::now();
            self.subscribe(&connection).await;
            let exit = poll_fn(|cx| self.turn(&connection, cx)).await;
            match exit {
                Exit::Lost(cause) => {
                    self.connection = None;
                    // A node that is frozen takes connections and says nothing: another comes first.
                    self.next_url += 1;
                    tracing::warn!(group = self.name, cause, "the connection is lost");
                    let purpose = Purpose::Work;
                    let cause = &cause;
                    self.shop
                        .observers
                        .emit(&Event::Disconnected { purpose, cause });
                    self.set_apart_after_loss();
                    for tier in 0..self.tiers.len() {
                        self.lose(tier);
                    }
                    self.hands.leave();
                    let pause = self.backoff.next_after(connected_at.elapsed());
                    if self.unless_left(sleep(pause)).await.is_none() {
                        return;
                    }
                }
                Exit::Finished => {
                    self.connection = None;
                    // What still runs was waited for long enough, and goes back to the broker.
                    self.abort_all();
                    let _ = timeout(CLOSE_LIMIT, self.close(connection)).await;
                    return;
                }
            }
        }
    }

    fn turn(&mut self, connection: &Arc<Connection>, cx: &mut Context<'_>) -> Poll<Exit> {
        loop {
            let is_quiet = !self.take_news(cx);
            self.drain_if_told(cx);
            let mut is_due = false;
            for tier in 0..self.tiers.len() {
                let taken = self.take_deliveries(tier, cx);
                let answered = self.tiers[tier].poll_answer(cx);
                is_due |= answered.is_ready();
                let answered = match answered {
                    Poll::Ready(answered) => answered,
                    Poll::Pending => Ok(()),
                };
                if let Err(cause) = taken.and(answered) {
                    if !connection.is_open() {
                        return Poll::Ready(Exit::Lost(cause));
                    }
                    self.interrupted(tier, &cause);
                    if !self.is_draining {
                        let after = self.tiers[tier].pause_after_loss();
                        self.resubscribing[tier] = Some(self.resubscribe(tier, connection, after));
                    }
                }
                self.poll_resubscribing(tier, cx);
            }
            if !connection.is_open() {
                let cause = "the connection was closed".to_owned();
                return Poll::Ready(Exit::Lost(cause));
            }
            let mut is_gathering = false;
            for tier in &mut self.tiers {
                // At the end there may be no next turn to leave anything for.
                is_gathering |= tier.flush(is_quiet || self.is_draining);
            }
            self.empty_hands(cx);
            if self.is_draining {
                if self.running.is_empty() || *self.phase.borrow() >= Phase::Leave {
                    return Poll::Ready(Exit::Finished);
                }
            } else {
                self.give_slots_away(cx);
                self.look_after_consumers();
            }
            is_due |= self.tiers.iter().any(Tier::has_new_question);
            if !is_due && !self.is_time(cx) {
                if is_gathering {
                    // After the jobs that were begun in this turn.
                    cx.waker().wake_by_ref();
                }
                return Poll::Pending;
            }
        }
    }

    /// Has the broker asked after consumers from which nothing was heard for long.
    fn look_after_consumers(&mut self) {
        for tier in &mut self.tiers {
            let connection = tier.is_apart.then(|| Instant::now() + LOOK_EVERY);
            for next in tier.look_after().into_iter().chain(connection) {
                self.wake_at = Some(self.wake_at.map_or(next, |other| other.min(next)));
            }
        }
    }

    /// Whether it is time to look again.
    fn is_time(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(wake_at) = self.wake_at else {
            return false;
        };
        // The time moves with nearly every turn. Setting the timer has its price, so it is left
        // alone where it only comes too early.
        if wake_at < self.timer.deadline() {
            self.timer.as_mut().reset(wake_at);
        }
        while self.timer.as_mut().poll(cx).is_ready() {
            if Instant::now() >= wake_at {
                self.wake_at = None;
                return true;
            }
            self.timer.as_mut().reset(wake_at);
        }
        false
    }

    /// Begins no more, and gives back what has not begun.
    fn drain_if_told(&mut self, cx: &mut Context<'_>) {
        while self.moved_on.as_mut().poll(cx).is_ready() {
            self.moved_on = Box::pin(moved_on(self.phase.clone()));
        }
        if self.is_draining || *self.phase.borrow() < Phase::Drain {
            return;
        }
        self.is_draining = true;
        self.wake_at = None;
        self.resubscribing.fill_with(|| None);
        if let Some((tier, held, _)) = self.alone.take() {
            self.tiers[tier].buffer.push_back(held);
        }
        for tier in &mut self.tiers {
            if let Some(subscription) = &mut tier.subscription {
                subscription.cancel();
            }
        }
    }

    /// Whether there were any.
    fn take_news(&mut self, cx: &mut Context<'_>) -> bool {
        let mut is_any = false;
        while let Poll::Ready(Some(news)) = self.news.poll_recv(cx) {
            self.hear(news);
            is_any = true;
        }
        is_any
    }

    fn take_deliveries(&mut self, tier: usize, cx: &mut Context<'_>) -> Result<(), String> {
        let Some(state) = self.tiers.get_mut(tier) else {
            return Ok(());
        };
        while let Some(subscription) = &mut state.subscription
            && let Poll::Ready(delivery) = subscription.poll(cx)
        {
            let (delivery, repaired) = delivery?;
            let (running, generation) = (&mut self.running, state.generation);
            state.receive(delivery, repaired, |package, tag| {
                adopt(running, tier, generation, package, tag)
            });
        }
        state.looked();
        if self.is_draining || self.hands.must_be_empty() {
            self.send_suspects_around(tier);
        }
        if self.is_draining {
            self.tiers[tier].give_back_waiting(Instant::now());
        }
        Ok(())
    }

    fn give_slots_away(&mut self, cx: &mut Context<'_>) {
        let mut wake_at = self.give_back_starved();
        if let Some((tier, held, claim)) = self.alone.take() {
            match claim.grant(cx.waker()) {
                Ok(pass) => self.start(tier, held, Kind::Run, Some(pass)),
                Err(claim) if claim.since().elapsed() >= self.patience() => {
                    self.start(tier, held, Kind::SendAround, None);
                }
                Err(claim) => {
                    let latest = claim.since() + self.patience();
                    let next = claim.late_at().unwrap_or(latest).min(latest);
                    wake_at = Some(wake_at.map_or(next, |other| other.min(next)));
                    self.alone = Some((tier, held, claim));
                }
            }
        }
        while self.alone.is_none() && self.running.len() < self.slots {
            self.supplies.clear();
            self.supplies
                .extend(self.tiers.iter_mut().map(Tier::supply));
            let free = self.slots - self.running.len();
            match self.order.next(free, &self.supplies) {
                Turn::Take(tier) => {
                    if !self.take(tier) {
                        break;
                    }
                }
                Turn::Hold(tier) => match self.tiers[tier].hold() {
                    Some(until) => {
                        wake_at = Some(wake_at.map_or(until, |other| other.min(until)));
                        break;
                    }
                    None => continue,
                },
                Turn::Idle => break,
            }
        }
        self.wake_at = wake_at;
    }

    /// Does with the tier's next message what is to be done; whether slots can go on being given.
    fn take(&mut self, tier: usize) -> bool {
        let Some(held) = self.tiers[tier].buffer.pop_front() else {
            return false;
        };
        if held.is_suspect {
            self.start(tier, held, Kind::Suspect, None);
            return true;
        }
        if held.crashes >= ALONE_FROM {
            match self.shop.gate.claim() {
                Some(claim) => self.alone = Some((tier, held, claim)),
                None => self.start(tier, held, Kind::SendAround, None),
            }
            return true;
        }
        match self.shop.gate.enter(held.crashes) {
            Some(pass) => {
                self.start(tier, held, Kind::Run, Some(pass));
                true
            }
            None => {
                self.tiers[tier].buffer.push_front(held);
                false
            }
        }
    }

    /// How long a message may wait in hand.
    fn patience(&self) -> Duration {
        self.shop.topology.broker().ack_timeout / PATIENCE_PARTS
    }

    /// Gives back what has waited so long that the broker might lose patience; when the next will
    /// have.
    fn give_back_starved(&mut self) -> Option<Instant> {
        let patience = self.patience();
        let now = Instant::now();
        let mut next: Option<Instant> = None;
        for index in 0..self.tiers.len() {
            let is_late = |oldest: Instant| now.duration_since(oldest) >= patience;
            if self.tiers[index].oldest().is_some_and(is_late) {
                // Whoever got them would count them once more.
                self.send_suspects_around(index);
                let back = self.tiers[index].give_back_waiting(now - patience / 2);
                tell_given_back(&self.shop, &back);
            }
            if let Some(oldest) = self.tiers[index].oldest() {
                let due = oldest + patience;
                next = Some(next.map_or(due, |other| other.min(due)));
            }
        }
        next
    }
}

fn tell_given_back(shop: &Workshop, back: &[Held]) {
    let why = "no slot was free for it before the broker's ack timeout drew near";
    for held in back {
        let now = std::time::SystemTime::now();
        let message: Option<Message> = held.package.open(now).ok();
        if let Some(message) = &message {
            let task = job::task_ref(message);
            shop.observers.emit(&Event::GivenBack { task, why });
        }
    }
}

/// Completes when it changes.
fn moved_on<T: Send + Sync + 'static>(
    mut it: watch::Receiver<T>,
) -> impl Future<Output = ()> + Send + use<T> {
    it.mark_unchanged();
    async move {
        if it.changed().await.is_err() {
            // The worker is gone, and with it this group.
            std::future::pending().await
        }
    }
}
