//! A tier's rows as a source.
//!
//! `signalled` applies what the tasks that serve all tiers found out, `claims` asks the database for rows and tells it what is
//! done, `unsettled` is a row that was claimed, `waiting` has those that wait for a slot, `parked` knows which rows may not run
//! now, `lanes` moves and claims them, `quarantine` takes suspects, and `settle` stores what follows on runs.

mod claims;
mod lanes;
mod parked;
mod quarantine;
mod settle;
mod signalled;
mod unsettled;
mod waiting;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use futures_util::future::BoxFuture;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio::time::{Instant, timeout};

use self::parked::Parked;
pub(crate) use self::parked::RowToPark;
pub(super) use self::unsettled::PendingDeadLetter;
use self::unsettled::{State, Unsettled};
use self::waiting::Waiting;
use super::RowSettings;
use super::signal::TierSignal;
use super::statements::{Claim, Statement, Statements};
use crate::Error;
use crate::backlog::{Batch, Later, RankStart, RunKey};
use crate::backoff::Backoff;
use crate::completion::RunningRow;
use crate::source::{Delivery, Handle, LeasedRun, Next, Source, Supply};
use crate::task::{Cancellation, TaskEnding};
use crate::topology;

/// How many statements of a tier may be under way at once.
const CONNECTIONS: usize = 3;
/// How long a handler runs before it is marked as begun. Most end sooner, and need no mark.
const MARK_AFTER: Duration = Duration::from_millis(5);
/// How long lower tiers wait for an answer of the database.
const LONGEST_HOLD: Duration = Duration::from_millis(300);
/// How long lower tiers wait for the first answer.
const FIRST_ANSWER: Duration = Duration::from_secs(3);
/// How long a shutdown waits for a database that does not answer.
const DRAIN_LIMIT: Duration = Duration::from_secs(3);
/// The highest priority up to which every claim looks at all priorities.
const FEW_PRIORITIES: u8 = 15;
/// When to look for rows that a claim without an answer may have left with this process.
const RELEASE_AFTER: [Duration; 5] = [
    Duration::ZERO,
    Duration::from_secs(10),
    Duration::from_secs(60),
    Duration::from_secs(300),
    Duration::from_secs(1_800),
];
/// When a group that is made anew after a panic puts back what the one before held: its handlers have ended by the first
/// time, and its statements by the second.
const RELEASE_AFTER_PANIC: [Duration; 2] = [Duration::from_secs(6), Duration::from_secs(20)];
/// How long a suspect may wait for a slot, before those of other tiers have their turn.
const SUSPECT_PATIENCE: Duration = Duration::from_secs(1);

