//! Tasks that have waited for too long move to another tier.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::{StreamExt, stream};
use sqlx::{AssertSqlSafe, Executor, PgPool};
use tierline::backlog::{Backlog, BacklogTaskDetails};
use tierline::dead::{Filter, Page};
use tierline::task::PublishRequest;
use tierline::{Context, Outcome, Registry, TaskError, TaskId, TaskOptions, Tierline, Topology};
use tierline_testbed::{database, vhost};
use tokio::time::{Instant, sleep};

use super::{Ship, Shop, gated, work_in};
use crate::worker::{Heard, PATIENCE};

/// Each tier has a group of its own with one slot.
const MAP: &str = r#"
    app = "shop"
    [tiers.high]
    queue = "postgres"
    max_priority = 5
    [tiers.low]
    queue = "postgres"
    promote = { after = "1h", to = "high" }
    [groups.high]
    tiers = ["high"]
    concurrency = 1
    [groups.low]
    tiers = ["low"]
    concurrency = 1
    [tasks]
    "order.ship" = "low"
"#;

/// Publishes orders, and returns their ids.
async fn publish(app: &Tierline, orders: std::ops::Range<u32>) -> Vec<TaskId> {
    let requests = orders.map(|order| PublishRequest::new(&Ship { order }).unwrap());
    let published = app.publish_many(stream::iter(requests));
    published.map(|it| it.unwrap().id).collect().await
}

/// Makes the rows that a condition means as old as this, a millisecond apart in the order of their ids.
async fn age(pool: &PgPool, by: &str, condition: &str) -> u64 {
    let aging = format!(
        "UPDATE tierline.ready SET due_at = now() - interval '{by}' + number * interval '1 ms' \
         FROM (SELECT id, row_number() OVER (ORDER BY id) AS number FROM tierline.ready) AS old \
         WHERE old.id = ready.id AND {condition}"
    );
    let aged = pool.execute(AssertSqlSafe(aging)).await.unwrap();
    aged.rows_affected()
}

/// How many tasks workers say that they have promoted.
fn promoted(heard: &Heard) -> u64 {
    let lines = heard.lines().into_iter();
    let counts = lines.filter_map(|line| line.strip_prefix("promoted low high ")?.parse().ok());
    counts.collect::<Vec<u64>>().iter().sum()
}

async fn until(mut is_so: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so().await {
        assert!(Instant::now() < deadline, "it did not come to be");
        sleep(Duration::from_millis(20)).await;
    }
}

