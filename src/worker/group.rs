//! One group at work: receive, settle, assign slots, and again.
//!
//! A group is one task that acts in ticks. Handlers run in tasks of their own, so a slow one holds up no tick.

use std::collections::HashMap;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::future::{BoxFuture, join_all};
use tokio::runtime::Handle as Runtime;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, Sleep, timeout};
use tokio_util::task::AbortOnDropHandle;

use super::gates::{Permits, TierGates, changed};
use super::job::{self, JobEvent, JobKey};
use super::order::{Choice, Order};
use super::transactions::GroupTransactions;
use super::{Phase, Shared};
use crate::control::Snapshot;
use crate::message::Received;
use crate::observe::{Event, Observers};
#[cfg(feature = "postgres")]
use crate::rollup::RunningTask;
use crate::source::{Delivery, Next, Source, Supply};
use crate::topology;

/// How often it is said that a limit holds back a tier, while it does.
const LIMITED_EVERY: Duration = Duration::from_secs(1);
/// How long sources may take to close.
const CLOSE_LIMIT: Duration = Duration::from_secs(2);
/// How long handlers may take to be dropped before their messages go back to the broker. One that does
/// not yield cannot be dropped.
const DROP_LIMIT: Duration = Duration::from_secs(5);

pub(super) struct Group {
    shared: Arc<Shared>,
    group: topology::Group,
    transactions: GroupTransactions,
    slots: usize,
    order: Order,
    tiers: usize,
    /// From which source on to look for the next delivery of each tier.
    next_source: Vec<usize>,
    sources: Vec<Box<dyn Source>>,
    /// Deliveries that were taken: each has a handler that runs, or its successor is being stored.
    running: HashMap<JobKey, Job>,
    /// How many slots have a handler. Storing takes no slot: while the broker is slow to store what follows in a
    /// lower tier, a higher one goes on.
    handlers: usize,
    sender: mpsc::UnboundedSender<JobEvent>,
    events: mpsc::UnboundedReceiver<JobEvent>,
    phase: watch::Receiver<Phase>,
    phase_changed: BoxFuture<'static, ()>,
    /// What operators have paused.
    controls: watch::Receiver<Arc<Snapshot>>,
    controls_changed: BoxFuture<'static, ()>,
    /// Which tiers are paused, by their index.
    paused: Vec<bool>,
    /// Which tiers are at their limit.
    gates: TierGates,
    /// When it was last said that the limit of a tier holds it back.
    limited_at: Vec<Option<Instant>>,
    timer: Pin<Box<Sleep>>,
    /// When to tick although nothing has happened.
    wake_at: Option<Instant>,
    is_draining: bool,
    /// Used again in every tick.
    supplies: Vec<Supply>,
}

enum Job {
    Handler(Running),
    Settling,
}

struct Running {
    /// The handler is dropped with this.
    handler: AbortOnDropHandle<()>,
    permits: Permits,
    tier: usize,
    received: Arc<Received>,
    /// Counts it as running.
    #[cfg(feature = "postgres")]
    _counted: Option<RunningTask>,
}

impl Group {
    pub(super) fn new(
        shared: Arc<Shared>,
        group: &topology::Group,
        phase: watch::Receiver<Phase>,
    ) -> Self {
        let topology = &shared.settings.topology;
        let tiers = group.tiers.iter().filter_map(|name| topology.tier(name));
        let weights = tiers.map(|tier| tier.weight.unwrap_or(1.0));
        let order = Order::new(group.order, weights);
        let controls = shared.settings.controls.changes();
        let (sender, events) = mpsc::unbounded_channel();
        let mut working = Self {
            transactions: GroupTransactions::new(&shared.settings, group),
            slots: group.concurrency.into(),
            order,
            tiers: group.tiers.len(),
            next_source: vec![0; group.tiers.len()],
            sources: shared.sources(group),
            running: HashMap::new(),
            handlers: 0,
            sender,
            events,
            phase_changed: changed(phase.clone()),
            phase,
            controls_changed: changed(controls.clone()),
            controls,
            paused: vec![false; group.tiers.len()],
            gates: TierGates::new(&shared.settings.limits, &group.tiers),
            limited_at: vec![None; group.tiers.len()],
            timer: Box::pin(tokio::time::sleep(Duration::ZERO)),
            wake_at: None,
            is_draining: false,
            supplies: Vec::with_capacity(group.tiers.len()),
            group: group.clone(),
            shared,
        };
        working.apply_controls();
        working
    }