/// The rows of a tier.
pub(crate) struct Rows {
    settings: Arc<RowSettings>,
    group: String,
    tier: usize,
    name: Arc<str>,
    window: usize,
    ttl: Option<Duration>,
    /// The name of this worker, if the tier keeps its tasks.
    keeper: Option<Arc<str>>,
    /// Whether the tier lives in Postgres, and not on the broker.
    is_home: bool,
    signal: Arc<TierSignal>,
    /// This process, as the database knows it.
    worker: Option<i64>,
    generation: u64,
    /// Cancelled when what was claimed is lost, and made anew then.
    lease: Cancellation,
    statements: Statements,
    /// Where each rank's rows begin, by rank.
    starts: Vec<RankStart>,
    /// How many rows the claims under way ask for.
    claiming: usize,
    /// When the next scheduled task falls due, as far as is known here.
    next_due: Option<Instant>,
    is_making_ready: bool,
    /// Whether a claim may find something.
    expects_more: bool,
    /// Whether rows came while a claim was under way, which it may not have seen.
    is_woken: bool,
    /// The rank of the first ready row that is left, as far as is known.
    ready_rank: Option<i16>,
    /// Until when the group waits for an answer.
    hold_until: Option<Instant>,
    first_answer_by: Option<Instant>,
    /// What waits for a slot, in the order of the tier.
    prefetched: Waiting,
    /// What is known of rows that may not run now.
    parked: Parked,
    prefetched_bytes: usize,
    /// How many bytes the claims under way ask for.
    claiming_bytes: usize,
    unsettled: HashMap<Handle, Unsettled>,
    next_handle: Handle,
    /// Runs that are done, and not yet in the database, with how their tasks ended.
    done: Vec<(RunKey, Option<TaskEnding>)>,
    /// Runs that began, in order, and are not marked as begun. Some may have ended meanwhile.
    unmarked: VecDeque<(Instant, Handle)>,
    gathering_since: Option<Instant>,
    beginning: Vec<(RunKey, oneshot::Sender<bool>)>,
    back: Vec<(Handle, RunKey)>,
    later: Vec<(Handle, Later)>,
    dead: Vec<PendingDeadLetter>,
    /// Whether dead letters are being stored.
    is_storing_dead: bool,
    /// Answers of tasks that go to the broker.
    stored: mpsc::UnboundedReceiver<(Handle, Forwarded)>,
    sender: mpsc::UnboundedSender<(Handle, Forwarded)>,
    settled: VecDeque<Handle>,
    quarantine: Quarantine,
    /// When to look for rows that nobody here knows of.
    release_at: VecDeque<Instant>,
    /// Whether such rows are being put back. What is claimed meanwhile would be put back too.
    is_releasing: bool,
    backoff: Backoff,
    /// When to ask a database again that failed.
    retry_at: Option<Instant>,
    /// Whether the last answer was a failure: no other tier waits for this one then.
    is_failing: bool,
    /// How many claims were sent.
    claims_sent: u64,
    drain_by: Option<Instant>,
    is_paused: bool,
}

/// The key that a tier's rows are ordered by: its rank, its due time, its id. A row may be here twice: with a claim that
/// was lost, and with the one after it.
type OrderKey = (i16, SystemTime, RunKey);

/// Whether the next attempt of a task is on the broker.
enum Forwarded {
    /// It is, and the run is to be ended.
    Yes,
    /// The run belongs to another process, as far as is known.
    NotOurs,
    No(Error),
}

/// The one suspect that this process takes from the tier's quarantine.
enum Quarantine {
    /// It has no task, as far as this process knows.
    Empty,
    /// It has a task; waits for the right to take one.
    Waiting(BoxFuture<'static, Option<OwnedSemaphorePermit>>),
    /// May claim one.
    Permitted(OwnedSemaphorePermit),
    /// A claim is under way.
    Claiming(OwnedSemaphorePermit),
    /// One is here since then, and waits or runs.
    Held(Handle, Instant),
}

impl Rows {
    /// The rows of the group's tier with this index. At most `window` are claimed and not settled.
    pub(crate) fn new(
        settings: &Arc<RowSettings>,
        group: &str,
        index: usize,
        name: &str,
        slots: usize,
        window: usize,
    ) -> Option<Self> {
        let served = settings.tiers.get(name)?;
        let tier = settings.consumer.topology.tier(name)?;
        let highest = tier
            .home
            .max_priority()
            .unwrap_or(topology::UNORDERED_PRIORITY);
        let few = highest.min(FEW_PRIORITIES);
        let starts = (0..=i16::from(few)).rev().map(|priority| RankStart {
            rank: -priority,
            since: None,
        });
        let (sender, stored) = mpsc::unbounded_channel();
        let now = Instant::now();
        let name: Arc<str> = name.into();
        Some(Self {
            group: group.to_owned(),
            tier: index,
            window,
            ttl: tier.ttl,
            keeper: settings.keeper(&name).map(Arc::from),
            is_home: served.is_home,
            signal: served.signal.clone(),
            worker: None,
            generation: 0,
            lease: settings.cancelled.child(),
            statements: Statements::new(settings, &name, CONNECTIONS),
            starts: starts.collect(),
            claiming: 0,
            next_due: None,
            is_making_ready: false,
            // Few tiers on the broker have rows: a look tells of them.
            expects_more: served.is_home,
            is_woken: false,
            ready_rank: None,
            hold_until: None,
            first_answer_by: served.is_home.then_some(now + FIRST_ANSWER),
            prefetched: Waiting::default(),
            parked: settings.parked(&name, slots),
            prefetched_bytes: 0,
            claiming_bytes: 0,
            unsettled: HashMap::new(),
            next_handle: 0,
            done: Vec::new(),
            unmarked: VecDeque::new(),
            gathering_since: None,
            beginning: Vec::new(),
            back: Vec::new(),
            later: Vec::new(),
            dead: Vec::new(),
            is_storing_dead: false,
            stored,
            sender,
            settled: VecDeque::new(),
            quarantine: Quarantine::Empty,
            release_at: match served.signal.is_served_again() {
                true => RELEASE_AFTER_PANIC.map(|after| now + after).into(),
                false => VecDeque::new(),
            },
            is_releasing: false,
            backoff: Backoff::new(),
            retry_at: None,
            is_failing: false,
            claims_sent: 0,
            drain_by: None,
            is_paused: false,
            name,
            settings: settings.clone(),
        })
    }