async fn until_in(backlog: &Backlog, id: &TaskId, tier: &str) -> BacklogTaskDetails {
    until(async || backlog.get(id).await.unwrap().summary.tier == tier).await;
    backlog.get(id).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn old_tasks_move_in_order_of_age_and_once_while_young_ones_and_suspects_stay() {
    const OLD: u32 = 700;
    let (registry, open) = gated();
    let shop = Shop::open(MAP, registry).await;
    let (registry, open_beside) = gated();
    let beside = Shop::open_beside(&shop, MAP, registry).await;
    let pool = shop.pool().await;
    publish(&shop.app, 0..OLD).await;
    // Of all priorities, so that the order of age is not that of the index.
    let spread = "UPDATE tierline.ready SET rank = -(hashtext(id::text) & 7)";
    pool.execute(spread).await.unwrap();
    assert_eq!(age(&pool, "2 hours", "true").await, u64::from(OLD));
    let suspects = "UPDATE tierline.ready SET rank = rank + 1000 WHERE id = ANY(ARRAY( \
                    SELECT id FROM tierline.ready ORDER BY due_at LIMIT 3)) RETURNING id";
    pool.execute(suspects).await.unwrap();
    publish(&shop.app, OLD..OLD + 20).await;
    let before: Vec<(uuid::Uuid, i16)> = all(&pool, "id, rank").await;
    let moving = u64::from(OLD) - 3;

    // Two processes carry the rule out. Each is busy with one task of the tier that it leads to.
    let working = work_in(&shop.app, ["high"]);
    let working_beside = work_in(&beside.app, ["high"]);
    until(async || promoted(&shop.heard) + promoted(&beside.heard) >= moving).await;
    let rows = "SELECT tier, count(*) FROM tierline.ready JOIN tierline.backlogs ON backlogs.id = backlog \
                GROUP BY tier ORDER BY tier";
    let rows: Vec<(String, i64)> = sqlx::query_as(rows).fetch_all(&pool).await.unwrap();
    let [_, ready, running] = shop.rows().await;
    assert_eq!(ready + running, i64::from(OLD) + 20);
    assert_eq!(rows.last().unwrap(), &("low".to_owned(), 23));
    assert_eq!(promoted(&shop.heard) + promoted(&beside.heard), moving);

    // A later transaction never moved an older task.
    type Moved = (uuid::Uuid, i64, i16, bool);
    let moved = "SELECT ready.id, ready.xmin::text::bigint, rank, first.tier = 'low' FROM tierline.ready \
                 JOIN tierline.backlogs AS own ON own.id = backlog AND own.tier = 'high' \
                 JOIN tierline.backlogs AS first ON first.id = first_backlog ORDER BY due_at";
    let moved: Vec<Moved> = sqlx::query_as(moved).fetch_all(&pool).await.unwrap();
    assert!(moved.len() > 600, "{}", moved.len());
    assert!(moved.is_sorted_by_key(|(_, transaction, ..)| *transaction));
    let transactions: BTreeSet<i64> = moved.iter().map(|it| it.1).collect();
    assert!(transactions.len() >= 3, "{transactions:?}");
    for (id, _, rank, is_of_low) in &moved {
        let (_, was) = before.iter().find(|(other, _)| other == id).unwrap();
        assert_eq!((*rank, *is_of_low), ((*was).max(-5), true), "{id}");
    }
    let suspects: i64 = sqlx::query_scalar("SELECT count(*) FROM tierline.ready WHERE rank > 0")
        .fetch_one(&pool)
        .await
        .unwrap();
    assert_eq!(suspects, 3);
    open.add_permits(1);
    open_beside.add_permits(10_000);
    beside.heard.until("done", 600).await;
    working.end().await;
    working_beside.end().await;
}

async fn all<T>(pool: &PgPool, columns: &str) -> Vec<T>
where
    T: for<'r> sqlx::FromRow<'r, sqlx::postgres::PgRow> + Send + Unpin,
{
    let query = format!("SELECT {columns} FROM tierline.ready");
    let query = sqlx::query_as(AssertSqlSafe(query));
    query.fetch_all(pool).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_promoted_task_keeps_what_it_is_and_says_where_it_was() {
    let (registry, open) = gated();
    let shop = Shop::open(MAP, registry).await;
    let publish = shop.app.publish(Ship { order: 7 }).header("who", "Ada");
    let publish = publish.priority(9).expires("30d").id("order-7");
    let id = publish.await.unwrap().id;
    let pool = shop.pool().await;
    age(&pool, "61 minutes", "true").await;
    let backlog = shop.app.backlog().unwrap();
    let before = backlog.get(&id).await.unwrap();
    assert_eq!(before.summary.first_tier, None);
    let working = work_in(&shop.app, ["high"]);
    let after = until_in(&backlog, &id, "high").await;
    let mut expected = before.clone();
    expected.summary.tier = "high".to_owned();
    expected.summary.first_tier = Some("low".to_owned());
    expected.summary.priority = 5;
    expected.summary.state = after.summary.state;
    expected.summary.worker = after.summary.worker.clone();
    assert_eq!(after, expected);
    open.add_permits(1);
    shop.heard.until("done", 1).await;
    working.end().await;
    // It ran where the rule says, so it is no stray, and has waited since it was due.
    assert_eq!(shop.heard.count("strayed"), 0, "{:#?}", shop.heard.lines());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_moves_along_a_chain_of_rules_as_far_as_its_age_goes() {
    let map = r#"
        app = "shop"
        [tiers.high]
        queue = "postgres"
        [tiers.low]
        queue = "postgres"
        promote = { after = "2h", to = "high" }
        [tiers.bulk]
        queue = "postgres"
        promote = { after = "1h", to = "low" }
        [groups.rest]
        tiers = ["high", "bulk"]
        concurrency = 1
        [groups.low]
        tiers = ["low"]
        concurrency = 1
        [tasks]
        "order.ship" = "bulk"
    "#;
    let (registry, open) = gated();
    let shop = Shop::open(map, registry).await;
    let backlog = shop.app.backlog().unwrap();
    // The only slot is taken, so that what moves stays where it can be seen.
    let holder = publish(&shop.app, 9..10).await;
    backlog.escalate(&holder[0], "low").await.unwrap();
    let working = work_in(&shop.app, ["low"]);
    shop.heard.until("started", 1).await;
    let ids = publish(&shop.app, 0..3).await;
    let pool = shop.pool().await;
    for (id, by) in ids.iter().zip(["3 hours", "90 minutes", "30 minutes"]) {
        let payload = format!(
            "{{\"order\":{}}}",
            ids.iter().position(|it| it == id).unwrap()
        );
        let condition = format!("payload = '{payload}'");
        assert_eq!(age(&pool, by, &condition).await, 1);
    }
    for (id, tier) in ids.iter().zip(["high", "low", "bulk"]) {
        let found = until_in(&backlog, id, tier).await;
        let first = (tier != "bulk").then(|| "bulk".to_owned());
        assert_eq!(found.summary.first_tier, first);
    }
    open.add_permits(2);
    shop.heard.until("done", 2).await;
    working.end().await;
    assert_eq!(shop.rows().await, [0, 2, 0]);
}

/// Where tasks ran: the tier, its priority and the attempt.
type Runs = Arc<Mutex<Vec<(String, u8, u32)>>>;

fn noting(outcomes: impl Fn(usize) -> Outcome + Send + Sync + 'static) -> (Registry, Runs) {
    let (mut registry, runs) = (Registry::new(), Runs::default());
    let noted = runs.clone();
    let outcomes = Arc::new(outcomes);
    let handler = move |_: Ship, cx: Context| {
        let mut noted = noted.lock().unwrap();
        noted.push((cx.tier().to_owned(), cx.priority(), cx.attempt()));
        let outcome = outcomes(noted.len());
        async move {
            match outcome {
                // A failure that is retried.
                Outcome::Discard(why) => Err(TaskError::from(why.to_string())),
                outcome => Ok(outcome),
            }
        }
    };
    let options = TaskOptions::new().retries(1).backoff("10ms");
    registry.register_with::<Ship, _>(handler, options).unwrap();
    (registry, runs)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_promoted_task_stays_in_its_tier_when_it_runs_again_until_it_is_redriven() {
    let (registry, runs) = noting(|run| match run {
        1 => Outcome::Snooze(Duration::from_millis(10)),
        _ => Outcome::discard("not yet"),
    });
    let shop = Shop::open(MAP, registry).await;
    let publish = shop.app.publish(Ship { order: 1 }).priority(3);
    publish.await.unwrap();
    age(&shop.pool().await, "2 hours", "true").await;
    let working = work_in(&shop.app, ["high"]);
    shop.heard.until("dead order.ship", 1).await;
    working.end().await;
    let high = |attempt| ("high".to_owned(), 3, attempt);
    assert_eq!(*runs.lock().unwrap(), [high(1), high(1), high(2)]);
    assert_eq!(shop.heard.count("strayed"), 0, "{:#?}", shop.heard.lines());
    let letters = shop.app.dead_letters().unwrap();
    let page = letters.list(&Filter::default(), Page::first(10)).await;
    let letter = &page.unwrap().letters[0];
    assert_eq!(letter.tier, "high");
    let redriven = letters.redrive(letter.id).await.unwrap();
    assert_eq!(redriven.tier, "low");
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_are_promoted_to_a_tier_on_the_broker_and_its_workers_take_them() {
    let map = MAP.replace(
        "queue = \"postgres\"\n    max_priority = 5",
        "queue = \"quorum\"",
    );
    let (registry, runs) = noting(|run| match run {
        1 => Outcome::discard("not yet"),
        _ => Outcome::Done,
    });
    let (vhost, database) = tokio::join!(vhost(), database());
    let heard = Heard::default();
    let app = Tierline::builder(Topology::parse(&map).unwrap())
        .amqp(vhost.amqp_url())
        .postgres(database.url())
        .registry(registry)
        .observe(heard.ear())
        .connect()
        .await
        .unwrap();
    app.publish(Ship { order: 1 }).priority(9).await.unwrap();
    let pool = PgPool::connect(database.url()).await.unwrap();
    age(&pool, "2 hours", "true").await;
    let working = work_in(&app, ["high"]);
    heard.until("done", 1).await;
    working.end().await;
    // Also its retry was a row, and a tier without priorities has one for all.
    let high = |attempt| ("high".to_owned(), 4, attempt);
    assert_eq!(*runs.lock().unwrap(), [high(1), high(2)]);
    assert_eq!(heard.count("promoted low high 1"), 1);
    assert_eq!(super::rows(&pool).await, [0, 0, 0]);
    app.close().await;
}
