//! What operators see and change at run time.

mod processes;
mod rollups;

use std::time::Duration;

use tierline::Tierline;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

use crate::worker::PATIENCE;

/// A worker of an app.
struct Working {
    stop: oneshot::Sender<()>,
    ended: JoinHandle<Result<(), tierline::Error>>,
}

impl Working {
    async fn end(self) {
        self.stop.send(()).unwrap();
        self.ended.await.unwrap().unwrap();
    }

    /// Ends it as a crash would: it says nothing to anybody.
    async fn kill(self) {
        self.ended.abort();
        let _ = self.ended.await;
    }
}

/// Works in these groups of an app.
fn work_in(app: &Tierline, groups: impl IntoIterator<Item = impl Into<String>>) -> Working {
    let (stop, stopped) = oneshot::channel();
    let worker = app.work(groups).grace(Duration::from_secs(5));
    let ended = tokio::spawn(worker.until(async {
        let _ = stopped.await;
    }));
    Working { stop, ended }
}

/// Looks until it is so.
async fn until(mut is_so: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so().await {
        assert!(Instant::now() < deadline, "it did not come to be");
        sleep(Duration::from_millis(20)).await;
    }
}