    /// Works until the shutdown is over.
    pub(super) async fn run(mut self) {
        let shared = self.shared.clone();
        let _observed = ObservedGroup::started(&shared.settings.observers, &self.group);
        poll_fn(|cx| self.tick(cx)).await;
        // What still runs was waited for long enough, and goes back to the broker.
        for job in self.running.values() {
            if let Job::Handler(running) = job {
                running.handler.abort();
            }
        }
        let closing = std::mem::take(&mut self.sources);
        let closing = join_all(closing.into_iter().map(Source::close));
        let _ = timeout(CLOSE_LIMIT, closing).await;
    }

    fn tick(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let is_quiet = !self.handle_job_events(cx);
            self.drain_if_asked(cx);
            self.pause_if_asked(cx);
            if self.gates.poll(&self.group.tiers, cx) {
                self.count_running();
            }
            for index in 0..self.sources.len() {
                while let Poll::Ready(settled) = self.sources[index].poll(cx) {
                    self.running.remove(&(index, settled));
                }
            }
            let mut is_gathering = false;
            for source in &mut self.sources {
                // At the end there may be no next tick to leave anything for.
                is_gathering |= source.flush(is_quiet || self.is_draining);
            }
            let mut wake_at = None;
            let mut is_stale = false;
            if self.is_draining {
                let is_drained = || self.sources.iter().all(|source| source.is_drained());
                if *self.phase.borrow() >= Phase::Leave || self.running.is_empty() && is_drained() {
                    return Poll::Ready(());
                }
            } else {
                (wake_at, is_stale) = self.assign_slots(cx);
            }
            let due = self.sources.iter().filter_map(|source| source.wake_at());
            self.wake_at = due.chain(wake_at).min();
            if !is_stale && !self.is_time(cx) {
                if is_gathering {
                    // After the jobs that were started in this tick.
                    cx.waker().wake_by_ref();
                }
                return Poll::Pending;
            }
        }
    }

    /// Whether there were any.
    fn handle_job_events(&mut self, cx: &mut Context<'_>) -> bool {
        let mut is_any = false;
        while let Poll::Ready(Some(event)) = self.events.poll_recv(cx) {
            is_any = true;
            self.settle(event);
        }
        is_any
    }

    fn settle(&mut self, event: JobEvent) {
        let JobEvent {
            key,
            next,
            has_started,
        } = event;
        // A hung handler whose slot went on without it may end after all.
        if !matches!(self.running.get(&key), Some(Job::Handler(..))) {
            return;
        }
        self.handlers -= 1;
        let (source, handle) = key;
        let ended = match next {
            Next::Done(_) => self.running.remove(&key),
            _ => self.running.insert(key, Job::Settling),
        };
        if let Some(Job::Handler(running)) = ended
            && !has_started
        {
            running.permits.give_back();
        }
        self.sources[source].settle(handle, next);
    }

    /// Gives free slots to tiers in the group's order. Returns when to look again, and whether a source has
    /// changed since it was polled.
    fn assign_slots(&mut self, cx: &mut Context<'_>) -> (Option<Instant>, bool) {
        let mut wake_at: Option<Instant> = None;
        while self.handlers < self.slots {
            wake_at = [wake_at, self.ask_supplies()].into_iter().flatten().min();
            let free = self.slots - self.handlers;
            match self.order.next(free, &self.supplies) {
                Choice::Take(tier) => {
                    if !self.take(tier) {
                        return (wake_at, true);
                    }
                }
                Choice::Hold(tier) => {
                    let mut until = None;
                    for source in sources_of(&mut self.sources, tier) {
                        if let Supply::Coming(_) = source.supply() {
                            until = until.max(source.hold(cx));
                        }
                    }
                    match until {
                        Some(until) => {
                            wake_at = Some(wake_at.map_or(until, |other| other.min(until)));
                            break;
                        }
                        None => continue,
                    }
                }
                Choice::Idle => break,
            }
        }
        (wake_at, false)
    }

    /// Counts what runs at the gates of limits that there were not when it started.
    fn count_running(&mut self) {
        for job in self.running.values_mut() {
            if let Job::Handler(running) = job {
                let task = running.received.task();
                running
                    .permits
                    .count_running(&self.gates, running.tier, task);
            }
        }
    }

    /// Follows what operators pause and resume.
    fn pause_if_asked(&mut self, cx: &mut Context<'_>) {
        let mut has_changed = false;
        while self.controls_changed.as_mut().poll(cx).is_ready() {
            has_changed = true;
            self.controls_changed = changed(self.controls.clone());
        }
        if has_changed {
            self.apply_controls();
        }
    }

    fn apply_controls(&mut self) {
        let controls = self.controls.borrow_and_update().clone();
        for (index, tier) in self.group.tiers.iter().enumerate() {
            let is_paused = controls.is_paused(&self.group.name, tier);
            if std::mem::replace(&mut self.paused[index], is_paused) == is_paused {
                continue;
            }
            let group = self.group.name.as_str();
            let observers = &self.shared.settings.observers;
            match is_paused {
                true => {
                    tracing::info!(group, tier, "paused");
                    observers.emit(&Event::Paused { group, tier });
                }
                false => {
                    tracing::info!(group, tier, "resumed");
                    observers.emit(&Event::Resumed { group, tier });
                }
            }
            for source in sources_of(&mut self.sources, index) {
                source.set_paused(is_paused);
            }
        }
    }

    /// What each tier can give: the best of its sources. Returns when one that is at its limit may start its next.
    fn ask_supplies(&mut self) -> Option<Instant> {
        self.supplies.clear();
        self.supplies.resize(self.tiers, Supply::Empty);
        for source in &mut self.sources {
            // A paused tier is empty, and holds up no other.
            let Some(tier) = source.tier().filter(|tier| !self.paused[*tier]) else {
                continue;
            };
            let supply = &mut self.supplies[tier];
            *supply = match (*supply, source.supply()) {
                (Supply::Ready, _) | (_, Supply::Ready) => Supply::Ready,
                (Supply::Coming(one), Supply::Coming(other)) => Supply::Coming(one + other),
                (Supply::Coming(some), Supply::Empty) | (Supply::Empty, Supply::Coming(some)) => {
                    Supply::Coming(some)
                }
                (Supply::Empty, Supply::Empty) => Supply::Empty,
            };
        }
        let mut next: Option<Instant> = None;
        for (tier, supply) in self.supplies.iter_mut().enumerate() {
            let is_ready = *supply == Supply::Ready;
            if *supply == Supply::Empty {
                continue;
            }
            // A tier at its limit is empty, and holds up no other.
            *supply = match (self.gates.startable(tier, is_ready), *supply) {
                (0, _) => Supply::Empty,
                (startable, Supply::Coming(number)) => Supply::Coming(number.min(startable)),
                (_, other) => other,
            };
            if is_ready && *supply == Supply::Empty {
                next = next.into_iter().chain(self.gates.next_at(tier)).min();
                let observers = &self.shared.settings.observers;
                let said_at = &mut self.limited_at[tier];
                if !observers.is_empty() && said_at.is_none_or(|at| at.elapsed() >= LIMITED_EVERY) {
                    *said_at = Some(Instant::now());
                    let (group, tier) = (self.group.name.as_str(), &*self.group.tiers[tier]);
                    observers.emit(&Event::Limited { group, tier });
                }
            }
        }
        next
    }

    /// Starts the tier's next delivery; whether there was one.
    fn take(&mut self, tier: usize) -> bool {
        let Ok(permit) = self.gates.try_start(tier) else {
            // Another group or worker of the process was faster.
            return false;
        };
        // Sources of one tier take turns: a queue that is never empty must not hold up the tier's rows.
        let (number, first) = (self.sources.len(), self.next_source[tier]);
        for index in (0..number).map(|step| (first + step) % number) {
            let source = &mut self.sources[index];
            if source.tier() != Some(tier) || source.supply() != Supply::Ready {
                continue;
            }
            self.next_source[tier] = index + 1;
            let Some(Delivery {
                handle,
                received,
                permit: task_permit,
                lease,
            }) = source.take()
            else {
                break;
            };
            let key = (index, handle);
            let (shared, sender) = (self.shared.clone(), self.sender.clone());
            let transactions = self.transactions.clone();
            let handler = job::start(shared, transactions, received.clone(), lease, key, sender);
            let running = Running {
                handler,
                permits: Permits::new(permit, task_permit),
                tier,
                received,
                #[cfg(feature = "postgres")]
                _counted: self.count_as_running(tier),
            };
            self.running.insert(key, Job::Handler(running));
            self.handlers += 1;
            return true;
        }
        if let Some(permit) = permit {
            permit.give_back();
        }
        false
    }

    #[cfg(feature = "postgres")]
    fn count_as_running(&self, tier: usize) -> Option<RunningTask> {
        let tier = self.group.tiers.get(tier)?;
        self.shared.settings.recorder.as_ref()?.run(tier)
    }

    /// Begins no more, and puts back what has not begun.
    fn drain_if_asked(&mut self, cx: &mut Context<'_>) {
        while self.phase_changed.as_mut().poll(cx).is_ready() {
            self.phase_changed = changed(self.phase.clone());
        }
        if self.is_draining || *self.phase.borrow() < Phase::Drain {
            return;
        }
        self.is_draining = true;
        for source in &mut self.sources {
            source.drain();
        }
    }

    /// Whether it is time to look again.
    fn is_time(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(wake_at) = self.wake_at else {
            return false;
        };
        // The time moves with nearly every tick. Setting the timer has its price, so it is left
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
}

