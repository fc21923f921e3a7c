//! Keys of tasks that are published within the caller's own transaction.

use std::time::Duration;

use sqlx::{Executor, PgPool, Postgres, Row, Transaction};
use tierline::error::{ErrorKind, PublishError};
use tierline::task::{PublishRequest, Receipt, Unique};
use tierline::{Error, Registry};

use super::{MAP, Ship, Shop, shipping};

const LEVELS: [&str; 3] = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"];

async fn begin(pool: &PgPool, level: &str) -> Transaction<'static, Postgres> {
    let mut tx = pool.begin().await.unwrap();
    let isolation = format!("SET TRANSACTION ISOLATION LEVEL {level}");
    let isolation = sqlx::raw_sql(sqlx::AssertSqlSafe(isolation));
    tx.execute(isolation).await.unwrap();
    // Its snapshot is from now.
    tx.execute("SELECT count(*) FROM tierline.unique_keys")
        .await
        .unwrap();
    tx
}

async fn publish(shop: &Shop, order: u32, unique: impl Into<Unique>) -> Result<Receipt, Error> {
    let publish = shop.app.publish(Ship { order }).unique(unique);
    publish.deadline("30s").await
}

fn is_busy(published: &Result<Receipt, Error>) -> bool {
    let busy = matches!(published, Err(Error::Publish(PublishError::KeyBusy { .. })));
    busy && published.as_ref().is_err_and(Error::is_transient)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_a_transaction_has_taken_is_free_after_a_rollback_and_held_after_a_commit() {
    let (registry, shipped) = shipping();
    let shop = Shop::open(MAP, registry).await;
    let pool = shop.pool().await;
    for level in LEVELS {
        for does_commit in [false, true] {
            let key = format!("{level} {does_commit}");
            let mut tx = begin(&pool, level).await;
            let first = shop.app.publish(Ship { order: 1 }).unique(key.as_str());
            let first = first.within(&mut tx).await.unwrap();
            assert!(!first.is_duplicate);
            let again = shop.app.publish(Ship { order: 2 }).unique(key.as_str());
            let again = again.within(&mut tx).await.unwrap();
            assert!(again.is_duplicate && again.id == first.id, "{again:?}");
            let busy = shop.app.publish(Ship { order: 3 }).unique(key.as_str());
            let busy = busy.deadline("2s").await;
            assert!(is_busy(&busy), "{busy:?}");
            match does_commit {
                true => tx.commit().await.unwrap(),
                false => tx.rollback().await.unwrap(),
            }
            let after = publish(&shop, 4, key.as_str()).await.unwrap();
            assert_eq!(after.is_duplicate, does_commit, "{after:?}");
            assert_eq!(after.id == first.id, does_commit, "{after:?}");
        }
    }
    let working = shop.work();
    shop.heard.until("done", 6).await;
    working.end().await;
    let mut orders = shipped.orders();
    orders.sort_unstable();
    assert_eq!(orders, [1, 1, 1, 4, 4, 4]);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_conflict_aborts_the_transaction_of_the_caller() {
    let shop = Shop::open(MAP, Registry::new()).await;
    let pool = shop.pool().await;
    let held = publish(&shop, 1, "held").await.unwrap();
    let used = shop.app.publish(Ship { order: 1 }).idempotency_key("used");
    used.await.unwrap();
    let mut other = pool.begin().await.unwrap();
    let open = shop.app.publish(Ship { order: 1 }).unique("open");
    open.within(&mut other).await.unwrap();
    pool.execute("CREATE TABLE orders (id integer)")
        .await
        .unwrap();
    for level in LEVELS {
        let mut tx = begin(&pool, level).await;
        tx.execute("SET LOCAL lock_timeout = '7s'").await.unwrap();
        let app = &shop.app;
        let duplicate = app.publish(Ship { order: 2 }).unique("held");
        let duplicate = duplicate.within(&mut tx).await.unwrap();
        assert!(duplicate.is_duplicate && duplicate.id == held.id);
        let refused = app.publish(Ship { order: 2 });
        let refused = refused.unique(Unique::key("held").or_refuse());
        let refused = refused.within(&mut tx).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Conflict, "{refused}");
        let mismatch = app.publish(Ship { order: 2 }).idempotency_key("used");
        let mismatch = mismatch.within(&mut tx).await.unwrap_err();
        assert_eq!(mismatch.kind(), ErrorKind::Conflict, "{mismatch}");
        let busy = app.publish(Ship { order: 2 }).unique("open");
        let busy = busy.deadline("2s").within(&mut tx).await;
        assert!(is_busy(&busy), "{busy:?}");
        // A key that another transaction has committed since this one's snapshot.
        let newer = format!("newer {level}");
        publish(&shop, 1, newer.as_str()).await.unwrap();
        let stale = app.publish(Ship { order: 2 }).unique(newer.as_str());
        let stale = stale.within(&mut tx).await;
        match level {
            "READ COMMITTED" => assert!(stale.unwrap().is_duplicate),
            _ => assert!(is_busy(&stale), "{stale:?}"),
        }
        let free = app
            .publish(Ship { order: 2 })
            .unique(format!("free {level}"));
        assert!(!free.within(&mut tx).await.unwrap().is_duplicate);
        let timeout: String = sqlx::query_scalar("SHOW lock_timeout")
            .fetch_one(&mut *tx)
            .await
            .unwrap();
        assert_eq!(timeout, "7s");
        tx.execute("INSERT INTO orders VALUES (7)").await.unwrap();
        tx.commit().await.unwrap();
    }
    let orders: i64 = sqlx::query_scalar("SELECT count(*) FROM orders")
        .fetch_one(&pool)
        .await
        .unwrap();
    assert_eq!(orders, LEVELS.len() as i64);
    // The first two, and for each level a newer and a free one.
    assert_eq!(shop.rows().await, [0, 2 + 2 * LEVELS.len() as i64, 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_tasks_within_a_transaction_have_receipts_in_order_also_for_duplicates() {
    let shop = Shop::open(MAP, Registry::new()).await;
    let pool = shop.pool().await;
    let held = publish(&shop, 0, "key 3").await.unwrap();
    let mut tx = pool.begin().await.unwrap();
    // More than one statement, of keys in another order, of which each comes twice.
    let requests = (0..150).map(|order| {
        let mut request = PublishRequest::new(&Ship { order }).unwrap();
        request.unique = (order % 3 != 0).then(|| format!("key {}", 149 - order % 75).into());
        request
    });
    let requests: Vec<_> = requests.collect();
    let keys: Vec<_> = requests.iter().map(|it| it.unique.clone()).collect();
    let receipts = shop.app.publish_many_within(requests, &mut tx).await;
    let receipts = receipts.unwrap();
    let mut three = PublishRequest::new(&Ship { order: 1 }).unwrap();
    three.unique = Some("key 3".into());
    let three = shop
        .app
        .publish_many_within([three], &mut tx)
        .await
        .unwrap();
    assert!(three[0].is_duplicate && three[0].id == held.id);
    tx.commit().await.unwrap();
    assert_eq!(receipts.len(), 150);
    for (index, (key, receipt)) in keys.iter().zip(&receipts).enumerate() {
        let first = keys[..index].iter().position(|it| it == key);
        match first.filter(|_| key.is_some()) {
            Some(first) => assert!(receipt.is_duplicate && receipt.id == receipts[first].id),
            None => assert!(!receipt.is_duplicate, "{index}"),
        }
    }
    let stored = receipts.iter().filter(|it| !it.is_duplicate).count();
    assert_eq!(shop.rows().await, [0, 1 + stored as i64, 0]);
}

/// A plan that Postgres made while a table was empty is kept for some time.
#[tokio::test(flavor = "multi_thread")]
async fn keys_and_rows_are_looked_up_by_their_primary_keys_also_if_the_tables_were_vacuumed_empty()
{
    let shop = Shop::open(MAP, Registry::new()).await;
    let mut connection = shop.pool().await.acquire().await.unwrap();
    connection.execute("VACUUM ANALYZE").await.unwrap();
    // As in tierline.publish_keyed.
    let settings = "SET enable_seqscan = off; SET enable_bitmapscan = off; SET plan_cache_mode = force_generic_plan";
    connection.execute(settings).await.unwrap();
    let id = "01998b1c-7d3a-7a5e-b0c4-92f16e08d3b7";
    for (statement, argument, expected) in [
        (
            "(uuid) AS SELECT FROM tierline.scheduled WHERE id = $1",
            id,
            "scheduled_pkey",
        ),
        (
            "(uuid) AS SELECT FROM tierline.ready WHERE id = $1",
            id,
            "ready_pkey",
        ),
        (
            "(uuid) AS SELECT FROM tierline.running WHERE id = $1",
            id,
            "running_pkey",
        ),
        (
            "(uuid) AS DELETE FROM tierline.scheduled WHERE id = $1",
            id,
            "scheduled_pkey",
        ),
        (
            "(uuid) AS DELETE FROM tierline.ready WHERE id = $1",
            id,
            "ready_pkey",
        ),
        (
            "(text) AS SELECT * FROM tierline.unique_keys WHERE app = $1 AND kind = $1 AND key = $1",
            "a",
            "unique_keys_pkey",
        ),
        (
            "(uuid) AS SELECT ctid FROM tierline.unique_keys WHERE row_id = $1",
            id,
            "unique_keys_by_row",
        ),
    ] {
        let prepare = format!("DEALLOCATE ALL; PREPARE look {statement}");
        let prepare = sqlx::raw_sql(sqlx::AssertSqlSafe(prepare));
        connection.execute(prepare).await.unwrap();
        let explain = format!("EXPLAIN (COSTS off) EXECUTE look('{argument}')");
        let explain = sqlx::raw_sql(sqlx::AssertSqlSafe(explain));
        let plan = explain.fetch_all(&mut *connection).await.unwrap();
        let plan: Vec<String> = plan.iter().map(|row| row.get(0)).collect();
        let plan = plan.join("\n");
        assert!(
            plan.contains(&format!(" using {expected} ")),
            "{statement}: {plan}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_duplicate_keeps_no_other_publish_of_its_key_waiting() {
    let shop = Shop::open(MAP, Registry::new()).await;
    let pool = shop.pool().await;
    let end_tasks = async || pool.execute("DELETE FROM tierline.ready").await.unwrap();
    publish(&shop, 0, "again").await.unwrap();
    for pause in (0..100).step_by(8).map(Duration::from_millis) {
        end_tasks().await;
        let mut first = pool.begin().await.unwrap();
        let taking = shop.app.publish(Ship { order: 1 }).unique("again");
        let taken = taking.within(&mut first).await.unwrap();
        assert!(!taken.is_duplicate);
        // The second waits for the key until the first commits, and then stays open.
        let mut second = pool.begin().await.unwrap();
        let waiting = async {
            let waiting = shop.app.publish(Ship { order: 2 }).unique("again");
            waiting.within(&mut second).await.unwrap()
        };
        let committing = async {
            tokio::time::sleep(pause).await;
            first.commit().await.unwrap();
        };
        let (waited, ()) = tokio::join!(waiting, committing);
        assert!(waited.is_duplicate && waited.id == taken.id, "{waited:?}");
        end_tasks().await;
        let third = publish(&shop, 3, "again").await.unwrap();
        assert!(!third.is_duplicate, "{third:?}");
        second.commit().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_waits_sees_what_the_transaction_of_its_duplicate_writes() {
    let (registry, shipped) = shipping();
    let shop = Shop::open(MAP, registry).await;
    let pool = shop.pool().await;
    for (order, delay) in [(1, "0s"), (2, "100ms")] {
        let waiting = shop.app.publish(Ship { order }).delay(delay);
        let unique = Unique::key(format!("index:{order}")).until_started();
        let waiting = waiting.unique(unique.clone()).await.unwrap();
        let mut tx = pool.begin().await.unwrap();
        let again = shop.app.publish(Ship { order: 9 }).unique(unique);
        let again = again.within(&mut tx).await.unwrap();
        assert!(again.is_duplicate && again.id == waiting.id, "{again:?}");
        let working = shop.work();
        // One that falls due after it runs before it.
        let other = shop.app.publish(Ship { order: 7 }).delay("200ms");
        other.await.unwrap();
        shop.heard.until("done", 2 * order as usize - 1).await;
        assert!(!shipped.orders().contains(&order), "{:?}", shipped.orders());
        tx.commit().await.unwrap();
        shop.heard.until("done", 2 * order as usize).await;
        assert!(shipped.orders().contains(&order));
        working.end().await;
    }
}
