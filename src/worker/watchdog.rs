//! Notices handlers that never yield, from a thread of its own.
//!
//! Async code is stopped at its next `await`; a handler that reaches none cannot be stopped at all.
//! Past its hard limit it is given up: its message becomes a dead letter, and the thread it holds is
//! lost. Where handlers hold every thread of the runtime, no thread is left to do even that. The watchdog
//! then reports it, and aborts the process where the app allowed that: the message is a suspect like after
//! any crash.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};
use std::thread;
use std::time::{Duration, Instant};

use crate::observe::{Event, Observers};

/// How often the thread looks.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// How long a handler may go without yielding before it is reported.
const STUCK_AFTER: Duration = Duration::from_secs(5);
/// How long a handler that does not yield may be past its hard limit. An `await` that is about to
/// come would end it in the ordinary way.
const HUNG_MARGIN: Duration = Duration::from_millis(500);
/// How long the runtime may show no sign of life while a handler is past its limit.
const SILENT_AFTER: Duration = Duration::from_secs(3);
/// How often the runtime shows a sign of life.
const BEAT_EVERY: Duration = Duration::from_millis(500);

/// Watches the handlers of a worker, as long as it lives.
#[derive(Debug)]
pub(super) struct Watchdog {
    begin: Instant,
    /// When the runtime last showed a sign of life, in milliseconds since `begin`.
    last_beat: AtomicU64,
    watches: Mutex<HashMap<u64, Arc<Watch>>>,
    next: AtomicU64,
    observers: Observers,
    /// Whether it may end the process.
    may_abort: bool,
    /// Whether it has reported that the runtime hangs, since that last showed a sign of life.
    is_hang_reported: AtomicBool,
}

/// A handler that is watched.
pub(super) struct Watch {
    begin: Instant,
    /// Since when it has not yielded, in milliseconds since `begin`; 0 while it has.
    polled_since: AtomicU64,
    /// When its hard limit is reached, likewise.
    hard_limit: u64,
    is_reported: AtomicBool,
    is_hung: AtomicBool,
    report: Box<dyn Fn(Report) + Send + Sync>,
}

/// What the watchdog has to say of a handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Report {
    /// It has not yielded for so long.
    Stuck(Duration),
    /// It is past its hard limit, and nothing can stop it.
    Hung(Duration),
    /// The process is aborted now.
    Ending,
}

impl Watchdog {
    /// A watchdog with its thread, which ends when the last reference is dropped. Call it within
    /// the runtime that the handlers run on.
    pub(super) fn start(observers: Observers, may_abort: bool) -> std::io::Result<Arc<Self>> {
        let watchdog = Arc::new(Self {
            begin: Instant::now(),
            last_beat: AtomicU64::new(0),
            watches: Mutex::default(),
            next: AtomicU64::new(0),
            observers,
            may_abort,
            is_hang_reported: AtomicBool::new(false),
        });
        tokio::spawn(beat(Arc::downgrade(&watchdog)));
        let weak = Arc::downgrade(&watchdog);
        thread::Builder::new()
            .name("tierline-watchdog".to_owned())
            .spawn(move || watch(&weak))?;
        Ok(watchdog)
    }

