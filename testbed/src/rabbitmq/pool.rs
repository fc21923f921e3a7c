//! Servers that tests of this process have left for the tests after them.

use std::sync::{Arc, Mutex, PoisonError};

/// Servers that nobody uses at the moment. They end with the process, by its guard: nothing drops a static.
#[derive(Debug)]
pub(crate) struct Pool<Server> {
    idle: Mutex<Vec<Arc<Server>>>,
}

impl<Server> Pool<Server> {
    pub(crate) const fn new() -> Self {
        Self {
            idle: Mutex::new(Vec::new()),
        }
    }

    /// A server that an earlier test has left.
    pub(crate) fn take(&self) -> Option<Arc<Server>> {
        self.idle().pop()
    }

    /// Leaves a server to later tests, unless this test has failed: the server may be why, or may be in
    /// any state.
    pub(crate) fn leave(&self, server: &Arc<Server>) {
        if !std::thread::panicking() {
            self.idle().push(Arc::clone(server));
        }
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<Arc<Server>>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_goes_to_one_test_after_another_until_one_fails() {
        let pool = Pool::new();
        assert_eq!(pool.take(), None);
        pool.leave(&Arc::new(5672));
        let broker = pool.take().unwrap();
        assert_eq!(pool.take(), None, "it is in use");
        let failing = std::thread::scope(|scope| {
            let test = scope.spawn(|| {
                let _leaves = Leaves(&pool, broker);
                panic!("the test has failed");
            });
            test.join()
        });
        assert!(failing.is_err());
        assert_eq!(pool.take(), None);
    }

    struct Leaves<'p>(&'p Pool<u16>, Arc<u16>);

    impl Drop for Leaves<'_> {
        fn drop(&mut self) {
            self.0.leave(&self.1);
        }
    }
}
