//! Events: observers get one for every connection, start, outcome and failure, for logs, metrics and
//! tests.

mod event;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

pub use event::{Event, PublishResult, Purpose, TaskRef};

/// The registered observers. Cheap to clone; without observers an event costs nothing.
#[derive(Clone, Default)]
pub(crate) struct Observers {
    observers: Vec<Arc<Observer>>,
}

type Observer = dyn Fn(&Event<'_>) + Send + Sync;

impl Observers {
    pub(crate) fn add(&mut self, observer: impl Fn(&Event<'_>) + Send + Sync + 'static) {
        self.observers.push(Arc::new(observer));
    }

    /// Before all others: what they hear is counted already.
    #[cfg(feature = "prometheus")]
    pub(crate) fn add_first(&mut self, observer: impl Fn(&Event<'_>) + Send + Sync + 'static) {
        self.observers.insert(0, Arc::new(observer));
    }

    /// Whether nobody is told of anything: then an event need not be made.
    pub(crate) fn is_empty(&self) -> bool {
        self.observers.is_empty()
    }

    /// Calls every observer. One that panics does not keep the event from the others.
    pub(crate) fn emit(&self, event: &Event<'_>) {
        for observer in &self.observers {
            if catch_unwind(AssertUnwindSafe(|| observer(event))).is_err() {
                tracing::error!(?event, "an observer panicked");
            }
        }
    }
}

/// Emits that a connection is open, and then that it is lost or closed.
pub(crate) struct ObservedConnection<'a> {
    observers: &'a Observers,
    purpose: Purpose,
    is_lost: bool,
}

impl<'a> ObservedConnection<'a> {
    pub(crate) fn opened(observers: &'a Observers, purpose: Purpose, address: &str) -> Self {
        observers.emit(&Event::Connected { purpose, address });
        Self {
            observers,
            purpose,
            is_lost: false,
        }
    }

    pub(crate) fn lost(mut self, cause: &str) {
        self.is_lost = true;
        let purpose = self.purpose;
        self.observers.emit(&Event::Disconnected { purpose, cause });
    }
}

impl Drop for ObservedConnection<'_> {
    fn drop(&mut self) {
        if !self.is_lost {
            let purpose = self.purpose;
            self.observers.emit(&Event::ConnectionClosed { purpose });
        }
    }
}

impl fmt::Debug for Observers {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} observers", self.observers.len())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn an_observer_that_panics_does_not_keep_the_event_from_the_next() {
        let count = Arc::new(AtomicUsize::new(0));
        let counter = count.clone();
        let mut observers = Observers::default();
        observers.add(|_| panic!("an observer's own mistake"));
        observers.add(move |_| {
            counter.fetch_add(1, Ordering::Relaxed);
        });
        observers.emit(&Event::Connected {
            purpose: Purpose::Publish,
            address: "localhost",
        });
        assert_eq!(count.load(Ordering::Relaxed), 1);
    }
}
