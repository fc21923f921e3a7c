//! One way to run the long-running parts: the groups of a worker, the collector, the scheduler, the
//! connections for publishing. Each is started again after a panic, and each ends when the process is asked to.

use std::any::Any;
use std::future::Future;
use std::panic::AssertUnwindSafe;
#[cfg(feature = "postgres")]
use std::pin::pin;
use std::time::Duration;

use futures_util::FutureExt;
#[cfg(feature = "postgres")]
use futures_util::future::{Either, select};
use tokio::sync::watch;
#[cfg(feature = "postgres")]
use tokio::time::timeout;
use tokio::time::{Instant, sleep};
use tokio_util::task::AbortOnDropHandle;

use crate::Error;
use crate::backoff::Backoff;
use crate::observe::{Event, Observers};

/// A part of the app that runs until it is told to stop.
#[derive(Debug, Clone)]
pub(crate) struct Service {
    name: String,
    observers: Observers,
}

impl Service {
    /// `name` is what events and logs call it: `collector`, `group urgent`.
    pub(crate) fn new(name: impl Into<String>, observers: &Observers) -> Self {
        Self {
            name: name.into(),
            observers: observers.clone(),
        }
    }

    /// Runs what `start` makes until it ends. A panic, which only a bug can cause, is reported as
    /// [`Event::Restarted`]; after a pause `start` is called again. So `start` must make everything anew that
    /// the panic may have left half-done.
    pub(crate) async fn run<T, F: Future<Output = T>>(&self, mut start: impl FnMut() -> F) -> T {
        let mut backoff = Backoff::new();
        loop {
            let begin = Instant::now();
            // `start` is inside, so that a panic in it is caught too.
            let running = async { start().await };
            let panicked = match AssertUnwindSafe(running).catch_unwind().await {
                Ok(ended) => return ended,
                Err(panicked) => panicked,
            };
            let after = backoff.next_after(begin.elapsed());
            self.report(&message_of(&*panicked), after);
            sleep(after).await;
        }
    }

    /// The same until `shutdown` completes. What runs then is told by the receiver that `start` was given, which
    /// says `true`, and has `limit` to end; `None` where it did not.
    #[cfg(feature = "postgres")]
    pub(crate) async fn run_until<T, F: Future<Output = T>>(
        &self,
        shutdown: impl Future<Output = ()>,
        limit: Duration,
        mut start: impl FnMut(watch::Receiver<bool>) -> F,
    ) -> Option<T> {
        let (stop, stopping) = watch::channel(false);
        let running = pin!(self.run(|| start(stopping.clone())));
        match select(pin!(shutdown), running).await {
            Either::Left(((), running)) => {
                stop.send_replace(true);
                timeout(limit, running).await.ok()
            }
            Either::Right((ended, _)) => Some(ended),
        }
    }

    fn report(&self, cause: &str, after: Duration) {
        let service = self.name.as_str();
        tracing::error!(
            service,
            cause,
            ?after,
            "panicked, which is a bug; it is started again"
        );
        let restarted = Event::Restarted {
            service,
            cause,
            after,
        };
        self.observers.emit(&restarted);
    }
}

fn message_of(panicked: &(dyn Any + Send)) -> String {
    let text = panicked.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panicked.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("a panic without a message").to_owned()
}

/// The signals that ask the process to end: SIGTERM and SIGINT (Ctrl-C), or Ctrl-C where there is no SIGTERM.
#[derive(Debug)]
pub(crate) struct Termination {
    times: watch::Receiver<u32>,
    /// Listens as long as this value lives.
    _listening: AbortOnDropHandle<()>,
}

impl Termination {
    /// # Errors
    /// [`Error::NoSignals`] where the system does not pass them on.
    pub(crate) fn listen() -> Result<Self, Error> {
        let mut signals = Signals::new().map_err(|cause| Error::NoSignals { cause })?;
        let (asked, times) = watch::channel(0_u32);
        let listening = tokio::spawn(async move {
            while signals.next().await {
                asked.send_modify(|times| *times += 1);
            }
        });
        Ok(Self {
            times,
            _listening: AbortOnDropHandle::new(listening),
        })
    }

    /// Completes when the process was asked to end so many times.
    pub(crate) fn asked(&self, wanted: u32) -> impl Future<Output = ()> + Send + 'static {
        let mut times = self.times.clone();
        async move {
            if times.wait_for(|times| *times >= wanted).await.is_err() {
                // Nobody listens any more, so nobody can ask.
                std::future::pending().await
            }
        }
    }
}

#[cfg(unix)]
struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    fn new() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    /// Waits for the next one; `false` where none can come any more.
    async fn next(&mut self) -> bool {
        tokio::select! {
            came = self.terminate.recv() => came.is_some(),
            came = self.interrupt.recv() => came.is_some(),
        }
    }
}

#[cfg(not(unix))]
struct Signals;

#[cfg(not(unix))]
impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self)
    }

    /// Waits for the next one; `false` where none can come any more.
    async fn next(&mut self) -> bool {
        tokio::signal::ctrl_c().await.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_service_that_panics_is_started_again_with_one_event_for_each_panic() {
        let restarts = Arc::new(Mutex::new(Vec::new()));
        let mut observers = Observers::default();
        observers.add({
            let restarts = restarts.clone();
            move |event| {
                if let Event::Restarted { service, cause, .. } = event {
                    restarts.lock().unwrap().push(format!("{service}: {cause}"));
                }
            }
        });
        let mut starts = 0;
        let service = Service::new("collector", &observers);
        let ended = service.run(|| {
            starts += 1;
            let start = starts;
            assert_ne!(start, 1, "before the first await");
            async move {
                tokio::task::yield_now().await;
                assert_ne!(start, 2, "after it");
                start
            }
        });
        assert_eq!(ended.await, 3);
        let restarts = restarts.lock().unwrap();
        assert_eq!(restarts.len(), 2, "{restarts:?}");
        assert!(restarts[0].starts_with("collector: ") && restarts[0].contains("before the first"));
        assert!(restarts[1].contains("after it"), "{restarts:?}");
    }
}