    /// Has a handler watched for as long as what is returned lives.
    pub(super) fn add(
        &self,
        hard_limit: Duration,
        report: impl Fn(Report) + Send + Sync + 'static,
    ) -> Watching<'_> {
        let watch = Arc::new(Watch {
            begin: self.begin,
            polled_since: AtomicU64::new(0),
            hard_limit: now(self.begin).saturating_add(milliseconds(hard_limit)),
            is_reported: AtomicBool::new(false),
            is_hung: AtomicBool::new(false),
            report: Box::new(report),
        });
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.lock().insert(number, watch.clone());
        Watching {
            watchdog: self,
            number,
            watch,
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<Watch>>> {
        self.watches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look(&self) {
        let watches: Vec<_> = self.lock().values().cloned().collect();
        let now = now(self.begin);
        let mut is_any_hung = false;
        for watch in &watches {
            let since = watch.polled_since.load(Ordering::Acquire);
            if since == 0 {
                continue;
            }
            let stuck = Duration::from_millis(now.saturating_sub(since));
            if stuck >= STUCK_AFTER && !watch.is_reported.swap(true, Ordering::Relaxed) {
                (watch.report)(Report::Stuck(stuck));
            }
            if now > watch.hard_limit.saturating_add(milliseconds(HUNG_MARGIN))
                && stuck > HUNG_MARGIN
            {
                is_any_hung = true;
                if !watch.is_hung.swap(true, Ordering::Relaxed) {
                    (watch.report)(Report::Hung(stuck));
                }
            }
        }
        let last_beat = self.last_beat.load(Ordering::Acquire);
        let silent = Duration::from_millis(now.saturating_sub(last_beat));
        if is_any_hung && silent > SILENT_AFTER {
            self.report_hang(silent);
            if self.may_abort {
                for watch in watches {
                    if watch.is_hung.load(Ordering::Relaxed) {
                        (watch.report)(Report::Ending);
                    }
                }
                std::process::abort();
            }
        } else if silent <= SILENT_AFTER {
            self.is_hang_reported.store(false, Ordering::Relaxed);
        }
    }

    fn report_hang(&self, silent: Duration) {
        if self.is_hang_reported.swap(true, Ordering::Relaxed) {
            return;
        }
        let aborts = self.may_abort;
        match aborts {
            true => tracing::error!(
                ?silent,
                "handlers that never yield hold every thread of the runtime: aborting the process"
            ),
            false => tracing::error!(
                ?silent,
                "handlers that never yield hold every thread of the runtime: this worker does nothing until one of \
                 them ends; restart the process, or let the worker abort it (Builder::abort_when_hung)"
            ),
        }
        self.observers.emit(&Event::RuntimeHung { silent, aborts });
    }
}

/// Shows a sign of life as long as the runtime has a thread to do it.
async fn beat(watchdog: Weak<Watchdog>) {
    while let Some(watchdog) = watchdog.upgrade() {
        let now = now(watchdog.begin);
        watchdog.last_beat.store(now, Ordering::Release);
        drop(watchdog);
        tokio::time::sleep(BEAT_EVERY).await;
    }
}

fn watch(watchdog: &Weak<Watchdog>) {
    while let Some(watchdog) = watchdog.upgrade() {
        watchdog.look();
        drop(watchdog);
        thread::sleep(LOOK_EVERY);
    }
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Watch").finish_non_exhaustive()
    }
}

/// The place of a handler among those that are watched. Dropped, it is free: also where the handler is
/// dropped before its end.
pub(super) struct Watching<'a> {
    watchdog: &'a Watchdog,
    number: u64,
    watch: Arc<Watch>,
}

impl<'a> Watching<'a> {
    pub(super) fn watch<F>(self, handler: F) -> Watched<'a, F> {
        Watched {
            handler,
            watching: self,
        }
    }
}

impl Drop for Watching<'_> {
    fn drop(&mut self) {
        self.watchdog.lock().remove(&self.number);
    }
}

/// A handler that tells its watch whenever it is polled.
pub(super) struct Watched<'a, F> {
    handler: F,
    watching: Watching<'a>,
}

impl<F: Future + Unpin> Future for Watched<'_, F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let this = &mut *self;
        let since = now(this.watching.watch.begin).max(1);
        let polled_since = &this.watching.watch.polled_since;
        polled_since.store(since, Ordering::Release);
        let polled = Pin::new(&mut this.handler).poll(cx);
        polled_since.store(0, Ordering::Release);
        polled
    }
}

fn now(begin: Instant) -> u64 {
    milliseconds(begin.elapsed())
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
