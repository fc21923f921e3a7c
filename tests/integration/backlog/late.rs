//! Tasks that appear before others that were claimed long ago: late commits, retries, escalations.

use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use sqlx::{AssertSqlSafe, Connection, Executor, PgConnection};
use tierline::Registry;
use tierline::task::PublishRequest;
use tokio::time::{sleep, timeout};

use super::{MAP, Ship, Shipped, Shop};
use crate::worker::PATIENCE;

/// How many tasks wait. Two slots are busy with them for at least 20 s.
const BACKLOG: u32 = 8_000;
/// Within this time a task is to be found. It is meant to be two seconds: `cargo xtask bench backlog snapshot`.
const FOUND_WITHIN: Duration = Duration::from_secs(10);

/// A worker that goes through a backlog.
async fn busy() -> (Shop, super::Working, Shipped) {
    let (shipped, mut registry) = (Shipped::default(), Registry::new());
    let noted = shipped.clone();
    registry
        .register::<Ship, _>(move |ship: Ship| {
            noted.add(ship.order);
            sleep(Duration::from_millis(5))
        })
        .unwrap();
    let shop = Shop::open(MAP, registry).await;
    let backlog = (0..BACKLOG).map(|order| PublishRequest::new(&Ship { order }).unwrap());
    let published = shop.app.publish_many(stream::iter(backlog));
    published.for_each(async |it| drop(it.unwrap())).await;
    let working = shop.work();
    until(&shipped, |shipped| shipped.len() >= 200, PATIENCE).await;
    (shop, working, shipped)
}

async fn until(shipped: &Shipped, is_so: impl Fn(&[u32]) -> bool, limit: Duration) {
    let waiting = async {
        while !is_so(&shipped.orders()) {
            sleep(Duration::from_millis(5)).await;
        }
    };
    let waited = timeout(limit, waiting).await;
    assert!(waited.is_ok(), "{} shipped", shipped.orders().len());
}

/// The order is shipped soon, and before the backlog is.
async fn is_found(shop: &Shop, shipped: &Shipped, order: u32) {
    let begin = Instant::now();
    until(shipped, |shipped| shipped.contains(&order), FOUND_WITHIN).await;
    println!("found after {:?}", begin.elapsed());
    let [_, ready, _] = shop.rows().await;
    assert!(ready > 0, "the backlog is empty");
}

/// An order like those of the backlog, due an hour before them.
fn early(table: &str, order: u32) -> AssertSqlSafe<String> {
    AssertSqlSafe(format!(
        "INSERT INTO tierline.{table} (id, due_at, backlog, rank, task, properties, payload) \
         SELECT gen_random_uuid(), due_at - interval '1 hour', backlog, rank, task, properties, \
             convert_to('{{\"order\":{order}}}', 'UTF8') \
         FROM tierline.ready ORDER BY due_at DESC LIMIT 1"
    ))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_whose_transaction_commits_late_is_found_before_those_that_came_after_it() {
    let (shop, working, shipped) = busy().await;
    let mut connection = PgConnection::connect(shop.database.url()).await.unwrap();
    let mut transaction = connection.begin().await.unwrap();
    transaction.execute(early("ready", BACKLOG)).await.unwrap();
    let before = shipped.orders().len();
    until(&shipped, |shipped| shipped.len() >= before + 500, PATIENCE).await;
    assert!(!shipped.orders().contains(&BACKLOG));
    transaction.commit().await.unwrap();
    is_found(&shop, &shipped, BACKLOG).await;
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_that_fell_due_long_ago_is_found_before_those_that_came_after_it() {
    let (shop, working, shipped) = busy().await;
    let mut connection = PgConnection::connect(shop.database.url()).await.unwrap();
    connection
        .execute(early("scheduled", BACKLOG))
        .await
        .unwrap();
    is_found(&shop, &shipped, BACKLOG).await;
    working.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_whose_rank_rises_is_found_before_those_that_it_has_overtaken() {
    let (shop, working, shipped) = busy().await;
    let mut connection = PgConnection::connect(shop.database.url()).await.unwrap();
    let raised: Vec<u8> = sqlx::query_scalar(
        "UPDATE tierline.ready SET rank = rank - 1 \
         WHERE id = (SELECT id FROM tierline.ready ORDER BY rank DESC, due_at DESC, id DESC LIMIT 1) \
         RETURNING payload",
    )
    .fetch_one(&mut connection)
    .await
    .unwrap();
    let raised: Ship = serde_json::from_slice(&raised).unwrap();
    is_found(&shop, &shipped, raised.order).await;
    working.end().await;
}
