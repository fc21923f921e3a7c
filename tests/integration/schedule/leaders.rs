//! One leads, the others take over.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::SystemTime;

use tierline::task::{Publish, PublishFuture, PublishRequest, Receipt};
use tokio::sync::{Notify, Semaphore};

use super::{App, Heard, LIMIT, Running, World, map, take, until};

const EVERY_SECOND: &str = r#"
    [schedules.tick]
    task = "sync.pull"
    cron = "* * * * * *"
    expires = "1m"
    payload = { from = "clock" }
"#;

#[tokio::test]
async fn a_run_carries_all_that_a_worker_needs() {
    let world = World::new().await;
    let app = world.app(map(EVERY_SECOND)).await;
    let running = app.start();
    let runs = take(&world.vhost, 2).await;
    running.stop().await;
    let due = &runs[0].headers["schedule-due-at"];
    assert_eq!(runs[0].task, "sync.pull");
    assert_eq!(runs[0].id.as_str(), format!("schedule:tick:{due}"));
    assert_eq!(runs[0].headers["schedule"], "tick");
    assert_eq!(runs[0].payload, br#"{"from":"clock"}"#);
    let lives = runs[0].expires_at.unwrap().duration_since(super::time(due));
    let lives = lives.unwrap().as_secs_f64();
    assert!(
        (50.0..70.0).contains(&lives),
        "it expires {lives} s after it was due"
    );
}

#[tokio::test]
async fn one_of_many_leads_and_another_takes_over_when_it_ends() {
    let world = World::new().await;
    let mut first = world.app(map(EVERY_SECOND)).await;
    let mut second = world.app(map(EVERY_SECOND)).await;
    let first_running = first.start();
    first.leads(true).await;
    let second_running = second.start();
    first.hears_published().await;
    first.hears_published().await;
    assert_eq!(second.heard_so_far(), [], "one leads");

    first_running.stop().await;
    first.leads(false).await;
    second.leads(true).await;
    second.hears_published().await;
    second_running.stop().await;
}

#[tokio::test]
async fn leaders_that_die_lose_no_run_uncounted_and_repeat_none_under_another_id() {
    let schedules: String = (0..10)
        .map(|number| EVERY_SECOND.replace("tick", &format!("tick-{number}")))
        .collect();
    let world = World::new().await;
    let mut schedulers: Vec<(App, Option<Running>)> = Vec::new();
    for _ in 0..3 {
        let app = world.app(map(&schedules)).await;
        let running = app.start();
        schedulers.push((app, Some(running)));
    }
    for _ in 0..2 {
        let leader = until(async || {
            schedulers.iter_mut().position(|(app, running)| {
                running.is_some() && app.heard_so_far().contains(&super::Heard::Leads(true))
            })
        })
        .await;
        for _ in 0..20 {
            schedulers[leader].0.hears_published().await;
        }
        schedulers[leader].1.take().unwrap().kill().await;
    }
    let (last, running) = schedulers
        .iter_mut()
        .find(|(_, running)| running.is_some())
        .unwrap();
    last.leads(true).await;
    for _ in 0..30 {
        last.hears_published().await;
    }
    running.take().unwrap().stop().await;

    let depth = world.vhost.depth(super::QUEUE).await.unwrap();
    let mut runs: HashMap<String, Vec<SystemTime>> = HashMap::new();
    for run in take(&world.vhost, depth as usize).await {
        let due = super::time(&run.headers["schedule-due-at"]);
        assert_eq!(
            run.id.as_str(),
            format!(
                "schedule:{}:{}",
                run.headers["schedule"], run.headers["schedule-due-at"]
            )
        );
        runs.entry(run.headers["schedule"].clone())
            .or_default()
            .push(due);
    }
    for state in last.app.schedules().unwrap().list().await.unwrap() {
        let runs = &runs[&state.schedule.name];
        let distinct: HashSet<SystemTime> = runs.iter().copied().collect();
        let first = distinct.iter().min().unwrap();
        let last_due = state.last_due.unwrap();
        let due = last_due.duration_since(*first).unwrap().as_secs() + 1;
        // What was due before the first that came was missed.
        let accounted = state.published + state.missed;
        assert!(
            (due..=due + state.missed).contains(&accounted),
            "every run is accounted for: {due} were due, {state:?}"
        );
        let extra = distinct.len() as u64 - state.published;
        assert!(extra <= 2, "{extra} runs were in flight at two kills");
        assert!(
            runs.len() - distinct.len() <= 2,
            "only those in flight may come twice"
        );
    }
}

/// A publisher that confirms when it is allowed to.
struct Gate {
    asked: Notify,
    open: Arc<Semaphore>,
}

impl Gate {
    fn closed() -> Arc<Self> {
        Arc::new(Self {
            asked: Notify::new(),
            open: Arc::new(Semaphore::new(0)),
        })
    }
}

impl Publish for Gate {
    fn publish(&self, request: PublishRequest) -> PublishFuture<'_> {
        self.asked.notify_one();
        Box::pin(async move {
            self.open.acquire().await.unwrap().forget();
            let id = request.id.unwrap();
            Ok(Receipt::new(id, "main", SystemTime::now()))
        })
    }
}