    /// Changes how many rows are claimed and not settled at most. What is above it stays.
    pub(crate) fn set_window(&mut self, window: usize) {
        self.window = window;
    }

    /// Puts everything back that has not begun, and takes no suspect from the quarantine.
    fn put_prefetched_back(&mut self) {
        self.quarantine = match std::mem::replace(&mut self.quarantine, Quarantine::Empty) {
            held @ (Quarantine::Held(..) | Quarantine::Claiming(_)) => held,
            _ => Quarantine::Empty,
        };
        for handle in self.prefetched.drain() {
            self.put_back(handle);
        }
    }

    /// Whether the database can be asked, as far as is known.
    fn is_up(&self) -> bool {
        self.worker.is_some() && !self.is_failing
    }
}

impl Source for Rows {
    fn tier(&self) -> Option<usize> {
        Some(self.tier)
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Handle> {
        let signalled = self.signal.take(cx.waker());
        self.apply_signal(signalled);
        self.follow_controls();
        while let Poll::Ready(answer) = self.statements.poll_answer(cx) {
            self.answered(answer);
        }
        while let Poll::Ready(Some((handle, stored))) = self.stored.poll_recv(cx) {
            self.stored(handle, stored);
        }
        self.poll_quarantine(cx);
        self.give_up_settling();
        match self.settled.pop_front() {
            Some(handle) => Poll::Ready(handle),
            None => Poll::Pending,
        }
    }

    fn wake_at(&self) -> Option<Instant> {
        // What follows on an answer is begun when it comes.
        let is_idle = self.statements.under_way() == 0 && self.retry_at.is_none();
        let mark = self.unmarked.front().map(|(since, _)| *since + MARK_AFTER);
        let mark = mark.filter(|_| is_idle && self.worker.is_some());
        let release = self.release_at.front().copied();
        let release = release.filter(|_| is_idle && self.worker.is_some());
        let is_serving = self.worker.is_some() && self.drain_by.is_none();
        let due = self.next_due.filter(|_| is_idle && is_serving);
        let now = Instant::now();
        // What was taken after the last flush.
        let begin = (!self.beginning.is_empty() && is_idle).then_some(now);
        let suspect = match self.quarantine {
            Quarantine::Held(_, since) => Some(since + SUSPECT_PATIENCE),
            _ => None,
        };
        let ends = [self.drain_by, self.hold_until, suspect]
            .into_iter()
            .flatten();
        let opens = self.prefetched.opens_at();
        let others = [self.retry_at, release, mark, begin, due, opens];
        let others = others.into_iter().flatten();
        ends.filter(|at| *at > now).chain(others).min()
    }

    fn supply(&mut self) -> Supply {
        if self.prefetched.is_ready() {
            return Supply::Ready;
        }
        let room = self.window.saturating_sub(self.unsettled.len());
        if self.first_answer_by.is_some_and(|by| Instant::now() < by) {
            return Supply::Coming(room);
        }
        let parked = &self.parked;
        let is_fair = parked.gating.is_fair();
        let may_come = self.expects_more
            || self.claiming > 0
            || parked.is_coming
            || is_fair && (parked.is_sweeping || parked.must_sweep);
        let is_coming = self.is_up() && may_come && room > 0;
        let is_late = self.hold_until.is_some_and(|until| Instant::now() >= until);
        match is_coming && !is_late {
            true => Supply::Coming(room),
            false => Supply::Empty,
        }
    }

    fn take(&mut self) -> Option<Delivery> {
        let (handle, permit) = self.prefetched.take()?;
        let unsettled = self.unsettled.get_mut(&handle)?;
        self.prefetched_bytes -= unsettled.bytes;
        unsettled.state = State::Taken;
        let mut begin = None;
        if !self.settings.is_relay {
            if unsettled.is_held {
                let (sender, receiver) = oneshot::channel();
                self.beginning.push((unsettled.run, sender));
                begin = Some(receiver);
            } else {
                self.unmarked.push_back((Instant::now(), handle));
            }
            if unsettled.received.crashes() > 0 {
                unsettled._running = Some(self.settings.consumer.suspects.start());
            }
        }
        Some(Delivery {
            handle,
            received: unsettled.received.clone(),
            permit,
            lease: Some(LeasedRun {
                begin,
                lost: self.lease.clone(),
                row: RunningRow {
                    run: unsettled.run,
                    keeper: self.keeper.clone(),
                },
            }),
        })
    }

    fn hold(&mut self, _: &mut Context<'_>) -> Option<Instant> {
        self.begin_statements(true);
        let now = Instant::now();
        if let Some(by) = self.first_answer_by
            && now < by
        {
            return Some(by);
        }
        let until = *self.hold_until.get_or_insert(now + LONGEST_HOLD);
        (now < until).then_some(until)
    }

    fn settle(&mut self, handle: Handle, next: Next) {
        match next {
            Next::Done(ending) => {
                if let Some(unsettled) = self.remove(handle) {
                    self.done.push((unsettled.run, Some(ending)));
                }
            }
            Next::Back => self.put_back(handle),
            next => {
                if let Some(unsettled) = self.unsettled.get_mut(&handle) {
                    unsettled.state = State::Settling;
                }
                self.store(handle, next);
            }
        }
    }

    fn flush(&mut self, is_quiet: bool) -> bool {
        self.begin_statements(is_quiet)
    }

    fn set_paused(&mut self, is_paused: bool) {
        self.is_paused = is_paused;
        match is_paused {
            true => self.put_prefetched_back(),
            // What came meanwhile is not known.
            false => {
                self.expects_more = true;
                self.settings.look_now.notify_one();
            }
        }
    }

    fn drain(&mut self) {
        if self.drain_by.is_some() {
            return;
        }
        self.drain_by = Some(Instant::now() + DRAIN_LIMIT);
        self.put_prefetched_back();
    }

    fn is_drained(&self) -> bool {
        let Some(by) = self.drain_by else {
            return false;
        };
        let is_over = !self.is_up() && Instant::now() >= by;
        let is_idle = self.statements.under_way() == 0 && self.done.is_empty();
        let is_taken = |it: &Unsettled| it.state == State::Taken;
        is_over || (is_idle && self.unsettled.values().all(is_taken))
    }

    fn close(mut self: Box<Self>) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let back: Vec<RunKey> = self.unsettled.values().map(|it| it.run).collect();
            let done = std::mem::take(&mut self.done);
            let Some(worker) = self.worker.filter(|_| !back.is_empty() || !done.is_empty()) else {
                return;
            };
            let batch = Batch {
                done,
                begun: Vec::new(),
                rows: 0,
                bytes: 1,
                ranks: Vec::new(),
            };
            let mut statements = Statements::new(&self.settings, &self.name, 2);
            statements.begin(Statement::Claim(Claim {
                worker,
                ttl: None,
                number: 0,
                generation: self.generation,
                batch,
            }));
            statements.begin(Statement::Back(
                back.into_iter().map(|run| (0, run)).collect(),
            ));
            let answers = std::future::poll_fn(|cx| statements.poll_answer(cx));
            let _ = timeout(Duration::from_secs(1), answers).await;
            let answers = std::future::poll_fn(|cx| statements.poll_answer(cx));
            let _ = timeout(Duration::from_secs(1), answers).await;
        })
    }
}
