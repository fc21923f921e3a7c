//! A worker that has lost a task and comes back: nothing that it says about its run counts.

use std::sync::Arc;
use std::time::Duration;

use sqlx::PgPool;
use tierline::dead::{Filter, Page};
use tierline::{Outcome, Registry, TaskOptions};
use tierline_testbed::Network;
use tokio::sync::Semaphore;

use super::{MAP, Ship, Shop, behind_a_proxy};

/// What the worker that lost the task says about its run.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Late {
    Done,
    Retry,
    Snooze,
    Discard,
    Dead,
    /// Its shutdown does not wait for the handler.
    GivesBack,
}

impl Late {
    fn outcome(self) -> Outcome {
        match self {
            Late::Done | Late::GivesBack => Outcome::Done,
            Late::Retry => Outcome::retry("too late"),
            Late::Snooze => Outcome::Snooze(Duration::ZERO),
            Late::Discard => Outcome::discard("too late"),
            Late::Dead => Outcome::dead("too late"),
        }
    }
}

/// One task at a time, so that the worker that lost a task does not claim it again.
fn map() -> String {
    MAP.replace("concurrency = 2", "concurrency = 1")
        .replace("prefetch = 4", "prefetch = 1")
}

/// Handlers that wait for a permit each, and then end so.
fn ending_with(
    outcome: impl Fn() -> Outcome + Send + Sync + 'static,
) -> (Registry, Arc<Semaphore>) {
    let open = Arc::new(Semaphore::new(0));
    let (gate, mut registry) = (open.clone(), Registry::new());
    let options = TaskOptions::new().retries(5).backoff("1ms");
    let handler = move |_: Ship| {
        let (gate, outcome) = (gate.clone(), outcome());
        async move {
            gate.acquire().await.unwrap().forget();
            outcome
        }
    };
    registry.register_with::<Ship, _>(handler, options).unwrap();
    (registry, open)
}

/// Puts the run back as recovery does with those of a dead process.
async fn take_over(pool: &PgPool) {
    let columns = "id, due_at, rank, is_held, backlog, task, name, properties, payload";
    let statement = format!(
        "WITH back AS (DELETE FROM tierline.running RETURNING running.*) \
         INSERT INTO tierline.ready ({columns}) SELECT {columns} FROM back"
    );
    let moved = sqlx::query(sqlx::AssertSqlSafe(statement)).execute(pool);
    assert_eq!(moved.await.unwrap().rows_affected(), 1);
}

/// The token and the worker of the one task that runs.
async fn run(pool: &PgPool) -> (i64, i64) {
    let run = sqlx::query_as("SELECT token, worker FROM tierline.running");
    run.fetch_one(pool).await.unwrap()
}

