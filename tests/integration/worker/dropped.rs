//! A worker whose future is dropped, by `select!` for example.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use tierline::task::blocking;
use tierline::{Context, Registry, TaskOptions, Tierline, Topology};
use tierline_testbed::vhost;
use tokio::sync::{mpsc, oneshot};

use super::PATIENCE;
use super::tasks::{Dig, Fill};

const MAP: &str = r#"
    app = "yard"
    [tiers.first]
    queue = "classic"
    [tiers.second]
    queue = "quorum"
    [groups.first]
    tiers = ["first"]
    concurrency = 2
    [groups.second]
    tiers = ["second"]
    concurrency = 2
    [tasks]
    dig = "first"
    fill = "second"
"#;

/// Counts the handlers that run, and says of each that starts how many others run.
#[derive(Clone)]
struct Site {
    running: Arc<AtomicUsize>,
    others: mpsc::UnboundedSender<usize>,
}

/// A handler that runs. It is dropped with the handler's future.
struct Run(Arc<AtomicUsize>);

impl Drop for Run {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Site {
    /// A handler that never ends by itself.
    async fn work(self) {
        let others = self.running.fetch_add(1, Ordering::SeqCst);
        let _run = Run(self.running.clone());
        let _ = self.others.send(others);
        std::future::pending().await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_dropped_leaves_no_handler_running_when_its_tasks_start_again() {
    let vhost = vhost().await;
    let (sender, mut others) = mpsc::unbounded_channel();
    let running = Arc::new(AtomicUsize::new(0));
    let site = Site {
        running: running.clone(),
        others: sender,
    };
    let mut registry = Registry::new();
    let (dig, fill) = (site.clone(), site);
    registry
        .register::<Dig, _>(move |_: Dig| dig.clone().work())
        .unwrap();
    registry
        .register::<Fill, _>(move |_: Fill| fill.clone().work())
        .unwrap();
    let app = Tierline::builder(Topology::parse(MAP).unwrap())
        .amqp(vhost.amqp_url())
        .registry(registry)
        .connect()
        .await
        .unwrap();
    app.publish(Dig {}).await.unwrap();
    app.publish(Dig {}).await.unwrap();
    app.publish(Fill {}).await.unwrap();
    let mut started = async || {
        let next = tokio::time::timeout(PATIENCE, others.recv());
        next.await.unwrap().unwrap()
    };

    for _ in 0..2 {
        let (stop, stopped) = oneshot::channel::<()>();
        let worker = app.work(["first", "second"]).until(std::future::pending());
        let dropped = tokio::spawn(async move {
            tokio::select! {
                ended = worker => panic!("nobody shut it down: {ended:?}"),
                _ = stopped => {}
            }
        });
        let mut most = 0;
        for _ in 0..3 {
            most = most.max(started().await);
        }
        assert_eq!(most, 2, "handlers of a worker that was dropped still run");
        stop.send(()).unwrap();
        dropped.await.unwrap();
    }
    let gone = async {
        while running.load(Ordering::SeqCst) > 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, gone).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_blocking_handler_of_a_worker_that_is_dropped_is_told_to_end() {
    let vhost = vhost().await;
    let (begun, mut has_begun) = mpsc::unbounded_channel();
    let (ended, mut has_ended) = mpsc::unbounded_channel();
    let mut registry = Registry::new();
    registry
        .register::<Dig, _>(blocking(move |_: Dig, cx: Context| {
            let _ = begun.send(());
            let begin = Instant::now();
            while !cx.is_cancelled() && begin.elapsed() < PATIENCE {
                std::thread::yield_now();
            }
            let _ = ended.send(cx.is_cancelled());
        }))
        .unwrap();
    let app = Tierline::builder(Topology::parse(MAP).unwrap())
        .amqp(vhost.amqp_url())
        .registry(registry)
        .connect()
        .await
        .unwrap();
    app.publish(Dig {}).await.unwrap();
    let worker = app.work(["first"]).until(std::future::pending());
    tokio::select! {
        ended = worker => panic!("nobody shut it down: {ended:?}"),
        _ = has_begun.recv() => {}
    }
    assert_eq!(has_ended.recv().await, Some(true));
}

/// How many handlers run when their worker is dropped.
const MANY: u32 = 64;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_handler_that_fails_because_its_worker_was_dropped_leaves_its_task_as_it_was() {
    let vhost = vhost().await;
    let (begun, mut has_begun) = mpsc::unbounded_channel();
    let mut registry = Registry::new();
    registry
        .register_with::<Fill, _>(
            move |_: Fill, cx: Context| {
                let begun = begun.clone();
                async move {
                    let _ = begun.send(());
                    cx.cancelled().await;
                    Err::<(), _>("interrupted")
                }
            },
            // What follows on a failure is a dead letter, at once.
            TaskOptions::new().retries(0),
        )
        .unwrap();
    let map = MAP.replace("concurrency = 2", &format!("concurrency = {MANY}"));
    let app = Tierline::builder(Topology::parse(&map).unwrap())
        .amqp(vhost.amqp_url())
        .registry(registry)
        .connect()
        .await
        .unwrap();
    for _ in 0..MANY {
        app.publish(Fill {}).await.unwrap();
    }
    let worker = app.work(["second"]).until(std::future::pending());
    let all_begun = async {
        for _ in 0..MANY {
            has_begun.recv().await.unwrap();
        }
    };
    tokio::select! {
        ended = worker => panic!("nobody shut it down: {ended:?}"),
        _ = all_begun => {}
    }
    // They come back when no handler is left.
    let back = async {
        while vhost.depth("yard.second").await.unwrap() < MANY {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, back).await.unwrap();
    assert_eq!(vhost.depth("yard.second.dlq").await.unwrap(), 0);
}
