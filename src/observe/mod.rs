//! What happens, as it happens: events from which logs, metrics and tests are made.

mod event;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

pub use event::{Event, Purpose, TaskRef};

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

    /// Calls every observer. One that panics does not keep the event from the others.
    pub(crate) fn emit(&self, event: &Event<'_>) {
        for observer in &self.observers {
            if catch_unwind(AssertUnwindSafe(|| observer(event))).is_err() {
                tracing::error!(?event, "an observer panicked");
            }
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
    fn an_observer_that_panics_does_not_keep_the_news_from_the_next() {
        let heard = Arc::new(AtomicUsize::new(0));
        let hearing = heard.clone();
        let mut observers = Observers::default();
        observers.add(|_| panic!("no news, please"));
        observers.add(move |_| {
            hearing.fetch_add(1, Ordering::Relaxed);
        });
        observers.emit(&Event::Connected {
            purpose: Purpose::Publish,
            address: "localhost",
        });
        assert_eq!(heard.load(Ordering::Relaxed), 1);
    }
}