async fn changes_nothing(late: Late) {
    let (registry, open_first) = ending_with(move || late.outcome());
    let first = Shop::open(&map(), registry).await;
    first.app.publish(Ship { order: 1 }).await.unwrap();
    let grace = if late == Late::GivesBack {
        "10ms"
    } else {
        "1m"
    };
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let worker = first.app.work(["all"]).grace(grace);
    let first_working = tokio::spawn(worker.until(async {
        let _ = stopped.await;
    }));
    first.heard.until("started", 1).await;
    let pool = first.pool().await;
    take_over(&pool).await;

    let (registry, open_second) = ending_with(|| Outcome::Snooze(Duration::from_secs(3_600)));
    let second = Shop::open_beside(&first, &map(), registry).await;
    let second_working = second.work();
    second.heard.until("started", 1).await;
    let of_second = run(&pool).await;
    if late != Late::GivesBack {
        open_first.add_permits(1);
    }
    // A worker ends when everything that it has to say is in the database.
    stop.send(()).unwrap();
    first_working.await.unwrap().unwrap();
    assert_eq!(
        (first.rows().await, run(&pool).await),
        ([0, 0, 1], of_second)
    );

    open_second.add_permits(1);
    second.heard.until("snoozed", 1).await;
    second_working.end().await;
    assert_eq!(first.rows().await, [1, 0, 0]);
    let letters = first.app.dead_letters().unwrap();
    let dead = letters.list(&Filter::default(), Page::first(10)).await;
    assert!(dead.unwrap().letters.is_empty());
    for event in ["retried", "snoozed", "dead"] {
        assert_eq!(first.heard.count(event), 0, "{:#?}", first.heard.lines());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_success_does_not_finish_the_run_of_another_worker() {
    changes_nothing(Late::Done).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_failure_does_not_retry_the_run_of_another_worker() {
    changes_nothing(Late::Retry).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_snooze_does_not_put_the_run_of_another_worker_off() {
    changes_nothing(Late::Snooze).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_discard_does_not_end_the_run_of_another_worker() {
    changes_nothing(Late::Discard).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_permanent_failure_does_not_dead_letter_the_run_of_another_worker() {
    changes_nothing(Late::Dead).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_shutdown_does_not_give_the_run_of_another_worker_back() {
    changes_nothing(Late::GivesBack).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn heartbeats_of_a_worker_that_lost_a_task_do_not_extend_the_lease_of_the_next_run() {
    let (registry, open_first) = ending_with(|| Outcome::Done);
    let first = Shop::open(&map(), registry).await;
    first.app.publish(Ship { order: 1 }).await.unwrap();
    let working = first.work();
    first.heard.until("started", 1).await;
    let pool = first.pool().await;
    take_over(&pool).await;
    let (registry, _never) = ending_with(|| Outcome::Done);
    let (proxy, url) = behind_a_proxy(first.database.url()).await;
    let second = Shop::open_beside_at(&first, &url, &map(), registry).await;
    let second_working = second.work();
    second.heard.until("started", 1).await;
    // The second one is cut off. The first one lives on, and takes the task over from it.
    proxy.set(Network::Silent);
    open_first.add_permits(2);
    first.heard.until("started", 2).await;
    first.heard.until("done", 2).await;
    proxy.set(Network::Good);
    second.heard.until("lease lost", 1).await;
    second_working.end().await;
    working.end().await;
    assert_eq!(first.rows().await, [0, 0, 0]);
}

/// A worker that was away for a while may claim the tasks again that it lost, before it knows that it lost them.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_claims_its_lost_tasks_again_gives_each_of_them_back() {
    const TASKS: u32 = 8;
    let map = MAP
        .replace("concurrency = 2", "concurrency = 1")
        .replace("prefetch = 4", "prefetch = 40");
    let (registry, _closed) = super::gated();
    let shop = Shop::open(&map, registry).await;
    for order in 0..TASKS {
        shop.app.publish(Ship { order }).await.unwrap();
    }
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let worker = shop.app.work(["all"]).grace("10ms");
    let working = tokio::spawn(worker.until(async { drop(stopped.await) }));
    shop.heard.until("started", 1).await;
    let pool = shop.pool().await;
    let tokens = async || -> Vec<i64> {
        let tokens = sqlx::query_scalar("SELECT token FROM tierline.running");
        tokens.fetch_all(&pool).await.unwrap()
    };
    let before = tokens().await;
    let columns = "id, due_at, rank, is_held, backlog, task, name, properties, payload";
    let statement = format!(
        "WITH back AS (DELETE FROM tierline.running RETURNING running.*) \
         INSERT INTO tierline.ready ({columns}) SELECT {columns} FROM back"
    );
    let lost = sqlx::query(sqlx::AssertSqlSafe(statement));
    lost.execute(&pool).await.unwrap();
    let deadline = tokio::time::Instant::now() + crate::worker::PATIENCE;
    while tokens().await.len() < TASKS as usize {
        assert!(tokio::time::Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(tokens().await.iter().all(|token| !before.contains(token)));
    stop.send(()).unwrap();
    working.await.unwrap().unwrap();
    assert_eq!(shop.rows().await, [0, TASKS.into(), 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_worker_is_found_although_the_clock_of_the_server_went_back() {
    let (registry, shipped) = super::shipping();
    let shop = Shop::open(MAP, registry).await;
    shop.app.publish(Ship { order: 7 }).await.unwrap();
    let pool = shop.pool().await;
    // A process that sent its last heartbeat before the clock was set back by an hour.
    let dead = "WITH dead AS (INSERT INTO tierline.workers (app, name, version, leases, heartbeat_at) \
                VALUES ('shop', 'dead:1', '1', '{\"normal\": 2}', now() + interval '1 hour') RETURNING id), \
                taken AS (DELETE FROM tierline.ready RETURNING ready.*) \
                INSERT INTO tierline.running (id, due_at, token, worker, backlog, rank, task, payload) \
                SELECT taken.id, due_at, 1, dead.id, backlog, rank, task, payload FROM taken, dead";
    let moved = sqlx::query(dead).execute(&pool).await.unwrap();
    assert_eq!(moved.rows_affected(), 1);
    let working = shop.work();
    shop.heard.until("done", 1).await;
    working.end().await;
    assert_eq!(shipped.orders(), [7]);
}
