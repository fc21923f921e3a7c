//! A broker that is away when a run is due.

use std::collections::HashSet;

use tierline_testbed::{Broker, database};

use super::{App, FakeClock, Heard, QUEUE, Running, map, take};

const SCHEDULES: &str = r#"
    [schedules.patient]
    task = "report.build"
    cron = "0 * * * *"
    expires = "10m"
    [schedules.brief]
    task = "report.build"
    cron = "0 * * * *"
    expires = "30s"
    [schedules.often]
    task = "sync.pull"
    cron = "*/20 * * * * *"
    expires = "1m"
"#;

#[tokio::test]
async fn a_run_is_published_when_the_broker_is_back_unless_it_has_expired() {
    let broker = Broker::start().await.unwrap();
    let vhost = broker.vhost().await.unwrap();
    let database = database().await;
    let ours = tierline::Database::new(database.url()).unwrap();
    ours.migrate().await.unwrap();
    let url = vhost.amqp_url();
    let mut app = App::connect(map(SCHEDULES), url, database.url()).await;
    broker.flush_declarations().await.unwrap();
    let schedules = app.app.schedules().unwrap();
    let clock = FakeClock::at("2026-11-16T11:59:59Z");
    let running = Running::start(app.app.scheduler().unwrap().clock(clock.reader()));
    app.leads(true).await;

    broker.stop().await.unwrap();
    clock.set("2026-11-16T12:00:45Z");
    let mut missed = Vec::new();
    while missed.len() < 2 {
        missed.push(
            app.hears(|heard| match heard {
                Heard::Missed { schedule, count } => Some((schedule, count)),
                _ => None,
            })
            .await,
        );
    }
    missed.sort();
    assert_eq!(
        missed,
        [("brief".to_owned(), 1), ("often".to_owned(), 2)],
        "what has expired, or what a newer one follows, is counted while the broker is away"
    );

    broker.start().await.unwrap();
    let mut published = vec![app.hears_published().await, app.hears_published().await];
    running.stop().await;
    published.sort();
    assert_eq!(
        published,
        [
            ("often", "schedule:often:2026-11-16T12:00:40Z"),
            ("patient", "schedule:patient:2026-11-16T12:00:00Z"),
        ]
        .map(|(schedule, id)| (schedule.to_owned(), id.to_owned()))
    );
    // A run whose confirm was lost while the broker started is sent again, under the same id.
    let depth = vhost.depth(QUEUE).await.unwrap();
    let stored = take(&vhost, depth as usize).await;
    let stored: HashSet<_> = stored.iter().map(|it| it.id.to_string()).collect();
    assert_eq!(stored.len(), 2, "{stored:?}");
    let missed = schedules.list().await.unwrap();
    let missed: Vec<u64> = missed.iter().map(|state| state.missed).collect();
    assert_eq!(missed, [1, 2, 0]);
}
