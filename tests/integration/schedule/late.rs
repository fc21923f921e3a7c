//! A run that a worker gets too late.

use std::time::{Duration, SystemTime};

use tierline::observe::Event;
use tierline::{Registry, Tierline};
use tokio::sync::mpsc::unbounded_channel;
use tokio::time::timeout;

use super::{FakeClock, LIMIT, Running, World, map};

const HOURLY: &str = r#"
    [schedules.hourly]
    task = "report.build"
    cron = "0 * * * *"
    expires = "10m"
    missed = "once"
"#;

#[tokio::test]
async fn a_worker_that_gets_a_run_too_late_skips_and_tells_it() {
    let world = World::new().await;
    let (tell, mut expired) = unbounded_channel();
    let app = Tierline::builder(map(HOURLY))
        .amqp(world.vhost.amqp_url())
        .postgres(world.database.url())
        .registry(Registry::new())
        .observe(move |event| {
            if let Event::Expired { task, .. } = event {
                let _ = tell.send(task.id.to_string());
            }
        })
        .connect()
        .await
        .unwrap();
    let clock = FakeClock::at("2026-11-16T11:59:30Z");
    let scheduler = app.scheduler().unwrap().clock(clock.reader());
    let running = Running::start(scheduler);
    super::until(async || {
        let states = app.schedules().unwrap().list().await.unwrap();
        (!states.is_empty()).then_some(())
    })
    .await;
    running.stop().await;

    // Nearly expired when it is published, it has expired when a worker gets it.
    clock.set("2026-11-16T12:09:59.7Z");
    let running = Running::start(app.scheduler().unwrap().clock(clock.reader()));
    super::until(async || {
        let depth = world.vhost.depth(super::QUEUE).await.unwrap();
        (depth > 0).then_some(())
    })
    .await;
    let stored = SystemTime::now();
    super::until(async || {
        let waited = stored.elapsed().unwrap_or_default();
        (waited > Duration::from_millis(300)).then_some(())
    })
    .await;
    let working = tokio::spawn(app.work(["all"]).until(std::future::pending()));
    let skipped = timeout(LIMIT, expired.recv()).await.unwrap();
    assert_eq!(
        skipped.as_deref(),
        Some("schedule:hourly:2026-11-16T12:00:00Z")
    );
    working.abort();
    running.stop().await;
}