/// Emits that a group is worked for, and then that it is not any more, also if the worker is dropped or panics.
struct ObservedGroup<'a> {
    observers: &'a Observers,
    group: String,
    slots: usize,
}

impl<'a> ObservedGroup<'a> {
    fn started(observers: &'a Observers, group: &topology::Group) -> Self {
        let observed = Self {
            observers,
            group: group.name.clone(),
            slots: group.concurrency.into(),
        };
        let (group, slots) = (observed.group.as_str(), observed.slots);
        observers.emit(&Event::GroupStarted { group, slots });
        observed
    }
}

impl Drop for ObservedGroup<'_> {
    fn drop(&mut self) {
        let (group, slots) = (self.group.as_str(), self.slots);
        self.observers.emit(&Event::GroupEnded { group, slots });
    }
}

impl Drop for Group {
    /// Drops all handlers, and only then the channels: no other worker may run the messages before.
    fn drop(&mut self) {
        let running = std::mem::take(&mut self.running);
        let sources = std::mem::take(&mut self.sources);
        let Ok(runtime) = Runtime::try_current() else {
            return;
        };
        runtime.spawn(async move {
            let ending = running.into_values().map(|job| async move {
                if let Job::Handler(Running {
                    handler,
                    permits: _permits,
                    ..
                }) = job
                {
                    handler.abort();
                    let _ = handler.await;
                }
            });
            let _ = timeout(DROP_LIMIT, join_all(ending)).await;
            drop(sources);
        });
    }
}

fn sources_of(
    sources: &mut [Box<dyn Source>],
    tier: usize,
) -> impl Iterator<Item = &mut Box<dyn Source>> {
    let is_of_tier = move |source: &&mut Box<dyn Source>| source.tier() == Some(tier);
    sources.iter_mut().filter(is_of_tier)
}