#[tokio::test]
async fn a_leader_that_lost_its_lease_does_not_move_the_state() {
    let world = World::new().await;
    let mut app = world.app(map(EVERY_SECOND)).await;
    let gate = Gate::closed();
    let running = Running::start(app.app.scheduler().unwrap().publisher(gate.clone()));
    tokio::time::timeout(LIMIT, gate.asked.notified())
        .await
        .unwrap();
    let before = app.app.schedules().unwrap().get("tick").await.unwrap();

    // As if it had slept and another one had led meanwhile.
    world
        .execute(
            "UPDATE tierline.schedule_leaders SET holder = 'another', epoch = epoch + 1, \
             expires_at = clock_timestamp() + interval '1 hour'",
        )
        .await;
    gate.open.add_permits(1);
    app.hears_published().await;
    app.leads(false).await;
    let after = app.app.schedules().unwrap().get("tick").await.unwrap();
    assert_eq!((after.next_due, after.published), (before.next_due, 0));
    running.stop().await;
}

/// Panics at the first run, and publishes the others.
struct PanicsOnce {
    publisher: Arc<dyn Publish>,
    has_panicked: std::sync::atomic::AtomicBool,
}

impl Publish for PanicsOnce {
    fn publish(&self, request: PublishRequest) -> PublishFuture<'_> {
        let has_panicked = &self.has_panicked;
        assert!(
            has_panicked.swap(true, std::sync::atomic::Ordering::Relaxed),
            "the first run"
        );
        self.publisher.publish(request)
    }
}

#[tokio::test]
async fn a_scheduler_that_panics_is_started_again_and_leads_again() {
    let world = World::new().await;
    let mut app = world.app(map(EVERY_SECOND)).await;
    let publisher = Arc::new(PanicsOnce {
        publisher: app.app.publisher(),
        has_panicked: Default::default(),
    });
    let running = Running::start(app.app.scheduler().unwrap().publisher(publisher));
    let cause = app.hears(|heard| match heard {
        Heard::Restarted { service, cause } if service == "scheduler" => Some(cause),
        _ => None,
    });
    assert!(cause.await.contains("the first run"));
    app.leads(true).await;
    app.hears_published().await;
    running.stop().await;
}

#[tokio::test]
async fn schedules_go_on_after_the_database_has_cut_every_connection() {
    let world = World::new().await;
    let mut app = world.app(map(EVERY_SECOND)).await;
    let running = app.start();
    app.hears_published().await;
    for _ in 0..3 {
        world.database.kill_connections().await.unwrap();
        app.heard_so_far();
        app.hears_published().await;
        app.hears_published().await;
    }
    running.stop().await;
}
