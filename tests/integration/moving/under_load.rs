//! Moves with old and new workers and publishers at once.

use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

use super::*;

/// Each of two publishers publishes one task in this time: 500 a second together.
const EVERY: Duration = Duration::from_millis(4);

/// Publishes orders of its own until it is stopped. Returns how many were confirmed.
struct Publishing {
    stop: oneshot::Sender<()>,
    published: JoinHandle<Vec<u32>>,
}

impl Publishing {
    fn begin(app: Tierline, first: u32) -> Self {
        let (stop, mut stopped) = oneshot::channel();
        let published = tokio::spawn(async move {
            let mut ticks = interval(EVERY);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
            let mut publishing = JoinSet::new();
            for order in first.. {
                tokio::select! {
                    _ = &mut stopped => break,
                    _ = ticks.tick() => {}
                }
                let app = app.clone();
                publishing.spawn(async move {
                    let publish = app.publish(Ship { order });
                    match order % 10 {
                        0 => publish.delay("400ms").await,
                        _ => publish.await,
                    }
                    .map(|_| order)
                });
            }
            let published = publishing.join_all().await;
            published.into_iter().map(Result::unwrap).collect()
        });
        Self { stop, published }
    }

    async fn end(self) -> Vec<u32> {
        self.stop.send(()).unwrap();
        self.published.await.unwrap()
    }
}

/// Moves the tier with two old and two new workers, and a publisher of each map. Returns how many tasks were published,
/// and how many ran more than once.
async fn move_under_load(servers: &Servers, before: &str, now: &str) -> (usize, usize) {
    let shipped = Shipped::default();
    let old = [
        servers.worker(before, &shipped).await,
        servers.worker(before, &shipped).await,
    ];
    let old_publishing = Publishing::begin(old[0].app.clone(), 0);
    old[0].heard.until("done order.ship", 100).await;
    let new = [
        servers.worker(now, &shipped).await,
        servers.worker(now, &shipped).await,
    ];
    let new_publishing = Publishing::begin(new[0].app.clone(), 500_000);
    new[1].heard.until("done order.ship", 400).await;
    let refused = servers.moved(now, false).await;
    assert!(refused.waits(), "{refused}");
    let mut published = old_publishing.end().await;
    for process in old {
        process.end().await;
    }
    let enough = shipped.number() + 500;
    let deadline = Instant::now() + PATIENCE;
    while shipped.number() < enough {
        assert!(Instant::now() < deadline, "only {} ran", shipped.number());
        sleep(Duration::from_millis(20)).await;
    }
    // The old queue goes while the new home is busy.
    servers.move_on(now).await;
    published.extend(new_publishing.end().await);
    let deadline = Instant::now() + PATIENCE;
    let missing = || {
        let shipped = shipped.orders();
        let missing = published.iter().filter(|it| !shipped.contains_key(it));
        missing.count()
    };
    while missing() > 0 {
        assert!(Instant::now() < deadline, "{} are lost", missing());
        sleep(Duration::from_millis(50)).await;
    }
    for process in new {
        process.end().await;
    }
    let twice = shipped.orders().into_values().filter(|times| *times > 1);
    (published.len(), twice.count())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tier_moves_to_postgres_and_back_and_to_its_next_generation_and_loses_nothing() {
    let servers = Servers::new().await;
    for (before, now, what) in [
        (QUORUM, TO_POSTGRES, "quorum to postgres"),
        (POSTGRES, FROM_POSTGRES, "postgres to quorum"),
        (QUORUM, SECOND, "generation 1 to 2"),
    ] {
        let (published, twice) = move_under_load(&servers, before, now).await;
        println!("{what}: {published} tasks published, none lost, {twice} ran twice");
        let has_old = servers.has_queue("shop.normal").await;
        assert_eq!(has_old, now == FROM_POSTGRES, "{what}");
    }
}
